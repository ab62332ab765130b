"""Differences across launches: the launch is the unit, since rounds of different launches aren't pairs."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev, variance

from gpurun.launcher.stats.student import t_quantile
from gpurun.launcher.stats.verdict import Interval

MIN_PAIRS = 6
"""With fewer pairs of launches a t-interval rests on its assumption of a normal distribution alone."""


def t_interval(values: Sequence[float], alpha: float) -> Interval | None:
    """Interval of the mean that misses it with `alpha` for normal `values`; `None` with fewer than 2."""
    num_values = len(values)
    if num_values < 2:
        return None
    centre = fmean(values)
    half_width = t_quantile(1 - alpha / 2, num_values - 1) * stdev(values) / math.sqrt(num_values)
    return centre - half_width, centre + half_width


def launch_pair_interval(differences: Sequence[float], alpha: float) -> Interval | None:
    """t-interval of ln(median A / median B) over pairs of neighbouring launches; `None` below 6 pairs."""
    return t_interval(differences, alpha) if len(differences) >= MIN_PAIRS else None


def welch_interval(values: Sequence[float], baseline: Sequence[float], alpha: float) -> Interval | None:
    """Interval of mean(values) − mean(baseline) for unequal variances; `None` unless both have 2 values.

    Source: Welch, The generalization of Student's problem, Biometrika 34 (1947); degrees of freedom by
    Satterthwaite, Biometrics Bulletin 2 (1946).
    """
    if min(len(values), len(baseline)) < 2:
        return None
    squares = (variance(values) / len(values), variance(baseline) / len(baseline))
    error = math.sqrt(sum(squares))
    centre = fmean(values) - fmean(baseline)
    if error == 0:
        return centre, centre
    # Shares of the variance rather than variances: squares of tiny figures would underflow to zero.
    shares = tuple(square / sum(squares) for square in squares)
    degrees = 1 / (shares[0] ** 2 / (len(values) - 1) + shares[1] ** 2 / (len(baseline) - 1))
    half_width = t_quantile(1 - alpha / 2, degrees) * error
    return centre - half_width, centre + half_width
