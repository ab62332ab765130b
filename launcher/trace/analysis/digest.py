"""The digest of one trace file. What needs the other ranks' files is in `match`.

The time of a window is divided in exact integer nanoseconds. Where one process uses several GPUs, as
`DataParallel` does, a moment can be busy for one device and idle for another, so each device gets its own
breakdown over the same windows. The rank's figures are those of its busiest device. A device with hardly any
work (as when a rank has touched GPU 0 once in addition to its own) isn't counted as the rank's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.errors import TraceError
from gpurun.launcher.findings.finding import Finding, noticed, with_figures
from gpurun.launcher.trace.added_by_ranks import RANK_KEY, RankFacts
from gpurun.launcher.trace.analysis.collectives.local_collectives import (
    LocalCollective,
    clock_id,
    host_name,
    local_collectives,
)
from gpurun.launcher.trace.analysis.critical_path import Tasks, task_window, tasks_of
from gpurun.launcher.trace.analysis.on_request.rank_tables import RankTables, rank_tables
from gpurun.launcher.trace.analysis.python_functions import (
    LoopFunctions,
    launching_threads,
    readable_function,
    with_awaited_data,
)
from gpurun.launcher.trace.analysis.steps import (
    LONG_GAP_NS,
    LONG_LAUNCH_NS,
    Holding,
    HostStep,
    Launched,
    OneOffWork,
    Step,
    are_calls_left_out,
    before_capture,
    computing_operators,
    host_steps,
    is_last_empty,
    launch_notes,
    launched,
    one_off_work,
    recorded_note,
    replay_notes,
    step_at,
    step_notes,
    windows,
)
from gpurun.launcher.trace.analysis.tables import (
    Mask,
    NameTime,
    Selection,
    cpu_compute,
    everything,
    issuing_calls,
    kernel_times,
    op_times,
    stretches,
)
from gpurun.launcher.trace.intervals import EMPTY, Int64, Intervals, clipped, divided, lengths_ns, union
from gpurun.launcher.trace.kineto.classify import (
    ALLOCATING_CALLS,
    COMPILED,
    IN_USE,
    LOADING_CALLS,
    NEEDS_GPU,
    OPTIMIZER_STEP,
    WORKING_CALLS,
    GpuKind,
    HostKind,
)
from gpurun.launcher.trace.kineto.columns import Timed, Trace
from gpurun.launcher.trace.kineto.read_trace import read_trace
from gpurun.launcher.trace.kineto.trace_file import ReadLimits
from gpurun.launcher.trace.kineto.writers import devices_not_read, kind_of_events, notes_on_events
from gpurun.launcher.trace.model import GAPS_OF_IDLE, CpuFacts, Table
from gpurun.launcher.units import listed


@dataclass(frozen=True, eq=False)
class DeviceActivity:
    """A device's activity: the moments of each class. Classes may overlap each other."""

    compute: Intervals
    comm: Intervals
    copies: Intervals
    """Copies and memsets."""
    memsets: Intervals = EMPTY
    device: Intervals = EMPTY
    """All that ran on the device, including what isn't divided here: work of other steps."""

    def clip(self, start_ns: int, end_ns: int) -> DeviceActivity:
        """The events from `start_ns` to `end_ns`."""
        return DeviceActivity(**clipped(vars(self), start_ns, end_ns))

    @property
    def busy(self) -> Intervals:
        return self.compute.join(self.comm).join(self.copies)


def gpu_activity(start: Int64, end: Int64, kind: NDArray[np.int8], busy: Intervals) -> DeviceActivity:
    """The activity of GPU work of these kinds; `busy` is all that ran on the device."""

    def of(*kinds: GpuKind) -> Intervals:
        chosen = np.logical_or.reduce([kind == each for each in kinds])
        return union(start[chosen], end[chosen])

    copies = of(GpuKind.MEMCPY, GpuKind.MEMSET)
    return DeviceActivity(of(GpuKind.COMPUTE), of(GpuKind.COMM), copies, of(GpuKind.MEMSET), busy)


@dataclass(frozen=True, eq=False)
class Waits:
    """Explanations for moments in which the device is idle."""

    data: Intervals
    """The training loop waits for its next batch."""
    comm: Intervals
    """A collective runs on the CPU, and the device has to wait for it."""
    runtime: Intervals
    """Some thread is in a call of the CUDA or HIP API."""
    ops: Intervals
    """Some thread is in an operator."""
    one_off: Intervals = EMPTY
    """The CPU does something once."""
    blocking: Intervals = EMPTY
    """A thread that launches work is in a call of that API that takes long."""
    allocating: Intervals = EMPTY
    """Such a call allocates or frees memory."""
    loading: Intervals = EMPTY
    """Such a call loads code."""
    unrecorded: Intervals = EMPTY
    """Nothing is recorded of the CPU."""

    def blocked(self, before: Intervals) -> Intervals:
        """The long parts of gaps before a launch in which the CPU waits in a call."""
        return before.intersect(self.blocking).longer_than(LONG_GAP_NS)


MAX_LATENCY_NS = 20_000
"""From the end of a launch to the start of work that waits for nothing else; microseconds where GPUs idle."""
LOST = np.iinfo(np.int64).max
"""Instead of when work was launched."""


