"""The gate of a run that launched two versions of the code in turns."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpurun.launcher.compare.gate import (
    UNDECIDED,
    Gate,
    GateRow,
    changed_files,
    gate_of,
    row_of,
    slack_of,
)
from gpurun.launcher.compare.interference import COOL_DOWN, LESS_AT_ONCE
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Difference, VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.compare.variant_difference import Differences
from gpurun.launcher.plan.model import GatePlan, Plan, Side
from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.threshold import (
    UNKNOWN,
    Bounded,
    Estimate,
    bounded,
    launches_to_decide,
    paired,
)
from gpurun.launcher.stats.verdict import verdict_of
from gpurun.launcher.units import plural

MOST_BUDGET_S = 3600.0
"""Beyond that no budget is proposed."""
OWN_ENVIRONMENTS = (
    "A package is installed from the working copy (editable): give each version an environment that has its "
    "own, with --python-a and --python-b."
)
SAME_CODE = "Both versions loaded the same code: none of its files differs."


def gate_of_run(
    plan: Plan,
    differences: Differences,
    results: Sequence[VariantResult],
    looks: Sequence[Look],
) -> Gate | None:
    """What a gate's run has found so far; `None` for another run.

    Neighbouring launches of both versions are pairs: what the machine does to one, it does to the other.
    """
    gate = plan.gate
    if gate is None:
        return None
    by_id = {result.id: result for result in results}
    pairs = [_Pair(gate, by_id[a], by_id[b], differences) for a, b in gate.pairs]
    rows = [pair.row(looks, len(pairs)) for pair in pairs]
    advice = dict.fromkeys(text for pair in pairs for text in pair.advice(plan.budget_s or 0.0, looks))
    found = gate_of(gate.threshold_percent, f"at {gate.a.name}", rows, tuple(advice))
    is_same = gate.a.python == gate.b.python and all(pair.has_same_code for pair in pairs)
    return replace(found, details=(*found.details, SAME_CODE)) if is_same else found


@dataclass(frozen=True)
class _Pair:
    """One variant in both versions."""

    gate: GatePlan
    a: VariantResult
    b: VariantResult
    differences: Differences

    @property
    def estimate(self) -> Estimate | None:
        return paired(self.differences.family.differences(self.b.id, self.a.id))

    @property
    def slack_percent(self) -> float:
        return slack_of([rank.queue_percent for result in (self.a, self.b) for rank in result.ranks])

    @property
    def is_hot(self) -> bool:
        return any(rank.throttled for result in (self.a, self.b) for rank in result.ranks)

    @property
    def has_same_code(self) -> bool:
        a, b = self.a.code, self.b.code
        return bool(a) and not changed_files(a, b)

    def found(self, looks: Sequence[Look], num_variants: int) -> Bounded:
        if self.lost:
            return UNKNOWN
        threshold = self.gate.threshold_percent
        return bounded(self.estimate, threshold, looks, num_variants, self.slack_percent)

    def row(self, looks: Sequence[Look], num_variants: int) -> GateRow:
        times = tuple(result.step_ms.median if result.step_ms else None for result in (self.a, self.b))
        estimate = self.estimate
        launches = estimate.launches if estimate else 0
        found, why = self.found(looks, num_variants), self.lost or self.strays or self.hot
        row = row_of(self.label, (self.a.id, self.b.id), (times[0], times[1]), found, launches, why)
        return replace(row, is_open=row.outcome == UNDECIDED and not (self.lost or self.strays))

    @property
    def label(self) -> str:
        variant = self.differences.measured[self.b.id].variant
        without = {key: value for key, value in variant.varied.items() if key != "code"}
        return variant_label(replace(variant, varied=without))

    @property
    def lost(self) -> str | None:
        """Why there is nothing to compare, whatever is still measured."""
        for result, side in ((self.a, self.gate.a), (self.b, self.gate.b)):
            if is_ranked(result):
                continue
            if not self.differences.measured[result.id].finished:
                return f"not measured yet at {side.name}"
            return f"no steps at {side.name}" if result.status == "ok" else f"{result.status} at {side.name}"
        return None

    @property
    def strays(self) -> str | None:
        """Which file of the other version was loaded, which makes the comparison void."""
        a, b = self.gate.a, self.gate.b
        for side, other, result in ((a, b, self.a), (b, a, self.b)):
            found = strays(result.code, side, other, self.gate.shared)
            if found:
                more = f" and {plural(len(found) - 1, 'other file')}" if len(found) > 1 else ""
                return f"at {side.name} it loaded {found[0]}{more} of {other.name}"
        return None

    @property
    def hot(self) -> str | None:
        return "the clock of a GPU was throttled" if self.is_hot else None

    def advice(self, budget_s: float, looks: Sequence[Look]) -> list[str]:
        """What to do where it is undecided."""
        if self.strays:
            return [OWN_ENVIRONMENTS]
        found = [COOL_DOWN] if self.is_hot else []
        if self.slack_percent:
            waited = f"Ranks waited for a free core in up to {self.slack_percent:.1f} % of a step"
            found.append(f"{waited}, by which bounds are wider. {LESS_AT_ONCE}")
        is_spent = bool(looks) and looks[-1].fraction >= 1
        return [*found, self.time_needed(budget_s)] if is_spent and not self.lost else found

    def time_needed(self, budget_s: float) -> str:
        """How long it would take to decide."""
        estimate, threshold = self.estimate, self.gate.threshold_percent
        if estimate is None or estimate.error is None:
            return "Use a larger --budget, or a job whose launches are shorter."
        launches = launches_to_decide(estimate, threshold, self.slack_percent)
        s = budget_s * launches / estimate.launches if launches else math.inf
        if s > MOST_BUDGET_S:
            return f"That is too close to {threshold:g} % to be decided in an hour."
        return f"Deciding it takes about {plural(math.ceil(s / 60), 'minute')}: use a larger --budget."


def strays(code: Mapping[str, str], own: Side, other: Side, shared: Sequence[str] = ()) -> list[str]:
    """Files that a version loaded from the other one's directory, relative to that.

    Args:
        code: what it loaded, relative to the job's directory.
        own: the version that loaded it.
        other: the other one; one may be inside of the other.
        shared: paths below the root of b that both versions have.
    """
    if own.root == other.root:
        return []
    is_inner = _is_below(other.root, own.root)
    found = (os.path.normpath(os.path.join(os.path.realpath(own.job_dir), name)) for name in code)
    return [
        os.path.relpath(path, other.root)
        for path in found
        if _is_below(path, other.root)
        and (is_inner or not _is_below(path, own.root))
        and not any(_is_below(path, one) for one in shared)
    ]


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def still_open(gate: Gate) -> tuple[str, ...]:
    """Variants that more launches may decide; none once the outcome is known."""
    if gate.outcome != UNDECIDED or not all(row.is_open for row in gate.of(UNDECIDED)):
        return ()
    return tuple(variant for row in gate.of(UNDECIDED) for variant in (row.a, row.b))


def rows_of_gate(gate: Gate, results: Sequence[VariantResult]) -> dict[str, Difference | None]:
    """How every variant compares with itself before, for the table: the version before is the baseline."""
    found: dict[str, Difference | None] = dict.fromkeys(result.id for result in results)
    for row in gate.rows:
        if row.a_ms is not None:
            found[row.a] = Difference(None, None, "baseline")
        if row.percent is not None:
            verdict = "inconclusive" if row.why else verdict_of(row.percent, row.ci)
            found[row.b] = Difference(row.percent, row.ci, verdict)
    return found
