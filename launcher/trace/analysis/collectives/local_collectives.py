"""The collectives of one rank, in the order in which it issued them, and the calls of them.

Calls, from gpurun's own captures or around a launch, say what a kernel doesn't, as with RCCL and in older
traces; gloo's ranges don't even name their group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from gpurun.launcher.trace.added_by_ranks import CALLS_KEY, CLOCK_KEY, CallRecord
from gpurun.launcher.trace.analysis.steps import HostStep, Launched, step_at
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, GpuKind, HostKind, collective_kind
from gpurun.launcher.trace.kineto.columns import CommFacts, HostRange, RankTuple, Trace

CLOCK_NS = 20_000
"""The difference that the profiler's clock and the system's may have."""


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


def host_name(header: Mapping[str, Any]) -> str | None:
    """The computer that a trace is from; `None` if its header doesn't say.  Source: Kineto's `host_name`"""
    name = header.get("host_name")
    return name if isinstance(name, str) and name and not name.startswith("localhost") else None


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


UNKNOWN = "unknown"
"""Instead of the name of a group that may be any of several."""
UNNAMED = "default"
"""The name of a group that the trace doesn't name."""
BEGIN_NS = -(1 << 62)
"""Before every trace."""
DEFAULT_DESCRIPTION = "default_pg"
"""How torch describes the group of all ranks."""
MAX_WORLD = 1 << 20
"""Larger numbers of ranks are damage."""


@dataclass(frozen=True)
class TracedGroup:
    """A process group, as one rank's trace has it."""

    name: str
    ranks: RankTuple | None
    """Sorted; `None` if the trace doesn't say."""
    is_ambiguous: bool = False
    """Whether it may be any of several groups that this rank is in."""
    description: str | None = field(default=None, compare=False)
    """The program's name for it, such as `mesh_tp`."""
    possible: tuple[tuple[str, RankTuple], ...] = field(default=(), compare=False)
    """Names and ranks of the groups that an unnamed one may be; empty if the ranks of some aren't known."""


@dataclass(frozen=True)
class ProcessGroups:
    """The groups of this rank, from the header's `distributedInfo`."""

    configured: Mapping[str, RankTuple | None]
    """The ranks of each group by its name; `None` where they are not listed."""
    sizes: Mapping[str, int]
    """Number of ranks by name of the group, where it is known."""
    world: RankTuple | None
    """All ranks, if their number is known."""
    descriptions: Mapping[str, str]
    """The program's name for a group, by the group's name."""

    @staticmethod
    def of(header: Mapping[str, Any]) -> ProcessGroups:
        """Reads the header; entries in another format than torch's are ignored."""
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        listed = info.get("pg_config")
        groups = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        size = info.get("world_size")
        world = RankTuple(range(size)) if type(size) is int and 0 < size < MAX_WORLD else None
        sizes = {_name(each): _size(each, size) for each in groups}
        return ProcessGroups(
            {_name(each): _ranks(each, world) for each in groups},
            {name: size for name, size in sizes.items() if size is not None},
            world,
            {_name(each): str(each["pg_desc"]) for each in groups if "pg_desc" in each},
        )

    def group(self, facts: CommFacts) -> TracedGroup:
        """The group of this collective: from its own arguments, else from the header."""
        if facts.group is None and facts.ranks is None:
            return self._unnamed(facts)
        name = UNNAMED if facts.group is None else facts.group
        ranks = facts.ranks or self.configured.get(name) or self._if_world(facts.group_size)
        return TracedGroup(name, ranks, description=facts.description or self.descriptions.get(name))

    def size(self, facts: CommFacts) -> int | None:
        """The number of ranks: from the kernel, else from the header."""
        if facts.group_size is not None:
            return facts.group_size
        group = self.group(facts)
        return self.sizes.get(group.name) if group.ranks is None else len(group.ranks)

    def _unnamed(self, facts: CommFacts) -> TracedGroup:
        """The only group that this rank has; of several, which one isn't known."""
        if len(self.configured) == 1:
            ((name, ranks),) = self.configured.items()
            return TracedGroup(name, ranks, description=self.descriptions.get(name), possible=self._possible)
        every = set(self.configured.values())
        if len(every) == 1:
            return TracedGroup(UNNAMED, every.pop(), possible=self._possible)
        ranks = self._if_world(facts.group_size)
        if ranks is None and len(every) > 1:
            return TracedGroup(UNKNOWN, None, is_ambiguous=True, possible=self._possible)
        return TracedGroup(UNNAMED, ranks)

    @cached_property
    def _possible(self) -> tuple[tuple[str, RankTuple], ...]:
        known = tuple((name, ranks) for name, ranks in self.configured.items() if ranks is not None)
        return known if len(known) == len(self.configured) else ()

    def peer(self, facts: CommFacts) -> int | None:
        """The other rank of a send or receive: as named, else by its number, if all possible groups agree."""
        group = self.group(facts)
        possible = self.configured.values() if group.is_ambiguous else [group.ranks]
        if facts.group_peer is None or None in possible:
            return facts.peer
        known = [ranks for ranks in possible if ranks is not None and facts.group_peer < len(ranks)]
        found = {ranks[facts.group_peer] for ranks in known}
        return found.pop() if len(found) == 1 else facts.peer

    def _if_world(self, size: int | None) -> RankTuple | None:
        """All ranks, if the group is as large as that; a group of two can't be another one."""
        if self.world is None or (size is None and len(self.world) > 2):
            return None
        return self.world if size in (None, len(self.world)) else None


