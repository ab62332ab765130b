"""A rank's work as tasks that wait for each other, joined over ranks at their collectives, and replayed.

A task ends at a moment that the trace has. It begins when all that it waits for has ended; what is left until
its own end is what it costs, and a replay can take that away. As recorded, the replay gives the critical
path; without one of the graph's parts, what that part costs.

With GPU work, tasks are the host's calls, launches, and the work of every stream. Work is launched when its
launching call ends. What it waits for: its launch, the work before it on its stream, and other streams. The
last are known where the trace has records of waits (`cuda_sync`). Else they follow from how torch uses
streams (a collective waits for the compute launched before it; the first compute after
`cudaStreamWaitEvent` waits for collectives and copies on other streams), and from times: work that begins
when another stream's has just ended waited for it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.match import Collective
from gpurun.launcher.trace.analysis.steps import HostStep, Launched
from gpurun.launcher.trace.analysis.tables import cpu_compute, cpu_operators, issuing_calls
from gpurun.launcher.trace.intervals import Int64, Intervals
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind, collective_kind
from gpurun.launcher.trace.kineto.columns import GpuWait, HostRange, Timed, Trace
from gpurun.launcher.trace.model import CriticalPath, PathPart, Saving

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
    ONE_OFF = 7
    """The CPU does what it does once: it loads modules, allocates memory, compiles."""
    AHEAD = 8
    """The CPU, while its GPU doesn't wait for a launch, or where, without a GPU, it issues a collective: of
    `HOST` in a critical path."""


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
    of_host: list[tuple[int, int, int]] = field(default_factory=list)
    """The host's own tasks, each with its start and its end."""
    label: dict[int, int] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    num_guessed: int = 0

    def add(self, end: int, main: StepPart, after: Iterable[int] = ()) -> int:
        """A new task that ends then, and waits for the tasks in `after`."""
        number = len(self.ends)
        self.ends.append(end)
        self.main.append(main)
        for task in after:
            self.edges.append((task, number))
        return number

    def spends(self, task: int, part: StepPart, ns: int) -> None:
        """Says that so much of the task's time, at most, goes into this part."""
        if ns > 0:
            self.known.append((task, part, ns))

    def host_spends(self, parts: Mapping[StepPart, Intervals]) -> None:
        """Says how much of the host's own time, at most, goes into each part."""
        task, start, end = np.array(self.of_host, dtype=np.int64).T
        for part, times in parts.items():
            spent = times.inside_ns(start, end)
            for i in np.flatnonzero(spent).tolist():
                self.spends(int(task[i]), part, int(spent[i]))

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


def tasks_of(
    trace: Trace, work: Launched, once: Intervals, starved: Intervals, steps: Sequence[HostStep]
) -> Tasks:
    """Tasks from the first step's start to the last one's end; of all of the trace where it has no steps.

    Args:
        trace: of one rank.
        work: the launches of its GPU work.
        once: when the CPU does what it does once.
        starved: when a GPU waits for a launch.
        steps: the steps of the host.
    """
    window, marks = task_window(trace, steps), sorted(step.end_ns for step in steps)
    if len(trace.gpu):
        return _Builder(trace, work, once, starved, window, marks).build()
    return _CpuBuilder(trace, once, window, marks).build()


def task_window(trace: Trace, steps: Sequence[HostStep]) -> tuple[int, int]:
    """The time in which these steps are issued; all of it without any."""
    if steps:
        return min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    calls = (trace.launches,) if len(trace.gpu) else ()  # without work for a GPU they are the profiler's own
    columns: list[Timed] = [each for each in (*calls, trace.ops) if len(each)]
    first = min((int(each.start.min()) for each in columns), default=0)
    return first, max((int(each.end.max()) for each in columns), default=first)


