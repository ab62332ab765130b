"""Whether a warm-up is over."""

from collections.abc import Sequence
from statistics import median

from gpurun.launcher.stats.schedule import NEXT_WINDOW_STEPS, WINDOW_STEPS

TOLERANCE = 0.02

MEDIANS_ERROR_PER_DEVIATION = {WINDOW_STEPS: 1.13, NEXT_WINDOW_STEPS: 1.98}
"""How many median absolute deviations of the steps from their own medians count as a standard error of the
difference between two windows' medians, by their length. By these, noise alone is as often (14 %) taken for a
warm-up that isn't over (400,000 simulated warm-ups of normal noise)."""


def is_steady(step_ns: Sequence[int], minimum: int, window: int = WINDOW_STEPS) -> bool:
    """Whether the medians of the last two windows of steps agree within 2 % or two standard errors.

    False before `minimum` steps (and before two windows). The spread is taken from absolute deviations, so
    that a single slow step, such as a recompilation, doesn't hide a difference. The windows share a step, so
    that an even number of steps is between them: with two DataLoader workers, every other step is slow.
    """
    if len(step_ns) < max(minimum, 2 * window):
        return False
    before, last = step_ns[1 - 2 * window : 1 - window], step_ns[-window:]
    median_before, median_last = median(before), median(last)
    deviations = [abs(step - median_before) for step in before] + [abs(step - median_last) for step in last]
    standard_error = MEDIANS_ERROR_PER_DEVIATION[window] * median(deviations)
    return abs(median_last - median_before) <= max(TOLERANCE * median_before, 2 * standard_error)
