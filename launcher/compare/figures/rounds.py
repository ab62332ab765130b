"""Step records of all ranks → step times of rounds and launches."""

import math
from collections.abc import Iterable, Mapping, Sequence

from gpurun.launcher.rundir.records import Kind, RoundTime, StepRecord
from gpurun.launcher.stats.paired import round_step_ns

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
    times = []
    for launch, number in blocks[0]:
        step_ns = [block.get((launch, number), ()) for block in blocks]
        if len({len(steps) for steps in step_ns}) == 1:
            times.append(RoundTime(launch, number, round_step_ns(step_ns)))
    return tuple(times)


def round_blocks_ns(steps: Iterable[StepRecord], kind: Kind) -> dict[RoundKey, list[int]]:
    """One rank's step times by round, in the order in which they were written."""
    blocks: dict[RoundKey, list[int]] = {}
    for step in steps:
        if step.kind == kind and step.round > 0:
            blocks.setdefault((step.launch, step.round), []).append(step.step_ns)
    return blocks


def planned_launch(launch: str) -> str:
    """The planned launch that `launch` is an attempt at: `03-ddp-2~2` is the second at `03-ddp-2`."""
    return launch.partition("~")[0]


def launch_logs(
    rounds: Iterable[RoundTime], repetitions: Mapping[str, int]
) -> dict[int, dict[RoundKey, float]]:
    """ln(step time in ns) of the rounds of each launch, by repetition in rising order.

    Args:
        rounds: of one variant; the attempts at one launch count as one.
        repetitions: repetition by id of the planned launch; rounds of other launches are left out.
    """
    logs: dict[int, dict[RoundKey, float]] = {}
    for time in rounds:
        repetition = repetitions.get(planned_launch(time.launch))
        if repetition is not None:
            logs.setdefault(repetition, {})[time.launch, time.round] = math.log(time.step_ns)
    return dict(sorted(logs.items()))
