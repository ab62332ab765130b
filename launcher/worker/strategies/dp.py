"""One process: the whole batch on one device, or DataParallel, where it owns all devices."""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, parallel_apply
from torch.nn.parallel._functions import Gather, Scatter
from torch.optim import Optimizer

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.rundir.records import LaunchConfig
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import is_out_of_memory
from gpurun.launcher.worker.base.nested import (
    Tree,
    at_least_vector,
    join_columns,
    map_tensors,
    split_rows,
    tensors_of,
    with_tensors,
)
from gpurun.launcher.worker.strategies.base import Hints
from gpurun.launcher.worker.strategies.cpu_parallel import (
    CpuDataParallel,
    Replica,
    ThreadState,
    make_replica,
    replica_tensors,
    run_replicas,
)
from gpurun.workloads.base import on_device


class OneProcess:
    """The base of all strategies of a single process: there are no other ranks."""

    network: nn.Module
    """The network as the workload made it."""
    world_size = 1
    compression = ""
    first_passes = 0

    def optimizer(self, whole: Optimizer) -> Optimizer:
        return whole

    def unwrapped(self) -> nn.Module:
        return self.network

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def abandon(self) -> None:
        return

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext()

    def skip(self) -> torch.Tensor:
        raise AssertionError("one process has all samples")

    def total(self, count: int) -> int:
        return count

    def share(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Single(OneProcess):
    """The model on one device."""

    def __init__(self, model: nn.Module, device: torch.device, index: int = 0) -> None:
        """`index`: the device's position among the job's."""
        self.network, self.device, self.index = model, device, index

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> "Single":
        """The model on the device of the rank."""
        return cls(model, torch.device(config.devices[rank]), rank, **config.options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        with on_device(self.index):
            return self.network(inputs)


class StockDataParallel(DataParallel[nn.Module]):
    """torch's class for GPUs, but for how the batch is cut and which replicas run."""

    chunks: Sequence[int] = ()

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        """Outputs of all samples on the first device; device i computes `chunks[i]` of them, maybe none."""
        self.chunks = chunks
        return super().forward(inputs)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Each device's inputs; every tensor is cut by the same sizes, so no rows are lost."""
        parts = split_rows(inputs, self.chunks)
        columns = [self.scatter_tensor(tensor, device_ids) for tensor in tensors_of(inputs)]
        rows = zip(*columns, strict=True)
        return [with_tensors(part, row) for part, row in zip(parts, rows, strict=True)], [{} for _ in parts]

    def scatter_tensor(self, tensor: Tensor, device_ids: Sequence[Any]) -> Sequence[Tensor]:
        """The tensor's samples by device; one without dimensions goes to all."""
        if tensor.dim():
            pieces: Sequence[Tensor] = Scatter.apply(device_ids, list(self.chunks), 0, tensor)  # type: ignore[no-untyped-call]
            return pieces
        kind = self.src_device_obj.type
        return [tensor.to(torch.device(kind, index), non_blocking=True) for index in device_ids]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Outputs of the replicas that got samples."""
        used = [i for i, size in enumerate(self.chunks) if size]
        state = ThreadState.current()
        calls: list[Any] = [partial(call_replica, replicas[i], state, i) for i in used]
        return parallel_apply(calls, [inputs[i] for i in used], None, [self.device_ids[i] for i in used])

    def gather(self, outputs: Sequence[Tree], output_device: int | torch.device) -> Tree:
        """The samples of all outputs in one, on the first device; any tree will do, as on the CPU."""
        return join_columns(outputs, partial(gather_tensors, output_device))


def gather_tensors(device: int | torch.device, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenated along dimension 0 on `device`, by the copies that torch's class makes."""
    gathered: Tensor = Gather.apply(device, 0, *map(at_least_vector, tensors))  # type: ignore[no-untyped-call]
    return gathered


def stock(model: nn.Module, devices: Sequence[torch.device]) -> StockDataParallel:
    """torch's `DataParallel`, without its advice to leave out the slower of unlike GPUs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*There is an imbalance between your GPUs")
        return StockDataParallel(model, device_ids=list(devices))


def call_replica(replica: Callable[..., Tree], state: ThreadState, index: int, *inputs: Any) -> Tree:
    """One replica's outputs, computed in the state of the thread that called the model."""
    with state.restored(index):
        return replica(*inputs)


class Dp(OneProcess):
    """The model on all devices of the job; outputs are gathered, and the loss computed, on the first."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.device, self.devices, self.network = devices[0], tuple(devices), model
        self.model: CpuDataParallel | StockDataParallel = (
            CpuDataParallel(model, len(devices))
            if accelerator_of(self.device.type).is_host
            else stock(model, devices)
        )

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> "Dp":
        """The model on all devices of the launch."""
        return cls(model, [torch.device(device) for device in config.devices], **config.options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        return self.model(inputs, chunks)

    def apply_times_ms(self, inputs: Tree, chunks: Sequence[int]) -> list[float]:
        """The times of each replica's forward and backward, all at once; infinite where memory runs out."""
        return apply_times_ms(self.network, self.devices, inputs, chunks)


def apply_times_ms(
    network: nn.Module, devices: Sequence[torch.device], inputs: Tree, chunks: Sequence[int]
) -> list[float]:
    """Milliseconds of each device's forward and backward; 0 without samples, infinite without memory.

    Without what DataParallel itself adds: copying the model, scattering inputs, gathering outputs, the loss.
    """
    parts = split_rows(inputs, chunks)
    used = [index for index, size in enumerate(chunks) if size]
    replicas = {index: replica_if_it_fits(network, index, devices[index], parts[index]) for index in used}
    calls = [(i, partial(timed_ms, replica, devices[i])) for i, replica in replicas.items() if replica]
    found = dict(zip((index for index, _ in calls), run_replicas(calls), strict=True))
    return [found.get(index, math.inf if size else 0.0) for index, size in enumerate(chunks)]


def replica_if_it_fits(network: nn.Module, index: int, device: torch.device, inputs: Tree) -> Replica | None:
    """`replica_on`, or `None` where the device's memory runs out."""
    try:
        return replica_on(network, index, device, inputs)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return None
        raise


def replica_on(network: nn.Module, index: int, device: torch.device, inputs: Tree) -> Replica:
    """A copy of the network with its part of the inputs, both on `device`."""
    parameters, buffers = replica_tensors(network, index, device)
    trainable = [parameters[p] for p in network.parameters() if p.requires_grad]
    moved = map_tensors(lambda tensor: tensor.to(device), inputs)
    return Replica(index, make_replica(network, parameters, buffers), trainable, moved)


def timed_ms(replica: Replica, device: torch.device) -> float:
    """Runs the replica forwards and backwards; the loss' gradient is taken to be one everywhere.

    Kernels of the model's own, and tensors that it makes by the kind of device, go to the current device.
    """
    runtime = runtime_of(device)
    clock = runtime.clock(device)
    try:
        with runtime.current(device):
            clock.start()
            replica.run()
            replica.gradients([torch.ones_like(output) for output in replica.output_tensors()])
            clock.end_step()
            (timing,) = clock.read()
            return timing.step_ns / 1e6
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return math.inf
        raise
