"""Two runs against each other: how much slower or faster each variant became, and whether that is sure."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gpurun.launcher.compare.gate import changed_files, gate_findings, gate_of, row_of
from gpurun.launcher.compare.label import value_text, variant_label
from gpurun.launcher.compare.load_findings import interference_in, throttled_in
from gpurun.launcher.compare.model import IN_RUN_A, Comparison, Difference, Gate, GateRow, VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.compare.variant_causes import cause, why_slower
from gpurun.launcher.findings.finding import Finding, finding, ranked, reason
from gpurun.launcher.grouping import leaves
from gpurun.launcher.jobfile.settings import SETTINGS, settings_for
from gpurun.launcher.plan.estimate import more_launches
from gpurun.launcher.plan.model import resolved_setting
from gpurun.launcher.splits import BALANCED
from gpurun.launcher.stats.core_waiting import waiting_bias
from gpurun.launcher.stats.estimates import (
    ALPHA,
    MIN_LAUNCHES,
    UNKNOWN,
    Estimate,
    bounded,
    percent_from_log,
    percent_interval,
    unpaired,
    verdict_of,
)
from gpurun.launcher.trace.causes import to_do
from gpurun.launcher.units import change_text, interval_figures

PASSING_FACTS = {
    "memory_available_gib",
    "used_gib",
    "utilisation_percent",
    "processes",
    "sm_clock_mhz",
    "power_w",
    "temperature_c",
    "cpu_mhz",
    "load_average",
}
"""Host facts of the moment: they differ between any two runs, also of one host."""


@dataclass(frozen=True)
class NamedVariant:
    """The id and the label of a variant."""

    id: str
    label: str


@dataclass(frozen=True)
class VariantDiff(NamedVariant):
    """One variant in both runs. Percent of B against A: positive is slower."""

    a_ms: float | None
    b_ms: float | None
    difference: Difference
    note: str | None
    """Why there is no figure or no interval, and how to get one."""


@dataclass(frozen=True)
class NotComparable(NamedVariant):
    """A variant that goes by the same name in both runs but doesn't do the same work."""

    reason: str
    """`global_batch: 8 → 32, split: 4,4 → 16,16`."""


@dataclass(frozen=True)
class Diff:
    """The changes from run A to run B."""

    name_a: str
    name_b: str
    """The runs as a person would type them, or the names of their jobs."""
    ci_level: float | None
    """The level of one variant's interval; `None` if no variant can be compared."""
    variants: tuple[VariantDiff, ...]
    not_comparable: tuple[NotComparable, ...]
    only_in_a: tuple[NamedVariant, ...]
    only_in_b: tuple[NamedVariant, ...]
    marks: tuple[str, ...]
    """Differences of host, versions and job: reasons to doubt that the code alone made the difference."""
    gate: Gate | None = None
    """`None` where no gate was asked for."""
    findings: tuple[Finding, ...] = ()
    """The answer, its cause and the next step; then what differs."""


def diff_runs(
    a: Comparison, b: Comparison, alpha: float = ALPHA, may_differ: Collection[str] = frozenset()
) -> Diff:
    """How b differs from a, by the step times of their launches.

    Rounds of different launches aren't pairs, so the launch is the unit (Welch on logarithms), at
    `alpha` shared among the variants that both runs have and that do the same work in both; others are
    listed. Intervals are wider by what waiting for cores may have changed.

    Args:
        may_differ: settings in which variants may differ and be compared all the same.
    """
    in_a, in_b = ({variant.id: variant for variant in run.variants} for run in (a, b))
    common = [variant_id for variant_id in in_a if variant_id in in_b]
    reasons = {
        variant: _other_work(_work(a, in_a[variant], may_differ), _work(b, in_b[variant], may_differ))
        for variant in common
    }
    alike = [variant for variant in common if not reasons[variant]]
    share = alpha / max(1, len(alike))
    variants = tuple(_variant_diff(variant, (a, b), share) for variant in alike)
    return Diff(
        name_a=a.name,
        name_b=b.name,
        ci_level=1 - share if alike else None,
        variants=variants,
        not_comparable=tuple(
            NotComparable(
                variant, " → ".join(dict.fromkeys(map(variant_label, (in_a[variant], in_b[variant])))), reason
            )
            for variant, reason in reasons.items()
            if reason
        ),
        only_in_a=_only_in(in_a, in_b),
        only_in_b=_only_in(in_b, in_a),
        marks=(
            *code_marks(a, b),
            *_host_marks(a.host, b.host),
            *_marks("job", *_with_defaults(a.job, b.job)),
            *_interference_marks(a, b),
        ),
        findings=ranked(_findings(variants, a, b)),
    )


