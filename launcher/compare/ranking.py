"""Which variant leads, and by how much the others are behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpurun.launcher.compare.model import Comparison, Difference, VariantResult


class Pairwise(Protocol):
    """Answers how any two variants differ."""

    def between(self, variant: str, other: str) -> Difference:
        """How `variant` differs from `other`: positive percent is slower."""

    def share_launches(self, variant: str, other: str) -> bool:
        """Whether they run in the same processes, so that their rounds are pairs."""


@dataclass(frozen=True)
class Rival:
    """A variant and how far it is behind the leader."""

    result: VariantResult
    behind: Difference
    shares_launches: bool
    """Whether it ran in the leader's own processes."""

    @property
    def is_slower(self) -> bool:
        """Whether the leader's lead over it is established."""
        return self.behind.verdict == "slower"


@dataclass(frozen=True)
class Standings:
    """The leader, and all others that were measured, fastest first."""

    leader: VariantResult
    rivals: tuple[Rival, ...]


def standings(results: Sequence[VariantResult], pairwise: Pairwise) -> Standings | None:
    """The leader, and how the others compare with it; `None` if nothing was measured.

    The leader is the first in order that no other is established to be faster than.
    """
    ranked = fastest_first(results)
    if not ranked:
        return None
    leader = next((one for one in ranked if not _is_beaten(one, ranked, pairwise)), ranked[0])
    others = (result for result in ranked if result.id != leader.id)
    rivals = (
        Rival(other, pairwise.between(other.id, leader.id), pairwise.share_launches(other.id, leader.id))
        for other in others
    )
    return Standings(leader, tuple(rivals))


def fastest_first(results: Sequence[VariantResult]) -> list[VariantResult]:
    """Variants with figures that count, by their difference from the baseline, else by time per sample.

    Not by the medians in the table: those of variants that stopped early are of other rounds, and
    those of several launches scatter as launches do, while the difference is taken between neighbours.
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
    return result.status in ("ok", "unsteady") and result.step_ms is not None


def time_per_sample(result: VariantResult) -> float:
    """In ms; per step where the samples aren't known, which they are of all variants or of none."""
    return result.step_ms.median / (result.global_batch or 1) if result.step_ms else 0.0


def _is_beaten(one: VariantResult, ranked: Sequence[VariantResult], pairwise: Pairwise) -> bool:
    return any(
        pairwise.between(other.id, one.id).verdict == "faster" for other in ranked if other.id != one.id
    )


def by_rank(comparison: Comparison) -> tuple[list[VariantResult], list[VariantResult]]:
    """Variants with figures that count, the leader first, then the others fastest first; and the rest.

    Where splits can't be ranked, they keep the job's order, which claims nothing.
    """
    if comparison.interference:
        ranked = [one for one in comparison.variants if is_ranked(one)]
    else:
        ranked = sorted(fastest_first(comparison.variants), key=lambda one: one.id != comparison.fastest)
    return ranked, [one for one in comparison.variants if not is_ranked(one)]
