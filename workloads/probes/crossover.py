"""From which size on a GPU is faster than the CPU, when the data has to go there and come back."""

from functools import partial

import torch

from gpurun.workloads.limits import check
from gpurun.workloads.probes.base import Case, Cases, Probe, Site, powers

SMALLEST = 16
NEEDS_CUDA = "skipped: the GPU's curve needs CUDA, so there is no crossover; this is the CPU's curve alone"


def crossover(max_size: int = 2048) -> Probe:
    """Products of n x n matrices from 16 to `max_size` rows, on the CPU and on the GPU, transfer included.

    Args:
        max_size: rows of the largest matrices.

    Raises:
        ValueError: `max_size` is not positive.
    """
    check(max_size=max_size)
    return Probe("rows", partial(cases, max_size))


def cases(max_size: int, site: Site) -> Cases:
    """The CPU's curve, and the GPU's where there is one; both take host memory and give host memory."""
    flat = torch.randn(max_size**2, generator=torch.Generator().manual_seed(0)).to(site.dtype)
    sizes = powers(min(SMALLEST, max_size), max_size, 2)
    places = [torch.device("cpu"), *(device for device in site.devices if device.type != "cpu")]
    found = [case(flat, size, place) for place in places for size in sizes]
    return Cases(tuple(found), () if len(places) > 1 else (NEEDS_CUDA,))


def case(flat: torch.Tensor, size: int, device: torch.device) -> Case:
    """A product on `device`, from the host's memory and back to it."""
    matrix = flat[: size**2].view(size, size)
    product = partial(product_there_and_back, matrix, device)
    return Case("CPU" if device.type == "cpu" else "GPU", size, product, flops=2 * size**3)


def product_there_and_back(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The matrix times itself, in the memory of the host."""
    there = matrix.to(device)
    return torch.mm(there, there).cpu()
