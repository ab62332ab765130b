"""The launch is the unit of evidence: its value of each variant, and how variants differ over launches.

Two launches of the same processes differ by more than their rounds do. What is compared is all of a family,
or two versions of one variant against a threshold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev, variance
from typing import Literal

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import (
    percent_from_log,
    percent_interval,
    t_interval,
    t_quantile,
)
from gpurun.launcher.stats.sequential import ALPHA, MIN_LAUNCHES, POWER, level_at
from gpurun.launcher.units import Interval

IntervalAt = Callable[[float], Interval | None]
"""The interval of a comparison that misses it with α, over all looks."""


@dataclass(frozen=True)
class Family:
    """Launch values of all variants: ln(time) by repetition, which pairs the launches of different groups."""

    values: Mapping[str, Mapping[int, float]]
    looks: tuple[Look, ...] = ()
    """Taken so far; launches after the last one count at the next. Without any, all launches count."""
    _levels: dict[tuple[int, float], float] = field(default_factory=dict, repr=False, compare=False)

    def differences(self, variant: str, other: str) -> list[float]:
        """d = ln(t / t of the other) for every repetition that both have."""
        others = self.values.get(other, {})
        return [
            value - others[repetition]
            for repetition, value in self.values.get(variant, {}).items()
            if repetition in others and (not self.looks or repetition < self.looks[-1].launches)
        ]

    def interval(self, variant: str, other: str, alpha: float = ALPHA) -> Interval | None:
        """The interval of the mean of d, by its own scatter over launches; `None` below 6 launches."""
        found = self.differences(variant, other)
        if len(found) < MIN_LAUNCHES:
            return None
        return t_interval(found, self.level(self.launches(variant, other), alpha))

    def level(self, launches: int, alpha: float) -> float:
        """The level of an interval from so many launches."""
        if (launches, alpha) not in self._levels:
            self._levels[launches, alpha] = level_at(self.looks, launches, alpha)
        return self._levels[launches, alpha]

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
        left = {name: interval for name, interval in left.items() if established and name not in established}
    return {name: settled[name] for name in intervals}


Outcome = Literal["slower", "not slower", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """The mean of ln(t / t before) over launches, and how well it is known."""

    centre: float
    launches: int
    """Pairs, or those of the version that has fewer."""
    error: float | None = None
    """Standard error; `None` below 6 launches, of which no interval is made."""
    degrees: float = 0.0
    """The degrees of freedom."""

    def interval(self, alpha: float, bias: float = 0.0) -> Interval | None:
        """Student's; wider by `bias` at both ends. `None` without a standard error."""
        if self.error is None:
            return None
        half_width = t_quantile(1 - alpha / 2, self.degrees) * self.error + bias
        return self.centre - half_width, self.centre + half_width


def paired(differences: Sequence[float]) -> Estimate | None:
    """The estimate of ln(t / t before) over neighbouring launches, which share the machine's state."""
    if not differences:
        return None
    centre, num = fmean(differences), len(differences)
    if num < MIN_LAUNCHES:
        return Estimate(centre, num)
    return Estimate(centre, num, stdev(differences) / math.sqrt(num), num - 1)


def unpaired(after: Sequence[float], before: Sequence[float]) -> Estimate | None:
    """The estimate of the difference of ln(t) between two runs; `None` where one has no launch.

    Source: Welch, The generalization of Student's problem, Biometrika 34 (1947); degrees of freedom by
    Satterthwaite, Biometrics Bulletin 2 (1946).
    """
    if not after or not before:
        return None
    centre, num = fmean(after) - fmean(before), min(len(after), len(before))
    if num < MIN_LAUNCHES:
        return Estimate(centre, num)
    of_means = (variance(after) / len(after), variance(before) / len(before))
    error = math.sqrt(sum(of_means))
    if error == 0:
        return Estimate(centre, num, 0.0, 2 * num - 2)
    shares = tuple(square / sum(of_means) for square in of_means)
    degrees = 1 / (shares[0] ** 2 / (len(after) - 1) + shares[1] ** 2 / (len(before) - 1))
    return Estimate(centre, num, error, degrees)


@dataclass(frozen=True)
class Bounded:
    """A difference of step times against a threshold, all in percent."""

    outcome: Outcome
    percent: float | None
    ci: Interval | None
    """Each end is a one-sided bound; `slower` and `not slower` are wrong with at most 5 %."""
    seen_percent: float | None
    """The smallest difference that would have been called slower with 80 % chance; `None` without `ci`."""


UNKNOWN = Bounded("undecided", None, None, None)


def bounded(
    found: Estimate | None,
    threshold_percent: float,
    looks: Sequence[Look] = (),
    num_variants: int = 1,
    bias: float = 0.0,
) -> Bounded:
    """Whether the difference is above the threshold, over all looks so far.

    `slower` is wrong with at most 5 % over all variants of a gate (Bonferroni), since one of them is enough
    to trip it. `not slower` is wrong with at most 5 % for each: a gate passes if all of them are not slower
    (an intersection-union test: Berger, Technometrics 24 (1982)).

    Args:
        found: the estimate; `None` if there is nothing to compare.
        threshold_percent: the largest difference that is allowed.
        looks: so far; without any there is one, now.
        num_variants: of the gate.
        bias: by how much interference may have changed the difference of logarithms.
    """
    if found is None:
        return UNKNOWN
    percent = percent_from_log(found.centre)
    if found.error is None:
        return Bounded("undecided", percent, None, None)
    # One-sided: twice the level, of which each side has half.
    tripping = t_quantile(1 - level_at(looks, found.launches, 2 * ALPHA / num_variants) / 2, found.degrees)
    passing = t_quantile(1 - level_at(looks, found.launches, 2 * ALPHA) / 2, found.degrees)
    threshold = math.log1p(threshold_percent / 100)
    low = found.centre - tripping * found.error - bias
    high = found.centre + passing * found.error + bias
    seen = threshold + (tripping + t_quantile(POWER, found.degrees)) * found.error + bias
    outcome: Outcome = "slower" if low > threshold else "not slower" if high < threshold else "undecided"
    return Bounded(outcome, percent, percent_interval((low, high)), percent_from_log(seen))


def launches_to_decide(
    found: Estimate,
    threshold_percent: float,
    looks: Sequence[Look] = (),
    num_variants: int = 1,
) -> int | None:
    """About how many launches in all decide a difference of this size; `None` if it can't be said.

    At the level of the last of these looks; for the others see `bounded`.
    """
    if found.error is None:
        return None
    beyond = found.centre - math.log1p(threshold_percent / 100)
    level = level_at(looks, found.launches, 2 * ALPHA / (num_variants if beyond > 0 else 1)) / 2
    apart = abs(beyond)
    deviation = found.error * math.sqrt(found.launches)
    if apart == 0:
        return None
    quantiles = t_quantile(1 - level, found.degrees) + t_quantile(POWER, found.degrees)
    return max(MIN_LAUNCHES, math.ceil((quantiles * deviation / apart) ** 2))
