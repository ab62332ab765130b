"""How one variant's time differs from another's, which variant leads, and by how much the others are behind.

Differences are over launches, or within the few that there are.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from gpurun.launcher.compare.figures.recorded import (
    BOUNDS,
    Bound,
    MeasuredVariant,
    is_throttled,
    shares_of_rounds,
    timed_steps,
)
from gpurun.launcher.compare.figures.searched import smaller_than_all_before
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import (
    Comparison,
    Difference,
    Holds,
    OpenPair,
    Unit,
    VariantResult,
    Verdict,
    WithoutLoad,
)
from gpurun.launcher.findings.finding import reason
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.plan.model import devices_of_node
from gpurun.launcher.rundir.records import MEASURED, Look
from gpurun.launcher.stats.core_waiting import RoundKey, cpu_ns_of_rounds
from gpurun.launcher.stats.estimates import (
    ALPHA,
    MIN_LAUNCHES,
    RELEVANT_PERCENT,
    Family,
    IntervalAt,
    holm,
    launch_values,
    launches_needed,
    percent_from_log,
    percent_interval,
    squares,
    verdict_of,
    wilcoxon_interval,
)
from gpurun.launcher.units import Interval, format_ms, plural

OPPOSITE: dict[Verdict, Verdict] = {"faster": "slower", "slower": "faster"}
CONTROL = "\0control"
"""The name of the baseline's second blocks among the variants of a launch."""

EARLY_ROUNDS_SHARE = 0.32
"""Share of a comparison's level, where rounds ended as soon as it was decided, as in older runs: each of five
looks had 1.6 %."""