@dataclass(frozen=True, eq=False)
class DeviceQueue:
    """A device's work by start, with the times of its launch: shows what a gap waits for."""

    starts: Int64
    begun: Int64
    """When the launching call began; `LOST` where the trace doesn't have it."""
    done: Int64
    """When the work was launched."""

    def awaited(self, gaps: Intervals) -> tuple[Intervals, Intervals, Intervals, Intervals]:
        """The parts of gaps before the launching call of the work that ends each, during this call, and from
        its end to the start; and gaps whose launch isn't known.

        What was launched before its gap began waits for something else than its launch. After the last work,
        all of the gap is before the next launch.
        """
        gaps = self._divided(gaps)
        place = np.searchsorted(self.starts, gaps.ends)
        begun, done = (times[place] for times in self._launched)
        is_known = begun != LOST
        begun = np.clip(begun, gaps.starts, gaps.ends)
        done = np.clip(done, begun, gaps.ends)
        return (
            _some(gaps.starts, begun, is_known),
            _some(begun, done, is_known),
            _some(done, np.minimum(done + MAX_LATENCY_NS, gaps.ends), is_known & (done > gaps.starts)),
            _some(gaps.starts, gaps.ends, ~is_known),
        )

    @cached_property
    def _launched(self) -> tuple[Int64, Int64]:
        """`begun` and `done`, with times after the last work."""
        later = LOST - 1 if (self.begun != LOST).any() else LOST
        return np.append(self.begun, later), np.append(self.done, later)

    def _divided(self, gaps: Intervals) -> Intervals:
        """The gaps, divided where work begins whose length was rounded to 0: it waited for its own launch."""
        if not len(gaps.starts):
            return gaps
        first, last = np.searchsorted(self.starts, (gaps.starts[0], gaps.ends[-1]))
        starts = self.starts[first:last]
        place = np.searchsorted(gaps.starts, starts) - 1
        inside = place >= 0
        inside[inside] = starts[inside] < gaps.ends[place[inside]]
        times = np.unique(starts[inside])
        return Intervals(*(np.sort(np.append(ends, times)) for ends in (gaps.starts, gaps.ends)))


def _some(starts: Int64, ends: Int64, chosen: NDArray[np.bool_]) -> Intervals:
    chosen = chosen & (ends > starts)
    return Intervals(starts[chosen], ends[chosen])


@dataclass(frozen=True)
class Idle:
    """Idle time of the device by cause, in ns; the causes add up to the idle time."""

    host: int
    """The call that launches what comes next hadn't begun."""
    unrecorded: int
    """That call hadn't begun, and nothing is recorded of the CPU."""
    launching: int
    """The call that launches was running."""
    latency: int
    """The call had ended, and the work hadn't started."""
    one_off: int
    """The CPU did something once, and had launched nothing."""
    comm_wait: int
    data: int
    allocating: int
    """That call hadn't begun, and the CPU was in one that allocates or frees memory, for long."""
    loading: int
    """Likewise, in one that loads code."""
    blocked: int
    """Likewise, in another call."""
    other: int
    """Work was launched but had not started: it waited for other work."""
    unknown: int
    """The launch of the work that came next isn't known."""


@dataclass(frozen=True)
class HostActivity:
    """CPU activity while the device was idle, in ns: a moment counts for the first that applies."""

    runtime: int
    data: int
    op: int
    other: int


@dataclass(frozen=True, eq=False)
class Measure:
    """The time of one window in ns: compute + exposed_comm + exposed_copy + other_steps + idle = span."""

    start: int
    end: int
    compute: int
    comm: int
    overlap: int
    copy: int
    memset: int
    exposed_copy: int
    other_steps: int
    """Only work that the window's step didn't launch ran."""
    idle: int
    idle_by_cause: Idle
    idle_by_host: HostActivity
    exposed_comm: Intervals = field(repr=False)
    """The moments of communication without compute; matching the ranks shows which of them are waiting."""

    @property
    def span(self) -> int:
        return self.end - self.start


def measure(
    activity: DeviceActivity, start_ns: int, end_ns: int, waits: Waits, queue: DeviceQueue | None
) -> Measure:
    """Divides the window from `start_ns` to `end_ns`.

    Without a `queue` of launched work, all idle time that isn't waiting is the host's.
    """
    inside = activity.clip(start_ns, end_ns)
    exposed_comm = inside.comm.subtract(inside.compute)
    busy = inside.busy
    others = inside.device.subtract(busy)
    idle = busy.join(others).gaps(start_ns, end_ns)
    parts = {
        "compute": inside.compute,
        "comm": inside.comm,
        "overlap": inside.comm.subtract(exposed_comm),
        "copy": inside.copies,
        "memset": inside.memsets,
        "exposed_copy": inside.copies.subtract(inside.compute.join(inside.comm)),
        "other_steps": others,
        "idle": idle,
    }
    return Measure(
        start=start_ns,
        end=end_ns,
        **lengths_ns(parts),
        idle_by_cause=_causes(idle, waits, queue),
        idle_by_host=_host_activity(idle, waits),
        exposed_comm=exposed_comm,
    )


def joined(parts: Sequence[Measure]) -> Measure:
    """The sum of consecutive windows."""

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    causes = zip(*(astuple(part.idle_by_cause) for part in parts), strict=True)
    activities = zip(*(astuple(part.idle_by_host) for part in parts), strict=True)
    exposed = [part.exposed_comm for part in parts]
    return Measure(
        start=parts[0].start,
        end=parts[-1].end,
        compute=total("compute"),
        comm=total("comm"),
        overlap=total("overlap"),
        copy=total("copy"),
        memset=total("memset"),
        exposed_copy=total("exposed_copy"),
        other_steps=total("other_steps"),
        idle=total("idle"),
        idle_by_cause=Idle(*map(sum, causes)),
        idle_by_host=HostActivity(*map(sum, activities)),
        exposed_comm=Intervals(
            np.concatenate([each.starts for each in exposed]), np.concatenate([each.ends for each in exposed])
        ),
    )


