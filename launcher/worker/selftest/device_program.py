"""A program that measures its own device and the links to the others: `gpurun selftest` runs it on all ranks.

Its arguments are the kind of the devices, the directory for what it finds, and pairs of ranks, `0-2,1-3`,
if not all are to be measured. Rank 0 writes for all ranks, which may be on other machines.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gpurun.launcher.machine.accelerators import Accelerator, accelerator_of
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.records import DeviceFacts, GpuLoad, PairRate, ReduceRate
from gpurun.launcher.stats.core_waiting import waited_for_others_ns
from gpurun.launcher.stepping import step as marked_step
from gpurun.launcher.worker.accelerators.clock import Clock
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter, load_meter
from gpurun.workloads.micro_benchmarks import KIB, MIB, powers

SUMMED = (1, 1023, 1 << 18)
"""Elements; odd numbers don't divide evenly into what each rank reduces."""
TYPES = (torch.float64, torch.float32, torch.bfloat16)
REDUCED_BYTES = {True: powers(64 * KIB, 4 * MIB, 8), False: powers(64 * KIB, 256 * MIB, 16)}
"""The sizes by whether devices are shares of the host."""
SENT_BYTES = {True: 4 * MIB, False: 64 * MIB}
EXACT = 256
"""bfloat16, with 8 bits of significand, holds all whole numbers up to this."""
REPETITIONS = 6