class _CpuBuilder:
    """The tasks of a trace without GPU work in `window`, in ns since its base.

    They are its operators, and the collectives on threads of their own. The trace doesn't say what the
    program waits for. While it waits, no operator runs: a gap between operators in which a collective ends
    was spent waiting for it.
    """

    def __init__(self, trace: Trace, once: Intervals, window: tuple[int, int], marks: Sequence[int]) -> None:
        self.window, self.marks = window, marks
        self.tasks = TaskList()
        self.last: dict[int, tuple[int, int]] = {}
        """When a thread's last collective ended, and in which task, by thread."""
        self.data = trace.union_of(HostKind.DATA)
        self.compute = cpu_compute(trace)
        working = cpu_operators(trace).join(self.data)
        self.once = once.subtract(working)
        self.busy = working.join(self.once)
        self.issuing = issuing_calls(trace).covered.subtract(self.compute.join(self.data).join(self.once))
        inside = [each for each in trace.of_kind(HostKind.COMM) if window[0] <= each.start < window[1]]
        self.ranges = sorted(inside, key=lambda each: each.start)
        self.calls = sorted(
            (each for each in trace.of_kind(HostKind.COMM_CALL) if each.name.startswith("c10d::")),
            key=lambda each: each.start,
        )

    def build(self) -> Tasks:
        first, last = self.window
        issued = [self._issued(each) for each in self.ranges]
        waited = self._waited(issued)
        self.done = [waited[i][1] if i in waited else each.end for i, each in enumerate(self.ranges)]
        by_issue: defaultdict[int, list[int]] = defaultdict(list)
        for i, time_ns in enumerate(issued):
            by_issue[time_ns].append(i)
        waits: defaultdict[int, list[int]] = defaultdict(list)
        for i, (begin, _) in waited.items():
            waits[begin].append(i)
        before, since = self.tasks.add(first, StepPart.BEFORE), first
        departures: dict[int, int] = {}
        # The host's own tasks end where it issues a collective, begins to wait for some, or ends a step.
        for point in sorted({first, last, *self.marks, *by_issue, *waits}):
            until = self.tasks.add(max(point, since), StepPart.HOST, [before])
            self.tasks.of_host.append((until, since, point))
            before, since = until, max(point, since)
            departures |= {i: self._exchange(i, until) for i in by_issue[point]}
            awaited = [i for i in waits[point] if i in departures]
            if awaited:
                since = max(since, *(self.done[i] for i in awaited))
                before = self.tasks.add(since, StepPart.HOST, [before, *(departures[i] for i in awaited)])
        parts = {StepPart.COMPUTE: self.compute, StepPart.AHEAD: self.issuing, StepPart.INPUT: self.data}
        self.tasks.host_spends({**parts, StepPart.ONE_OFF: self.once})
        return self.tasks.done((), first)

    def _issued(self, each: HostRange) -> int:
        """When the program issued it: at the start of the last call before it, else when it began."""
        kind = collective_kind(each.name)
        place = bisect_right(self.calls, each.start, key=lambda call: call.start)
        for call in reversed(self.calls[max(place - 64, 0) : place]):
            if collective_kind(call.name) == kind and call.start >= self.window[0]:
                return call.start
        return each.start

    def _waited(self, issued: list[int]) -> dict[int, tuple[int, int]]:
        """From when to when the program waited, by the collective that ends meanwhile, or right afterwards.

        A collective's thread wakes up the one that waits before it notes its own end, which may be in the
        next wait by then. So of those that seem to end in one wait, the first may have ended the long wait
        before it, and the others, if there is one, a short wait after it.
        """
        by_end = sorted(range(len(self.ranges)), key=lambda i: self.ranges[i].end)
        waits: dict[int, tuple[int, int]] = {}
        taken = set[int]()
        for i in reversed(by_end):
            if gaps := [*self._gaps(self.ranges[i])]:
                long = [gap for gap in gaps if _length(gap) >= LATE_NS]
                free = [gap for gap in long if gap[0] not in taken]
                waits[i] = (free or long or [max(gaps, key=_length)])[0]
                taken.add(waits[i][0])
        ended: dict[int, int] = {}
        for i in filter(waits.__contains__, by_end):
            begin, until = waits[i]
            if begin in ended:
                after = (gap for gap in self._gaps(self.ranges[i]) if gap[0] >= ended[begin])
                waits[i] = max(after, key=_length, default=waits[i])
            ended.setdefault(begin, until)
        order, found = sorted(issued), {}
        for i, (begin, until) in waits.items():
            last_issue = bisect_right(order, until) - 1
            found[i] = max(begin, order[last_issue]) if last_issue >= 0 else begin, until
        return found

    def _gaps(self, each: HostRange) -> Iterator[tuple[int, int]]:
        """The time without operators up to the end of a collective, and before it; the last first."""
        starts, ends = self.busy.starts, self.busy.ends
        place, until = int(np.searchsorted(starts, each.end, "left")), each.end
        for _ in range(MAX_GAPS):
            begin = max(int(ends[place - 1]) if place else 0, self.window[0])
            is_near = each.end - until <= max(LATE_NS, LATE * (until - begin))
            if is_near and begin < until <= self.window[1]:
                yield begin, until
            place -= 1
            if place < 0 or each.end - starts[place] > LATE_NS + LATE * (each.end - each.start):
                return
            until = int(starts[place])
            if each.start > until:
                return

    def _exchange(self, i: int, issue: int) -> int:
        """Adds a collective: it begins once it is issued, and its thread is done with the one before."""
        each = self.ranges[i]
        before = self.last.get(each.thread)
        queue = [before[1]] if before is not None and before[0] <= each.start else []
        arrival = self.tasks.add(each.start, StepPart.LATENCY, [issue, *queue])
        departure = self.tasks.add(self.done[i], StepPart.TRANSFER, [arrival])
        self.tasks.exchanges.append(Exchange(each.start, each.end, None, arrival, departure))
        self.last[each.thread] = (each.end, departure)
        return departure


def _length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]


MAX_GAPS = 200
"""Before the end of a collective, that are looked at."""
LATE_NS, LATE = 1_000_000, 0.2
"""How long after a wait the end of what was waited for may be recorded; of long waits, as a share of them:
cores may be scarce."""
BLOCKING = re.compile(r"(cuda|hip|cu)\w*Synchronize")
"""Calls that return when GPU work is done."""
STREAM_WAIT = re.compile(r"(cuda|hip|cu)StreamWaitEvent")
CLOSE_NS = 20_000
"""Work that begins later than this after other work's end didn't wait for it."""
NOISE_NS = 5_000
"""The difference that the clocks of the GPU and the CPU may have in one trace."""
NEAR = 8
"""Ends of other work that are looked at to find what work waited for."""
_PARTS = {
    GpuKind.COMPUTE: StepPart.COMPUTE,
    GpuKind.COMM: StepPart.TRANSFER,
    GpuKind.MEMCPY: StepPart.COPIES,
    GpuKind.MEMSET: StepPart.COPIES,
}


@dataclass(frozen=True)
class ApiCall:
    """A call of the GPU's API that launches work or waits for it."""

    start: int
    end: int
    name: str
    thread: int
    correlation: int
    work: tuple[int, ...]
    """Positions of what it launched, in order of their start."""

    @property
    def only_marks(self) -> bool:
        """Whether it only lets a stream wait: it takes no time of its own here."""
        return not self.work and not BLOCKING.match(self.name)


