"""Whether a variant became slower by more than a threshold, between two versions of the code or two runs."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.load_findings import cool_down, less_load, load_percent, throttled_in
from gpurun.launcher.compare.model import Difference, Gate, GateRow, VariantResult
from gpurun.launcher.compare.ranking import Differences, differences_of, in_cpu_time, is_ranked
from gpurun.launcher.compare.variant_causes import cause, why_slower
from gpurun.launcher.findings.finding import Finding, finding, reason, with_figures
from gpurun.launcher.findings.run_cases import GATED, LONGER_BY
from gpurun.launcher.plan.model import GatePlan, Metric, Plan, Side
from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import (
    MIN_LAUNCHES,
    POWER,
    UNKNOWN,
    Bounded,
    Estimate,
    Outcome,
    bounded,
    is_spent,
    launches_to_decide,
    next_look,
    paired,
    percent_from_log,
    verdict_of,
)
from gpurun.launcher.stats.schedule import MOST_BUDGET_S, MOST_REPETITIONS, too_long
from gpurun.launcher.trace.causes import to_do
from gpurun.launcher.units import (
    TWICE,
    format_factor,
    format_number,
    format_percent,
    interval_figures,
    round_up,
)

SLOWER: Outcome = "slower"
NOT_SLOWER: Outcome = "not slower"
UNDECIDED: Outcome = "undecided"


def row_of(
    label: str,
    ids: tuple[str, str],
    times_ms: tuple[float | None, float | None],
    found: Bounded,
    launches: int,
    why: str | None = None,
) -> GateRow:
    """A variant's row; with a reason why nothing can be said, it is undecided."""
    if why is None and found.ci is None:
        why = reason("few-of-each", num_launches=launches, least=MIN_LAUNCHES)
    if why:
        found = replace(found, outcome=UNDECIDED, seen_percent=None)
    (a, b), (a_ms, b_ms) = ids, times_ms
    return GateRow(**vars(found), label=label, a=a, b=b, a_ms=a_ms, b_ms=b_ms, launches=launches, why=why)


def gate_of(threshold_percent: float, before: str, rows: Sequence[GateRow], metric: Metric = "wall") -> Gate:
    """The outcome of a gate, from its rows; a gate over nothing is undecided.

    Args:
        threshold_percent: the largest difference that is allowed.
        before: where A is from.
        rows: of all variants.
        metric: what is compared.
    """
    outcomes = {row.outcome for row in rows}
    outcome = SLOWER if SLOWER in outcomes else NOT_SLOWER if outcomes == {NOT_SLOWER} else UNDECIDED
    return Gate(threshold_percent, outcome, before, tuple(rows), metric)


def gate_findings(
    gate: Gate,
    undecided: Sequence[Finding] = (),
    queue_percent: float | None = None,
    grown: Sequence[Finding] = (),
) -> tuple[Finding, ...]:
    """The outcome of a gate, and of an undecided one what it lacks.

    Args:
        gate: over all variants.
        undecided: why it is undecided, and what to do about that.
        queue_percent: of a step that its worst rank waited for cores under other load.
        grown: why the slowest variant is slower, and what to do about that.
    """
    answer = finding(
        "gate",
        before=gate.before,
        threshold_percent=gate.threshold_percent,
        queue_percent=queue_percent if gate.metric == "wall" else None,  # CPU time has no waiting in it
        **FIGURES[gate.outcome](gate),
    )
    more = (*undecided, *_visible(gate)) if gate.outcome == UNDECIDED else ()
    if gate.outcome == SLOWER:
        more = tuple(grown) or (_advice("parts"),)
    return (answer, *more, *([finding("plan-note", case="cpu-time")] if gate.metric != "wall" else []))


def _of_slower(gate: Gate) -> dict[str, Any]:
    """The slowest variant, by how much, and how many others are slower."""
    first, *others = sorted(gate.of(SLOWER), key=lambda row: -(row.percent or 0.0))
    percent = first.percent or 0.0
    more = GATED[gate.metric][0].format(by=format_percent(percent, first.ci))
    if percent >= TWICE:
        more = LONGER_BY[gate.metric].format(by=format_factor(percent, first.ci))
    return {
        "who": first.label,
        "more": more,
        "percent": percent,
        **interval_figures(percent, first.ci),
        "num_more": len(others) or None,
    }


def _of_passing(gate: Gate) -> dict[str, Any]:
    """The variant that is closest to being slower."""
    worst = max(gate.rows, key=lambda row: row.ci[1] if row.ci else 0.0)
    is_one = len(gate.rows) == 1
    return {
        "who": worst.label if is_one else f"none of {len(gate.rows)} variants",
        "no_more": GATED[gate.metric][1 if is_one else 2],
        "where": None if is_one else worst.label,
        "change_percent": worst.percent,
        "ci": worst.ci,
    }


