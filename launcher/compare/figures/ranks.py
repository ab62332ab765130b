"""Figures of single ranks: of their steps, their memory and their traces."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from gpurun.launcher.compare.figures.recorded import (
    MeasuredVariant,
    allocated_gib,
    gpu_loads,
    median_ms,
    throttled,
    timed_steps,
)
from gpurun.launcher.compare.figures.traced import Traced
from gpurun.launcher.compare.figures.waiting import other_cores, queue_percent
from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.plan.nodes import Node, node_of_device
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.paths import rank_files
from gpurun.launcher.rundir.records import MemoryPart, StepRecord
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.trace.model import Bubble
from gpurun.launcher.units import GIB, Interval

LEAST_SHARE = -5.0
"""In percent: what noise makes of nothing."""


@dataclass(frozen=True)
class ExposedComm:
    """Communication outside compute, per step, from two independent sources."""

    trace: float | None = None
    """Communication in the trace while nothing computes, in steps that the profiler slows down a little."""
    ablation: float | None = None
    """The median step less the median step without communication; noise can make it negative."""

    def ablation_percent(self, step_ms: float) -> float | None:
        """Percent of the step; `None` where it is no part of it, as of steps that get data in bursts."""
        percent = None if self.ablation is None else 100 * self.ablation / step_ms
        return percent if percent is not None and LEAST_SHARE <= percent <= 100 else None


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank (of one replica for `dp`). Times are medians per step.

    Those from `span_ms` to `transfer_ms` are means of the same traced steps, the half in which least else
    ran: compute + exposed transfer, wait and memcpy + other steps + idle = span.
    """

    rank: int
    device: str
    local_batch: int | None
    step_ms: float | None
    phases_ms: Mapping[str, float]
    peak_gib: float | None
    """The peak of live tensors in one step, if looked at; else of a GPU's allocator or program's process."""
    trace: str | None
    span_ms: float | None = None
    compute_ms: float | None = None
    exposed_transfer_ms: float | None = None
    exposed_wait_ms: float | None = None
    exposed_memcpy_ms: float | None = None
    other_steps_ms: float | None = None
    """The device was busy, but only with work that other steps launched."""
    idle_ms: float | None = None
    input_ms: float | None = None
    """The part of idle that waits for data."""
    host_ms: float | None = None
    """The part of idle in which the CPU has given the device nothing to do: Python between the operators."""
    wait_ms: float | None = None
    """In collectives until the last rank came, whatever overlaps it; `None` with one rank's trace only."""
    transfer_ms: float | None = None
    """In collectives after that."""
    exposed_comm_ms: ExposedComm = ExposedComm()
    bubble: Bubble | None = None
    """The bubble of its stage, in the same traced steps; `None` where it is in no pipeline."""
    queue_percent: float | None = None
    """The share of its step that it waited for a core that processes of others had."""
    other_cores: float | None = None
    """How many of its cores processes of others kept busy, on average."""
    cpu_ms: float | None = None
    """CPU time of all its threads in a timed step."""
    thread_cpu_ms: float | None = None
    """CPU time of the thread that steps; `None` in older runs and of replicas, which have others."""
    throttled: str | None = None
    """Why the GPU's clock was low in most rounds."""
    sm_clock_mhz: float | None = None
    """The GPU's clock in timed steps, as its power: the mean over blocks."""
    power_w: float | None = None
    alloc_retries: int = 0
    """How often timed steps waited because torch had to release cached memory first."""
    host: str | None = None
    """Name of the rank's node, where the job has several."""
    memory_gib: Mapping[MemoryPart, float] = field(default_factory=dict)
    """The parts of `peak_gib`; empty where no step was looked at."""
    reserved_gib: float | None = None
    """The memory that torch's allocator held in that step, in use or not."""
    operators_ms: Mapping[str, float] = field(default_factory=dict)
    """Compute of a traced step by operator, on a GPU by kernel, longest first; the mean of all of them."""