@dataclass
class _Builder:
    """The tasks of a trace with GPU work that was launched in `window`, in ns since its base."""

    trace: Trace
    work: Launched
    once: Intervals
    starved: Intervals
    window: tuple[int, int]
    marks: Sequence[int]
    """When the host ends each step, in order: no task of its own reaches into two."""
    tasks: TaskList = field(default_factory=TaskList)
    of_work: dict[int, int] = field(default_factory=dict)
    """The task in which each piece of work ends."""

    def __post_init__(self) -> None:
        gpu = self.trace.gpu
        self.starts, self.ends = gpu.start.tolist(), gpu.end.tolist()
        self.calls = self._calls()
        self.streams, self.kinds = gpu.thread.tolist(), gpu.kind.tolist()
        self.launched_at, self.done_at = self.work.start.tolist(), self.work.done.tolist()
        chosen = sorted(
            (i for call in self.calls for i in call.work), key=lambda i: (self.starts[i], self.ends[i])
        )
        self.by_stream: dict[int, list[int]] = defaultdict(list)
        for i in chosen:
            self.by_stream[self.streams[i]].append(i)
        self.by_end = sorted(chosen, key=self.ends.__getitem__)
        self.sorted_ends = [self.ends[i] for i in self.by_end]
        self.chosen = chosen
        self.waits = {each.correlation: each for each in self.trace.waits}
        launches = self.trace.launches
        calls = zip(launches.correlation.tolist(), launches.start.tolist(), strict=True)
        self.called_at: dict[int, int] = dict(calls) if self.waits else {}
        self.number = {place: number for number, place in enumerate(self.trace.streams)}

    def _calls(self) -> list[ApiCall]:
        """Calls of the threads that launch work, within the window, in order of time."""
        launches, (first, last) = self.trace.launches, self.window
        started: dict[int, list[int]] = defaultdict(list)
        for i in np.flatnonzero(self.work.launch >= 0).tolist():
            started[int(self.work.launch[i])].append(i)
        threads = {int(launches.thread[call]) for call in started}
        waiting = [
            number
            for number, name in enumerate(self.trace.launch_names)
            if BLOCKING.match(name) or STREAM_WAIT.match(name)
        ]
        wanted = np.isin(launches.name, waiting) & np.isin(launches.thread, sorted(threads))
        wanted[sorted(started)] = True
        wanted &= (launches.start >= first) & (launches.start < last)
        found = [
            ApiCall(
                int(launches.start[i]),
                int(launches.start[i] + launches.duration[i]),
                self.trace.launch_names[launches.name[i]],
                int(launches.thread[i]),
                int(launches.correlation[i]),
                tuple(sorted(started.get(i, ()), key=self.starts.__getitem__)),
            )
            for i in np.flatnonzero(wanted).tolist()
        ]
        return sorted(found, key=lambda call: (call.start, call.end))

    def build(self) -> Tasks:
        first, last = self.window
        launch_tasks, called, order = self._host(first)
        self._gpu(launch_tasks)
        self._blocking(called, order)
        tail = max([last, *(call.end for call in self.calls)])
        self._own([called[i] for i in order[-1:]], self.calls[order[-1]].end if order else first, tail)
        self.tasks.host_spends(self._parts_of_host())
        return self.tasks.done(self.trace.gpu_names, first)

    def _host(self, first: int) -> tuple[dict[int, int], dict[int, int], list[int]]:
        """A task until each call, and one for the call; by number of the call: its launches', its end."""
        begun: dict[int, int] = {}
        called: dict[int, int] = {}
        begin = self.tasks.add(first, StepPart.BEFORE)
        real = [i for i, call in enumerate(self.calls) if not call.only_marks]
        by_end = sorted(real, key=lambda i: self.calls[i].end)
        ends = [self.calls[i].end for i in by_end]
        latency = self._least_latency()
        for i in real:
            call = self.calls[i]
            place = bisect_right(ends, call.start) - 1
            while place >= 0 and by_end[place] not in called:
                place -= 1  # calls without length, this one among them
            before = by_end[place] if place >= 0 else None
            since = first if before is None else self.calls[before].end
            until = self._own([begin if before is None else called[before]], since, call.start)
            called[i] = self.tasks.add(call.end, StepPart.HOST, [until])
            self.tasks.of_host.append((called[i], call.start, call.end))
            if call.work:
                done = min(max(self.done_at[call.work[0]], call.start), call.end)
                launched = self.tasks.add(done, StepPart.HOST, [until])
                self.tasks.of_host.append((launched, call.start, done))
                begun[i] = self.tasks.add(done + latency, StepPart.LATENCY, [launched])
        return begun, called, sorted(called, key=lambda i: self.calls[i].end)

    def _own(self, after: list[int], since: int, until: int) -> int:
        """The last of the host's tasks from `since` to `until`, which come after those in `after`."""
        inside = self.marks[bisect_right(self.marks, since) : bisect_left(self.marks, until)]
        for end in (*inside, until):
            after = [self.tasks.add(end, StepPart.HOST, after)]
            self.tasks.of_host.append((after[0], since, end))
            since = end
        return after[0]

    def _least_latency(self) -> int:
        delays = [self.starts[i] - self.done_at[i] for i in self.chosen]
        return max(min(delays, default=0), 0)

    def _gpu(self, begun: dict[int, int]) -> None:
        """Every piece of work, in order of its start, with what it waits for."""
        of_call = {i: number for number, call in enumerate(self.calls) for i in call.work}
        across = self._across_streams()
        last: dict[int, int] = {}
        for i in self.chosen:
            before = last.get(self.streams[i])
            after = [begun[of_call[i]]] if of_call[i] in begun else []
            after += [self.of_work[j] for j in (before, *across[i]) if j is not None and j in self.of_work]
            ready = max(self.tasks.ends[task] for task in after)
            guess = self._guess(i, ready)
            if guess is not None:
                after.append(self.of_work[guess])
                self.tasks.num_guessed += 1
            self.of_work[i] = self._work_task(i, after)
            last[self.streams[i]] = i

    def _work_task(self, i: int, after: list[int]) -> int:
        kind = GpuKind(self.kinds[i])
        if kind is GpuKind.COMM:
            arrival = self.tasks.add(self.starts[i], StepPart.LATENCY, after)
            task = self.tasks.add(self.ends[i], StepPart.TRANSFER, [arrival])
            device = self.trace.streams[self.streams[i]][0]
            self.tasks.exchanges.append(Exchange(self.starts[i], self.ends[i], device, arrival, task))
            return task
        task = self.tasks.add(self.ends[i], StepPart.LATENCY, after)
        self.tasks.spends(task, _PARTS[kind], self.ends[i] - self.starts[i])
        if kind is GpuKind.COMPUTE:
            self.tasks.label[task] = int(self.trace.gpu.name[i])
        return task

    def _across_streams(self) -> dict[int, list[int]]:
        """The work of other streams that each piece of work waits for, by the calls before it."""
        found: dict[int, list[int]] = defaultdict(list)
        computed: dict[int, int] = {}
        pending: dict[int, bool] = {}
        moved: dict[int, int] = {}
        recorded = any(each.name == "Stream Wait Event" for each in self.waits.values())
        for call in self.calls:
            thread = call.thread
            if STREAM_WAIT.match(call.name):
                if recorded:
                    self._recorded_wait(call, found)
                pending[thread] = True
                continue
            for i in call.work:
                is_comm = self.kinds[i] == GpuKind.COMM
                candidates = [computed.get(thread)] if is_comm else []
                if not is_comm and pending.get(thread):
                    candidates = list(moved.values())
                if not recorded:
                    found[i] += [
                        j
                        for j in candidates
                        if j is not None and self.streams[j] != self.streams[i] and self._precedes(j, i)
                    ]
                if self.kinds[i] != GpuKind.COMPUTE:
                    moved[self.streams[i]] = i
                if not is_comm:
                    computed[thread] = i
                pending[thread] = False
        return found

    def _precedes(self, earlier: int, later: int) -> bool:
        return self.ends[earlier] <= self.starts[later] + NOISE_NS and earlier != later

    def _recorded_wait(self, call: ApiCall, found: dict[int, list[int]]) -> None:
        """The next work on a stream waits for the last one launched on another before the event."""
        wait = self.waits.get(call.correlation)
        if wait is None or wait.waits_for_stream is None:
            return
        awaited = self._last_on((wait.device, wait.waits_for_stream), self._recorded_at(wait, call.start))
        mine = self.by_stream.get(self.number.get((wait.device, wait.stream), -1), [])
        place = bisect_left(mine, call.start, key=self.launched_at.__getitem__)
        if awaited is not None and place < len(mine) and self._precedes(awaited, mine[place]):
            found[mine[place]].append(awaited)

    def _recorded_at(self, wait: GpuWait, otherwise: int) -> int:
        """When the event was recorded that a wait is for."""
        record = wait.waits_for_record
        return otherwise if record is None else self.called_at.get(record, otherwise)

    def _last_on(self, stream: tuple[str, str], time_ns: int) -> int | None:
        """The last work on a stream, given with its device, that was launched before then."""
        works = self.by_stream.get(self.number.get(stream, -1), [])
        place = bisect_left(works, time_ns, key=self.launched_at.__getitem__)
        return works[place - 1] if place else None

    def _guess(self, i: int, ready: int) -> int | None:
        """Other streams' work whose end explains why this began only now."""
        start = self.starts[i]
        place = bisect_right(self.sorted_ends, start)
        for j in reversed(self.by_end[max(place - NEAR, 0) : place]):
            if self.ends[j] <= ready or start - self.ends[j] > CLOSE_NS:
                return None
            if (
                self.streams[j] != self.streams[i]
                and self.launched_at[j] <= self.launched_at[i]
                and j in self.of_work
            ):
                return j
        return None

    def _blocking(self, called: dict[int, int], order: list[int]) -> None:
        """Calls that return when GPU work is done wait for it."""
        by_thread: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            for i in self._awaited(call, by_thread.get(call.thread)):
                if self.ends[i] <= call.end + NOISE_NS and self.ends[i] > call.start:
                    self.tasks.edges.append((self.of_work[i], called[number]))
            if call.work:
                by_thread[call.thread] = call.work[-1]

    def _awaited(self, call: ApiCall, latest: int | None) -> list[int]:
        """The work that a call waited for."""
        if call.work:
            return [i for i in call.work if self.ends[i] <= call.end]
        if not BLOCKING.match(call.name):
            return []
        wait = self.waits.get(call.correlation)
        if "Device" in call.name or "Ctx" in call.name or (wait and wait.name == "Context Sync"):
            lasts = [self._last_on(stream, call.start) for stream in self.number]
            return [i for i in lasts if i is not None]
        if wait is not None:
            stream = wait.waits_for_stream if wait.name == "Event Sync" else wait.stream
            if stream is None:
                return []
            found = self._last_on((wait.device, stream), self._recorded_at(wait, call.start))
            return [] if found is None else [found]
        if latest is not None and self.ends[latest] <= call.end + NOISE_NS:
            return [latest]
        place = bisect_right(self.sorted_ends, call.end)
        return [i for i in self.by_end[max(place - 1, 0) : place] if self.launched_at[i] < call.start]

    def _parts_of_host(self) -> dict[StepPart, Intervals]:
        """When the host waits for input, does what is done once, or is ahead."""
        data, (_, starts, ends) = self.trace.union_of(HostKind.DATA), zip(*self.tasks.of_host, strict=True)
        ahead = self.starved.join(data).join(self.once).gaps(min(starts), max(ends))
        return {StepPart.INPUT: data, StepPart.ONE_OFF: self.once.subtract(data), StepPart.AHEAD: ahead}


