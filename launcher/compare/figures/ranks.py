"""Figures of single ranks: of their steps, their memory and their traces.

Traces grow to hundreds of megabytes, a report is asked for many times: `variants/ID/trace.json` holds the
outcome, and is made again when a trace is another file than the one that it was made from.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from gpurun.launcher.compare.figures.recorded import (
    MeasuredVariant,
    allocated_gib,
    gpu_loads,
    median_ms,
    other_cores,
    queue_percent,
    throttled,
    timed_steps,
)
from gpurun.launcher.errors import MachineError
from gpurun.launcher.findings.finding import Finding, noticed, of_level, relative_to, with_figures
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.model import Node, Variant, node_of_device
from gpurun.launcher.rundir.control import write_in
from gpurun.launcher.rundir.files import RunDir, as_json
from gpurun.launcher.rundir.paths import Stamp, rank_files, stamp_of
from gpurun.launcher.rundir.records import MemoryPart, StepRecord
from gpurun.launcher.stats.core_waiting import mean_of
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.trace.kineto.classify import HostKind, host_kind
from gpurun.launcher.trace.model import IDLE_PARTS, Bubble, CpuFacts, Remedy, Saving
from gpurun.launcher.units import GIB, Interval, ranks_text

if TYPE_CHECKING:
    from gpurun.launcher.trace.model import Breakdown, RankTrace, StepBreakdown


SCHEMA = 17
MOST_OPERATORS = 20
"""The number of operators to keep of each rank, the longest ones."""

TRACED = ("traced-far", "traced-short")
"""The cases of what is noticed where traced steps differ from the timed ones."""
LEAST_OF_TIMED = 0.5
"""A smaller share of the timed step is another kind of step."""
LONG_STEP = 1.3
"""Multiple of the quiet steps' mean from which on the work of a step differs, not only what else ran."""


@dataclass(frozen=True)
class TracedSteps:
    """The traced steps that figures are the mean of: those in which least else ran."""

    used: int
    recorded: int
    """Steps that the traces of all ranks have."""


_MOST_NS = 1 << 63
"""Kineto's times are 64 bits wide."""


@dataclass(frozen=True)
class RankBreakdown:
    """A step of one rank, in ns: compute + exposed transfer, wait and memcpy + other steps + idle = span."""

    span_ns: int
    compute_ns: int
    exposed_transfer_ns: int
    exposed_wait_ns: int
    exposed_memcpy_ns: int
    other_steps_ns: int
    """Time in which only work of other steps ran."""
    idle_ns: int
    input_ns: int
    """The part of idle that waits for data."""
    host_ns: int
    """The part of idle in which the CPU has given the device nothing to do."""
    one_off_ns: int
    """The part of idle in which the CPU does what it does once: it loads modules, allocates, compiles."""
    gaps_ns: int
    """The part of idle in which work was launched, or the CPU waited in a call."""
    unknown_ns: int
    """The part of idle before work whose launch the trace doesn't have."""
    idle_comm_ns: int
    """The part of idle in which a GPU waits for a collective on the CPU."""
    wait_ns: int | None
    transfer_ns: int | None

    @property
    def exposed_comm_ns(self) -> int:
        """Communication while nothing computes, wherever it runs."""
        return self.exposed_transfer_ns + self.exposed_wait_ns + self.idle_comm_ns

    @property
    def busy_ns(self) -> int:
        """The step without waiting for slower ranks."""
        return self.span_ns - self.exposed_wait_ns


