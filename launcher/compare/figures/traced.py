"""What the traces of a variant say about its ranks, kept next to them so that no report reads them again.

Traces grow to hundreds of megabytes, a report is asked for many times: `variants/ID/trace.json` holds the
outcome, and is made anew when a trace is another file than the one that it was made from.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.paths import is_own, rank_files

if TYPE_CHECKING:
    from gpurun.launcher.trace.model import Breakdown, RankTrace, StepBreakdown

SCHEMA = 5

Stamp = tuple[int, int]
"""Size in bytes and time of the last change in ns."""


@dataclass(frozen=True)
class RankBreakdown:
    """A step of one rank, in ns: compute + exposed transfer, wait and memcpy + other steps + idle = span."""

    span_ns: int
    compute_ns: int
    exposed_transfer_ns: int
    exposed_wait_ns: int
    exposed_memcpy_ns: int
    other_steps_ns: int
    """Only work of other steps ran."""
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
    ranks: Mapping[int, RankBreakdown]
    """Ranks whose trace could be read."""
    warnings: tuple[str, ...]


def read_traced(run: RunDir, variant_id: str) -> Traced | None:
    """What the variant's traces say; `None` if it has none. Traces that can't be read are warnings."""
    traces = [*rank_files(run.variant(variant_id), ".pt.trace.json.gz").values()]
    if not traces:
        return None
    stamps = {path.name: _stamp(path) for path in traces}
    kept = _kept(run.traced(variant_id))
    if kept is not None and kept.schema == SCHEMA and kept.files == stamps:
        return kept
    found = _analysed(run.path, traces, stamps)
    if is_own(run.variant(variant_id)):
        with suppress(MachineError):  # on a medium that can't be written, the traces are read each time
            write_json(run.traced(variant_id), found)
    return found


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _kept(path: Path) -> Traced | None:
    """What was found out before; `None` if that is no longer to be read."""
    try:
        return read_json(path, Traced) if path.exists() else None
    except MachineError:
        return None


def _analysed(root: Path, traces: Sequence[Path], stamps: Mapping[str, Stamp]) -> Traced:
    # Imports numpy; with the outcome at hand no report needs it.
    from gpurun.launcher.errors import TraceError
    from gpurun.launcher.trace.analysis.analyse import analyse
    from gpurun.launcher.trace.analysis.work_by_device import SEVERAL

    try:
        analysis = analyse(traces)
    except TraceError as error:
        return Traced(SCHEMA, stamps, (), {}, (_relative(str(error), root),))
    named = set(analysis.ranked.warnings)  # ranks that aren't in the trace are in the names of our own files
    warnings = tuple(
        _relative(text, root)
        for text in analysis.report.warnings
        if text not in named and SEVERAL not in text  # each replica has its own figures
    )
    steps, ranks = quiet_steps(analysis.report.ranks)
    return Traced(SCHEMA, stamps, steps, ranks, warnings)


def _relative(text: str, root: Path) -> str:
    """Paths as everywhere in a comparison, from the run directory on; the run may be moved."""
    return text.replace(f"{root}/", "")


def quiet_steps(ranks: Sequence["RankTrace"]) -> tuple[tuple[int, ...], dict[int, RankBreakdown]]:
    """Steps that all ranks have, and their mean: the half in which all ranks together were busy least.

    What else runs on a machine only ever adds to a step; waiting doesn't count here, for it is what the other
    ranks have to do, and belongs to the outcome. A mean of whole steps, unlike medians of each part, adds up,
    and its ranks belong together: what one waits is what another still computes. Several steps, since a
    single one has parts that are long or short by chance.
    """
    by_rank = {
        number: {step.step: rank_breakdown(step) for step in steps} for number, steps in _replicas(ranks)
    }
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    if not common:
        return (), {}
    busy_ns = {number: sum(steps[number].busy_ns for steps in by_rank.values()) for number in sorted(common)}
    chosen = sorted(busy_ns, key=busy_ns.__getitem__)[: (len(busy_ns) + 1) // 2]
    return tuple(sorted(chosen)), {
        rank: mean_breakdown([steps[number] for number in chosen]) for rank, steps in by_rank.items()
    }


def _replicas(ranks: Sequence["RankTrace"]) -> list[tuple[int, Sequence["StepBreakdown"]]]:
    """Steps by rank; of a process that has all devices, as `dp` does, by device: each is a replica."""
    devices = ranks[0].devices if len(ranks) == 1 else ()
    if devices and all(each.device.isdecimal() for each in devices):
        return [(int(each.device), each.steps) for each in devices]
    return [(rank.rank, rank.steps) for rank in ranks]


def mean_breakdown(steps: Sequence[RankBreakdown]) -> RankBreakdown:
    """The mean step in whole ns; idle takes what the rounding of the others leaves, so that it adds up."""
    means: dict[str, int | None] = {}
    for field in fields(RankBreakdown):
        values = [getattr(step, field.name) for step in steps]
        means[field.name] = None if None in values else round(mean(values))
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
