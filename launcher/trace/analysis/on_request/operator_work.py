"""Floating-point operations and least bytes of matrix products, convolutions and attention, by their shapes.

Multiply and add count as two. Bytes are those of every input and output once: what perfect reuse
would move. Causal attention counts half, since kernels skip what is masked. Source of the formulas:
`torch/utils/flop_counter.py`, which counts causal attention whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gpurun.launcher.trace.kineto.classify import dtype_bytes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """The work of one call."""

    flops: int
    num_bytes: int | None
    """`None` where the type of an input isn't known."""


@dataclass(frozen=True)
class OperatorCall:
    """The arguments of an operator as the trace has them."""

    shapes: tuple[Shape, ...]
    """The shapes by position of the argument; `()` for what isn't a tensor."""
    types: tuple[str, ...]
    values: tuple[Any, ...]
    """The arguments that aren't tensors, as text; empty where the trace doesn't have them."""

    @property
    def element_bytes(self) -> int | None:
        """The size of an element of the first tensor, in bytes."""
        return next(
            (dtype_bytes(name) for shape, name in zip(self.shapes, self.types, strict=False) if shape), None
        )

    def numbers(self, place: int) -> tuple[int, ...] | None:
        """A list of whole numbers among the values."""
        text = str(self.values[place]) if place < len(self.values) else ""
        parts = [part.strip() for part in text.strip("[]").split(",")]
        if not all(part.lstrip("-").isdigit() for part in parts):
            return None
        return tuple(int(part) for part in parts)

    def flag(self, place: int) -> bool:
        """Whether a value is true; of a kind of mask, whether it is causal."""
        return place < len(self.values) and str(self.values[place]).lower() in ("true", "1", "2")


def work_of(name: str, call: OperatorCall) -> Work | None:
    """The work of a call of this operator; `None` for other operators, and where shapes don't show it."""
    formula = _FORMULAS.get(name)
    if formula is None:
        return None
    try:
        found = formula(call)
    except (IndexError, ValueError, TypeError, ArithmeticError):
        return None
    if found is None or min(found) < 0:
        return None
    flops, elements = found
    size = call.element_bytes
    return Work(flops, None if size is None else elements * size)


Formula = Callable[[OperatorCall], tuple[int, int] | None]
"""Operations, and elements of all inputs and outputs."""


def _product(first: int) -> Formula:
    """A matrix product of the arguments `first` and `first` + 1, plus what is before it, if anything."""

    def formula(call: OperatorCall) -> tuple[int, int] | None:
        a, b = call.shapes[first : first + 2]
        if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
            return None
        batch, (m, k), n = prod(a[:-2]), a[-2:], b[-1]
        added = prod(call.shapes[0]) if first and call.shapes[0] else 0
        return 2 * batch * m * k * n, batch * (m * k + k * n + m * n) + added

    return formula


def _matrix_vector(call: OperatorCall) -> tuple[int, int]:
    (m, k), _ = call.shapes[:2]
    return 2 * m * k, m * k + k + m


def _linear(call: OperatorCall) -> tuple[int, int]:
    a, (n, k) = call.shapes[:2]
    m = prod(a[:-1])
    return 2 * m * n * k, m * k + n * k + m * n


@dataclass(frozen=True)
class _Places:
    """Which of an operator's arguments say how it convolves."""

    padding: int
    stride: int
    dilation: int
    transposed: int | None = None


def _convolution(places: _Places) -> Formula:
    def formula(call: OperatorCall) -> tuple[int, int] | None:
        image, weight = call.shapes[:2]
        if places.transposed is not None and call.flag(places.transposed):
            return None
        output = _output(call, places, image, weight)
        return None if output is None else _convolved(image, weight, output)

    return formula


def _output(call: OperatorCall, places: _Places, image: Shape, weight: Shape) -> Shape | None:
    """The shape that a convolution results in."""
    sides = len(image) - 2
    found = [call.numbers(place) for place in (places.padding, places.stride, places.dilation)]
    if sides < 1 or len(weight) != len(image) or None in found:
        return None
    padding, stride, dilation = (
        each * sides if len(each) == 1 else each for each in found if each is not None
    )
    lengths = zip(image[2:], weight[2:], padding, stride, dilation, strict=True)
    space = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in lengths)
    return (image[0], weight[0], *space)


