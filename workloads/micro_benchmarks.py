"""The micro-benchmarks: they measure one property of the machine, as a curve over size, and train nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Literal

import torch
import torch.distributed as dist

from gpurun.workloads.limits import check
from gpurun.workloads.registry import TWO_DEVICES

Unit = Literal["bytes", "rows"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Site:
    """Where a micro-benchmark runs: what one rank sees."""

    devices: tuple[torch.device, ...]
    """The devices of this process; one, unless it owns several."""
    names: tuple[str, ...]
    """The job's names of them: `cuda:1`, where this process sees no other and calls it `cuda:0`."""
    world_size: int
    dtype: torch.dtype
    """The type that the job's precision computes in."""

    @property
    def device(self) -> "torch.device":
        return self.devices[0]


@dataclass(frozen=True)
class BenchmarkCase:
    """One point of a curve."""

    series: str
    """The curve's name."""
    size: int
    """Its place on the curve, in the benchmark's unit."""
    run: Callable[[], object]
    """One repetition. On a GPU it may return before its work is done: a block of them is waited for."""
    nbytes: int | None = None
    """Bytes that a repetition moves."""
    flops: int | None = None
    """Floating-point operations of a repetition; a multiply-add is two."""
    bus_factor: float | None = None
    """Bytes that cross the busiest link, as a share of `nbytes`."""


@dataclass(frozen=True)
class Cases:
    """The cases that can be measured at a site."""

    cases: tuple[BenchmarkCase, ...]
    notes: tuple[str, ...] = ()
    """Notes on what could not be measured there, and why."""


@dataclass(frozen=True)
class Probe:
    """A micro-benchmark."""

    unit: Unit
    cases: Callable[[Site], Cases]
    """The cases to measure; all ranks must get cases of the same sizes in the same order."""


def powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """`first`, `first`·`factor`, … up to `last`, which is always the end."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


SMALLEST_ON_DEVICE = 64


def matmul(max_size: int = 2048) -> Probe:
    """Products of n x n matrices from 64 to `max_size` rows, in the job's precision.

    Args:
        max_size: rows of the largest matrices; a GPU needs 8192 or more to reach its peak.

    Raises:
        ValueError: `max_size` is not positive.
    """
    check(max_size=max_size)
    return Probe("rows", partial(matmul_cases, max_size))


def matmul_cases(max_size: int, site: Site) -> Cases:
    """One case per size; all use the same memory."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(max_size**2, generator=generator).to(site.device, site.dtype)
    out = torch.empty_like(flat)
    sizes = powers(min(SMALLEST_ON_DEVICE, max_size), max_size, 2)
    return Cases(tuple(square_product(flat, out, size, site.names[0]) for size in sizes))


def square_product(flat: torch.Tensor, out: torch.Tensor, size: int, device: str) -> BenchmarkCase:
    """A product of two matrices of `size` rows; 2n³ operations."""
    matrix = flat[: size**2].view(size, size)
    product = partial(torch.mm, matrix, matrix, out=out[: size**2].view(size, size))
    name = str(flat.dtype).removeprefix("torch.")
    return BenchmarkCase(f"{name} on {device}", size, product, flops=2 * size**3)


SMALLEST_THERE_AND_BACK = 16
NEEDS_CUDA = "skipped: the GPU's curve needs CUDA, so there is no crossover; this is the CPU's curve alone"


def crossover(max_size: int = 2048) -> Probe:
    """Products of n x n matrices from 16 to `max_size` rows, on the CPU and on the GPU, transfer included.

    Args:
        max_size: rows of the largest matrices.

    Raises:
        ValueError: `max_size` is not positive.
    """
    check(max_size=max_size)
    return Probe("rows", partial(crossover_cases, max_size))


def crossover_cases(max_size: int, site: Site) -> Cases:
    """The CPU's curve, and the GPU's where there is one; both take host memory and give host memory."""
    flat = torch.randn(max_size**2, generator=torch.Generator().manual_seed(0)).to(site.dtype)
    sizes = powers(min(SMALLEST_THERE_AND_BACK, max_size), max_size, 2)
    places = [torch.device("cpu"), *(device for device in site.devices if device.type != "cpu")]
    found = [round_trip(flat, size, place) for place in places for size in sizes]
    return Cases(tuple(found), () if len(places) > 1 else (NEEDS_CUDA,))


