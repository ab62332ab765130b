"""Training steps: the time window and the GPU work of each, also of work that CUDA graphs replay.

A step owns the GPU work that it launched, whenever that ran. Its window begins when the previous step is
done, on the CPU or the GPU, whichever is later, and ends when the step itself is done. So windows never
overlap, however far the GPU lags behind. Work on another stream than the main one moves no window beyond
the moment when the main stream begins with a later step: what runs on, as a long copy may, is other steps'
work there. For the first step, what was launched earlier counts as the previous one; else the first step
would be longer than the others by as much as the GPU lags behind.

Where ProfilerStep ranges overlap, the later one begins where the earlier one ends: what was launched in the
overlap belongs to the earlier one.

A graph's launch says nothing about operators, but the calls between `cudaStreamBeginCapture` and
`cudaStreamEndCapture` do, if the trace has them. The k-th node of a graph is what the k-th of these calls
captured: nodes are numbered as they are captured, and the graph that is launched keeps their numbers in the
lower half of its own. Source: `cudaGraphNodeGetToolsId` of CUDA's runtime API, and torch's
`cuda/_graph_annotations.py`. ROCm doesn't number nodes, but names the kernel of each call.

A capture is only taken for a graph's if it is the only one that fits: in the number and sorts of its calls,
in the names of kernels where those are known, and in time. Where as many graphs as captures fit, they are
taken in the order in which they were made.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import (
    ALLOCATING_CALLS,
    BEGINS_CAPTURE,
    COMPILING,
    ENDS_CAPTURE,
    GRAPH_SETUP,
    IN_USE,
    LAUNCHING_CALLS,
    ONE_OFF_CALLS,
    TRITON_COMPILING,
    GpuKind,
    HostKind,
)
from gpurun.launcher.trace.kineto.columns import MAX_NS, NO_NAME, Spans, Trace

NO_STEP = NO_STREAM = -1
MOSTLY_LOST = 0.5
"""Share of the GPU's work whose launch is missing, beyond which launches don't tell whose the rest is."""
SHORT = 0.5
"""Share of a usual step's length."""
LONG_GAP_NS = 1_000_000
"""A GPU that idles for as long has done all that was launched before."""


