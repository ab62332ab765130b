"""The collectives of one rank, in the order in which it issued them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from gpurun.launcher.trace.analysis.collectives.process_groups import Group, ProcessGroups
from gpurun.launcher.trace.analysis.steps import HostStep, Launched, step_at
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, GpuKind, HostKind, collective_kind
from gpurun.launcher.trace.kineto.columns import CommFacts, HostRange, Trace

WHOLE_AND_SHARE = frozenset({"all_gather", "reduce_scatter"})
"""Kinds with all data on one side and a rank's share of it on the other; the larger counts as their size."""


@dataclass(frozen=True)
class LocalCollective:
    """A collective as one rank saw it. Times in ns since the trace's base."""

    start: int
    end: int
    kind: str
    num_bytes: int | None
    group: Group
    group_size: int | None
    sequence: int | None
    """The library's own count, where the trace has it."""
    step: int
    """Position of the step that issued it; −1: none."""
    issued: int
    """When it was issued."""
    on_gpu: bool
    peer: int | None = None
    """Of a send or receive: the other rank, if the trace says."""
    device: str | None = None
    """The GPU that it ran on."""

    @property
    def duration(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Part:
    """One rank's part in a collective."""

    rank: int
    local: LocalCollective
    start_ns: int
    """Unix time on this rank's own clock."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.local.duration


def local_collectives(trace: Trace, work: Launched, steps: list[HostStep]) -> list[LocalCollective]:
    """Collectives of this rank, on GPU and CPU, in the order in which they were issued."""
    groups = ProcessGroups.of(trace.header)
    found = _on_gpu(trace, work, groups) + _on_cpu(trace, steps, groups)
    return sorted(found, key=lambda each: (each.issued, each.start))


def _on_gpu(trace: Trace, work: Launched, groups: ProcessGroups) -> list[LocalCollective]:
    gpu = trace.gpu
    calls = _Calls(trace.of_kind(HostKind.COMM_CALL), groups)
    found = []
    for i in np.flatnonzero(gpu.kind == GpuKind.COMM).tolist():
        launch, issued = int(work.launch[i]), int(work.start[i])
        facts = trace.comm_facts[i]
        if launch >= 0:
            facts = calls.complete(facts, int(trace.launches.thread[launch]), issued)
        start = int(gpu.start[i])
        end = start + int(gpu.duration[i])
        each = _collective(facts, groups, (start, end, issued), int(work.step[i]), True)
        found.append(replace(each, device=trace.streams[int(gpu.thread[i])][0]))
    return found


def _on_cpu(trace: Trace, steps: list[HostStep], groups: ProcessGroups) -> list[LocalCollective]:
    ranges = trace.of_kind(HostKind.COMM)
    owners = step_at(steps, np.array([each.start for each in ranges], dtype=np.int64))
    calls = _Calls(trace.of_kind(HostKind.COMM_CALL), groups)
    return [
        _collective(
            calls.peer_of(CommFacts(collective_kind(each.name), each.num_bytes, None, None, None), each),
            groups,
            (each.start, each.end, each.start),
            step,
            False,
        )
        for each, step in zip(ranges, owners.tolist(), strict=True)
    ]


def _collective(
    facts: CommFacts, groups: ProcessGroups, times: tuple[int, int, int], step: int, on_gpu: bool
) -> LocalCollective:
    start, end, issued = times
    group = groups.group(facts)
    return LocalCollective(
        start=start,
        end=end,
        kind=facts.kind,
        num_bytes=facts.num_bytes,
        group=group,
        group_size=groups.size(facts),
        sequence=facts.sequence,
        step=step,
        issued=issued,
        on_gpu=on_gpu,
        peer=_peer(facts, group),
    )


def _peer(facts: CommFacts, group: Group) -> int | None:
    """The other rank of a send or receive: as named, else as a number within a group of known ranks."""
    if facts.group_peer is None or group.ranks is None or facts.group_peer >= len(group.ranks):
        return facts.peer
    return group.ranks[facts.group_peer]


class _Calls:
    """Finds the calls around a launch: they say what the kernel doesn't, as with RCCL and in older traces."""

    def __init__(self, calls: list[HostRange], groups: ProcessGroups) -> None:
        self.groups = groups
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
        size = self.groups.size(facts)
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
