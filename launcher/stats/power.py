"""How much evidence it takes: what a number of launches can detect, how many launches a difference needs."""

import math
from functools import lru_cache

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.launches import t_quantile
from gpurun.launcher.stats.sequential import MIN_LAUNCHES, levels, next_look
from gpurun.launcher.stats.verdict import percent_from_log

POWER = 0.8
"""Chance to find a difference that is called detectable."""

MOST_LAUNCHES = 10_000
ROUNDS = 5
"""Of a launch, while nothing is known about its scatter."""
ROUNDS_WITHIN = (3, 28)
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
    """Rounds of a launch that make the most of a given time: 3 to 28; 5 where the scatter isn't known.

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
