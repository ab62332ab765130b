"""Confidence interval of one median."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from statistics import median

from gpurun.launcher.stats.launches import t_interval
from gpurun.launcher.stats.verdict import Interval


def median_interval(values: Sequence[float], alpha: float = 0.05) -> Interval | None:
    """Distribution-free interval of the median from two order statistics; `None` for too few values.

    Source: Thompson, Annals of Mathematical Statistics 7 (1936): the number of values below the median is
    binomial(n, 1/2). At α = 0.05 it takes 6 values.
    """
    rank = order_rank(len(values), alpha)
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


@lru_cache(maxsize=512)
def order_rank(num_values: int, alpha: float) -> int:
    """The largest k with 2·P(Binomial(n, 1/2) ≤ k − 1) ≤ alpha, counted in whole numbers; 0 if none."""
    most_ways = Fraction(alpha) * 2**num_values / 2
    ways, rank = 1, 0
    while ways <= most_ways:
        rank += 1
        ways += math.comb(num_values, rank)
    return rank


def launches_interval(launch_medians: Sequence[float], alpha: float = 0.05) -> Interval | None:
    """Interval of the typical launch median: a t-interval on logarithms; `None` with fewer than 2 launches.

    It is widened, if necessary, to contain the median of `launch_medians`, which is shown with it: on the log
    scale the interval is centred on the mean, which can differ for skewed launches.
    """
    logs = t_interval([math.log(value) for value in launch_medians], alpha)
    if logs is None:
        return None
    middle = median(launch_medians)
    return min(math.exp(logs[0]), middle), max(math.exp(logs[1]), middle)
