"""Whether changed runs train the same: by the losses of their first steps."""

import math
from collections.abc import Sequence
from typing import Literal

Losses = Sequence[float | None]
"""Of a run, in the order of its steps; `None` is no finite number."""
Sameness = Literal["bitwise", "rounding", "different", "unknown"]
FIRST = {"bfloat16": 1e-2, "float16": 1e-2}
FIRST_IN_FP32 = 1e-5
"""The largest relative difference of the first loss that rounding explains, by the type of the loss."""
NEXT, NUM_NEXT, LARGEST = 1e-3, 5, 0.1
"""That of the next losses in fp32, and in any type: another optimizer or gradient shows there."""


def sameness(originals: Sequence[Losses], changed: Sequence[Losses], dtype: str = "float32") -> Sameness:
    """How the losses of changed runs compare with those of runs as the program is.

    Where runs of the original differ from each other, bits say nothing, and a difference counts only beyond
    theirs.

    Args:
        originals: the losses of each run, in the order of its steps.
        changed: likewise.
        dtype: of the losses.
    """
    originals, changed = [run for run in originals if run], [run for run in changed if run]
    if not originals or not changed:
        return "unknown"
    if any(run[0] is None for run in (*originals, *changed)):
        return "unknown"
    runs = (*originals, *changed)
    if all(_prefix(run, runs) == _prefix(runs[0], runs) for run in runs):
        return "bitwise"
    first = max(FIRST.get(dtype, FIRST_IN_FP32), 2 * _spread(originals, 0))
    later = min(first * NEXT / FIRST_IN_FP32, LARGEST)
    for step in range(min(NUM_NEXT, *map(len, runs))):
        limit = first if step == 0 else max(later, 2 * _spread(originals, step))
        if any(_apart(run[step], originals[0][step]) > limit for run in changed):
            return "different"
    return "rounding"


def differ(originals: Sequence[Losses]) -> bool:
    """Whether runs of the program as it is have other losses each time."""
    runs = [run for run in originals if run]
    return any(_prefix(run, runs) != _prefix(runs[0], runs) for run in runs[1:])


def _prefix(run: Losses, runs: Sequence[Losses]) -> tuple[float | None, ...]:
    return tuple(run[: min(map(len, runs))])


def _spread(runs: Sequence[Losses], step: int) -> float:
    return max(_apart(run[step], runs[0][step]) for run in runs)


def _apart(one: float | None, other: float | None) -> float:
    """The relative difference; infinite where one of them is no finite number."""
    if one == other:
        return 0.0
    if one is None or other is None:
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
