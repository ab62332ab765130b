"""Operators and kernels by the shapes of their arguments, with what the device achieves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.machine.accelerators import peak_gb_per_s, peak_tflop_per_s
from gpurun.launcher.trace.analysis.nesting import nest, stretches
from gpurun.launcher.trace.analysis.on_request.operator_work import (
    OperatorCall,
    Shape,
    Work,
    call_of,
    has_formula,
    shapes_text,
    work_of,
)
from gpurun.launcher.trace.analysis.steps import Launched
from gpurun.launcher.trace.analysis.tables import Selection, compute_ops
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import GpuKind
from gpurun.launcher.trace.kineto.columns import NO_SHAPES, OpArguments, Trace, decoded
from gpurun.launcher.trace.requested_tables import KernelTotal, ShapeTotal

NO_OP = -1
MAX_ROWS = 1000
_WORDS = {
    GpuKind.COMPUTE: "compute",
    GpuKind.COMM: "comm",
    GpuKind.MEMCPY: "memcpy",
    GpuKind.MEMSET: "memcpy",
}
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
    for stretch in stretches(trace.ops):
        inside = np.flatnonzero(stretch.holds(trace.ops.start))
        nesting = nest(trace.ops.where(stretch.holds(trace.ops.start)))
        asked = np.flatnonzero(stretch.holds(times))
        if nesting is not None and len(asked):
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
    works = np.array([has_formula(name) for name in trace.op_names], dtype=bool)[trace.ops.name]
    works &= trace.details.of_op != NO_SHAPES
    found = np.zeros(len(trace.ops), dtype=bool)
    for stretch in stretches(trace.ops):
        mine = stretch.holds(trace.ops.start)
        nesting = nest(trace.ops.where(mine))
        if nesting is not None:
            found[mine] = nesting.around(works[mine])
    return found


def _device_ns(trace: Trace, ops_of: Int64, chosen: Selection) -> Int64:
    held = chosen.gpu & (ops_of >= 0)
    sums = np.bincount(ops_of[held], weights=trace.gpu.duration[held], minlength=len(trace.ops))
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
    for stretch in stretches(trace.ops):
        mine = stretch.holds(trace.ops.start)
        nesting = nest(trace.ops.where(mine))
        if nesting is not None:
            own[mine] = nesting.self_ns()
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
    call = call_of(decoded(given.dims), decoded(given.types), decoded(given.inputs))
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
    ns = gpu.duration[mine]
    sums = np.bincount(place, weights=ns, minlength=unique.shape[1]).astype(np.int64)
    least, most = np.full(len(sums), np.iinfo(np.int64).max), np.zeros(len(sums), dtype=np.int64)
    np.minimum.at(least, place, ns)
    np.maximum.at(most, place, ns)
    kinds = np.zeros(len(trace.gpu_names), dtype=np.int8)
    kinds[gpu.name] = gpu.kind
    return [
        KernelShape(
            name=trace.gpu_names[kernel],
            kind=_WORDS[GpuKind(int(kinds[kernel]))],
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
