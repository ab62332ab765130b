"""The ranges of a trace that become blocks, on threads and streams, each with its kind and name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.blocks import BlockKind, Int8, Int32
from gpurun.launcher.trace.analysis.tables import compute_ops
from gpurun.launcher.trace.intervals import Int64
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
    """For GPU work the position, among the launches, of the call that launched it; else `NONE`."""
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
