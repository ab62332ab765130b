"""How long ranks waited for a core because of other load, per round, and what rounds would take without it.

Threads of one run wait for each other too: two ranks with two threads each on two cores wait 6 to 16 % of a
step on a quiet machine. That is part of what is measured. Other load is the CPU time that the rank's cores
spent on anything but the run's own processes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from gpurun.launcher.compare.figures.rounds import RoundKey
from gpurun.launcher.plan.model import Process
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.stats.busy import MOST_PERCENT, Waiting, waiting

Sharing = Mapping[int, frozenset[int]]
"""The other ranks of a launch that run on the same cores, by rank."""


def sharing(processes: Sequence[Process]) -> Sharing:
    """Ranks of one node share its cores unless they are bound to different ones."""

    def share(process: Process, other: Process) -> bool:
        is_apart = process.cpus and other.cpus and not {*process.cpus} & {*other.cpus}
        return process.node == other.node and not is_apart

    return {
        process.rank: frozenset(
            other.rank for other in processes if other is not process and share(process, other)
        )
        for process in processes
    }


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
    by_round: dict[RoundKey, list[StepRecord]] = {}
    for step in steps:
        by_round.setdefault((step.launch, step.round), []).append(step)
    return {key: _block(block) for key, block in by_round.items()}


def _block(steps: Sequence[StepRecord]) -> _Block:
    def mean(times_ns: Iterable[int | None]) -> float | None:
        known = [time_ns for time_ns in times_ns if time_ns is not None]
        return fmean(known) if known else None

    children_ns = mean(step.children_ns for step in steps) or 0.0
    return _Block(
        fmean(step.block_ns or step.step_ns for step in steps),
        mean(step.queue_ns for step in steps),
        mean(step.others_ns for step in steps),
        (mean(step.cpu_ns for step in steps) or 0.0) + children_ns,
        children_ns,
        mean(step.thread_cpu_ns for step in steps) or 0.0,
    )


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


def other_cores(waited: Mapping[RoundKey, Waiting]) -> float | None:
    """The number of cores that other load kept busy: the mean over a rank's blocks; `None`: not known."""
    known = [block.load for block in waited.values() if block.load is not None]
    return max(0.0, fmean(known)) if known else None


def queue_percent(waited: Mapping[RoundKey, Waiting]) -> float | None:
    """A rank's waiting for other load in percent of its step; `None` where it wasn't counted.

    The median over its blocks: neither the coarse clock of the other processes nor a short burst moves it.
    """
    return max(0.0, median(100 * block.most for block in waited.values())) if waited else None


Bound = Literal["least", "most"]
BOUNDS: tuple[Bound, ...] = ("least", "most")


def shares_of_rounds(
    waited: WaitingOfRanks, rounds: Iterable[RoundKey], bound: Bound
) -> dict[RoundKey, float] | None:
    """The share of each round's steps that other load took; `None` where a rank's isn't known.

    Ranks wait at the same time or one after the other: together at least as long as the rank that waits
    longest, at most the sum, and never so long that no time is left for what a thread has computed.
    """
    keys = tuple(rounds)
    if not waited or not all(key in its for key in keys for its in waited.values()):
        return None
    return {key: _together([its[key] for its in waited.values()], bound) for key in keys}


def _together(ranks: Sequence[Waiting], bound: Bound) -> float:
    if bound == "least":
        share = max(rank.least for rank in ranks)
    else:
        left = 1 - max(rank.worked for rank in ranks)
        share = max(max(rank.most for rank in ranks), min(left, math.fsum(rank.most for rank in ranks)))
    return min(max(share, 0.0), MOST_PERCENT / 100)
