"""Cost curves of devices, and the exact split with the shortest step for any monotonic costs."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from math import sqrt
from statistics import median

from gpurun.launcher.errors import SpecError
from gpurun.launcher.rundir.records import CostCurve
from gpurun.launcher.stats.estimates import median_interval
from gpurun.launcher.units import Interval, plural

STRAIGHT_WITHIN = 0.02
"""Largest relative error of a straight line at a measured time."""
STRAIGHT_ERRORS = 3.0
"""Largest error of a straight line in standard errors of the measured time, if that is more."""
MEDIAN_ERROR = 1.86
"""Standard error of a median of n values, times √n, per median absolute deviation, for normal noise:
√(π/2) · 1.4826."""

Times = Mapping[int, Sequence[float]]
"""Milliseconds by number of samples, one value per round."""


def fit_curve(times_ms: Times, cap: int | None) -> CostCurve:
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
    return CostCurve(
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


def cost_ms(curve: CostCurve, samples: int, hope: float = 0.0) -> float:
    """Predicted time of `samples`, in milliseconds; a device without samples takes no time.

    Args:
        hope: between two points, how far to go from the line through them, 0, to the lower one, 1.
    """
    if samples == 0:
        return 0.0
    if curve.straight or len(curve.points) < 2:
        return max(0.0, curve.alpha_ms + curve.beta_ms * samples)
    return _through_points(curve, samples, hope)


def _through_points(curve: CostCurve, samples: int, hope: float) -> float:
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


Cost = Callable[[int], float]
"""Time of a number of samples on one device; never less for more samples."""

_HALVINGS = 60
"""Bisections of the interval that holds the best time: more than the precision of a float."""


def solve(costs: Sequence[Cost], batch: int, minima: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Samples per device that make the slowest device as fast as it can be, with `batch` samples in all.

    First every device gets the samples that it can process in the longest time that is too short for the
    whole batch. The remaining samples go, one by one, to the device with the smallest new finish time; ties
    go to the earlier device. With non-decreasing costs no other split ends sooner: a device only exceeds the
    best time once no other could stay within it. Among equally fast splits the one nearest to even is taken.

    Args:
        costs: one for each device.
        batch: samples in all.
        minima: the fewest samples of each device.
        caps: the most.

    Raises:
        SpecError: minima and caps leave no such split.
    """
    _check_room(batch, minima, caps)
    samples = _filled(costs, batch, minima, caps)
    finish = [
        (cost(count + 1), device)
        for device, (cost, count) in enumerate(zip(costs, samples, strict=True))
        if count < caps[device]
    ]
    heapq.heapify(finish)
    for _ in range(batch - sum(samples)):
        _, device = heapq.heappop(finish)
        samples[device] += 1
        if samples[device] < caps[device]:
            heapq.heappush(finish, (costs[device](samples[device] + 1), device))
    return _evened(costs, samples, minima, caps)


def slowest(costs: Sequence[Cost], samples: Sequence[int]) -> float:
    """The time of a split: that of its slowest device."""
    return max(cost(count) for cost, count in zip(costs, samples, strict=True))


def _check_room(batch: int, minima: Sequence[int], caps: Sequence[int]) -> None:
    if sum(minima) > batch:
        raise SpecError(
            f"{plural(batch, 'sample')} can't give {plural(len(minima), 'device')} at least "
            f"{' and '.join(str(least) for least in dict.fromkeys(minima))} each"
        )
    for device, (least, most) in enumerate(zip(minima, caps, strict=True)):
        if least > most:
            raise SpecError(f"device {device} can hold {most} samples, but must get {least}")
    if sum(caps) < batch:
        raise SpecError(
            f"the devices can hold {' + '.join(map(str, caps))} = {plural(sum(caps), 'sample')}, not {batch}"
        )


def _filled(costs: Sequence[Cost], batch: int, minima: Sequence[int], caps: Sequence[int]) -> list[int]:
    """The most samples, `batch` at most, that devices can process in a time that isn't too long."""
    low, high = 0.0, slowest(costs, [min(batch, cap) for cap in caps])
    samples = list(minima)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        within = [
            _most_within(cost, middle, least, min(batch, most))
            for cost, least, most in zip(costs, minima, caps, strict=True)
        ]
        if sum(within) <= batch:
            low, samples = middle, within
        else:
            high = middle
    return samples


def _evened(
    costs: Sequence[Cost], samples: Sequence[int], minima: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...]:
    """Moves samples to devices that have fewer, as long as the slower of the two gets no slower."""
    evened, devices = list(samples), range(len(samples))
    for _ in devices:
        before = list(evened)
        for giver, taker in permutations(devices, 2):
            have, few = evened[giver], evened[taker]
            most = min(caps[taker], few + min((have - few) // 2, have - minima[giver]))
            if most > few:
                limit = max(costs[giver](have), costs[taker](few))
                moved = _most_within(costs[taker], limit, few, most) - few
                evened[giver], evened[taker] = have - moved, few + moved
        if evened == before:
            break
    return tuple(evened)


def _most_within(cost: Cost, limit: float, least: int, most: int) -> int:
    """The most samples, from `least` to `most`, that take at most `limit`; `least` if none does."""
    while least < most:
        middle = (least + most + 1) // 2
        if cost(middle) <= limit:
            least = middle
        else:
            most = middle - 1
    return least
