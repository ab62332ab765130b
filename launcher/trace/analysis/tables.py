"""Time by kernel, operator and module; ranges within ranges, without a loop over them.

Sorting and nesting take several times the memory of their columns, so they work on parts of a long trace that
no range crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.steps import Launched, compilations
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import (
    COMPILING,
    OLD_AUTOGRAD,
    POINT_TO_POINT,
    REPLICAS,
    TRITON_COMPILING,
    GpuKind,
    HostKind,
    collective_kind,
)
from gpurun.launcher.trace.kineto.columns import Spans, Timed, Trace

MAX_NAMES = 500
"""Only the names with most time are kept; real traces have 50 to 300."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class NameTime:
    """Time under one name, in ns."""

    name: str
    kind: str
    """The kind of the name: of GPU work compute, comm or memcpy; op, module."""
    count: int
    device_ns: int
    """The time of GPU work with this name, or launched directly from it."""
    host_ns: int
    """Time on the CPU, without nested operators."""
    comm_ns: int = 0
    """Communication, of `device_ns`."""
    memcpy_ns: int = 0
    """Copies and memsets, of `device_ns`."""


def work_ns(trace: Trace) -> Int64:
    """Nanoseconds of each piece of GPU work; an old profiler's are operators, less those that they call."""
    nesting = nest(trace.gpu) if trace.writer == OLD_AUTOGRAD else None
    return trace.gpu.duration if nesting is None else nesting.self_ns()


WORDS = {
    GpuKind.COMPUTE: "compute",
    GpuKind.COMM: "comm",
    GpuKind.MEMCPY: "memcpy",
    GpuKind.MEMSET: "memcpy",
}
"""Kinds of GPU work as tables call them."""


def kernel_times(trace: Trace, chosen: Mask) -> list[NameTime]:
    """GPU work by name, longest first."""
    gpu = trace.gpu
    counts, device_ns = _sums(gpu.name[chosen], work_ns(trace)[chosen], len(trace.gpu_names))
    kinds = np.zeros(len(trace.gpu_names), dtype=np.int8)
    kinds[gpu.name] = gpu.kind
    return _longest(
        NameTime(trace.gpu_names[i], WORDS[GpuKind(int(kinds[i]))], int(counts[i]), int(device_ns[i]), 0)
        for i in np.flatnonzero(counts).tolist()
    )


@dataclass(frozen=True, eq=False)
class Selection:
    """The scope of a table: all of a file, or some of its steps."""

    gpu: Mask
    """The chosen entries of `trace.gpu`, by position."""
    ops: Mask
    """The chosen entries of `trace.ops`, by position."""
    modules: Mask
    """The chosen entries of `trace.modules`, by position."""

    @property
    def is_all(self) -> bool:
        return bool(self.gpu.all() and self.ops.all() and self.modules.all())


def everything(trace: Trace) -> Selection:
    """All of a file."""
    columns = (trace.gpu, trace.ops, trace.modules)
    return Selection(*(np.ones(len(each), dtype=np.bool_) for each in columns))


def op_times(
    trace: Trace, work: Launched, choices: Sequence[Selection]
) -> list[tuple[list[NameTime], list[NameTime]]]:
    """Times by operator and by `nn.Module`, longest first, for each of the choices.

    Calls that issue collectives count with the GPU work that they launch, and with their own time only where
    the CPU is the device.
    """
    calls = [_calls(trace, work, chosen.gpu) for chosen in choices]
    totals = [(_Totals(trace.op_names, "op"), _Totals(trace.module_names, "module")) for _ in choices]
    timed = compute_ops(trace) if len(trace.gpu) else timed_ops(trace)
    for stretch in stretches(trace.ops, trace.modules):
        mine = stretch.holds(trace.ops.start)
        spans = trace.ops.where(mine)
        nesting = nest(spans)
        own = nesting.self_ns() if nesting else np.zeros(len(spans), dtype=np.int64)
        own[~timed[mine]] = 0
        inner = stretch.holds(trace.modules.start)
        around = trace.modules.where(inner)
        for chosen, all_calls, (ops, modules) in zip(choices, calls, totals, strict=True):
            shown, inside = chosen.ops[mine], all_calls.of(stretch)
            ops.add_host(spans.name[shown], own[shown])
            ops.add_device(spans, nesting, inside)
            _add_modules(modules, around, chosen.modules[inner], inside, (spans.where(shown), own[shown]))
    return [(ops.rows(), modules.rows()) for ops, modules in totals]


