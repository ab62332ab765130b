"""Operators and kernels by the shapes of their arguments, with what the device achieves.

Floating-point operations and least bytes are those of matrix products, convolutions and attention. Multiply
and add count as two. Bytes are those of every input and output once: what perfect reuse would move. Of an
expanded input of a matrix product or attention, what is stored counts. What is multiplied by a `beta` of 0
isn't read (documentation of `torch.addmm`). Causal attention counts half, since kernels skip what is masked;
where it isn't recorded whether it is, or how long packed sequences are, operations aren't known.

Source of the formulas: `torch/utils/flop_counter.py`, which counts causal attention whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.machine.accelerators import peak_gb_per_s, peak_tflop_per_s
from gpurun.launcher.trace.analysis.steps import Launched
from gpurun.launcher.trace.analysis.tables import WORDS, Selection, compute_ops, nestings, work_ns
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import GpuKind, dtype_bytes
from gpurun.launcher.trace.kineto.columns import NO_SHAPES, OpArguments, Trace, decoded
from gpurun.launcher.trace.model import KernelTotal, ShapeTotal

NO_OP = -1
MAX_ROWS = 1000
_PRECISIONS = {"bfloat16": "bf16", "half": "fp16", "float": "fp32", "double": "fp64"}
_TF32 = ("tf32", "s1688", "xmma_gemm_f32f32_tf32")
"""In names of kernels that compute float32 on tensor cores."""


@dataclass(frozen=True)
class OpShape:
    """Calls of an operator with equal arguments, on one rank."""

    name: str
    shapes: str
    types: str
    work: Work | None
    precision: str | None
    count: int
    device_ns: int
    device: str


@dataclass(frozen=True)
class KernelShape:
    """A kernel as launched by such calls, on one rank."""

    name: str
    kind: str
    op: str | None
    shapes: str
    graph: bool
    count: int
    device_ns: int
    min_ns: int
    max_ns: int


def launching_ops(trace: Trace, work: Launched) -> Int64:
    """The position in `trace.ops` of the operator that launched or captured each piece of work; −1: none."""
    found = np.full(len(trace.gpu), NO_OP, dtype=np.int64)
    known = np.flatnonzero(work.is_known)
    calls = work.call[known]
    threads, times = trace.launches.thread[calls], trace.launches.start[calls]
    for stretch, inside, nesting in nestings(trace) if len(known) else ():
        asked = np.flatnonzero(stretch.holds(times))
        place = nesting.innermost(threads[asked], times[asked])
        found[known[asked[place >= 0]]] = inside[place[place >= 0]]
    return found


def op_shapes(trace: Trace, work: Launched, ops_of: Int64, chosen: Selection, device: str) -> list[OpShape]:
    """Operators by their arguments, those with most time first."""
    assert trace.details is not None
    arguments = trace.details.of_op
    on_gpu = len(trace.gpu) > 0
    device_ns = _device_ns(trace, ops_of, chosen) if on_gpu else own_host_ns(trace)
    runs = _runs(trace, work, ops_of, chosen) if on_gpu else chosen.ops.astype(np.int64)
    counted = np.flatnonzero((runs > 0) & (device_ns > 0) & (arguments != NO_SHAPES) & compute_ops(trace))
    width = len(trace.details.op_arguments) + 1
    keys = trace.ops.name[counted].astype(np.int64) * width + arguments[counted]
    keys = 2 * keys + _hands_on(trace)[counted]
    unique, place = np.unique(keys, return_inverse=True)
    counts, sums = (
        np.bincount(place, weights=each[counted], minlength=len(unique)).astype(np.int64)
        for each in (runs, device_ns)
    )
    tensor_cores = _on_tensor_cores(trace, ops_of, chosen)
    order = np.argsort(-sums)[:MAX_ROWS].tolist()
    first = np.full(len(unique), len(trace.ops), dtype=np.int64)
    np.minimum.at(first, place, counted)
    return [
        _op_shape(trace, int(unique[i]), width, int(counts[i]), int(sums[i]), device,
                  bool(tensor_cores[first[i]]))
        for i in order
    ]  # fmt: skip


def _hands_on(trace: Trace) -> NDArray[np.bool_]:
    """Operators that leave their work to another one with shapes: as `aten::linear` does to `aten::addmm`."""
    assert trace.details is not None
    works = np.array([name in _FORMULAS for name in trace.op_names], dtype=bool)[trace.ops.name]
    works &= trace.details.of_op != NO_SHAPES
    found = np.zeros(len(trace.ops), dtype=bool)
    for _, inside, nesting in nestings(trace):
        found[inside] = nesting.around(works[inside])
    return found


def _device_ns(trace: Trace, ops_of: Int64, chosen: Selection) -> Int64:
    held = chosen.gpu & (ops_of >= 0)
    sums = np.bincount(ops_of[held], weights=work_ns(trace)[held], minlength=len(trace.ops))
    return sums.astype(np.int64)


def _runs(trace: Trace, work: Launched, ops_of: Int64, chosen: Selection) -> Int64:
    """How often each operator ran on the GPU: once as it was called, and once with each replay."""
    held = np.flatnonzero(chosen.gpu & (ops_of >= 0))
    replay = np.where(work.replayed[held], work.launch[held], NO_OP)
    ran = np.unique(np.stack([ops_of[held], replay]), axis=1)[0]
    return np.bincount(ran, minlength=len(trace.ops))


def own_host_ns(trace: Trace) -> Int64:
    """Each operator's own time on the CPU, without nested ones."""
    own = np.zeros(len(trace.ops), dtype=np.int64)
    for _, inside, nesting in nestings(trace):
        own[inside] = nesting.self_ns()
    return own


