"""Square matrix products: how many operations per second the device reaches, and from which size on."""

from functools import partial

import torch

from gpurun.workloads.limits import check
from gpurun.workloads.probes.base import Case, Cases, Probe, Site, powers

SMALLEST = 64


def matmul(max_size: int = 2048) -> Probe:
    """Products of n x n matrices from 64 to `max_size` rows, in the job's precision.

    Args:
        max_size: rows of the largest matrices; a GPU needs 8192 or more to reach its peak.

    Raises:
        ValueError: `max_size` is not positive.
    """
    check(max_size=max_size)
    return Probe("rows", partial(cases, max_size))


def cases(max_size: int, site: Site) -> Cases:
    """One case per size; all use the same memory."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(max_size**2, generator=generator).to(site.device, site.dtype)
    out = torch.empty_like(flat)
    sizes = powers(min(SMALLEST, max_size), max_size, 2)
    return Cases(tuple(case(flat, out, size, site.names[0]) for size in sizes))


def case(flat: torch.Tensor, out: torch.Tensor, size: int, device: str) -> Case:
    """A product of two matrices of `size` rows; 2n³ operations."""
    matrix = flat[: size**2].view(size, size)
    product = partial(torch.mm, matrix, matrix, out=out[: size**2].view(size, size))
    name = str(flat.dtype).removeprefix("torch.")
    return Case(f"{name} on {device}", size, product, flops=2 * size**3)