@dataclass(frozen=True, eq=False)
class _Calls:
    """The calls that launched or captured work: place and time, and how long the work ran."""

    threads: NDArray[np.int32]
    times: Int64
    durations: Int64
    kinds: NDArray[np.int8]
    """`GpuKind` of the work."""

    def of(self, stretch: Stretch) -> _Calls:
        mine = stretch.holds(self.times)
        return _Calls(self.threads[mine], self.times[mine], self.durations[mine], self.kinds[mine])


def _calls(trace: Trace, work: Launched, chosen: Mask) -> _Calls:
    known = chosen & work.is_known
    call, gpu, calls = work.call[known], trace.gpu, trace.launches
    return _Calls(calls.thread[call], calls.start[call], work_ns(trace)[known], gpu.kind[known])


@dataclass(eq=False)
class _Totals:
    """Sums by name, over the stretches of a trace."""

    names: Sequence[str]
    kind: str
    counts: Int64 = field(init=False)
    host_ns: Int64 = field(init=False)
    device_ns: Int64 = field(init=False)
    """The time by `GpuKind`, then name."""

    def __post_init__(self) -> None:
        self.counts, self.host_ns = np.zeros((2, len(self.names)), dtype=np.int64)
        self.device_ns = np.zeros((len(GpuKind), len(self.names)), dtype=np.int64)

    def add_host(self, names: NDArray[np.int32], ns: Int64) -> None:
        """Adds ranges with these names and times on the CPU."""
        counts, host_ns = _sums(names, ns, len(self.names))
        self.counts += counts
        self.host_ns += host_ns

    def add_device(self, spans: Spans, nesting: Nesting | None, calls: _Calls) -> None:
        """Adds the work that was launched from within `spans`."""
        if nesting is not None:
            span = nesting.innermost(calls.threads, calls.times)
            held = span >= 0
            sorts = calls.kinds[held].astype(np.int64) * len(self.names) + spans.name[span[held]]
            sums = _sums(sorts, calls.durations[held], self.device_ns.size)[1]
            self.device_ns += sums.reshape(self.device_ns.shape)

    def rows(self) -> list[NameTime]:
        """Everything that was added, longest first."""
        device_ns, copies = self.device_ns, [GpuKind.MEMCPY, GpuKind.MEMSET]
        columns = (
            self.counts,
            device_ns.sum(axis=0),
            self.host_ns,
            device_ns[GpuKind.COMM],
            device_ns[copies].sum(axis=0),
        )
        named = zip(self.names, *(column.tolist() for column in columns), strict=True)
        return _longest(NameTime(name, self.kind, *sums) for name, *sums in named if any(sums[:3]))


def _add_modules(
    modules: _Totals, spans: Spans, chosen: Mask, calls: _Calls, host: tuple[Spans, Int64]
) -> None:
    """Adds modules; their time on the CPU is that of the operators inside, which are counted separately."""
    ops, own = host
    nesting = nest(spans)
    if nesting is None:
        return
    by_op = nesting.innermost(ops.thread, ops.start)
    held = by_op >= 0
    host_ns = np.bincount(by_op[held], weights=own[held], minlength=len(spans)).astype(np.int64)
    modules.counts += np.bincount(spans.name[chosen], minlength=len(modules.names))
    modules.host_ns += _sums(spans.name, host_ns, len(modules.names))[1]
    modules.add_device(spans, nesting, calls)


def _sums(names: NDArray[np.int32] | Int64, ns: Int64, num_names: int) -> tuple[Int64, Int64]:
    """Number and total time by name. Sums of doubles are exact here: a trace is shorter than 2^53 ns."""
    counts = np.bincount(names, minlength=num_names)
    return counts, np.bincount(names, weights=ns, minlength=num_names).astype(np.int64)


def _longest(rows: Iterable[NameTime]) -> list[NameTime]:
    merged: dict[tuple[str, str], NameTime] = {}
    for row in rows:
        before = merged.get((row.name, row.kind))
        merged[row.name, row.kind] = _add(before, row) if before else row
    longest = sorted(merged.values(), key=lambda row: (-row.device_ns, -row.host_ns, row.name))
    return longest[:MAX_NAMES]


def _add(a: NameTime, b: NameTime) -> NameTime:
    return NameTime(
        a.name,
        a.kind,
        a.count + b.count,
        a.device_ns + b.device_ns,
        a.host_ns + b.host_ns,
        a.comm_ns + b.comm_ns,
        a.memcpy_ns + b.memcpy_ns,
    )


def compute_ops(trace: Trace) -> Mask:
    """Operators that compute: no communication calls, and none on threads that run collectives."""
    return timed_ops(trace, (HostKind.OP,))


