"""Converts log ratios to percent, and intervals to verdicts."""

import math
from typing import Literal

from gpurun.launcher.units import Interval

Verdict = Literal["faster", "slower", "same", "inconclusive"]

RELEVANT_PERCENT = 1.0
"""Smaller differences are neither faster nor slower, whatever the interval."""


def percent_from_log(log_ratio: float) -> float:
    """100·(t / t_baseline − 1) from ln(t / t_baseline): positive is slower."""
    return 100 * math.expm1(min(log_ratio, 700.0))  # an early look's interval may be beyond what floats hold


def percent_interval(log_interval: Interval | None) -> Interval | None:
    """The same interval in percent; the order of its ends is kept, since the conversion is monotone."""
    if log_interval is None:
        return None
    return percent_from_log(log_interval[0]), percent_from_log(log_interval[1])


def verdict_of(percent: float | None, ci: Interval | None) -> Verdict:
    """The verdict on a difference of step times; both arguments in percent.

    `faster` or `slower` if the interval excludes 0 and the estimate is at least 1 %; `same` if the interval
    lies within ±1 %; else `inconclusive`, also where there is no interval.
    """
    if percent is None or ci is None:
        return "inconclusive"
    low, high = ci
    if low > 0 and percent >= RELEVANT_PERCENT:
        return "slower"
    if high < 0 and percent <= -RELEVANT_PERCENT:
        return "faster"
    if low >= -RELEVANT_PERCENT and high <= RELEVANT_PERCENT:
        return "same"
    return "inconclusive"