@dataclass(frozen=True)
class Differences:
    """How any two variants of a run differ, all by the same rules."""

    measured: Mapping[str, MeasuredVariant]
    baseline: str
    family: Family
    """ln(time per sample) of every launch."""
    control: Mapping[int, float]
    """ln(time per sample) of the baseline's second blocks, by repetition."""
    unit: Unit
    share_of_level: float = 1.0
    """The share of a comparison's level, at each look within a launch."""
    references: Mapping[str, str] = field(default_factory=dict)
    """The version before, in a gate: the step of a variant follows from its, not from the baseline's."""
    quiet: Sequence["Differences"] = ()
    """The differences less the least and the most waiting for other load that there may be; without variants
    of which that isn't known."""
    is_throttled: bool = False
    """Whether clocks were low: then times of this run are not those of its splits, and decide nothing."""

    @property
    def within(self) -> int:
        """The launches that verdicts are limited to; 0 where they cover what others would show."""
        most = max((len(variant.logs) for variant in self.measured.values()), default=0)
        return 0 if self.unit == "launch" else most

    def vs_baseline(self) -> dict[str, Difference | None]:
        """The differences in the table, by variant; `None` where one of the two has no times that count."""
        baseline = self.measured[self.baseline]
        compared = [
            record.variant.id
            for record in self.measured.values()
            if record is not baseline
            and record.counts
            and baseline.counts
            and record.variant.same_task(baseline.variant)
        ]
        found: dict[str, Difference | None] = {
            **dict.fromkeys(self.measured),
            **self.all_against(self.baseline, compared),
        }
        if baseline.counts:
            found[self.baseline] = Difference(None, None, "baseline")
        return found

    def all_against(self, other: str, variants: Iterable[str]) -> dict[str, Difference]:
        """How each of `variants` differs from `other`; together the verdicts err with at most 5 % (Holm)."""
        intervals = holm({variant: self.interval_at(variant, other) for variant in variants})
        return {
            variant: self._explained(self.difference(variant, other, ci), ci, variant, other, len(intervals))
            for variant, ci in intervals.items()
        }

    def together(self, pairs: Collection[tuple[str, str]]) -> list[Difference]:
        """How the first of each pair differs from the second; all intervals hold at 95 % (Bonferroni).

        In Holm's procedure, only verdicts do: what is established makes the other intervals narrower.
        """
        alpha = ALPHA / max(1, len(pairs))
        return [self.difference(*pair, self.interval_at(*pair)(alpha)) for pair in pairs]

    def _explained(
        self, found: Difference, ci: Interval | None, variant: str, other: str, num: int
    ) -> Difference:
        """The difference with the reason why it is inconclusive, if that is known.

        Args:
            found: one of `num` that are tested together.
            ci: its interval of logarithms.
        """
        if found.verdict != "inconclusive":
            return found
        if not self.is_over_rounds(variant, other):
            seen = plural(len(self.family.differences(variant, other)), "launch")
            return found if ci else replace(found, why=_too_few(seen))
        if ci is not None:
            is_open = ci[0] <= 0 <= ci[1] and not self.is_throttled
            return replace(found, why=self._outlying(variant, other) if is_open else None)
        rounds, alpha = self.pairs(variant, other), ALPHA * self.share_of_level
        outlying = self._outlying(variant, other) if wilcoxon_interval(rounds, alpha) else None
        return replace(found, why=outlying or _too_few(plural(len(rounds), "round"), num))

    def _outlying(self, variant: str, other: str) -> str | None:
        """The round without which the two differ in one direction; `None` if there isn't just one."""
        centre = self.estimate(variant, other) or 0.0
        opposed = [key for key, d in self.paired_rounds(variant, other).items() if d * centre <= 0]
        if len(opposed) != 1:
            return None
        found = [_outlying_round(self.measured[name], opposed[0]) for name in (variant, other)]
        return max((outlier for outlier in found if outlier), default=(0.0, None))[1]

    def between(self, variant: str, other: str) -> Difference:
        """`variant` against `other`, by itself at 5 %."""
        return self.difference(variant, other, self.interval_at(variant, other)(ALPHA))

    def difference(self, variant: str, other: str, ci: Interval | None) -> Difference:
        """The estimate with this interval (both of logarithms), and what they say."""
        by_launch = self.family.differences(variant, other)
        if not by_launch:
            return Difference(None, None, "inconclusive")
        centre = fmean(by_launch)
        if ci is not None and self.unit == "round":
            ci = min(ci[0], centre), max(ci[1], centre)
        percent, interval = percent_from_log(centre), percent_interval(ci)
        verdict = "inconclusive" if self.is_throttled else verdict_of(percent, interval)
        is_over_rounds = self.is_over_rounds(variant, other)
        pairs = self.paired_rounds(variant, other).values() if is_over_rounds else by_launch
        wins = sum(value * centre > 0 for value in pairs)
        quiet = self.without_load(variant, other, centre)
        return Difference(percent, interval, verdict, None, wins, len(pairs), quiet)

    def pairs(self, variant: str, other: str) -> Sequence[float]:
        """ln(t / t of the other) of every pair that an interval is made of."""
        if not self.is_over_rounds(variant, other):
            return self.family.differences(variant, other)
        return list(self.paired_rounds(variant, other).values())

    def without_load(self, variant: str, other: str, centre: float) -> WithoutLoad:
        """The difference less what ranks waited for other load, if that is known.

        Args:
            centre: the estimate with it.
        """
        found = [
            (quiet.estimate(variant, other), quiet.interval_at(variant, other)(ALPHA))
            for quiet in self.quiet
            if {variant, other} <= quiet.measured.keys()
        ]
        known = [(middle, ci) for middle, ci in found if middle is not None and ci is not None]
        if not known or len(known) < len(self.quiet):
            return WithoutLoad()
        low, high = min(ci[0] for _, ci in known), max(ci[1] for _, ci in known)
        ci = percent_interval((low, high))
        return WithoutLoad(percent_from_log(fmean(middle for middle, _ in known)), ci, _holds(centre, ci))

    def estimate(self, variant: str, other: str) -> float | None:
        """Mean of ln(t / t of the other) over the launches of both; estimates of a run add up."""
        found = self.family.differences(variant, other)
        return fmean(found) if found else None

    def scatter(self, variant: str, other: str) -> float | None:
        """Standard deviation of ln(t / t of the other) over launches."""
        found = self.family.differences(variant, other)
        return math.sqrt(squares(found, fmean(found)) / (len(found) - 1)) if len(found) > 1 else None

    def values(self, variant: str) -> list[float]:
        """ln(time per sample in ns) of each launch of the variant."""
        return list(self.family.values[variant].values())

    def control_differences(self) -> list[float]:
        """ln(second block / first block) of the baseline, by launch."""
        pooled = self.family.values[self.baseline]
        return [2 * (value - pooled[launch]) for launch, value in self.control.items() if launch in pooled]

    def interval_at(self, variant: str, other: str) -> IntervalAt:
        """The interval over launches; over rounds if launches are too few and both ran in the same ones."""
        if self.unit == "launch":
            return partial(self.family.interval, variant, other)
        rounds = self.pairs(variant, other) if self.is_over_rounds(variant, other) else ()
        return lambda alpha: wilcoxon_interval(rounds, alpha * self.share_of_level)

    def paired_rounds(self, variant: str, other: str) -> dict[RoundKey, float]:
        """ln(t / t of the other), per sample, of every round that both have, by launch and number."""
        a, b = (self.measured[name] for name in (variant, other))
        others = {key: log for its in b.logs.values() for key, log in its.items()}
        offset = math.log((a.variant.global_batch or 1) / (b.variant.global_batch or 1))
        logs = (item for its in a.logs.values() for item in its.items())
        return {key: log - others[key] - offset for key, log in logs if key in others}

    def is_over_rounds(self, variant: str, other: str) -> bool:
        """Whether pairs of rounds are the evidence: launches are few, and both run in the same processes."""
        return self.unit == "round" and self.measured[variant].group == self.measured[other].group


