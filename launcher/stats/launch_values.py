"""Rounds → one value of a variant per launch; what is due to launches, and what to rounds.

Two launches of the same processes differ by more than their rounds do: the launch is the unit of evidence.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, variance
from typing import TypeVar

from gpurun.launcher.stats.paired import hodges_lehmann

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
    """By how much a round was slower than the others, over all variants that it has; 0 on average.

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
    """Standard deviations (between launches, between the rounds of a launch); `None` where too few tell.

    That of launches is without what the scatter of its rounds adds to a launch's mean (one-way analysis of
    variance).

    Args:
        launches: values of the rounds of each launch.
    """
    launches = [rounds for rounds in launches if rounds]
    degrees = sum(len(rounds) - 1 for rounds in launches)
    squares = sum((len(rounds) - 1) * variance(rounds) for rounds in launches if len(rounds) > 1)
    of_rounds = squares / degrees if degrees else None
    if len(launches) < 2:
        return None, None if of_rounds is None else math.sqrt(of_rounds)
    of_means = variance([fmean(rounds) for rounds in launches])
    added = (of_rounds or 0.0) * fmean(1 / len(rounds) for rounds in launches)
    return math.sqrt(max(0.0, of_means - added)), None if of_rounds is None else math.sqrt(of_rounds)
