"""A rank's work as tasks that wait for each other: the nodes and edges of its dependency graph.

A task ends at a moment that the trace has. It begins when all that it waits for has ended; what is left until
its own end is what it costs, and a replay can take that away.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.tables import compute_ops
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import HostKind, collective_kind
from gpurun.launcher.trace.kineto.columns import HostRange, Trace

NO_LABEL = -1


class StepPart(IntEnum):
    """The part of a step that a task's time counts for."""

    COMPUTE = 0
    TRANSFER = 1
    """The transfer of a collective or message, after all of its ranks have arrived."""
    COPIES = 2
    INPUT = 3
    """The training loop waits for its next batch."""
    HOST = 4
    """The CPU: Python, operators, launches."""
    LATENCY = 5
    """Between a launch, or the end of what the work waited for, and the start of the work."""
    BEFORE = 6
    """Before the rank's first event: its capture began later than that of the others."""


@dataclass(frozen=True)
class Exchange:
    """A rank's part in a collective: two tasks."""

    start: int
    end: int
    device: str | None
    arrival: int
    """The task that ends when the rank arrives."""
    departure: int


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks of one rank; times in ns since its trace's base."""

    ends: Int64
    main: NDArray[np.int8]
    """`StepPart` of what isn't in `known`."""
    known: Int64
    """Time in ns by task and `StepPart`, at most: of the whole task where it is longer."""
    label: NDArray[np.int32]
    """Number of the kernel's name in `labels`; −1: none."""
    labels: tuple[str, ...]
    edges: NDArray[np.int32]
    """Pairs: a task, and one that waits for it."""
    exchanges: tuple[Exchange, ...]
    start: int
    """When the rank's first task could begin."""
    num_guessed: int
    """Waits of a stream or the CPU for GPU work that the trace doesn't record, but its times show."""


@dataclass
class TaskList:
    """Tasks as they are found."""

    ends: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    known: list[tuple[int, int, int]] = field(default_factory=list)
    """Task, part, time."""
    label: dict[int, int] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    num_guessed: int = 0

    def add(self, end: int, main: StepPart, after: Iterable[int] = ()) -> int:
        """A new task that ends then, and waits for the tasks in `after`."""
        number = len(self.ends)
        self.ends.append(end)
        self.main.append(main)
        self.edges.extend((task, number) for task in after)
        return number

    def spends(self, task: int, part: StepPart, ns: int) -> None:
        """Says that so much of the task's time, at most, goes into this part."""
        if ns > 0:
            self.known.append((task, part, ns))

    def done(self, labels: Sequence[str], start: int) -> Tasks:
        """All of them."""
        known = np.zeros((len(self.ends), len(StepPart)), dtype=np.int64)
        for task, part, ns in self.known:
            known[task, part] += ns
        label = np.full(len(self.ends), NO_LABEL, dtype=np.int32)
        for task, number in self.label.items():
            label[task] = number
        return Tasks(
            ends=np.array(self.ends, dtype=np.int64),
            main=np.array(self.main, dtype=np.int8),
            known=known,
            label=label,
            labels=tuple(labels),
            edges=np.array(self.edges, dtype=np.int32).reshape(-1, 2),
            exchanges=tuple(self.exchanges),
            start=start,
            num_guessed=self.num_guessed,
        )


def cpu_tasks(trace: Trace, window: tuple[int, int]) -> Tasks:
    """The tasks of a trace without GPU work in `window`, in ns since its base.

    They are its operators, and the collectives on threads of their own. The trace doesn't say what the
    program waits for. While it waits, no operator runs: a gap between operators in which a collective ends
    was spent waiting for it.
    """
    return _CpuBuilder(trace, window).build()


class _CpuBuilder:
    def __init__(self, trace: Trace, window: tuple[int, int]) -> None:
        self.window = window
        self.tasks = TaskList()
        self.last: dict[int, tuple[int, int]] = {}
        """When a thread's last collective ended, and in which task, by thread."""
        ops = compute_ops(trace)
        self.data = trace.union_of(HostKind.DATA)
        self.compute = union(trace.ops.start[ops], trace.ops.end[ops]).subtract(self.data)
        self.busy = self.compute.join(self.data)
        inside = [each for each in trace.of_kind(HostKind.COMM) if window[0] <= each.start < window[1]]
        self.ranges = sorted(inside, key=lambda each: each.start)
        self.calls = sorted(
            (each for each in trace.of_kind(HostKind.COMM_CALL) if each.name.startswith("c10d::")),
            key=lambda each: each.start,
        )

    def build(self) -> Tasks:
        first, last = self.window
        issued = [self._issued(each) for each in self.ranges]
        by_issue: defaultdict[int, list[int]] = defaultdict(list)
        for i, time_ns in enumerate(issued):
            by_issue[time_ns].append(i)
        waits: defaultdict[int, list[int]] = defaultdict(list)
        for i, begin in self._waited(issued).items():
            waits[begin].append(i)
        before, since = self.tasks.add(first, StepPart.BEFORE), first
        departures: dict[int, int] = {}
        # The host's own tasks end where it issues a collective, begins to wait for some, or is done.
        for point in sorted({first, last, *by_issue, *waits}):
            until = self.tasks.add(max(point, since), StepPart.HOST, [before])
            self._spent(until, since, point)
            before, since = until, max(point, since)
            departures |= {i: self._exchange(i, until) for i in by_issue[point]}
            awaited = [i for i in waits[point] if i in departures]
            if awaited:
                since = max(since, *(self.ranges[i].end for i in awaited))
                before = self.tasks.add(since, StepPart.HOST, [before, *(departures[i] for i in awaited)])
        return self.tasks.done((), first)

    def _issued(self, each: HostRange) -> int:
        """When the program issued it: at the start of the last call before it, else when it began."""
        kind = collective_kind(each.name)
        place = bisect_right(self.calls, each.start, key=lambda call: call.start)
        for call in reversed(self.calls[max(place - 64, 0) : place]):
            if collective_kind(call.name) == kind and call.start >= self.window[0]:
                return call.start
        return each.start

    def _waited(self, issued: list[int]) -> dict[int, int]:
        """Since when the program had nothing to do, by each collective that ends while no operator runs."""
        found = {}
        order = sorted(issued)
        for i, each in enumerate(self.ranges):
            place = int(np.searchsorted(self.busy.starts, each.end, "left"))
            begin = max(int(self.busy.ends[place - 1]) if place else 0, self.window[0])
            if begin < each.end <= self.window[1]:
                last_issue = bisect_right(order, each.end) - 1
                found[i] = max(begin, order[last_issue]) if last_issue >= 0 else begin
        return found

    def _exchange(self, i: int, issue: int) -> int:
        """Adds a collective: it begins once it is issued, and its thread is done with the one before."""
        each = self.ranges[i]
        before = self.last.get(each.thread)
        queue = [before[1]] if before is not None and before[0] <= each.start else []
        arrival = self.tasks.add(each.start, StepPart.LATENCY, [issue, *queue])
        departure = self.tasks.add(each.end, StepPart.TRANSFER, [arrival])
        self.tasks.exchanges.append(Exchange(each.start, each.end, None, arrival, departure))
        self.last[each.thread] = (each.end, departure)
        return departure

    def _spent(self, task: int, start: int, end: int) -> None:
        self.tasks.spends(task, StepPart.COMPUTE, _inside(self.compute, start, end))
        self.tasks.spends(task, StepPart.INPUT, _inside(self.data, start, end))


def _inside(times: Intervals, start: int, end: int) -> int:
    """How much of the stretch from `start` to `end` lies in `times`."""
    return times.clip(start, end).length_ns if end > start else 0
