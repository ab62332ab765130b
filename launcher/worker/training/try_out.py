"""One small step of a workload before anything is measured, so that mistakes in it are reported first.

It also counts the floating-point operations of a step.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gpurun.launcher.units import plural
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import (
    SourceLine,
    UserError,
    is_out_of_memory,
    place_of,
    text_of,
    users_code,
)
from gpurun.launcher.worker.base.nested import Tree, map_tensors, tensors_of
from gpurun.launcher.worker.base.precision import Precision
from gpurun.launcher.worker.training.batches import LoadedStep, MicroBatch, SampleSource
from gpurun.launcher.worker.training.forward_backward import returned_loss
from gpurun.launcher.worker.training.load_workload import place_in
from gpurun.workloads.base import Workload, on_device

NUM_SAMPLES = 2
"""Enough for batch normalisation, which refuses one."""
EXPECTED_LOSS = "a tensor of shape ()"
EXPECTED_OWN_LOSS = f'{EXPECTED_LOSS}, alone, as `outputs.loss` or as `outputs["loss"]`'
NUM_REPEATED = 16
"""Samples that are drawn twice: enough that even coarse random numbers differ somewhere."""


@dataclass(frozen=True)
class TriedStep:
    """The result of a step on a few samples."""

    unused: tuple[str, ...]
    """Names of the trainable parameters that get no gradient."""
    flops_per_sample: float | None
    """Operations of forward and backward; `None` where an operator can't be counted."""
    bytes_per_sample: float
    """Memory of inputs and targets."""


def try_out(
    workload: Workload,
    source: SampleSource,
    precision: Precision,
    device: torch.device,
    index: int,
    global_batch: int,
) -> TriedStep:
    """Runs forward and backward on a few samples.

    The model must be on `device` already; weights, buffers and random state are as before afterwards.

    Raises:
        UserError: the model or the loss raised, or returned something invalid.
        MemoryError: not even these samples fit.
    """
    # A dataset may be too small for this batch, but not for another variant's; that is checked later.
    available = NUM_SAMPLES if workload.dataset is None else len(workload.dataset)
    num_samples = min(NUM_SAMPLES, global_batch, available)
    try:
        return try_step(workload, source.whole(num_samples, step=0), precision, device, index)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        words = text_of(error).strip().partition("\n")[0]
        text = f"not even the model and {plural(num_samples, 'sample')} fit"
        explained = MemoryError(f"{text}: {words}" if words else text)
        raise explained.with_traceback(error.__traceback__) from None  # the user's line is what matters


def try_step(
    workload: Workload, step: LoadedStep, precision: Precision, device: torch.device, index: int
) -> TriedStep:
    """Runs forward and backward of the step, and returns what they show."""
    micro, counting = step.micro_batches[0], Counting()
    with preserved(workload.model, device), on_device(index), precision.autocast(device), counting:
        loss = first_loss(workload, micro, device)
        with users_code(
            "the backward pass failed",
            "a loss that can be differentiated",
            place_in(workload, workload.loss, workload.model),
        ):
            loss.backward()  # type: ignore[no-untyped-call]
        named = workload.model.named_parameters()
        unused = tuple(name for name, p in named if p.requires_grad and p.grad is None)
    flops, num_samples = counting.known_flops, sum(micro.chunks)
    return TriedStep(unused, None if flops is None else flops / num_samples, step.nbytes / num_samples)


@contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Undoes what forward and backward in it change: buffers, gradients and torch's random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with runtime_of(device).forked_random_state(device):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        model.zero_grad(set_to_none=True)


