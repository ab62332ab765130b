"""One rank's part of the index, from its own trace: entries in lanes and rows, on its own clock.

Ranges on threads and streams become blocks. The device's activity is kept as sets of moments, for sums over a
window and the overview.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.format import BlockKind, Int8, Int32, join
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.digest import DeviceActivity, gpu_activity
from gpurun.launcher.trace.analysis.steps import host_steps, launched
from gpurun.launcher.trace.analysis.tables import compute_ops, cpu_compute
from gpurun.launcher.trace.intervals import EMPTY, Int64, Intervals
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


def _gpu_ranges(trace: Trace, launch: Int64, names: NameNumbers) -> Ranges:
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


def _launch_ranges(trace: Trace, names: NameNumbers) -> Ranges:
    """Calls of the CUDA or HIP API."""
    calls = trace.launches
    waits = np.array([WAITING_CALLS.match(name or "") is not None for name in trace.launch_names], dtype=bool)
    kind = np.full(len(calls), BlockKind.CPU, dtype=np.int8)
    if len(calls):
        kind[waits[calls.name]] = BlockKind.CPU_WAIT
    return _host(calls, _named(calls, trace.launch_names, names), kind, calls.correlation)


def _host_ranges(trace: Trace, names: NameNumbers) -> Iterator[Ranges]:
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


def activity_of(trace: Trace) -> DeviceActivity:
    """Activity of the GPU if there is GPU work, else of the CPU, where operators count as compute."""
    gpu = trace.gpu
    if len(gpu):
        return gpu_activity(gpu.start, gpu.end, gpu.kind, EMPTY)
    return DeviceActivity(cpu_compute(trace), trace.union_of(HostKind.COMM), EMPTY)


def exclusive(found: DeviceActivity, data: Intervals, transfers: Intervals) -> dict[BlockKind, Intervals]:
    """The moments without overlap: each counts for the first of compute, communication, copy and input.

    Args:
        found: what the device did.
        data: when the training loop waited for its next batch.
        transfers: when collectives moved data; other communication is waiting.
    """
    comm = found.comm.subtract(found.compute)
    return {
        BlockKind.COMPUTE: found.compute,
        BlockKind.TRANSFER: comm.intersect(transfers),
        BlockKind.WAIT: comm.subtract(transfers),
        BlockKind.COPY: found.copies.subtract(found.compute.join(found.comm)),
        BlockKind.INPUT: data.subtract(found.busy),
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


MAX_ROWS = 32
"""Deeper ranges aren't shown; real stacks of modules and operators are 10 to 20 deep."""
AUTOGRAD = "autograd::engine"


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries that can be seen and selected, by lane, row and start.

    A collective is two entries that follow each other: its wait, which may have no length, and its transfer.
    """

    start: Int64
    end: Int64
    name: Int32
    kind: Int8
    launch: Int32
    """Entry of the call that launched it; −1: none."""
    correlation: Int64

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class LaneDraft:
    """A thread or a stream, with the entries of each of its rows as (first, last + 1)."""

    kind: str
    """`thread` or `stream`."""
    label: str
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class RankDraft:
    """One rank's entries, in ns since its trace's base."""

    entries: Entries
    names: tuple[str, ...]
    lanes: tuple[LaneDraft, ...]
    collectives: Int64
    """Entries that are the wait of a collective."""
    activity: DeviceActivity
    data: Intervals
    """When the training loop waited for its next batch."""
    num_events: int
    num_hidden: int
    """Number of ranges nested too deeply to be shown."""


def draft(trace: Trace) -> RankDraft:
    """The entries of a trace."""
    names = NameNumbers()
    work = launched(trace, host_steps(trace))
    launches = _launch_ranges(trace, names)
    threads = join([launches, *_host_ranges(trace, names)])
    streams = _gpu_ranges(trace, work.launch, names)
    layout = _Layout()
    layout.add("thread", threads, thread_labels(trace))
    layout.add("stream", streams, stream_labels(trace), threads_before=len(threads.start))
    entries, collectives = layout.entries(join([threads, streams]))
    return RankDraft(
        entries=entries,
        names=tuple(names),
        lanes=tuple(layout.lanes),
        collectives=collectives,
        activity=activity_of(trace),
        data=trace.union_of(HostKind.DATA),
        num_events=len(threads.start) + len(streams.start),
        num_hidden=layout.num_hidden,
    )


class _Layout:
    """Puts ranges into lanes and rows, one sort of lane after the other."""

    def __init__(self) -> None:
        self.lanes: list[LaneDraft] = []
        self.order: list[NDArray[np.intp]] = []
        """Positions in the joined ranges, by place in the index."""
        self.num_entries = 0
        self.num_hidden = 0

    def add(self, kind: str, ranges: Ranges, labels: dict[int, str], threads_before: int = 0) -> None:
        """A lane for each thread that has a label, in the order of the labels."""
        by_thread = np.argsort(ranges.thread, kind="stable")
        cuts = np.searchsorted(ranges.thread[by_thread], np.arange(int(ranges.thread.max(initial=-1)) + 2))
        for thread, label in labels.items():
            mine = by_thread[cuts[thread] : cuts[thread + 1]] if thread + 1 < len(cuts) else by_thread[:0]
            if len(mine):
                self._add_lane(kind, label, ranges, mine, threads_before)

    def _add_lane(
        self, kind: str, label: str, ranges: Ranges, mine: NDArray[np.intp], threads_before: int
    ) -> None:
        order, rows = order_and_rows(ranges.start[mine], ranges.end[mine])
        mine = mine[order]
        shown = rows < MAX_ROWS
        self.num_hidden += int(len(rows) - shown.sum())
        mine, rows = mine[shown], rows[shown]
        by_row = np.argsort(rows, kind="stable")
        mine, rows = mine[by_row], rows[by_row]
        # Collectives take two entries, so a row's entries are counted with their length.
        lengths = np.cumsum(1 + ranges.is_comm[mine].astype(np.int64))
        ends = np.concatenate(([0], lengths))[np.searchsorted(rows, np.arange(int(rows[-1]) + 2))]
        cuts = (ends + self.num_entries).tolist()
        self.lanes.append(LaneDraft(kind, label, tuple(pairwise(cuts))))
        self.order.append(mine + threads_before)
        self.num_entries = cuts[-1]

    def entries(self, ranges: Ranges) -> tuple[Entries, Int64]:
        """All entries, and which of them are the waits of collectives."""
        order = np.concatenate(self.order) if self.order else np.empty(0, dtype=np.intp)
        comm = ranges.is_comm[order]
        place = np.repeat(np.arange(len(order)), 1 + comm.astype(np.int64))
        source = order[place]
        second = np.concatenate(([False], place[1:] == place[:-1])) if len(place) else np.empty(0, dtype=bool)
        waits = np.flatnonzero(second) - 1
        end = ranges.end[source]
        kind = ranges.kind[source]
        end[waits] = ranges.start[source][waits]
        kind[waits] = BlockKind.WAIT
        found = Entries(
            start=ranges.start[source],
            end=end,
            name=ranges.name[source],
            kind=kind,
            launch=_entry_of(ranges.launch[source], source, len(ranges.start)),
            correlation=ranges.correlation[source],
        )
        return found, waits


def _entry_of(launch: Int32, source: NDArray[np.intp], num_ranges: int) -> Int32:
    """Positions among the ranges, which the launches head, as places in the index."""
    places = np.full(num_ranges + 1, NONE, dtype=np.int32)
    places[source] = np.arange(len(source), dtype=np.int32)
    places[num_ranges] = NONE
    return places[np.where(launch >= 0, launch, num_ranges)]


def order_and_rows(start: Int64, end: Int64) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """The ranges in order of time, outer before inner, and the row of each in that order, from 0.

    A range goes below all ranges that are open when it begins; if ranges nest, the row is their depth.
    """
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    rows = np.arange(len(start)) - np.searchsorted(np.sort(np.maximum(end, start + 1)), start, "right")
    rows = rows.astype(np.int32)
    if _overlaps(start, end, rows):
        rows = _by_stack(start, end)
    return order, rows


def _overlaps(start: Int64, end: Int64, rows: NDArray[np.int32]) -> bool:
    """Whether two ranges in a row overlap: they don't nest then."""
    by_row = np.argsort(rows, kind="stable")
    start, end, rows = start[by_row], end[by_row], rows[by_row]
    same = rows[1:] == rows[:-1]
    return bool((same & (start[1:] < end[:-1])).any())