def _on_tensor_cores(trace: Trace, ops_of: Int64, chosen: Selection) -> NDArray[np.bool_]:
    """Operators one of whose kernels computes float32 as TF32."""
    named = [any(mark in name for mark in _TF32) for name in trace.gpu_names]
    found = np.zeros(len(trace.ops) + 1, dtype=bool)
    if any(named):
        held = chosen.gpu & (ops_of >= 0)
        found[ops_of[held & np.array(named)[trace.gpu.name]]] = True
    return found


def _op_shape(
    trace: Trace, key: int, width: int, count: int, device_ns: int, device: str, is_tf32: bool
) -> OpShape:
    assert trace.details is not None
    key, hands_on = divmod(key, 2)
    name, number = divmod(key, width)
    given = trace.details.op_arguments[number]
    call = call_of(decoded(given.dims), decoded(given.types), decoded(given.inputs), decoded(given.strides))
    title = trace.op_names[name]
    types = [kind for _, kind in _typed(call)]
    precision = _PRECISIONS.get(types[0].lower()) if types else None
    return OpShape(
        name=title,
        shapes=_shapes_text(trace, number),
        types=", ".join(types),
        work=None if hands_on else work_of(title, call),
        precision="tf32" if precision == "fp32" and is_tf32 else precision,
        count=count,
        device_ns=device_ns,
        device=device,
    )


def kernel_shapes(trace: Trace, work: Launched, ops_of: Int64, chosen: Selection) -> list[KernelShape]:
    """GPU work by its name and by the operator that launched it with its arguments, longest first."""
    assert trace.details is not None
    gpu, details = trace.gpu, trace.details
    mine = np.flatnonzero(chosen.gpu)
    op = ops_of[mine]
    arguments = np.where(op >= 0, np.append(details.of_op, NO_SHAPES)[op], NO_SHAPES)
    names = np.where(op >= 0, np.append(trace.ops.name, NO_OP)[op], NO_OP)
    keys = np.stack([gpu.name[mine], names, arguments, work.replayed[mine]]).astype(np.int64)
    unique, place, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    place = place.reshape(-1)
    ns = work_ns(trace)[mine]
    sums = np.bincount(place, weights=ns, minlength=unique.shape[1]).astype(np.int64)
    least, most = np.full(len(sums), np.iinfo(np.int64).max), np.zeros(len(sums), dtype=np.int64)
    np.minimum.at(least, place, ns)
    np.maximum.at(most, place, ns)
    kinds = np.zeros(len(trace.gpu_names), dtype=np.int8)
    kinds[gpu.name] = gpu.kind
    return [
        KernelShape(
            name=trace.gpu_names[kernel],
            kind=WORDS[GpuKind(int(kinds[kernel]))],
            op=trace.op_names[name] if name >= 0 else None,
            shapes=_shapes_text(trace, argument),
            graph=bool(graph),
            count=int(counts[i]),
            device_ns=int(sums[i]),
            min_ns=int(least[i]),
            max_ns=int(most[i]),
        )
        for i in np.argsort(-sums)[:MAX_ROWS].tolist()
        for kernel, name, argument, graph in [unique[:, i].tolist()]
    ]


def _shapes_text(trace: Trace, number: int) -> str:
    if trace.details is None or number == NO_SHAPES:
        return ""
    return _shapes_of(trace.details.op_arguments[number])


def _shapes_of(given: OpArguments) -> str:
    return ", ".join(text for text in map(shapes_text, decoded(given.dims)) if text)


