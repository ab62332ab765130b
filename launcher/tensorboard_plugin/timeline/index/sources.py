"""The parts of a rank's trace in the index: the ranges that become blocks, on threads and streams, and the
device's activity as sets of moments, for sums over a window and the overview.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.blocks import BlockKind, Int8, Int32
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.tables import compute_ops
from gpurun.launcher.trace.intervals import EMPTY, Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import WAITING_CALLS, GpuKind, HostKind
from gpurun.launcher.trace.kineto.columns import HostRange, Numbering, Spans, Trace

NONE = -1
_GPU_KINDS = {
    GpuKind.COMPUTE: BlockKind.COMPUTE,
    GpuKind.COMM: BlockKind.TRANSFER,
    GpuKind.MEMCPY: BlockKind.COPY,
    GpuKind.MEMSET: BlockKind.COPY,
}
_RANGE_KINDS = {HostKind.DATA: BlockKind.INPUT, HostKind.COMM: BlockKind.TRANSFER}


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of one sort, in the order of the trace's columns."""

    start: Int64
    end: Int64
    name: Int32
    kind: Int8
    thread: Int32
    """Number of its thread, or of its stream."""
    launch: Int32
    """The position, among the launches, of the call that launched GPU work; else `NONE`."""
    correlation: Int64
    is_comm: NDArray[np.bool_]
    """Whether it is a collective, whose waiting and transfer are shown separately."""


class NameNumbers(Numbering):
    """Numbers names in order of first use."""

    def numbers(self, names: Iterable[str]) -> Int32:
        return np.array([self[name] for name in names], dtype=np.int32)


def gpu_ranges(trace: Trace, launch: Int64, names: NameNumbers) -> Ranges:
    """Kernels, copies and memsets, by stream. `launch`: as in `trace.analysis.steps.Launched`."""
    gpu = trace.gpu
    kinds = np.array([_GPU_KINDS[kind] for kind in GpuKind], dtype=np.int8)
    return Ranges(
        start=gpu.start,
        end=gpu.end,
        name=_named(gpu, trace.gpu_names, names),
        kind=kinds[gpu.kind],
        thread=gpu.thread,
        launch=launch.astype(np.int32),
        correlation=gpu.correlation,
        is_comm=gpu.kind == GpuKind.COMM,
    )


def launch_ranges(trace: Trace, names: NameNumbers) -> Ranges:
    """Calls of the CUDA or HIP API."""
    calls = trace.launches
    waits = np.array([WAITING_CALLS.match(name or "") is not None for name in trace.launch_names], dtype=bool)
    kind = np.full(len(calls), BlockKind.CPU, dtype=np.int8)
    if len(calls):
        kind[waits[calls.name]] = BlockKind.CPU_WAIT
    return _host(calls, _named(calls, trace.launch_names, names), kind, calls.correlation)


def host_ranges(trace: Trace, names: NameNumbers) -> Iterator[Ranges]:
    """Operators, modules, named ranges, collectives on the CPU and waiting for data, by thread."""
    ops = trace.ops
    kind = np.full(len(ops), BlockKind.CPU, dtype=np.int8)
    if not len(trace.gpu):
        kind[compute_ops(trace)] = BlockKind.COMPUTE  # no device but the CPU: its operators are the compute
    yield _host(ops, _named(ops, trace.op_names, names), kind)
    for spans, texts in ((trace.modules, trace.module_names), (trace.annotations, trace.annotation_names)):
        plain = np.full(len(spans), BlockKind.CPU, dtype=np.int8)
        yield _host(spans, _named(spans, texts, names), plain)
    yield _of_ranges([each for each in trace.ranges if each.kind in _RANGE_KINDS], names)


def _named(spans: Spans, texts: Sequence[str], names: NameNumbers) -> Int32:
    table = names.numbers(text or "" for text in texts)
    return table[spans.name] if len(spans) else np.empty(0, dtype=np.int32)