def _findings(variants: Sequence[VariantDiff], a: Comparison, b: Comparison) -> Iterator[Finding]:
    """The largest change and its cause; or that nothing is surely different."""
    if not variants:
        yield finding("not-measured", case="other-work")
        yield to_do("not-measured", "unlike")
        return
    changed = [variant for variant in variants if variant.difference.verdict in ("slower", "faster")]
    known = [variant for variant in changed or variants if variant.difference.percent is not None]
    if not known:
        yield finding("not-measured", case="no-times")
        yield from (
            finding("too-few", variant.id, why=variant.note, weight=1)
            for variant in variants[:1]
            if variant.note
        )
        return
    most = max(known, key=lambda variant: abs(variant.difference.percent or 0.0))
    percent, ci = most.difference.percent or 0.0, most.difference.ci
    if not changed:
        yield finding("unchanged", most.id, where=most.label, change_percent=percent, ci=ci)
        is_few = most.note is not None
        yield (
            finding("too-few", most.id, why=most.note, weight=1)
            if is_few
            else finding("scatter-hides-it", most.id, case="launches", weight=1)
        )
        return
    is_longer = percent > 0
    yield finding(
        "changed",
        most.id,
        where=most.label,
        percent=abs(percent),
        change=change_text(percent),
        **interval_figures(percent, ci if is_longer or ci is None else (-ci[1], -ci[0])),
        num_more=len(changed) - 1 or None,
    )
    results = _variant(b, most.id), _variant(a, most.id)
    slower, faster = results if is_longer else results[::-1]
    if loss := why_slower(slower, faster):
        yield cause(loss, slower, weight=1, than="A" if is_longer else "B")
    yield to_do("changed", "past-runs")


def _only_in(
    variants: Mapping[str, VariantResult], others: Mapping[str, VariantResult]
) -> tuple[NamedVariant, ...]:
    return tuple(
        NamedVariant(name, variant_label(variant)) for name, variant in variants.items() if name not in others
    )