def differences_of(
    measured: Mapping[str, MeasuredVariant],
    baseline: str,
    taken: Sequence[Look] = (),
    early_rounds: bool = False,
) -> Differences:
    """All differences of a run: launches are the evidence from six on, else the rounds of those there are.

    Args:
        measured: all variants.
        baseline: the one that was measured twice in each round.
        taken: looks at launches so far, where the run has a budget.
        early_rounds: whether variants of a single launch ended as soon as they were decided.
    """
    counted = [variant for variant in measured.values() if variant.counts]
    most = max((len(variant.logs) for variant in counted), default=0)
    unit: Unit = "launch" if most >= MIN_LAUNCHES else "round"
    values, control = _launch_values(measured, baseline)
    if unit == "launch":  # the control ran the same split: both are the baseline
        values[baseline] = {
            repetition: (value + control.get(repetition, value)) / 2
            for repetition, value in values[baseline].items()
        }
    share = EARLY_ROUNDS_SHARE if early_rounds else 1.0
    found = Differences(measured, baseline, Family(values, tuple(taken)), control, unit, share)
    here = {name: variant for name, variant in measured.items() if _is_on_cpu_here(variant)}
    return replace(
        found,
        quiet=tuple(_less_all_waiting(replace(found, measured=here), bound) for bound in BOUNDS),
        is_throttled=len(counted) > 1 and any(is_throttled(variant) for variant in counted),
    )


def _less_all_waiting(differences: Differences, bound: Bound) -> Differences:
    """The differences less the waiting for other load, where that is known of variants; looked at once."""
    known = {name: found for name, x in differences.measured.items() if (found := _less_waiting(x, bound))}
    values, _ = _launch_values(known, "")
    return replace(differences, measured=known, family=Family(values), quiet=())


def _is_on_cpu_here(measured: MeasuredVariant) -> bool:
    """Whether other load on the first node's cores is all that its devices wait for."""
    devices = measured.variant.devices
    here = devices_of_node(0, devices)
    return len(here) == len(devices) and all(device.startswith(CPU.name) for device in here)


def _less_waiting(measured: MeasuredVariant, bound: Bound) -> MeasuredVariant | None:
    """The variant's rounds less the waiting; `None` where it isn't known."""
    shares = shares_of_rounds(
        measured.waiting, [(round_.launch, round_.round) for round_ in measured.timed], bound
    )
    if shares is None:
        return None
    quiet = {key: math.log1p(-share) for key, share in shares.items()}
    return replace(
        measured,
        logs={
            repetition: {k: log + quiet[k] for k, log in its.items()}
            for repetition, its in measured.logs.items()
        },
        means={
            repetition: log + fmean(quiet[k] for k in measured.logs[repetition])
            for repetition, log in measured.means.items()
        },
        aa_logs={},
    )


