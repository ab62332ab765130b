"""The times of rounds, and of programs the mean step of a launch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from gpurun.launcher.compare.figures.program_steps import planned_launch, whole_rounds
from gpurun.launcher.rundir.records import Kind, RoundTime, StepRecord
from gpurun.launcher.stats.schedule import WINDOW_STEPS

RoundKey = tuple[str, int]
"""Launch and round number."""


def round_times(
    steps_by_rank: Mapping[int, Sequence[StepRecord]], world_size: int, kind: Kind
) -> tuple[RoundTime, ...]:
    """The time of every complete round, in the order in which rank 0 ran them.

    A round counts only if all ranks have all its lines, that is the same number of steps: a crash may cut off
    some ranks earlier than others.
    """
    blocks = [round_blocks_ns(steps_by_rank.get(rank, ()), kind) for rank in range(world_size)]
    return tuple(RoundTime(*key, max(fmean(block[key]) for block in blocks)) for key in _common(blocks))


def program_times(
    steps_by_rank: Mapping[int, Sequence[StepRecord]], world_size: int
) -> tuple[RoundTime, ...]:
    """The time of every complete round of a program, on the rank that is slowest in the whole launch.

    No barrier begins the rounds of a program. A rank that is late makes its own step longer, and the next one
    of those that wait for it: with another slowest rank in each round, the same time would count twice.
    """
    blocks = [round_blocks_ns(steps_by_rank.get(rank, ()), "timed") for rank in range(world_size)]
    common, whole = _common(blocks), whole_rounds(steps_by_rank.get(0, ()))
    times: dict[str, list[list[RoundTime]]] = {}
    for key in common:
        num_steps = WINDOW_STEPS if key in whole else len(blocks[0][key])
        of_ranks = [RoundTime(*key, fmean(block[key]), num_steps) for block in blocks]
        times.setdefault(key[0], []).append(of_ranks)
    return tuple(time for rounds in times.values() for time in max(zip(*rounds, strict=True), key=total_ns))


def total_ns(times: Iterable[RoundTime]) -> float:
    """How long all steps of the rounds took."""
    return math.fsum(time.step_ns * time.num_steps for time in times)


def _common(blocks: Sequence[Mapping[RoundKey, Sequence[float]]]) -> list[RoundKey]:
    """The rounds of which all ranks have equally many steps."""
    return [key for key in blocks[0] if len({len(block.get(key, ())) for block in blocks}) == 1]


def round_blocks_ns(steps: Iterable[StepRecord], kind: Kind) -> dict[RoundKey, list[float]]:
    """One rank's step times by round, in the order in which they were written; or the means of blocks."""
    blocks: dict[RoundKey, list[float]] = {}
    for step in steps:
        if step.kind == kind and step.round > 0:
            time_ns = step.step_ns if step.block_ns is None else step.block_ns
            blocks.setdefault((step.launch, step.round), []).append(time_ns)
    return blocks


def launch_logs(
    rounds: Iterable[RoundTime], repetitions: Mapping[str, int]
) -> dict[int, dict[RoundKey, float]]:
    """ln(step time in ns) of the rounds of each launch, by repetition in rising order.

    Args:
        rounds: of one variant; the attempts at one launch count as one.
        repetitions: repetition by id of the planned launch; rounds of other launches are left out.
    """
    return {
        repetition: {(time.launch, time.round): math.log(time.step_ns) for time in times}
        for repetition, times in _by_repetition(rounds, repetitions).items()
    }


def mean_logs(rounds: Iterable[RoundTime], repetitions: Mapping[str, int]) -> dict[int, float]:
    """ln(mean step in ns) of the same launches: all timed steps count alike, rare long ones too."""
    return {
        repetition: math.log(total_ns(times) / sum(time.num_steps for time in times))
        for repetition, times in _by_repetition(rounds, repetitions).items()
    }


def _by_repetition(rounds: Iterable[RoundTime], repetitions: Mapping[str, int]) -> dict[int, list[RoundTime]]:
    found: dict[int, list[RoundTime]] = {}
    for time in rounds:
        repetition = repetitions.get(planned_launch(time.launch))
        if repetition is not None:
            found.setdefault(repetition, []).append(time)
    return dict(sorted(found.items()))
