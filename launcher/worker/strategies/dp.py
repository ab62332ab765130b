"""One process: the whole batch on one device, or DataParallel, where it owns all devices.

On the CPU torch's own DataParallel runs the bare module, so a thread per device does a replica's work there.
Each thread has the state of the one that starts it. The graph of a replica ends in front of the gathered
outputs and at the replica's own parameters, and is walked by a thread of its own. Autograd on the CPU would
walk the graphs of all replicas in one thread, one after the other; on GPUs its engine has a thread per
device.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, parallel_apply
from torch.nn.parallel._functions import Gather, Scatter

from gpurun.launcher.machine.accelerators import ACCELERATORS, accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import if_it_fits
from gpurun.launcher.worker.base.nested import (
    Tree,
    at_least_vector,
    join_columns,
    join_rows,
    map_tensors,
    split_rows,
    tensors_of,
    with_tensors,
)
from gpurun.launcher.worker.meters import memory
from gpurun.launcher.worker.meters.cpu_time import note_end
from gpurun.launcher.worker.strategies.base import Hints, WorkerStrategy
from gpurun.workloads.base import on_device

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadState:
    """The state that torch keeps per thread, and a new thread would therefore lack: grad mode and autocast.

    The stock parallel apply carries whether autocast is on but not its dtype: bf16 becomes fp16 there.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Device types for which autocast is on, and in what."""

    @classmethod
    def current(cls) -> "ThreadState":
        active = [device for device in ACCELERATORS if torch.is_autocast_enabled(device)]
        return cls(torch.is_grad_enabled(), tuple((d, torch.get_autocast_dtype(d)) for d in active))

    @contextmanager
    def restored(self, index: int) -> Iterator[None]:
        """Within it, the calling thread is in this state and computes for device `index`."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            stack.enter_context(on_device(index))
            stack.enter_context(memory.in_this_thread())
            yield


@dataclass
class ReplicaCall(Generic[T]):
    """One replica's work, and what came of it."""

    index: int
    function: Callable[[], T]
    result: T | None = None
    error: BaseException | None = None

    def run(self, state: ThreadState) -> None:
        try:
            with state.restored(self.index):
                self.result = self.function()
        except BaseException as error:  # raised again in the thread that waits
            error.add_note(f"in replica {self.index}")
            self.error = error
        finally:
            note_end()


