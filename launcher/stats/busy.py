"""Contention for CPU cores: how much of a measured time was spent waiting for other processes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gpurun.launcher.units import format_number, round_up

QUEUE_PERCENT = 5.0
"""From this share of a time on, waiting is reported. Of less only a part counts: as rounds take turns, all
variants have about as much."""
MOST_PERCENT = 99.0


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