def _host(spans: Spans, name: Int32, kind: Int8, correlation: Int64 | None = None) -> Ranges:
    unknown = np.full(len(spans), NONE, dtype=np.int64)
    return Ranges(
        start=spans.start,
        end=spans.end,
        name=name,
        kind=kind,
        thread=spans.thread,
        launch=unknown.astype(np.int32),
        correlation=unknown if correlation is None else correlation,
        is_comm=np.zeros(len(spans), dtype=bool),
    )


def _of_ranges(ranges: Sequence[HostRange], names: NameNumbers) -> Ranges:
    start = np.array([each.start for each in ranges], dtype=np.int64)
    end = np.array([each.end for each in ranges], dtype=np.int64)
    thread = np.array([each.thread for each in ranges], dtype=np.int32)
    kind = np.array([_RANGE_KINDS[each.kind] for each in ranges], dtype=np.int8)
    unknown = np.full(len(ranges), NONE, dtype=np.int64)
    return Ranges(
        start,
        end,
        names.numbers(each.name for each in ranges),
        kind,
        thread,
        unknown.astype(np.int32),
        unknown,
        kind == BlockKind.TRANSFER,
    )


@dataclass(frozen=True, eq=False)
class Activities:
    """Moments of each class; they may overlap."""

    compute: Intervals
    comm: Intervals
    copies: Intervals
    data: Intervals
    """The training loop waits for its next batch."""


def activities(trace: Trace) -> Activities:
    """Activity of the GPU if there is GPU work, else of the CPU, where operators count as compute."""
    data = trace.union_of(HostKind.DATA)
    if len(trace.gpu):
        return Activities(
            _of_gpu(trace, GpuKind.COMPUTE),
            _of_gpu(trace, GpuKind.COMM),
            _of_gpu(trace, GpuKind.MEMCPY, GpuKind.MEMSET),
            data,
        )
    ops = compute_ops(trace)
    compute = union(trace.ops.start[ops], trace.ops.end[ops]).subtract(data)
    return Activities(compute, trace.union_of(HostKind.COMM), EMPTY, data)


def _of_gpu(trace: Trace, *kinds: GpuKind) -> Intervals:
    chosen = np.isin(trace.gpu.kind, kinds)
    return union(trace.gpu.start[chosen], trace.gpu.end[chosen])


def exclusive(found: Activities, transfers: Intervals) -> dict[BlockKind, Intervals]:
    """The moments without overlap: each counts for the first of compute, communication, copy and input.

    Args:
        found: what the device did.
        transfers: when collectives moved data; other communication is waiting.
    """
    comm = found.comm.subtract(found.compute)
    busy = found.compute.join(found.comm)
    return {
        BlockKind.COMPUTE: found.compute,
        BlockKind.TRANSFER: comm.intersect(transfers),
        BlockKind.WAIT: comm.subtract(transfers),
        BlockKind.COPY: found.copies.subtract(busy),
        BlockKind.INPUT: found.data.subtract(busy.join(found.copies)),
    }


def split_transfers(
    parts: Mapping[BlockKind, Intervals], kinds: Mapping[BlockKind, Intervals]
) -> dict[BlockKind, Intervals]:
    """The parts with transfers by kind: each moment counts for the first kind that has it."""
    found = dict(parts)
    rest = found.pop(BlockKind.TRANSFER)
    for kind, moments in kinds.items():
        found[kind] = rest.intersect(moments)
        rest = rest.subtract(moments)
    return {**found, BlockKind.OTHER_COMM: rest}


def shifted(moments: Intervals, realigned: Realigned) -> Intervals:
    """The moments on another clock."""
    return Intervals(realigned.each(moments.starts), realigned.each(moments.ends))


def ordered(parts: dict[BlockKind, Intervals]) -> tuple[Int64, Int64, Int8]:
    """Starts, ends and kinds of disjoint moments, by time."""
    starts = np.concatenate([each.starts for each in parts.values()])
    ends = np.concatenate([each.ends for each in parts.values()])
    kinds = np.concatenate([np.full(len(each.starts), kind, dtype=np.int8) for kind, each in parts.items()])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order], kinds[order]
