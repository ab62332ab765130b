"""Student's t distribution on the standard library alone; scipy is only the reference in the tests."""

import math
from functools import lru_cache


@lru_cache(maxsize=512)
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
