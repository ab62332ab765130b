"""The collectives of one rank, in the order in which it issued them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from launcher.trace.classify import GpuKind, HostKind, collective_kind
from launcher.trace.columns import CommFacts, HostRange, Trace
from launcher.trace.steps import HostStep, Launched, step_at

DEFAULT_GROUP = "default"


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

    @property
    def duration(self) -> int:
        return self.end - self.start


def local_collectives(trace: Trace, work: Launched, steps: list[HostStep]) -> list[LocalCollective]:
    """Collectives of this rank, on GPU and CPU, in the order in which they were issued."""
    default = _default_group(trace.header)
    found = _on_gpu(trace, work, default) + _on_cpu(trace, steps, default)
    return sorted(found, key=lambda each: (each.issued, each.start))


def _default_group(header: dict[str, Any]) -> str:
    """The name of the only process group, where the trace describes just one."""
    info = header.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict):
        return str(groups[0].get("pg_name", DEFAULT_GROUP))
    return DEFAULT_GROUP


def _on_gpu(trace: Trace, work: Launched, default: str) -> list[LocalCollective]:
    gpu = trace.gpu
    calls = _Calls(trace.of_kind(HostKind.COMM_CALL))
    found = []
    for i in np.flatnonzero(gpu.kind == GpuKind.COMM).tolist():
        launch, issued = int(work.launch[i]), int(work.start[i])
        facts = trace.comm_facts[i]
        if facts.num_bytes is None and launch >= 0:
            facts = calls.complete(facts, int(trace.launches.thread[launch]), issued)
        start = int(gpu.start[i])
        end = start + int(gpu.duration[i])
        found.append(_collective(facts, default, (start, end, issued), int(work.step[i]), True))
    return found


def _on_cpu(trace: Trace, steps: list[HostStep], default: str) -> list[LocalCollective]:
    ranges = trace.of_kind(HostKind.COMM)
    owners = step_at(steps, np.array([each.start for each in ranges], dtype=np.int64))
    return [
        _collective(
            CommFacts(collective_kind(each.name), each.num_bytes, None, None, None),
            default,
            (each.start, each.end, each.start),
            step,
            False,
        )
        for each, step in zip(ranges, owners.tolist(), strict=True)
    ]


def _collective(
    facts: CommFacts, default: str, times: tuple[int, int, int], step: int, on_gpu: bool
) -> LocalCollective:
    start, end, issued = times
    return LocalCollective(
        start=start,
        end=end,
        kind=facts.kind,
        num_bytes=facts.num_bytes,
        group=default if facts.group is None else facts.group,
        group_size=facts.group_size,
        sequence=facts.sequence,
        step=step,
        issued=issued,
        on_gpu=on_gpu,
    )


class _Calls:
    """Finds the call that issued a kernel: older traces say there, not on the kernel, what was moved."""

    def __init__(self, calls: list[HostRange]) -> None:
        self.by_thread: dict[int, list[HostRange]] = {}
        for call in sorted(calls, key=lambda call: call.start):
            self.by_thread.setdefault(call.thread, []).append(call)

    def complete(self, facts: CommFacts, thread: int, time_ns: int) -> CommFacts:
        """The facts with bytes and kind of the innermost sized call around `time_ns`, if there is one."""
        calls = self.by_thread.get(thread, [])
        last = bisect_right(calls, time_ns, key=lambda call: call.start)
        for call in reversed(calls[max(last - 8, 0) : last]):
            if call.num_bytes is not None and call.end >= time_ns:
                kind = collective_kind(call.name)
                named = kind if call.name.startswith("nccl:") and kind != "other" else facts.kind
                return replace(facts, num_bytes=call.num_bytes, kind=named)
        return facts
