"""One model under one strategy, trained in steps of any split."""

import copy
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.machine.host import memory_bytes
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import MemoryPeak, VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.accelerators.clock import no_garbage_collection
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import UserError, place_of, users_code
from gpurun.launcher.worker.base.nested import tensors_of
from gpurun.launcher.worker.base.precision import PRECISIONS, Precision
from gpurun.launcher.worker.meters.memory import peak_of_step
from gpurun.launcher.worker.strategies.base import (
    Hints,
    WorkerStrategy,
    blocks_of,
    checkpoint_blocks,
    strategy_of,
)
from gpurun.launcher.worker.strategies.dp import Dp, Single
from gpurun.launcher.worker.training.batches import (
    BatchSource,
    DatasetSource,
    Layout,
    LoadedStep,
    SampleSource,
    StepInput,
    check_dataset_size,
)
from gpurun.launcher.worker.training.forward_backward import NoClock, PhaseClock, forward_backward
from gpurun.launcher.worker.training.try_out import batch_warning, preserved, statistics_apart, try_out
from gpurun.workloads.base import Workload

DEFAULT_LEARNING_RATE = 1e-3
SHAPES_PER_VARIANT = 4
"""A variant's own batch, a smaller last micro-batch, the whole batch of the gradient check, one to spare."""
SHARE_OF_MEMORY = 0.8
"""The share of the host's available memory for copies of the model and its optimizer."""
CHECK_LOSS_SCALE = 1024.0
"""Scale of fp16 losses in the gradient check: large enough not to underflow, far from an overflow."""


@dataclass(frozen=True)
class TrainerState:
    """A copy, on the CPU, of all that optimizer steps change: a device needn't hold it twice."""

    model: tuple[tuple[Tensor, Tensor], ...]
    """Parameters and buffers, each with its value."""
    optimizer: dict[str, Any]
    scaler: dict[str, Any]


