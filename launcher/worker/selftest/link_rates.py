"""Whether an all-reduce is right, how fast it is, and each pair of ranks; all ranks call these together.

Each part is a step, so that a hang is noticed however many pairs there are.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, product

import torch
import torch.distributed as dist
from torch import Tensor

from gpurun.launcher.rundir.records import PairRate, ReduceRate
from gpurun.launcher.stepping import step as marked_step
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.workloads.probes.base import KIB, MIB, powers

SUMMED = (1, 1023, 1 << 18)
"""Elements; odd numbers don't divide evenly into what each rank reduces."""
TYPES = (torch.float64, torch.float32, torch.bfloat16)
REDUCED_BYTES = {True: powers(64 * KIB, 4 * MIB, 8), False: powers(64 * KIB, 256 * MIB, 16)}
"""By whether devices are shares of the host."""
SENT_BYTES = {True: 4 * MIB, False: 64 * MIB}
REPETITIONS = 6


def wrong_sums(rank: int, device: torch.device, is_host: bool) -> tuple[str, ...]:
    """All-reduces of whole numbers, so small that every type holds them exactly, that gave another sum.

    Every size whose rate is measured is among them: by size NCCL chooses other algorithms.
    """
    world_size, found = dist.get_world_size(), []
    measured = ((torch.float32, size // 4) for size in REDUCED_BYTES[is_host])
    for dtype, count in (*product(TYPES, SUMMED), *measured):
        with marked_step():
            pattern = torch.arange(count, dtype=torch.int32, device=device) % 7
            summed = (pattern + rank % 2).to(dtype)
            dist.all_reduce(summed)
            expected = (pattern * world_size + world_size // 2).to(dtype)
            if num_wrong := int((summed != expected).sum()):
                found.append(f"{num_wrong} of {count} elements of {dtype} on rank {rank}")
    return tuple(found)


def reduce_rates(device: torch.device, is_host: bool) -> tuple[ReduceRate, ...]:
    """All-reduces of float32, by size; the same on all ranks."""
    sizes = REDUCED_BYTES[is_host]
    world_size, buffer = dist.get_world_size(), torch.zeros(sizes[-1] // 4, device=device)
    factor = 2 * (world_size - 1) / world_size  # as in `gpurun.workloads.probes.allreduce`
    times_ns = []
    for size in sizes:
        with marked_step():
            times_ns.append(fastest_ns(device, partial(dist.all_reduce, buffer[: size // 4])))
    return tuple(
        ReduceRate(size, time_ns / 1e3, factor * size / time_ns)
        for size, time_ns in zip(sizes, times_ns, strict=True)
    )


def fastest_ns(device: torch.device, run: Callable[[], object]) -> float:
    """The least time, in ns, that all ranks have once been done in."""
    times_ns = torch.zeros(REPETITIONS, dtype=torch.float64, device=device)
    for i in range(REPETITIONS):
        dist.barrier()
        start_ns = time.perf_counter_ns()
        run()
        runtime_of(device).synchronize(device)
        times_ns[i] = time.perf_counter_ns() - start_ns
    dist.all_reduce(times_ns, op=dist.ReduceOp.MAX)
    return float(times_ns.min())


def pair_rates(rank: int, device: torch.device, is_host: bool) -> tuple[PairRate, ...]:
    """This rank's pairs with higher ones, while all others wait; one pair after the other."""
    message = torch.zeros(SENT_BYTES[is_host], dtype=torch.uint8, device=device)
    found = []
    for low, high in combinations(range(dist.get_world_size()), 2):
        with marked_step():
            if rank in (low, high):
                best_ns = min(there_and_back_ns(message, rank, low, high) for _ in range(REPETITIONS))
                if rank == low:
                    found.append(PairRate(low, high, 2 * message.nbytes / best_ns))
            dist.barrier()
    return tuple(found)


def there_and_back_ns(message: Tensor, rank: int, low: int, high: int) -> int:
    """From the lower rank to the higher one and back, in ns."""
    start_ns = time.perf_counter_ns()
    if rank == low:
        dist.send(message, high)
        dist.recv(message, high)
    else:
        dist.recv(message, low)
        dist.send(message, low)
    runtime_of(message.device).synchronize(message.device)
    return time.perf_counter_ns() - start_ns
