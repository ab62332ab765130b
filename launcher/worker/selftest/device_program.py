"""A program that measures its own device and the links to the others: `gpurun selftest` runs it on all ranks.

Its arguments are the kind of the devices and the directory for what it finds.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gpurun.launcher.machine.accelerators import Accelerator, accelerator_of
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.records import DeviceFacts, GpuLoad
from gpurun.launcher.stats.busy import waited_for_others_ns
from gpurun.launcher.worker.accelerators.clock import Clock
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter, load_meter
from gpurun.launcher.worker.selftest.link_rates import pair_rates, reduce_rates, wrong_sums

AT_WORK_NS = 500_000_000
BLOCK_NS = 20_000_000
MATRIX_ROWS = {True: 512, False: 4096}
"""By whether the device is a share of the host."""


def device_facts(rank: int, device: torch.device, kind: Accelerator) -> DeviceFacts:
    """What this rank finds out; all ranks must call it, since they measure their links together."""
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
        gflop_per_s=2 * rows**3 / best_ns,
        queue_share=max(0.0, waited_ns / host_ns),
        power_w=at_work.power_w,
        energy_mj=load.energy_mj(),
        clock_mhz=at_work.sm_clock_mhz,
        throttled=at_work.throttled,
        pcie_link=max(links, default=None),
        wrong_sums=wrong_sums(rank, device, kind.is_host),
        reduces=reduce_rates(device, kind.is_host),
        pairs=pair_rates(rank, device, kind.is_host),
    )


def sample(load: LoadMeter, links: list[tuple[int, int]]) -> None:
    """What the driver says while the device works; its PCIe link is added to `links`."""
    load.sample()
    links += [link for gpu in load.gpus if (link := gpu.sensors.pcie_link())]


def own_device(kind: Accelerator) -> torch.device:
    """The rank's; an instance (MIG) is the only device that its process sees.

    Where torch sees none, its first use says why.
    """
    if kind.is_host:
        return torch.device(kind.name)
    num_visible = torch.get_device_module(kind.name).device_count()
    return torch.device(kind.name, int(os.environ["LOCAL_RANK"]) % max(1, num_visible))


def properties(device: torch.device) -> object:
    """What torch knows of a device; nothing about the CPU."""
    module = torch.get_device_module(device)
    return module.get_device_properties(device) if hasattr(module, "get_device_properties") else None


def blocks(matrix: Tensor, clock: Clock, while_queued: Callable[[], object]) -> tuple[float, float, int]:
    """Products for half a second; `while_queued` is called in each block, see `products`.

    Returns:
        ns of a product in the fastest block; how far the device's clock is off by the host's; ns in all.
    """
    start_ns = time.perf_counter_ns()
    clock.start()
    best_ns = float("inf")
    while time.perf_counter_ns() - start_ns < AT_WORK_NS:
        best_ns = min(best_ns, products(matrix, BLOCK_NS, while_queued))
    clock.end_step()
    (step,) = clock.read()
    host_ns = time.perf_counter_ns() - start_ns
    return best_ns, step.step_ns / host_ns - 1, host_ns


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


def main(kind_name: str, directory: Path) -> None:
    """Measures, and writes what this rank has found."""
    kind, rank = accelerator_of(kind_name), int(os.environ["RANK"])
    device = own_device(kind)
    dist.init_process_group(kind.backend, device_id=None if kind.is_host else device)
    with runtime_of(device).current(device):
        write_json(directory / f"rank{rank}.json", device_facts(rank, device, kind))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
