"""DataParallel: one process owns all devices."""

import math
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import is_out_of_memory
from gpurun.launcher.worker.base.nested import Tree, map_tensors, split_rows
from gpurun.launcher.worker.strategies.cpu_parallel import (
    CpuDataParallel,
    Replica,
    make_replica,
    replica_tensors,
)
from gpurun.launcher.worker.strategies.single import OneProcess
from gpurun.launcher.worker.strategies.stock_parallel import StockDataParallel
from gpurun.launcher.worker.strategies.threads import run_replicas


class Dp(OneProcess):
    """The model on all devices of the job; outputs are gathered, and the loss computed, on the first."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.device, self.devices, self.network = devices[0], tuple(devices), model
        self.model: CpuDataParallel | StockDataParallel = (
            CpuDataParallel(model, len(devices))
            if accelerator_of(self.device.type).is_host
            else StockDataParallel(model, device_ids=list(devices))
        )

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        return self.model(inputs, chunks)

    def apply_times_ms(self, inputs: Tree, chunks: Sequence[int]) -> list[float]:
        """What each replica's forward and backward take, all at once; infinite where memory runs out."""
        return apply_times_ms(self.network, self.devices, inputs, chunks)


def apply_times_ms(
    network: nn.Module, devices: Sequence[torch.device], inputs: Tree, chunks: Sequence[int]
) -> list[float]:
    """Milliseconds of each device's forward and backward; 0 without samples, infinite without memory.

    Without what DataParallel itself adds: copying the model, scattering inputs, gathering outputs, the loss.
    """
    parts = split_rows(inputs, chunks)
    replicas = [
        replica_on(network, index, device, part)
        for index, (device, part) in enumerate(zip(devices, parts, strict=True))
        if chunks[index]
    ]
    calls = [(replica.index, partial(timed_ms, replica, devices[replica.index])) for replica in replicas]
    found = dict(zip((replica.index for replica in replicas), run_replicas(calls), strict=True))
    return [found.get(index, 0.0) for index in range(len(devices))]


def replica_on(network: nn.Module, index: int, device: torch.device, inputs: Tree) -> Replica:
    """A copy of the network with its part of the inputs, both on `device`."""
    parameters, buffers = replica_tensors(network, index, device)
    trainable = [parameters[p] for p in network.parameters() if p.requires_grad]
    moved = map_tensors(lambda tensor: tensor.to(device), inputs)
    return Replica(index, make_replica(network, parameters, buffers), trainable, moved)


def timed_ms(replica: Replica, device: torch.device) -> float:
    """Runs the replica forwards and backwards; the loss' gradient is taken to be one everywhere."""
    runtime = runtime_of(device)
    try:
        runtime.synchronize(device)
        start_ns = time.perf_counter_ns()
        replica.run()
        replica.gradients([torch.ones_like(output) for output in replica.output_tensors()])
        runtime.synchronize(device)
        return (time.perf_counter_ns() - start_ns) / 1e6
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return math.inf
        raise
