"""The collectives of one rank, in the order in which it issued them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpurun.launcher.trace.analysis.steps import HostStep, Launched, step_at
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind, collective_kind
from gpurun.launcher.trace.kineto.columns import CommFacts, HostRange, Trace

UNNAMED = "default"
"""The name of a group that the trace doesn't name."""
DEFAULT_DESCRIPTION = "default_pg"
"""How torch describes the group of all ranks."""
WHOLE_AND_SHARE = frozenset({"all_gather", "reduce_scatter"})
"""Kinds with all data on one side and a rank's share of it on the other; the larger counts as their size."""


@dataclass(frozen=True)
class ProcessGroups:
    """What the header's `distributedInfo` says about groups."""

    unnamed: str
    """The name of the group that a collective belongs to if its trace doesn't say."""
    sizes: Mapping[str, int]
    """Number of ranks by name of the group, where it is known."""

    @staticmethod
    def of(header: Mapping[str, Any]) -> ProcessGroups:
        """Reads the header; entries in another format than torch's are ignored."""
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        listed = info.get("pg_config")
        groups = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        world = info.get("world_size")
        named = {_name(each): _size(each, world) for each in groups}
        sizes = {name: size for name, size in named.items() if size is not None}
        return ProcessGroups(_name(groups[0]) if len(groups) == 1 else UNNAMED, sizes)

    def name(self, facts: CommFacts) -> str:
        """The group of this collective."""
        return self.unnamed if facts.group is None else facts.group

    def size(self, facts: CommFacts) -> int | None:
        """Its number of ranks: from the kernel, else from the header."""
        return self.sizes.get(self.name(facts)) if facts.group_size is None else facts.group_size


def _name(group: Mapping[str, Any]) -> str:
    return str(group.get("pg_name", UNNAMED))


def _size(group: Mapping[str, Any], world: object) -> int | None:
    ranks = group.get("ranks")
    sizes = [len(ranks) if isinstance(ranks, list) else None, group.get("pg_size")]
    if group.get("pg_desc") == DEFAULT_DESCRIPTION:
        sizes.append(world)
    return next((size for size in sizes if type(size) is int and size > 0), None)


@dataclass(frozen=True)
class LocalCollective:
    """A collective as one rank saw it. Times in ns since the trace's base."""

    start: int
    end: int
    kind: str
    num_bytes: int | None
    group: str
    group_size: int | None
    sequence: int | None
    """The library's own count, where the trace has it."""
    step: int
    """Position of the step that issued it; −1: none."""
    issued: int
    """When it was issued."""
    on_gpu: bool
    device: str | None = None
    """The GPU that it ran on."""

    @property
    def duration(self) -> int:
        return self.end - self.start


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
        if facts.num_bytes is None and launch >= 0:
            facts = calls.complete(facts, int(trace.launches.thread[launch]), issued)
        start = int(gpu.start[i])
        end = start + int(gpu.duration[i])
        each = _collective(facts, groups, (start, end, issued), int(work.step[i]), True)
        found.append(replace(each, device=trace.streams[int(gpu.thread[i])][0]))
    return found


def _on_cpu(trace: Trace, steps: list[HostStep], groups: ProcessGroups) -> list[LocalCollective]:
    ranges = trace.of_kind(HostKind.COMM)
    owners = step_at(steps, np.array([each.start for each in ranges], dtype=np.int64))
    return [
        _collective(
            CommFacts(collective_kind(each.name), each.num_bytes, None, None, None),
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
    return LocalCollective(
        start=start,
        end=end,
        kind=facts.kind,
        num_bytes=facts.num_bytes,
        group=groups.name(facts),
        group_size=groups.size(facts),
        sequence=facts.sequence,
        step=step,
        issued=issued,
        on_gpu=on_gpu,
    )


class _Calls:
    """Finds the call that issued a kernel: in older traces it has the sizes, the kernel doesn't."""

    def __init__(self, calls: list[HostRange], groups: ProcessGroups) -> None:
        self.groups = groups
        self.by_thread: dict[int, list[HostRange]] = {}
        for call in sorted(calls, key=lambda call: call.start):
            self.by_thread.setdefault(call.thread, []).append(call)

    def complete(self, facts: CommFacts, thread: int, time_ns: int) -> CommFacts:
        """The facts with bytes and kind of the innermost sized call around `time_ns`, if there is one.

        An outer call of an all-gather or a reduce-scatter may have both output and input.
        """
        around = self._around(thread, time_ns)
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
        """Calls with known sizes around `time_ns`, the innermost first."""
        calls = self.by_thread.get(thread, [])
        last = bisect_right(calls, time_ns, key=lambda call: call.start)
        near = reversed(calls[max(last - 8, 0) : last])
        return [call for call in near if call.tensors and call.end >= time_ns]


def _from_pair(facts: CommFacts, pair: tuple[int, ...]) -> CommFacts:
    """With the larger of output and input; its ratio to the smaller is the number of ranks."""
    whole, share = max(pair), min(pair)
    ratio = whole // share if whole % share == 0 else None
    size = ratio if facts.group_size is None else facts.group_size
    return replace(facts, num_bytes=whole, group_size=size)