def batch_warning(workload: Workload, source: SampleSource, global_batch: int) -> str | None:
    """A warning for the author of a `batch` whose samples don't come from its generator alone; else `None`.

    A dataset isn't checked: it may draw new augmentations each time.
    """
    if workload.batch is None:
        return None
    size = min(NUM_REPEATED, global_batch)
    with torch.random.fork_rng(devices=[]):
        first, second = (source.whole(size, step=0).micro_batches[0] for _ in range(2))
    if same(first.inputs, second.inputs) and same(first.targets, second.targets):
        return None
    return (
        f"{place_of(workload.batch)}: batch(size, generator) returns different samples when called again "
        "with the same generator, so the ranks don't share one batch: draw everything from `generator`"
    )


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees hold the same tensors; NaN is the same as NaN."""
    pairs = list(zip(tensors_of(a), tensors_of(b), strict=False))
    return len(tensors_of(a)) == len(tensors_of(b)) and all(
        x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs
    )


def first_loss(workload: Workload, micro: MicroBatch, device: torch.device) -> Tensor:
    """The loss of a few samples.

    Raises:
        UserError: it isn't a scalar on the model's device that depends on the model's parameters.
    """
    inputs, targets = (
        map_tensors(lambda tensor: tensor.to(device), t) for t in (micro.inputs, micro.targets)
    )
    outputs = first_outputs(workload, inputs, device)
    loss: Any
    if workload.loss is None:
        loss, place = returned_loss(outputs), place_in(workload, workload.model)
        what, expected = "without `loss`, the model must return its loss", EXPECTED_OWN_LOSS
    else:
        what = "loss(outputs, targets) must return a scalar"
        expected = f'{EXPECTED_LOSS}: the mean over samples, or their sum with reduction="sum"'
        place = place_in(workload, workload.loss)
        with users_code("loss(outputs, targets) failed", f"a scalar tensor on {device}", place):
            loss = workload.loss(outputs, targets)
    check_loss(what, expected, loss, device, place)
    return cast(Tensor, loss)


def first_outputs(workload: Workload, inputs: Tree, device: torch.device) -> Tree:
    """The model's outputs for the inputs; all of them have to be on `device`."""
    place = place_in(workload, workload.model)
    whole = (
        ""
        if workload.loss
        else "; without `loss`, the model gets all that a sample has and makes the loss: "
        "if samples are (inputs, targets), set `loss`"
    )
    given = f"({describe(inputs)}{_unknown_names(workload.model, inputs)})"
    expected = f"outputs for these inputs {given}, with all tensors on {device} like the model{whole}"
    with users_code("the model failed on a small batch", expected, place):
        outputs = workload.model(inputs)
    check_devices("the model's outputs", outputs, device, place)
    return outputs


def _unknown_names(model: nn.Module, inputs: Tree) -> str:
    """Why a dict isn't passed on as keyword arguments: the keys that `forward` doesn't take."""
    try:
        known = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # compiled beforehand
        return ""
    foreign = [f"`{key}`" for key in inputs if key not in known] if isinstance(inputs, Mapping) else []
    if not foreign:
        return ""
    are = "is no parameter" if len(foreign) == 1 else "are no parameters"
    name = type(model).__name__
    return f"; {', '.join(foreign[:4])} {are} of {name}.forward, which gets the dict as its only argument"


def check_loss(
    what: str, expected: str, loss: object, device: torch.device, place: SourceLine | None
) -> None:
    """Raises `UserError` unless `loss` can be differentiated.

    Args:
        what: what is wrong with a loss that is no scalar.
        expected: what it should be.
        loss: of a few samples.
        device: the model's.
        place: where the loss is computed.
    """
    if not isinstance(loss, Tensor) or loss.dim():
        raise UserError(what, expected=expected, got=describe(loss), place=place)
    check_devices("the loss", loss, device, place)
    if not loss.requires_grad:
        what = "the loss doesn't depend on the model's parameters"
        got = "a loss that doesn't require a gradient (detached, or computed from the targets only)"
        raise UserError(what, expected="a loss that requires a gradient", got=got, place=place)


def check_devices(what: str, tree: Tree, device: torch.device, place: SourceLine | None) -> None:
    """Raises `UserError` where a tensor is on another device."""
    elsewhere = {str(tensor.device) for tensor in tensors_of(tree)} - {str(device)}
    if elsewhere:
        expected = f"tensors on {device}, like the model (use register_buffer for constants of the model)"
        got = f"tensors on {', '.join(sorted(elsewhere))}"
        raise UserError(f"{what} must be on the model's device", expected=expected, got=got, place=place)