def _by_stack(start: Int64, end: Int64) -> NDArray[np.int32]:
    """A range leaves the stack when another begins after its end and nothing is on top of it."""
    stack: list[int] = []
    rows = np.empty(len(start), dtype=np.int32)
    for i, (begin_ns, end_ns) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while stack and stack[-1] <= begin_ns:
            stack.pop()
        rows[i] = len(stack)
        stack.append(max(end_ns, begin_ns + 1))
    return rows


def thread_labels(trace: Trace) -> dict[int, str]:
    """Label by number of the thread: the training loop first, then autograd, then the busiest."""
    counts: Counter[int] = Counter()
    for spans in (trace.launches, trace.ops, trace.modules, trace.annotations):
        counts.update(_count(spans.thread))
    counts.update(each.thread for each in trace.ranges if each.kind in (HostKind.DATA, HostKind.COMM))
    collective = {each.thread for each in trace.of_kind(HostKind.COMM)}
    main, autograd = _main_thread(trace, counts), _autograd_threads(trace)
    roles: dict[str, list[int]] = {"main": [], "autograd": [], "collectives": [], "thread": []}
    for thread, _ in counts.most_common():
        is_any = (thread == main, thread in autograd, thread in collective, True)
        roles[next(role for role, is_it in zip(roles, is_any, strict=True) if is_it)].append(thread)
    others = roles.pop("thread")
    found = {thread: label for role, threads in roles.items() for thread, label in _numbered(role, threads)}
    return found | {thread: f"CPU thread {trace.threads[thread][1]}" for thread in others}