def _with_defaults(*jobs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Jobs, in which a setting that only some have has its default in the others."""
    stated = {name for job in jobs for name in job if name in SETTINGS}
    for job in jobs:
        yield {**job, **{name: resolved_setting(name, job, {}) for name in stated}}


def _interference_marks(a: Comparison, b: Comparison) -> Iterator[str]:
    """Runs whose splits could not even be ranked: what else ran there is in their times."""
    for name, run in (("A", a), ("B", b)):
        if found := interference_in(run.variants):
            yield reason("loaded", run=name, reason=reason(**found[0].figures))


def gated(diff: Diff, a: Comparison, b: Comparison, percent: float) -> Diff:
    """The difference with a gate over all variants that run A has figures of.

    Runs with interference are refused: between two runs nothing shows how much of it each had.
    """
    in_a, in_b = ({variant.id: variant for variant in run.variants} for run in (a, b))
    compared = [variant for variant in diff.variants if is_ranked(in_a[variant.id])]
    refused = next(_interference_marks(a, b), None)
    rows = [
        _gate_row(variant, in_a[variant.id], in_b[variant.id], percent, len(compared), refused)
        for variant in compared
    ]
    rows += [
        row_of(
            variant.label,
            (variant.id, variant.id),
            (None, None),
            UNKNOWN,
            0,
            f"other work ({variant.reason})",
        )
        for variant in diff.not_comparable
    ]
    gate = gate_of(percent, IN_RUN_A, rows)
    less = (to_do("affected-by-load", "stop-others"),) if refused else ()
    past = to_do("gate", "past-runs")
    return replace(diff, gate=gate, findings=ranked((*gate_findings(gate, less), past)))


def _gate_row(
    variant: VariantDiff, a: VariantResult, b: VariantResult, percent: float, num: int, refused: str | None
) -> GateRow:
    lost = f"{b.status} in run B" if not is_ranked(b) else None
    found = UNKNOWN if lost else bounded(_estimate(a, b), percent, num_variants=num, bias=_bias(a, b))
    launches = min(len(a.launch_ms), len(b.launch_ms))
    why = lost or (refused if found.ci else variant.note)  # too few launches is what to mend first
    return row_of(variant.label, (a.id, b.id), (variant.a_ms, variant.b_ms), found, launches, why)


def _work(run: Comparison, variant: VariantResult, without: Collection[str]) -> dict[str, Any]:
    """The work of a variant's step, and how it is done: times are compared only if all of it is the same."""
    held = settings_for(variant.kind, variant.strategy)
    return {
        name: _value(name, run, variant)
        for name, setting in SETTINGS.items()
        if not setting.same_work and name not in without and name in held
    }


def _value(name: str, run: Comparison, variant: VariantResult) -> Any:
    """A setting of the variant, from its result where planning has found it.

    A balanced split is its word: its samples are measured again in each run, and may move by one.
    """
    if name == "split" and variant.split_name == BALANCED:
        return BALANCED
    is_resolved = SETTINGS[name].is_resolved
    return getattr(variant, name) if is_resolved else resolved_setting(name, run.job, variant.varied)


def _other_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The differences in words; empty where it is the same work."""
    texts = (
        (key, value_text(a[key]) or "none", value_text(b.get(key)) or "none")
        for key in a
        if a[key] != b.get(key)
    )
    return ", ".join(f"{key}: {old} → {new}" for key, old, new in texts)


def _variant_diff(variant: str, runs: tuple[Comparison, Comparison], alpha: float) -> VariantDiff:
    a, b = (_variant(run, variant) for run in runs)
    lost = [
        f"{result.status} in run {name}" for name, result in (("A", a), ("B", b)) if not is_ranked(result)
    ]
    difference = Difference(None, None, "inconclusive") if lost else _difference(a, b, alpha)
    if throttled_in((a, b)):
        difference, lost = replace(difference, verdict="inconclusive"), [*lost, reason("throttled")]
    return VariantDiff(
        id=a.id,
        label=variant_label(b),
        a_ms=_mean_ms(a),
        b_ms=_mean_ms(b),
        difference=difference,
        note=", ".join(lost) or _few_launches(variant, *runs),
    )


def _mean_ms(variant: VariantResult) -> float | None:
    """The geometric mean over launches, of which the difference is the ratio.

    That of the run's own table may be of other launches, since the baseline has more than those that leave.
    """
    if not variant.launch_ms:
        return variant.step_ms.estimate if variant.step_ms else None
    return math.exp(fmean(map(math.log, variant.launch_ms)))


def _estimate(a: VariantResult, b: VariantResult) -> Estimate | None:
    return unpaired(*([math.log(ms) for ms in variant.launch_ms] for variant in (b, a)))


def _bias(a: VariantResult, b: VariantResult) -> float:
    """Either run may have waited for cores when the other didn't."""
    return max(waiting_bias(rank.queue_percent for rank in run.ranks) for run in (a, b))


def _difference(a: VariantResult, b: VariantResult, alpha: float) -> Difference:
    if (found := _estimate(a, b)) is None:
        return Difference(None, None, "inconclusive")
    percent = percent_from_log(found.centre)
    ci = percent_interval(found.interval(alpha, _bias(a, b)))
    return Difference(percent, ci, verdict_of(percent, ci))


def _few_launches(variant: str, a: Comparison, b: Comparison) -> str | None:
    nums = {name: len(_variant(run, variant).launch_ms) for name, run in (("A", a), ("B", b))}
    few = [name for name, num in nums.items() if num < MIN_LAUNCHES]
    if not few:
        return None
    have = " and ".join(reason("run-has", run=name, num_launches=nums[name]) for name in few)
    jobs = {"A": a.job, "B": b.job}
    more = dict.fromkeys(more_launches(jobs[name].get("until") == "decided") for name in few)
    return reason("few-launches", have=have, least=MIN_LAUNCHES, setting=" and ".join(more))


def _variant(run: Comparison, variant_id: str) -> VariantResult:
    return next(variant for variant in run.variants if variant.id == variant_id)


def code_marks(a: Comparison, b: Comparison) -> Iterator[str]:
    """`code commit: 1a2b3c4 → 5d6e7f8`, `code train.py: changed`; nothing of runs that didn't record it."""
    if a.code and b.code and a.code.text != b.code.text:
        yield f"code commit: {a.code.text} → {b.code.text}"
    files_a, files_b = ({k: v for variant in run.variants for k, v in variant.code.items()} for run in (a, b))
    for name in changed_files(files_a, files_b) if files_a and files_b else ():
        change = "only in A" if name not in files_b else "only in B" if name not in files_a else "changed"
        yield f"code {name}: {change}"


def _host_marks(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    lasting = (
        {key: value for key, value in leaves(host) if PASSING_FACTS.isdisjoint(key.split("."))}
        for host in (a, b)
    )
    return _marks("host", *lasting)


def _marks(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`host torch: 2.12.1 → 2.13.0` for every fact that differs."""
    flat_a, flat_b = dict(leaves(a)), dict(leaves(b))
    keys = dict.fromkeys((*flat_a, *flat_b))
    return [
        f"{what} {key}: {_shown(flat_a, key)} → {_shown(flat_b, key)}"
        for key in keys
        if flat_a.get(key) != flat_b.get(key)
    ]


def _shown(facts: Mapping[str, Any], key: str) -> str:
    return value_text(facts[key]) if key in facts else "none"
