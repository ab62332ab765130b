"""Contention for CPU cores: how much of a measured time was spent waiting for other processes."""

import math
from collections.abc import Iterable

from gpurun.launcher.units import format_number, round_up

QUEUE_PERCENT = 5.0
"""From this share of a time on, waiting is reported. Of less only a part counts: as rounds take turns, all
variants have about as much."""
MOST_PERCENT = 99.0


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
    """`waited for a free core in 5.1 %`: rounded up, so that a value above the bound is shown above it."""
    return f"waited for a free core in {format_number(round_up(percent, 1), 1)} %"
