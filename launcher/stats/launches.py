"""Differences across launches: the launch is the unit, since rounds of different launches aren't pairs.

Student's t distribution takes the standard library alone; scipy is the reference in the tests.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, variance

from gpurun.launcher.units import Interval


def t_interval(values: Sequence[float], alpha: float) -> Interval | None:
    """Interval of the mean that misses it with `alpha` for normal `values`; `None` with fewer than 2."""
    num_values = len(values)
    if num_values < 2:
        return None
    centre = fmean(values)
    error = math.sqrt(squares(values, centre) / (num_values - 1) / num_values)
    half_width = t_quantile(1 - alpha / 2, num_values - 1) * error
    return centre - half_width, centre + half_width


def squares(values: Sequence[float], centre: float) -> float:
    """Sum of the squared deviations from `centre`: `statistics.variance` takes 20 times as long."""
    return math.fsum([(value - centre) ** 2 for value in values])


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


@lru_cache(maxsize=8192)
def t_quantile(probability: float, degrees: float) -> float:
    """The value that Student's t with `degrees` of freedom stays below with `probability` in (0, 1).

    Raises:
        ValueError: the probability or the degrees of freedom are out of range.
    """
    if not 0 < probability < 1 or degrees <= 0:
        raise ValueError(f"no t quantile for probability {probability} and {degrees} degrees of freedom")
    if probability < 0.5:
        return -_upper_quantile(probability, degrees)
    return _upper_quantile(1 - probability, degrees)


def _upper_quantile(tail: float, degrees: float) -> float:
    """The t ≥ 0 with P(T > t) = tail ≤ 0.5, bisected until floats can't tell the ends apart."""
    low, high = 0.0, 1.0
    while upper_tail(high, degrees) > tail:
        low, high = high, 2 * high
    middle = (low + high) / 2
    while low < middle < high:
        if upper_tail(middle, degrees) > tail:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return middle


def upper_tail(t: float, degrees: float) -> float:
    """P(T > t) for t ≥ 0.

    Source: Abramowitz and Stegun 26.7.1: 2·P(T > t) = I_x(ν/2, 1/2) with x = ν/(ν + t²).
    """
    square = t * t
    total = degrees + square
    return 0.5 * _incomplete_beta(degrees / total, square / total, degrees / 2, 0.5)


def _incomplete_beta(x: float, complement: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b); `complement` is 1 − x without its rounding error."""
    if x <= 0 or complement <= 0:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log(complement))
    # The fraction converges fast on this side of the mean only; I_x(a, b) = 1 − I_{1−x}(b, a) for the other.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(complement, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b) by Lentz's method.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22, 3.10(iii).
    """
    tiny = 1e-300
    numerator, denominator = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = denominator
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            denominator = 1 / ((1 + term * denominator) or tiny)
            numerator = (1 + term / numerator) or tiny
            step = numerator * denominator
            value *= step
        if abs(step - 1) < 1e-16:
            break
    return value