@dataclass(frozen=True)
class Step:
    """A step's number and its window."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, eq=False)
class Launched:
    """The launch of each piece of GPU work."""

    launch: Int64
    """Position in `trace.launches`; −1 for work launched before the capture."""
    start: Int64
    """When the launching call began; the start of the work itself if unknown."""
    done: Int64
    """When it was launched: at the end of that call, or when the first work of the call began, if earlier."""
    step: NDArray[np.int32]
    """Position of the step that launched it; −1: none."""
    replayed: NDArray[np.bool_]
    """Whether a CUDA graph launched it."""
    captured: Int64
    """Position in `trace.launches` of the call that captured it; −1: none, or not known."""

    @cached_property
    def call(self) -> Int64:
        """Position in `trace.launches` of the call to whose operator it belongs; −1: unknown."""
        return np.where(self.captured >= 0, self.captured, self.launch)

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """Work whose launch the trace has."""
        return self.launch >= 0


@dataclass(frozen=True)
class HostStep:
    """A ProfilerStep range, without what belongs to the steps before."""

    number: int
    start_ns: int
    end_ns: int
    overlaps: bool = False
    """Whether the range began earlier, within a step before it."""

    @property
    def is_swallowed(self) -> bool:
        """Whether it is empty: it was entirely inside earlier steps."""
        return self.overlaps and self.start_ns == self.end_ns


def host_steps(trace: Trace) -> list[HostStep]:
    """The ProfilerStep ranges, in order of time; each begins after all earlier ones have ended.

    A range may run on while the profiler stops and writes the trace: it ends with the capture at the latest.
    """
    last_ns = MAX_NS if trace.recorded_until is None else trace.recorded_until
    steps = [
        HostStep(int(each.name.rpartition("#")[2]), each.start, max(each.start, min(each.end, last_ns)))
        for each in trace.of_kind(HostKind.STEP)
    ]
    return _apart(sorted(steps, key=lambda step: (step.start_ns, step.end_ns)))


def _apart(steps: list[HostStep]) -> list[HostStep]:
    """The steps, each from where the last of those before it ends."""
    result: list[HostStep] = []
    for step in steps:
        free_ns = result[-1].end_ns if result else step.start_ns
        start_ns = max(step.start_ns, free_ns)
        result.append(HostStep(step.number, start_ns, max(start_ns, step.end_ns), free_ns > step.start_ns))
    return result


def launched(trace: Trace, steps: list[HostStep]) -> Launched:
    """Joins GPU work with its launch by correlation, and with the step that contains the launch."""
    calls, gpu = trace.launches, trace.gpu
    order = np.argsort(calls.correlation, kind="stable")
    keys = calls.correlation[order]
    place = np.searchsorted(keys, gpu.correlation)
    inside = np.minimum(place, max(len(keys) - 1, 0))
    known = np.zeros(len(gpu), dtype=bool)
    if len(keys):
        known = (gpu.correlation > 0) & (keys[inside] == gpu.correlation)
    launch = np.where(known, order[inside] if len(keys) else NO_STEP, NO_STEP)
    start = np.where(known, calls.start[launch] if len(keys) else gpu.start, gpu.start)
    # Where most launches are missing, nothing is better than the time at which the work itself began.
    counts = known | (_lost(trace, known).mean() > MOSTLY_LOST if len(gpu) else False)
    step = np.where(counts, step_at(steps, start), NO_STEP).astype(np.int32)
    replayed = _replayed_work(trace, launch)
    done = _launched_at(trace, launch)
    return Launched(launch, start, done, step, replayed, _captured_calls(trace, launch, replayed))


def _launched_at(trace: Trace, launch: Int64) -> Int64:
    """When each piece of work was launched; the start of the work itself if unknown."""
    known = launch >= 0
    done, ends = trace.gpu.start.copy(), trace.launches.end.copy()
    np.minimum.at(ends, launch[known], done[known])
    done[known] = ends[launch[known]]
    return done


LONG_LAUNCH_NS = 1_000_000
"""A launching call takes microseconds, unless it loads a module, or waits for a full queue."""
FULL_QUEUE = 256
"""Pieces of work that may fill a GPU's queue: about 1,000, or with `CUDA_SCALE_LAUNCH_QUEUES` a quarter."""
LEAST_ONE_OFF_NS = 100_000
"""A shorter call only looks something up."""
OFTEN, EVERYWHERE = 10, 0.25
"""Calls of one name, and the share of them in each half of the trace, from which on they recur."""
ALIKE = 0.5
"""Share of the time that calls take in one of two steps which they take in the other where they recur."""
OUTLIER = 10
"""Multiple of the median length from which on a call is done once, though others of its name recur."""
COMPILE, TRITON, CAPTURE = "torch.compile", "Triton's compiler", "capture of a graph"


@dataclass(frozen=True, eq=False)
class OneOffWork:
    """Work of the CPU that is done once: it loads modules, creates handles, allocates memory, compiles."""

    calls: Spans
    """Names are those of `trace.launch_names`."""
    ranges: Mapping[str, Intervals]
    """When torch.compile works, Triton compiles other kernels, or a CUDA graph is captured."""

    @cached_property
    def covered(self) -> Intervals:
        return reduce(Intervals.join, self.ranges.values(), self.calls.covered)


def one_off_work(trace: Trace, work: Launched, steps: list[HostStep]) -> OneOffWork:
    """The one-off work that the trace shows: nothing that each of several steps does."""
    calls, least = trace.launches, np.full(len(trace.launch_names), np.iinfo(np.int64).max)
    for i, name in enumerate(trace.launch_names):
        if ONE_OFF_CALLS.match(name):
            least[i] = LEAST_ONE_OFF_NS
        elif LAUNCHING_CALLS.match(name):
            least[i] = LONG_LAUNCH_NS
    chosen = calls.duration >= least[calls.name]
    if (chosen & (least == LONG_LAUNCH_NS)[calls.name]).any():
        chosen &= ~_waits_for_queue(trace, work)
    for name in np.unique(calls.name[chosen]).tolist():
        mine = chosen & (calls.name == name)
        if _recurs(calls.where(mine), steps, bool(ALLOCATING_CALLS.match(trace.launch_names[name]))):
            chosen &= ~mine | (calls.duration >= OUTLIER * np.median(calls.duration[mine]))
    compiling, triton = (compilations(trace, pattern).covered for pattern in (COMPILING, TRITON_COMPILING))
    set_up = _named(trace.functions, trace.function_names, GRAPH_SETUP).covered.subtract(compiling)
    capturing = _capturing(trace).join(set_up)
    ranges = {COMPILE: compiling, TRITON: triton.subtract(compiling), CAPTURE: capturing}
    return OneOffWork(calls.where(chosen), ranges)


