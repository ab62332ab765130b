"""What the traces of a variant say about its ranks, kept beside them so that no report reads them again.

Traces grow to hundreds of megabytes, a report is asked for many times: `variants/ID/trace.json` holds the
outcome, and is made anew when a trace is another file than the one that it was made from.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from launcher.errors import MachineError
from launcher.rundir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from launcher.trace.model import RankTrace, StepBreakdown

SCHEMA = 3

Stamp = tuple[int, int]
"""Size in bytes and time of the last change in ns."""


@dataclass(frozen=True)
class RankBreakdown:
    """One step of one rank, in ns: compute + exposed transfer, wait and memcpy + idle = span, exactly."""

    span_ns: int
    compute_ns: int
    exposed_transfer_ns: int
    exposed_wait_ns: int
    exposed_memcpy_ns: int
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


@dataclass(frozen=True)
class Traced:
    """`variants/ID/trace.json`."""

    schema: int
    files: Mapping[str, Stamp]
    """The traces that this was made from, by name."""
    step: int | None
    """The step that the figures are of; `None` where the traces have none in common."""
    ranks: Mapping[int, RankBreakdown]
    """Ranks whose trace could be read."""
    warnings: tuple[str, ...]


def read_traced(run: RunDir, variant_id: str) -> Traced | None:
    """What the variant's traces say; `None` if it has none. Traces that can't be read are warnings."""
    traces = sorted(run.variant(variant_id).glob("rank*.pt.trace.json.gz"))
    if not traces:
        return None
    stamps = {path.name: _stamp(path) for path in traces}
    kept = _kept(run.traced(variant_id))
    if kept is not None and kept.schema == SCHEMA and kept.files == stamps:
        return kept
    found = _analysed(run.path, traces, stamps)
    with suppress(MachineError):  # a run may lie on a medium that can't be written; then it is read each time
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
    from launcher.trace.analyse import analyse
    from launcher.trace.errors import TraceError

    try:
        analysis = analyse(traces)
    except TraceError as error:
        return Traced(SCHEMA, stamps, None, {}, (_relative(str(error), root),))
    named = set(analysis.ranked.warnings)  # ranks that aren't in the trace are in the names of our own files
    warnings = tuple(_relative(text, root) for text in analysis.report.warnings if text not in named)
    step, ranks = typical_step(analysis.report.ranks)
    return Traced(SCHEMA, stamps, step, ranks, warnings)


def _relative(text: str, root: Path) -> str:
    """Paths as everywhere in a comparison, from the run directory on; the run may be moved."""
    return text.replace(f"{root}/", "")


def typical_step(ranks: Iterable["RankTrace"]) -> tuple[int | None, dict[int, RankBreakdown]]:
    """One step that all ranks have, and its figures: the one nearest to the medians of all ranks' parts.

    A single step, unlike medians of each part, adds up, and its ranks belong together: what one waits is what
    another still computes. Unlike a mean, it isn't spoilt by one step in which something else ran; and the
    step of median length may be one in which one part was long by chance, and another short.
    """
    by_rank = {rank.rank: {step.step: rank_breakdown(step) for step in rank.steps} for rank in ranks}
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    if not common:
        return None, {}
    distance_ns = dict.fromkeys(sorted(common), 0)
    for steps in by_rank.values():
        parts_ns = {number: _parts_ns(steps[number]) for number in distance_ns}
        medians_ns = [median_low(values) for values in zip(*parts_ns.values(), strict=True)]
        for number, values in parts_ns.items():
            distance_ns[number] += sum(map(abs, map(sub, values, medians_ns)))
    number = min(distance_ns, key=distance_ns.__getitem__)
    return number, {rank: steps[number] for rank, steps in by_rank.items()}


def _parts_ns(step: RankBreakdown) -> tuple[int, ...]:
    """The step's length, and the parts of it that an explanation may speak of."""
    return (
        step.span_ns,
        step.compute_ns,
        step.exposed_transfer_ns,
        step.exposed_wait_ns,
        step.exposed_memcpy_ns,
        step.input_ns,
        step.host_ns,
        step.idle_comm_ns,
    )


def rank_breakdown(step: "StepBreakdown") -> RankBreakdown:
    """The step in whole nanoseconds, which the trace's µs hold exactly."""
    return RankBreakdown(
        span_ns=round(step.span_us * 1000),
        compute_ns=round(step.compute_us * 1000),
        exposed_transfer_ns=round(step.exposed_transfer_us * 1000),
        exposed_wait_ns=round(step.exposed_wait_us * 1000),
        exposed_memcpy_ns=round(step.exposed_memcpy_us * 1000),
        idle_ns=round(step.idle_us * 1000),
        input_ns=round(step.idle_by_cause_us.data * 1000),
        host_ns=round(step.idle_by_cause_us.host * 1000),
        idle_comm_ns=round(step.idle_by_cause_us.comm_wait * 1000),
        wait_ns=None if step.wait_us is None else round(step.wait_us * 1000),
        transfer_ns=None if step.transfer_us is None else round(step.transfer_us * 1000),
    )