@dataclass(frozen=True)
class Traced:
    """`variants/ID/trace.json`."""

    schema: int
    files: Mapping[str, Stamp]
    """The traces that this was made from, by name."""
    steps: tuple[int, ...]
    """The steps whose mean the figures are; empty where the traces have none in common."""
    num_steps: int
    """The number of steps that all traces have."""
    ranks: Mapping[int, RankBreakdown]
    """Ranks whose trace could be read."""
    notes: tuple[Finding, ...]
    operators_ns: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Compute in a step by operator, on a GPU by kernel: the mean of all steps, by rank. Of a process with
    several GPUs it isn't known which of them computed what."""
    bubbles: Mapping[int, Bubble] = field(default_factory=dict)
    """The bubbles of `steps` by rank, of stages that wait for others."""
    of_host: tuple[int, ...] = ()
    """Ranks in whose traces no GPU works; older files don't say."""
    savings: tuple[Saving, ...] = ()
    """How much shorter a step would be without its parts; not known of a process with several GPUs."""
    cpu: Mapping[int, CpuFacts] = field(default_factory=dict)
    """What the CPU does in every one of `steps`, by rank."""

    def __post_init__(self) -> None:
        """Refuses times and notes that no trace has: the file may be anyone's, and reports are made of them.

        Raises:
            ValueError: a time is longer than 64 bits of nanoseconds, or a note is of no kind.
        """
        of_ranks = (ns for rank in self.ranks.values() for ns in astuple(rank))
        of_operators = (ns for operators in self.operators_ns.values() for ns in operators.values())
        of_savings = (1000 * each.saved_us for each in self.savings)
        if any(ns is not None and not abs(ns) < _MOST_NS for ns in chain(of_ranks, of_operators, of_savings)):
            raise ValueError("it has times that no trace has")
        try:
            for note in self.notes:
                with_figures(note)
        except (LookupError, TypeError, ArithmeticError) as error:
            raise ValueError("it has notes that no trace has") from error


def read_traced(run: RunDir, variant_id: str) -> Traced | None:
    """The figures of the variant's traces; `None` if it has none. Notes say which can't be read."""
    traces = [*rank_files(run.variant(variant_id), ".pt.trace.json.gz").values()]
    if not traces:
        return None
    stamps = {path.name: stamp_of(path) for path in traces}
    kept: Traced | None = None
    with suppress(MachineError):  # what can't be read is made again
        kept = run.read_any(run.traced(variant_id), Traced)
    if kept is not None and kept.schema == SCHEMA and kept.files == stamps:
        return kept
    of_all = [*run.path.glob("variants/*/rank*.pt.trace.json.gz")]
    found = _analysed(run, traces, stamps, of_all)
    with suppress(MachineError):  # where it can't be written, the traces are read each time
        write_in(run, run.traced(variant_id), as_json(found).encode(), is_asked=False)
    return found


def _analysed(
    run: RunDir, traces: Sequence[Path], stamps: Mapping[str, Stamp], of_all: Sequence[Path]
) -> Traced:
    # Imports numpy; with the outcome at hand no report needs it.
    from gpurun.launcher.errors import TraceError
    from gpurun.launcher.trace.analysis.analyse import analyse
    from gpurun.launcher.trace.analysis.digest import SEVERAL

    try:
        analysis = analyse(traces, among=of_all, within=run.within)
    except TraceError as error:
        note = relative_to(run.path, noticed("not-read", why=str(error)))
        return Traced(SCHEMA, stamps, (), 0, {}, (note,))
    named = analysis.ranked.notes  # ranks that aren't in the trace are in the names of our own files
    notes = tuple(
        relative_to(run.path, note)  # as everywhere in a comparison: the run may be moved
        for note in of_level(analysis.report.findings, "detail")
        if note not in named and note.figures["case"] != SEVERAL  # each replica has its own figures
    )
    ranks = analysis.report.ranks
    steps, means = quiet_steps(ranks)
    operators = {rank.rank: operators_ns(rank) for rank in ranks if not rank.devices}
    of_host = tuple(rank.rank for rank in ranks if not rank.kernels)
    stages = analysis.stages_in(set(steps))
    bubbles = {rank: each.bubble for each in stages for rank in each.ranks if each.bubble is not None}
    savings = () if any(rank.devices for rank in ranks) else analysis.report.savings
    return Traced(
        SCHEMA,
        stamps,
        steps,
        len(common_steps(ranks)),
        means,
        notes,
        operators,
        bubbles,
        of_host,
        savings,
        _cpu_of(ranks, analysis.cpu_in(set(steps))),
    )


def _cpu_of(ranks: Sequence["RankTrace"], cpu: Mapping[int, CpuFacts]) -> dict[int, CpuFacts]:
    """By rank; of replicas in one process only what holds for all of them."""
    found = dict(cpu)
    for rank in ranks:
        if rank.devices and rank.rank in cpu:
            found |= {number: cpu[rank.rank].of_job for number, _ in _replicas(ranks)}
    return found