def in_cpu_time(measured: MeasuredVariant) -> MeasuredVariant:
    """The variant's rounds, with the CPU time of a step in place of its length."""
    timed = {rank: timed_steps(measured, rank) for rank in measured.steps}
    cpu_ns = cpu_ns_of_rounds(timed, [(round_.launch, round_.round) for round_ in measured.timed])
    logs = {
        repetition: {key: math.log(cpu_ns[key]) for key in its if key in cpu_ns}
        for repetition, its in measured.logs.items()
    }
    known = {repetition: its for repetition, its in logs.items() if its}
    means = {
        repetition: fmean(known[repetition].values()) for repetition in measured.means if repetition in known
    }
    return replace(measured, logs=known, means=means, aa_logs={})


def _holds(centre: float, ci: Interval | None) -> Holds:
    """Whether a difference of logarithms is still there in this interval, in percent."""
    if ci is None:
        return "unknown"
    low, high = (ci[0], ci[1]) if centre > 0 else (-ci[1], -ci[0])
    if low > 0:
        return "yes"
    is_none = low >= -RELEVANT_PERCENT and high <= RELEVANT_PERCENT
    return "no" if high < 0 or is_none else "unknown"


def _launch_values(
    measured: Mapping[str, MeasuredVariant], baseline: str
) -> tuple[dict[str, dict[int, float]], dict[int, float]]:
    """ln(time per sample) of every variant by repetition, and that of the baseline's second blocks."""
    values: dict[str, dict[int, float]] = {variant: {} for variant in measured}
    control: dict[int, float] = {}
    for group in {record.group for record in measured.values()}:
        members = [record for record in measured.values() if record.group == group]
        for repetition in sorted({repetition for record in members for repetition in record.logs}):
            logs = {record.variant.id: record.logs.get(repetition, {}) for record in members}
            if baseline in logs and repetition in measured[baseline].aa_logs:
                logs[CONTROL] = measured[baseline].aa_logs[repetition]
            means = {
                record.variant.id: record.means[repetition]
                for record in members
                if repetition in record.means
            }
            for variant, value in (launch_values(logs) | means).items():
                of = control if variant == CONTROL else values[variant]
                samples = measured[baseline if variant == CONTROL else variant].variant.global_batch
                of[repetition] = value - math.log(samples or 1)
    return values, control


def _too_few(seen: str, num: int = 1) -> str:
    """`6 rounds are too few to rule out chance in 2 comparisons`."""
    are = "is" if seen.startswith("1 ") else "are"
    return reason("few", seen=seen, are=are, num=num if num > 1 else None)


def _outlying_round(measured: MeasuredVariant, at: RoundKey) -> tuple[float, str] | None:
    """The ratio of a round to all others, and its text, if it is farther than these are from each other."""
    others = [round_.step_ns for round_ in measured.timed if (round_.launch, round_.round) != at]
    ns = next(round_.step_ns for round_ in measured.timed if (round_.launch, round_.round) == at)
    low, high = min(others), max(others)
    if 2 * low - high <= ns <= 2 * high - low:
        return None
    others_ms = f"{format_ms(low / 1e6)} to {format_ms(high / 1e6)}"
    where = variant_label(measured.variant)
    said = reason("outlying", num_rounds=len(others) + 1, where=where, step_ms=ns / 1e6, others=others_ms)
    return max(ns / high, low / ns), said


def opposite(difference: Difference) -> Difference:
    """The difference seen from the other side: t_baseline / t in place of t / t_baseline."""
    quiet = difference.without_load
    return replace(
        difference,
        **_inverted(difference),
        verdict=OPPOSITE.get(difference.verdict, difference.verdict),
        without_load=quiet and replace(quiet, **_inverted(quiet)),
    )


def _inverted(found: Difference | WithoutLoad) -> dict[str, Any]:
    percent, ci = found.percent, found.ci
    return {
        "percent": None if percent is None else _inverse(percent),
        "ci": None if ci is None else (_inverse(ci[1]), _inverse(ci[0])),
    }


def _inverse(percent: float) -> float:
    # The end of an early look's interval can be −100 % but for less than a float shows.
    return -100 * percent / max(100 + percent, 1e-9)