def _name(group: Mapping[str, Any]) -> str:
    return str(group.get("pg_name", UNNAMED))


def _ranks(group: Mapping[str, Any], world: RankTuple | None) -> RankTuple | None:
    listed = group.get("ranks")
    if isinstance(listed, list) and listed and all(type(rank) is int and rank >= 0 for rank in listed):
        return RankTuple(sorted(set(listed)))
    is_world = group.get("pg_desc") == DEFAULT_DESCRIPTION or (world and group.get("pg_size") == len(world))
    return world if is_world else None


def _size(group: Mapping[str, Any], world: object) -> int | None:
    ranks = group.get("ranks")
    sizes = [len(ranks) if isinstance(ranks, list) and ranks else None, group.get("pg_size")]
    if group.get("pg_desc") == DEFAULT_DESCRIPTION:
        sizes.append(world)
    return next((size for size in sizes if type(size) is int and size > 0), None)


Message = tuple[str, int]
"""`send` or `recv`, and the other rank."""


@dataclass(frozen=True)
class LocalCollective:
    """A collective as one rank saw it. Times in ns since the trace's base."""

    start: int
    end: int
    kind: str
    num_bytes: int | None
    group: TracedGroup
    group_size: int | None
    sequence: int | None
    """The library's own count, where the trace has it."""
    step: int
    """Position of the step that issued it; −1: none."""
    issued: int
    """When it was issued."""
    on_gpu: bool
    peer: int | None = None
    """The other rank of a send or receive, if the trace says."""
    device: str | None = None
    """The GPU that it ran on."""
    dtype: str | None = None
    """The type of its elements, if the trace says."""
    messages: tuple[Message, ...] = ()
    """Sends and receives that were grouped into one kernel, in their order."""

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def is_cpu_message(self) -> bool:
        """Whether it is a send or receive on the CPU, which ends when the rank asks for it."""
        return self.kind in POINT_TO_POINT and not self.on_gpu

    @property
    def sent_and_received(self) -> tuple[Message, ...]:
        """All messages of which the other rank is known."""
        own = ((self.kind, self.peer),) if self.kind in POINT_TO_POINT and self.peer is not None else ()
        return self.messages or own


@dataclass(frozen=True)
class RankPart:
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
    calls = Calls(trace.of_kind(HostKind.COMM_CALL), groups.size)
    kernels = np.flatnonzero(gpu.kind == GpuKind.COMM).tolist()
    grouped = _grouped_calls(trace, work, calls, kernels)
    found = []
    for i in kernels:
        call, issued = int(work.call[i]), int(work.start[i])
        facts = trace.comm_facts[i]
        if call >= 0:
            launches = trace.launches
            facts = calls.complete(facts, int(launches.thread[call]), int(launches.start[call]))
        if work.captured[i] >= 0:
            facts = replace(facts, sequence=None)  # the number that it had when it was captured
        facts, messages = _of_group(facts, grouped.get(i, ()), groups)
        start = int(gpu.start[i])
        end = start + int(gpu.duration[i])
        each = _collective(facts, groups, (start, end, issued), int(work.step[i]), True)
        found.append(replace(each, device=trace.streams[int(gpu.thread[i])][0], messages=messages))
    return found