def round_trip(flat: torch.Tensor, size: int, device: torch.device) -> BenchmarkCase:
    """A product on `device`, from the host's memory and back to it."""
    matrix = flat[: size**2].view(size, size)
    product = partial(product_there_and_back, matrix, device)
    return BenchmarkCase("CPU" if device.type == "cpu" else "GPU", size, product, flops=2 * size**3)


def product_there_and_back(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The matrix times itself, in the memory of the host."""
    there = matrix.to(device)
    return torch.mm(there, there).cpu()


MEMORY_ONLY = "skipped: copies from and to a GPU need CUDA; here only those within host memory are timed"


def h2d(max_mib: int = 64) -> Probe:
    """Copies of 4 KiB to `max_mib` MiB, from and to pinned and pageable memory, and between devices.

    A copy within a device reads and writes its memory: it counts twice. Each copies other bytes than those
    before, so that none from 512 KiB on come from the device's cache.

    Args:
        max_mib: the largest copy.

    Raises:
        ValueError: `max_mib` is not positive.
    """
    check(max_mib=max_mib)
    return Probe("bytes", partial(h2d_cases, max_mib * MIB))


def h2d_cases(max_bytes: int, site: Site) -> Cases:
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
) -> Iterator[BenchmarkCase]:
    """Each device from and to the host, within itself, and to the first of the others."""
    for name, buffer in buffers.items():
        for kind, host in (("pinned", pinned), ("pageable", pageable)):
            yield from copies(f"{kind} to {name}", host, buffer, sizes)
            yield from copies(f"{name} to {kind}", buffer, host, sizes)
        yield from copies_within(f"within {name}", buffer, sizes)
        for other, target in buffers.items():
            if other != name:
                yield from copies(f"{name} to {other}", buffer, target, sizes)


def copies(
    series: str, source: torch.Tensor, target: torch.Tensor, sizes: tuple[int, ...]
) -> Iterator[BenchmarkCase]:
    """The copy of the first bytes of `source` into `target`, for each size."""
    for size in sizes:
        copy = partial(target[:size].copy_, source[:size], non_blocking=True)
        yield BenchmarkCase(series, size, copy, nbytes=size)


UNCACHED_BYTES = 512 * MIB
"""More than any cache of a GPU holds: 256 MB of an MI300X, 126 MB of a B200."""
MOST_PLACES = 1024
"""Places of 512 KiB each are as much as `UNCACHED_BYTES`."""


def copies_within(series: str, buffer: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[BenchmarkCase]:
    """Copies within a device, one place after the other."""
    source, target = buffer.new_zeros((2, max(UNCACHED_BYTES, len(buffer))))
    for size in sizes:
        num_places = min(len(source) // size, MOST_PLACES)
        places = [slice(i * len(source) // num_places, None) for i in range(num_places)]
        pairs = cycle([(target[place][:size], source[place][:size]) for place in places])
        yield BenchmarkCase(series, size, partial(copy_next, pairs), nbytes=2 * size)


def copy_next(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the source of the next pair into its target."""
    target, source = next(pairs)
    target.copy_(source, non_blocking=True)


def allreduce(max_mib: int = 64) -> Probe:
    """Sums of float32 buffers from 1 KiB to `max_mib` MiB over all ranks.

    Args:
        max_mib: the largest message.

    Raises:
        ValueError: `max_mib` is not positive.
    """
    check(max_mib=max_mib)
    return Probe("bytes", partial(allreduce_cases, max_mib * MIB))


def allreduce_cases(max_bytes: int, site: Site) -> Cases:
    """One case per size; with one rank there is nothing to reduce."""
    if site.world_size < 2:
        return Cases((), (f"skipped: {TWO_DEVICES}",))
    buffer = torch.zeros(max_bytes // 4, device=site.device)
    return Cases(tuple(reduction(buffer[: size // 4], site.world_size) for size in powers(KIB, max_bytes, 4)))


def reduction(message: torch.Tensor, world_size: int) -> BenchmarkCase:
    """A ring sends 2·(n−1)/n of the message over each link.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return BenchmarkCase(
        "all-reduce",
        message.nbytes,
        partial(dist.all_reduce, message),
        nbytes=message.nbytes,
        bus_factor=2 * (world_size - 1) / world_size,
    )