class Pairwise(Protocol):
    """Answers how any two variants differ."""

    def between(self, variant: str, other: str) -> Difference:
        """How `variant` differs from `other`, by itself: positive percent is slower."""

    def all_against(self, other: str, variants: Iterable[str]) -> Mapping[str, Difference]:
        """How each of `variants` differs from `other`, with verdicts that hold together."""


@dataclass(frozen=True)
class Rival:
    """A variant and how far it is behind the leader."""

    result: VariantResult
    behind: Difference

    @property
    def is_slower(self) -> bool:
        """Whether the leader's lead over it is established."""
        return self.behind.verdict == "slower"


@dataclass(frozen=True)
class Standings:
    """The leader, and all others that were measured, fastest first; without those of the same samples as it,
    if there are others."""

    leader: VariantResult
    rivals: tuple[Rival, ...]

    @property
    def is_settled(self) -> bool:
        """Whether the leader is the fastest: every other was shown to be slower."""
        return all(rival.is_slower for rival in self.rivals)


def standings(results: Sequence[VariantResult], pairwise: Pairwise) -> Standings | None:
    """The leader, and how the others compare with it; `None` if nothing was measured.

    The leader is the first in order that no other is established to be faster than. That it is the fastest
    takes all rivals to be slower, so each is tested at 5 % (an intersection–union test: Berger, Technometrics
    24 (1982)). Where it can't be shown of all, verdicts on single rivals must hold together.
    """
    ranked = fastest_first(results)
    if not ranked:
        return None
    compared = ((leader, _behind(leader, ranked, pairwise)) for leader in ranked)
    unbeaten = (pair for pair in compared if all(each.verdict != "faster" for each in pair[1].values()))
    leader, behind = next(unbeaten, None) or (ranked[0], _behind(ranked[0], ranked, pairwise))
    all_others = [result for result in ranked if result.id != leader.id]
    others = [result for result in all_others if not _is_same_work(result, leader)] or all_others
    if any(behind[result.id].verdict != "slower" for result in others):
        behind = _together(leader, others, pairwise)
    rivals = (Rival(result, behind[result.id]) for result in others)
    return Standings(leader, tuple(rivals))


def _is_same_work(result: VariantResult, leader: VariantResult) -> bool:
    """Whether `balanced` has found the samples of the other: one of the two can't be faster."""
    pairs = ((result, leader), (leader, result))
    return any(a.balanced is not None and b.id in a.balanced.same_as for a, b in pairs)


def _together(
    leader: VariantResult, others: Sequence[VariantResult], pairwise: Pairwise
) -> dict[str, Difference]:
    """The difference to show for each rival where they aren't all slower; for the baseline the table's."""
    behind = dict(pairwise.all_against(leader.id, [other.id for other in others]))
    row = leader.vs_baseline
    return behind | {result.id: opposite(row) for result in others if is_baseline(result) and row is not None}


def with_lead(results: Sequence[VariantResult], standings: Standings | None) -> tuple[VariantResult, ...]:
    """The results with what a sure lead says about the baseline.

    The rows of a table are tested together. That one variant is the fastest is a question of its own, which
    may show more about the pairs of which it consists; they are shown alike in both places.
    """
    if standings is None or not standings.is_settled:
        return tuple(results)
    rows: dict[str, Difference] = {}
    if is_baseline(standings.leader):
        rows = {rival.result.id: rival.behind for rival in standings.rivals}
    for rival in standings.rivals:
        if is_baseline(rival.result):
            rows[standings.leader.id] = opposite(rival.behind)
    return tuple(replace(result, vs_baseline=rows.get(result.id, result.vs_baseline)) for result in results)


def is_baseline(result: VariantResult) -> bool:
    return result.vs_baseline is not None and result.vs_baseline.verdict == "baseline"


def open_pairs(standings: Standings, differences: Differences) -> tuple[OpenPair, ...]:
    """Rivals that are neither shown to be slower than the leader nor the same, the closest first."""
    return tuple(
        _open_pair(rival, standings.leader, differences)
        for rival in standings.rivals
        if rival.behind.verdict not in ("slower", "same")
    )