def of_devices(traced: Traced | None, devices: Sequence[str]) -> Traced | None:
    """The figures of the traces for these devices: nothing for a GPU whose work they lack.

    Where CUPTI refuses, since another profiler has it, torch records the CPU alone, and reports no error.
    """
    if traced is None or not traced.of_host or devices[0].startswith(CPU.name):
        return traced
    note = noticed("no-gpu-work", ranks=traced.of_host, who=ranks_text(traced.of_host))
    return _without(traced, traced.of_host, note)


def of_timed(traced: Traced | None, timed_ms: Mapping[int, float]) -> Traced | None:
    """The figures of traces next to a timed step; none where the traced steps are far shorter.

    They would be the shares of steps that aren't the ones that take the time, such as those of an input
    pipeline that delivers several batches at once.

    Args:
        traced: the figures.
        timed_ms: each rank's step without what other load explains.
    """
    traced_ms = {rank: each.span_ns / 1e6 for rank, each in traced.ranks.items()} if traced else {}
    short = [rank for rank, ms in traced_ms.items() if ms < LEAST_OF_TIMED * timed_ms.get(rank, 0.0)]
    if traced is None or not short:
        return traced
    rank = min(short, key=lambda rank: traced_ms[rank] / timed_ms[rank])
    times = {"traced_ms": traced_ms[rank], "timed_ms": timed_ms[rank]}
    return _without(traced, traced.ranks, noticed("traced-short", who=ranks_text([rank]), **times))


def _without(traced: Traced, ranks: Collection[int], note: Finding) -> Traced:
    """The traces without the figures of `ranks`, with the reason."""
    known = {rank: found for rank, found in traced.ranks.items() if rank not in ranks}
    return replace(
        traced,
        ranks=known,
        steps=traced.steps if known else (),
        operators_ns={rank: ns for rank, ns in traced.operators_ns.items() if rank in known},
        savings=(),
        notes=(*traced.notes, note),
    )


def operators_ns(rank: "RankTrace") -> dict[str, int]:
    """Compute of the rank's mean step by kernel; by operator where no GPU worked."""
    kernels = [
        (kernel.name, kernel.device_us) for kernel in rank.per_step.kernels if kernel.kind == "compute"
    ]
    found: dict[str, float] = {}
    computing = (op for op in rank.per_step.ops if host_kind("cpu_op", op.name) is HostKind.OP)
    for name, us in kernels or [(op.name, op.host_us) for op in computing]:
        found[short_name(name)] = found.get(short_name(name), 0.0) + us / max(1, len(rank.steps))
    longest = sorted(found, key=lambda name: -found[name])[:MOST_OPERATORS]
    return {name: round(1000 * found[name]) for name in longest}


def short_name(kernel: str) -> str:
    """`at::native::reduce_kernel` for a kernel's name with its template and types."""
    return re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].strip() or kernel


def quiet_steps(ranks: Sequence["RankTrace"]) -> tuple[tuple[int, ...], dict[int, RankBreakdown]]:
    """Steps that all ranks have, and their mean: the half in which all ranks together were busy least.

    What else runs on a machine only ever adds to a step; waiting doesn't count here, for it is what the other
    ranks have to do, and belongs to the outcome. A mean of whole steps, unlike medians of each part, adds up,
    and its ranks belong together: what one waits is what another still computes. Several steps, since a
    single one has parts that are long or short by chance. All of them where long steps come back, as with
    input that is ready in bursts: those are the program's own.
    """
    by_rank = {
        number: {step.step: rank_breakdown(step) for step in steps} for number, steps in _replicas(ranks)
    }
    common = common_steps(ranks)
    if not common:
        return (), {}
    busy_ns = {number: sum(steps[number].busy_ns for steps in by_rank.values()) for number in sorted(common)}
    chosen = _chosen(busy_ns)
    return tuple(sorted(chosen)), {
        rank: mean_breakdown([steps[number] for number in chosen]) for rank, steps in by_rank.items()
    }


