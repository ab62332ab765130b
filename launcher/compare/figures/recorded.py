"""The records of a run directory about one variant, read once, and other load during its steps."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from statistics import fmean, median

from gpurun.launcher.compare.figures.program_steps import (
    Around,
    around_steps,
    last_half,
    planned_launch,
    sample_of_steps,
    trend_of_steps,
    uneven_ranks,
)
from gpurun.launcher.compare.figures.rounds import (
    RoundKey,
    launch_logs,
    mean_logs,
    program_times,
    round_blocks_ns,
    round_times,
)
from gpurun.launcher.compare.figures.waiting import (
    Sharing,
    WaitingOfRanks,
    queue_percent,
    sharing,
    waiting_of_ranks,
)
from gpurun.launcher.findings.finding import Finding, reason
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import (
    MEASURED,
    Balance,
    Event,
    GpuLoad,
    MemoryPeak,
    PointRecord,
    RoundTime,
    StepRecord,
    VariantFacts,
    VariantStatus,
    elapsed_s,
)
from gpurun.launcher.rundir.step_sample import VariantSteps
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import GIB


@dataclass(frozen=True)
class MeasuredVariant:
    """A planned variant with everything that was measured of it so far."""

    variant: Variant
    group: str
    """Launches of one group repeat the same processes; rounds are paired only within a group."""
    status: VariantStatus
    finished: bool
    """Whether the command has closed this variant."""
    facts: VariantFacts
    steps: Mapping[int, Sequence[StepRecord]]
    timed: tuple[RoundTime, ...]
    aa: tuple[RoundTime, ...]
    """The baseline's second blocks; empty for the others."""
    logs: Mapping[int, Mapping[RoundKey, float]]
    """ln(step time in ns) of its rounds, by repetition."""
    means: Mapping[int, float] = field(default_factory=dict)
    """ln(mean step in ns) of a program's launches, by repetition; empty for others."""
    aa_logs: Mapping[int, Mapping[RoundKey, float]] = field(default_factory=dict)
    """ln(step time in ns) of the rounds of `aa`, by repetition."""
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


def read_measured(
    run: RunDir, plan: Plan, variant: Variant, read: VariantSteps, events: Mapping[str, Sequence[Event]]
) -> MeasuredVariant:
    """Reads the files of `variant`; what is not there yet is empty.

    Args:
        events: of every attempt.
        read: its steps, of those of the run that are in memory.
    """
    launches = plan.launches_of(variant.id)
    world_size = variant.world_size
    status = run.read_status(variant.id)
    steps: Mapping[int, Sequence[StepRecord]]
    steps = {rank: read.by_rank[rank] for rank in range(world_size) if rank in read.by_rank}
    timed = round_times(steps, world_size, "timed")
    unsteady: str | None = None
    short: tuple[str, ...] = ()
    if variant.kind.runs_program and status is not None:
        was_timed, (steps, text) = bool(timed), last_half(steps)
        short, unsteady = ((text,) if text else (), None) if was_timed else ((), text)
    if variant.kind.runs_program:
        timed = program_times(steps, world_size)
    facts = run.read_facts(variant.id)
    of_steps: tuple[str, ...] = ()
    trends: tuple[Finding, ...] = ()
    if status is None or status.status in MEASURED:  # else the failure is what there is to say
        trends = trend_of_steps(steps) if variant.kind.runs_program and not (short or unsteady) else ()
        uneven = uneven_ranks(steps) if variant.kind.runs_program and status is not None else ()
        of_steps = (*sample_of_steps(steps), *short, *uneven)
    facts = replace(facts, warnings=(*facts.warnings, *read.damage, *of_steps))
    balance = None if variant.split else run.read_balance(variant.id)
    status = _judged(status, unsteady, () if timed else read.damage)
    points = run.read_points(variant.id)
    ended = _ended(run, variant, events) if variant.kind.runs_program else {}
    counting, timed = launches_that_count(launches, timed)
    repetitions = {launch.id: launch.repetition for launch in counting}
    aa = [time for time in round_times(steps, world_size, "aa") if planned_launch(time.launch) in repetitions]
    return MeasuredVariant(
        variant=replace(variant, split=balance.best.split) if balance else variant,
        group=counting[0].group if counting else "",
        status=_effective_status(status, facts, bool(timed or points)),
        finished=status is not None,
        facts=facts,
        steps=steps,
        trends=trends,
        timed=timed,
        aa=tuple(aa),
        logs=launch_logs(timed, repetitions),
        means=mean_logs(timed, repetitions) if variant.kind.runs_program else {},
        aa_logs=launch_logs(aa, repetitions),
        memory=run.read_memory(variant.id),
        balance=balance,
        points=points,
        ended_s={name: elapsed_s(events) for name, events in ended.items()},
        num_planned=len(counting),
        sharing=sharing(counting[0].processes) if counting else {},
        first_launch=plan.launches[0].id if variant.kind.runs_program else "",
        around_s=[found for events in ended.values() if (found := around_steps(events))],
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


def _effective_status(status: VariantStatus | None, facts: VariantFacts, has_rounds: bool) -> VariantStatus:
    """The status that the command wrote; before it did, what the rounds so far allow to say."""
    if status is None and not has_rounds:
        return VariantStatus("skipped", reason("not-yet"))
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
    """Each rank's mean step in a round, the median over rounds, less its share of waiting for other load."""
    found = {}
    for rank in measured.steps:
        timed = timed_steps(measured, rank)
        means_ns = [fmean(block) for block in round_blocks_ns(timed, "timed").values()]
        if means_ns:
            waited = queue_percent(measured.waiting.get(rank, {})) or 0.0
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