def idle_parts(idle: Intervals, waits: Waits, queue: DeviceQueue | None) -> dict[str, Intervals]:
    """Idle time by its cause in `Idle`."""
    data = idle.intersect(waits.data)
    rest = idle.subtract(data)
    comm = rest.intersect(waits.comm)
    rest = rest.subtract(comm)
    before, during, after, lost = (idle, EMPTY, EMPTY, EMPTY) if queue is None else queue.awaited(idle)
    one_off = rest.intersect(waits.one_off).intersect(before.join(during))
    blocked = waits.blocked(before)
    allocating = blocked.intersect(waits.allocating)
    loading = blocked.intersect(waits.loading).subtract(allocating)
    before = rest.intersect(before.subtract(blocked))
    unseen = before.intersect(waits.unrecorded).longer_than(LONG_GAP_NS)
    by_cause = {
        "host": before.subtract(unseen),
        "unrecorded": unseen,
        "launching": during,
        "latency": after,
        "allocating": allocating,
        "loading": loading,
        "blocked": blocked.subtract(allocating).subtract(loading),
        "unknown": lost,
    }
    found = divided(rest.subtract(one_off), by_cause, rest="other")
    return {**found, "one_off": one_off, "comm_wait": comm, "data": data}


def _causes(idle: Intervals, waits: Waits, queue: DeviceQueue | None) -> Idle:
    return Idle(**lengths_ns(idle_parts(idle, waits, queue)))


def _host_activity(idle: Intervals, waits: Waits) -> HostActivity:
    no_runtime = idle.subtract(waits.runtime)
    no_data = no_runtime.subtract(waits.data)
    nothing = no_data.subtract(waits.ops)
    return HostActivity(
        runtime=idle.length_ns - no_runtime.length_ns,
        data=no_runtime.length_ns - no_data.length_ns,
        op=no_data.length_ns - nothing.length_ns,
        other=nothing.length_ns,
    )


SEVERAL = "several-devices"
"""The case of a note about them."""
STRAY_BELOW = 0.01
"""Devices with less than this share of the busiest device's work don't count."""


@dataclass(frozen=True, eq=False)
class RankDevices:
    """The devices of a rank, the busiest first."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    owner: NDArray[np.int64]
    """Number of the device of each piece of GPU work."""
    strays: tuple[str, ...]
    """Names of those with hardly any work."""

    @staticmethod
    def of(trace: Trace) -> RankDevices:
        """The devices that the GPU work of a trace names."""
        spelled = [device for device, _ in trace.streams]
        if len(trace.named_devices) == 1:
            spelled = [*trace.named_devices] * len(spelled)  # work that doesn't say runs on the one known
        names = list(dict.fromkeys(spelled))
        by_stream = np.array([names.index(device) for device in spelled], dtype=np.int64)
        owner = by_stream[trace.gpu.thread]
        busy_ns = np.bincount(owner, weights=trace.gpu.duration, minlength=len(names))
        order = sorted(range(len(names)), key=lambda i: (-busy_ns[i], names[i]))
        working = [i for i in order if busy_ns[i] >= STRAY_BELOW * busy_ns[order[0]]]
        strays = tuple(names[i] for i in order if i not in working)
        return RankDevices(tuple(names[i] for i in working), tuple(working), owner, strays)

    def share(self, chosen: Int64, number: int) -> Int64:
        """The work of this device among these positions."""
        mine: Int64 = chosen[self.owner[chosen] == number]
        return mine

    def notes(self) -> Iterator[Finding]:
        """Notes for the reader."""
        if len(self.names) > 1:
            yield noticed(SEVERAL, devices=sorted(self.names), busiest=self.names[0])
        if self.strays:
            yield noticed("stray-work", devices=sorted(self.strays))


MAX_STEPS = 100
"""The most steps whose CPU is looked at one by one."""
MAX_RANKS = 1 << 31
MAX_SAMPLES = 1 << 31
MAX_NS = 1 << 53
"""Larger numbers are damage."""
_DATA_PARALLEL = re.compile(r"DistributedDataParallel\.forward|FSDP::|torch\.distributed\.ddp\.reducer")
"""Names of ranges and operators that torch's DDP and FSDP leave."""
_DIGITS = re.compile(r"[0-9]{1,10}")
"""A number that its writer gave as text: a rank from the environment, a device."""


@dataclass(frozen=True)
class LaunchDelayNs:
    """The delay from the end of the launching call to the start of the work, in ns."""

    median: int
    largest: int


@dataclass(frozen=True, eq=False)
class Scope:
    """One stretch of a rank's time: a step, or all of the file."""

    step: int | None
    """Number of the step; `None` for all of the file."""
    position: int | None
    """The position of the step within the file; `None` for all of the file."""
    measure: Measure
    num_kernels: int
    launch_delay: LaunchDelayNs | None
    gpu_span: int | None
    """The time from the first start to the last end of the GPU work that belongs here, in ns."""
    devices: tuple[tuple[str, Scope], ...] = ()
    """Each device by itself where there are several; the rest is the first one's, the busiest."""


@dataclass(frozen=True)
class NameTimes:
    """Times by name, longest first."""

    kernels: tuple[NameTime, ...]
    ops: tuple[NameTime, ...]
    modules: tuple[NameTime, ...]


