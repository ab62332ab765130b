"""The cost curve of one device: a straight line, or its points if they don't lie on one."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import sqrt
from statistics import median

from gpurun.launcher.rundir.records import Curve
from gpurun.launcher.stats.estimates import median_interval
from gpurun.launcher.units import Interval

STRAIGHT_WITHIN = 0.02
"""Largest relative error of a straight line at a measured time."""
STRAIGHT_ERRORS = 3.0
"""Largest error of a straight line in standard errors of the measured time, if that is more."""
MEDIAN_ERROR = 1.86
"""Standard error of a median of n values, times √n, per median absolute deviation, for normal noise:
√(π/2) · 1.4826."""

Times = Mapping[int, Sequence[float]]
"""Milliseconds by number of samples, one value per round."""


def fit_curve(times_ms: Times, cap: int | None) -> Curve:
    """The cost curve of one device.

    α and β by Theil–Sen on the medians; their intervals by the same fit in each round, from which the
    distribution-free interval of a median is taken. A negative α within noise becomes 0, and β is
    fitted again. Where the line misses a median by more than noise, the curve goes through the
    medians instead.
    """
    medians = {samples: median(values) for samples, values in sorted(times_ms.items())}
    rounds = [
        {samples: values[i] for samples, values in times_ms.items()}
        for i in range(min(map(len, times_ms.values())))
    ]
    fit = from_zero if _may_be_positive([theil_sen(points)[0] for points in rounds]) else theil_sen
    (alpha_ms, beta_ms), per_round = fit(medians), [fit(points) for points in rounds]
    straight = all(
        abs(medians[samples] - alpha_ms - beta_ms * samples) <= _tolerance(values, medians[samples])
        for samples, values in times_ms.items()
    )
    return Curve(
        alpha_ms=alpha_ms,
        alpha_ci=_around(alpha_ms, median_interval([alpha for alpha, _ in per_round])),
        beta_ms=beta_ms,
        beta_ci=_around(beta_ms, median_interval([beta for _, beta in per_round])),
        straight=straight,
        points=tuple(zip(medians, isotonic(list(medians.values())), strict=True)),
        cap=cap,
    )


def theil_sen(points: Mapping[int, float]) -> tuple[float, float]:
    """α and β ≥ 0 of the line through `points`: the median slope of all pairs, and the median remainder.

    Source: Theil 1950; Sen, Journal of the American Statistical Association 63 (1968).
    """
    slopes = [(points[b] - points[a]) / (b - a) for a, b in combinations(sorted(points), 2)]
    # A device can't be faster with more samples: that is noise around a flat curve.
    beta = max(0.0, median(slopes)) if slopes else 0.0
    return median(value - beta * samples for samples, value in points.items()), beta


def from_zero(points: Mapping[int, float]) -> tuple[float, float]:
    """As `theil_sen`, but with α ≥ 0: where it comes out negative, β is the median of all quotients."""
    alpha, beta = theil_sen(points)
    return (alpha, beta) if alpha >= 0 else (0.0, median(value / size for size, value in points.items()))


def isotonic(values: Sequence[float]) -> list[float]:
    """The rising sequence nearest to `values` in squares, by pooling neighbours that fall.

    Source: Barlow, Bartholomew, Bremner, Brunk, Statistical Inference under Order Restrictions, 1972.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def cost_ms(curve: Curve, samples: int, hope: float = 0.0) -> float:
    """Predicted time of `samples`, in milliseconds; a device without samples takes no time.

    Args:
        hope: between two points, how far to go from the line through them, 0, to the lower one, 1.
    """
    if samples == 0:
        return 0.0
    if curve.straight or len(curve.points) < 2:
        return max(0.0, curve.alpha_ms + curve.beta_ms * samples)
    return _through_points(curve, samples, hope)


def _through_points(curve: Curve, samples: int, hope: float) -> float:
    """Interpolates between points and below the first; extrapolates beyond the last by β."""
    sizes = [size for size, _ in curve.points]
    values = [value for _, value in curve.points]
    if samples >= sizes[-1]:
        return values[-1] + curve.beta_ms * (samples - sizes[-1])
    right = max(1, bisect_left(sizes, samples))
    if samples == sizes[right]:
        return values[right]
    slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
    on_line = max(0.0, values[right] - slope * (sizes[right] - samples))
    return on_line if samples < sizes[0] else hope * values[right - 1] + (1 - hope) * on_line


def _may_be_positive(alphas: Sequence[float]) -> bool:
    interval = median_interval(alphas)
    return interval is None or interval[1] >= 0


def _tolerance(values: Sequence[float], middle: float) -> float:
    deviation = median(abs(value - middle) for value in values)
    return max(STRAIGHT_WITHIN * middle, STRAIGHT_ERRORS * MEDIAN_ERROR * deviation / sqrt(len(values)))


def _around(estimate: float, interval: Interval | None) -> Interval | None:
    """The interval, widened to contain the estimate, which is from the medians over rounds."""
    return None if interval is None else (min(interval[0], estimate), max(interval[1], estimate))