SOURCE = 0
"""The task that all others come after: the start of the capture."""


@dataclass(frozen=True)
class RankTasks:
    """A rank's tasks."""

    rank: int
    tasks: Tasks
    realigned: Realigned
    """Turns their times into ns since the start of all, on aligned clocks."""


@dataclass(frozen=True, eq=False)
class Graph:
    """All ranks' tasks in an order in which each comes after those that it waits for."""

    first: list[int]
    """A task that each waits for; `SOURCE` where there is none."""
    second: list[int]
    costs: Int64
    """Time in ns by task and `StepPart`."""
    rank: NDArray[np.int32]
    label: NDArray[np.int32]
    labels: tuple[tuple[str, str], ...]
    """Part and name of what tasks are labelled with."""
    ends: Int64
    """Recorded ends of the tasks, in ns since the start of all."""
    num_guessed: int
    num_unordered: int
    """Waits that contradict each other, and were left out."""


@dataclass
class _Joined:
    """Tasks of all ranks under one numbering; the first is `SOURCE`."""

    ends: list[Int64] = field(default_factory=lambda: [np.zeros(1, dtype=np.int64)])
    main: list[NDArray[np.int8]] = field(default_factory=lambda: [np.zeros(1, dtype=np.int8)])
    known: list[Int64] = field(default_factory=lambda: [np.zeros((1, len(StepPart)), dtype=np.int64)])
    rank: list[NDArray[np.int32]] = field(default_factory=lambda: [np.full(1, -1, dtype=np.int32)])
    label: list[NDArray[np.int32]] = field(default_factory=lambda: [np.full(1, NO_LABEL, dtype=np.int32)])
    edges: list[NDArray[np.int64]] = field(default_factory=list)
    labels: dict[tuple[str, str], int] = field(default_factory=dict)
    count: int = 1

    def add(self, each: RankTasks) -> int:
        """Adds a rank; the number of its first task."""
        tasks, begin = each.tasks, self.count
        number = [self.labels.setdefault(("compute", name), len(self.labels)) for name in tasks.labels]
        labels = np.array([*number, NO_LABEL], dtype=np.int32)
        self.ends.append(each.realigned.each(tasks.ends))
        self.main.append(tasks.main)
        self.known.append(tasks.known)
        self.rank.append(np.full(len(tasks.ends), each.rank, dtype=np.int32))
        self.label.append(labels[tasks.label])
        self.edges.append(tasks.edges.astype(np.int64) + begin)
        self.count += len(tasks.ends)
        return begin

    def meeting(self, end: int) -> int:
        """A task of no rank, which costs nothing, at that time."""
        self.ends.append(np.array([end], dtype=np.int64))
        self.main.append(np.array([StepPart.TRANSFER], dtype=np.int8))
        self.known.append(np.zeros((1, len(StepPart)), dtype=np.int64))
        self.rank.append(np.full(1, -1, dtype=np.int32))
        self.label.append(np.full(1, NO_LABEL, dtype=np.int32))
        self.count += 1
        return self.count - 1