@dataclass(frozen=True, eq=False)
class Digest:
    """The digest of a trace file: small, whatever the size of the file."""

    path: Path
    base_ns: int
    """Unix time to which all other times here are relative."""
    zero_ns: int
    """Unix time at which the file's own `ts` is 0."""
    process: str | None
    """The number of the process, if the trace has it."""
    rank: int | None
    world_size: int | None
    device: str
    extent: tuple[int, int]
    """From the first to the last work in the file, whichever steps were chosen."""
    total: Scope
    steps: tuple[Scope, ...]
    collectives: tuple[LocalCollective, ...]
    one_off: tuple[NameTime, ...]
    """Work that was done once, longest first."""
    cpu: CpuFacts
    step_cpu: Mapping[int, CpuFacts]
    """By the number of the step, of the first `MAX_STEPS`."""
    names: NameTimes
    """The names of all of the file; of the chosen steps, where steps were chosen."""
    step_names: NameTimes
    """The names of the work that steps launched."""
    notes: tuple[Finding, ...]
    tasks: Tasks | None
    """What the rank does in its steps; `None` if that is neither replayed nor shown as a critical path."""
    unreplayed: str
    """Why the steps aren't replayed, as a case of `BY_SHARES`; empty where they are."""
    recorded: Finding
    """The steps that the file has, for who asked for others."""
    communicates: bool
    """Whether the file has collectives, in whichever steps."""
    wraps_data_parallel: bool
    """Whether torch's DDP or FSDP is at work."""
    optimizer_steps: int = 0
    is_cut: bool = False
    """Whether the file ends early."""
    lost_events: int = 0
    """Damaged events that were left out and may have been work, if they are many."""
    is_thinned: bool = False
    """Whether calls were left out of it after it was recorded."""
    clock: str | None = None
    """Equal for CPU traces whose times come from one clock; `None`: unknown, or those of GPUs."""
    host: str | None = None
    """The name of the computer that such a trace is from; `None`: unknown."""
    window: tuple[int, int] | None = None
    """If steps were selected: from the start of the first on the CPU to the end of the last one's work."""
    facts: RankFacts | None = None
    show: Set[Table] = frozenset()
    """The tables that `tables` is for."""
    tables: RankTables | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the file lacks work."""
        return self.is_cut or self.lost_events > 0


def digest_file(path: Path, steps: slice | None, show: Set[Table], room: ReadLimits) -> Digest:
    """Reads and analyses one file.

    Args:
        path: a Kineto trace, plain or gzip.
        steps: numbers of the steps to look at, the last one excluded; `None`: the whole file.
        show: the tables on request.
        room: how much may be read of this file and others.

    Raises:
        TraceError: the file can't be read, is not a trace, or has nothing to analyse.
    """
    return digest(read_trace(path, with_details=bool(show), room=room), path, steps, show)


def digest(trace: Trace, path: Path, chosen: slice | None, show: Set[Table] = frozenset()) -> Digest:
    """Analyses one trace; arguments and errors are those of `digest_file`."""
    _refuse_empty(trace, path)
    host = host_steps(trace)
    work = launched(trace, host)
    trace = with_awaited_data(trace, work)
    all_steps = windows(trace, host, work)
    whole = chosen is None
    no_step = len(host) - 1 if whole and is_last_empty(host, work) else None
    kept = [i for i, step in enumerate(all_steps) if _is_chosen(step.number, chosen) and i != no_step]
    shown, in_steps = _selections(trace, work, host, kept, whole)
    names = _names(trace, work, [shown, in_steps] if whole and kept and not in_steps.is_all else [shown])
    on_gpu = len(trace.gpu) > 0
    once = one_off_work(trace, work, host)
    picture = _GpuPicture(trace, work, once) if on_gpu else _CpuPicture(trace, once)
    device = _device(trace, picture)
    total = picture.total(shown.gpu, [all_steps[i] for i in kept], whole)
    scopes = tuple(picture.step(all_steps[i], i) for i in kept)
    collectives = local_collectives(trace, work, host)
    own_steps = [host[i] for i in kept]
    why, tasks = _tasks(trace, work, once, picture, own_steps, "critical-path" in show)
    recorded, *notes = (with_figures(each, file=str(path)) for each in _notes(trace, host, work, no_step))
    cpu, step_cpu = _cpu_facts(trace, work, once, picture, scopes, total)
    return Digest(
        path=path,
        base_ns=trace.base_ns,
        zero_ns=trace.zero_ns,
        process=_process(trace),
        rank=_info(trace, "rank"),
        world_size=_info(trace, "world_size"),
        device=device,
        extent=picture.extent(all_steps),
        total=total,
        steps=scopes,
        collectives=tuple(each for each in collectives if whole or each.step in kept),
        one_off=tuple(_one_off_times(trace, _within(once, own_steps, total.measure))),
        cpu=cpu,
        step_cpu=step_cpu,
        names=names[0],
        step_names=names[-1],
        tasks=tasks,
        unreplayed=why,
        notes=tuple(notes),
        recorded=recorded,
        communicates=bool(collectives),
        wraps_data_parallel=any(map(_DATA_PARALLEL.match, (*trace.annotation_names, *trace.op_names))),
        optimizer_steps=0 if host else _optimizer_steps(trace),
        is_cut=trace.cut is not None,
        lost_events=_lost_events(trace),
        is_thinned=on_gpu and are_calls_left_out(trace),
        clock=None if on_gpu else clock_id(trace.header),
        host=None if on_gpu else host_name(trace.header),
        window=None if chosen is None else _window(host, all_steps, kept),
        facts=_facts(trace),
        show=show,
        tables=rank_tables(trace, work, kept, shown, in_steps, device, show),
    )


def _selections(
    trace: Trace, work: Launched, host: list[HostStep], kept: list[int], whole: bool
) -> tuple[Selection, Selection]:
    """What is shown, and what was launched, and begun on the CPU, in these steps."""
    in_steps = Selection(
        np.isin(work.step, kept),
        np.isin(step_at(host, trace.ops.start), kept),
        np.isin(step_at(host, trace.modules.start), kept),
    )
    return everything(trace) if whole else in_steps, in_steps


def _tasks(
    trace: Trace,
    work: Launched,
    once: OneOffWork,
    picture: _GpuPicture | _CpuPicture,
    steps: list[HostStep],
    has_path: bool,
) -> tuple[str, Tasks | None]:
    """Why the steps aren't replayed, else empty; and their tasks, which a critical path needs in any case."""
    why = _unreplayed(trace, work, steps)
    if are_calls_left_out(trace):  # no task is known to wait for another
        return why, None
    if why and not (has_path and (work.is_known.any() or not len(trace.gpu))):
        return why, None
    first_ns, last_ns = task_window(trace, steps)
    if not steps and len(trace.gpu):  # after the last work nothing waits, as no step ends
        last_ns = min(last_ns, picture.extent([])[1])
    starved = picture.starved(first_ns, max(first_ns, last_ns))
    return why, tasks_of(trace, work, once.covered, starved, steps)


