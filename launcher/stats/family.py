"""How variants differ over launches: all of a family, or two versions of one against a threshold."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Literal

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.launches import t_interval, t_quantile
from gpurun.launcher.stats.power import POWER
from gpurun.launcher.stats.sequential import ALPHA, MIN_LAUNCHES, level_at
from gpurun.launcher.stats.verdict import Interval, percent_from_log, percent_interval

IntervalAt = Callable[[float], Interval | None]
"""The interval of a comparison that misses it with α, over all looks."""


@dataclass(frozen=True)
class Family:
    """Launch values of all variants: ln(time) by repetition, which pairs the launches of different groups."""

    values: Mapping[str, Mapping[int, float]]
    looks: tuple[Look, ...] = ()
    """Taken so far; launches after the last one count at the next. Without any, all launches count."""

    def differences(self, variant: str, other: str) -> list[float]:
        """d = ln(t / t of the other) for every repetition that both have."""
        others = self.values.get(other, {})
        return [
            value - others[repetition]
            for repetition, value in self.values.get(variant, {}).items()
            if repetition in others and (not self.looks or repetition < self.looks[-1].launches)
        ]

    def interval(self, variant: str, other: str, alpha: float = ALPHA) -> Interval | None:
        """Of the mean of d, by its own scatter over launches; `None` below 6 launches."""
        found = self.differences(variant, other)
        if len(found) < MIN_LAUNCHES:
            return None
        return t_interval(found, level_at(self.looks, self.launches(variant, other), alpha))

    def launches(self, variant: str, other: str) -> int:
        """The number of launches after which the last one common to both had run."""
        common = self.values.get(variant, {}).keys() & self.values.get(other, {}).keys()
        return max(common, default=-1) + 1

    def at(self, variant: str, other: str) -> IntervalAt:
        """The interval as a function of its level."""
        return partial(self.interval, variant, other)


def holm(intervals: Mapping[str, IntervalAt], alpha: float = ALPHA) -> dict[str, Interval | None]:
    """The interval on which the verdict of each comparison rests: together they err with at most `alpha`.

    It excludes 0 exactly where the comparison is established. What is established makes room: with k
    comparisons left, α / k is the level of each.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics
    6 (1979); with several looks Ye, Li, Liu, Yao, Statistics in Medicine 32 (2013).
    """
    settled: dict[str, Interval | None] = {}
    left = dict(intervals)
    while left:
        found = {name: interval_at(alpha / len(left)) for name, interval_at in left.items()}
        established = {name: ci for name, ci in found.items() if ci is not None and not ci[0] <= 0 <= ci[1]}
        settled |= established or found
        left = {name: one for name, one in left.items() if established and name not in established}
    return {name: settled[name] for name in intervals}


@dataclass(frozen=True)
class Bounded:
    """A difference of step times against a threshold, all in percent."""

    outcome: Literal["slower", "not slower", "undecided"]
    percent: float | None
    ci: Interval | None
    """Each end is a one-sided bound: below the lower one, `slower` would be wrong with at most 5 %."""
    seen_percent: float | None
    """The smallest difference that would have been called slower with 80 % chance; `None` without scatter."""


def bounded(
    differences: Sequence[float], threshold_percent: float, looks: Sequence[Look] = (), num_variants: int = 1
) -> Bounded:
    """Whether the mean of `differences` is above the threshold, over all looks so far.

    `slower` is wrong with at most 5 % over all variants of a gate (Bonferroni), since one of them is enough
    to trip it. `not slower` is wrong with at most 5 % for each: a gate passes if all of them are not slower
    (an intersection–union test, Berger 1982).

    Args:
        differences: ln(t / t before), one per pair of launches.
        threshold_percent: the largest difference that is allowed.
        looks: so far; without any there is one, now.
        num_variants: of the gate.
    """
    if len(differences) < MIN_LAUNCHES:
        percent = percent_from_log(fmean(differences)) if differences else None
        return Bounded("undecided", percent, None, None)
    centre, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    degrees = len(differences) - 1
    # One-sided: twice the level, of which each side has half.
    tripping = t_quantile(1 - level_at(looks, len(differences), 2 * ALPHA / num_variants) / 2, degrees)
    passing = t_quantile(1 - level_at(looks, len(differences), 2 * ALPHA) / 2, degrees)
    low, high = centre - tripping * error, centre + passing * error
    threshold = math.log1p(threshold_percent / 100)
    seen = threshold + (tripping + t_quantile(POWER, degrees)) * error
    outcome: Literal["slower", "not slower", "undecided"] = "undecided"
    if low > threshold:
        outcome = "slower"
    elif high < threshold:
        outcome = "not slower"
    return Bounded(outcome, percent_from_log(centre), percent_interval((low, high)), percent_from_log(seen))
