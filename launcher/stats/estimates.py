"""Estimates and intervals of differences, over launches and within one; verdicts; looks at growing evidence.

Two launches of the same processes differ by more than their rounds do, and rounds of different launches
aren't pairs, so across launches the launch is the unit of evidence. What is compared is all of a family, or
two versions of one variant against a threshold. Student's t distribution takes the standard library alone;
scipy is the reference in the tests.

Within one launch: Hodges-Lehmann estimate and exact Wilcoxon signed-rank interval; medians. Ties and zeros
are both kept: the interval consists of Walsh averages, and a zero or a repeated difference yields its
averages like any other value. For a continuous distribution the interval covers the centre of symmetry with
at least 1 − α exactly; ties can only raise that (Source: Lehmann, Nonparametrics, 1975, section 4.2;
Hollander, Wolfe, Chicken, Nonparametric Statistical Methods, 3.1 to 3.3).

Every look is a further chance of a false alarm. Alpha spending divides the allowed error among the looks: by
the time that a part of the budget is gone, so much of the error is spent. Looks need not be planned, as long
as what the differences are doesn't decide when they are taken.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist, fmean, median, stdev, variance
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.schedule import ROUNDS
from gpurun.launcher.units import Interval

Verdict = Literal["faster", "slower", "same", "inconclusive"]

RELEVANT_PERCENT = 1.0
"""Smaller differences are neither faster nor slower, whatever the interval."""

MOST_LOG = 700.0
"""An interval of few values may reach beyond what floats hold."""


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
    """The t ≥ 0 with P(T > t) = tail ≤ 0.5, bisected until the ends are adjacent floats."""
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


EXACT_UP_TO = 300
"""For more values T is approximated as normal: at 300 this widens the ranks by 0.2 % at most."""


def hodges_lehmann(differences: Sequence[float]) -> float | None:
    """Median of the averages of all pairs, each value with itself as well; `None` without values."""
    num_averages = len(differences) * (len(differences) + 1) // 2
    if not num_averages:
        return None
    middle = ((num_averages + 1) // 2, num_averages // 2 + 1)
    low, high = walsh_at(differences, middle)
    return low / 2 + high / 2


Round = TypeVar("Round")


def launch_values(log_times: Mapping[str, Mapping[Round, float]]) -> dict[str, float]:
    """Value of each variant in one launch: a robust mean of ln(step time) over its rounds.

    What slows a round down slows all its variants: its effect, the median over variants, is taken out first,
    so that the difference of two values is a paired one. As values are subtracted, differences always add up.
    Single slow rounds count little (Hodges–Lehmann): at 2 % of steps twice as long, differences scatter by a
    third less than those of means; without any by 4 % more (simulated).

    Args:
        log_times: ln(step time) of each variant by round.
    """
    effects = round_effects(log_times) if len(log_times) > 1 else {}
    values = {
        variant: hodges_lehmann([log - effects.get(number, 0.0) for number, log in logs.items()])
        for variant, logs in log_times.items()
    }
    return {variant: value for variant, value in values.items() if value is not None}


def round_effects(log_times: Mapping[str, Mapping[Round, float]]) -> dict[Round, float]:
    """How much slower a round was than the others, over all variants that it has; 0 on average.

    Source: one step of Tukey's median polish, Exploratory Data Analysis (1977), chapter 11.
    """
    deviations: dict[Round, list[float]] = {}
    for logs in log_times.values():
        middle = median(logs.values()) if logs else 0.0
        for number, log in logs.items():
            deviations.setdefault(number, []).append(log - middle)
    effects = {number: median(found) for number, found in deviations.items()}
    middle = hodges_lehmann(list(effects.values())) or 0.0
    return {number: effect - middle for number, effect in effects.items()}


def components(launches: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Standard deviations (between launches, between the rounds of a launch); `None` where there are too few.

    That of launches is without what the scatter of its rounds adds to a launch's mean (one-way analysis of
    variance).

    Args:
        launches: values of the rounds of each launch.
    """
    launches = [rounds for rounds in launches if rounds]
    degrees = sum(len(rounds) - 1 for rounds in launches)
    means = [fmean(rounds) for rounds in launches]
    within = sum(map(squares, launches, means))
    of_rounds = within / degrees if degrees else None
    if len(launches) < 2:
        return None, None if of_rounds is None else math.sqrt(of_rounds)
    of_means = squares(means, fmean(means)) / (len(means) - 1)
    added = (of_rounds or 0.0) * fmean(1 / len(rounds) for rounds in launches)
    return math.sqrt(max(0.0, of_means - added)), None if of_rounds is None else math.sqrt(of_rounds)


