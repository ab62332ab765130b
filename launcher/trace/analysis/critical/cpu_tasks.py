"""Tasks of a rank without GPU work: its operators, and the collectives on threads of their own.

The trace doesn't say what the program waits for. While it waits, no operator runs: a gap between operators in
which a collective ends was spent waiting for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import numpy as np

from gpurun.launcher.trace.analysis.critical.tasks import Exchange, Part, TaskList, Tasks
from gpurun.launcher.trace.analysis.tables import compute_ops
from gpurun.launcher.trace.intervals import Intervals, union
from gpurun.launcher.trace.kineto.classify import HostKind, collective_kind
from gpurun.launcher.trace.kineto.columns import HostRange, Trace


def cpu_tasks(trace: Trace, window: tuple[int, int]) -> Tasks:
    """The tasks of a trace without GPU work in `window`, in ns since its base."""
    return _Builder(trace, window).build()


class _Builder:
    def __init__(self, trace: Trace, window: tuple[int, int]) -> None:
        self.window = window
        self.tasks = TaskList()
        self.last: dict[int, tuple[int, int]] = {}
        """By thread: when its last collective ended, and in which task."""
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
        before, since = self.tasks.add(first, Part.BEFORE), first
        departures: dict[int, int] = {}
        # The host's own tasks end where it issues a collective, begins to wait for some, or is done.
        for point in sorted({first, last, *by_issue, *waits}):
            until = self.tasks.add(max(point, since), Part.HOST, [before])
            self._spent(until, since, point)
            before, since = until, max(point, since)
            departures |= {i: self._exchange(i, until) for i in by_issue[point]}
            awaited = [i for i in waits[point] if i in departures]
            if awaited:
                since = max(since, *(self.ranges[i].end for i in awaited))
                before = self.tasks.add(since, Part.HOST, [before, *(departures[i] for i in awaited)])
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
        """For each collective that ends while no operator runs: since when the program had nothing to do."""
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
        arrival = self.tasks.add(each.start, Part.LATENCY, [issue, *queue])
        departure = self.tasks.add(each.end, Part.TRANSFER, [arrival])
        self.tasks.exchanges.append(Exchange(each.start, each.end, None, arrival, departure))
        self.last[each.thread] = (each.end, departure)
        return departure

    def _spent(self, task: int, start: int, end: int) -> None:
        self.tasks.spends(task, Part.COMPUTE, _inside(self.compute, start, end))
        self.tasks.spends(task, Part.INPUT, _inside(self.data, start, end))


def _inside(times: Intervals, start: int, end: int) -> int:
    """How much of the stretch from `start` to `end` lies in `times`."""
    return times.clip(start, end).length_ns if end > start else 0
