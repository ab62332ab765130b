"""How many floating-point operations a step takes, counted once while the model is tried out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

UNKNOWN_WORK = ("rnn", "lstm", "gru", "attention", "conv", "mm", "linear", "einsum", "fft")
"""Parts of names of operators whose work is not negligible: without a formula, the count would be wrong."""


@dataclass
class Count:
    """The count so far."""

    flops: int = 0
    unknown: set[str] = field(default_factory=set)
    """Operators whose work is not known."""

    @property
    def known_flops(self) -> int | None:
        """All operations; `None` where some can't be counted, or there are none."""
        return None if self.unknown or not self.flops else self.flops


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of what runs within it, backward passes included.

    torch's own `FlopCounterMode` has the same formulas, but it also hooks into every module and takes
    operators apart: more than a stranger's model should have to bear in every run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in FORMULAS:
            self.count.flops += FORMULAS[packet](*tree_map(shape_of, args))
        elif packet in flop_registry:
            self.count.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif is_work(func):
            self.count.unknown.add(str(packet))
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
