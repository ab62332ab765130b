"""A difference against a threshold: slower by more than that, not slower by more than that, or undecided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Literal

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.launches import t_quantile
from gpurun.launcher.stats.sequential import ALPHA, MIN_LAUNCHES, POWER, level_at
from gpurun.launcher.stats.verdict import Interval, percent_from_log, percent_interval

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
    """Of freedom."""


def paired(differences: Sequence[float]) -> Estimate | None:
    """Of ln(t / t before) of neighbouring launches, which share the state of the machine; `None` of none."""
    if not differences:
        return None
    centre, num = fmean(differences), len(differences)
    if num < MIN_LAUNCHES:
        return Estimate(centre, num)
    return Estimate(centre, num, stdev(differences) / math.sqrt(num), num - 1)


def unpaired(after: Sequence[float], before: Sequence[float]) -> Estimate | None:
    """Of ln(t) of two runs; `None` where one has no launch.

    Source: Welch, The generalization of Student's problem, Biometrika 34 (1947); degrees of freedom by
    Satterthwaite, Biometrics Bulletin 2 (1946).
    """
    if not after or not before:
        return None
    centre, num = fmean(after) - fmean(before), min(len(after), len(before))
    if num < MIN_LAUNCHES:
        return Estimate(centre, num)
    squares = (variance(after) / len(after), variance(before) / len(before))
    error = math.sqrt(sum(squares))
    if error == 0:
        return Estimate(centre, num, 0.0, 2 * num - 2)
    shares = tuple(square / sum(squares) for square in squares)
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
    slack_percent: float = 0.0,
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
        slack_percent: by how much interference may have changed the difference.
    """
    if found is None:
        return UNKNOWN
    percent = percent_from_log(found.centre)
    if found.error is None:
        return Bounded("undecided", percent, None, None)
    # One-sided: twice the level, of which each side has half.
    tripping = t_quantile(1 - level_at(looks, found.launches, 2 * ALPHA / num_variants) / 2, found.degrees)
    passing = t_quantile(1 - level_at(looks, found.launches, 2 * ALPHA) / 2, found.degrees)
    slack, threshold = math.log1p(slack_percent / 100), math.log1p(threshold_percent / 100)
    low = found.centre - tripping * found.error - slack
    high = found.centre + passing * found.error + slack
    seen = threshold + (tripping + t_quantile(POWER, found.degrees)) * found.error + slack
    outcome: Outcome = "slower" if low > threshold else "not slower" if high < threshold else "undecided"
    return Bounded(outcome, percent, percent_interval((low, high)), percent_from_log(seen))


def launches_to_decide(found: Estimate, threshold_percent: float, slack_percent: float = 0.0) -> int | None:
    """About how many launches in all decide a difference of this size; `None` if it can't be said."""
    if found.error is None:
        return None
    apart = abs(found.centre - math.log1p(threshold_percent / 100)) - math.log1p(slack_percent / 100)
    deviation = found.error * math.sqrt(found.launches)
    if apart <= 0:
        return None
    quantiles = t_quantile(1 - ALPHA, found.degrees) + t_quantile(POWER, found.degrees)
    return max(MIN_LAUNCHES, math.ceil((quantiles * deviation / apart) ** 2))
