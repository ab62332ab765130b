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
    pairs = zip(site.names, site.devices, strict=True)
    buffers = {name: torch.zeros(max_bytes, dtype=torch.uint8, device=device) for name, device in pairs}
    return Cases(tuple(device_copies(pageable, pinned, buffers, sizes)))


def device_copies(
    pageable: torch.Tensor, pinned: torch.Tensor, buffers: dict[str, torch.Tensor], sizes: tuple[int, ...]
) -> Iterator[Case]:
    """Each device from and to the host, within itself, and to the first of the others."""
    for name, buffer in buffers.items():
        for kind, host in (("pinned", pinned), ("pageable", pageable)):
            yield from copies(f"{kind} to {name}", host, buffer, sizes)
            yield from copies(f"{name} to {kind}", buffer, host, sizes)
        yield from copies(f"within {name}", buffer, torch.zeros_like(buffer), sizes)
        for other, target in buffers.items():
            if other != name:
                yield from copies(f"{name} to {other}", buffer, target, sizes)


def copies(series: str, source: torch.Tensor, target: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[Case]:
    """The copy of the first bytes of `source` into `target`, for each size."""
    for size in sizes:
        copy = partial(target[:size].copy_, source[:size], non_blocking=True)
        yield Case(series, size, copy, nbytes=size)
