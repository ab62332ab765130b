"""What ranks write into their traces, and the analysis reads there."""

from dataclasses import dataclass
from typing import NamedTuple

STEP_MARK = "gpurun::step#"
"""How the marks of steps begin in traces that gpurun takes; in them, it reads no others as such."""
RANK_KEY = "gpurunRank"
"""The key of a trace's header with `RankFacts`."""
CALLS_KEY = "gpurunCalls"
"""The key with the `CallRecord`s."""
CLOCK_KEY = "gpurunClock"
"""The key that identifies the clock; equal for ranks with the same one."""


@dataclass(frozen=True)
class RankFacts:
    """Facts about the rank that a trace of ours adds, to explain its steps."""

    samples: int
    """In a step."""
    thread_cpu_ns: int
    """CPU time of the thread that steps: the mean over the recorded steps."""
    queue_ns: int = 0
    """Mean nanoseconds of a step that this thread waited for a core; part of its operators' time, too."""


class CallRecord(NamedTuple):
    """A call: Unix time in ns, name of its range, name of the group, number in the group, other rank."""

    time_ns: int
    name: str
    group: str
    sequence: int | None
    """`None` for sends and receives."""
    peer: int | None
    """The peer of a send or receive."""
