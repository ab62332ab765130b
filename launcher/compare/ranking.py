"""Which variant leads, and by how much the others are behind."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpurun.launcher.compare.figures.searched import smaller_than_all_before
from gpurun.launcher.compare.model import Comparison, Difference, OpenPair, VariantResult
from gpurun.launcher.compare.variant_difference import Differences, opposite
from gpurun.launcher.rundir.records import MEASURED
from gpurun.launcher.stats.estimates import RELEVANT_PERCENT, percent_from_log
from gpurun.launcher.stats.sequential import launches_needed


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
    leader = next((result for result in ranked if not _is_beaten(result, ranked, pairwise)), ranked[0])
    all_others = [result for result in ranked if result.id != leader.id]
    others = [result for result in all_others if not _is_same_work(result, leader)] or all_others
    behind = {other.id: pairwise.between(other.id, leader.id) for other in others}
    if any(difference.verdict != "slower" for difference in behind.values()):
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


def _open_pair(rival: Rival, leader: VariantResult, differences: Differences) -> OpenPair:
    variant, behind = rival.result.id, rival.behind
    launches = _launches_needed(behind.percent, differences.scatter(variant, leader.id))
    return OpenPair(variant, behind.percent, behind.ci, launches)


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


@dataclass(frozen=True)
class Following:
    """The next measurements of a run with a budget."""

    is_decided: bool
    """Whether nothing is left that more launches would decide."""
    variants: tuple[str, ...]
    """The variants to launch next, in the order of the plan."""


def following(comparison: Comparison) -> Following:
    """Close rivals get the launches; a variant gets none once it is clear how it compares with the leader and
    with the baseline.

    The baseline stays: all figures of the table are relative to it. A row of the table that is open doesn't
    prolong the run, but is measured as long as it goes on.
    """
    ranked = [variant.id for variant in comparison.variants if is_ranked(variant)]
    if comparison.leader is None:
        return Following(False, tuple(ranked))
    left = {comparison.leader, comparison.baseline, *(pair.variant for pair in comparison.open)}
    left |= {variant.id for variant in comparison.variants if has_open_row(variant)}
    return Following(not comparison.open, tuple(variant for variant in ranked if variant in left))


def has_open_row(result: VariantResult) -> bool:
    """Whether its verdict against the baseline is still to be found."""
    return result.vs_baseline is not None and result.vs_baseline.verdict == "inconclusive"


def fastest_first(results: Sequence[VariantResult]) -> list[VariantResult]:
    """Variants with figures that count, by their difference from the baseline, else by time per sample.

    Not by their step times, where all are compared: those of the table follow from the differences anyway.
    """
    ranked = [result for result in results if is_ranked(result)]
    percents = {result.id: percent_behind_baseline(result) for result in ranked}
    if None in percents.values():
        return sorted(ranked, key=time_per_sample)
    return sorted(ranked, key=lambda result: percents[result.id] or 0.0)


def percent_behind_baseline(result: VariantResult) -> float | None:
    """0 for the baseline itself; `None` where there is nothing to compare with."""
    difference = result.vs_baseline
    if difference is None:
        return None
    return 0.0 if difference.verdict == "baseline" else difference.percent


def is_ranked(result: VariantResult) -> bool:
    """Whether a variant ended well enough to be called fast."""
    return result.status in MEASURED and result.step_ms is not None


def time_per_sample(result: VariantResult) -> float:
    """In ms; per step where the samples aren't known, which they are of all variants or of none."""
    return result.step_ms.estimate / (result.global_batch or 1) if result.step_ms else 0.0


def _is_beaten(result: VariantResult, ranked: Sequence[VariantResult], pairwise: Pairwise) -> bool:
    return any(
        pairwise.between(other.id, result.id).verdict == "faster" for other in ranked if other.id != result.id
    )


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

    Where splits can't be ranked, they keep the job's order, which claims nothing.
    """
    if comparison.is_unranked or comparison.gate:
        ranked = [variant for variant in comparison.variants if is_ranked(variant)]
    else:
        ranked = sorted(
            fastest_first(comparison.variants), key=lambda variant: variant.id != comparison.first
        )
    return ranked, [variant for variant in comparison.variants if not is_ranked(variant)]