def rank_figures(
    run: RunDir, measured: MeasuredVariant, traced: Traced | None, nodes: Sequence[Node] = ()
) -> tuple[RankFigures, ...]:
    """One entry per device; the replicas of `dp` share a process, whose figures the first has."""
    alone = len(measured.variant.devices) == 1
    devices = measured.variant.devices
    split = measured.variant.split or (None,) * len(devices)
    traces = rank_files(run.variant(measured.variant.id), ".pt.trace.json.gz")
    return tuple(
        with_breakdown(
            replace(
                _one_rank(measured, rank, device, local_batch, host_of(device, nodes)),
                trace=traces[rank].relative_to(run.path).as_posix() if rank in traces else None,
            ),
            traced,
            alone,
        )
        for rank, (device, local_batch) in enumerate(zip(devices, split, strict=True))
    )


def host_of(device: str, nodes: Sequence[Node]) -> str | None:
    """The host of a device, if the job has several nodes."""
    return nodes[node_of_device(device)].host if nodes else None


def _one_rank(
    measured: MeasuredVariant, rank: int, device: str, local_batch: int | None, host: str | None
) -> RankFigures:
    steps = measured.steps.get(rank, ())
    timed = timed_steps(measured, rank)
    loads = gpu_loads(measured, rank)
    memory = measured.memory.get(rank)
    has_replicas = STRATEGIES[measured.variant.strategy].has_replicas
    return RankFigures(
        rank=rank,
        device=device,
        local_batch=local_batch,
        step_ms=median(step.step_ns for step in timed) / 1e6 if timed else None,
        phases_ms=phase_medians_ms(timed),
        peak_gib=memory.total / GIB if memory else allocated_gib(measured, rank),
        trace=None,
        exposed_comm_ms=ExposedComm(ablation=ablation_ms(steps)),
        queue_percent=queue_percent(measured.waiting.get(rank, {})),
        other_cores=other_cores(measured.waiting.get(rank, {})),
        cpu_ms=median_ms(step.cpu_ns for step in timed),
        thread_cpu_ms=median_ms(() if has_replicas else (step.thread_cpu_ns for step in timed)),
        throttled=throttled(loads or timed),
        sm_clock_mhz=mean_of(load.sm_clock_mhz for load in loads),
        power_w=mean_of(load.power_w for load in loads),
        alloc_retries=sum(load.alloc_retries for load in loads),
        host=host,
        memory_gib={part: num_bytes / GIB for part, num_bytes in memory.parts.items()} if memory else {},
        reserved_gib=memory.reserved / GIB if memory and memory.reserved is not None else None,
    )


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def with_breakdown(figures: RankFigures, traced: Traced | None, alone: bool = False) -> RankFigures:
    """The rank's figures with what its trace adds to them; one device `alone` has no communication."""
    breakdown = traced.ranks.get(figures.rank) if traced else None
    if traced is None or breakdown is None:
        return figures
    operators_ns = traced.operators_ns.get(figures.rank, {})
    exposed_ms = None if alone else breakdown.exposed_comm_ns / 1e6
    return replace(
        figures,
        span_ms=breakdown.span_ns / 1e6,
        compute_ms=breakdown.compute_ns / 1e6,
        exposed_transfer_ms=breakdown.exposed_transfer_ns / 1e6,
        exposed_wait_ms=breakdown.exposed_wait_ns / 1e6,
        exposed_memcpy_ms=breakdown.exposed_memcpy_ns / 1e6,
        other_steps_ms=breakdown.other_steps_ns / 1e6,
        idle_ms=breakdown.idle_ns / 1e6,
        input_ms=breakdown.input_ns / 1e6,
        host_ms=breakdown.host_ns / 1e6,
        wait_ms=None if breakdown.wait_ns is None else breakdown.wait_ns / 1e6,
        transfer_ms=None if breakdown.transfer_ns is None else breakdown.transfer_ns / 1e6,
        exposed_comm_ms=replace(figures.exposed_comm_ms, trace=exposed_ms),
        operators_ms={name: ns / 1e6 for name, ns in operators_ns.items()},
        bubble=traced.bubbles.get(figures.rank),
    )


