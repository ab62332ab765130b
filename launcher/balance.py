"""`split: balanced`: cost curves of devices, and the exact split with the shortest step. Pure functions.

Devices are measured at a few batch sizes, all busy at once: first coarsely, at shares of the even split; then
around the split that this suggests, so that each device is measured near its own share and under the load of
the predicted step. If a curve isn't straight, values between its points are guesses: then the split itself is
measured, with the middles of the gaps around it, until a measured split is as fast as any that the curves
predict.
"""

import heapq
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import sqrt
from statistics import median

from gpurun.launcher.errors import SpecError
from gpurun.launcher.rundir.records import Balance, CostCurve, Prediction
from gpurun.launcher.splits import split_even, split_near_even, split_proportional
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
        max_samples=cap,
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
            f"the devices can hold {' + '.join(map(str, caps))} = {plural(sum(caps), 'sample')}, "
            f"not {batch}: set `global_batch: {sum(caps)}` or less"
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


Split = tuple[int, ...]

WITHIN = 0.01
"""Tolerance between a measured split and the best that curves predict, if they aren't straight."""
HOPE = 0.5
"""Between two points a curve may run below their line: how far towards the lower point to assume."""
MeasureSplit = Callable[[Split, int], Sequence[float]]
"""Milliseconds of each device's own work in a step, over so many steps of a split, all devices at once.

Infinite for a device with too little memory. All ranks call it alike and get the same results.
"""
ROUGH_SHARES = (0.25, 0.5, 1.0)
ROUGH_ROUNDS = 3
SHARES = (0.6, 0.8, 1.0, 1.2)
"""Shares of the suggested split at which each device is measured."""
SMALL_SHARES = (0.4, 0.6, 0.8, 1.0)
"""Shares of the suggested split to measure, if the dataset has no more samples than the batch."""
ROUNDS = 6
"""Enough for the 95 % interval of a median."""
FEW_ROUNDS = 2
"""Rounds after which the search starts over if the split has moved too far."""
MAX_SEARCHES = 3
MOVED = 0.15
"""Share of a device's samples: a split that moves by more is measured around its new place as well."""
MAX_REFINEMENTS = 4
WARM_UP_STEPS = 1
BLOCK_MS = 50.0
MAX_BLOCK_STEPS = 20


def costs_of(curves: Sequence[CostCurve], hope: float = 0.0) -> list[Cost]:
    """The curves as cost functions for the solver."""

    def of(curve: CostCurve) -> Cost:
        return lambda samples: cost_ms(curve, samples, hope)

    return [of(curve) for curve in curves]


def fastest_measured(splits: Sequence[Split], curves: Sequence[CostCurve]) -> Split | None:
    """The fastest of the splits whose sizes are all points of the curves."""
    sizes = [{0, *(samples for samples, _ in curve.points)} for curve in curves]
    measured = [split for split in splits if all(size in of for size, of in zip(split, sizes, strict=True))]
    return min(measured, key=lambda split: slowest(costs_of(curves), split), default=None)


def is_as_hoped(curves: Sequence[CostCurve], split: Split, hoped: Split) -> bool:
    """Whether a split is about as fast as the other could be at best."""
    promised_ms = slowest(costs_of(curves, HOPE), hoped)
    return slowest(costs_of(curves), split) <= (1 + WITHIN) * promised_ms


def gap_around(curve: CostCurve, size: int) -> tuple[int, int]:
    """The middles between a number of samples and the nearest measured ones, below and above."""
    below = max((samples for samples, _ in curve.points if samples < size), default=size)
    above = min((samples for samples, _ in curve.points if samples > size), default=size)
    return (below + size) // 2, (size + above + 1) // 2


