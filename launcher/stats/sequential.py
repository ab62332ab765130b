"""Several looks at growing evidence: when to look, the level of each look, and what can be detected.

Every look is a further chance of a false alarm. Alpha spending divides the allowed error among the looks: by
the time that a part of the budget is gone, so much of the error is spent. Looks need not be planned, as long
as what the differences are doesn't decide when they are taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import percent_from_log, t_quantile
from gpurun.launcher.stats.schedule import ROUNDS

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
    return levels(tuple(looks[: number + 1]), alpha)[-1]


@lru_cache(maxsize=4096)
def levels(looks: tuple[Look, ...], alpha: float = ALPHA) -> tuple[float, ...]:
    """Level of each look. An interval of Student's t with that level is used at the look.

    Source: Lan and DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70 (1983), with
    the power family of Kim and DeMets, Biometrika 74 (1987). Levels, not boundaries, are carried over to t:
    Jennison and Turnbull, Group Sequential Methods (2000), 4.4.
    """
    return tuple(2 * NormalDist().cdf(-stage.bound) for stage in _stages(looks, alpha * SHARE_OF_ALPHA))


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


def _stages(looks: tuple[Look, ...], alpha: float) -> list[_Stage]:
    if not looks:
        return []
    return [*_stages(looks[:-1], alpha), _stage(looks, alpha)]


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
    level = levels(planned_looks(min(launches, 200)))[-1]
    quantiles = t_quantile(1 - level / 2, launches - 1) + t_quantile(POWER, launches - 1)
    return quantiles / math.sqrt(launches)


def planned_looks(launches: int) -> tuple[Look, ...]:
    """The looks of a run whose budget is enough for so many launches that take equally long."""
    looks, look = [], MIN_LAUNCHES
    while look < launches:
        looks.append(Look(look, look / launches))
        look = next_look(look)
    return (*looks, Look(launches, 1.0))