def timed_ops(trace: Trace, kinds: Sequence[HostKind] = (HostKind.OP, HostKind.COMM_CALL)) -> Mask:
    """Operators of these kinds, but on threads that run collectives."""
    of_op = trace.op_kinds[trace.ops.name] if len(trace.ops) else np.empty(0, dtype=np.int8)
    # Ranges of messages are on the thread that sends and receives, which also computes.
    collectives = [
        each for each in trace.of_kind(HostKind.COMM) if collective_kind(each.name) not in POINT_TO_POINT
    ]
    comm_threads = sorted({each.thread for each in collectives})
    return np.asarray(np.isin(of_op, kinds) & ~np.isin(trace.ops.thread, comm_threads), dtype=np.bool_)


def issuing_calls(trace: Trace) -> Spans:
    """The calls that issue collectives, or in which others compute: no compute, but in operators."""
    with_replicas = np.array([bool(REPLICAS.match(name)) for name in trace.op_names], dtype=bool)
    return trace.ops.where((with_replicas | (trace.op_kinds == HostKind.COMM_CALL))[trace.ops.name])


def cpu_operators(trace: Trace) -> Intervals:
    """When operators compute, or enclose calls that issue collectives.

    Not in calls for a device, nor where they compile code or load the next batch.
    """
    ops = trace.ops.where(compute_ops(trace))
    return _without_calls(trace, ops.thread, lambda mine: ops.where(mine).covered)


def cpu_compute(trace: Trace) -> Intervals:
    """When operators compute: as `cpu_operators`, without the calls that issue collectives.

    DDP's are within an operator of autograd.
    """
    if not len(issuing_calls(trace)):
        return cpu_operators(trace)
    found = [_innermost_computing(trace, stretch.holds(trace.ops.start)) for stretch in stretches(trace.ops)]
    starts, ends, threads = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return _without_calls(trace, threads, lambda mine: union(starts[mine], ends[mine]))


def _innermost_computing(trace: Trace, chosen: Mask) -> tuple[Int64, Int64, Int64]:
    """From when to when, and on which threads, the innermost of these operators computes."""
    spans, computing = trace.ops.where(chosen), compute_ops(trace)[chosen]
    nesting = nest(spans)
    if nesting is None:
        spans = spans.where(computing)
        return spans.start, spans.end, spans.thread.astype(np.int64)
    starts, ends = nesting.starts, nesting.starts + nesting.lengths

    def covered(some: Mask | Int64) -> Intervals:
        return union(starts[some], ends[some])

    computes = computing[nesting.order]
    issues = (trace.op_kinds[spans.name] == HostKind.COMM_CALL)[nesting.order]
    found, is_inside = covered(computes), np.zeros(len(spans), dtype=bool)
    for level in nesting.levels:
        outer = nesting.outer[level]
        is_inside[level] = (outer >= 0) & (is_inside | issues)[outer]
        some = level[is_inside[level] | issues[level]]
        if len(some):
            found = found.subtract(covered(some[issues[some]])).join(covered(some[computes[some]]))
    begins = found.starts % nesting.stride_ns + nesting.first_ns
    return begins, begins + found.ends - found.starts, found.starts // nesting.stride_ns


def _without_calls(
    trace: Trace, threads: NDArray[np.int32] | Int64, covered: Callable[[Mask], Intervals]
) -> Intervals:
    """What threads do, but not while they compile or are in calls for a device.

    And none of it while the loop waits for a batch.
    """
    others = (trace.launches, compilations(trace, COMPILING, TRITON_COMPILING))
    does_others = np.isin(threads, np.concatenate([each.thread for each in others]))
    mixed, alone = (covered(mine) for mine in (does_others, ~does_others))
    for each in others:
        mixed = mixed.subtract(each.covered)
    return mixed.join(alone).subtract(trace.union_of(HostKind.DATA))


NONE = -1


