"""What our report says about a case, and whether that is what was injected."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from gpurun.launcher.compare.figures.ranks import RankFigures, Traced, read_traced, with_breakdown
from gpurun.launcher.compare.model import StepTime, VariantResult
from gpurun.launcher.compare.variant_causes import main_cause
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.trace.causes import OF_HOST, Cause
from tests.measured import measured
from tests.truth.on_gpu import retell
from tests.truth.plan import FAULTS, Case, Lengths, Session, capture_id, delays_file, lengths_file

BOUND = 0.15
"""How far the reported size may be from the injected one."""
ADDED = ("input", "copies", "host")
"""Faults that add to what a healthy step loses in the same way."""


@dataclass(frozen=True)
class Verdict:
    """A case and what was reported of it."""

    case: Case
    injected_ms: float
    loss: Cause | None

    @property
    def reported(self) -> str:
        if self.loss is None:
            return "none"
        return "host" if self.loss.part in OF_HOST else self.loss.part

    @property
    def size_error(self) -> float:
        """Reported size over injected size, less 1; 0 where none of the two is there.

        Of what a healthy rank loses as well (input, copies, time of the CPU) something was added: the growth
        counts. A link measures all of its collective, and a rank waits for all that another one does longer.
        """
        if self.loss is None or not self.injected_ms:
            return 0.0
        reported_ns = self.loss.more_ns if self.reported in ADDED else self.loss.lost_ns
        return (reported_ns or 0.0) / 1e6 / self.injected_ms - 1

    @property
    def right(self) -> bool:
        """Cause, ranks and size."""
        ranks = () if self.loss is None else self.loss.ranks
        right = (self.reported, ranks) == (self.case.fault, self.case.ranks)
        return right and abs(self.size_error) <= BOUND

    def __str__(self) -> str:
        case = self.case
        where = f"on {list(case.ranks)} of {list(case.split)}"
        injected = f"{case.id}: {case.fault} of {self.injected_ms:.1f} ms {where}"
        return f"{injected}; reported: {self.loss.text if self.loss else 'nothing'}"


def verdicts(session: Session) -> list[Verdict]:
    """Of all cases, each compared with the reference of its series."""
    run = RunDir(Path(session.run_dir))
    found = []
    for series in session.series:
        reference, *cases = series.cases
        for case in cases:
            on_gpu = case.fault == "copies"
            quietest = quietest_capture(run, case, session.num_captures)
            own = result(run, case, quietest, on_gpu)
            other = result(run, reference, quietest_capture(run, reference, session.num_captures), on_gpu)
            loss = main_cause(own, other)
            if case.fault == "none":
                loss = loss or main_cause(other, own)
            found.append(Verdict(case, injected_ms(run, case, quietest), loss))
    return found


def quietest_capture(run: RunDir, case: Case, num_captures: int) -> str:
    """The capture in which all ranks together were busy least: what else runs only ever adds to a step."""
    return min(
        (capture_id(case, number) for number in range(num_captures)), key=lambda id_: busy_ns(run, id_)
    )


def busy_ns(run: RunDir, variant_id: str) -> int:
    """Of all ranks together, in a mean step."""
    return sum(rank.busy_ns for rank in traced_of(run, variant_id).ranks.values())


def traced_of(run: RunDir, variant_id: str) -> Traced:
    """What the report says of its traces."""
    traced = read_traced(run, variant_id)
    assert traced is not None
    assert traced.steps, traced.notes
    return traced


def injected_ms(run: RunDir, case: Case, variant_id: str) -> float:
    """The size of the fault in the steps that the report speaks of, timed by those who brought it about."""
    steps = traced_of(run, variant_id).steps
    if case.fault == "transfer":
        delays_ms = read_json(delays_file(str(run.path), variant_id), list[float])
        return mean(delays_ms[step - 1] for step in steps)
    by_rank = []
    for rank in range(len(case.split)):
        lengths = read_json(lengths_file(str(run.path), variant_id, rank), list[Lengths])
        by_rank.append([lengths[step - 1] for step in steps])
    if case.fault in ADDED:
        return mean(each.fault_ms for rank in case.ranks for each in by_rank[rank])
    tasks_ms = [mean(each.work_ms + each.fault_ms for each in lengths) for lengths in by_rank]
    return max(tasks_ms) - min(tasks_ms) if case.ranks else 0.0


def result(run: RunDir, case: Case, variant_id: str, on_gpu: bool) -> VariantResult:
    """A capture of the case as the comparison holds it, with figures from its traces alone."""
    traced = traced_of(run, on_gpu_id(run, case, variant_id) if on_gpu else variant_id)
    assert len(traced.ranks) == len(case.split), traced.notes
    ranks = tuple(
        with_breakdown(RankFigures(rank, f"cpu:{rank}", samples, None, {}, None, None), traced)
        for rank, samples in enumerate(case.split)
    )
    step_ms = max(rank.span_ms or 0.0 for rank in ranks)
    return measured(
        case.id,
        case.split,
        step_ms=StepTime(step_ms, None),
        exposed_comm_ms=ranks[0].exposed_comm_ms,
        ranks=ranks,
    )


def on_gpu_id(run: RunDir, case: Case, variant_id: str) -> str:
    """The variant that holds the traces of `variant_id` as those of a GPU."""
    gpu_id = f"{variant_id}-gpu"
    for rank in range(len(case.split)):
        if not run.trace(gpu_id, rank).exists():
            retell(run.trace(variant_id, rank), run.trace(gpu_id, rank))
    return gpu_id


def confusion(found: Iterable[Verdict]) -> list[Sequence[str]]:
    """A row for each injected cause: how often each one was reported."""
    counts = Counter((verdict.case.fault, verdict.reported) for verdict in found)
    return [[fault, *(str(counts[fault, other] or "") for other in FAULTS)] for fault in FAULTS]
