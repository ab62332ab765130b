"""The calls of collectives: what gpurun's own captures record of them, and what those around a launch add.

Calls say what a kernel doesn't, as with RCCL and in older traces; gloo's ranges don't even name their group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, collective_kind
from gpurun.launcher.trace.kineto.columns import CommFacts, HostRange

CALLS_KEY = "gpurunCalls"
"""In the header of a trace."""
CLOCK_KEY = "gpurunClock"
"""The key of a trace's header that identifies the clock; equal for ranks with the same one."""
CLOCK_NS = 20_000
"""The difference that the profiler's clock and the system's may have."""


class CallRecord(NamedTuple):
    """A call: Unix time in ns, name of its range, name of the group, number in the group, other rank."""

    time_ns: int
    name: str
    group: str
    sequence: int | None
    """`None` for sends and receives."""
    peer: int | None
    """The peer of a send or receive."""


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


_COALESCED = ":coalesced"
"""torch's name for the end of a group of calls."""
WHOLE_AND_SHARE = frozenset({"all_gather", "reduce_scatter"})
"""Kinds with all data on one side and a rank's share of it on the other; the larger counts as their size."""


class Calls:
    """The calls of a rank, to be found by thread and time; `size_of` says how many ranks a group has."""

    def __init__(self, calls: list[HostRange], size_of: Callable[[CommFacts], int | None]) -> None:
        self.size_of = size_of
        self.by_thread: dict[int, list[HostRange]] = {}
        for call in sorted(calls, key=lambda call: call.start):
            self.by_thread.setdefault(call.thread, []).append(call)

    def complete(self, facts: CommFacts, thread: int, time_ns: int) -> CommFacts:
        """The facts with what the calls around `time_ns` add to them."""
        if facts.num_bytes is not None and facts.ranks is not None:
            return facts
        around = self._around(thread, time_ns)
        for call in around:
            if call.facts is not None:
                facts = _filled(facts, call.facts)
        return facts if facts.num_bytes is not None else self._sized(facts, around)

    def named(self, thread: int, time_ns: int) -> bool:
        """Whether a call that is more than the end of a group was open then."""
        return any(not call.name.endswith(_COALESCED) for call in self._around(thread, time_ns))

    def between(self, thread: int, first_ns: int, last_ns: int) -> list[CommFacts]:
        """The findings from the calls in between, without those that only name the kind of an inner one."""
        calls = [
            call for call in self.by_thread.get(thread, []) if first_ns < call.start and call.end < last_ns
        ]
        facts = [call.facts for call in calls if call.facts is not None]
        return [each for each in facts if each.group is not None] or facts

    def peer_of(self, facts: CommFacts, each: HostRange) -> CommFacts:
        """The facts on a send or receive on the CPU with its peer, which only the call has."""
        if facts.kind not in POINT_TO_POINT:
            return facts
        calls = self._around(each.thread, each.start)
        peers = [call.facts.group_peer for call in calls if call.facts and call.facts.kind == facts.kind]
        return replace(facts, group_peer=peers[0]) if peers else facts

    def _sized(self, facts: CommFacts, around: list[HostRange]) -> CommFacts:
        """The facts with bytes and kind of the innermost call with known sizes, if there is one.

        An outer call of an all-gather or a reduce-scatter may have both output and input.
        """
        around = [call for call in around if call.tensors]
        if not around:
            return facts
        call = around[0]
        kind = collective_kind(call.name)
        if not call.name.startswith("nccl:") or kind == "other":
            kind = facts.kind
        facts = replace(facts, num_bytes=call.num_bytes, kind=kind)
        if kind not in WHOLE_AND_SHARE:
            return facts
        pair = next((each.tensors for each in around if len(each.tensors) == 2), None)
        if pair is not None:
            return _from_pair(facts, pair)
        return self._from_input(facts)

    def _from_input(self, facts: CommFacts) -> CommFacts:
        """The facts by the input alone: all of a reduce-scatter, but one rank's share of an all-gather."""
        size = self.size_of(facts)
        if facts.kind != "all_gather" or facts.num_bytes is None:
            return facts
        return replace(facts, num_bytes=None if size is None else facts.num_bytes * size)

    def _around(self, thread: int, time_ns: int) -> list[HostRange]:
        """Calls around `time_ns`, the innermost first."""
        calls = self.by_thread.get(thread, [])
        last = bisect_right(calls, time_ns, key=lambda call: call.start)
        near = reversed(calls[max(last - 8, 0) : last])
        return [call for call in near if call.end >= time_ns]


def _filled(facts: CommFacts, call: CommFacts) -> CommFacts:
    """The facts, and what only the call has; a kernel's name says less than the name of its call."""
    own = vars(facts)
    missing = {name: value for name, value in vars(call).items() if own[name] is None}
    is_vague = facts.kind in ("other", "send_recv") and call.kind != "other"
    return replace(facts, **missing | ({"kind": call.kind} if is_vague else {}))


def _from_pair(facts: CommFacts, pair: tuple[int, ...]) -> CommFacts:
    """The facts with the larger of output and input; its ratio to the smaller is the number of ranks."""
    whole, share = max(pair), min(pair)
    ratio = whole // share if whole % share == 0 else None
    size = ratio if facts.group_size is None else facts.group_size
    return replace(facts, num_bytes=whole, group_size=size)