def _all_names(trace: Trace) -> Iterator[str]:
    return chain(trace.gpu_names, trace.launch_names, trace.op_names, trace.annotation_names)


def _cpu_facts(
    trace: Trace,
    work: Launched,
    once: OneOffWork,
    picture: _GpuPicture | _CpuPicture,
    scopes: Sequence[Scope],
    total: Scope,
) -> tuple[CpuFacts, dict[int, CpuFacts]]:
    """What the CPU does in the idle time of all steps, and of each; without steps, of all of the trace."""
    spans = [(each.measure.start, each.measure.end) for each in scopes or (total,)]
    window = union(*np.array(spans).T)
    idle = picture.idle(window)
    of_launches = reduce(Intervals.join, (idle[cause] for cause in ("host", "launching", "latency")))
    in_gaps = reduce(Intervals.join, (idle[cause] for cause in GAPS_OF_IDLE))
    parts = {"host": of_launches, "data": idle["data"], "other": in_gaps, "unrecorded": idle["unrecorded"]}
    idle_once = {name: times.intersect(idle["one_off"]) for name, times in _once_by_name(trace, once)}
    remedies = tuple(name for name, shows in IN_USE.items() if any(map(shows.match, _all_names(trace))))
    functions = LoopFunctions.of(trace, work) if len(trace.functions) else None

    def facts(start_ns: int, end_ns: int) -> CpuFacts:
        inside = clipped({**parts, "launching": idle["launching"], "own": window}, start_ns, end_ns)
        own, launching = inside.pop("own"), inside.pop("launching")
        held = max(inside["host"], inside["unrecorded"], key=lambda part: part.length_ns)
        around = functions.around(inside, own) if functions else {}
        return CpuFacts(
            functions={part: readable_function(trace.function_names[each]) for part, each in around.items()},
            function_holds=functions is not None
            and "host" in around
            and functions.holds(around["host"], inside["host"], picture.calling(inside["host"])),
            blocked_in=picture.blocked_in(inside["other"]),
            blocked_once_us=None
            if (once_ns := picture.blocked_once_ns(inside["other"])) is None
            else once_ns / 1000,
            launches_in=picture.launches_in(launching),
            computes_in=picture.computes_in(inside["host"]),
            inside=picture.holding_range(held, own),
            once_us={
                name: us
                for name, part in clipped(idle_once, start_ns, end_ns).items()
                if (us := part.length_ns / 1000)
            },
            remedies=remedies,
            has_stacks=trace.has_stacks,
        )

    by_step = {each.step or 0: facts(*span) for each, span in zip(scopes[:MAX_STEPS], spans, strict=False)}
    return facts(min(spans)[0], max(end for _, end in spans)), by_step


def _once_by_name(trace: Trace, once: OneOffWork) -> Iterator[tuple[str, Intervals]]:
    """When each call that does what is done once runs, torch.compile works, and the like."""
    for name in np.unique(once.calls.name).tolist():
        yield trace.launch_names[name], once.calls.where(once.calls.name == name).covered
    yield from once.ranges.items()


def _window(host: list[HostStep], steps: list[Step], kept: list[int]) -> tuple[int, int]:
    starts, ends = [host[i].start_ns for i in kept], [steps[i].end_ns for i in kept]
    return min(starts, default=0), max(ends, default=0)


def _refuse_empty(trace: Trace, path: Path) -> None:
    if not trace.writer.reader and (len(trace.gpu) or len(trace.ops) or trace.ranges):
        return
    reasons = [] if trace.cut is None else [f"cut off at byte {trace.cut}: what was to follow is missing"]
    if not trace.writer.reader:  # what another program writes isn't malformed for being unlike Kineto's
        reasons += [each.text for each in trace.skipped]
    if trace.writer.reader or trace.other_categories or "traceEvents" not in trace.header:
        reasons.append(kind_of_events(trace.writer, trace.header, trace.other_categories))
    else:
        reasons.append("no GPU work and no operators: nothing to analyse")
    reasons.append("left out")
    raise TraceError(f"{path}: {'; '.join(reasons)}")


def _is_chosen(number: int, steps: slice | None) -> bool:
    if steps is None:
        return True
    return (steps.start is None or number >= steps.start) and (steps.stop is None or number < steps.stop)


def _names(trace: Trace, work: Launched, choices: Sequence[Selection]) -> list[NameTimes]:
    found = op_times(trace, work, choices)
    return [
        NameTimes(tuple(kernel_times(trace, chosen.gpu)), tuple(ops), tuple(modules))
        for chosen, (ops, modules) in zip(choices, found, strict=True)
    ]


def _optimizer_steps(trace: Trace) -> int:
    """How often the optimizer was called that was called most."""
    times = np.bincount(trace.annotations.name, minlength=len(trace.annotation_names)).tolist()
    names = zip(trace.annotation_names, times, strict=True)
    return max((num for name, num in names if OPTIMIZER_STEP.match(name)), default=0)


def _within(once: OneOffWork, steps: list[HostStep], total: Measure) -> OneOffWork:
    """The one-off work in these steps; without steps, in all of the measured time."""
    whole = (steps[0].start_ns, steps[-1].end_ns) if steps else (total.start, total.end)
    mine = step_at(steps, once.calls.start) >= 0 if steps else once.calls.end > whole[0]
    calls = once.calls.where(mine & (once.calls.start < whole[1]))
    start, end = np.maximum(calls.start, whole[0]), np.minimum(calls.end, whole[1])
    calls = replace(calls, start=start, duration=end - start)
    return OneOffWork(calls, {name: times.clip(*whole) for name, times in once.ranges.items()})