def shapes_and_types(given: OpArguments) -> str:
    """Shapes and types of an operator's tensors: `64×3, 3×8 float`, each type once; empty without tensors."""
    shapes = _shapes_of(given)
    types = [kind for _, kind in _typed(call_of(decoded(given.dims), decoded(given.types), ()))]
    return " ".join(filter(None, (shapes, ", ".join(dict.fromkeys(types))))) if shapes else ""


def _typed(call: OperatorCall) -> list[tuple[Shape, str]]:
    """Shape and type of each tensor."""
    pairs = zip(call.shapes, call.types, strict=False)
    return [(shape, kind.removeprefix("c10::")) for shape, kind in pairs if shape and kind]


def shape_totals(ranks: Iterable[Sequence[OpShape]]) -> tuple[ShapeTotal, ...]:
    """All ranks' operators, those with most time first."""
    merged: dict[tuple[object, ...], OpShape] = {}
    for row in (row for rows in ranks for row in rows):
        key = (row.name, row.shapes, row.types, row.work, row.precision, row.device)
        old = merged.get(key)
        merged[key] = replace(
            row,
            count=row.count + (old.count if old else 0),
            device_ns=row.device_ns + (old.device_ns if old else 0),
        )
    longest = sorted(merged.values(), key=lambda row: (-row.device_ns, row.name, row.shapes))
    return tuple(map(_shape_total, longest[:MAX_ROWS]))


def _shape_total(row: OpShape) -> ShapeTotal:
    flops = row.work.flops if row.work else None
    num_bytes = row.work.num_bytes if row.work else None
    call_ns = row.device_ns / row.count
    percent, bound = _roofline(row, flops, num_bytes, call_ns)
    return ShapeTotal(
        name=row.name,
        shapes=row.shapes,
        types=row.types,
        count=row.count,
        device_us=row.device_ns / 1000,
        flops=flops,
        bytes=num_bytes,
        tflop_per_s=flops / call_ns / 1000 if flops is not None else None,
        gb_per_s=num_bytes / call_ns if num_bytes is not None else None,
        roofline_percent=percent,
        bound=bound,
    )


def _roofline(
    row: OpShape, flops: int | None, num_bytes: int | None, call_ns: float
) -> tuple[float | None, str | None]:
    """The share of the device's peak, and which peak that is."""
    rate = peak_tflop_per_s(row.device, row.precision or "")
    moved = peak_gb_per_s(row.device)
    if flops is None or num_bytes is None or rate is None or moved is None:
        return None, None
    least: Mapping[str, float] = {"compute": flops / rate / 1000, "memory": num_bytes / moved}
    bound = max(least, key=least.__getitem__)
    return 100 * least[bound] / call_ns, bound


def kernel_totals(ranks: Iterable[Sequence[KernelShape]]) -> tuple[KernelTotal, ...]:
    """All ranks' kernels, those with most time first."""
    merged: dict[tuple[object, ...], KernelShape] = {}
    for row in (row for rows in ranks for row in rows):
        key = (row.name, row.kind, row.op, row.shapes, row.graph)
        old = merged.get(key)
        merged[key] = (
            row
            if old is None
            else replace(
                row,
                count=row.count + old.count,
                device_ns=row.device_ns + old.device_ns,
                min_ns=min(row.min_ns, old.min_ns),
                max_ns=max(row.max_ns, old.max_ns),
            )
        )
    longest = sorted(merged.values(), key=lambda row: (-row.device_ns, row.name, row.shapes))
    return tuple(
        KernelTotal(
            row.name, row.kind, row.op, row.shapes, row.graph, row.count,
            row.device_ns / 1000, row.min_ns / 1000, row.max_ns / 1000,
        )
        for row in longest[:MAX_ROWS]
    )  # fmt: skip


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """The work of one call."""

    flops: int | None
    """`None` where the values of arguments that decide it aren't recorded."""
    num_bytes: int | None
    """`None` where the type of an input, or what is written, isn't known."""


@dataclass(frozen=True)
class OperatorCall:
    """The arguments of an operator as the trace has them."""

    shapes: tuple[Shape, ...]
    """The shapes by position of the argument; `()` for what isn't a tensor."""
    types: tuple[str, ...]
    values: tuple[Any, ...]
    """The arguments that aren't tensors, as text; empty where the trace doesn't have them."""
    strides: tuple[Any, ...] = ()
    """The strides by position of the argument; empty where no tensor is expanded, or the trace lacks them."""

    def stored(self, place: int) -> int:
        """The elements of a tensor in memory: a side with the stride 0 has one; 0 for what isn't a tensor."""
        shape = self.shapes[place]
        strides = self.strides[place] if place < len(self.strides) else None
        if not isinstance(strides, list) or len(strides) != len(shape):
            strides = [1] * len(shape)
        sides = (side if stride else min(side, 1) for side, stride in zip(shape, strides, strict=True))
        return prod(sides) if shape else 0

    def is_tensor(self, place: int | None) -> bool:
        """Whether that argument is one."""
        return place is not None and place < len(self.shapes) and self.shapes[place] != ()

    def is_zero(self, place: int) -> bool:
        """Whether a value is the number 0."""
        try:
            return float(self.values[place]) == 0
        except (IndexError, TypeError, ValueError):
            return False

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
    if found is None or any(each is not None and each < 0 for each in found):
        return None
    flops, elements = found
    size = call.element_bytes
    return Work(flops, None if size is None or elements is None else elements * size)