def phase_medians_ms(steps: Iterable[StepRecord]) -> dict[str, float]:
    """Median of each phase over the steps that have it, in the order in which the phases appear."""
    phases_ns: dict[str, list[int]] = {}
    for step in steps:
        for phase, duration_ns in step.phases_ns.items():
            phases_ns.setdefault(phase, []).append(duration_ns)
    return {phase: median(durations_ns) / 1e6 for phase, durations_ns in phases_ns.items()}


def ablation_ms(steps: Iterable[StepRecord]) -> float | None:
    """A rank's median step less its own median without communication, in the rounds that have both."""
    steps = list(steps)
    without = [step for step in steps if step.kind == "ablation"]
    rounds = {(step.launch, step.round) for step in without}
    timed = [step.step_ns for step in steps if step.kind == "timed" and (step.launch, step.round) in rounds]
    if not timed:
        return None
    return (median(timed) - median(step.step_ns for step in without)) / 1e6


APART_OF_ABLATION = 0.3
APART_OF_STEP = 0.02


def disagreement(exposed: ExposedComm, interval: Interval | None, step_ms: float) -> tuple[Finding, ...]:
    """A finding where trace and ablation differ by more than 30 % of the ablation and 2 % of the step.

    The ablation also holds what communication costs while compute goes on: contention, and copies to buckets.

    Args:
        exposed: communication that nothing overlaps, in ms.
        interval: of the ablation; what lies within it is chance.
        step_ms: the variant's step.
    """
    if exposed.trace is None or exposed.ablation is None:
        return ()
    apart_ms = abs(exposed.trace - exposed.ablation)
    if apart_ms <= APART_OF_ABLATION * abs(exposed.ablation) or apart_ms <= APART_OF_STEP * step_ms:
        return ()
    if interval and interval[0] <= exposed.trace <= interval[1]:
        return ()
    is_longer = exposed.ablation > step_ms
    case = "varies" if is_longer else "hardware" if exposed.ablation < exposed.trace else "contention"
    return (noticed(f"ablation-{case}", traced_ms=exposed.trace, ablation_ms=exposed.ablation),)


BEFORE_COMMUNICATION = ("data", "h2d", "forward")
"""Phases at whose end no rank has waited for another yet."""


ALIKE = 0.05
"""Up to this share, two ranks' times without communication are about the same."""


def slowest_rank(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """The rank that the others wait for: the one that works longest; `None` where nothing was measured.

    A rank's work is its step without what communication adds: by the ablation, else by the trace. Where
    neither is known, what comes before the first communication decides: from `backward` on the faster ranks
    wait, and every rank shows the same time. Where ranks are about equal by the ablation, the trace decides.
    """
    timed = [rank for rank in ranks if rank.phases_ms or rank.step_ms is not None or rank.span_ms is not None]
    ways = [each for way in (_by_ablation, _by_trace) if (each := _work_by(way, timed))]
    works_ms = next((each for each in ways if _is_clear(each.values())), ways[-1] if ways else None)
    if works_ms is not None:
        return max(timed, key=lambda rank: works_ms[rank.rank])
    return max(timed, key=_before_communication, default=None)


def _work_by(
    way: Callable[[RankFigures], float | None], ranks: Sequence[RankFigures]
) -> Mapping[int, float] | None:
    """The work of all ranks; `None` where that of one isn't known."""
    known = {rank.rank: work for rank in ranks if (work := way(rank)) is not None}
    return known if known and len(known) == len(ranks) else None


def _is_clear(works_ms: Collection[float]) -> bool:
    """Whether one rank has more work than all others, by more than chance makes of equal ranks."""
    most, *others = sorted(works_ms, reverse=True)
    return not others or most > (1 + ALIKE) * others[0]


def _by_ablation(rank: RankFigures) -> float | None:
    exposed_ms = rank.exposed_comm_ms.ablation
    return None if rank.step_ms is None or exposed_ms is None else rank.step_ms - exposed_ms


def _by_trace(rank: RankFigures) -> float | None:
    exposed_ms = rank.exposed_comm_ms.trace
    return None if rank.span_ms is None or exposed_ms is None else rank.span_ms - exposed_ms


def _before_communication(rank: RankFigures) -> float:
    return sum(rank.phases_ms.get(name, 0.0) for name in BEFORE_COMMUNICATION)