def _one_off_times(trace: Trace, once: OneOffWork) -> list[NameTime]:
    """Calls by name, compiling and the capture of graphs, longest first."""
    rows = [
        NameTime(
            trace.launch_names[name], "one-off", int(mine.sum()), 0, int(once.calls.duration[mine].sum())
        )
        for name in np.unique(once.calls.name).tolist()
        for mine in [once.calls.name == name]
    ]
    for name, times in once.ranges.items():
        if num := len(times.starts):
            rows.append(NameTime(name, "one-off", num, 0, times.length_ns))
    return sorted(rows, key=lambda row: -row.host_ns)


def _unrecorded(trace: Trace, once: OneOffWork, threads: NDArray[np.int32]) -> Intervals:
    """When nothing is recorded of these threads, which launch; never where Python's stacks would be.

    Where calls have other numbers of threads than operators, all threads count.
    """
    if trace.has_stacks:
        return EMPTY
    says = np.array([not COMPILED.match(name) for name in trace.op_names], dtype=bool)[trace.ops.name]
    calls, ops = trace.launches.covered, trace.ops.where(says)
    if np.isin(trace.ops.thread, threads).any():
        calls = trace.launches.where(np.isin(trace.launches.thread, threads)).covered
        ops = ops.where(np.isin(ops.thread, threads))
    recorded = ops.covered.join(calls).join(once.covered)
    recorded = recorded.join(trace.union_of(HostKind.DATA)).join(trace.union_of(HostKind.COMM))
    return recorded.gaps(-MAX_NS, MAX_NS)


