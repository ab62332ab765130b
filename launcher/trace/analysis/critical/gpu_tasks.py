"""Tasks of a rank with GPU work: the host's calls, launches, and the work of every stream.

What work waits for: its launch, the work before it on its stream, and other streams. The last are known where
the trace has records of waits (`cuda_sync`). Else they follow from how torch uses streams (a collective waits
for the compute launched before it; the first compute after `cudaStreamWaitEvent` waits for the collectives),
and from times: work that begins when another stream's has just ended waited for it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from gpurun.launcher.trace.analysis.critical.tasks import Exchange, StepPart, TaskList, Tasks
from gpurun.launcher.trace.analysis.steps import Launched
from gpurun.launcher.trace.intervals import Intervals
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind
from gpurun.launcher.trace.kineto.columns import GpuWait, Trace

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


def gpu_tasks(trace: Trace, work: Launched, window: tuple[int, int]) -> Tasks:
    """The tasks of a trace with GPU work that was launched in `window`, in ns since its base."""
    return _Builder(trace, work, window).build()


@dataclass
class _Builder:
    trace: Trace
    work: Launched
    window: tuple[int, int]
    tasks: TaskList = field(default_factory=TaskList)
    of_work: dict[int, int] = field(default_factory=dict)
    """The task in which each piece of work ends."""

    def __post_init__(self) -> None:
        gpu = self.trace.gpu
        self.calls = self._calls()
        self.starts, self.ends = gpu.start.tolist(), gpu.end.tolist()
        self.streams, self.kinds = gpu.thread.tolist(), gpu.kind.tolist()
        self.launched_at = self.work.start.tolist()
        chosen = sorted(
            (i for call in self.calls for i in call.work), key=lambda i: (self.starts[i], self.ends[i])
        )
        self.by_stream: dict[int, list[int]] = defaultdict(list)
        for i in chosen:
            self.by_stream[self.streams[i]].append(i)
        self.by_end = sorted(chosen, key=self.ends.__getitem__)
        self.sorted_ends = [self.ends[i] for i in self.by_end]
        self.chosen = chosen
        self.waits = {each.correlation: each for each in self._recorded()}
        launches = self.trace.launches
        calls = zip(launches.correlation.tolist(), launches.start.tolist(), strict=True)
        self.called_at: dict[int, int] = dict(calls) if self.waits else {}
        self.number = {place: number for number, place in enumerate(self.trace.streams)}

    def _recorded(self) -> tuple[GpuWait, ...]:
        return self.trace.details.waits if self.trace.details else ()

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
        gpu_start = self.trace.gpu.start
        found = [
            ApiCall(
                int(launches.start[i]),
                int(launches.start[i] + launches.duration[i]),
                self.trace.launch_names[launches.name[i]],
                int(launches.thread[i]),
                int(launches.correlation[i]),
                tuple(sorted(started[i], key=lambda each: int(gpu_start[each]))) if i in started else (),
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
        self.tasks.add(tail, StepPart.HOST, [called[order[-1]]] if order else [])
        self._input(tail)
        return self.tasks.done(self.trace.gpu_names, first)

    def _host(self, first: int) -> tuple[dict[int, int], dict[int, int], list[int]]:
        """A task until each call, and one for the call; by number of the call: its launches', its end."""
        begun: dict[int, int] = {}
        called: dict[int, int] = {}
        begin = self.tasks.add(first, StepPart.BEFORE)
        self.spans: list[tuple[int, int, int]] = []
        """Task of the host's, its start and end."""
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
            until = self.tasks.add(call.start, StepPart.HOST, [begin if before is None else called[before]])
            self.spans.append((until, since, call.start))
            called[i] = self.tasks.add(call.end, StepPart.HOST, [until])
            if call.work:
                begun[i] = self.tasks.add(call.start + latency, StepPart.LATENCY, [until])
        return begun, called, sorted(called, key=lambda i: self.calls[i].end)

    def _least_latency(self) -> int:
        delays = [self.starts[i] - self.launched_at[i] for i in self.chosen]
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
        exchanged: dict[int, int] = {}
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
                    candidates = list(exchanged.values())
                if not recorded:
                    found[i] += [
                        j
                        for j in candidates
                        if j is not None and self.streams[j] != self.streams[i] and self._precedes(j, i)
                    ]
                if is_comm:
                    exchanged[self.streams[i]] = i
                else:
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

    def _input(self, tail: int) -> None:
        """How much of the host's time was spent waiting for input."""
        data = self.trace.union_of(HostKind.DATA)
        if not len(data.starts):
            return
        last = max((end for _, _, end in self.spans), default=self.window[0])
        for task, start, end in [*self.spans, (len(self.tasks.ends) - 1, last, tail)]:
            self.tasks.spends(task, StepPart.INPUT, _inside(data, start, end))


def _inside(times: Intervals, start: int, end: int) -> int:
    """How much of the stretch from `start` to `end` lies in `times`."""
    return times.clip(start, end).length_ns if end > start else 0