def join(ranks: Sequence[RankTasks], collectives: Sequence[Collective]) -> Graph:
    """The graph of all ranks.

    All ranks of a collective meet when the last one arrives; from there each needs its time until its end. A
    rank that left before that, as the sender of a small message can, doesn't wait.
    """
    joined = _Joined()
    begins = {each.rank: joined.add(each) for each in ranks}
    found = {
        each.rank: {
            (exchange.start, exchange.end, exchange.device): exchange for exchange in each.tasks.exchanges
        }
        for each in ranks
    }
    clocks = {each.rank: each.realigned for each in ranks}
    named: dict[int, int] = {}
    for collective in collectives:
        name = joined.labels.setdefault(("transfer", _name(collective)), len(joined.labels))
        members = []
        for part in collective.parts:
            key = (part.local.start, part.local.end, part.local.device)
            exchange = found.get(part.rank, {}).get(key)
            if exchange is not None:
                begin = begins[part.rank]
                named[begin + exchange.departure] = name
                members.append((exchange.arrival + begin, exchange.departure + begin, part, exchange))
        if collective.matched and len(members) > 1:
            met = max(clocks[part.rank].time_ns(exchange.start) for _, _, part, exchange in members)
            late = [each for each in members if clocks[each[2].rank].time_ns(each[3].end) >= met]
            meeting = joined.meeting(met)
            edges = [(arrival, meeting) for arrival, *_ in members]
            edges += [(meeting, departure) for _, departure, *_ in late]
            joined.edges.append(np.array(edges, dtype=np.int64))
    return _ordered(joined, named, sum(each.tasks.num_guessed for each in ranks))


_OF_GROUP = " of group "


def _name(collective: Collective) -> str:
    return f"{collective.kind}{_OF_GROUP}{collective.group}"


def _ordered(joined: _Joined, named: Mapping[int, int], num_guessed: int) -> Graph:
    edges = np.concatenate(joined.edges) if joined.edges else np.empty((0, 2), dtype=np.int64)
    ends, known = np.concatenate(joined.ends), np.concatenate(joined.known)
    num_edges = len(edges)
    edges = edges[
        ends[edges[:, 0]] <= ends[edges[:, 1]]
    ]  # some kernels overlap the one before on their stream
    order, kept = _in_order(ends, edges)
    edges = edges[kept]
    label = np.concatenate(joined.label)
    for task, number in named.items():
        label[task] = number
    ready = np.zeros(joined.count, dtype=np.int64)
    np.maximum.at(ready, edges[:, 1], ends[edges[:, 0]])
    costs = _costs(np.maximum(ends - ready, 0), known, np.concatenate(joined.main))
    return _binary(
        order, edges, costs, ends, np.concatenate(joined.rank), label, tuple(joined.labels),
        (num_guessed, num_edges - len(edges)),
    )  # fmt: skip


def _costs(own: Int64, known: Int64, main: NDArray[np.int8]) -> Int64:
    """Each task's own time by part: what is known, as far as it goes, and the rest."""
    reached = np.minimum(np.cumsum(known, axis=1), own[:, None])
    costs = np.diff(reached, axis=1, prepend=0)
    costs[np.arange(len(own)), main] += own - reached[:, -1]
    costs[SOURCE] = 0
    return costs


