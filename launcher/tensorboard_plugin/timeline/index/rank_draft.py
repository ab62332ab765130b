"""One rank's part of the index, from its own trace: entries in lanes and rows, on its own clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.blocks import BlockKind, Int8, Int32, join
from gpurun.launcher.tensorboard_plugin.timeline.index.sources import (
    NONE,
    Activities,
    NameNumbers,
    Ranges,
    activities,
    gpu_ranges,
    host_ranges,
    launch_ranges,
)
from gpurun.launcher.trace.analysis.steps import host_steps, launched
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind
from gpurun.launcher.trace.kineto.columns import Trace

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
    activities: Activities
    num_events: int
    num_hidden: int
    """Number of ranges nested too deeply to be shown."""


def draft(trace: Trace) -> RankDraft:
    """The entries of a trace."""
    names = NameNumbers()
    work = launched(trace, host_steps(trace))
    launches = launch_ranges(trace, names)
    threads = join([launches, *host_ranges(trace, names)])
    streams = gpu_ranges(trace, work.launch, names)
    layout = _Layout()
    layout.add("thread", threads, thread_labels(trace))
    layout.add("stream", streams, stream_labels(trace), threads_before=len(threads.start))
    entries, collectives = layout.entries(join([threads, streams]))
    return RankDraft(
        entries=entries,
        names=tuple(names),
        lanes=tuple(layout.lanes),
        collectives=collectives,
        activities=activities(trace),
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
