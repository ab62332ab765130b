"""Contention for CPU cores: how much of a measured time was spent waiting for other processes."""

from gpurun.launcher.units import format_number, round_up

QUEUE_PERCENT = 5.0
"""Share of a measured time spent waiting from which on the measurement isn't trusted."""


def waited_for_others_ns(queue_ns: int | None, others_ns: int | None) -> int | None:
    """Time in the run queue, limited to what other processes ran on the rank's cores.

    The rest is the rank's own threads waiting for each other. The whole queue time if the others' time is
    unknown; `None` if the queue time is unknown.
    """
    if queue_ns is None or others_ns is None:
        return queue_ns
    return min(queue_ns, others_ns)


def queued_text(percent: float) -> str:
    """`waited for a free core in 5.1 %`: rounded up, so that a value above the bound is shown above it."""
    return f"waited for a free core in {format_number(round_up(percent, 1), 1)} %"