def wrong_sums(rank: int, device: torch.device, is_host: bool) -> tuple[str, ...]:
    """All-reduces of whole numbers, whose sums every type holds exactly, that gave another sum.

    Every size whose rate is measured is among them: by size NCCL chooses other algorithms.
    """
    world_size, found = dist.get_world_size(), []
    measured = ((torch.float32, size // 4) for size in REDUCED_BYTES[is_host])
    for dtype, count in (*product(TYPES, SUMMED), *measured):
        with marked_step():
            pattern = whole_numbers(count, world_size, device)
            summed = (pattern + rank % 2).to(dtype)
            dist.all_reduce(summed)
            expected = (pattern * world_size + world_size // 2).to(dtype)
            if num_wrong := int((summed != expected).sum()):
                found.append(f"{num_wrong} of {count} elements of {dtype} on rank {rank}")
    return tuple(found)


def whole_numbers(count: int, world_size: int, device: torch.device) -> torch.Tensor:
    """`count` numbers from 0 to at most 6 that `world_size` ranks, half of which add 1 to them, can sum."""
    most = min(6, (EXACT - world_size // 2) // world_size)
    return torch.arange(count, dtype=torch.int32, device=device) % (most + 1)


def reduce_rates(device: torch.device, is_host: bool) -> tuple[ReduceRate, ...]:
    """All-reduces of float32, by size; the same on all ranks."""
    sizes = REDUCED_BYTES[is_host]
    world_size, buffer = dist.get_world_size(), torch.zeros(sizes[-1] // 4, device=device)
    factor = 2 * (world_size - 1) / world_size  # as in `gpurun.workloads.micro_benchmarks.allreduce`
    times_ns = []
    for size in sizes:
        with marked_step():
            times_ns.append(fastest_ns(device, partial(dist.all_reduce, buffer[: size // 4])))
    return tuple(
        ReduceRate(size, rate(factor * size, time_ns)) for size, time_ns in zip(sizes, times_ns, strict=True)
    )


def rate(amount: float, time_ns: float) -> float:
    """The rate per ns; 0 where the time is impossible, since JSON has no other number for that."""
    return amount / time_ns if finite(time_ns) > 0 else 0.0


def finite(value: float) -> float:
    """The value; 0 where it is no number, or infinite."""
    return value if math.isfinite(value) else 0.0


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


def pair_rates(
    rank: int, device: torch.device, is_host: bool, pairs: Sequence[tuple[int, int]]
) -> tuple[PairRate, ...]:
    """Rates of the pairs in which this rank is the lower one, one after the other; all others wait."""
    message = torch.zeros(SENT_BYTES[is_host], dtype=torch.uint8, device=device)
    found = []
    for low, high in pairs:
        with marked_step():
            if rank in (low, high):
                best_ns = min(there_and_back_ns(message, rank, low, high) for _ in range(REPETITIONS))
                if rank == low:
                    found.append(PairRate(low, high, rate(2 * message.nbytes, best_ns)))
            dist.barrier()
    return tuple(found)


def there_and_back_ns(message: Tensor, rank: int, low: int, high: int) -> int:
    """Nanoseconds of a message from the lower rank to the higher one and back."""
    start_ns = time.perf_counter_ns()
    if rank == low:
        dist.send(message, high)
        dist.recv(message, high)
    else:
        dist.recv(message, low)
        dist.send(message, low)
    runtime_of(message.device).synchronize(message.device)
    return time.perf_counter_ns() - start_ns


AT_WORK_NS = 500_000_000
BLOCK_NS = 20_000_000
MATRIX_ROWS = {True: 512, False: 4096}
"""The rows by whether the device is a share of the host."""


def device_facts(
    rank: int, device: torch.device, kind: Accelerator, pairs: Sequence[tuple[int, int]]
) -> DeviceFacts:
    """This rank's findings; all ranks must call it, since they measure their links together."""
    rows = MATRIX_ROWS[kind.is_host]
    matrix = torch.rand(rows, rows, device=device) / rows
    runtime, load, noise = runtime_of(device), load_meter([device]), NoiseMeter()
    links: list[tuple[int, int]] = []
    products(matrix, BLOCK_NS, load.sample)
    dist.barrier()
    load.clear()
    with load.counting(), noise.counting():
        best_ns, off, host_ns = blocks(matrix, runtime.clock(device), lambda: sample(load, links))
    waited = noise.per_step(1)
    waited_ns = waited_for_others_ns(waited.queue_ns, waited.others_ns) or 0
    at_work = next(iter(load.loads()), GpuLoad())
    return DeviceFacts(
        rank=rank,
        device=str(device),
        name=str(getattr(properties(device), "name", kind.noun)),
        uuid=str(uuid) if (uuid := getattr(properties(device), "uuid", None)) else None,
        clock_off=off,
        matrix_rows=rows,
        gflop_per_s=rate(2 * rows**3, best_ns),
        queue_share=max(0.0, waited_ns / host_ns),
        power_w=at_work.power_w,
        energy_mj=load.energy_mj(),
        clock_mhz=at_work.sm_clock_mhz,
        throttled=at_work.throttled,
        pcie_link=max(links, default=None),
        copy_gb_per_s=None if kind.is_host else in_turn(rank, lambda: copy_gb_per_s(device)),
        wrong_sums=wrong_sums(rank, device, kind.is_host),
        reduces=reduce_rates(device, kind.is_host),
        pairs=pair_rates(rank, device, kind.is_host, pairs),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        cpu_share=(waited.cpu_ns or 0) / host_ns,
        others_share=None if waited.others_ns is None else waited.others_ns / host_ns,
    )


def sample(load: LoadMeter, links: list[tuple[int, int]]) -> None:
    """Samples the driver while the device works; its PCIe link is added to `links`."""
    load.sample()
    links += [link for gpu in load.gpus if (link := gpu.sensors.pcie_link())]


COPIED_BYTES, NUM_COPIES = 256 << 20, 4


def copy_gb_per_s(device: torch.device) -> float | None:
    """The fastest copy from the host's pinned memory; `None` where none can be had."""
    try:
        values = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # more than a container may lock
        return None
    target, synchronize, best_ns = values.to(device), runtime_of(device).synchronize, math.inf
    for _ in range(NUM_COPIES):
        synchronize(device)
        start_ns = time.perf_counter_ns()
        target.copy_(values, non_blocking=True)
        synchronize(device)
        best_ns = min(best_ns, time.perf_counter_ns() - start_ns)
    return rate(COPIED_BYTES, best_ns)


def in_turn(rank: int, measure: Callable[[], float | None]) -> float | None:
    """This rank's measurement, while the others wait."""
    found = None
    for turn in range(dist.get_world_size()):
        if turn == rank:
            found = measure()
        dist.barrier()
    return found


def own_device(kind: Accelerator) -> torch.device:
    """The rank's; an instance (MIG) is the only device that its process sees.

    Where torch sees none, its first use says why.
    """
    if kind.is_host:
        return torch.device(kind.name)
    num_visible = torch.get_device_module(kind.name).device_count()
    return torch.device(kind.name, int(os.environ["LOCAL_RANK"]) % max(1, num_visible))


def properties(device: torch.device) -> object:
    """torch's properties of a device; nothing about the CPU."""
    module = torch.get_device_module(device)
    return module.get_device_properties(device) if hasattr(module, "get_device_properties") else None


def blocks(matrix: Tensor, clock: Clock, while_queued: Callable[[], object]) -> tuple[float, float, int]:
    """Products for half a second; `while_queued` is called in each block, see `products`.

    Returns:
        ns of a product in the fastest block; how far the device's clock is off by the host's; ns in all.
    """
    before_ns = time.perf_counter_ns()
    clock.start()
    start_ns = time.perf_counter_ns()
    best_ns = float("inf")
    while time.perf_counter_ns() - start_ns < AT_WORK_NS:
        best_ns = min(best_ns, products(matrix, BLOCK_NS, while_queued))
    end_ns = time.perf_counter_ns()
    clock.end_step()
    (step,) = clock.read()
    all_ns = time.perf_counter_ns() - before_ns
    # On a busy machine this process may lose the core before or after a mark: no clock is off by that.
    host_ns = min(max(finite(step.step_ns), end_ns - start_ns), all_ns)
    return best_ns, finite(step.step_ns) / host_ns - 1, all_ns


def products(matrix: Tensor, at_least_ns: int, while_queued: Callable[[], object]) -> float:
    """Mean time of a product, in ns, in a block that lasts at least so long.

    `while_queued` is called once, when products have been queued and the device isn't waited for yet.
    """
    synchronize, product = runtime_of(matrix.device).synchronize, torch.empty_like(matrix)
    count, start_ns, elapsed_ns = 0, time.perf_counter_ns(), 0
    while elapsed_ns < at_least_ns:
        for _ in range(4):
            torch.mm(matrix, matrix, out=product)
        if count == 0:
            while_queued()
        count += 4
        synchronize(matrix.device)
        elapsed_ns = time.perf_counter_ns() - start_ns
    return elapsed_ns / count


def parsed_pairs(text: str) -> list[tuple[int, int]]:
    """`0-2,1-3` as pairs of ranks; all pairs where there is no text."""
    if not text:
        return list(combinations(range(dist.get_world_size()), 2))
    return [(int(low), int(high)) for low, _, high in (pair.partition("-") for pair in text.split(","))]


def main(kind_name: str, directory: Path, pairs: str = "") -> None:
    """Measures; rank 0 writes what all ranks have found."""
    kind, rank = accelerator_of(kind_name), int(os.environ["RANK"])
    device = own_device(kind)
    dist.init_process_group(kind.backend, device_id=None if kind.is_host else device)
    with runtime_of(device).current(device):
        own = device_facts(rank, device, kind, parsed_pairs(pairs))
        found: list[DeviceFacts] = [own] * dist.get_world_size()
        dist.all_gather_object(found, own)
        for facts in found if rank == 0 else ():
            write_json(directory / f"rank{facts.rank}.json", facts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