Done = tuple[int | None, int | None]
"""Operations, and elements of all inputs and outputs; `None`: unknown."""
Formula = Callable[[OperatorCall], Done | None]


def _product(first: int) -> Formula:
    """A matrix product of the arguments `first` and `first` + 1, plus `beta` times what is before it."""

    def formula(call: OperatorCall) -> tuple[int, int] | None:
        a, b = call.shapes[first : first + 2]
        if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
            return None
        batch, (m, k), n = prod(a[:-2]), a[-2:], b[-1]
        added = call.stored(0) if first and not call.is_zero(first + 2) else 0
        return 2 * batch * m * k * n, call.stored(first) + call.stored(first + 1) + batch * m * n + added

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
    """The gradients of input and weight: each as much as the convolution itself, and reads the other one."""
    output, image, weight = call.shapes[:3]
    wanted = [flag.strip().lower() != "false" for flag in str(call.values[10]).strip("[]").split(",")][:2]
    flops, _ = _convolved(image, weight, output)
    transposed = call.flag(7)
    if transposed:
        flops = 2 * prod(image) * prod(weight[1:])
    return flops * sum(wanted), prod(output) + sum(wanted) * (prod(image) + prod(weight))


def _gradient_of_input(call: OperatorCall) -> tuple[int, int]:
    """The gradient of the input, in versions of torch before 1.11."""
    output, weight = call.shapes[1:3]
    return 2 * prod(output) * prod(weight[1:]), prod(call.numbers(0) or ()) + prod(output) + prod(weight)


def _attention(
    causal: int,
    heads_first: bool = True,
    passes: float = 1.0,
    first: int = 0,
    bias: int | None = None,
    packed: int | None = None,
) -> Formula:
    """Two products forward, five backward: 2.5 times as much.

    Args:
        causal: which argument says whether the mask is causal.
        heads_first: whether the heads come before the length.
        passes: how much is computed, by the forward pass.
        first: the argument that is the query.
        bias: the one that is added before the softmax.
        packed: the one that says where sequences begin that follow each other; how long is each isn't known.
    """

    def formula(call: OperatorCall) -> Done | None:
        query, key, value = call.shapes[first : first + 3]
        if not len(query) == len(key) == len(value) == 4 or call.is_tensor(packed):
            return None
        batch, heads, length, depth = query if heads_first else (query[0], query[2], query[1], query[3])
        others = key[2] if heads_first else key[1]
        share = 0.5 if call.flag(causal) else 1.0
        flops = 2 * batch * heads * length * others * (depth + value[3]) * share * passes
        moved = sum(map(call.stored, range(first, first + 3))) + prod(query[:-1]) * value[3]
        elements: int | None = moved * (1 if passes == 1 else 2)
        if bias is not None and call.is_tensor(bias):  # its gradient may be wanted, too
            elements = moved + call.stored(bias) if passes == 1 else None
        return int(flops) if causal < len(call.values) else None, elements

    return formula


_FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::addmm_": _product(1),
    "aten::baddbmm_": _product(1),
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
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(4, bias=5),
    "aten::_scaled_dot_product_efficient_attention": _attention(6, bias=3),
    "aten::_scaled_dot_product_cudnn_attention": _attention(6, bias=3),
    "aten::_flash_attention_forward": _attention(8, False),
    "aten::_efficient_attention_forward": _attention(9, False, bias=3, packed=4),
    "aten::_flash_attention_backward": _attention(11, False, 2.5, first=1),
    "aten::_efficient_attention_backward": _attention(14, False, 2.5, first=1, bias=4, packed=6),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(14, passes=2.5, first=1, bias=8),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(11, passes=2.5, first=1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(7, passes=2.5, first=1, bias=8),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(11, passes=2.5, first=1, bias=4),
}  # fmt: skip


def call_of(
    dims: Sequence[Any], types: Sequence[Any], values: Sequence[Any], strides: Sequence[Any] = ()
) -> OperatorCall:
    """The call with these arguments as the trace has them."""
    return OperatorCall(tuple(map(_shape, dims)), tuple(map(str, types)), tuple(values), tuple(strides))


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
