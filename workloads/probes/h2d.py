"""Copies between host and devices, and between devices."""

from collections.abc import Iterator
from functools import partial

import torch

from gpurun.workloads.limits import check
from gpurun.workloads.probes.base import KIB, MIB, Case, Cases, Probe, Site, powers

MEMORY_ONLY = "skipped: copies from and to a GPU need CUDA; here only those within host memory are timed"


def h2d(max_mib: int = 64) -> Probe:
    """Copies of 4 KiB to `max_mib` MiB, from and to pinned and pageable memory, and between devices.

    Args:
        max_mib: the largest copy.

    Raises:
        ValueError: `max_mib` is not positive.
    """
    check(max_mib=max_mib)
    return Probe("bytes", partial(cases, max_mib * MIB))


def cases(max_bytes: int, site: Site) -> Cases:
    """Every way of copying that the site has, at every size."""
    sizes = powers(4 * KIB, max_bytes, 4)
    pageable = torch.zeros(max_bytes, dtype=torch.uint8)
    if site.device.type == "cpu":
        found = copies("host memory to host memory", pageable, torch.zeros_like(pageable), sizes)
        return Cases(tuple(found), (MEMORY_ONLY,))
    pinned = torch.zeros(max_bytes, dtype=torch.uint8, pin_memory=True)
    buffers = [torch.zeros(max_bytes, dtype=torch.uint8, device=device) for device in site.devices]
    return Cases(tuple(device_copies(pageable, pinned, buffers, sizes)))


def device_copies(
    pageable: torch.Tensor, pinned: torch.Tensor, buffers: list[torch.Tensor], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """Each device from and to the host, within itself, and to the first of the others."""
    for buffer in buffers:
        for kind, host in (("pinned", pinned), ("pageable", pageable)):
            yield from copies(f"{kind} to {buffer.device}", host, buffer, sizes)
            yield from copies(f"{buffer.device} to {kind}", buffer, host, sizes)
        yield from copies(f"within {buffer.device}", buffer, torch.zeros_like(buffer), sizes)
        for other in buffers:
            if other.device != buffer.device:
                yield from copies(f"{buffer.device} to {other.device}", buffer, other, sizes)


def copies(series: str, source: torch.Tensor, target: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[Case]:
    """The copy of the first bytes of `source` into `target`, for each size."""
    for size in sizes:
        copy = partial(target[:size].copy_, source[:size], non_blocking=True)
        yield Case(series, size, copy, nbytes=size)
