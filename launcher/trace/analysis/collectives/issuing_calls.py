"""The calls around a launch: they say what a kernel doesn't, as with RCCL and in older traces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, collective_kind
from gpurun.launcher.trace.kineto.columns import HostRange
from gpurun.launcher.trace.kineto.events import CommFacts

_COALESCED = ":coalesced"
"""What torch calls the end of a group of calls."""
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
        """What the calls in between say; those that only name the kind of an inner one are left out."""
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
        """Only the input is known: all of a reduce-scatter, but one rank's share of an all-gather."""
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
    """With the larger of output and input; its ratio to the smaller is the number of ranks."""
    whole, share = max(pair), min(pair)
    ratio = whole // share if whole % share == 0 else None
    size = ratio if facts.group_size is None else facts.group_size
    return replace(facts, num_bytes=whole, group_size=size)
