"""Estimates and intervals of differences: across launches by Student's t, within a launch by ranks; verdicts.

The last functions convert them to percent, and to verdicts.

Rounds of different launches aren't pairs, so across launches the launch is the unit. Student's t
distribution takes the standard library alone; scipy is the reference in the tests.

Within one launch: Hodges-Lehmann estimate and exact Wilcoxon signed-rank interval; medians. Ties and zeros
are both kept: the interval consists of Walsh averages, and a zero or a repeated difference yields its
averages like any other value. For a continuous distribution the interval covers the centre of symmetry with
at least 1 − α exactly; ties can only raise that (Source: Lehmann, Nonparametrics, 1975, section 4.2;
Hollander, Wolfe, Chicken, Nonparametric Statistical Methods, 3.1 to 3.3).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import count
from statistics import NormalDist, fmean, median
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.rundir.records import RoundTime
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


def fewest_values(alpha: float) -> int:
    """The smallest number of differences of which `wilcoxon_interval` makes an interval."""
    return next(num for num in count(1) if walsh_rank(num, alpha))


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


def round_differences(
    rounds: Iterable[RoundTime], baseline: Iterable[RoundTime], samples_ratio: float = 1.0
) -> tuple[float, ...]:
    """d = ln(t / t_baseline) for every round that both have, in the order of `rounds`.

    Args:
        rounds: a variant's rounds; a round is known by its launch and number.
        baseline: the baseline's.
        samples_ratio: the variant's global batch over the baseline's. Where it isn't 1, time per sample is
            compared, since the step times alone would call the smaller batch faster.
    """
    baseline_ns = {(other.launch, other.round): other.step_ns for other in baseline}
    offset = math.log(samples_ratio)
    return tuple(
        math.log(round_.step_ns / baseline_ns[round_.launch, round_.round]) - offset
        for round_ in rounds
        if (round_.launch, round_.round) in baseline_ns
    )


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