def run_replicas(functions: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
    """Results of all functions, given with their replica's index, each run in a thread of its own.

    No thread is left when it returns. If several fail, the error of the first replica is raised, as it was,
    with its traceback and a note that names the replica.
    """
    calls = [ReplicaCall(index, function) for index, function in functions]
    state = ThreadState.current()
    threads = [
        threading.Thread(target=call.run, args=(state,), name=f"replica{call.index}") for call in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call in calls:
        if call.error is not None:
            raise call.error
    return [call.result for call in calls]  # type: ignore[misc]


@dataclass
class Replica:
    """One device's copy of the model, and after `run` what it computed."""

    index: int
    module: nn.Module
    parameters: list[Tensor]
    """The replica's copies of the parameters that require a gradient, in the network's order."""
    inputs: Tree
    outputs: Tree = None

    def run(self) -> None:
        self.outputs = self.module(self.inputs)

    def output_tensors(self) -> list[Tensor]:
        return tensors_of(self.outputs)

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the parameters, from those of the outputs; `None` where no output depends on one."""
        pairs = [
            (output, grad)
            for output, grad in zip(self.output_tensors(), grads, strict=True)
            if output.requires_grad and grad is not None
        ]
        outputs, output_grads = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        found: list[Tensor | None] = [
            *torch.autograd.grad(outputs, self.parameters, output_grads, allow_unused=True)
        ]
        memory.label(found, "gradients")
        return found


class DataParallelReplicas(torch.autograd.Function):
    """Runs the replicas; its backward pass runs theirs, and adds up what they give in their order.

    Traces show it by its name around all that the replicas do; `trace/kineto/classify.py` knows that name.
    """

    @staticmethod
    def forward(ctx: Any, replicas: list[Replica], *parameters: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            run_replicas([(replica.index, replica.run) for replica in replicas])
        ctx.replicas = replicas
        outputs = [tensor for replica in replicas for tensor in replica.output_tensors()]
        detached = [tensor.detach() for tensor in outputs]
        ctx.mark_non_differentiable(
            *(mine for mine, tensor in zip(detached, outputs, strict=True) if not tensor.requires_grad)
        )
        ctx.set_materialize_grads(False)
        return tuple(detached)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        replicas: list[Replica] = ctx.replicas
        ctx.replicas = None  # the graphs are walked once, and hold all activations
        calls = []
        position = 0
        for replica in replicas:
            count = len(replica.output_tensors())
            own = grads[position : position + count]
            calls.append((replica.index, partial(replica.gradients, own)))
            position += count
        gradients = run_replicas(calls)
        return (None, *(add_up(column) for column in zip(*gradients, strict=True)))


def add_up(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are there, from first to last, so that it is the same every time."""
    present = [gradient for gradient in gradients if gradient is not None]
    return sum(present[1:], start=present[0]) if present else None


class CpuDataParallel(nn.Module):
    """`module` on several shares of the CPU at once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        """Outputs of all samples; device i computes `chunks[i]` of them, and none of them where that is 0."""
        with torch.autograd.profiler.record_function("CpuDataParallel.forward"):
            parts = split_rows(inputs, chunks)
            replicas = [replica_of(self.module, i, part) for i, part in enumerate(parts) if chunks[i]]
            return join_rows(apply(replicas, trainable(self.module)))


def trainable(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


def replica_of(network: nn.Module, index: int, inputs: Tree, device: torch.device | None = None) -> Replica:
    """A copy of the network with its part of the inputs, both on `device`, by default where they are."""
    parameters, buffers = replica_tensors(network, index, device)
    here = inputs if device is None else map_tensors(lambda tensor: tensor.to(device), inputs)
    own = [parameters[p] for p in trainable(network)]
    return Replica(index, make_replica(network, parameters, buffers), own, here)


def apply(replicas: list[Replica], parameters: Sequence[nn.Parameter]) -> list[Tree]:
    """Outputs of each replica; they lead back to `parameters` where gradients are wanted."""
    if not torch.is_grad_enabled():
        run_replicas([(replica.index, replica.run) for replica in replicas])
        return [replica.outputs for replica in replicas]
    tensors = iter(DataParallelReplicas.apply(replicas, *parameters))  # type: ignore[no-untyped-call]
    return [with_tensors(replica.outputs, tensors) for replica in replicas]


def replica_tensors(
    network: nn.Module, index: int, device: torch.device | None
) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """A replica's own parameters and buffers, by the network's; on `device`; `None`: on the same.

    Replica 0 shares the network's memory, so what it updates in place is kept; the others get copies.
    """

    def own(tensor: Tensor) -> Tensor:
        mine = tensor.detach()
        return mine if index == 0 else mine.to(device or tensor.device, copy=True)

    parameters: dict[Tensor, Tensor] = {
        p: own(p).requires_grad_(p.requires_grad) for p in network.parameters()
    }
    buffers = {buffer: buffer if index == 0 else own(buffer) for buffer in network.buffers()}
    memory.label([*parameters.values(), *buffers.values()], "parameters")
    return parameters, buffers


def make_replica(
    network: nn.Module, parameters: Mapping[Tensor, Tensor], buffers: Mapping[Tensor, Tensor]
) -> nn.Module:
    """A shallow copy of the network's modules with other tensors; what modules share, their copies share."""
    copies: dict[nn.Module, nn.Module] = {
        module: module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for module in network.modules()
    }
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                # As an attribute, not a parameter: a replica has none of its own. setattr, since recurrent
                # layers keep a second list of their weights that follows it.
                setattr(replica, name, parameters[parameter])
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else buffers[buffer]
    return copies[network]


class Single(WorkerStrategy):
    """The model on one device."""

    def __init__(self, model: nn.Module, device: torch.device, index: int = 0) -> None:
        """`index`: the device's position among the job's."""
        self.network, self.device, self.index = model, device, index

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> Self:
        """The model on the device of the rank."""
        return cls(model, torch.device(config.devices[rank]), rank, **config.strategy_options)

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


class Dp(WorkerStrategy):
    """The model on all devices of the job; outputs are gathered, and the loss computed, on the first."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.device, self.devices, self.network = devices[0], tuple(devices), model
        self.model: CpuDataParallel | StockDataParallel = (
            CpuDataParallel(model) if accelerator_of(self.device.type).is_host else stock(model, devices)
        )

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> Self:
        """The model on all devices of the launch."""
        return cls(model, [torch.device(device) for device in config.devices], **config.strategy_options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        return self.model(inputs, chunks)

    def apply_times_ms(self, inputs: Tree, chunks: Sequence[int]) -> list[float]:
        """Milliseconds of each replica's forward and backward, all at once; 0 without samples, infinite
        without memory.

        Without what DataParallel itself adds: copying the model, scattering inputs, gathering outputs, the
        loss.
        """
        parts, devices = split_rows(inputs, chunks), self.devices
        used = [index for index, size in enumerate(chunks) if size]
        copies = {i: if_it_fits(partial(replica_of, self.network, i, parts[i], devices[i])) for i in used}
        held = [(i, partial(timed_ms, replica, devices[i])) for i, replica in copies.items() if replica]
        times_ms = run_replicas([(i, partial(if_it_fits, timed)) for i, timed in held])
        found = {i: ms for (i, _), ms in zip(held, times_ms, strict=True) if ms is not None}
        return [found.get(index, math.inf if size else 0.0) for index, size in enumerate(chunks)]


def timed_ms(replica: Replica, device: torch.device) -> float:
    """Runs the replica forwards and backwards; the loss' gradient is taken to be one everywhere.

    Kernels of the model's own, and tensors that it makes by the kind of device, go to the current device.
    """
    runtime = runtime_of(device)
    clock = runtime.clock(device)
    with runtime.current(device):
        clock.start()
        replica.run()
        replica.gradients([torch.ones_like(output) for output in replica.output_tensors()])
        clock.end_step()
        (timing,) = clock.read()
        return timing.step_ns / 1e6