def _of_undecided(gate: Gate) -> dict[str, Any]:
    """The first undecided variant, with the reason if there is another one than chance."""
    is_more = GATED[gate.metric][2]
    if not gate.rows:
        return {"who": "any variant", "is_more": is_more, "why": reason("other-work")}
    first, *others = gate.of(UNDECIDED)
    is_wide = first.ci is not None and first.ci[1] - first.ci[0] > MOST_SHOWN
    has_figures = first.why is None and not is_wide
    return {
        "who": first.label,
        "is_more": is_more,
        "num_more": len(others) or None,
        "why": reason("scattered") if is_wide and not first.why else first.why,
        "change_percent": first.percent if has_figures else None,
        "ci": first.ci if has_figures else None,
    }


FIGURES: Mapping[Outcome, Callable[[Gate], dict[str, Any]]] = {
    SLOWER: _of_slower,
    NOT_SLOWER: _of_passing,
    UNDECIDED: _of_undecided,
}


def _visible(gate: Gate) -> tuple[Finding, ...]:
    """The smallest change that it would have seen in whichever undecided variant; none if that is large."""
    seen = max((row.seen_percent or 0.0 for row in gate.of(UNDECIDED)), default=0.0)
    if not 0 < seen <= MOST_SHOWN:
        return ()
    least = f"{format_number(round_up(seen, 1), 1)} %"
    return (finding("plan-note", case="smallest-seen", chance_percent=100 * POWER, seen=least),)


MOST_SHOWN = 100.0
"""Percent; bounds that are farther apart say only that launches differ too much."""


def percent_text(gate: Gate) -> str:
    """The threshold as it was given: `3 %`."""
    return f"{gate.threshold_percent:g} %"