@dataclass(frozen=True, eq=False)
class Nesting:
    """Ranges of all threads laid end to end on one line, in order of their start, outer before inner.

    The depth of a range is the number of ranges that are open when it starts; the range that encloses it is
    the last one before it whose depth is one less.
    """

    order: Int64
    """Position in the original column of each range on the line."""
    starts: Int64
    ends: Int64
    """A range without length ends 1 ns after its start: work may be launched from within it."""
    lengths: Int64
    sorted_ends: Int64
    depths: NDArray[np.int32]
    first_ns: int
    stride_ns: int
    """Length of the line that one thread takes."""

    @cached_property
    def levels(self) -> list[Int64]:
        """Positions on the line, by depth."""
        by_depth = np.argsort(self.depths, kind="stable")
        deepest = int(self.depths.max(initial=NONE))
        cuts = np.searchsorted(self.depths[by_depth], np.arange(deepest + 2))
        return [by_depth[begin:end] for begin, end in pairwise(cuts)]

    @cached_property
    def outer(self) -> Int64:
        """Position on the line of the range around each; −1 where there is none."""
        found = np.full(len(self.starts), NONE, dtype=np.int64)
        for outer, inner in pairwise(self.levels):
            place = np.searchsorted(outer, inner) - 1
            found[inner] = np.where(place >= 0, outer[place], NONE)
        return found

    def self_ns(self) -> Int64:
        """Time of each range, in the order of its column, less that of the ranges directly inside."""
        own = self.lengths.copy()
        inner = np.flatnonzero(self.outer >= 0)
        np.subtract.at(own, self.outer[inner], self.lengths[inner])
        np.maximum(own, 0, out=own)
        result = np.empty_like(own)
        result[self.order] = own
        return result

    def around(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which ranges have one of the marked ones inside; both in the order of the column."""
        inside, found = marked[self.order], np.zeros(len(self.order), dtype=bool)
        for members in reversed(self.levels):
            outer = self.outer[members[inside[members] | found[members]]]
            found[outer[outer >= 0]] = True
        result = np.empty_like(found)
        result[self.order] = found
        return result

    def innermost(self, threads: NDArray[np.int32], times_ns: Int64) -> Int64:
        """Position in the column of the innermost range that is open then and there; −1 where none is."""
        line = times_ns - self.first_ns
        on_line = (line >= 0) & (line < self.stride_ns)
        line = line + threads.astype(np.int64) * self.stride_ns
        opened = np.searchsorted(self.starts, line, "right")
        depth = opened - np.searchsorted(self.sorted_ends, line, "right")
        found = np.full(len(line), NONE, dtype=np.int64)
        for level, members in enumerate(self.levels):
            asks = np.flatnonzero((depth == level + 1) & on_line)
            last = np.searchsorted(members, opened[asks]) - 1
            candidate = members[np.maximum(last, 0)]
            holds = (last >= 0) & (self.ends[candidate] > line[asks])
            found[asks[holds]] = self.order[candidate[holds]]
        return found


def nest(spans: Spans) -> Nesting | None:
    """The nesting of `spans`; `None` if there are none, or they are too far apart for one line."""
    if not len(spans):
        return None
    first_ns = int(spans.start.min())
    stride_ns = int(spans.end.max()) - first_ns + 2
    if stride_ns * (int(spans.thread.max()) + 1) >= 1 << 62:
        return None
    # In place where possible: this is where a large trace needs most memory.
    starts = spans.thread.astype(np.int64)
    starts *= stride_ns
    starts += spans.start
    starts -= first_ns
    order = np.lexsort((-spans.duration, starts))
    starts = starts[order]
    lengths = spans.duration[order]
    ends = np.maximum(lengths, 1)
    ends += starts
    sorted_ends = np.sort(ends)
    depths = np.arange(len(starts), dtype=np.int32)
    depths -= np.searchsorted(sorted_ends, starts, "right").astype(np.int32)
    return Nesting(order, starts, ends, lengths, sorted_ends, depths, first_ns, stride_ns)


SIZE = 1 << 17
"""Approximate number of ranges in a stretch; more if there is no free moment to cut at."""
_EVER = np.iinfo(np.int64)


@dataclass(frozen=True)
class Stretch:
    """A stretch of time from `begin_ns` up to, but not including, `end_ns`."""

    begin_ns: int
    end_ns: int

    def holds(self, times_ns: Int64) -> NDArray[np.bool_]:
        """Which of these times are inside."""
        return (times_ns >= self.begin_ns) & (times_ns < self.end_ns)


def stretches(*columns: Timed) -> Iterator[Stretch]:
    """Stretches from the beginning to the end of time; every range is inside one of them.

    A cut is a moment in which a range of any column starts while none is open.
    """
    wanted = np.concatenate([column.start[SIZE::SIZE] for column in columns])
    cuts = _free(columns, wanted).tolist() if len(wanted) else []
    for begin_ns, end_ns in pairwise([_EVER.min, *cuts, _EVER.max]):
        yield Stretch(int(begin_ns), int(end_ns))


def _free(columns: Sequence[Timed], wanted: Int64) -> Int64:
    """The first moments from the wanted ones on in which a cut is possible."""
    covered = columns[0].covered
    for column in columns[1:]:
        if len(column):
            covered = covered.join(column.covered)
    place = np.unique(np.searchsorted(covered.starts, wanted))
    return covered.starts[place[place < len(covered.starts)]]


def nestings(trace: Trace) -> Iterator[tuple[Stretch, Int64, Nesting]]:
    """Stretches of time, with the positions of the operators in each and how they are nested."""
    for stretch in stretches(trace.ops):
        inside = stretch.holds(trace.ops.start)
        nesting = nest(trace.ops.where(inside))
        if nesting is not None:
            yield stretch, np.flatnonzero(inside), nesting