def _numbered(role: str, threads: Sequence[int]) -> list[tuple[int, str]]:
    """Label of each thread: no two lanes may have the same one."""
    if len(threads) == 1:
        return [(threads[0], f"CPU {role}")]
    return [(thread, f"CPU {role} {number}") for number, thread in enumerate(sorted(threads), 1)]


def stream_labels(trace: Trace) -> dict[int, str]:
    """Label by number of the stream, those that compute before those that communicate."""
    several = len({device for device, _ in trace.streams}) > 1
    comm = set(np.unique(trace.gpu.thread[trace.gpu.kind == GpuKind.COMM]).tolist())
    compute = set(np.unique(trace.gpu.thread[trace.gpu.kind == GpuKind.COMPUTE]).tolist())
    found = {}
    for number, (device, stream) in enumerate(trace.streams):
        place = f"device {device} " if several else ""
        does = " comm" if number in comm - compute else " compute" if number in compute else ""
        found[number] = f"{place}stream {stream}{does}"
    order = sorted(
        found, key=lambda n: (trace.streams[n][0], n not in compute, n in comm, _natural(found[n]))
    )
    return {number: found[number] for number in order}


def _count(threads: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> dict[int, int]:
    numbers, counts = np.unique(threads, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _main_thread(trace: Trace, counts: Counter[int]) -> int | None:
    """The thread of the steps; without steps the busiest one."""
    steps = Counter(each.thread for each in trace.of_kind(HostKind.STEP))
    ranked = steps.most_common(1) or counts.most_common(1)
    return ranked[0][0] if ranked else None


def _autograd_threads(trace: Trace) -> set[int]:
    names = np.array([name.startswith(AUTOGRAD) for name in trace.op_names], dtype=bool)
    return set(np.unique(trace.ops.thread[names[trace.ops.name]]).tolist()) if len(trace.ops) else set()


def _natural(label: str) -> tuple[int, str]:
    """`stream 7` before `stream 20`."""
    digits = "".join(character for character in label if character.isdecimal())
    return int(digits[:18] or 0), label