@dataclass
class Calibration:
    """The search for the best split of one batch."""

    measure: MeasureSplit
    batch: int
    minimum: int
    caps: Sequence[int]
    most: int
    """The most samples that a measured split may have: the size of the dataset."""
    seed: str
    """Seeds the order of measurements; the same on all ranks."""
    times_ms: list[dict[int, list[float]]] = field(default_factory=list)
    """A value per round, by device and samples."""
    too_large: list[int | None] = field(default_factory=list)
    """The fewest samples that did not fit, by device."""
    largest: list[int] = field(default_factory=list)
    """The most samples that fitted, by device."""

    def __post_init__(self) -> None:
        self.times_ms = [{} for _ in self.caps]
        self.too_large = [None for _ in self.caps]
        self.largest = [0 for _ in self.caps]

    def run(self) -> tuple[tuple[CostCurve, ...], Split]:
        """The devices' curves, and the best split by them.

        Raises:
            MemoryError: the devices can't hold the batch.
        """
        even = split_near_even(self.batch, len(self.caps))
        self.measure_rounds([self.scaled(even, share) for share in ROUGH_SHARES], ROUGH_ROUNDS)
        split = self.best(self.curves())
        for searches_left in reversed(range(MAX_SEARCHES)):
            before, columns = split, self.columns_around(split)
            self.times_ms = [{} for _ in self.caps]  # earlier ones were measured under another load
            self.measure_rounds(columns, FEW_ROUNDS)
            split = self.best(self.curves())
            if is_near(split, before) or not searches_left:
                self.measure_rounds(columns, ROUNDS - FEW_ROUNDS)
                split = self.best(self.curves())
            if is_near(split, before):
                break
        split = self.refined(split)
        return self.curves(), split

    def refined(self, split: Split) -> Split:
        """The split, or, if a curve isn't straight, the best measured one."""
        curves = self.curves()
        if all(curve.straight for curve in curves):
            return split
        wanted = {split: None}
        for _ in range(MAX_REFINEMENTS):
            hoped = self.best(curves, HOPE)
            wanted |= {split: None, hoped: None}
            self.measure_rounds(self.columns_between(split, hoped, curves), ROUNDS)
            curves = self.curves()
            split = self.best(curves)
            fastest = fastest_measured(list(wanted), curves)
            if fastest and is_as_hoped(curves, fastest, self.best(curves, HOPE)):
                break
        return fastest or split

    def columns_between(self, split: Split, hoped: Split, curves: Sequence[CostCurve]) -> list[Split]:
        """Both splits, and the middles of the gaps that the first has on either side in the curves."""
        gaps = [gap_around(curve, size) for curve, size in zip(curves, split, strict=True)]
        columns = dict.fromkeys(
            self.scaled(column, 1.0) for column in (split, hoped, *zip(*gaps, strict=True))
        )
        return [column for column in columns if sum(column) <= self.most]

    def columns_around(self, split: Split) -> list[Split]:
        """Splits that give every device values of b around its samples in this one."""
        shares = SHARES if sum(math.ceil(SHARES[-1] * size) for size in split) <= self.most else SMALL_SHARES
        sizes = [self.sizes_around(device, size, shares) for device, size in enumerate(split)]
        columns: list[Split] = list(zip(*sizes, strict=True))
        return [column for column in columns if sum(column) <= self.most] or [split]

    def sizes_around(self, device: int, size: int, shares: Sequence[float]) -> list[int]:
        """A value of b for each share, all different where the device has room for so many."""
        sizes: list[int] = []
        for share in shares:
            wanted = max(1, round(share * size), sizes[-1] + 1 if sizes else 1)
            sizes.append(min(wanted, self.limit(device)))
        return sizes

    def scaled(self, split: Split, share: float) -> Split:
        return tuple(min(max(1, round(share * size)), self.limit(i)) for i, size in enumerate(split))

    def limit(self, device: int) -> int:
        """The most samples worth trying."""
        failed = self.too_large[device]
        return self.caps[device] if failed is None else min(self.caps[device], max(1, failed - 1))

    def measure_rounds(self, splits: Sequence[Split], rounds: int) -> None:
        """Measures every split once in each round, in a new order each time, after a warm-up."""
        steps = dict(self.fitting(split) for split in splits)
        order = random.Random(f"{self.seed}/{splits}/{rounds}")
        for _ in range(rounds):
            for split in order.sample(list(steps), len(steps)):
                times_ms = self.measure(split, steps[split])
                for of_device, size, ms in zip(self.times_ms, split, times_ms, strict=True):
                    of_device.setdefault(size, []).append(ms)

    def fitting(self, split: Split) -> tuple[Split, int]:
        """The split, reduced to what devices can hold, after a warm-up; and the steps per block.

        Raises:
            MemoryError: a device can't hold a single sample.
        """
        while True:
            times_ms = self.measure(split, WARM_UP_STEPS)
            for device, (size, ms) in enumerate(zip(split, times_ms, strict=True)):
                if math.isinf(ms):
                    self.too_large[device] = min(size, self.too_large[device] or size)
                else:
                    self.largest[device] = max(size, self.largest[device])
            if not any(map(math.isinf, times_ms)):
                return split, min(MAX_BLOCK_STEPS, max(1, math.ceil(BLOCK_MS / max(*times_ms, 1e-3))))
            split = tuple(
                self.smaller(device, size) if math.isinf(ms) else size
                for device, (size, ms) in enumerate(zip(split, times_ms, strict=True))
            )

    def smaller(self, device: int, size: int) -> int:
        """The next size to try on a device that can't hold `size`: halfway to what it held."""
        if size == 1:
            raise MemoryError(f"device {device} can't hold the model and 1 sample")
        return max(1, (self.largest[device] + size) // 2)

    def curves(self) -> tuple[CostCurve, ...]:
        """The curves of the latest measurements."""
        return tuple(fit_curve(times, self.cap(device)) for device, times in enumerate(self.times_ms))

    def cap(self, device: int) -> int | None:
        """The most samples that a device can hold, if that limits its share."""
        found = [self.caps[device]] if self.caps[device] < self.batch else []
        found += [self.largest[device]] if self.too_large[device] is not None else []
        return min(found, default=None)

    def best(self, curves: Sequence[CostCurve], hope: float = 0.0) -> Split:
        """The fastest split by the curves.

        Raises:
            MemoryError: the devices can't hold the batch.
        """
        caps = [
            self.batch if curve.max_samples is None else min(self.batch, curve.max_samples)
            for curve in curves
        ]
        try:
            return solve(costs_of(curves, hope), self.batch, [self.minimum] * len(curves), caps)
        except SpecError as error:
            raise MemoryError(str(error)) from error


def balance_of(curves: tuple[CostCurve, ...], split: Split, overhead_ms: float) -> Balance:
    """The split next to those that need no measuring."""
    batch, betas = sum(split), [curve.beta_ms if curve.straight else 0.0 for curve in curves]
    even = split_even(batch, len(curves))  # the job's own `even`, which another variant measures
    proportional = split_proportional(batch, [1 / beta for beta in betas]) if min(betas) > 0 else None
    return Balance(
        curves=curves,
        best=predict(curves, split),
        even=predict(curves, even) if _fits(curves, even) else None,
        proportional=predict(curves, proportional) if proportional and _fits(curves, proportional) else None,
        overhead_ms=overhead_ms,
    )


def predict(curves: Sequence[CostCurve], split: Split) -> Prediction:
    """Predicted times of a split, which may leave out the last devices."""
    return Prediction(split, slowest(costs_of(curves[: len(split)]), split))


def is_near(split: Split, before: Split) -> bool:
    """Whether measurements around `before` hold for `split` too."""
    return all(abs(new - old) <= max(1, MOVED * old) for old, new in zip(before, split, strict=True))


def _fits(curves: Sequence[CostCurve], split: Split) -> bool:
    return all(
        curve.max_samples is None or size <= curve.max_samples
        for curve, size in zip(curves, split, strict=False)
    )