class Trainer:
    """Runs optimizer steps. Variants share the model: only split and accumulation differ between them."""

    def __init__(self, workload: Workload, config: LaunchConfig, rank: int) -> None:
        """Moves the model to its device, tries it out, and wraps it; for `ddp` the process group must exist.

        Raises:
            ParamsError: the job's directory of images has less than a global batch.
            UserError: the workload's model, batch, dataset, loss or optimizer is wrong.
        """
        # Before torch's DataLoader fails with a message of its own: none of these variants can run.
        check_dataset_size(workload, min(sum(variant.split) for variant in config.variants))
        if config.workers is not None:
            workload = replace(workload, num_workers=config.workers)
        self.workload, self.model, self.config = workload, workload.model, config
        self.precision = PRECISIONS[config.precision]
        device = torch.device(config.devices[rank])
        self.set_process_state()
        self.precision.prepare_model(self.model)
        runtime_of(device).set_convolution_search(config.cudnn_benchmark)
        accept_several_inputs(self.model)
        self.model.to(device)
        if config.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Before the strategy wraps the model: a mistake must show before DDP's collectives begin.
        self.source = source_of(workload, config, rank, self.precision)
        global_batch = sum(config.variants[0].split)
        self.trial = try_out(workload, self.source, self.precision, device, rank, global_batch)
        self.batch_warning = batch_warning(workload, self.source, global_batch)
        if config.compile:
            compile_in_place(self.model, len(config.variants), compile_threads(device, config.threads))
        blocks = tuple(blocks_of(self.model, workload.blocks))
        self.has_blocks = bool(blocks)
        checkpoint_blocks(blocks, config.checkpointing)
        self.strategy = strategy_of(self.model, config, rank, Hints(bool(self.trial.unused), blocks))
        whole = make_optimizer(workload, self.model)
        self.optimizer = self.strategy.optimizer(with_implementation(whole, config.optimizer, workload))
        self.scaler = new_scaler(device, self.precision)
        with preserved(self.model, device):
            for _ in range(self.strategy.first_passes):
                self.gradient(config.variants[0], 0)

    @property
    def device(self) -> torch.device:
        """The device of this rank; the first of all for `dp`."""
        return self.strategy.device

    def set_process_state(self) -> None:
        """Sets what belongs to the process, before steps that follow those of another strategy or setting."""
        torch.set_num_threads(self.config.threads)
        self.precision.apply()

    def prepare(self, variant: VariantConfig, step: int) -> StepInput:
        """This rank's part of step `step`, outside the timing as far as it isn't read from a dataset.

        Sample k of a step is the same whatever the strategy and split.
        """
        return self.source.prepare(variant, step)

    def step(self, step_input: StepInput, clock: PhaseClock, sync: bool = True) -> None:
        """One optimizer step; marks the end of each phase on `clock`.

        Args:
            step_input: from `prepare`, used once.
            clock: with several micro-batches the phases alternate.
            sync: false leaves the communication out, so that ranks drift apart: save the state before.
        """
        loaded = step_input.load()
        if loaded is not step_input:
            clock.mark("data")
        with nullcontext() if sync else self.alone():
            self.compute(self.strategy, loaded, self.scaler, clock, sync)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        clock.mark("optimizer")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A step within it communicates with no other rank."""
        with self.strategy.alone(), statistics_apart(self.model):
            yield

    def compute(
        self,
        strategy: WorkerStrategy,
        loaded: LoadedStep,
        scaler: torch.amp.GradScaler,
        clock: PhaseClock,
        sync: bool = True,
    ) -> None:
        """Adds the gradient of a step to the parameters' `grad`."""
        forward_backward(strategy, self.workload, self.precision, loaded, scaler, clock, sync)

    def apply_times_ms(self, step_input: StepInput) -> list[float]:
        """How long each replica of `dp` takes to compute its part of a step: forward and backward."""
        assert isinstance(self.strategy, Dp)
        totals = [0.0 for _ in self.strategy.devices]
        for micro in step_input.load().micro_batches:
            with self.precision.autocast(self.device):
                times_ms = self.strategy.apply_times_ms(micro.inputs, micro.chunks)
            totals = [total + ms for total, ms in zip(totals, times_ms, strict=True)]
        return totals

    def gradient(self, variant: VariantConfig, step: int, is_kept: bool = True) -> dict[str, Tensor]:
        """The gradient of a step under the strategy, by parameter; all ranks call it, weights stay.

        Ranks that don't keep it take no memory of the host for it.
        """
        return self.collect(self.strategy, self.model, self.source.prepare(variant, step).load(), is_kept)

    def one_device_gradient(self, model: nn.Module, num_samples: int, step: int) -> dict[str, Tensor]:
        """The gradient of the whole global batch on this rank's device alone, by parameter of `unwrapped`."""
        alone = Single(model, self.device)
        with statistics_apart(model):
            return self.collect(alone, model, self.source.whole(num_samples, step))

    def collect(
        self, strategy: WorkerStrategy, model: nn.Module, loaded: LoadedStep, is_kept: bool = True
    ) -> dict[str, Tensor]:
        """Gradients on the CPU, so that a device needn't hold them twice; `grad` is empty afterwards."""
        enabled = self.precision.scales_loss
        scaler = torch.amp.GradScaler(self.device.type, init_scale=CHECK_LOSS_SCALE, enabled=enabled)
        self.compute(strategy, loaded, scaler, NoClock())
        scale = scaler.get_scale()
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        whole = ((name, strategy.full(grad)) for name, grad in named)
        gradient = {name: torch.div(grad.cpu(), scale) for name, grad in whole if is_kept}
        model.zero_grad(set_to_none=True)
        return gradient

    def weights_after(self, variant: VariantConfig, num_steps: int, is_kept: bool) -> dict[str, Tensor]:
        """All parameters after the first steps under the strategy, on the CPU; all ranks call it.

        The state is as before afterwards. Ranks that don't keep them take no memory of the host for them.
        """
        state = self.save_state()
        for step in range(num_steps):
            self.step(self.prepare(variant, step), NoClock())
        whole = ((name, self.strategy.full(p)) for name, p in self.model.named_parameters())
        weights = {name: on_cpu(p) for name, p in whole if is_kept}
        self.restore_state(state)
        return weights

    def one_device_weights_after(
        self, model: nn.Module, num_samples: int, num_steps: int
    ) -> dict[str, Tensor]:
        """All parameters of `unwrapped` after the first steps on this rank's device alone."""
        state, alone = self.save_state(), Single(model, self.device)
        optimizer, scaler = make_optimizer(self.workload, model), new_scaler(self.device, self.precision)
        for step in range(num_steps):
            with statistics_apart(model):
                self.compute(alone, self.source.whole(num_samples, step), scaler, NoClock())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        weights = {name: on_cpu(p) for name, p in model.named_parameters()}
        self.restore_state(state)
        return weights

    def memory_peak(self, variant: VariantConfig) -> MemoryPeak:
        """The memory of this rank's fullest device in a step; all ranks call it, weights change."""
        self.set_process_state()
        step_input = self.prepare(variant, 0)
        step = partial(self.step, step_input)
        return peak_of_step(step, self.model, self.optimizer, self.device.type)

    def save_state(self) -> TrainerState:
        """A copy of weights, buffers and optimizer for `restore_state`."""
        # Not the model's state_dict: a user's may omit tensors, or refuse to be loaded again.
        tensors = [own_part(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())]
        return TrainerState(
            model=tuple((tensor, on_cpu(tensor)) for tensor in tensors),
            optimizer=copied(on_cpu, self.optimizer.state_dict()),
            scaler=self.scaler.state_dict(),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes that `save_state` takes of the host's memory."""
        of_optimizer = tensors_of(self.optimizer.state_dict()["state"])
        own = (own_part(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()))
        return sum(tensor.nbytes for tensor in (*own, *map(own_part, of_optimizer)))

    def lacks_room(self, num_whole: int = 0) -> bool:
        """Whether the host's memory is too small for what `save_state` copies on all ranks here.

        Args:
            num_whole: copies of all parameters that one of them makes besides.
        """
        needed = self.state_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed += num_whole * sum(parameter.nbytes for parameter in self.model.parameters())
        return needed > SHARE_OF_MEMORY * memory_bytes()[1]

    def restore_state(self, state: TrainerState) -> None:
        """Undoes all steps since `state` was saved."""
        with torch.no_grad():
            for tensor, value in state.model:
                tensor.copy_(value)
        # Before the new state is made on the device, which may not hold both.
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(copied(partial(own_copy, self.device), state.optimizer))
        self.scaler.load_state_dict(state.scaler)

    def abandon_step(self) -> None:
        """Drops what a step that ran out of memory has left.

        An optimizer that made only a part of a parameter's state takes it for the whole one in the next step,
        and a scaler doesn't unscale gradients twice in one. Source: torch/optim/adam.py, `Adam._init_group`;
        torch/amp/grad_scaler.py, `GradScaler.step`.
        """
        self.strategy.abandon()
        self.model.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        before, self.scaler = self.scaler, new_scaler(self.device, self.precision)
        self.scaler.load_state_dict(before.state_dict())

    def close(self) -> None:
        """Drops model, wrapper and data loader, so that the process group can be destroyed."""
        del self.strategy, self.optimizer, self.source, self.model, self.workload


def new_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler:
    """Scales losses where gradients would underflow, else does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision.scales_loss)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded, in the same memory."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return to_local() if to_local else tensor


def copied(copy_of: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A deep copy of an optimizer's state, with `copy_of` each of its tensors."""
    if isinstance(value, Tensor):
        return copy_of(value)
    if isinstance(value, dict):
        return {key: copied(copy_of, item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(copy_of, item) for item in value]
    return copy.deepcopy(value)


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def own_copy(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of a state on the CPU that an optimizer on this device may keep and change.

    It moves tensors to a GPU, which copies them, but for counters. Source: torch/optim/optimizer.py,
    `_process_value_according_to_param_policy`.
    """
    is_moved = not accelerator_of(device.type).is_host and tensor.numel() > 1
    return tensor if is_moved else tensor.clone()


def source_of(workload: Workload, config: LaunchConfig, rank: int, precision: Precision) -> SampleSource:
    """The source of this rank's samples."""
    positions = STRATEGIES[config.strategy].positions_of(rank, len(config.devices))
    pin = not accelerator_of(config.devices[rank]).is_host
    layout = Layout(positions, precision, pin, config.channels_last)
    if workload.dataset is None:
        return BatchSource(workload, config.seed, layout)
    return DatasetSource(workload, config.seed, layout, config.prefetch)


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """The workload's optimizer for `model`; without one, plain SGD.

    Raises:
        UserError: the workload's function raised, or gave something else.
    """
    with no_garbage_collection():
        importlib.import_module("torch._dynamo")  # which the first optimizer would import
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if workload.optimizer is None:
        return torch.optim.SGD(parameters, lr=DEFAULT_LEARNING_RATE)
    place = place_of(workload.optimizer)
    expected = "a torch.optim.Optimizer"
    with users_code("optimizer(parameters) failed", expected, place):
        optimizer = workload.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = "optimizer(parameters) must return an optimizer"
        raise UserError(what, expected=expected, got=type(optimizer).__name__, place=place)
    return optimizer


def with_implementation(
    optimizer: torch.optim.Optimizer, implementation: str, workload: Workload
) -> torch.optim.Optimizer:
    """The optimizer, before its first step, made again with `foreach` or `fused`.

    Raises:
        UserError: its class has no such option.
    """
    if implementation == "default":
        return optimizer
    kind = type(optimizer)
    options = inspect.signature(kind).parameters.keys() - {"params"}
    if implementation not in options:
        what = f"`optimizer: {implementation}` needs an optimizer of torch's that has this option"
        place = place_of(workload.optimizer or kind)
        raise UserError(
            what, expected=f"an optimizer with `{implementation}`", got=kind.__name__, place=place
        )
    chosen: dict[str, Any] = {
        name: name == implementation for name in ("foreach", "fused") if name in options
    }
    groups = [
        {name: value for name, value in group.items() if name in options | {"params"}} | chosen
        for group in optimizer.param_groups
    ]
    arguments: dict[str, Any] = {n: value for n, value in optimizer.defaults.items() if n in options}
    return kind(groups, **(arguments | chosen))


def accept_several_inputs(model: nn.Module) -> None:
    """Has `model(inputs)` pass a dict or a tuple on to the parameters of `forward`, as `Workload` states.

    By a hook of the model itself, so that it holds under every strategy, whose wrappers call it.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # compiled beforehand, for one: it is called as it is
    takes_one = can_bind(signature, 1)

    def unpack(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs:
            return None
        if isinstance(args[0], Mapping) and args[0].keys() <= signature.parameters.keys():
            return (), dict(args[0])
        if not takes_one and isinstance(args[0], tuple | list):
            return tuple(args[0]), {}
        return None

    if len(signature.parameters) > 1:
        model.register_forward_pre_hook(unpack, with_kwargs=True)


def can_bind(signature: inspect.Signature, num_args: int) -> bool:
    """Whether a function of this signature can be called with so many positional arguments."""
    try:
        signature.bind(*(None,) * num_args)
    except TypeError:
        return False
    return True


MAX_COMPILE_THREADS = 32
"""As many as torch takes by itself. Source: torch/_inductor/config.py, `decide_compile_threads`."""


def compile_threads(device: torch.device, share: int) -> int:
    """How many processes compile kernels: this rank's share of the cores; one where the CPU is the device.

    There, the compiler's processes would take cores from the ranks.
    """
    if accelerator_of(device.type).is_host:
        return 1
    return max(1, min(share, len(os.sched_getaffinity(0)), MAX_COMPILE_THREADS))


def compile_in_place(model: nn.Module, num_variants: int, num_threads: int = 1) -> None:
    """Has `model` compiled when it is first called with inputs of some shape.

    Every shape gets a graph of its own: one for all shapes would be worse for some splits than for others.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # before 2.7
    setattr(dynamo, limit, max(getattr(dynamo, limit), SHAPES_PER_VARIANT * num_variants))
    inductor.compile_threads = num_threads
    model.compile(dynamic=False)