def _convolved(image: Shape, weight: Shape, output: Shape) -> tuple[int, int]:
    """`weight` has its input channels per group already."""
    return 2 * prod(output) * prod(weight[1:]), prod(image) + prod(weight) + prod(output)


def _convolution_backward(call: OperatorCall) -> tuple[int, int]:
    """The gradients of input and weight: each as much as the convolution itself."""
    output, image, weight = call.shapes[:3]
    wanted = [flag.strip().lower() != "false" for flag in str(call.values[10]).strip("[]").split(",")][:2]
    flops, _ = _convolved(image, weight, output)
    transposed = call.flag(7)
    if transposed:
        flops = 2 * prod(image) * prod(weight[1:])
    moved = sum(prod(shape) for shape in (output, image, weight))
    return flops * sum(wanted), moved + sum(
        prod(shape) for shape, want in zip((image, weight), wanted, strict=True) if want
    )


def _gradient_of_input(call: OperatorCall) -> tuple[int, int]:
    """The gradient of the input, in versions of torch before 1.11."""
    output, weight = call.shapes[1:3]
    return 2 * prod(output) * prod(weight[1:]), prod(call.numbers(0) or ()) + prod(output) + prod(weight)


def _attention(causal: int, heads_first: bool = True, passes: float = 1.0, first: int = 0) -> Formula:
    """Two products forward, five backward: 2.5 times as much."""

    def formula(call: OperatorCall) -> tuple[int, int] | None:
        query, key, value = call.shapes[first : first + 3]
        if not len(query) == len(key) == len(value) == 4:
            return None
        batch, heads, length, depth = query if heads_first else (query[0], query[2], query[1], query[3])
        others = key[2] if heads_first else key[1]
        share = 0.5 if call.flag(causal) else 1.0
        flops = 2 * batch * heads * length * others * (depth + value[3]) * share * passes
        elements = prod(query) + prod(key) + prod(value) + prod(query[:-1]) * value[3]
        return int(flops), elements * (1 if passes == 1 else 2)

    return formula


_FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::addmm_": _product(1),
    "aten::_addmm_activation": _product(1),
    "aten::mv": _matrix_vector,
    "aten::linear": _linear,
    "aten::mkldnn_linear": _linear,
    "aten::convolution": _convolution(_Places(4, 3, 5, 6)),
    "aten::_convolution": _convolution(_Places(4, 3, 5, 6)),
    "aten::cudnn_convolution": _convolution(_Places(2, 3, 4)),
    "aten::miopen_convolution": _convolution(_Places(3, 4, 5)),
    "aten::mkldnn_convolution": _convolution(_Places(3, 4, 5)),
    "aten::convolution_backward": _convolution_backward,
    "aten::cudnn_convolution_backward_input": _gradient_of_input,
    "aten::_scaled_dot_product_flash_attention": _attention(4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(4),
    "aten::_scaled_dot_product_efficient_attention": _attention(6),
    "aten::_scaled_dot_product_cudnn_attention": _attention(6),
    "aten::_flash_attention_forward": _attention(8, heads_first=False),
    "aten::_efficient_attention_forward": _attention(9, heads_first=False),
    "aten::_flash_attention_backward": _attention(11, heads_first=False, passes=2.5, first=1),
    "aten::_efficient_attention_backward": _attention(14, heads_first=False, passes=2.5, first=1),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(14, passes=2.5, first=1),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(11, passes=2.5, first=1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(7, passes=2.5, first=1),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(11, passes=2.5, first=1),
}  # fmt: skip


def has_formula(name: str) -> bool:
    """Whether the work of this operator's calls is known from their shapes."""
    return name in _FORMULAS


def call_of(dims: Sequence[Any], types: Sequence[Any], values: Sequence[Any]) -> OperatorCall:
    """The call with these arguments as the trace has them."""
    return OperatorCall(tuple(map(_shape, dims)), tuple(map(str, types)), tuple(values))


def shapes_text(dims: Any) -> str:
    """The shapes of all tensors, also of those in lists: `64×3, 64`."""
    if _shape(dims):
        return "×".join(map(str, dims))
    inner = dims if isinstance(dims, list) else ()
    return ", ".join(text for text in map(shapes_text, inner) if text)


def _shape(dims: Any) -> Shape:
    """A list of tensors, and what isn't a tensor, has no shape of its own."""
    if isinstance(dims, list) and all(type(side) is int and side >= 0 for side in dims):
        return tuple(dims)
    return ()