def _in_order(ends: Int64, edges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """All tasks, each after those that it waits for; and which edges that holds for.

    Edges contradict each other only where parts that don't belong together were taken for one collective.
    """
    order = np.concatenate(([SOURCE], 1 + np.argsort(ends[1:], kind="stable")))
    kept = _is_kept(order, edges)
    if not kept.all():  # some tasks that end at one time, and wait for each other
        order = _one_by_one(len(ends), edges)
        kept = _is_kept(order, edges)
    return order, kept


def _is_kept(order: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.bool_]:
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return np.asarray(place[edges[:, 0]] < place[edges[:, 1]], dtype=np.bool_)


def _one_by_one(count: int, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for before, after in edges.tolist():
        followers[before].append(after)
    missing = np.bincount(edges[:, 1], minlength=count).tolist()
    ready = deque(task for task in range(count) if not missing[task])
    order: list[int] = []
    while ready:
        task = ready.popleft()
        order.append(task)
        for after in followers.get(task, ()):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    if len(order) < count:
        placed = set(order)
        order += [task for task in range(count) if task not in placed]
    return np.array(order, dtype=np.int64)


def _binary(
    order: NDArray[np.int64],
    edges: NDArray[np.int64],
    costs: Int64,
    ends: Int64,
    rank: NDArray[np.int32],
    label: NDArray[np.int32],
    labels: tuple[tuple[str, str], ...],
    counts: tuple[int, int],
) -> Graph:
    """In that order, with two tasks at most that each waits for: more go through tasks that cost nothing."""
    num_waits = np.bincount(edges[:, 1], minlength=len(order))
    num_extra = np.maximum(num_waits - 2, 0)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) + np.cumsum(num_extra[order])
    awaited = place[edges[np.argsort(edges[:, 1], kind="stable"), 0]]
    begin = np.cumsum(num_waits) - num_waits
    first, second = np.full((2, len(order) + int(num_extra.sum())), SOURCE, dtype=np.int64)
    waiting = np.flatnonzero(num_waits)
    first[place[waiting]] = awaited[begin[waiting]]
    second[place[waiting]] = awaited[begin[waiting] + np.minimum(num_waits[waiting], 2) - 1]
    for task in np.flatnonzero(num_extra).tolist():
        left, *others = awaited[begin[task] : begin[task] + num_waits[task]].tolist()
        for at, right in enumerate(others, int(place[task] - num_extra[task])):
            first[at], second[at] = left, right
            left = at
    chosen = np.full(len(first), -1, dtype=np.int64)
    chosen[place] = np.arange(len(order))
    extra = chosen < 0
    spread = costs[chosen]
    spread[extra] = 0
    return Graph(
        first=first.tolist(),
        second=second.tolist(),
        costs=spread,
        rank=np.where(extra, -1, rank[chosen]).astype(np.int32),
        label=np.where(extra, NO_LABEL, label[chosen]).astype(np.int32),
        labels=labels,
        ends=np.where(extra, 0, ends[chosen]),
        num_guessed=counts[0],
        num_unordered=counts[1],
    )


MAX_NAMES = 20
"""Kernels and collectives whose gain is computed: those with most time on the path."""
WORDS = {
    StepPart.COMPUTE: "compute",
    StepPart.TRANSFER: "transfer",
    StepPart.COPIES: "copies",
    StepPart.INPUT: "input",
    StepPart.HOST: "host",
    StepPart.LATENCY: "latency",
    StepPart.BEFORE: "before",
    StepPart.ONE_OFF: "one-off",
    StepPart.AHEAD: "host",
}


def critical_path(graph: Graph, num_steps: int, steps: StepEnds | None = None) -> CriticalPath:
    """The tasks that decide how long the job takes, and what it would gain without each part.

    Args:
        graph: of all ranks.
        num_steps: how many steps it holds; 0 if unknown.
        steps: when its steps end; `None` without steps, or where ranks have different ones.
    """
    costs = graph.costs.copy()
    costs[:, StepPart.HOST] += costs[:, StepPart.AHEAD]
    costs[:, StepPart.AHEAD] = 0
    graph = replace(graph, costs=costs)
    ends = replay(graph, graph.costs)
    length = int(ends.max(initial=0))
    path = on_path(graph, ends)
    spent = _sums(graph, path)
    parts = [
        PathPart(
            WORDS[part],
            None,
            None,
            ns / 1000,
            None if part is StepPart.BEFORE else _gain_us(graph, length, _without(graph, part)),
        )
        for part, ns in _by_part(graph, path)
    ]
    names = [
        PathPart(*graph.labels[label], None, ns / 1000, _gain_us(graph, length, _without_label(graph, label)))
        for label, ns in spent
    ]
    place = None if steps is None else steps.place_of_tasks(graph)
    even = None if num_steps > 1 and place is None else evenly(graph, place)
    return CriticalPath(
        length_us=length / 1000,
        recorded_us=int(graph.ends.max(initial=0)) / 1000,
        num_steps=num_steps,
        parts=tuple(parts),
        names=tuple(names),
        ranks=tuple(_by_rank(graph, path)),
        even_gain_us=None if even is None else _gain_us(graph, length, even),
        guessed_waits=graph.num_guessed,
        contradictions=graph.num_unordered,
    )


_REMOVABLE: tuple[tuple[StepPart, ...], ...] = (
    *((StepPart.INPUT,), (StepPart.COPIES,), (StepPart.ONE_OFF,), (StepPart.TRANSFER,)),
    (StepPart.HOST, StepPart.LATENCY),  # what idle time counts for launches: not what the CPU does ahead
)
"""Parts that a replay leaves out together, under the name of the first."""
_OF_A_RANK = (
    *(StepPart.COMPUTE, StepPart.BEFORE, StepPart.INPUT, StepPart.COPIES, StepPart.ONE_OFF),
    *(StepPart.HOST, StepPart.LATENCY, StepPart.AHEAD),
)
AS_LONG = 0.25
"""Difference, as a share, up to which the replay takes as long as its steps; else there is time between."""
MAX_RANKS = 16
"""How many are tried, of all peers together: those that have most to do."""


def savings(
    graph: Graph,
    num_steps: int,
    peers: Sequence[Sequence[int]],
    groups: Mapping[str, Collection[str]],
    span_ns: float,
    steps: StepEnds | None = None,
) -> tuple[Saving, ...]:
    """How much shorter a step would be without each part, each kind of transfer, and each rank's extra work.

    Args:
        graph: of all ranks.
        num_steps: how many steps it holds.
        peers: ranks that ought to have equally much to do.
        groups: the groups of each kind of parallelism.
        span_ns: how long these steps take together; without that, nothing is known.
        steps: when its steps end; `None` without steps.
    """
    recorded = replay(graph, graph.costs)
    length = int(recorded.max(initial=0))
    if abs(length - span_ns) > AS_LONG * span_ns:
        return ()
    place = None if steps is None else steps.place_of_tasks(graph)

    def saved_us(costs: Int64) -> float:
        if steps is None or place is None or len(steps.usual) == num_steps:
            return _gain_us(graph, length, costs) / max(num_steps, 1)
        longer, shorter = (_lengths(each, place, num_steps) for each in (recorded, replay(graph, costs)))
        return float((longer - shorter)[list(steps.usual)].sum()) / 1000 / len(steps.usual)

    found = [
        Saving(WORDS[parts[0]], None, None, saved_us(_without(graph, *parts)))
        for parts in _REMOVABLE
        if graph.costs[:, parts].any()
    ]
    of_group = [name.rpartition(_OF_GROUP)[2] for _, name in graph.labels]
    for kind, names in groups.items() if len(groups) > 1 else ():
        costs = graph.costs.copy()
        labels = [label for label, group in enumerate(of_group) if group in names]
        costs[np.isin(graph.label, labels), StepPart.TRANSFER] = 0
        found.append(Saving(WORDS[StepPart.TRANSFER], None, kind, saved_us(costs)))
    for ranks in (each for each in peers[:MAX_RANKS] if len(each) > 1):
        alike = _Alike(graph, ranks, np.zeros(len(graph.costs), dtype=np.int64), 1)
        more_ns = dict(zip(ranks, alike.more_ns[:, 0].tolist(), strict=True))
        busiest = sorted(ranks, key=lambda rank: -more_ns[rank])[: max(2, MAX_RANKS // len(peers))]
        found += [Saving("rank", rank, None, saved_us(alike.of(rank))) for rank in busiest]
    if steps is not None and place is not None:
        several = [ranks for ranks in peers if len(ranks) > 1]
        found += _of_several(graph, several, steps.usual, place, num_steps, saved_us)
    return tuple(sorted(found, key=lambda each: -each.saved_us))


def _of_several(
    graph: Graph,
    peers: Sequence[Sequence[int]],
    usual: Sequence[int],
    place: Int64,
    num_steps: int,
    saved_us: Callable[[Int64], float],
) -> Iterator[Saving]:
    """What a step would be shorter by if in each step all ranks had as much to do as their peers."""
    costs, more_ns = graph.costs, dict[int, Int64]()
    for ranks in peers:
        alike = _Alike(replace(graph, costs=costs), ranks, place, num_steps)
        costs = alike.of()
        more_ns |= {rank: ns[list(usual)] for rank, ns in zip(ranks, alike.more_ns, strict=True)}
    late = _late_ranks(more_ns)
    if late is not None:
        yield Saving("ranks" if late else "changing", None, None, saved_us(costs), late)


MOST_STEPS = 2 / 3
"""Share of the steps from which on it is the same ranks that have more to do."""


def _late_ranks(more_ns: Mapping[int, Int64]) -> tuple[int, ...] | None:
    """The ranks that have more to do in most steps; empty where they change; `None` if neither is so.

    Args:
        more_ns: what each rank has more to do than its peers, by step.
    """
    sums = {rank: int(ns.sum()) for rank, ns in more_ns.items()}
    most_ns = max(sums.values(), default=0)
    if not most_ns:
        return None
    late = tuple(rank for rank, ns in sums.items() if 2 * ns >= most_ns)
    if 2 * len(late) <= len(sums):
        often = (float((2 * len(more_ns[rank]) * more_ns[rank] >= sums[rank]).mean()) for rank in late)
        if all(share >= MOST_STEPS for share in often):
            return late
    by_step = np.array([*more_ns.values()])
    first = np.bincount(by_step.argmax(axis=0)[by_step.max(axis=0) > 0])
    return () if first.max(initial=0) <= MOST_STEPS * by_step.shape[1] and (first > 0).sum() > 1 else None


@dataclass(frozen=True)
class StepEnds:
    """When the steps of a graph end."""

    of_rank: Mapping[int, Sequence[int]]
    """By rank, in ns since the start of all."""
    usual: Sequence[int]
    """The places of the steps that the answer is about, among all of them."""

    def place_of_tasks(self, graph: Graph) -> Int64:
        """The place of the step in which each task ended; −1 for those that only join others."""
        place = np.full(len(graph.costs), -1, dtype=np.int64)
        for rank, ends in self.of_rank.items():
            mine = graph.rank == rank
            place[mine] = np.searchsorted(ends, graph.ends[mine])
        return place


def _lengths(ends: Int64, place: Int64, num_steps: int) -> Int64:
    """The time from the end of each step before to that of each step, over all ranks."""
    last = np.zeros(num_steps + 1, dtype=np.int64)
    is_known = (place >= 0) & (place < num_steps)
    np.maximum.at(last, place[is_known] + 1, ends[is_known])
    return np.diff(np.maximum.accumulate(last))


class _Alike:
    """What each of some ranks would have to do in each step if it were like the others.

    Of a kernel that all of them run, as much as the median of the others; of all other compute together, and
    of each other part, likewise. Where a rank has no more of a part than they have, it keeps its own.
    """

    def __init__(self, graph: Graph, ranks: Sequence[int], place: Int64, num_steps: int) -> None:
        self.costs, self.ranks = graph.costs, tuple(ranks)
        row = np.full(max(*ranks, int(graph.rank.max(initial=0))) + 1, -1, dtype=np.int64)
        row[list(ranks)] = np.arange(len(ranks))
        is_mine = (graph.rank >= 0) & (row[graph.rank] >= 0) & (place >= 0) & (place < num_steps)
        self.tasks = np.flatnonzero(is_mine)
        self.row, self.place = row[graph.rank[self.tasks]], place[self.tasks]
        label = graph.label[self.tasks]
        runs = np.zeros((len(ranks), len(graph.labels) + 1), dtype=np.bool_)
        runs[self.row, label] = True
        runs[:, NO_LABEL] = False
        kernel = np.where(runs.all(axis=0), np.arange(runs.shape[1]), runs.shape[1])[label]
        self.factors: dict[StepPart, NDArray[np.float64]] = {}
        """By part, what each task's time is to be multiplied by."""
        self.more_ns = np.zeros((len(ranks), num_steps), dtype=np.int64)
        """What each rank has more to do in each step."""
        for part in _OF_A_RANK:
            self._compare(part, kernel if part is StepPart.COMPUTE else np.zeros_like(kernel))

    def _compare(self, part: StepPart, kernel: Int64) -> None:
        """Compares the ranks' times of a part, by step and kernel."""
        spent = self.costs[self.tasks, part]
        keys, column = np.unique(self.place * (int(kernel.max(initial=0)) + 1) + kernel, return_inverse=True)
        step = np.zeros(len(keys), dtype=np.int64)
        step[column] = self.place
        own = np.zeros((len(self.ranks), len(keys)), dtype=np.int64)
        np.add.at(own, (self.row, column), spent)
        usual = _median_of_others(own)
        num_steps = self.more_ns.shape[1]
        more = np.array([np.bincount(step, weights=each, minlength=num_steps) for each in own - usual])
        has_more = (more > 0)[:, step] & (own > 0)
        factors = np.divide(usual, own, out=np.ones_like(usual), where=has_more)
        self.factors[part] = factors[self.row, column]
        self.more_ns += np.rint(np.maximum(more, 0)).astype(np.int64)

    def of(self, rank: int | None = None) -> Int64:
        """Costs with this rank, or every rank, like the others."""
        costs = self.costs.copy()
        chosen = slice(None) if rank is None else self.row == self.ranks.index(rank)
        for part, factors in self.factors.items():
            tasks = self.tasks[chosen]
            costs[tasks, part] = np.rint(costs[tasks, part] * factors[chosen]).astype(np.int64)
        return costs


def _median_of_others(own: Int64) -> NDArray[np.float64]:
    """For each row, the median of all other rows, by column."""
    ordered, middle = np.sort(own, axis=0), (len(own) - 2) / 2
    lower, upper = (
        np.where(own > ordered[at], ordered[at], ordered[at + 1])
        for at in (int(np.floor(middle)), int(np.ceil(middle)))
    )
    return np.asarray((lower + upper) / 2, dtype=np.float64)


def replay(graph: Graph, costs: Int64) -> Int64:
    """When each task ends, in ns since the start, if they cost that much."""
    ends = [0]
    end = ends.append
    durations = costs.sum(axis=1).tolist()
    for left, right, ns in zip(graph.first[1:], graph.second[1:], durations[1:], strict=True):
        a, b = ends[left], ends[right]
        end((a if a > b else b) + ns)
    return np.array(ends, dtype=np.int64)


def on_path(graph: Graph, ends: Int64) -> Int64:
    """The tasks of the critical path, last first: each begins when the next one ends."""
    found = []
    task = int(ends.argmax())
    while task != SOURCE:
        found.append(task)
        left, right = graph.first[task], graph.second[task]
        task = left if ends[left] >= ends[right] else right
    return np.array(found, dtype=np.int64)


def evenly(graph: Graph, place: Int64 | None) -> Int64 | None:
    """Costs with each rank's compute and copies in each step scaled to the mean; `None` for a single rank.

    `place`: of the step of each task; `None` where all are of one.
    """
    columns = [StepPart.COMPUTE, StepPart.COPIES]
    numbers, row = np.unique(graph.rank, return_inverse=True)
    step = np.maximum(np.zeros(len(row), dtype=np.int64) if place is None else place, 0)
    sums = np.zeros((len(numbers), int(step.max(initial=0)) + 1), dtype=np.int64)
    np.add.at(sums, (row, step), graph.costs[:, columns].sum(axis=1))
    sums = sums[numbers >= 0]
    if len(sums) < 2 or not sums.sum(axis=1).all():
        return None
    factors = np.divide(sums.mean(axis=0), sums, out=np.ones(sums.shape), where=sums > 0)
    costs, mine = graph.costs.copy(), np.flatnonzero(graph.rank >= 0)
    of_task = factors[row[mine] - int((numbers < 0).sum()), step[mine]]
    for column in columns:
        costs[mine, column] = np.rint(costs[mine, column] * of_task)
    return costs


def _without(graph: Graph, *parts: StepPart) -> Int64:
    costs = graph.costs.copy()
    costs[:, parts] = 0
    return costs


def _without_label(graph: Graph, label: int) -> Int64:
    part = StepPart.TRANSFER if graph.labels[label][0] == WORDS[StepPart.TRANSFER] else StepPart.COMPUTE
    costs = graph.costs.copy()
    costs[graph.label == label, part] = 0
    return costs


def _gain_us(graph: Graph, length: int, costs: Int64) -> float:
    return (length - int(replay(graph, costs).max(initial=0))) / 1000


def _by_part(graph: Graph, path: Int64) -> list[tuple[StepPart, int]]:
    sums = graph.costs[path].sum(axis=0).tolist()
    return sorted(
        ((part, sums[part]) for part in StepPart if graph.costs[:, part].any()), key=lambda x: -x[1]
    )


def _sums(graph: Graph, path: Int64) -> list[tuple[int, int]]:
    """Labels with most time on the path."""
    labels = graph.label[path]
    named = labels != NO_LABEL
    own = graph.costs[path][:, [StepPart.COMPUTE, StepPart.TRANSFER]].sum(axis=1)
    found: Counter[int] = Counter()
    for label, ns in zip(labels[named].tolist(), own[named].tolist(), strict=True):
        found[label] += ns
    return [(label, ns) for label, ns in found.most_common(MAX_NAMES) if ns]


def _by_rank(graph: Graph, path: Int64) -> Sequence[PathPart]:
    """The time of the path on each rank; transfer belongs to no rank."""
    costs, ranks = graph.costs[path], graph.rank[path]
    found = []
    for rank in sorted(set(ranks.tolist()) - {-1}):
        mine: NDArray[np.bool_] = ranks == rank
        sums = costs[mine].sum(axis=0).tolist()
        found += [
            PathPart(WORDS[part], None, rank, sums[part] / 1000, None)
            for part in StepPart
            if sums[part] and part is not StepPart.TRANSFER
        ]
    return sorted(found, key=lambda each: -each.path_us)
