"""The records of a run directory about one variant, read once: steps, rounds, throughput, and other load.

Threads of one run wait for each other too: two ranks with two threads each on two cores wait 6 to 16 % of a
step on a quiet machine. That is part of what is measured. Other load is the CPU time that the rank's cores
spent on anything but the run's own processes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from gpurun.launcher.findings.finding import Finding, noticed, reason
from gpurun.launcher.findings.run_cases import STOPPED
from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import CPU, recorded_names, total_peak_flop_per_s
from gpurun.launcher.plan.model import Launch, Plan, Process, Variant
from gpurun.launcher.rundir.files import RunDir, VariantSteps
from gpurun.launcher.rundir.records import (
    MEASURED,
    Balance,
    Event,
    GpuLoad,
    Kind,
    MemoryPeak,
    PointRecord,
    RoundTime,
    StepRecord,
    VariantFacts,
    VariantStatus,
    elapsed_s,
)
from gpurun.launcher.stats.core_waiting import (
    MOST_PERCENT,
    RoundKey,
    Sharing,
    Waiting,
    WaitingOfRanks,
    mean_of,
    waiting_of_ranks,
)
from gpurun.launcher.stats.estimates import trend
from gpurun.launcher.stats.schedule import MAX_KEPT_STEPS, USUALLY_ENOUGH, WINDOW_STEPS
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import GIB, scaled

LEAST_AROUND = 0.1
"""The share of a program's time outside of its steps from which the report says where it went."""
LEAST_OTHER_WORK = 0.1
"""The share by which the numbers of steps must differ: of a program, a batch that isn't whole may be one."""
LEAST_STEPS = 4
"""Half of fewer steps says nothing."""
LEAST_TIMED = 6
"""So many values give an interval of their median."""
LEAST_TREND = 0.1
"""Share by which steps must grow or shrink during a launch to be worth a warning."""
MOST_FOR_TREND = 200
"""Values that are looked at for a trend: their pairs are counted."""