def _grouped_calls(
    trace: Trace, work: Launched, calls: Calls, kernels: list[int]
) -> dict[int, Sequence[CommFacts]]:
    """The calls that were grouped into one kernel, by its position.

    A kernel that is launched outside of all calls, as where torch's coalescing ends, is of those since the
    launch before it on its thread; unless more such kernels follow without a call: then it isn't known which
    call is in which of them.
    """
    launches = trace.launches
    by_thread: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for i in kernels:
        call = int(work.call[i])
        if call >= 0:
            by_thread[int(launches.thread[call])].append((int(launches.start[call]), i))
    found: dict[int, Sequence[CommFacts]] = {}
    for thread, launched in by_thread.items():
        since_ns, before = BEGIN_NS, -1
        for time_ns, i in sorted(launched):
            if trace.comm_facts[i].group is None and not calls.named(thread, time_ns):
                found[i] = calls.between(thread, since_ns, time_ns)
                if not found[i]:
                    found.pop(before, None)
            since_ns, before = time_ns, i
    return found


def _of_group(
    facts: CommFacts, calls: Sequence[CommFacts], groups: ProcessGroups
) -> tuple[CommFacts, tuple[Message, ...]]:
    """The facts with what the grouped calls say, and their messages if they are sends and receives."""
    kinds = {call.kind for call in calls}
    if (
        not calls
        or len({call.group for call in calls}) > 1
        or (kinds & POINT_TO_POINT and kinds - POINT_TO_POINT)
    ):
        return facts, ()
    sizes = [call.num_bytes for call in calls]
    known = [size for size in sizes if size is not None]
    first = replace(calls[0], num_bytes=sum(known) if len(known) == len(sizes) else None, sequence=None)
    if len(calls) == 1:
        return first, ()
    peers = [groups.peer(call) for call in calls]
    if not kinds <= POINT_TO_POINT:
        return replace(first, kind=kinds.pop() if len(kinds) == 1 else facts.kind), ()
    first = replace(first, kind="send_recv", peer=None, group_peer=None)
    pairs = zip(calls, peers, strict=True)
    return first, tuple(
        (call.kind, peer) for call, peer in pairs if peer is not None
    ) if None not in peers else ()


def _on_cpu(trace: Trace, steps: list[HostStep], groups: ProcessGroups) -> list[LocalCollective]:
    ranges = trace.of_kind(HostKind.COMM)
    owners = step_at(steps, np.array([each.start for each in ranges], dtype=np.int64))
    calls = Calls(trace.of_kind(HostKind.COMM_CALL), groups.size)
    records = records_of_ranges(ranges, call_records(trace.header), trace.base_ns)
    return [
        _collective(_facts(each, record, calls), groups, (each.start, each.end, each.start), step, False)
        for each, record, step in zip(ranges, records, owners.tolist(), strict=True)
    ]


def _facts(each: HostRange, record: CallRecord | None, calls: Calls) -> CommFacts:
    """The facts of the recorded call; else a message's peer, which may be among the call's arguments."""
    facts = CommFacts(collective_kind(each.name), each.num_bytes, None, None, None)
    if record is None:
        return calls.peer_of(facts, each)
    return replace(facts, group=record.group, sequence=record.sequence, peer=record.peer)


def _collective(
    facts: CommFacts, groups: ProcessGroups, times: tuple[int, int, int], step: int, on_gpu: bool
) -> LocalCollective:
    start, end, issued = times
    return LocalCollective(
        start=start,
        end=end,
        kind=facts.kind,
        num_bytes=facts.num_bytes,
        group=groups.group(facts),
        group_size=groups.size(facts),
        sequence=facts.sequence,
        step=step,
        issued=issued,
        on_gpu=on_gpu,
        peer=groups.peer(facts),
        dtype=facts.dtype,
    )


MAX_SHOWN = 8
"""Ranks in the name of a group."""


def group_labels(groups: Set[TracedGroup]) -> dict[TracedGroup, str]:
    """The name of each group: with its ranks where several have that name; no two alike."""
    shared = Counter(group.name for group in groups)
    labels: dict[TracedGroup, str] = {}
    alike: Counter[str] = Counter()
    for group in sorted(groups, key=lambda group: (group.name, group.ranks or ())):
        label = group.name if shared[group.name] == 1 else _with_ranks(group)
        alike[label] += 1
        labels[group] = label if alike[label] == 1 else f"{label} ({alike[label]})"
    return labels


def _with_ranks(group: TracedGroup) -> str:
    if group.ranks is None:
        return f"{group.name} of unknown ranks"
    shown = [str(rank) for rank in group.ranks]
    if len(shown) > MAX_SHOWN:
        shown = [*shown[: MAX_SHOWN - 1], "…", shown[-1]]
    return f"{group.name} of ranks {', '.join(shown)}"