def _waits_for_queue(trace: Trace, work: Launched) -> NDArray[np.bool_]:
    """Whether each call finds its GPU's queue full, and that GPU works on meanwhile, but for short gaps."""
    calls, gpu = trace.launches, trace.gpu
    found = np.zeros(len(calls), dtype=bool)
    devices = np.array([device for device, _ in trace.streams])[gpu.thread]
    for device in set(devices.tolist()):
        mine = devices == device
        own = np.unique(work.launch[mine & work.is_known])
        start, end = calls.start[own], calls.end[own]
        launched, done = (np.searchsorted(np.sort(times[mine]), start) for times in (work.done, gpu.end))
        idle = union(gpu.start[mine], gpu.end[mine]).gaps(-MAX_NS, MAX_NS).longer_than(LEAST_ONE_OFF_NS)
        found[own] = (launched - done >= FULL_QUEUE) & (idle.inside_ns(start, end) < LEAST_ONE_OFF_NS)
    return found


def compilations(trace: Trace, *patterns: re.Pattern[str]) -> Spans:
    """The ranges in which torch.compile works, Triton compiles, or either: by the patterns of their names."""
    return _named(trace.annotations, trace.annotation_names, *patterns)


def _named(spans: Spans, names: Sequence[str], *patterns: re.Pattern[str]) -> Spans:
    """Those whose name matches a pattern."""
    chosen = [i for i, name in enumerate(names) if any(pattern.match(name) for pattern in patterns)]
    return spans.where(np.isin(spans.name, chosen))


def _capturing(trace: Trace) -> Intervals:
    """When a thread captures a CUDA graph."""
    calls, pairs = trace.launches, np.array(_begins_and_ends(trace), dtype=np.int64).reshape(-1, 2)
    return union(calls.start[pairs[:, 0]], calls.end[pairs[:, 1]])


def _recurs(calls: Spans, steps: list[HostStep], allocate: bool) -> bool:
    """Whether these calls are made again and again: in all of several steps, or all along.

    In two steps, those that allocate, if both take about as long; others may load what only that step needs.
    """
    times_ns, in_steps = calls.start, step_at(steps, calls.start)
    inside = in_steps >= 0
    in_step_ns = np.bincount(in_steps[inside], calls.duration[inside], minlength=len(steps))
    if len(steps) > 2 and in_step_ns.all():
        return True
    if len(steps) == 2 and allocate and in_step_ns.min() > ALIKE * in_step_ns.max():
        return True
    first, last = (steps[0].start_ns, steps[-1].end_ns) if steps else (times_ns.min(), times_ns.max())
    early = float((times_ns < (first + last) / 2).mean())
    return len(times_ns) >= OFTEN and EVERYWHERE <= early <= 1 - EVERYWHERE


def step_at(steps: list[HostStep], times_ns: Int64) -> Int64:
    """Position of the step whose ProfilerStep range holds each time; −1: none."""
    if not steps:
        return np.full(len(times_ns), NO_STEP, dtype=np.int64)
    starts = np.array([step.start_ns for step in steps], dtype=np.int64)
    ends = np.array([step.end_ns for step in steps], dtype=np.int64)
    place = np.searchsorted(starts, times_ns, "right") - 1
    return np.where((place >= 0) & (times_ns < ends[np.maximum(place, 0)]), place, NO_STEP)