def wilcoxon_interval(differences: Sequence[float], alpha: float) -> Interval | None:
    """Distribution-free interval of the centre of `differences` that misses it with at most `alpha`.

    Returns:
        Both ends, in the unit of `differences`; `None` where so few values allow no interval of that level.
    """
    num_values = len(differences)
    rank = walsh_rank(num_values, alpha)
    if rank == 0:
        return None
    low, high = walsh_at(differences, (rank, num_values * (num_values + 1) // 2 + 1 - rank))
    return low, high


def walsh_at(differences: Sequence[float], ranks: Sequence[int]) -> list[float]:
    """The averages (dᵢ + dⱼ)/2, i ≤ j, of these `ranks` (from 1) in rising order."""
    values = np.sort(np.asarray(differences, dtype=np.float64))
    if len(values) > EXACT_UP_TO:
        return [_select_average(values, rank) for rank in ranks]
    rows, columns = _pairs(len(values))
    # Halves are added, not sums halved: the average of a value with itself is then exactly that value.
    averages = np.sort(values[rows] / 2 + values[columns] / 2)
    return [float(averages[rank - 1]) for rank in ranks]


@lru_cache(maxsize=64)
def _pairs(num_values: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions i ≤ j of all pairs."""
    rows, columns = np.triu_indices(num_values)
    return rows, columns


def _select_average(values: NDArray[np.float64], rank: int) -> float:
    """One such average, of sorted `values` with too many averages for the memory: by bisection."""
    places = np.arange(len(values))

    def reaches_rank(average: float) -> bool:
        up_to = np.searchsorted(values, 2 * average - values, side="right") - places
        return int(np.maximum(up_to, 0).sum()) >= rank

    low, high = float(values[0]), float(values[-1])
    if reaches_rank(low):
        return low
    middle = low / 2 + high / 2
    while low < middle < high:
        low, high = (low, middle) if reaches_rank(middle) else (middle, high)
        middle = low / 2 + high / 2
    return high


@lru_cache(maxsize=512)
def walsh_rank(num_values: int, alpha: float) -> int:
    """The rank, from either end, of the interval's ends among the sorted Walsh averages.

    The largest k with 2·P(T ≤ k − 1) ≤ alpha for the signed-rank statistic T; 0 if there is none.
    """
    if num_values > EXACT_UP_TO:
        mean = num_values * (num_values + 1) / 4
        deviation = math.sqrt(mean * (2 * num_values + 1) / 6)
        return max(0, math.floor(mean + NormalDist().inv_cdf(alpha / 2) * deviation + 0.5))
    tail = np.cumsum(signed_rank_probabilities(num_values))
    # The sum of a few hundred thousand floats may end a little above what is exactly alpha / 2.
    return int(np.searchsorted(tail, alpha / 2 * (1 + 1e-12), side="right"))


def signed_rank_probabilities(num_values: int) -> NDArray[np.float64]:
    """P(T = t) for t = 0 … n(n+1)/2 when every sign is a fair coin: by dynamic programming over the ranks."""
    probabilities = np.zeros(num_values * (num_values + 1) // 2 + 1)
    probabilities[0] = 1.0
    for rank in range(1, num_values + 1):
        positive = probabilities[:-rank].copy()
        probabilities *= 0.5
        probabilities[rank:] += 0.5 * positive
    return probabilities


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


def trend(values: Sequence[float]) -> tuple[float, float] | None:
    """Means of the first and the last third of `values`, if they grow, or shrink, from beginning to end.

    Mann-Kendall's test at 5 % for values without any trend (normal approximation, ties taken as no evidence);
    the mean of the second third must also lie between the two.

    Source: Kendall, Rank Correlation Methods (1948), chapter 4.
    """
    num_values = len(values)
    if num_values < 9:
        return None
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    error = math.sqrt(num_values * (num_values - 1) * (2 * num_values + 5) / 18)
    third = num_values // 3
    first, second, last = (
        fmean(values[start:end]) for start, end in ((0, third), (third, -third), (-third, num_values))
    )
    is_between = min(first, last) < second < max(first, last)
    is_sure = abs(score) - 1 > NormalDist().inv_cdf(0.975) * error
    return (first, last) if is_sure and is_between else None


def percent_from_log(log_ratio: float) -> float:
    """100·(t / t_baseline − 1) from ln(t / t_baseline): positive is slower."""
    return 100 * math.expm1(min(log_ratio, MOST_LOG))


def percent_interval(log_interval: Interval | None) -> Interval | None:
    """The interval in percent; the order of its ends is kept, since the conversion is monotone."""
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


ALPHA = 0.05
"""Chance of a false alarm over all looks of a comparison, or of a family of comparisons."""

MIN_LAUNCHES = 6
"""With fewer, an interval would depend on the launches being normal: that all six differences of two equal
variants have one sign happens in 3 % of runs, whatever their distribution."""

SPENDING_POWER = 2.0
"""Error spent at a fraction f of the budget: α·f². Large differences are found at the first looks, and the
last look keeps most of the power that it would have alone."""

SHARE_OF_ALPHA = 0.7
"""Several looks share 3.5 %. Their levels are computed for known deviations: with those estimated from few
launches they miss with up to 0.5 % more, and with up to 1.4 % more where the scatter so far decides how many
rounds a launch has, since there are fewer launches where it seems small (2,000 simulated runs of two equal
variants each, one of them scattering by 10 %: 4.8 % with fixed rounds, 6.4 % with chosen ones)."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)
_WIDEST = 8.0
"""Standard deviations beyond which there is no probability worth integrating."""
_PRECISION = 1e-12
_MOST_STEPS = 60
"""The most iterations: as many as halving would take; Newton's method takes about five."""


def next_look(launches: int) -> int:
    """The number of launches after which to look next: 6, 8, 11, 15, 20, 27, 36, 48, …"""
    look = MIN_LAUNCHES
    while look <= launches:
        look = -(-4 * look // 3)
    return look


def is_spent(looks: Sequence[Look]) -> bool:
    """Whether the last look has been taken: no error is left for another one."""
    return bool(looks) and looks[-1].fraction >= 1


def level_at(looks: Sequence[Look], launches: int, alpha: float = ALPHA) -> float:
    """Level (two-sided) of an interval from the first `launches`, with `alpha` for all looks together.

    Without looks there is only one, at the end, which has all of `alpha`. A comparison that got no further
    launches keeps the level of the look at which it ended.
    """
    if not looks:
        return alpha
    number = next((i for i, look in enumerate(looks) if look.launches >= launches), len(looks) - 1)
    return last_level(tuple(looks[: number + 1]), alpha)


def last_level(looks: tuple[Look, ...], alpha: float = ALPHA) -> float:
    """Level of the last of these looks. An interval of Student's t with that level is used at the look.

    Source: Lan and DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70 (1983), with
    the power family of Kim and DeMets, Biometrika 74 (1987). Levels, not boundaries, are carried over to t:
    Jennison and Turnbull, Group Sequential Methods (2000), 4.4.
    """
    return 2 * NormalDist().cdf(-_stage(looks, alpha * SHARE_OF_ALPHA).bound)


@dataclass(frozen=True, eq=False)
class _Stage:
    """The undecided part after a look: the density of the sum of all differences so far."""

    bound: float
    """The bound of the sum, divided by its deviation."""
    sums: NDArray[np.float64]
    masses: NDArray[np.float64]
    """Density times width, at `sums`."""
    launches: int
    spent: float


@lru_cache(maxsize=8192)
def _stage(looks: tuple[Look, ...], alpha: float) -> _Stage:
    """The last of these looks, by the recursion of Armitage, McPherson and Rowe (1969)."""
    before = _stage(looks[:-1], alpha) if len(looks) > 1 else _BEGINNING
    launches = max(looks[-1].launches, before.launches + 1)
    spent = max(before.spent, alpha * min(1.0, looks[-1].fraction) ** SPENDING_POWER)
    step = math.sqrt(launches - before.launches)
    bound = _bound(before, spent - before.spent, step, launches)
    sums = _NODES * bound
    kernel = np.exp(-0.5 * ((sums[:, None] - before.sums[None, :]) / step) ** 2)
    masses = _WEIGHTS * bound * (kernel @ before.masses) / (step * math.sqrt(2 * math.pi))
    return _Stage(bound / math.sqrt(launches), sums, masses, launches, spent)


_BEGINNING = _Stage(math.inf, np.zeros(1), np.ones(1), 0, 0.0)


def _bound(before: _Stage, wanted: float, step: float, launches: int) -> float:
    """The sum beyond which, on either side, there is the `wanted` probability; at most the widest.

    Newton's method, within an interval that is halved where a step would leave it.
    """
    low, high = 0.0, _WIDEST * math.sqrt(launches)
    if wanted <= _beyond(before, high, step)[0]:
        return high
    bound = min(high, -NormalDist(sigma=math.sqrt(launches)).inv_cdf(wanted / 2))  # of a single look
    for _ in range(_MOST_STEPS):
        probability, density = _beyond(before, bound, step)
        low, high = (bound, high) if probability > wanted else (low, bound)
        following = bound + (probability - wanted) / density if density else high
        following = following if low < following < high else (low + high) / 2
        if abs(following - bound) < _PRECISION:
            break
        bound = following
    return bound


def _beyond(before: _Stage, bound: float, step: float) -> tuple[float, float]:
    """Probability that the sum, undecided so far, is beyond ±`bound` at the next look, and its density."""
    ahead = (bound - before.sums) / (step * math.sqrt(2))
    # Symmetric: as much lies below −bound as above bound.
    probability = np.dot(before.masses, [math.erfc(each) for each in ahead.tolist()])
    density = np.dot(before.masses, np.exp(-(ahead**2))) * math.sqrt(2 / math.pi) / step
    return float(probability), float(density)


POWER = 0.8
"""Chance to find a difference that is called detectable."""

MOST_LAUNCHES = 10_000
ROUNDS_WITHIN = (ROUNDS, 28)
"""Fewer say little about a launch; more of one launch repeat what it has said."""


def detectable_percent(scatter_percent: float, launches: int) -> float | None:
    """The smallest difference that `launches` find with 80 % chance, in percent; `None` below 6 launches.

    Args:
        scatter_percent: standard deviation of the difference of two variants over launches.
        launches: of each variant, until the budget is spent.
    """
    if launches < MIN_LAUNCHES:
        return None
    return percent_from_log(_deviations(launches) * scatter_percent / 100)


def launches_needed(percent: float, scatter_percent: float) -> int | None:
    """Launches until a difference of `percent` is found with 80 % chance; `None` if more than 10,000."""
    if not percent > -100 or percent == 0:
        return None
    wanted = abs(math.log1p(percent / 100))
    low, high = MIN_LAUNCHES, MOST_LAUNCHES
    if _deviations(high) * scatter_percent / 100 > wanted:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if _deviations(middle) * scatter_percent / 100 <= wanted else (middle + 1, high)
        )
    return low


def best_rounds(
    start_s: float, round_s: float, launch_percent: float | None, round_percent: float | None
) -> int:
    """Rounds of a launch that make the most of a given time: 3 to 28; 3 where the scatter isn't known.

    Args:
        start_s: what a launch takes before its first round.
        round_s: what a round takes.
        launch_percent: standard deviation of a difference between launches, rounds apart.
        round_percent: between the rounds of a launch.

    Source: Cochran, Sampling Techniques (1977), 10.6: √(cost of a unit / cost of a subunit · variances).
    """
    if launch_percent is None or round_percent is None or round_s <= 0:
        return ROUNDS
    least, most = ROUNDS_WITHIN
    if launch_percent == 0:
        return most
    best = math.sqrt(start_s / round_s) * round_percent / launch_percent
    return min(max(round(best), least), most)


@lru_cache(maxsize=4096)
def _deviations(launches: int) -> float:
    """The detectable difference in standard deviations of a launch: by the last look alone."""
    level = last_level(planned_looks(min(launches, 200)))
    quantiles = t_quantile(1 - level / 2, launches - 1) + t_quantile(POWER, launches - 1)
    return quantiles / math.sqrt(launches)


def planned_looks(launches: int) -> tuple[Look, ...]:
    """The looks of a run whose budget is enough for so many launches that take equally long."""
    looks, look = [], MIN_LAUNCHES
    while look < launches:
        looks.append(Look(look, look / launches))
        look = next_look(look)
    return (*looks, Look(launches, 1.0))


IntervalAt = Callable[[float], Interval | None]
"""The interval of a comparison that misses it with α, over all looks."""


@dataclass(frozen=True)
class Family:
    """Launch values of all variants: ln(time) by repetition, which pairs the launches of different groups."""

    values: Mapping[str, Mapping[int, float]]
    looks: tuple[Look, ...] = ()
    """Taken so far; launches after the last one count at the next. Without any, all launches count."""

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
        common = self.values[variant].keys() & self.values[other].keys()
        return t_interval(found, level_at(self.looks, max(common) + 1, alpha))


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