class _GpuPicture:
    """Measures windows of a trace with GPU work."""

    def __init__(self, trace: Trace, work: Launched, once: OneOffWork) -> None:
        self.trace = trace
        self.work = work
        self.devices = RankDevices.of(trace)
        calls, launching = trace.launches, np.unique(trace.launches.thread[work.launch[work.is_known]])
        is_long = (calls.duration >= LONG_LAUNCH_NS) & np.isin(calls.thread, launching)
        self.blocking = calls.where(is_long)
        own = np.unique(launching_threads(trace, work))
        own = own if len(own) else launching
        self.holding = Holding.of(trace, own)
        self.computing = computing_operators(trace, own)
        self.waits = Waits(
            data=trace.union_of(HostKind.DATA),
            comm=trace.union_of(HostKind.COMM),
            runtime=trace.launches.covered,
            ops=trace.ops.covered,
            one_off=once.covered,
            blocking=self.blocking.covered.subtract(once.covered),
            allocating=self._blocking_in(ALLOCATING_CALLS),
            loading=self._blocking_in(LOADING_CALLS),
            unrecorded=_unrecorded(trace, once, own),
        )
        self.by_step = np.argsort(work.step, kind="stable")
        self.sorted_steps = work.step[self.by_step]
        self.everything = {number: self._everything(number) for number in self.devices.numbers}

    def _blocking_in(self, pattern: re.Pattern[str]) -> Intervals:
        """When a thread that launches work is for long in a call of this name."""
        chosen = [i for i, name in enumerate(self.trace.launch_names) if pattern.match(name)]
        return self.blocking.where(np.isin(self.blocking.name, chosen)).covered

    def _everything(self, device: int) -> tuple[Intervals, DeviceQueue]:
        """When the device was busy, with the work of whatever step; and all of that work."""
        gpu = self.trace.gpu
        mine = self.devices.share(np.argsort(gpu.start, kind="stable"), device)
        busy = gpu.covered if len(mine) == len(gpu) else union(gpu.start[mine], gpu.end[mine])
        begun = np.where(self.work.is_known, self.work.start, LOST)
        done = self.work.done.copy()
        if are_calls_left_out(self.trace):
            begun[:] = LOST
        elif self.work.is_known.any():
            earlier = before_capture(self.trace, self.work)
            begun[earlier] = done[earlier] = np.iinfo(np.int64).min
        return busy, DeviceQueue(gpu.start[mine], begun[mine], done[mine])

    def starved(self, first_ns: int, last_ns: int) -> Intervals:
        """When a device waited for a launch, or for launched work to start."""
        found = EMPTY
        for busy, queue in self.everything.values():
            before, during, after, _ = queue.awaited(busy.gaps(first_ns, last_ns))
            found = found.join(before.subtract(self.waits.blocked(before))).join(during).join(after)
        return found

    def idle(self, window: Intervals) -> dict[str, Intervals]:
        """When the busiest device is idle, by the cause in `Idle`."""
        busy, queue = self.everything[self.devices.numbers[0]]
        return idle_parts(window.subtract(busy), self.waits, queue)

    def blocked_in(self, other: Intervals) -> str | None:
        """The call in which the CPU is for most of the idle time that no other cause has.

        Or the calls that allocate, or load code, if they take most of it together.
        """
        found: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        for number in np.unique(self.blocking.name).tolist():
            times = self.blocking.where(self.blocking.name == number).covered.intersect(other)
            if times.length_ns:
                name = self.trace.launch_names[number]
                kind = next(
                    (each.pattern for each in (ALLOCATING_CALLS, LOADING_CALLS) if each.match(name)), name
                )
                found[kind].append((times.length_ns, name))
        for calls in found.values():
            if 2 * sum(time_ns for time_ns, _ in calls) > other.length_ns:
                return listed([name for _, name in sorted(calls, reverse=True)])
        return None

    def blocked_once_ns(self, other: Intervals) -> int | None:
        """The length of a single call in which the CPU is for most of that time."""
        calls = self.blocking.near(other)
        inside = other.inside_ns(calls.start, calls.end)
        longest = int(inside.argmax()) if len(calls) else None
        is_most = longest is not None and 2 * inside[longest] > other.length_ns
        return int(calls.duration[longest]) if is_most else None

    def launches_in(self, launching: Intervals) -> str | None:
        """The call that runs for most of the idle time in which launching calls run."""
        if not launching.length_ns:
            return None
        calls = self.trace.launches.near(launching)
        name = np.bincount(calls.name, launching.inside_ns(calls.start, calls.end), minlength=1).argmax()
        covered = calls.where(calls.name == name).covered.intersect(launching)
        is_most = 2 * covered.length_ns > launching.length_ns
        return str(self.trace.launch_names[name]) if is_most else None

    def computes_in(self, of_launches: Intervals) -> str | None:
        """The operator in which the CPU computes longest, if it does so for most of its launches' delay."""
        if 2 * self.computing.covered.intersect(of_launches).length_ns <= of_launches.length_ns:
            return None
        calls = self.computing
        times_ns = np.bincount(calls.name, of_launches.inside_ns(calls.start, calls.end))
        return self.trace.op_names[times_ns.argmax()]

    def calling(self, of_launches: Intervals) -> Intervals:
        """When the threads that launch are in calls near that time."""
        return self.holding.calls.near(of_launches).covered

    def holding_range(self, of_launches: Intervals, window: Intervals) -> str | None:
        """The operator or annotation that holds up launches for most of that time of the window."""
        return self.holding.most_of(of_launches, window.subtract(of_launches))

    def extent(self, steps: list[Step]) -> tuple[int, int]:
        """From the start of the first to the end of the last work; no step matters."""
        gpu = self.trace.gpu
        return int(gpu.start.min()), int(gpu.end.max())

    def total(self, mask: Mask, steps: list[Step], whole: bool) -> Scope:
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            return self._scope(chosen, None, None, (0, 0))
        start, duration = self.trace.gpu.start[chosen], self.trace.gpu.duration[chosen]
        return self._scope(chosen, None, None, (int(start.min()), int((start + duration).max())))

    def step(self, step: Step, position: int) -> Scope:
        first, last = np.searchsorted(self.sorted_steps, (position, position + 1))
        return self._scope(self.by_step[first:last], step.number, position, (step.start_ns, step.end_ns))

    def _scope(
        self, chosen: Int64, number: int | None, position: int | None, window: tuple[int, int]
    ) -> Scope:
        devices = self.devices
        each = [
            self._scope_of(device, devices.share(chosen, device), number, position, window)
            for device in devices.numbers
        ]
        if len(each) == 1:
            return each[0]
        return replace(each[0], devices=tuple(zip(devices.names, each, strict=True)))

    def _scope_of(
        self, device: int, chosen: Int64, number: int | None, position: int | None, window: tuple[int, int]
    ) -> Scope:
        gpu = self.trace.gpu
        work = Timed(gpu.start[chosen], gpu.duration[chosen])
        return Scope(
            step=number,
            position=position,
            measure=self._measure(device, work, chosen, *window),
            num_kernels=int((gpu.kind[chosen] <= GpuKind.COMM).sum()),
            launch_delay=self._launch_delay(chosen),
            gpu_span=int(work.end.max() - work.start.min()) if len(work) else None,
        )

    def _measure(self, device: int, work: Timed, chosen: Int64, start_ns: int, end_ns: int) -> Measure:
        """Measures a window and its work in stretches, which cut neither work nor a gap."""
        busy, queue = self.everything[device]
        parts: list[Measure] = []
        for stretch in stretches(work):
            first_ns, last_ns = max(stretch.begin_ns, start_ns), min(stretch.end_ns, end_ns)
            if first_ns < last_ns or not parts:
                mine = stretch.holds(work.start)
                start, kind = work.start[mine], self.trace.gpu.kind[chosen[mine]]
                activity = gpu_activity(start, start + work.duration[mine], kind, busy)
                parts.append(measure(activity, first_ns, last_ns, self.waits, queue))
        return joined(parts)

    def _launch_delay(self, chosen: Int64) -> LaunchDelayNs | None:
        known = chosen[self.work.launch[chosen] >= 0]
        if not len(known):
            return None
        delays = self.trace.gpu.start[known] - self.work.done[known]
        return LaunchDelayNs(int(np.median(delays)), int(delays.max()))


class _CpuPicture:
    """Measures windows of a trace without GPU work.

    Compute is the time covered by operators on threads that don't run collectives, except while they are in
    calls for a device or for collectives, and while the loop waits for its batch: the DataLoader's operators
    are input.
    """

    def __init__(self, trace: Trace, once: OneOffWork) -> None:
        data, comm = trace.union_of(HostKind.DATA), trace.union_of(HostKind.COMM)
        self.activity = DeviceActivity(cpu_compute(trace), comm, EMPTY)
        calls = issuing_calls(trace).covered
        self.waits = Waits(data, comm=EMPTY, runtime=EMPTY, ops=calls, one_off=once.covered)

    def starved(self, first_ns: int, last_ns: int) -> Intervals:
        """Nothing: the host is what works."""
        return EMPTY

    def idle(self, window: Intervals) -> dict[str, Intervals]:
        """When nothing computes or communicates, by the cause in `Idle`."""
        return idle_parts(window.subtract(self.activity.busy), self.waits, None)

    def blocked_in(self, other: Intervals) -> None:
        """None: no device waits."""

    def blocked_once_ns(self, other: Intervals) -> None:
        """None, for the same reason."""

    def launches_in(self, launching: Intervals) -> None:
        """None, for the same reason."""

    def calling(self, of_launches: Intervals) -> Intervals:
        """All of it: a CPU launches nothing for which it could be held up."""
        return of_launches

    def holding_range(self, of_launches: Intervals, window: Intervals) -> None:
        """On a CPU, what is recorded is the work."""

    def computes_in(self, of_launches: Intervals) -> None:
        """None, for the same reason."""

    def extent(self, steps: list[Step]) -> tuple[int, int]:
        """From the start of the first to the end of the last of these steps and of what is recorded."""
        return _bounds(steps, self.activity.busy)

    def total(self, mask: Mask, steps: list[Step], whole: bool) -> Scope:
        return self._scope(None, None, _bounds(steps, self.activity.busy if whole else EMPTY))

    def step(self, step: Step, position: int) -> Scope:
        return self._scope(step.number, position, (step.start_ns, step.end_ns))

    def _scope(self, number: int | None, position: int | None, window: tuple[int, int]) -> Scope:
        divided = measure(self.activity, *window, self.waits, None)
        return Scope(number, position, divided, 0, None, None)


