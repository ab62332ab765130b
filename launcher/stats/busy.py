"""How busy others kept the cores: from when on a time tells of that, and not of what was measured."""

from gpurun.launcher.units import format_number, round_up

QUEUE_PERCENT = 5.0
"""Of a time spent waiting for others from which on it is not the time that was to be measured."""


def waited_for_others_ns(queue_ns: int | None, others_ns: int | None) -> int | None:
    """Time in the run queue, but no more than other processes ran on the rank's cores: the rest of it the
    rank's threads waited for each other. All of it where nobody counts what others ran; `None` if nobody
    counted the waiting."""
    if queue_ns is None or others_ns is None:
        return queue_ns
    return min(queue_ns, others_ns)


def queued_text(percent: float) -> str:
    """`waited for a free core in 5.1 %`: rounded up, so that what is above the bound is told as such."""
    return f"waited for a free core in {format_number(round_up(percent, 1), 1)} %"
