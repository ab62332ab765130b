"""Contention for CPU cores: how much of a measured time was spent waiting for other processes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gpurun.launcher.grouping import grouped
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.units import format_number, round_up

QUEUE_PERCENT = 5.0
"""From this share of a time on, waiting is reported. Of less only a part counts: as rounds take turns, all
variants have about as much."""
MOST_PERCENT = 99.0

RoundKey = tuple[str, int]
"""Launch and round number."""

Sharing = Mapping[int, frozenset[int]]
"""The other ranks of a launch that run on the same cores, by rank."""


@dataclass(frozen=True)
class Waiting:
    """The part of a rank's step that it waited for a core because of other load, as shares of the step.

    How much of the time in a run queue other load has caused is known within bounds only: threads of the run
    wait for each other, too, and would wait less without the load.
    """

    least: float
    """The time in the run queue, divided among those who had the cores by their CPU time."""
    most: float
    """All of it, but no more than the CPU time of other load. Of a short block it may be negative, since the
    kernel counts in ticks."""
    worked: float = 0.0
    """The CPU time of the thread that makes the steps: without load no step is shorter."""
    load: float | None = None
    """CPU time of other load on the rank's cores; `None` if it isn't known."""


def waiting(queue: float, load: float | None, own: float, worked: float = 0.0) -> Waiting:
    """A rank's waiting for other load; all arguments as shares of its step.

    Args:
        queue: time in the run queue, of the thread that waited longest.
        load: CPU time of other load on the rank's cores; `None`: it isn't known.
        own: CPU time of the run's other threads on these cores.
        worked: CPU time of the thread that makes the steps.
    """
    queue = min(queue, 1.0)  # what lies between the steps counts too
    if load is None:
        return Waiting(0.0, queue, worked)
    most = min(queue, load)
    total = abs(load) + own
    return Waiting(min(most, queue * load / total) if total else most, most, worked, load)


@dataclass(frozen=True)
class _Block:
    """A rank's block of steps: nanoseconds in the mean step."""

    step_ns: float
    queue_ns: float | None
    others_ns: float | None
    own_ns: float
    """CPU time of the rank and of the processes that it has started."""
    children_ns: float
    thread_ns: float
    """CPU time of the thread that makes the steps; 0 if it isn't known."""


def _blocks(steps: Iterable[StepRecord]) -> dict[RoundKey, _Block]:
    by_round = grouped(steps, lambda step: (step.launch, step.round))
    return {key: _block(block) for key, block in by_round.items()}


def _block(steps: Sequence[StepRecord]) -> _Block:
    children_ns = mean_of(step.children_ns for step in steps) or 0.0
    return _Block(
        fmean(step.block_ns or step.step_ns for step in steps),
        mean_of(step.queue_ns for step in steps),
        mean_of(step.others_ns for step in steps),
        (mean_of(step.cpu_ns for step in steps) or 0.0) + children_ns,
        children_ns,
        mean_of(step.thread_cpu_ns for step in steps) or 0.0,
    )


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of those that were counted; `None` where none was."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


WaitingOfRanks = Mapping[int, Mapping[RoundKey, Waiting]]


def waiting_of_ranks(steps: Mapping[int, Iterable[StepRecord]], shared: Sharing) -> WaitingOfRanks:
    """Each rank's waiting for other load by round; nothing where the kernel doesn't count it."""
    blocks = {rank: _blocks(its) for rank, its in steps.items()}
    return {
        rank: {
            key: _waiting(block, [blocks[x][key] for x in shared.get(rank, ()) if key in blocks.get(x, {})])
            for key, block in its.items()
            if block.queue_ns is not None
        }
        for rank, its in blocks.items()
    }


def _waiting(block: _Block, siblings: Sequence[_Block]) -> Waiting:
    """The waiting of a rank in a block; `siblings` are the blocks of the run's other ranks on its cores."""
    siblings_ns = math.fsum(sibling.own_ns for sibling in siblings)
    load_ns = None if block.others_ns is None else block.others_ns - block.children_ns - siblings_ns
    return waiting(
        (block.queue_ns or 0.0) / block.step_ns,
        None if load_ns is None else load_ns / block.step_ns,
        max(0.0, block.own_ns + siblings_ns - block.thread_ns) / block.step_ns,
        block.thread_ns / block.step_ns,
    )


def cpu_ns_of_rounds(
    steps: Mapping[int, Iterable[StepRecord]], rounds: Iterable[RoundKey]
) -> dict[RoundKey, float]:
    """CPU time of all ranks in the mean step of each round; without rounds in which a rank has no steps."""
    blocks = [_blocks(its) for its in steps.values()]
    common = [key for key in rounds if blocks and all(key in its for its in blocks)]
    return {key: cpu_ns for key in common if (cpu_ns := math.fsum(its[key].own_ns for its in blocks)) > 0}


def waited_for_others_ns(queue_ns: int | None, others_ns: int | None) -> int | None:
    """Time in the run queue, limited to what other processes ran on the rank's cores.

    The rest is the rank's own threads waiting for each other. The whole queue time if the others' time is
    unknown; `None` if the queue time is unknown.
    """
    if queue_ns is None or others_ns is None:
        return queue_ns
    return min(queue_ns, others_ns)


def waiting_bias(queue_percents: Iterable[float | None]) -> float:
    """The most that waiting for a core may have changed a difference of ln(time), either way.

    A step that waited for q % of its time takes at least 1 − q / 100 of it without other load. Below 5 %,
    q² / 5 % of it counts instead of q, so that no verdict depends on which side of a limit q is on.
    """
    worst = max((percent for percent in queue_percents if percent is not None), default=0.0)
    counted = min(worst, MOST_PERCENT) * min(1.0, worst / QUEUE_PERCENT)
    return -math.log1p(-counted / 100)


def queued_text(percent: float) -> str:
    """`5.1 %`: rounded up, so that a value above the bound is shown above it."""
    return f"{format_number(round_up(percent, 1), 1)} %"
