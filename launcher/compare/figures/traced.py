"""Figures of ranks from a variant's traces, kept next to them so that no report reads them again.

Traces grow to hundreds of megabytes, a report is asked for many times: `variants/ID/trace.json` holds the
outcome, and is made again when a trace is another file than the one that it was made from.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from gpurun.launcher.errors import MachineError
from gpurun.launcher.findings.finding import Finding, noticed, of_level, relative_to, with_figures
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.rundir.control import write_in
from gpurun.launcher.rundir.files import RunDir, as_json
from gpurun.launcher.rundir.paths import rank_files
from gpurun.launcher.trace.model import Bubble
from gpurun.launcher.units import ranks_text

if TYPE_CHECKING:
    from gpurun.launcher.trace.model import Breakdown, RankTrace, StepBreakdown

SCHEMA = 10
MOST_OPERATORS = 20
"""The number of operators to keep of each rank, the longest ones."""

TRACED = ("traced-far", "traced-short")
"""The cases of what is noticed where traced steps differ from the timed ones."""
LEAST_OF_TIMED = 0.5
"""A smaller share of the timed step is another kind of step."""
LONG_STEP = 1.3
"""Multiple of the quiet steps' mean from which on the work of a step differs, not only what else ran."""

Stamp = tuple[int, int]
"""Size in bytes and time of the last change in ns."""


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

    def __post_init__(self) -> None:
        """Refuses times and notes that no trace has: the file may be anyone's, and reports are made of them.

        Raises:
            ValueError: a time is longer than 64 bits of nanoseconds, or a note is of no kind.
        """
        of_ranks = (ns for rank in self.ranks.values() for ns in astuple(rank))
        of_operators = (ns for operators in self.operators_ns.values() for ns in operators.values())
        if any(ns is not None and abs(ns) >= _MOST_NS for ns in chain(of_ranks, of_operators)):
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
    stamps = {path.name: _stamp(path) for path in traces}
    kept = _kept(run, run.traced(variant_id))
    if kept is not None and kept.schema == SCHEMA and kept.files == stamps:
        return kept
    of_all = [*run.path.glob("variants/*/rank*.pt.trace.json.gz")]
    found = _analysed(run, traces, stamps, of_all)
    with suppress(MachineError):  # where it can't be written, the traces are read each time
        write_in(run, run.traced(variant_id), as_json(found).encode(), is_asked=False)
    return found


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _kept(run: RunDir, path: Path) -> Traced | None:
    """The earlier result; `None` if it is no longer to be read."""
    try:
        return run.read(path, Traced) if path.exists() else None
    except MachineError:
        return None


def _analysed(
    run: RunDir, traces: Sequence[Path], stamps: Mapping[str, Stamp], of_all: Sequence[Path]
) -> Traced:
    # Imports numpy; with the outcome at hand no report needs it.
    from gpurun.launcher.errors import TraceError
    from gpurun.launcher.trace.analysis.analyse import analyse
    from gpurun.launcher.trace.analysis.breakdown import SEVERAL

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
    return Traced(SCHEMA, stamps, steps, len(common_steps(ranks)), means, notes, operators, bubbles, of_host)


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
        notes=(*traced.notes, note),
    )


def operators_ns(rank: "RankTrace") -> dict[str, int]:
    """Compute of the rank's mean step by kernel; by operator where no GPU worked."""
    kernels = [
        (kernel.name, kernel.device_us) for kernel in rank.per_step.kernels if kernel.kind == "compute"
    ]
    found: dict[str, float] = {}
    for name, us in kernels or [(op.name, op.host_us) for op in rank.per_step.ops]:
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
    return RankBreakdown(
        span_ns=round(step.span_us * 1000),
        compute_ns=round(step.compute_us * 1000),
        exposed_transfer_ns=round(step.exposed_transfer_us * 1000),
        exposed_wait_ns=round(step.exposed_wait_us * 1000),
        exposed_memcpy_ns=round(step.exposed_memcpy_us * 1000),
        other_steps_ns=round(step.other_steps_us * 1000),
        idle_ns=round(step.idle_us * 1000),
        input_ns=round(step.idle_by_cause_us.data * 1000),
        host_ns=round(step.idle_by_cause_us.host * 1000),
        idle_comm_ns=round(step.idle_by_cause_us.comm_wait * 1000),
        wait_ns=None if step.wait_us is None else round(step.wait_us * 1000),
        transfer_ns=None if step.transfer_us is None else round(step.transfer_us * 1000),
    )