def _last_half(
    steps: Mapping[int, Sequence[StepRecord]],
) -> tuple[Mapping[int, Sequence[StepRecord]], str | None]:
    """Takes the last half of a launch as timed steps, if the program ended in its warm-up or soon after.

    Most of the warm-up is over by then, but without timed steps nothing shows that all of it is. Also returns
    what to say of it; `None` of a program that had enough timed steps on all ranks in every launch.
    """
    nums = steps_of_launches(steps)
    timed_of = [
        Counter(step.launch for step in of_rank if step.kind == "timed") for of_rank in steps.values()
    ]
    fewest = {launch: min(of_rank[launch] for of_rank in timed_of) for launch in nums}
    enough = {planned_launch(launch) for launch, num in fewest.items() if num >= LEAST_TIMED}
    short = {launch: num for launch, num in nums.items() if planned_launch(launch) not in enough}
    halves = {launch: range(num // 2, num) for launch, num in short.items() if num >= LEAST_STEPS}
    found = {rank: [_timed_from(step, halves) for step in of_rank] for rank, of_rank in steps.items()}
    of_short = [[step for step in of_rank if step.launch in halves] for of_rank in found.values()]
    timed = [{step.step for step in of_rank if step.kind == "timed"} for of_rank in of_short]
    shown = set.intersection(*timed) if timed else set()
    if not shown:
        return steps, None
    num = max(step.step + 1 for of_rank in of_short for step in of_rank)
    said = reason(
        "short",
        num_short=len(short) if enough else None,
        num_launches=len(short) + len(enough),
        num_steps=num,
        num_shown=len(shown),
        enough=USUALLY_ENOUGH if num < USUALLY_ENOUGH else None,
    )
    return found, said


def whole_rounds(steps: Iterable[StepRecord]) -> set[tuple[str, int]]:
    """Launch and number of the rounds of which all steps were timed; one may be recorded with their mean."""
    nums: Counter[tuple[str, int]] = Counter()
    for step in steps:
        if step.kind == "timed":
            nums[step.launch, step.round] += WINDOW_STEPS if step.block_ns is not None else 1
    return {key for key, num in nums.items() if num >= WINDOW_STEPS}


def _sample_of_steps(steps: Mapping[int, Sequence[StepRecord]]) -> tuple[str, ...]:
    """The warning for a variant of which only a sample of steps was kept; nothing where all were."""
    of_rank = next(iter(steps.values()), ())
    total = sum({step.launch: step.step + 1 for step in of_rank}.values())
    if not _may_be_sample(of_rank) or len(of_rank) >= total:
        return ()
    return (reason("sample", num_kept=len(of_rank), num_steps=total),)


def _uneven_ranks(steps: Mapping[int, Sequence[StepRecord]]) -> tuple[str, ...]:
    """The warning for a program of which one rank made a tenth more steps than another in a launch."""
    made: dict[str, dict[int, int]] = {}
    for rank, of_rank in steps.items():
        for step in of_rank:
            made.setdefault(step.launch, {})[rank] = step.step + 1
    whole = [nums for nums in made.values() if len(nums) == len(steps)]
    nums = max(whole, key=lambda nums: max(nums.values()) - min(nums.values()), default={})
    if not nums or max(nums.values()) < (1 + LEAST_OTHER_WORK) * min(nums.values()):
        return ()
    most, fewest = max(nums, key=nums.__getitem__), min(nums, key=nums.__getitem__)
    said = reason("uneven-ranks", rank=most, num_steps=nums[most], other=fewest, other_steps=nums[fewest])
    return (said,)


def trend_of_steps(steps: Mapping[int, Sequence[StepRecord]]) -> tuple[Finding, ...]:
    """The finding about a program whose steps grow or shrink by a tenth or more in most of its launches.

    Short windows of the warm-up can't show that. The first steps don't count, nor those that were skipped.
    """
    launches: dict[str, list[float]] = {}
    for step in next(iter(steps.values()), ()):
        if step.step >= WINDOW_STEPS and step.kind in ("warmup", "timed"):
            launches.setdefault(step.launch, []).append((step.block_ns or step.step_ns) / 1e6)
    found = [trend(_thinned(steps_ms)) for steps_ms in launches.values()]
    large = [ends for ends in found if ends and abs(ends[1] - ends[0]) >= LEAST_TREND * min(ends)]
    for case, sign in (("steps-grow", 1), ("steps-shrink", -1)):
        alike = [ends for ends in large if sign * (ends[1] - ends[0]) > 0]
        if 2 * len(alike) > len(found):
            first_ms, last_ms = alike[-1]
            return (noticed(case, first_ms=first_ms, last_ms=last_ms),)
    return ()


def _thinned(values: Sequence[float]) -> list[float]:
    """Means of neighbours, at most `MOST_FOR_TREND`."""
    size = -(-len(values) // MOST_FOR_TREND)
    return [fmean(values[i : i + size]) for i in range(0, len(values), size)]


def step_numbers(steps: Sequence[StepRecord]) -> Sequence[int]:
    """Positions of one rank's timed steps on an axis; in a sample the number of steps before each."""
    if not _may_be_sample(steps):
        return range(len(steps))
    numbers, before = [], 0
    for last, step in zip([*steps[:1], *steps], steps, strict=False):
        before += last.step + 1 if last.launch != step.launch else 0
        numbers.append(before + step.step)
    return numbers


def _may_be_sample(steps: Sequence[StepRecord]) -> bool:
    return any(step.step >= MAX_KEPT_STEPS or step.block_ns is not None for step in steps)


def steps_of_launches(steps: Mapping[int, Sequence[StepRecord]]) -> dict[str, int]:
    """How many steps all ranks have of each launch."""
    found: dict[str, int] = {}
    for of_rank in steps.values():
        for launch, num in {step.launch: step.step + 1 for step in of_rank}.items():
            found[launch] = min(num, found.get(launch, num))
    return found


@dataclass(frozen=True)
class Around:
    """The parts of the time of a program's attempt, in seconds."""

    before: float
    """The time from the start of the program on rank 0 to its first step."""
    steps: float
    """The time from the first step to the end of the last one, with all that is between steps."""
    after: float
    """The time from the end of the last step to the end of the last rank."""
    num_steps: int

    @property
    def total(self) -> float:
        """The time that the program ran."""
        return self.before + self.steps + self.after

    @property
    def outside(self) -> float:
        """The time before and after its steps."""
        return self.before + self.after


def _around_steps(events: Sequence[Event]) -> Around | None:
    """The parts of an attempt that ended, by rank 0's clock; `None` without steps, and in older runs."""
    last = next((event for event in reversed(events) if event.steps_ns is not None), None)
    if last is None or last.steps_ns is None:
        return None
    marks = (events[0].monotonic_ns, *last.steps_ns, events[-1].monotonic_ns)
    before, steps, after = ((end - start) / 1e9 for start, end in pairwise(marks))
    return Around(before, steps, after, last.round) if min(before, steps, after) >= 0 else None


def median_attempt(attempts: Sequence[Around]) -> Around | None:
    """The attempt of median length, whose parts add up."""
    ordered = sorted(attempts, key=lambda each: each.total)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _timed_from(step: StepRecord, halves: Mapping[str, range]) -> StepRecord:
    """The step; timed in the second half of its launch, else warm-up, also where its rank got steady earlier.

    So rounds have the same steps on all ranks. Traced and skipped steps stay what they are.
    """
    if step.kind not in ("warmup", "timed") or step.launch not in halves:
        return step
    if step.step not in halves[step.launch]:
        return msgspec.structs.replace(step, kind="warmup", round=0)
    return msgspec.structs.replace(step, kind="timed", round=step.step // WINDOW_STEPS + 1)


def planned_launch(launch: str) -> str:
    """The planned launch that `launch` is an attempt at: `03-ddp-2~2` is the second at `03-ddp-2`."""
    return launch.partition("~")[0]


def round_times(
    steps_by_rank: Mapping[int, Sequence[StepRecord]], world_size: int, kind: Kind
) -> tuple[RoundTime, ...]:
    """The time of every complete round, in the order in which rank 0 ran them.

    A round counts only if all ranks have all its lines, that is the same number of steps: a crash may cut off
    some ranks earlier than others.
    """
    blocks = [round_blocks_ns(steps_by_rank.get(rank, ()), kind) for rank in range(world_size)]
    return tuple(RoundTime(*key, max(fmean(block[key]) for block in blocks)) for key in _common(blocks))


def program_times(
    steps_by_rank: Mapping[int, Sequence[StepRecord]], world_size: int
) -> tuple[RoundTime, ...]:
    """The time of every complete round of a program, on the rank that is slowest in the whole launch.

    No barrier begins the rounds of a program. A rank that is late makes its own step longer, and the next one
    of those that wait for it: with another slowest rank in each round, the same time would count twice.
    """
    blocks = [round_blocks_ns(steps_by_rank.get(rank, ()), "timed") for rank in range(world_size)]
    common, whole = _common(blocks), whole_rounds(steps_by_rank.get(0, ()))
    times: dict[str, list[list[RoundTime]]] = {}
    for key in common:
        num_steps = WINDOW_STEPS if key in whole else len(blocks[0][key])
        of_ranks = [RoundTime(*key, fmean(block[key]), num_steps) for block in blocks]
        times.setdefault(key[0], []).append(of_ranks)
    return tuple(time for rounds in times.values() for time in max(zip(*rounds, strict=True), key=total_ns))


def total_ns(times: Iterable[RoundTime]) -> float:
    """How long all steps of the rounds took."""
    return math.fsum(time.step_ns * time.num_steps for time in times)


def _common(blocks: Sequence[Mapping[RoundKey, Sequence[float]]]) -> list[RoundKey]:
    """The rounds of which all ranks have equally many steps."""
    return [key for key in blocks[0] if len({len(block.get(key, ())) for block in blocks}) == 1]


def round_blocks_ns(steps: Iterable[StepRecord], kind: Kind) -> dict[RoundKey, list[float]]:
    """One rank's step times by round, in the order in which they were written; or the means of blocks."""
    blocks: dict[RoundKey, list[float]] = {}
    for step in steps:
        if step.kind == kind and step.round > 0:
            time_ns = step.step_ns if step.block_ns is None else step.block_ns
            blocks.setdefault((step.launch, step.round), []).append(time_ns)
    return blocks


def launch_logs(
    rounds: Iterable[RoundTime], repetitions: Mapping[str, int]
) -> dict[int, dict[RoundKey, float]]:
    """ln(step time in ns) of the rounds of each launch, by repetition in rising order.

    Args:
        rounds: of one variant; the attempts at one launch count as one.
        repetitions: repetition by id of the planned launch; rounds of other launches are left out.
    """
    return {
        repetition: {(time.launch, time.round): math.log(time.step_ns) for time in times}
        for repetition, times in _by_repetition(rounds, repetitions).items()
    }


def _mean_logs(rounds: Iterable[RoundTime], repetitions: Mapping[str, int]) -> dict[int, float]:
    """ln(mean step in ns) of the same launches: all timed steps count alike, rare long ones too."""
    return {
        repetition: math.log(total_ns(times) / sum(time.num_steps for time in times))
        for repetition, times in _by_repetition(rounds, repetitions).items()
    }


def _by_repetition(rounds: Iterable[RoundTime], repetitions: Mapping[str, int]) -> dict[int, list[RoundTime]]:
    known = (time for time in rounds if planned_launch(time.launch) in repetitions)
    return dict(sorted(grouped(known, lambda time: repetitions[planned_launch(time.launch)]).items()))


def sharing(processes: Sequence[Process]) -> Sharing:
    """Ranks of one node share its cores unless they are bound to different ones."""

    def share(process: Process, other: Process) -> bool:
        is_apart = process.cpus and other.cpus and not {*process.cpus} & {*other.cpus}
        return process.node == other.node and not is_apart

    return {
        process.rank: frozenset(
            other.rank for other in processes if other is not process and share(process, other)
        )
        for process in processes
    }


def other_cores(waited: Mapping[RoundKey, Waiting]) -> float | None:
    """The number of cores that other load kept busy: the mean over a rank's blocks; `None`: not known."""
    load = mean_of(block.load for block in waited.values())
    return None if load is None else max(0.0, load)


def queue_percent(waited: Mapping[RoundKey, Waiting]) -> float | None:
    """A rank's waiting for other load in percent of its step; `None` where it wasn't counted.

    The median over its blocks: neither the coarse clock of the other processes nor a short burst moves it.
    """
    return max(0.0, median(100 * block.most for block in waited.values())) if waited else None


Bound = Literal["least", "most"]
BOUNDS: tuple[Bound, ...] = ("least", "most")


def shares_of_rounds(
    waited: WaitingOfRanks, rounds: Iterable[RoundKey], bound: Bound
) -> dict[RoundKey, float] | None:
    """The share of each round's steps that other load took; `None` where a rank's isn't known.

    Ranks wait at the same time or one after the other: together at least as long as the rank that waits
    longest, at most the sum, and never so long that no time is left for what a thread has computed.
    """
    keys = tuple(rounds)
    if not waited or not all(key in its for key in keys for its in waited.values()):
        return None
    return {key: _together([its[key] for its in waited.values()], bound) for key in keys}


def _together(ranks: Sequence[Waiting], bound: Bound) -> float:
    if bound == "least":
        share = max(rank.least for rank in ranks)
    else:
        left = 1 - max(rank.worked for rank in ranks)
        share = max(max(rank.most for rank in ranks), min(left, math.fsum(rank.most for rank in ranks)))
    return min(max(share, 0.0), MOST_PERCENT / 100)


Logs = Mapping[int, Mapping[RoundKey, float]]


@dataclass(frozen=True)
class MeasuredVariant:
    """A planned variant with everything that was measured of it so far.

    It holds the records of the variant's files, which a `VariantResult` sums up in figures.
    """

    variant: Variant
    group: str
    """Launches of one group repeat the same processes; rounds are paired only within a group."""
    status: VariantStatus
    finished: bool
    """Whether the command has closed this variant."""
    facts: VariantFacts
    steps: Mapping[int, Sequence[StepRecord]]
    timed: tuple[RoundTime, ...]
    logs: Logs
    """ln(step time in ns) of its rounds, by repetition."""
    means: Mapping[int, float] = field(default_factory=dict)
    """ln(mean step in ns) of a program's launches, by repetition; empty for others."""
    aa_logs: Logs = field(default_factory=dict)
    """As `logs`, of the baseline's second blocks; empty for the others."""
    trends: tuple[Finding, ...] = ()
    """Findings about a program's steps that grow or shrink, which other load may explain."""
    memory: Mapping[int, MemoryPeak] = field(default_factory=dict)
    """Memory by rank."""
    balance: Balance | None = None
    """How its samples were found, where the split is `balanced`."""
    points: Sequence[PointRecord] = ()
    """The points of a micro-benchmark, which has no steps."""
    ended_s: Mapping[str, float] = field(default_factory=dict)
    """How long each attempt of a program took that ended well."""
    around_s: Sequence[Around] = ()
    """The parts of that time, of those that had steps."""
    num_planned: int = 0
    """The launches of the plan that count."""
    first_launch: str = ""
    """The first launch of a run of programs: its ranks import what later ones find in memory."""
    sharing: Sharing = field(default_factory=dict)
    """The other ranks on the cores of each rank."""

    @cached_property
    def waiting(self) -> WaitingOfRanks:
        """Each rank's waiting for other load in the rounds that count, as shares of its step."""
        return waiting_of_ranks({rank: timed_steps(self, rank) for rank in self.steps}, self.sharing)

    @property
    def has_only_first(self) -> bool:
        """Whether its program ran in the first launch of the run alone, which takes more time and memory."""
        return {planned_launch(launch) for launch in self.ended_s} == {self.first_launch}

    def later(self, launches: Iterable[str]) -> set[str]:
        """The launches without the first of the run, unless that is all."""
        found = set(launches)
        return {name for name in found if planned_launch(name) != self.first_launch} or found

    @property
    def counts(self) -> bool:
        """Whether its times may be compared: it ran without failing, and has some."""
        return self.status.status in MEASURED and bool(self.timed)


def _stopped_attempt(run: RunDir, steps: Mapping[int, Sequence[StepRecord]]) -> str | None:
    """The last attempt that has steps, if a signal to the command has stopped it."""
    last = {of_rank[-1].launch for of_rank in steps.values() if of_rank}
    stopped = (killed.launch for killed in run.read_killed() if killed.cause)
    return next((launch for launch in stopped if launch in last), None)


def _facts(run: RunDir, variant_id: str, stopped: str | None) -> VariantFacts:
    """What is recorded of a variant; of a stopped one what its last attempt has recorded."""
    facts = run.read_any(run.facts(variant_id), VariantFacts)
    if facts is None and stopped is not None:
        facts = run.read_launch_facts(stopped).get(variant_id)
    return facts or VariantFacts()


def read_measured(
    run: RunDir, plan: Plan, variant: Variant, read: VariantSteps, events: Mapping[str, Sequence[Event]]
) -> MeasuredVariant:
    """Reads the files of `variant`; what is not there yet is empty.

    Args:
        events: of every attempt.
        read: its steps, of those of the run that are in memory.
    """
    launches = tuple(launch for launch in plan.launches if variant.id in launch.variants)
    world_size = variant.world_size
    status = run.read_status(variant.id)
    steps: Mapping[int, Sequence[StepRecord]]
    steps = {rank: read.by_rank[rank] for rank in range(world_size) if rank in read.by_rank}
    timed = round_times(steps, world_size, "timed")
    unsteady: str | None = None
    short: tuple[str, ...] = ()
    stopped = _stopped_attempt(run, steps) if status is None else None
    is_over = status is not None or stopped is not None
    if variant.kind.runs_program and is_over:
        was_timed, (steps, text) = bool(timed), _last_half(steps)
        short, unsteady = ((text,) if text else (), None) if was_timed or stopped else ((), text)
    if variant.kind.runs_program:
        timed = program_times(steps, world_size)
    facts = _facts(run, variant.id, stopped)
    of_steps: tuple[str, ...] = ()
    trends: tuple[Finding, ...] = ()
    if status is None or status.status in MEASURED:  # else the failure is what there is to say
        trends = trend_of_steps(steps) if variant.kind.runs_program and not (short or unsteady) else ()
        uneven = _uneven_ranks(steps) if variant.kind.runs_program and is_over else ()
        of_steps = (*_sample_of_steps(steps), *short, *uneven)
    facts = replace(facts, warnings=(*facts.warnings, *read.damage, *of_steps))
    balance = None if variant.split else run.read_balance(variant.id)
    status = _judged(status, unsteady, () if timed else read.damage)
    points = list(run.read_lines(run.points(variant.id), PointRecord))
    ended = _ended(run, variant, events) if variant.kind.runs_program else {}
    counting, timed = launches_that_count(launches, timed)
    repetitions = {launch.id: launch.repetition for launch in counting}
    return MeasuredVariant(
        variant=replace(variant, split=balance.best.split) if balance else variant,
        group=counting[0].group if counting else "",
        status=_effective_status(status, facts, bool(timed or points), stopped_reason(run, launches)),
        finished=status is not None,
        facts=facts,
        steps=steps,
        trends=trends,
        timed=timed,
        logs=launch_logs(timed, repetitions),
        means=_mean_logs(timed, repetitions) if variant.kind.runs_program else {},
        aa_logs=launch_logs(round_times(steps, world_size, "aa"), repetitions),
        memory=run.read_memory(variant.id),
        balance=balance,
        points=points,
        ended_s={name: elapsed_s(events) for name, events in ended.items()},
        num_planned=len(counting),
        sharing=sharing(counting[0].processes) if counting else {},
        first_launch=plan.launches[0].id if variant.kind.runs_program else "",
        around_s=[found for events in ended.values() if (found := _around_steps(events))],
    )


def _judged(
    status: VariantStatus | None, unsteady: str | None, damage: Sequence[str]
) -> VariantStatus | None:
    """The status that was written, unless steps that are short of settling, or damaged, say another one."""
    if status is None or status.status != "ok":
        return status
    if unsteady:
        return VariantStatus("unsteady", unsteady)
    return VariantStatus("failed", damage[0]) if damage else status


def launches_that_count(
    launches: Sequence[Launch], timed: Sequence[RoundTime]
) -> tuple[Sequence[Launch], tuple[RoundTime, ...]]:
    """The launches that show how a variant differs from others, and its rounds in them.

    Where strategies take turns in later launches, these alone, as soon as there is one: the first launches,
    of each strategy alone, scatter more against each other.
    """
    later = {launch.id for launch in launches if launch.group == launches[-1].group}
    rounds = tuple(time for time in timed if planned_launch(time.launch) in later)
    if not rounds:
        return launches, tuple(timed)
    return [launch for launch in launches if launch.id in later], rounds


def _ended(run: RunDir, variant: Variant, logs: Mapping[str, Sequence[Event]]) -> dict[str, list[Event]]:
    """Events of a program from when rank 0 runs it, by attempt: of those that came to their end and count."""
    replaced = run.read_replaced()
    begun = {
        name: [event for event in events if event.stage != "start"]
        for name, events in logs.items()
        if name not in replaced
    }
    return {
        name: events
        for name, events in begun.items()
        if events and events[0].variant == variant.id and events[-1].stage == "done"
    }


def stopped_reason(run: RunDir, launches: Sequence[Launch]) -> str | None:
    """How the newest of these launches that a signal to the command has stopped has ended."""
    own = {launch.id for launch in launches}
    stopped = [each for each in run.read_killed() if each.cause and planned_launch(each.launch) in own]
    if not stopped:
        return None
    last = stopped[-1]
    return reason(STOPPED, cause=last.cause, launch=last.launch, ended=last.ended or None)


def _effective_status(
    status: VariantStatus | None, facts: VariantFacts, has_rounds: bool, stopped: str | None
) -> VariantStatus:
    """The status that the command wrote; before it did, what the rounds so far allow to say."""
    if status is None and not has_rounds:
        return VariantStatus("skipped", stopped or reason("not-yet"))
    if status is None or status.status == "ok":
        untimed = None if has_rounds else facts.untimed
        return VariantStatus("unsteady", facts.unsteady) if facts.unsteady else VariantStatus("ok", untimed)
    return status


def median_ms(times_ns: Iterable[int | None]) -> float | None:
    """The median of those that were counted; `None` where none was."""
    known = [time_ns for time_ns in times_ns if time_ns is not None]
    return median(known) / 1e6 if known else None


def throttled(timed: Sequence[StepRecord | GpuLoad]) -> str | None:
    """The reason that was found in most of a rank's steps, or of a GPU's blocks, if there is one."""
    reasons = Counter(each.throttled for each in timed)
    return reasons.most_common(1)[0][0] if reasons else None


def timed_steps(measured: MeasuredVariant, rank: int) -> list[StepRecord]:
    """The rank's steps that count: those of rounds that all ranks have."""
    rounds = {(time.launch, time.round) for time in measured.timed}
    steps = measured.steps.get(rank, ())
    return [step for step in steps if step.kind == "timed" and (step.launch, step.round) in rounds]


def typical_ms(measured: MeasuredVariant) -> dict[int, float]:
    """Each rank's mean step in a round, the median over rounds, less its share of waiting for other load.

    A GPU may work while its rank waits for a core: its steps count as they are.
    """
    found, is_host = {}, measured.variant.devices[0].startswith(CPU.name)
    for rank in measured.steps:
        timed = timed_steps(measured, rank)
        means_ns = [fmean(block) for block in round_blocks_ns(timed, "timed").values()]
        if means_ns:
            waited = (queue_percent(measured.waiting.get(rank, {})) or 0.0) if is_host else 0.0
            found[rank] = median(means_ns) / 1e6 * (1 - waited / 100)
    return found


def has_cold_peak(measured: Mapping[str, MeasuredVariant]) -> bool:
    """Whether the peak of a program's process is known from the run's first launch alone."""
    return any(
        record.has_only_first and record.variant.devices[0].startswith(CPU.name)
        for record in measured.values()
    )


def slowest_steps(measured: MeasuredVariant) -> list[StepRecord]:
    """Timed steps of the rank that takes longest for all of them, of each launch."""
    lanes: dict[str, list[list[StepRecord]]] = {}
    for rank in measured.steps:
        for launch, steps in groupby(timed_steps(measured, rank), key=lambda step: step.launch):
            lanes.setdefault(launch, []).append(list(steps))
    return [step for ranks in lanes.values() for step in max(ranks, key=_length_ns)]


def _length_ns(steps: Iterable[StepRecord]) -> float:
    return math.fsum(step.block_ns or step.step_ns for step in steps)


def gpu_loads(measured: MeasuredVariant, position: int, of_every_launch: bool = False) -> list[GpuLoad]:
    """The load of the GPU at a position of the split in each timed block; nothing for a CPU device.

    Args:
        of_every_launch: also of launches that don't count.
    """
    variant = measured.variant
    strategy, devices = STRATEGIES[variant.strategy], variant.devices
    rank = 0 if strategy.has_replicas else position
    own = dict.fromkeys(devices[index] for index in strategy.positions_of(rank, len(devices)))
    index = list(own).index(devices[position])
    steps = measured.steps.get(rank, ()) if of_every_launch else timed_steps(measured, rank)
    return [step.gpus[index] for step in steps if step.kind == "timed" and len(step.gpus) > index]


def is_throttled(measured: MeasuredVariant) -> bool:
    """Whether the clock of one of its GPUs was low for most of its time."""
    return any(
        throttled(gpu_loads(measured, position) or timed_steps(measured, position)) is not None
        for position in range(len(measured.variant.devices))
    )


def allocated_gib(measured: MeasuredVariant, rank: int) -> float | None:
    """The peak in timed steps: of a GPU's allocated memory, or of a program's resident set.

    A workload's resident set is left out: next to live tensors of other variants it would mislead.
    """
    on_host = timed_steps(measured, rank) if measured.variant.kind.runs_program else ()
    launches = measured.later(step.launch for step in on_host)
    on_host = [step for step in on_host if step.launch in launches]
    records = gpu_loads(measured, rank, of_every_launch=True) or on_host
    peaks = [record.peak_bytes for record in records if record.peak_bytes is not None]
    return max(peaks) / GIB if peaks else None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one variant, over all its devices; what isn't known is `None`.

    These are fields of `VariantResult`, so a new one is in JSON at once.
    """

    samples_per_s: float | None = None
    flop_per_s: float | None = None
    """Forward and backward; the optimizer's are not counted."""
    mfu: float | None = None
    """Model FLOP utilisation: `flop_per_s` as a share of the devices' peak in this precision."""
    input_bytes_per_s: float | None = None
    """Inputs and targets."""
    joules_per_sample: float | None = None
    """The energy of the GPUs, by their driver's counter; not of the rest of the machine."""


def throughput(
    measured: MeasuredVariant,
    step_ms: float | None,
    host: Mapping[str, Any],
    peaks: Mapping[str, float] = MappingProxyType({}),
) -> Rates:
    """The rates of a variant whose step takes `step_ms`.

    Args:
        host: has the names of the GPUs.
        peaks: TFLOP/s of a device by precision, that the job states.
    """
    variant, facts = measured.variant, measured.facts
    if not step_ms or variant.global_batch is None:
        return Rates()  # the samples of a step aren't known of most programs
    samples_per_s = 1e3 * variant.global_batch / step_ms
    flop_per_s = scaled(facts.flops_per_sample, samples_per_s)
    names = gpu_names(sorted(set(variant.devices)), host)
    peak = total_peak_flop_per_s(names, variant.precision or "", peaks)
    return Rates(
        samples_per_s=samples_per_s,
        flop_per_s=flop_per_s,
        mfu=flop_per_s / peak if flop_per_s is not None and peak else None,
        input_bytes_per_s=scaled(facts.bytes_per_sample, samples_per_s),
        joules_per_sample=joules_per_sample(measured, variant.global_batch),
    )


def gpu_names(devices: Sequence[str], host: Mapping[str, Any]) -> list[str | None]:
    """The driver's name for each device; `None` for CPUs, and where `host` has none."""
    names = recorded_names(host)
    return [names.get(device) for device in devices]


def joules_per_sample(measured: MeasuredVariant, global_batch: int) -> float | None:
    """Mean energy of a timed step over its samples; a GPU that ranks share counts once."""
    by_device: dict[str, float] = {}
    devices = measured.variant.devices
    for rank, steps in measured.steps.items():
        energy_mj = mean_of(step.energy_mj for step in steps if step.kind == "timed")
        if energy_mj is None:
            return None
        by_device.setdefault(devices[rank], energy_mj)
    return sum(by_device.values()) / 1e3 / global_batch if by_device else None
