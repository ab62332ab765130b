"""The schedule of a launch: the end of its warm-up, the length of a block, the order of a round.

A plan needs its numbers only, so what ranks compute with is imported by the functions.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

from gpurun.launcher.findings.finding import reason
from gpurun.launcher.rundir.paths import MAX_KEPT_ROUNDS

T = TypeVar("T")

WINDOW_STEPS = 5
"""Steps between two checks whether the warm-up is steady; the medians compared are of as many."""
NEXT_WINDOW_STEPS = 3
"""Steps between two such checks, of a variant whose model another one has warmed up: all but its first step
takes as long as later ones."""
MAX_WARMUP_STEPS = 30
"""After so many steps a variant counts as warm, steady or not; the result has a note then."""
ROUNDS = 3
"""Rounds of a launch while no scatter is known: fewer say little about it."""

MOST_REPETITIONS = 64
"""Launches of each group until all is decided: smaller differences than those detect are hardly worth it."""

MOST_BUDGET_S = 3600.0
"""Beyond that no budget is proposed: the difference can hardly matter as much."""


def too_long(launch_s: float) -> str:
    """The limit that a difference reaches first which takes too long: that of time or that of launches.

    Args:
        launch_s: a launch of each group.
    """
    return reason(
        "hour" if MOST_REPETITIONS * launch_s > MOST_BUDGET_S else "launches", most=MOST_REPETITIONS
    )


MAX_KEPT_STEPS = MAX_KEPT_ROUNDS * WINDOW_STEPS
"""Limit of a variant in a workload's launch, on each rank: of later blocks one step is kept, and the mean of
all."""
MAX_LATE_EVENTS = 10_000
"""The limit of a rank of a workload: after so many more, those of rounds that aren't kept are removed."""


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
    return reason("unsteady", num_steps=num_steps)


def only_warmup_text(num_steps: int, warmup: int, num_slowed: int = 0) -> str:
    """The message for a program that ended before a step was timed; its profiler slowed `num_slowed`."""
    least = warmup_maximum(warmup)
    how = "doesn't" if num_slowed else None
    return reason("only-warmup", num_steps=num_steps, num_slowed=num_slowed or None, least=least, how=how)


USUALLY_ENOUGH = 30
"""Steps of a program: a warm-up of 10 to 20, and as many timed ones as an interval takes, or more."""


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