def _chosen(busy_ns: Mapping[int, int]) -> list[int]:
    """The steps that are busy least: half of all, or all where at least two and half of the rest are long."""
    ordered = sorted(busy_ns, key=busy_ns.__getitem__)
    quiet, rest = ordered[: (len(ordered) + 1) // 2], ordered[(len(ordered) + 1) // 2 :]
    long_ns = LONG_STEP * mean(busy_ns[number] for number in quiet)
    num_long = sum(busy_ns[number] > long_ns for number in rest)
    return ordered if num_long >= max(2, len(rest) / 2) else quiet


def common_steps(ranks: Sequence["RankTrace"]) -> set[int]:
    """The steps that all ranks have."""
    found = [{step.step for step in steps} for _, steps in _replicas(ranks)]
    return set.intersection(*found) if found else set()


def _replicas(ranks: Sequence["RankTrace"]) -> list[tuple[int, Sequence["StepBreakdown"]]]:
    """Steps by rank; of a process that has all devices, as `dp` does, by device: each is a replica."""
    devices = ranks[0].devices if len(ranks) == 1 else ()
    if devices and all(each.device.isdecimal() for each in devices):
        return [(int(each.device), each.steps) for each in devices]
    return [(rank.rank, rank.steps) for rank in ranks]


def mean_breakdown(steps: Sequence[RankBreakdown]) -> RankBreakdown:
    """The mean step in whole ns; idle takes what the rounding of the others leaves, so that it adds up."""
    means: dict[str, int | None] = {}
    for each in fields(RankBreakdown):
        values = [getattr(step, each.name) for step in steps]
        means[each.name] = None if None in values else round(mean(values))
    found = RankBreakdown(**means)  # type: ignore[arg-type]
    exposed_ns = found.exposed_transfer_ns + found.exposed_wait_ns + found.exposed_memcpy_ns
    return replace(found, idle_ns=found.span_ns - found.compute_ns - exposed_ns - found.other_steps_ns)


def rank_breakdown(step: "Breakdown") -> RankBreakdown:
    """The stretch in whole nanoseconds, which the trace's µs hold exactly."""
    idle = step.idle_by_cause_us
    by_part: dict[str, int] = {f"{part}_ns": round(us * 1000) for part, us in idle.by_part.items()}
    return RankBreakdown(
        span_ns=round(step.span_us * 1000),
        compute_ns=round(step.compute_us * 1000),
        exposed_transfer_ns=round(step.exposed_transfer_us * 1000),
        exposed_wait_ns=round(step.exposed_wait_us * 1000),
        exposed_memcpy_ns=round(step.exposed_memcpy_us * 1000),
        other_steps_ns=round(step.other_steps_us * 1000),
        idle_ns=round(step.idle_us * 1000),
        **by_part,
        idle_comm_ns=round(idle.comm_wait * 1000),
        wait_ns=None if step.wait_us is None else round(step.wait_us * 1000),
        transfer_ns=None if step.transfer_us is None else round(step.transfer_us * 1000),
    )


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
    one_off_ms: float | None = None
    """The part of idle in which the CPU does what it does once, such as compiling."""
    gaps_ms: float | None = None
    """The part of idle in which work was launched, or the CPU waited in a call."""
    unknown_ms: float | None = None
    """The part of idle before work whose launch the trace doesn't have."""
    wait_ms: float | None = None
    """In collectives until the last rank came, whatever overlaps it; `None` with one rank's trace only."""
    transfer_ms: float | None = None
    """In collectives after that."""
    exposed_comm_ms: ExposedComm = ExposedComm()
    bubble: Bubble | None = None
    """The bubble of its stage, in the same traced steps; `None` where it is in no pipeline."""
    cpu: CpuFacts = field(default_factory=CpuFacts)
    """What its trace shows of the CPU in each of the same steps, and what the job has in use."""
    savings_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds that a traced step would be shorter without a part on all ranks, and, as `rank`, without
    this rank's work beyond that of the others; `ranks` (of those it names) and `changing` as in `Saving`.
    By a replay, empty where there is none."""
    queue_percent: float | None = None
    """The share of its step that it waited for a core that processes of others had; of a traced GPU, at most
    the share in which that GPU had nothing to do."""
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
                _one_rank(measured, rank, device, local_batch),
                host=nodes[node_of_device(device)].host if nodes else None,
                trace=traces[rank].relative_to(run.path).as_posix() if rank in traces else None,
            ),
            traced,
            alone,
        )
        for rank, (device, local_batch) in enumerate(zip(devices, split, strict=True))
    )


def _one_rank(measured: MeasuredVariant, rank: int, device: str, local_batch: int | None) -> RankFigures:
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
        memory_gib={part: num_bytes / GIB for part, num_bytes in memory.parts.items()} if memory else {},
        reserved_gib=memory.reserved / GIB if memory and memory.reserved is not None else None,
        cpu=CpuFacts(remedies=remedies_of(measured.variant)),
    )


def with_breakdown(figures: RankFigures, traced: Traced | None, alone: bool = False) -> RankFigures:
    """The rank's figures with what its trace adds to them; one device `alone` has no communication."""
    breakdown = traced.ranks.get(figures.rank) if traced else None
    is_gpu = not figures.device.startswith(CPU.name)
    if traced is None or breakdown is None:  # whether a GPU had work meanwhile isn't known
        return replace(figures, queue_percent=None) if is_gpu else figures
    operators_ns, cpu = traced.operators_ns.get(figures.rank, {}), traced.cpu.get(figures.rank, CpuFacts())
    idle_ms: dict[str, Any] = {f"{part}_ms": getattr(breakdown, f"{part}_ns") / 1e6 for part in IDLE_PARTS}
    exposed_ms = None if alone else breakdown.exposed_comm_ns / 1e6
    savings = (each for each in traced.savings if each.parallelism is None and each.concerns(figures.rank))
    queued = figures.queue_percent
    if queued is not None and is_gpu and breakdown.span_ns:
        queued = min(queued, 100 * breakdown.idle_ns / breakdown.span_ns)
    return replace(
        figures,
        queue_percent=queued,
        span_ms=breakdown.span_ns / 1e6,
        compute_ms=breakdown.compute_ns / 1e6,
        exposed_transfer_ms=breakdown.exposed_transfer_ns / 1e6,
        exposed_wait_ms=breakdown.exposed_wait_ns / 1e6,
        exposed_memcpy_ms=breakdown.exposed_memcpy_ns / 1e6,
        other_steps_ms=breakdown.other_steps_ns / 1e6,
        idle_ms=breakdown.idle_ns / 1e6,
        **idle_ms,
        wait_ms=None if breakdown.wait_ns is None else breakdown.wait_ns / 1e6,
        transfer_ms=None if breakdown.transfer_ns is None else breakdown.transfer_ns / 1e6,
        exposed_comm_ms=replace(figures.exposed_comm_ms, trace=exposed_ms),
        operators_ms={name: ns / 1e6 for name, ns in operators_ns.items()},
        bubble=traced.bubbles.get(figures.rank),
        savings_ms={each.part: each.saved_us / 1000 for each in savings},
        cpu=replace(cpu, remedies=tuple(sorted({*cpu.remedies, *figures.cpu.remedies}))),
    )


def remedies_of(variant: Variant) -> tuple[Remedy, ...]:
    """The remedies that the job itself puts to use."""
    options = variant.calls.get("compile")
    is_compiled = variant.compile or (options is not None and not options.get("disable"))
    return ("torch.compile",) if is_compiled else ()


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
APART_OF_STEP = 0.05


def disagreement(exposed: ExposedComm, interval: Interval | None, step_ms: float) -> tuple[Finding, ...]:
    """A finding where trace and ablation differ by more than 30 % of the ablation and 5 % of the step.

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
    ways = (
        [(rank.step_ms, rank.exposed_comm_ms.ablation) for rank in timed],
        [(rank.span_ms, rank.exposed_comm_ms.trace) for rank in timed],
    )
    works = [[ms - comm_ms for ms, comm_ms in way if ms is not None and comm_ms is not None] for way in ways]
    known = [works_ms for works_ms in works if works_ms and len(works_ms) == len(timed)]
    works_ms = next((each for each in known if _is_clear(each)), known[-1] if known else None)
    if works_ms is None:
        works_ms = [sum(rank.phases_ms.get(name, 0.0) for name in BEFORE_COMMUNICATION) for rank in timed]
    return max(zip(works_ms, timed, strict=True), key=lambda pair: pair[0], default=(0.0, None))[1]


def _is_clear(works_ms: Collection[float]) -> bool:
    """Whether one rank has more work than all others, by more than chance makes of equal ranks."""
    most, *others = sorted(works_ms, reverse=True)
    return not others or most > (1 + ALIKE) * others[0]
