"""`TraceReport`: the result of `gpurun trace`, and the schema of its JSON (version 4).

Times are µs as floats with nanosecond precision; start times count from `base_time_ns`. Figures that don't
apply or can't be determined are `None` (`null`), never 0. Some tables are made on request only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from gpurun.launcher.findings.finding import Finding, of_level, with_figures
from gpurun.launcher.trace.added_by_ranks import RankFacts

Table = Literal["kernels", "shapes", "operators", "collectives", "copies", "launches", "critical-path"]
"""The table that is shown on request."""
TABLES: tuple[Table, ...] = get_args(Table)


@dataclass(frozen=True)
class ShapeTotal:
    """Calls of an operator with the same shapes; sums over all ranks."""

    name: str
    shapes: str
    """The shapes of its tensors: `64×3×224×224, 64×3×7×7`."""
    types: str
    """The types of the same tensors."""
    count: int
    """The number of calls, with each replay of a CUDA graph that captured them."""
    device_us: float
    """The time of the GPU work launched directly from it; where the CPU is the device, on the CPU."""
    flops: int | None
    """The operations of one call: matrix products, convolutions and attention only."""
    bytes: int | None
    """The bytes of its inputs and outputs, each once."""
    tflop_per_s: float | None
    gb_per_s: float | None
    roofline_percent: float | None
    """The time at the device's peak rates, of FLOPs or bytes, as a share of what it took."""
    bound: str | None
    """`compute` or `memory`: which peak limits it."""


@dataclass(frozen=True)
class KernelTotal:
    """A kernel as launched by an operator with the same shapes; sums over all ranks."""

    name: str
    kind: str
    """compute, comm or memcpy."""
    op: str | None
    """The operator; `None` where none launched it."""
    shapes: str
    graph: bool
    """Whether a CUDA graph launched it."""
    count: int
    device_us: float
    min_us: float
    max_us: float


RowKind = Literal["module", "op", "shapes", "outside"]


@dataclass(frozen=True)
class OperatorTotal:
    """A row of the tree of modules and operators, by which called which; sums over all ranks.

    A row's time contains that of the rows below it that are one deeper, up to the next one of its own depth.
    """

    depth: int
    """0: nothing encloses it."""
    kind: RowKind
    """The shapes and types of an operator's calls are rows below it, which divide its own time.
    outside: GPU work that was launched outside of all modules and operators."""
    name: str
    count: int
    """Calls; of those that a CUDA graph captured, its replays instead. Of `outside`, pieces of work."""
    total_us: float
    """The time of the GPU work launched or captured within it; of operators, where the CPU is the device."""
    self_us: float
    """The part of `total_us` without the modules and operators within it."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one group, operation, size and type."""

    group: str
    kind: str
    bytes: int | None
    """The bytes of each, as in NCCL's tests: the larger of input and output."""
    dtype: str | None
    count: int
    transfer_us: float | None
    """Mean of those that several ranks' traces show; so are the next three."""
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    arrival_spread_us: float | None
    """The time from the first rank's arrival to the last one's."""
    wait_us: float | None
    """Sum over ranks and collectives."""


@dataclass(frozen=True)
class CopyTotal:
    """Copies and memsets of one direction; sums over all ranks."""

    direction: str
    """`HtoD (Pageable -> Device)` and the like, as the GPU's driver says; `Memset`."""
    count: int
    bytes: int | None
    device_us: float
    gb_per_s: float | None
    exposed_us: float
    """Time without compute or communication on the same device at the same time."""


