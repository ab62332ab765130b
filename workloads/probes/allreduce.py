"""All-reduce over the job's devices, from small messages (latency) to large ones (bandwidth)."""

from functools import partial

import torch
import torch.distributed as dist

from gpurun.workloads.limits import check
from gpurun.workloads.probes.base import KIB, MIB, Case, Cases, Probe, Site, powers
from gpurun.workloads.registry import TWO_DEVICES


def allreduce(max_mib: int = 64) -> Probe:
    """Sums of float32 buffers from 1 KiB to `max_mib` MiB over all ranks.

    Args:
        max_mib: the largest message.

    Raises:
        ValueError: `max_mib` is not positive.
    """
    check(max_mib=max_mib)
    return Probe("bytes", partial(cases, max_mib * MIB))


def cases(max_bytes: int, site: Site) -> Cases:
    """One case per size; with one rank there is nothing to reduce."""
    if site.world_size < 2:
        return Cases((), (f"skipped: {TWO_DEVICES}",))
    buffer = torch.zeros(max_bytes // 4, device=site.device)
    return Cases(tuple(case(buffer[: size // 4], site.world_size) for size in powers(KIB, max_bytes, 4)))


def case(message: torch.Tensor, world_size: int) -> Case:
    """A ring sends 2·(n−1)/n of the message over each link.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return Case(
        "all-reduce",
        message.nbytes,
        partial(dist.all_reduce, message),
        nbytes=message.nbytes,
        bus_factor=2 * (world_size - 1) / world_size,
    )