def describe(value: object) -> str:
    """Shapes and types of a tree, in a few words."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    tensors = tensors_of(value)
    if not tensors:
        return f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        items = [f"`{key}`: {describe(item)}" for key, item in value.items()]
    else:
        items = [describe(tensor) for tensor in tensors]
    return f"a {type(value).__name__} with " + ", ".join(items[:4])


def has_batch_norm(model: nn.Module) -> bool:
    """Whether statistics over the samples of one device enter the model's outputs.

    `SyncBatchNorm` takes them over all ranks of a process group; without one it is a BatchNorm like others.
    """
    kinds = {type(each) for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}
    return bool(kinds - {nn.SyncBatchNorm} if dist.is_initialized() else kinds)


@contextmanager
def statistics_apart(model: nn.Module) -> Iterator[None]:
    """Each `SyncBatchNorm` is a BatchNorm like others within it: it waits for no other rank.

    In place of a group it gets the one that no rank is part of, whose size is -1.
    Source: torch/nn/modules/batchnorm.py, `SyncBatchNorm.forward`.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    groups = [layer.process_group for layer in layers]
    for layer in layers:
        layer.process_group = dist.GroupMember.NON_GROUP_MEMBER
    try:
        yield
    finally:
        for layer, group in zip(layers, groups, strict=True):
            layer.process_group = group


aten = torch.ops.aten

UNKNOWN_WORK = ("rnn", "lstm", "gru", "attention", "conv", "mm", "linear", "einsum", "fft")
"""Parts of names of operators whose work is not negligible: without a formula, the count would be wrong."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of what runs within it, backward passes included.

    torch's own `FlopCounterMode` has the same formulas, but it also hooks into every module and takes
    operators apart: more than a stranger's model should have to bear in every run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.unknown = 0, False

    @property
    def known_flops(self) -> int | None:
        """All operations; `None` where some can't be counted, or there are none."""
        return None if self.unknown or not self.flops else self.flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in FORMULAS:
            self.flops += FORMULAS[packet](*tree_map(shape_of, args))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif is_work(func):
            self.unknown = True
        return out


def shape_of(value: Any) -> Any:
    """A tensor's shape; anything else as it is."""
    return value.shape if isinstance(value, torch.Tensor) else value


def is_work(func: Any) -> bool:
    """Whether an operator without a formula may take a good part of a step."""
    name = str(func._overloadpacket)
    is_foreign = func.namespace not in ("aten", "prim", "prims", "profiler", "c10d")
    return is_foreign or any(part in name for part in UNKNOWN_WORK)


def rnn_flops(x: Sequence[int], *weights: Any) -> int:
    """Forward pass of recurrent layers: every token meets every weight matrix once.

    Args:
        x: shape (length, samples, width), or with the first two swapped.
        weights: shapes of weights and biases, among whatever else the operator takes.
    """
    return 2 * prod(x[:-1]) * sum(prod(shape) for shape in matrices(weights))


def rnn_backward_flops(x: Sequence[int], *weights: Any) -> int:
    """Twice the forward pass: gradients of the inputs and of the weights."""
    return 2 * rnn_flops(x, *weights)


def matrices(values: Sequence[Any]) -> list[Sequence[int]]:
    """Shapes of the weight matrices: of a layer, or of a list of all layers, which come first."""
    first = values[0]
    shapes = first if first and not isinstance(first[0], int) else values[:2]
    return [shape for shape in shapes if len(shape) == 2]


def attention_flops(q: Any, k: Any, v: Any, *_: Any) -> int:
    """Scaled dot product attention on the CPU, by the formula of the GPU's; causal ones count in full."""
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any) -> int:
    """The backward pass of the same."""
    return int(sdpa_backward_flop_count(grad, q, k, v))  # type: ignore[no-untyped-call]


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mkldnn_rnn_layer: rnn_flops,
    aten.mkldnn_rnn_layer_backward: rnn_backward_flops,
    aten._cudnn_rnn: rnn_flops,
    aten._cudnn_rnn_backward: rnn_backward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}
"""Formulas of operators that torch's own counter leaves out, by their shapes."""