@dataclass(frozen=True)
class LaunchTotals:
    """How one rank feeds its GPU."""

    rank: int
    delay_percentiles_us: tuple[float, float, float, float]
    """Percentiles of the delay from the end of the launching call to the start of the work: 50 %, 90 %,
    99 %, largest. 0 where work began before its call had ended."""
    queue_mean: float
    """Pieces of work that are launched and not done, over time."""
    queue_max: int
    queue_empty_percent: float
    """Share of the time in which nothing was launched that wasn't done."""
    queue: tuple[tuple[float, int], ...]
    """Lengths over time: µs since `base_time_ns` on the rank's own clock, pieces; up to 200 points."""
    short_kernels: int
    """Kernels of less than 10 µs."""
    short_us: float
    slow_launches: int
    """Kernels whose launching call took longer than they did; not those of CUDA graphs."""


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path."""

    part: str
    """compute, transfer, copies, input, one-off, host (the CPU launches), latency (between launch and start)
    or before (the rank's capture began later than that of others)."""
    name: str | None
    """A kernel, or a kind of collective and its group; `None`: all of that part."""
    rank: int | None
    """`None`: on whatever rank."""
    path_us: float
    gain_us: float | None
    """The time that the job would gain without it, by replaying the graph; `None` where not computed, and of
    `before`, which is of the capture and not of the job."""


@dataclass(frozen=True)
class Saving:
    """How much shorter a step would be without something, by a replay of what all ranks do."""

    part: str
    """A part as in `PathPart`; rank: what this rank does beyond the others. Ranks, changing: what any rank
    does in a step beyond the others; it is the same ranks in most steps, or others from step to step."""
    rank: int | None
    parallelism: str | None
    """The kind of the transfers' groups, as in `ParallelKind`; `None`: all transfers, or another part."""
    saved_us: float
    """Microseconds per step; of all of the trace where it has no steps."""
    ranks: tuple[int, ...] = ()
    """Of `ranks`."""

    def concerns(self, rank: int) -> bool:
        """Whether it is without something that this rank does, or that isn't of certain ranks."""
        return rank in (self.ranks or (rank if self.rank is None else self.rank,))


@dataclass(frozen=True)
class CriticalPath:
    """The chain of tasks, over all ranks, that decides how long the job takes."""

    length_us: float
    """The length of the replay as recorded."""
    recorded_us: float
    num_steps: int
    """Steps in it; 0 if unknown."""
    parts: tuple[PathPart, ...]
    """Add up to `length_us`."""
    names: tuple[PathPart, ...]
    """Kernels and collectives with most time on the path."""
    ranks: tuple[PathPart, ...]
    """The path's time by rank, without transfer, which belongs to no rank."""
    even_gain_us: float | None
    """The time that the job would gain if all ranks computed and copied equally long in each step.

    `None` where they have other steps. Negative where it would be longer: the critical path may run over a
    rank that has less to do.
    """
    guessed_waits: int
    """Waits for GPU work that the traces don't record, but that their times show."""
    contradictions: int
    """Waits that contradict others or the recorded times, and were left out."""

    @property
    def step_us(self) -> float | None:
        """The mean step, without the time until a rank's trace begins; `None` of fewer than two."""
        before_us = sum(each.path_us for each in self.parts if each.part == "before")
        return (self.length_us - before_us) / self.num_steps if self.num_steps > 1 else None


IdlePart = Literal["input", "host", "one_off", "gaps", "unknown"]
"""Parts of a step in which the device has nothing to do; `Part` in `causes.py` says more of some of them."""
IDLE_PARTS: tuple[IdlePart, ...] = get_args(IdlePart)


GAPS_OF_IDLE = ("allocating", "loading", "blocked", "other")
"""The causes in `IdleCauses` of gaps that no launch ends."""


@dataclass(frozen=True)
class IdleCauses:
    """Idle time of the device by cause; adds up to `idle_us`. Work is launched when the call for it ends."""

    host: float
    """The launching call hadn't begun: Python, operators."""
    unrecorded: float
    """It hadn't, and for at least 1 ms nothing is recorded of the CPU, whose stacks the trace lacks."""
    launching: float
    """The launching call was running."""
    latency: float
    """It had ended while nothing ran, and the work started: at most 20 µs of each gap."""
    one_off: float
    """Before the launch, the CPU did what it does once: it loaded a module, allocated memory, compiled.

    A launching call of 1 ms or more loads the module that it needs.
    """
    comm_wait: float
    """The device waited for a collective on the CPU."""
    data: float
    """The training loop waited for its next batch."""
    allocating: float
    """The launching call hadn't begun: for 1 ms or more the CPU was in a call that allocates or frees."""
    loading: float
    """Likewise, in a call that loads code."""
    blocked: float
    """Likewise, in another call, such as one that synchronises."""
    other: float
    """Work was launched and waited for something else."""
    unknown: float
    """The trace doesn't have the launch of the work that came next."""

    @property
    def of_launches(self) -> float:
        """Nothing was launched that could have started."""
        return self.host + self.unrecorded + self.launching + self.latency

    @property
    def by_part(self) -> Mapping[IdlePart, float]:
        """The idle time that a rank loses by itself, by the part of its step that it counts for."""
        return {
            "input": self.data,
            "host": self.of_launches,
            "one_off": self.one_off,
            "gaps": sum(getattr(self, cause) for cause in GAPS_OF_IDLE),
            "unknown": self.unknown,
        }


@dataclass(frozen=True)
class HostWhileIdle:
    """CPU activity during idle time; adds up to `idle_us`. Each moment counts for the first that applies."""

    runtime: float
    data: float
    op: float
    other: float


@dataclass(frozen=True)
class LaunchDelay:
    """The delay from the end of the launching call to the start of the GPU work."""

    median: float
    max: float


@dataclass(frozen=True)
class Breakdown:
    """A stretch of one rank's time.

    compute + exposed_transfer + exposed_wait + exposed_memcpy + other_steps + idle = span, exactly. Without
    another rank's trace, waiting can't be distinguished from transfer: then all exposed communication counts
    as transfer, and `wait_us` and `transfer_us` are `None`.
    """

    span_us: float
    compute_us: float
    comm_us: float
    comm_compute_overlap_us: float
    exposed_comm_us: float
    memcpy_us: float
    """Copies and memsets."""
    memset_us: float
    """The part of `memcpy_us` that is memsets."""
    exposed_memcpy_us: float
    """Outside compute and communication."""
    other_steps_us: float
    """The GPU was busy, but only with work that other steps launched, or that was launched outside of all."""
    idle_us: float
    wait_us: float | None
    """Time in collectives beyond that of the rank with the shortest, summed over collectives."""
    transfer_us: float | None
    exposed_wait_us: float
    exposed_transfer_us: float
    idle_by_cause_us: IdleCauses
    host_while_idle_us: HostWhileIdle
    num_kernels: int
    launch_delay_us: LaunchDelay | None
    gpu_span_us: float | None
    """First start to last end of the GPU work; a step's `span_us` also includes the time before it."""


@dataclass(frozen=True)
class StepBreakdown(Breakdown):
    """A step: the GPU work that it launched, from the end of what was launched before to its own end.

    Work that it launched on another stream than the main one may also run while the step before isn't done,
    or on while the next one runs: that is `other_steps_us` of that step.
    """

    step: int
    start_us: float
    """The start on the aligned clock, since `base_time_ns`."""


@dataclass(frozen=True)
class NameTotal:
    """Time under one name."""

    name: str
    kind: str
    """compute, comm or memcpy; op; module; one-off."""
    count: int
    """The calls of an operator or module on the CPU; replays of a CUDA graph aren't any."""
    device_us: float
    """Time on the GPU: the work itself, or what was launched, or captured and replayed, from here."""
    host_us: float
    """Time on the CPU, without nested ranges."""
    comm_us: float = 0.0
    """The communication in `device_us` of an operator or module."""
    memcpy_us: float = 0.0
    """The copies and memsets in `device_us` of an operator or module."""


@dataclass(frozen=True)
class GroupTotal:
    """Communication of one process group."""

    group: str
    """The name of the group, as in `CollectiveReport`."""
    count: int
    num_bytes: int | None
    comm_us: float
    """Sum over collectives."""
    wait_us: float | None
    transfer_us: float | None


@dataclass(frozen=True)
class DeviceTrace:
    """One of several GPUs that a rank's process uses."""

    device: str
    """The device's number in the trace."""
    total: Breakdown
    steps: tuple[StepBreakdown, ...]


@dataclass(frozen=True)
class NameTotals:
    """Times by name, longest first, and by process group."""

    kernels: tuple[NameTotal, ...]
    ops: tuple[NameTotal, ...]
    modules: tuple[NameTotal, ...]
    groups: tuple[GroupTotal, ...]


Remedy = Literal["torch.compile", "CUDA graphs"]
"""Remedies that shorten the wait for the CPU."""


@dataclass(frozen=True)
class CpuFacts:
    """Facts of a trace about the CPU that its device waits for."""

    functions: Mapping[str, str] = field(default_factory=dict)
    """Python's function, with its place, around most of `of_launches`, named `host`, of `data` and of `other`
    in `idle_by_cause_us`."""
    function_holds: bool = False
    """Whether that of `host` launches nothing, for 1 ms or more each time, for most of it."""
    blocked_in: str | None = None
    """The call in which it is for most of `GAPS_OF_IDLE`; several that allocate or load code."""
    blocked_once_us: float | None = None
    """The length of a single call that takes most of it."""
    launches_in: str | None = None
    """The call in which it is for most of `idle_by_cause_us.launching`."""
    computes_in: str | None = None
    """The operator in which it computes itself longest, if it does so for most of `of_launches`."""
    inside: str | None = None
    """The innermost operator or annotation in which it is, without launching anything, for most of
    `unrecorded`, or of the rest of `of_launches`: of the larger."""
    once_us: Mapping[str, float] = field(default_factory=dict)
    """`idle_by_cause_us.one_off` by what it does once: calls by name, `torch.compile` and the like."""
    remedies: tuple[Remedy, ...] = ()
    """The remedies that are in use."""
    has_stacks: bool = False
    """Whether Python's functions were recorded, which takes its time."""

    @property
    def of_job(self) -> CpuFacts:
        """What holds of every step: nothing of what the CPU is in."""
        return CpuFacts(remedies=self.remedies, has_stacks=self.has_stacks)

    def common(self, other: CpuFacts) -> CpuFacts:
        """What holds of both, and `once_us` of both together."""
        names = {**self.once_us, **other.once_us}
        return replace(
            self,
            functions=dict(sorted(self.functions.items() & other.functions.items())),
            function_holds=self.function_holds and other.function_holds,
            blocked_in=self.blocked_in if self.blocked_in == other.blocked_in else None,
            blocked_once_us=None,
            launches_in=self.launches_in if self.launches_in == other.launches_in else None,
            computes_in=self.computes_in if self.computes_in == other.computes_in else None,
            inside=self.inside if self.inside == other.inside else None,
            once_us={name: self.once_us.get(name, 0.0) + other.once_us.get(name, 0.0) for name in names},
        )


@dataclass(frozen=True)
class RankTrace:
    """One rank. With several GPUs, `total` and `steps` are those of the busiest one."""

    rank: int
    world_size: int | None
    device: str
    files: tuple[str, ...]
    total: Breakdown
    """The whole file; with `--steps` the work of these steps."""
    steps: tuple[StepBreakdown, ...]
    kernels: tuple[NameTotal, ...]
    ops: tuple[NameTotal, ...]
    modules: tuple[NameTotal, ...]
    groups: tuple[GroupTotal, ...]
    devices: tuple[DeviceTrace, ...] = ()
    """Each GPU separately, the busiest first, if there are several."""
    in_steps: NameTotals | None = None
    """The work that the steps launched, if the trace has steps and also work outside of them."""
    optimizer_steps: int = 0
    """Calls of an optimizer, where no steps are marked."""
    is_cut: bool = False
    """Whether the file ends early, so that any of these figures may lack something."""
    lost_events: int = 0
    """Damaged events that were left out and may have been work, where they are more than 1 % of it."""
    is_thinned: bool = False
    """Whether calls were left out of the file after it was recorded, so that gaps may hold work."""
    one_off: tuple[NameTotal, ...] = ()
    """Calls that do what is done once, and `torch.compile`, longest first, also while the device worked.

    Those of the steps, where the trace has any.
    """
    cpu: CpuFacts = CpuFacts()
    facts: RankFacts | None = None
    """`None` in traces of others, and of `dp`, whose replicas share a process."""

    @property
    def per_step(self) -> NameTotals:
        """The work that the steps launched; of the whole file if no work is outside or no step is known."""
        return self.in_steps or NameTotals(self.kernels, self.ops, self.modules, self.groups)

    @property
    def is_partial(self) -> bool:
        """Whether the file lacks work."""
        return self.is_cut or self.lost_events > 0


@dataclass(frozen=True)
class CollectivePart:
    """One rank's part in a collective."""

    rank: int
    start_us: float
    """The start on the aligned clock, since `base_time_ns`."""
    wait_us: float | None
    transfer_us: float | None


@dataclass(frozen=True)
class CollectiveReport:
    """One collective over all ranks that show it."""

    group: str
    """A key of `TraceReport.groups`."""
    seq: int
    kind: str
    parallelism: str
    """The kind of parallelism, as in `ParallelKind`."""
    bytes: int | None
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    last_rank: int | None
    ranks: tuple[CollectivePart, ...]
    dtype: str | None = None
    """The type of its elements, as the traces call it."""


def overall_gb_per_s(
    collectives: Sequence[CollectiveReport], rate: Callable[[CollectiveReport], float | None]
) -> float | None:
    """The bytes of all over the time in which they moved, of collectives whose rate is known.

    `None` where they have less than half of the bytes.
    """
    rated = [(each.bytes, per_s) for each in collectives if each.bytes and (per_s := rate(each))]
    moved = sum(num_bytes for num_bytes, _ in rated)
    if not moved or 2 * moved < sum(each.bytes or 0 for each in collectives):
        return None
    return moved / sum(num_bytes / per_s for num_bytes, per_s in rated)


@dataclass(frozen=True)
class StragglerReport:
    """How often a rank arrived last, and how long the others waited for it."""

    rank: int
    collectives: int
    """Collectives that it took part in, and of which it is known whether a rank came last."""
    last_arrivals: int
    wait_caused_us: float


@dataclass(frozen=True)
class ParallelRank:
    """One rank's communication of one kind; the mean step, all of its trace where that has none."""

    rank: int
    comm_us: float
    """While any of it runs."""
    exposed_us: float
    """The part that no compute overlaps. A moment with two kinds counts for both."""
    exposed_wait_us: float | None
    """The part of it in which another rank hadn't come yet."""


@dataclass(frozen=True)
class ParallelKind:
    """The communication of all groups of one kind."""

    kind: str
    """data, tensor, pipeline, expert or context; other, where neither names nor structure decide."""
    groups: tuple[str, ...]
    """Keys of `TraceReport.groups`."""
    ranks: tuple[ParallelRank, ...]

    def mean_us(self, num_ranks: int) -> tuple[float, float, float | None]:
        """Communication, its exposed part, and the exposed wait: the mean of `num_ranks` ranks."""
        waits = [each.exposed_wait_us for each in self.ranks if each.exposed_wait_us is not None]
        comm = sum(each.comm_us for each in self.ranks) / num_ranks
        exposed = sum(each.exposed_us for each in self.ranks) / num_ranks
        return comm, exposed, sum(waits) / num_ranks if waits else None


@dataclass(frozen=True)
class MessageWaits:
    """A stage's exposed wait for each message that it gets from, or sends to, another stage."""

    stage: int
    """The other one."""
    way: str
    """from or to."""
    wait_us: tuple[float, ...]
    """In the order of a step's messages: where stages pass one tensor, of its micro-batches."""


@dataclass(frozen=True)
class Bubble:
    """How long a stage of a pipeline does nothing but wait for others in a step: the mean of its ranks."""

    stage: int
    awaited: tuple[int, ...]
    """The stages that it waits for."""
    ms: float


@dataclass(frozen=True)
class PipelineStage:
    """A stage of the pipeline: the mean step of its ranks."""

    stage: int
    ranks: tuple[int, ...]
    span_us: float
    bubble_us: float
    """Time of nothing but waiting for other stages."""
    waits_us: Mapping[str, float]
    """Waiting for other stages, by the stage that is waited for. A moment may count for several."""
    messages: tuple[MessageWaits, ...]

    @property
    def bubble(self) -> Bubble | None:
        """`None` if it waits for no other stage."""
        awaited = tuple(int(stage) for stage, us in self.waits_us.items() if us)
        return Bubble(self.stage, awaited, self.bubble_us / 1000) if awaited else None


@dataclass(frozen=True)
class TraceReport:
    """All ranks of one capture."""

    schema: int
    base_time_ns: int
    """Unix time, if the traces have it; 0 if their times can't be Unix times."""
    clock_offsets_us: Mapping[str, float]
    """How far each rank's clock is ahead of the lowest rank's; start times are already corrected for it."""
    clock_offset_bounds_us: Mapping[str, tuple[float | None, float | None]]
    """Between which each offset is: no message arrives before it was sent. `null`: no bound, as to one side
    where messages run one way only, and to both where nothing links the clocks.

    Of ranks that share collectives on GPUs both are the same: they all leave within microseconds.
    """
    clock_drift_ppm: Mapping[str, float | None]
    """How much each clock gains on the lowest rank's, in µs per second; start times are corrected for it.

    `null` where too few collectives, or messages in both directions, show it. Offsets are those at the start
    of a rank's trace.
    """
    clock_drift_bounds_ppm: Mapping[str, tuple[float, float] | None]
    """Between which the drift certainly is: no rank leaves a collective before another has come.

    `null` for ranks that share too few collectives with the lowest one.
    """
    ranks: tuple[RankTrace, ...]
    groups: Mapping[str, tuple[int, ...] | None]
    """All ranks of each group, `None` if the traces don't say; by its name, with its ranks where several
    groups have that name. A group may have a million ranks, and any number of collectives."""
    collectives: tuple[CollectiveReport, ...]
    stragglers: tuple[StragglerReport, ...]
    parallelism: tuple[ParallelKind, ...]
    """The costs by kind of parallelism."""
    pipeline: tuple[PipelineStage, ...]
    """Empty if no messages run between stages."""
    savings: tuple[Saving, ...] = ()
    """How much shorter a usual step would be without each of its parts, the largest first; empty if not to be
    replayed: a trace is missing or cut off, launches are lost, or a step is too long."""
    unreplayed: str = ""
    """The case of `BY_SHARES` that says why there are no savings."""
    kernels_by_shape: tuple[KernelTotal, ...] | None = None
    """The kernels by shape. `None`, like the tables that follow, if it wasn't asked for."""
    shapes: tuple[ShapeTotal, ...] | None = None
    shapes_in_steps: tuple[ShapeTotal, ...] | None = None
    """The shapes of what the steps launched, where the traces have steps."""
    operators: tuple[OperatorTotal, ...] | None = None
    operators_in_steps: tuple[OperatorTotal, ...] | None = None
    collective_totals: tuple[CollectiveTotal, ...] | None = None
    copies: tuple[CopyTotal, ...] | None = None
    launches: tuple[LaunchTotals, ...] | None = None
    critical_path: CriticalPath | None = None
    findings: tuple[Finding, ...] = ()
    """The meaning of these figures, and what was noticed."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The findings: each cause with what to do about it."""
        causes, steps = (of_level(self.findings, level) for level in ("cause", "remedy"))
        if not causes:
            known = (each for each in self.findings if {"percent", "num_cut", "num_lost"} & {*each.figures})
            return tuple(each.sentence for each in known)
        named = (with_figures(each, about=None) for each in steps)  # next to its cause, advice needs no name
        advice = {(each.figures["what"], each.ranks, each.weight): each.text for each in named}
        said = [(each.sentence, advice.get((each.code, each.ranks, each.weight))) for each in causes]
        return tuple(f"{text.removesuffix('.')}: {more}." if more else text for text, more in said)

    @property
    def conclusion(self) -> str:
        """The sentences as one text."""
        return " ".join(self.sentences)
