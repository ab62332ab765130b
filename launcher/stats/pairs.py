"""Rounds of two variants, side by side."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from gpurun.launcher.rundir.records import RoundTime


def round_step_ns(step_ns_by_rank: Sequence[Sequence[int]]) -> float:
    """Step time of one block, in nanoseconds: the maximum over ranks of the mean step."""
    return max(fmean(steps) for steps in step_ns_by_rank)


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
        math.log(one.step_ns / baseline_ns[one.launch, one.round]) - offset
        for one in rounds
        if (one.launch, one.round) in baseline_ns
    )
