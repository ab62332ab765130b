"""The step time of variants, with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gpurun.launcher.compare.figures.recorded import MeasuredVariant, slowest_steps
from gpurun.launcher.compare.model import StepTime
from gpurun.launcher.compare.variant_difference import Differences
from gpurun.launcher.stats.estimates import MOST_LOG, median_interval, order_rank, t_interval
from gpurun.launcher.units import Interval

CI_ALPHA = 0.05
"""Level of figures by themselves; verdicts have the level of the comparison."""


def step_times(differences: Differences) -> dict[str, StepTime | None]:
    """Step of every variant: the baseline's times the ratio that both are compared by, so that they agree.

    A variant that isn't compared, or without a baseline that counts, has its own mean.
    """
    return {variant: _step_time(variant, differences) for variant in differences.measured}


def _step_time(variant: str, differences: Differences) -> StepTime | None:
    measured = differences.measured[variant]
    values = differences.values(variant)
    if not values:
        return None
    reference = differences.references.get(variant, differences.baseline)
    behind = differences.estimate(variant, reference)
    if behind is None or not differences.measured[reference].counts:
        middle = fmean(values)
    else:
        middle = fmean(differences.values(reference)) + behind
    scale = (measured.variant.global_batch or 1) / 1e6
    middle_ms = math.exp(middle) * scale
    return StepTime(middle_ms, _step_interval(measured, values, middle_ms))


def _step_interval(measured: MeasuredVariant, values: Sequence[float], middle_ms: float) -> Interval | None:
    """95 %: of the mean over launches, by their scatter; of a single launch by `within_launch`."""
    if len(values) > 1:
        low, high = t_interval([value - fmean(values) for value in values], CI_ALPHA) or (0.0, 0.0)
        return middle_ms * math.exp(low), middle_ms * math.exp(high)
    parts_ms = within_launch(measured).parts_ms
    if measured.means:
        return _around_mean(parts_ms, middle_ms)
    interval = median_interval(parts_ms, CI_ALPHA) or _mean_interval(parts_ms)
    return interval and (min(interval[0], middle_ms), max(interval[1], middle_ms))


def _mean_interval(parts_ms: Sequence[float]) -> Interval | None:
    """Interval of the geometric mean, which takes a few parts to be lognormal: no end is below zero."""
    ends = t_interval([math.log(part_ms) for part_ms in parts_ms], CI_ALPHA)
    return ends and (math.exp(ends[0]), math.exp(min(ends[1], MOST_LOG)))


def _around_mean(parts_ms: Sequence[float], middle_ms: float) -> Interval | None:
    """Interval of the arithmetic mean: as wide as Student's to first order, and never below zero."""
    ends = t_interval([part_ms / fmean(parts_ms) - 1 for part_ms in parts_ms], CI_ALPHA)
    return ends and (middle_ms * math.exp(ends[0]), middle_ms * math.exp(min(ends[1], MOST_LOG)))


@dataclass(frozen=True)
class WithinLaunch:
    """The values that the interval of a step is made of, where there is a single launch."""

    parts_ms: tuple[float, ...]
    name: str
    """`round` or `step`."""


def within_launch(measured: MeasuredVariant) -> WithinLaunch:
    """The rounds; of a program that has hardly any, its steps."""
    rounds_ms = tuple(time.step_ns / 1e6 for time in measured.timed)
    if order_rank(len(rounds_ms), CI_ALPHA) or not measured.variant.kind.runs_program:
        return WithinLaunch(rounds_ms, "round")
    return WithinLaunch(tuple(step.step_ns / 1e6 for step in slowest_steps(measured)), "step")