def changed_files(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Files of the user's code that differ, by their hashes in both."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# --- Of a run that launched two versions of the code in turns -----------------------------------------------


def gate_of_run(
    plan: Plan,
    differences: Differences,
    results: Sequence[VariantResult],
    looks: Sequence[Look],
    cores: int | None,
) -> tuple[Gate, tuple[Finding, ...]] | None:
    """The result of a gate's run so far, and what it says; `None` for another run.

    Neighbouring launches of both versions are pairs: what the machine does to one, it does to the other.

    Args:
        plan: of the run.
        differences: of its variants.
        results: of all variants.
        looks: those taken so far.
        cores: of the machine, as far as the run may use them; `None`: it isn't known.
    """
    gate = plan.gate
    if gate is None:
        return None
    by_id = {result.id: result for result in results}
    if gate.metric != "wall":
        measured = {record.variant.id: in_cpu_time(record) for record in differences.measured.values()}
        differences = differences_of(measured, differences.baseline, differences.family.looks)
    pairs = [_Pair(gate, by_id[a], by_id[b], differences) for a, b in gate.pairs]
    found = gate_of(
        gate.threshold_percent,
        f"{'at' if gate.a.commit else 'in'} {gate.a.name}",
        [each.row(looks, len(pairs)) for each in pairs],
        gate.metric,
    )
    lacks = {each.text: each for pair in pairs for each in pair.lacks(plan.budget_s or 0.0, looks)}
    load = load_percent(results) if gate.metric == "wall" else None  # CPU time has no waiting in it
    less = () if load is None else (replace(less_load(results, cores), weight=0.0),)
    slowest = max(found.of(SLOWER), key=lambda row: row.percent or 0.0, default=None)
    grown = () if slowest is None else _grown(slowest.label, by_id[slowest.a], by_id[slowest.b])
    said = gate_findings(found, (*lacks.values(), *less), load, grown)
    if gate.a.python == gate.b.python and all(pair.has_same_code for pair in pairs):
        said = (*said, _advice("same-code", weight=1.0))
    return found, said


def _grown(label: str, a: VariantResult, b: VariantResult) -> tuple[Finding, ...]:
    """The cause that traces of both versions show, and where more is to be seen."""
    if a.traced_steps is None or b.traced_steps is None:
        return (_advice("no-versions"),)
    found = why_slower(b, a)
    why = (with_figures(cause(found, b, 1.0, "the version before"), where=label),) if found else ()
    return (*why, to_do("gate", "versions", a=a.id, b=b.id))


def _advice(name: str, weight: float = 0.0) -> Finding:
    return to_do("gate", name, weight)


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
    def is_hot(self) -> bool:
        return bool(throttled_in((self.a, self.b)))

    @property
    def has_same_code(self) -> bool:
        a, b = self.a.code, self.b.code
        return bool(a) and not changed_files(a, b)

    def row(self, looks: Sequence[Look], num_variants: int) -> GateRow:
        estimate, void = self.estimate, self.strays or self.lost
        threshold = self.gate.threshold_percent
        found = UNKNOWN if self.lost else bounded(estimate, threshold, looks, num_variants)
        times = self.time_ms(self.a), self.time_ms(self.b)
        launches = estimate.launches if estimate else 0
        why = void or (reason("throttled") if self.is_hot else None)
        row = row_of(self.label, (self.a.id, self.b.id), times, found, launches, why)
        return replace(row, is_open=row.outcome == UNDECIDED and not void)

    def time_ms(self, result: VariantResult) -> float | None:
        """Milliseconds that are compared: of a step, or of its CPU time."""
        if self.gate.metric == "wall":
            return result.step_ms.estimate if result.step_ms else None
        values = self.differences.values(result.id)
        return math.exp(fmean(values)) * (result.global_batch or 1) / 1e6 if values else None

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
                return reason("not-yet", where=side.name)
            return (
                reason("no-steps", where=side.name)
                if result.status == "ok"
                else f"{result.status} at {side.name}"
            )
        return None

    @property
    def strays(self) -> str | None:
        """Which file of the other version was loaded, which makes the comparison void."""
        a, b = self.gate.a, self.gate.b
        for side, other, result in ((a, b, self.a), (b, a, self.b)):
            found = strays(result.code, side, other, self.gate.shared)
            if found:
                more = len(found) - 1 or None
                return reason("strayed", where=side.name, file=found[0], num_more=more, other=other.name)
        return None

    def lacks(self, budget_s: float, looks: Sequence[Look]) -> tuple[Finding, ...]:
        """Why it is undecided, and what to do."""
        if self.strays:
            return (_advice("environments"),)
        if self.a.status == "failed":
            return (_advice("committed"),)
        found = (cool_down(),) if self.is_hot else ()
        return (*found, *self.time_needed(budget_s, looks)) if is_spent(looks) and not self.lost else found

    def time_needed(self, budget_s: float, looks: Sequence[Look]) -> tuple[Finding, ...]:
        """How long it would take to decide."""
        estimate, threshold = self.estimate, self.gate.threshold_percent
        if estimate is None or estimate.error is None:
            minutes = math.ceil(MIN_LAUNCHES * budget_s / max(looks[-1].launches, 1) / 60)
            return (finding("measure-longer", decides_minutes=minutes),)
        least = next_look(estimate.launches)  # those that there were haven't decided it
        per_launch_s = budget_s / estimate.launches
        launches = launches_to_decide(estimate, threshold, looks, len(self.gate.pairs))
        most = min(MOST_BUDGET_S / per_launch_s, MOST_REPETITIONS)
        num = max(launches, least) if launches else math.inf
        if num <= most:
            return (finding("measure-longer", decides_minutes=math.ceil(per_launch_s * num / 60)),)
        long = too_long(per_launch_s)
        equal = launches_to_decide(
            replace(estimate, centre=0.0), threshold, looks, len(self.gate.pairs)
        )  # if nothing had changed
        if equal is None or equal > most:
            scatter_percent = percent_from_log(estimate.error * math.sqrt(estimate.launches))
            noise = finding(
                "scatter-hides-it", case="gate", scatter_percent=scatter_percent, long=long, weight=1
            )
            has_load = self.gate.metric == "wall" and load_percent((self.a, self.b))
            return (noise, _advice("cpu-time", weight=0.5) if has_load else _advice("scatter"))
        return (
            finding("near-threshold", threshold_percent=threshold, long=long, weight=1),
            _advice("threshold"),
        )


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
        and not any(_is_below(path, shared_path) for shared_path in shared)
    ]


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def still_open(gate: Gate) -> tuple[str, ...]:
    """Variants that more launches may decide; none once the outcome is known."""
    if gate.outcome != UNDECIDED or not all(row.is_open for row in gate.of(UNDECIDED)):
        return ()
    return tuple(variant for row in gate.of(UNDECIDED) for variant in (row.a, row.b))


def rows_of_gate(gate: Gate, results: Sequence[VariantResult]) -> dict[str, Difference | None]:
    """How every variant compares with itself before, for the table: the version before is the baseline.

    Nothing, where CPU times are compared: the table has those of steps.
    """
    found: dict[str, Difference | None] = dict.fromkeys(result.id for result in results)
    for row in gate.rows if gate.metric == "wall" else ():
        if row.a_ms is not None:
            found[row.a] = Difference(None, None, "baseline")
        if row.percent is not None:
            verdict = "inconclusive" if row.why else verdict_of(row.percent, row.ci)
            found[row.b] = Difference(row.percent, row.ci, verdict, None if row.ci else row.why)
    return found
