"""Looks at the rounds of a single launch: when a comparison is tested, at which level, and what is decided.

Several looks at growing data are several chances of a false alarm, so the level of each look is lowered to
keep the overall level. For looks at launches see `sequential.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpurun.launcher.rundir.records import RoundTime
from gpurun.launcher.stats.paired import hodges_lehmann, round_differences, wilcoxon_interval
from gpurun.launcher.stats.verdict import Interval, Verdict, percent_from_log, percent_interval, verdict_of

Looks = tuple[tuple[int, float], ...]
"""(rounds so far, α of one comparison), in rising order of rounds."""

ONE_LOOK_ALPHA = 0.05
EARLY_LOOK_ALPHA = 0.016
"""At each of five looks; with the default 28 rounds the overall error is 4.8 % (20,000 simulated)."""

EARLY_SEVENTHS = (2, 3, 4, 5, 7)


def looks(rounds: int, num_comparisons: int, early_stop: bool) -> Looks:
    """The looks at `num_comparisons` comparisons of at most `rounds` rounds each.

    With `early_stop` after ⌈rounds·(2, 3, 4, 5, 7)/7⌉ rounds, else once, at the end. The level is shared
    among the comparisons (Bonferroni).
    """
    comparisons = max(1, num_comparisons)
    if not early_stop:
        return ((rounds, ONE_LOOK_ALPHA / comparisons),)
    stops = sorted({-(-rounds * sevenths // 7) for sevenths in EARLY_SEVENTHS})
    return tuple((stop, EARLY_LOOK_ALPHA / comparisons) for stop in stops)


@dataclass(frozen=True)
class Outcome:
    """The result of a look. `percent` and `ci` are of the step time against the baseline's."""

    rounds: int
    """Rounds that the figures are based on."""
    alpha: float
    percent: float | None
    ci: Interval | None
    verdict: Verdict


def look_at(differences: Sequence[float], alpha: float) -> Outcome:
    """Estimate, interval and verdict from differences d = ln(t / t_baseline), one per round."""
    centre = hodges_lehmann(differences)
    percent = None if centre is None else percent_from_log(centre)
    ci = percent_interval(wilcoxon_interval(differences, alpha))
    return Outcome(len(differences), alpha, percent, ci, verdict_of(percent, ci))


def decide(
    differences_by_variant: Mapping[str, Sequence[float]], rounds_done: int, looks: Looks
) -> frozenset[str]:
    """Variants that need no further rounds, now that `rounds_done` are complete; none before the first look.

    Differences are d = ln(t / t_baseline) per round, in the order in which the rounds ran. What one look
    decides stays decided.
    """
    taken = tuple(look for look in looks if look[0] <= rounds_done)
    return frozenset(
        variant for variant, differences in differences_by_variant.items() if is_decided(differences, taken)
    )


def is_decided(differences: Sequence[float], taken: Looks) -> bool:
    """Whether one of the looks taken so far, at the rounds up to it, allows a verdict."""
    return any(
        look_at(differences[:rounds], alpha).verdict != "inconclusive"
        for rounds, alpha in taken
        if rounds <= len(differences)
    )


def decided_variants(
    rounds_by_variant: Mapping[str, Sequence[RoundTime]],
    baseline: str | None,
    looks: Looks,
    samples: Mapping[str, int] | None = None,
) -> frozenset[str]:
    """`decide` for the rounds that a launch has measured so far; nothing without the baseline's.

    Args:
        rounds_by_variant: step times by variant, in the order in which the rounds ran.
        baseline: the variant that the others are compared with.
        looks: as planned for the run.
        samples: global batch by variant; needed where they differ.
    """
    if baseline is None or baseline not in rounds_by_variant:
        return frozenset()
    rounds = rounds_by_variant[baseline]
    differences = {
        variant: round_differences(times, rounds, samples[variant] / samples[baseline] if samples else 1.0)
        for variant, times in rounds_by_variant.items()
        if variant != baseline
    }
    return decide(differences, len(rounds), looks)
