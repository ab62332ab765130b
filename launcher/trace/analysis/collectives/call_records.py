"""What gpurun's own captures add to a trace: its clock, and the calls of collectives of gloo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpurun.launcher.trace.kineto.columns import HostRange

CALLS_KEY = "gpurunCalls"
"""In the header of a trace."""
CLOCK_KEY = "gpurunClock"
"""Likewise: identifies the clock, equal for ranks whose times come from the same one."""
CLOCK_NS = 20_000
"""By how much the profiler's clock and the system's may differ."""


class CallRecord(NamedTuple):
    """A call: Unix time in ns, name of its range, name of the group, number in the group, other rank."""

    time_ns: int
    name: str
    group: str
    sequence: int | None
    """`None` for sends and receives."""
    peer: int | None
    """Of a send or receive."""


def call_records(header: Mapping[str, Any]) -> list[CallRecord]:
    """The calls in the header of a trace; none in those of others, or where they are damaged."""
    try:
        return msgspec.convert(header.get(CALLS_KEY, []), list[CallRecord])
    except msgspec.ValidationError:
        return []


def clock_id(header: Mapping[str, Any]) -> str | None:
    """Identifies the clock of a trace; `None` if its header doesn't."""
    clock = header.get(CLOCK_KEY)
    return clock if isinstance(clock, str) and clock else None


def records_of_ranges(
    ranges: Sequence[HostRange], calls: Sequence[CallRecord], base_ns: int
) -> list[CallRecord | None]:
    """The call of each range; `None` where there is none.

    Args:
        ranges: of gloo.
        calls: as recorded.
        base_ns: Unix time to which the ranges' times are relative.
    """
    found: list[CallRecord | None] = [None] * len(ranges)
    named: defaultdict[str, list[CallRecord]] = defaultdict(list)
    for call in sorted(calls):
        named[call.name].append(call)
    for name, same in named.items():
        places = [i for i, each in enumerate(ranges) if each.name == name]
        places.sort(key=lambda i: ranges[i].start)
        skipped = _skipped([ranges[i].start + base_ns for i in places], [call.time_ns for call in same])
        for number, place in enumerate(places, skipped):
            found[place] = same[number] if 0 <= number < len(same) else None
    return found


def _skipped(starts_ns: Sequence[int], calls_ns: Sequence[int]) -> int:
    """How many calls come before that of the first range; negative if its own isn't recorded.

    Calls start in their order, and none before it was called. A trace lacks ranges that began before it; the
    flight recorder lacks its oldest calls.
    """
    called = np.searchsorted(np.array(calls_ns), np.array(starts_ns) + CLOCK_NS, "right")
    return int((called - 1 - np.arange(len(starts_ns))).min(initial=len(calls_ns)))