def _bounds(steps: list[Step], busy: Intervals) -> tuple[int, int]:
    """The first start and the last end."""
    starts = [*(step.start_ns for step in steps), *busy.starts[:1].tolist()]
    ends = [*(step.end_ns for step in steps), *busy.ends[-1:].tolist()]
    return min(starts, default=0), max(ends, default=0)


MAX_CALLS = 20_000
"""Launches, or collectives on the CPU, in what is replayed: more would take longer than reading them."""
MAX_WORK = 50_000
"""Pieces of the GPU's work in the whole file."""
MOST_LOST = 0.01
"""Share of the GPU's work without a launch up to which a replay has what matters."""


def _unreplayed(trace: Trace, work: Launched, steps: list[HostStep]) -> str:
    """Whether the file ends early, launches are lost, or the tasks of the steps are too many."""
    first, last = task_window(trace, steps)
    num_calls = int(((trace.launches.start >= first) & (trace.launches.start < last)).sum())
    lost = ~work.is_known & ~before_capture(trace, work)
    is_long = max(num_calls, len(trace.ranges)) > MAX_CALLS or len(trace.gpu) > MAX_WORK
    is_lost = lost.sum() > MOST_LOST * len(lost) or are_calls_left_out(trace)
    damage = "cut" if trace.cut is not None else "damaged" if _lost_events(trace) else ""
    return damage or ("launches" if is_lost else "long" if is_long else "")


def _lost_events(trace: Trace) -> int:
    """The damaged events that may have been work, if they are too many to say what the time went into."""
    num_work = len(trace.gpu) or len(trace.ops)
    lost = trace.lost_gpu_events if len(trace.gpu) else trace.lost_operators
    return lost if lost > MOST_LOST * (num_work + lost) else 0


def _process(trace: Trace) -> str | None:
    """The process whose threads run operators and launch work; `None` if there are several, or none."""
    threads = np.unique(np.concatenate((trace.ops.thread, trace.launches.thread)))
    found = {trace.threads[thread][0] for thread in threads.tolist()}
    return found.pop() if len(found) == 1 else None


def _info(trace: Trace, key: str) -> int | None:
    info = trace.header.get("distributedInfo")
    value = info.get(key) if isinstance(info, dict) else None
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < MAX_RANKS else None


def _facts(trace: Trace) -> RankFacts | None:
    """The facts on the rank in the header; `None` in traces of others, or where they are damaged."""
    try:
        found = msgspec.convert(trace.header[RANK_KEY], RankFacts)
    except (KeyError, msgspec.ValidationError):
        return None
    are_times = all(0 <= time_ns < MAX_NS for time_ns in (found.thread_cpu_ns, found.queue_ns))
    return found if 0 <= found.samples < MAX_SAMPLES and are_times else None


def _device(trace: Trace, picture: _GpuPicture | _CpuPicture) -> str:
    """The name of the device that most of the work ran on; the trace may list others too."""
    if isinstance(picture, _CpuPicture):
        others = devices_not_read(trace.writer, trace.other_categories)
        if trace.cut is not None:
            return "CPU (cut off)"
        if others:
            return f"CPU ({', '.join(others)} not read)"
        return "CPU (GPU not recorded)" if _gives_work(trace) else "CPU"
    listed, busiest = trace.header.get("deviceProperties"), picture.devices.names[0]
    devices = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    named = [each for each in devices if isinstance(each.get("name"), str) and each["name"]]
    ids = (busiest, int(busiest)) if _DIGITS.fullmatch(busiest) else (busiest,)
    own = [each for each in named if each.get("id") in ids]
    return str((own or named)[0]["name"]) if named else "GPU"


def _gives_work(trace: Trace) -> bool:
    """Whether the CPU gives work to a device: a profiler only looks for devices, and waits for them."""
    return any(map(WORKING_CALLS.search, trace.launch_names)) or any(map(NEEDS_GPU.match, trace.op_names))


def _notes(trace: Trace, steps: list[HostStep], work: Launched, no_step: int | None) -> Iterator[Finding]:
    yield recorded_note(steps)
    if trace.cut is not None:
        yield noticed("cut-off", cut_byte=trace.cut)
    yield from trace.skipped
    yield from notes_on_events(trace.writer, trace.other_categories)
    yield from step_notes(steps)
    has_others = devices_not_read(trace.writer, trace.other_categories)
    if _gives_work(trace) and not len(trace.gpu) and not has_others:
        yield noticed("cpu-alone")
    if len(trace.gpu):
        yield from RankDevices.of(trace).notes()
        yield from launch_notes(trace, work) if steps else ()
        if no_step is not None:
            number = steps[no_step].number
            yield noticed("idle-last-step", last_step=number, end_step=number + 1)
        yield from replay_notes(work)
        if are_calls_left_out(trace):
            yield noticed("calls-left-out", num_calls=len(trace.launches))