def windows(trace: Trace, steps: list[HostStep], work: Launched) -> list[Step]:
    """The windows of the steps, in order of time, from the ends of the GPU work that they own."""
    done = _gpu_done_ns(trace, steps, work)
    result: list[Step] = []
    done_ns = done[0]
    for step, gpu_end_ns in zip(steps, done[1:], strict=True):
        start_ns = max(step.start_ns, done_ns)
        done_ns = max(start_ns, step.end_ns, gpu_end_ns)
        result.append(Step(step.number, start_ns, done_ns))
    return result


def _gpu_done_ns(trace: Trace, steps: list[HostStep], work: Launched) -> list[int]:
    """When the GPU was done with what was launched before the first step, then with each step's work.

    Work of other streams counts until the main stream begins with a later step.
    """
    gpu, owner = trace.gpu, work.step + 1
    counts = owner > 0
    if steps:
        counts |= before_capture(trace, work) | (work.start < steps[0].start_ns)
    main = gpu.thread == _main_stream(trace, steps, work)
    begins = np.full(len(steps) + 2, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(begins, owner[main & counts], gpu.start[main & counts])
    next_begins = np.minimum.accumulate(begins[::-1])[::-1][1:][owner]
    end = np.where(main, gpu.end, np.minimum(gpu.end, next_begins))
    bounds = counts & (main | (gpu.start < next_begins))
    done = np.full(len(steps) + 1, np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(done, owner[bounds], end[bounds])
    return list(map(int, done))


def _main_stream(trace: Trace, steps: list[HostStep], work: Launched) -> int:
    """Number of the stream that computes most in the most steps; −1: no step has GPU work."""
    gpu, shape = trace.gpu, (len(steps), len(trace.streams))
    owned = work.step >= 0
    if not owned.any():
        return NO_STREAM
    computes = owned & (gpu.kind == GpuKind.COMPUTE)
    chosen = computes if computes.any() else owned
    place = work.step[chosen].astype(np.int64) * shape[1] + gpu.thread[chosen]
    busy_ns = np.bincount(place, gpu.duration[chosen], minlength=shape[0] * shape[1]).reshape(shape)
    first_in = np.bincount(busy_ns[busy_ns.any(axis=1)].argmax(axis=1), minlength=shape[1])
    return max(range(shape[1]), key=lambda stream: (first_in[stream], busy_ns[:, stream].sum()))


def before_capture(trace: Trace, work: Launched) -> NDArray[np.bool_]:
    """Work that was launched before the capture: without a launch, and before all other work of its stream.

    Streams are queues; work without a launch that follows other work has lost its launch. Of a stream that
    has no work with a launch, what begins after the first such work of other streams has: some versions of
    Kineto lack the calls that launch communication. So has what follows a long gap, as where a trace was
    thinned out, unless its call came before all of the trace by its number. Where no launch is recorded,
    nothing is known.
    """
    return ~work.is_known & ~_lost(trace, work.is_known) & work.is_known.any()


def _lost(trace: Trace, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Work that was launched while the trace was recorded, but whose launch it doesn't have."""
    gpu = trace.gpu
    if not known.any():
        return ~known
    first = np.full(len(trace.streams), gpu.start[known].min(), dtype=np.int64)
    first[np.unique(gpu.thread[known])] = np.iinfo(np.int64).max
    np.minimum.at(first, gpu.thread[known], gpu.start[known])
    busy = gpu.covered
    resumed = busy.starts[1:][busy.starts[1:] - busy.ends[:-1] >= LONG_GAP_NS]
    numbers = trace.launches.correlation
    is_earlier = (gpu.correlation > 0) & (gpu.correlation < numbers[numbers > 0].min(initial=MAX_NS))
    begun = np.minimum(first[gpu.thread], np.where(is_earlier, MAX_NS, resumed.min(initial=MAX_NS)))
    return np.asarray(~known & (gpu.start >= begun), dtype=np.bool_)


MANY_CALLS, FEW = 100, 0.02
"""Calls of which so few have been recorded, by their numbers, that others were left out afterwards. Of CUDA's
numbers Kineto records 5 to 30 %."""


def are_calls_left_out(trace: Trace) -> bool:
    """Whether the trace was thinned: what runs in its gaps may have been left out."""
    numbers = trace.launches.correlation
    numbers = numbers[numbers > 0]
    if len(numbers) < MANY_CALLS:
        return False
    return len(numbers) < FEW * int(numbers.max() - numbers.min() + 1)


ALLOCATING = ("aten::empty", "aten::new_empty", "aten::resize_")
"""How the names of operators begin that allocate memory, and compute nothing."""


def computing_operators(trace: Trace, threads: NDArray[np.int32]) -> Spans:
    """Long operators of torch in which none of these threads calls the GPU: the CPU computes itself.

    While another one launches, as in a backward pass, an operator only waits for it.
    """
    is_torchs = np.array(
        [name.startswith("aten::") and not name.startswith(ALLOCATING) for name in trace.op_names], dtype=bool
    )
    ops, calls = trace.ops, trace.launches
    mine = ops.where((ops.duration >= LONG_LAUNCH_NS) & is_torchs[ops.name] & np.isin(ops.thread, threads))
    starts = np.sort(calls.start[np.isin(calls.thread, threads)])
    return mine.where(np.searchsorted(starts, mine.end) == np.searchsorted(starts, mine.start))


NEARLY_ALL = 0.8
"""Share of other time from which on what is around it says nothing about the waited time."""


@dataclass(frozen=True)
class Holding:
    """What may hold up launches: long operators and annotations of threads that launch, no step marks."""

    ranges: tuple[tuple[Spans, tuple[str, ...]], ...]
    """Each kind, and its table of names."""
    calls: Spans
    """The launching calls of these threads."""

    @staticmethod
    def of(trace: Trace, threads: NDArray[np.int32]) -> Holding:
        """What these threads are in."""
        marks = {each.name for each in trace.of_kind(HostKind.STEP)}
        ranges = []
        for spans, names in ((trace.ops, trace.op_names), (trace.annotations, trace.annotation_names)):
            is_mark = np.array([name in marks for name in names], dtype=bool)
            is_long = (spans.duration >= LONG_LAUNCH_NS) & np.isin(spans.thread, threads)
            ranges.append((spans.where(is_long & ~is_mark[spans.name]), names))
        return Holding(tuple(ranges), trace.launches.where(np.isin(trace.launches.thread, threads)))

    def most_of(self, waited: Intervals, rest: Intervals) -> str | None:
        """The innermost range that is around most of the waited time, and in which nothing is launched then.

        It isn't around nearly all of the rest, too. Less than 1 ms between launches doesn't count: that may
        be Python's own time in many operators.
        """
        calling = self.calls.near(waited).covered
        best: tuple[int, str] | None = None
        for spans, names in self.ranges:
            times_ns = np.bincount(spans.name, waited.inside_ns(spans.start, spans.end), minlength=len(names))
            for name in np.flatnonzero(2 * times_ns > waited.length_ns).tolist():
                covered = spans.where(spans.name == name).covered
                held = covered.subtract(calling).longer_than(LONG_LAUNCH_NS).intersect(waited)
                is_of_all = covered.intersect(rest).length_ns >= NEARLY_ALL * max(rest.length_ns, 1)
                if 2 * held.length_ns > waited.length_ns and not is_of_all:
                    found = (covered.length_ns, names[name])
                    best = found if best is None else min(best, found)
        return None if best is None else best[1]


def recorded_note(steps: list[HostStep]) -> Finding:
    """Which steps these are, none of which were asked for, and how to ask for all of them."""
    if not steps:
        return noticed("no-steps")
    first, last = steps[0].number, steps[-1].number
    return noticed(
        "other-steps",
        recorded_step=sorted({first, last}),
        first_step=first,
        end_step=last + 1,  # not part of the range
    )


def step_notes(steps: list[HostStep]) -> Iterator[Finding]:
    """Notes on steps that aren't one after the other, each with its number."""
    if any(step.overlaps for step in steps):
        yield noticed("steps-overlap")
    if inside := [step.number for step in steps if step.is_swallowed]:
        yield noticed("steps-inside-others", steps=inside)
    if len({step.number for step in steps}) < len(steps):
        yield noticed("steps-of-one-number")


def launch_notes(trace: Trace, work: Launched) -> Iterator[Finding]:
    """Notes on the steps' figures where launches are missing."""
    lost = _lost(trace, work.is_known)
    if not work.is_known.any():
        yield noticed("no-launches")
    elif lost.mean() > MOSTLY_LOST:
        yield noticed("mostly-lost-launches", num_lost=int((~work.is_known).sum()))
    elif lost.any():
        yield noticed("lost-launches", num_lost=int(lost.sum()))


def is_last_empty(steps: list[HostStep], work: Launched) -> bool:
    """Whether the last step is none: `step()` began it, and the capture ended.

    It is short, and alone has launched no GPU work.
    """
    owners = np.isin(np.arange(len(steps)), work.step)
    if len(steps) < 2 or owners[-1] or not owners[:-1].all():
        return False
    *others, last = (step.end_ns - step.start_ns for step in steps)
    return bool(last < SHORT * np.median(others))


def replay_notes(work: Launched) -> Iterator[Finding]:
    """Notes on replays of CUDA graphs whose operators aren't known."""
    if unknown := int((work.replayed & (work.captured < 0)).sum()):
        yield noticed("graphs-not-captured", num_pieces=unknown)


UNKNOWN = -1
_SORTS = (
    ("kernel", re.compile(r"(cuda|cu|hip)\w*Launch\w*Kernel")),
    ("copy", re.compile(r"(cuda|cu|hip)Memcpy")),
    ("set", re.compile(r"(cuda|cu|hip)Memset")),
)
_SORT_OF_KIND = {
    GpuKind.COMPUTE: "kernel",
    GpuKind.COMM: "kernel",
    GpuKind.MEMCPY: "copy",
    GpuKind.MEMSET: "set",
}


@dataclass(frozen=True)
class _Capture:
    """The calls of a capture, in order of time."""

    begin: int
    end: int
    calls: tuple[int, ...]
    """Positions in `trace.launches`."""
    sorts: tuple[str, ...]
    names: tuple[str | None, ...]
    """The names of kernels, where the trace has them."""


@dataclass(frozen=True)
class _Graph:
    """A graph, as its launches show it."""

    nodes: tuple[int, ...]
    """Numbers of its nodes; empty if the trace doesn't have them."""
    sorts: tuple[str, ...]
    names: tuple[str, ...]
    first_launch: int = 0

    def fits(self, capture: _Capture) -> bool:
        """Whether it may be what this capture made."""
        if self.sorts != capture.sorts or capture.end > self.first_launch:
            return False
        pairs = zip(self.sorts, self.names, capture.names, strict=True)
        named = [(own, captured) for sort, own, captured in pairs if sort == "kernel"]
        return all(own == captured or (captured is None and self.nodes) for own, captured in named)


def _replayed_work(trace: Trace, launch: Int64) -> NDArray[np.bool_]:
    """Which GPU work was launched by a graph, from the position of each piece's launch."""
    return np.isin(launch, _calls_of(trace, IN_USE["CUDA graphs"]))


def _captured_calls(trace: Trace, launch: Int64, replayed: NDArray[np.bool_]) -> Int64:
    """The position in `trace.launches` of the call that captured each piece of work; −1 where not known."""
    found = np.full(len(launch), UNKNOWN, dtype=np.int64)
    captures = list(_captures(trace, launch)) if replayed.any() else []
    if not captures:
        return found
    graphs: defaultdict[_Graph, list[Int64]] = defaultdict(list)
    for pieces in _launched_together(trace, launch, replayed):
        graphs[_graph(trace, pieces)].append(pieces)
    started = trace.launches.start
    launched = {
        replace(graph, first_launch=int(min(started[launch[pieces[0]]] for pieces in same))): same
        for graph, same in graphs.items()
    }
    for graph, capture in _matched(list(launched), captures):
        for pieces in launched[graph]:
            found[pieces] = capture.calls
    return found


def capture_begun(trace: Trace, calls: Int64) -> Int64:
    """When the last capture began before each of these calls; before all time where none had."""
    begins = np.append(np.iinfo(np.int64).min, trace.launches.start[_calls_of(trace, BEGINS_CAPTURE)])
    found: Int64 = begins[np.searchsorted(begins, trace.launches.start[calls], "right") - 1]
    return found


def _begins_and_ends(trace: Trace) -> list[tuple[int, int]]:
    """The calls that begin and end each capture, by their positions in `trace.launches`, in order of time."""
    calls, found = trace.launches, []
    ends = _calls_of(trace, ENDS_CAPTURE)
    for begin in _calls_of(trace, BEGINS_CAPTURE).tolist():
        own = ends[(calls.thread[ends] == calls.thread[begin]) & (calls.start[ends] >= calls.start[begin])]
        if len(own):
            found.append((begin, int(own[0])))
    return found


def _captures(trace: Trace, launch: Int64) -> Iterator[_Capture]:
    """The captures that the trace has from begin to end."""
    calls, names = trace.launches, trace.launch_names
    spans = [
        (int(calls.start[begin]), int(calls.start[end]), int(calls.thread[begin]))
        for begin, end in _begins_and_ends(trace)
    ]
    sort_of = [next((sort for sort, what in _SORTS if what.match(name)), None) for name in names]
    launching = _positions(trace, [i for i, sort in enumerate(sort_of) if sort is not None])
    launching = launching[~np.isin(launching, launch)]  # these launched work at once, on another stream
    for begin, end, thread in spans:
        inside = launching[(calls.start[launching] >= begin) & (calls.start[launching] < end)]
        if sum(first < end and begin < last for first, last, _ in spans) > 1:
            inside = inside[calls.thread[inside] == thread]
        kernels = [int(each) for each in calls.kernel[inside]]
        yield _Capture(
            begin,
            end,
            tuple(inside.tolist()),
            tuple(str(sort_of[name]) for name in calls.name[inside]),
            tuple(None if each == NO_NAME else trace.launched_kernels[each] for each in kernels),
        )


def _calls_of(trace: Trace, pattern: re.Pattern[str]) -> Int64:
    """The calls whose name matches, in order of time."""
    return _positions(trace, [i for i, name in enumerate(trace.launch_names) if pattern.match(name)])


def _positions(trace: Trace, names: Sequence[int]) -> Int64:
    """The calls with these names, in order of time."""
    found = np.flatnonzero(np.isin(trace.launches.name, names))
    ordered: Int64 = found[np.argsort(trace.launches.start[found], kind="stable")]
    return ordered


def _launched_together(trace: Trace, launch: Int64, replayed: NDArray[np.bool_]) -> Iterator[Int64]:
    """The work of each launch of a graph, in the order of its nodes; of unnumbered nodes in that of time."""
    pieces = np.flatnonzero(replayed)
    order = np.lexsort((trace.gpu.start[pieces], trace.gpu.node[pieces], launch[pieces]))
    pieces = pieces[order]
    yield from np.split(pieces, np.flatnonzero(np.diff(launch[pieces])) + 1)


def _graph(trace: Trace, pieces: Int64) -> _Graph:
    gpu = trace.gpu
    nodes = gpu.node[pieces]
    return _Graph(
        nodes=tuple(nodes.tolist()) if nodes.any() else (),
        sorts=tuple(_SORT_OF_KIND[GpuKind(kind)] for kind in gpu.kind[pieces].tolist()),
        names=tuple(trace.gpu_names[name] for name in gpu.name[pieces].tolist()),
    )


def _matched(graphs: Sequence[_Graph], captures: Sequence[_Capture]) -> Iterator[tuple[_Graph, _Capture]]:
    """Graphs with the captures that they were made by, as far as that is certain."""
    alike: defaultdict[tuple[_Capture, ...], list[_Graph]] = defaultdict(list)
    for graph in graphs:
        if len(set(graph.nodes)) == len(graph.nodes):
            alike[tuple(capture for capture in captures if graph.fits(capture))].append(graph)
    taken: set[_Capture] = set()
    for fitting, same in sorted(alike.items(), key=lambda item: len(item[0])):
        free = [capture for capture in fitting if capture not in taken]
        if len(free) == len(same):
            yield from zip(sorted(same, key=lambda graph: graph.nodes), free, strict=True)
            taken.update(free)
