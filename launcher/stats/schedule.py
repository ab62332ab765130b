"""The schedule of a launch: the end of its warm-up, the length of a block, the order of a round.

A plan needs its numbers only, so what ranks compute with is imported by the functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from gpurun.launcher.rundir.paths import MAX_KEPT_ROUNDS
from gpurun.launcher.units import format_count, format_ms

T = TypeVar("T")

WINDOW_STEPS = 5
"""Steps between two checks whether the warm-up is steady; the medians compared are of as many."""
NEXT_WINDOW_STEPS = 3
"""The same of a variant whose model another one has warmed up: all but its first step takes as long as later
ones."""
MAX_WARMUP_STEPS = 30
"""After so many steps a variant counts as warm, steady or not; the result has a note then."""
TOLERANCE = 0.02

MEDIANS_ERROR_PER_DEVIATION = {WINDOW_STEPS: 1.32, NEXT_WINDOW_STEPS: 2.84}
"""Standard error of the difference between two windows' medians, by their length, per median absolute
deviation of their steps from their own medians, for normal noise (400,000 simulated warm-ups). Of short
windows it is so much that noise alone is as often (14 %) taken for a warm-up that isn't over."""

ROUNDS = 3
"""Of a launch, while nothing is known of what launches and rounds scatter by: fewer say little about it."""

MOST_REPETITIONS = 64
"""Launches of each group until all is decided: smaller differences than those detect are hardly worth it."""

MOST_BUDGET_S = 3600.0
"""Beyond that no budget is proposed: the difference can hardly matter as much."""


def too_long(launch_s: float) -> str:
    """The limit that a difference reaches first which takes too long: that of time or that of launches.

    Args:
        launch_s: a launch of each group.
    """
    if MOST_REPETITIONS * launch_s > MOST_BUDGET_S:
        return "more than an hour"
    return f"more than {MOST_REPETITIONS} launches of each, the most that a run makes"


MAX_KEPT_STEPS = MAX_KEPT_ROUNDS * WINDOW_STEPS
"""Limit of a variant in a workload's launch, on each rank: of later blocks one step is kept, and the mean of
all."""
MAX_LATE_EVENTS = 10_000
"""The limit of a rank of a workload: after so many more, those of rounds that aren't kept are removed."""


def is_steady(step_ns: Sequence[int], minimum: int, window: int = WINDOW_STEPS) -> bool:
    """Whether the medians of the last two windows of steps agree within 2 % or two standard errors.

    False before `minimum` steps (and before two windows). The spread is taken from absolute deviations, so
    that a single slow step, such as a recompilation, doesn't hide a difference.
    """
    if len(step_ns) < max(minimum, 2 * window):
        return False
    from statistics import median

    before, last = step_ns[-2 * window : -window], step_ns[-window:]
    median_before, median_last = median(before), median(last)
    deviations = [abs(step - median_before) for step in before] + [abs(step - median_last) for step in last]
    standard_error = MEDIANS_ERROR_PER_DEVIATION[window] * median(deviations)
    return abs(median_last - median_before) <= max(TOLERANCE * median_before, 2 * standard_error)


def block_steps(step_ns: Sequence[int], block_ms: float) -> int:
    """Steps of a block that lasts at least `block_ms`, judged by the median of the last 5 warm-up steps."""
    from statistics import median

    typical_ns = median(step_ns[-WINDOW_STEPS:])
    return max(1, math.ceil(block_ms * 1e6 / max(typical_ns, 1)))


def ablation_steps(block_steps: int) -> int:
    """Steps of a block without communication: a quarter of a timed block, but 5 if that has as many."""
    return min(block_steps, max(WINDOW_STEPS, block_steps // 4))


def unsteady_text(num_steps: int) -> str:
    """The message for a variant whose warm-up ended before it was steady."""
    return f"the step time did not settle within {num_steps} warm-up steps"


@dataclass(frozen=True)
class KeptOf:
    """A sample of a launch's steps: its size, and how it was drawn."""

    num_kept: int
    num_steps: int
    of_program: bool
    has_all_rounds: bool
    has_whole_rounds: bool
    """Some are recorded step by step; the others by one step and their mean."""

    def __str__(self) -> str:
        """What to say of figures that are those of the sample."""
        one = "round" if self.of_program else "block"
        chosen = f"random {one}s" + (f" of {WINDOW_STEPS} steps" if self.of_program else "")
        if self.has_whole_rounds:
            first = (
                f"all of the first {format_count(MAX_KEPT_STEPS)} steps" if self.has_all_rounds else chosen
            )
            which = f"{first}; later {one}s are stored as one step with their mean"
        else:
            which = f"one step of each {one}" if self.has_all_rounds else f"one step of each of {chosen}"
            which += f", with the mean of the {one}"
        of_all = f"{format_count(self.num_kept)} of {format_count(self.num_steps)}"
        return f"figures are based on {of_all} steps: {which}"


def only_warmup_text(num_steps: int, warmup: int) -> str:
    """The message for a program that ended before a step was timed."""
    many = "1 step" if num_steps == 1 else f"{num_steps} steps"
    return f"{many}, all warm-up; nothing was timed. Run more than {warmup_maximum(warmup)} steps."


USUALLY_ENOUGH = 30
"""Steps of a program: a warm-up of 10 to 20, and as many timed ones as an interval takes, or more."""


def short_text(num_steps: int, shown: int, has_settled: bool) -> str:
    """The message for a program that ended before or soon after its steps were steady: some are shown."""
    how = "" if has_settled else "; their times did not settle"
    half = f"times are from {shown} steps of the second half"
    recorded = f"only {num_steps} steps were recorded, each from one optimizer step to the next"
    more = f"usually {USUALLY_ENOUGH} are enough" if num_steps < USUALLY_ENOUGH else "run more steps"
    return f"{recorded}{how}; {half}; {more}"


def trend_text(first_ms: float, last_ms: float) -> str:
    """The message for a program whose steps take longer and longer, or ever less time."""
    how = "longer and longer" if last_ms > first_ms else "less and less time"
    return (
        f"steps take {how} during a launch, on average {format_ms(first_ms)} ms in its first third and "
        f"{format_ms(last_ms)} ms in its last: the step time depends on how many steps are made"
    )


def warmup_minimum(warmup: int, window: int = WINDOW_STEPS) -> int:
    """The least number of warm-up steps: two windows, by which steadiness is judged."""
    return max(warmup, 2 * window)


def warmup_maximum(warmup: int) -> int:
    """The most warm-up steps: after them steps are timed, steady or not."""
    return max(MAX_WARMUP_STEPS, warmup_minimum(warmup))


def first_traced_step(warmup: int, timed_before: int) -> int:
    """The step with which the trace begins, from 0: the same on all ranks without communication.

    Args:
        timed_before: timed steps that come before it even if the program ends then.
    """
    return warmup_minimum(warmup) + timed_before


def shuffled(variants: Sequence[T], seed: str) -> tuple[T, ...]:
    """The order of a round.

    Args:
        seed: names the round, in a run and launch; the order depends on nothing else.
    """
    # A text seeds by its hash (SHA-512), which is the same in every process, unlike `hash()`.
    from random import Random

    return tuple(Random(seed).sample(variants, len(variants)))