FEW = 3
"""Launches: from fewer it isn't known how much they vary."""


def _open_pair(rival: Rival, leader: VariantResult, differences: Differences) -> OpenPair:
    variant, behind = rival.result.id, rival.behind
    is_known = len(differences.family.differences(variant, leader.id)) >= FEW
    needed = _launches_needed(behind.percent, differences.scatter(variant, leader.id))
    return OpenPair(variant, behind.percent, behind.ci, needed if is_known else MIN_LAUNCHES)


def _launches_needed(percent: float | None, scatter: float | None) -> int | None:
    """The number of launches until an interval excludes 0; below 1 %, which is never `slower`, until `same`.

    Args:
        percent: the difference.
        scatter: standard deviation of its logarithm over launches.
    """
    if percent is None or scatter is None:
        return None
    apart, relevant = abs(math.log1p(percent / 100)), math.log1p(RELEVANT_PERCENT / 100)
    deciding = apart if abs(percent) >= RELEVANT_PERCENT else relevant - apart
    return launches_needed(percent_from_log(deciding), 100 * scatter) if deciding > 0 else None


def following(comparison: Comparison) -> tuple[str, ...]:
    """The variants to launch next, in the order of the plan: close rivals, and those of which it isn't clear
    how they compare with the leader or with the baseline.

    The baseline stays: all figures of the table are relative to it. A row of the table that is open doesn't
    prolong the run, but is measured as long as it goes on.
    """
    named = {comparison.leader, comparison.baseline, *(pair.variant for pair in comparison.open)}
    return tuple(
        variant.id
        for variant in comparison.variants
        if is_ranked(variant)
        and (
            comparison.leader is None
            or variant.id in named
            or (variant.vs_baseline is not None and variant.vs_baseline.verdict == "inconclusive")
        )
    )


def fastest_first(results: Sequence[VariantResult]) -> list[VariantResult]:
    """Variants with figures that count, by their difference from the baseline, else by time per sample.

    Not by their step times, where all are compared: those of the table follow from the differences anyway.
    """
    ranked = [result for result in results if is_ranked(result)]
    rows = {result.id: result.vs_baseline for result in ranked}
    percents = {
        variant: None if row is None else 0.0 if row.verdict == "baseline" else row.percent
        for variant, row in rows.items()
    }
    if None in percents.values():
        return sorted(ranked, key=time_per_sample)
    return sorted(ranked, key=lambda result: percents[result.id] or 0.0)


def is_ranked(result: VariantResult) -> bool:
    """Whether a variant ended well enough to be called fast."""
    return result.status in MEASURED and result.step_ms is not None


def time_per_sample(result: VariantResult) -> float:
    """In ms; per step where the samples aren't known, which they are of all variants or of none."""
    return result.step_ms.estimate / (result.global_batch or 1) if result.step_ms else 0.0


def _behind(
    leader: VariantResult, ranked: Sequence[VariantResult], pairwise: Pairwise
) -> dict[str, Difference]:
    """How each of the others differs from a variant, by itself."""
    return {each.id: pairwise.between(each.id, leader.id) for each in ranked if each.id != leader.id}


def pareto_front(results: Sequence[VariantResult]) -> list[VariantResult]:
    """The variants for which no other is both as fast and as small, by the estimates; fastest first.

    Of runs that compare batches, or where some peak isn't known: none.
    """
    ranked = fastest_first(results)
    if len({result.global_batch for result in ranked}) > 1:
        return []
    peaks = [result.peak_gib for result in ranked]
    return [ranked[position] for position in smaller_than_all_before(peaks)]


def by_rank(comparison: Comparison) -> tuple[list[VariantResult], list[VariantResult]]:
    """Variants with figures that count, the leader first, then the others fastest first; and the rest.

    Where variants can't be ranked, they keep the job's order, which claims nothing.
    """
    if comparison.is_unranked or comparison.gate:
        ranked = [variant for variant in comparison.variants if is_ranked(variant)]
    else:
        ranked = sorted(
            fastest_first(comparison.variants), key=lambda variant: variant.id != comparison.leader
        )
    return ranked, [variant for variant in comparison.variants if not is_ranked(variant)]
