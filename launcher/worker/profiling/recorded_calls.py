"""What the events of a trace don't say: its clock, and the group of each collective of gloo, from its call.

Torch's flight recorder has the collectives, also those that C++ issues as DDP does, but no messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import torch.distributed as dist
from torch.profiler import profile

from gpurun.launcher.rundir.claim import boot_id
from gpurun.launcher.trace.analysis.collectives.call_records import CALLS_KEY, CLOCK_KEY, CallRecord

EARLIER_NS = 1_000_000_000
"""Collectives that were called this long before a trace may still be waiting when it begins."""
_BACKEND = "gloo:"
_METHODS = {"send": "gloo:send", "recv": "gloo:recv"}


class _Entry(msgspec.Struct):
    profiling_name: str
    process_group: tuple[str, str]
    collective_seq_id: int
    time_created_ns: int
    is_p2p: bool = False


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


class CallProfile(profile):
    """A profiler whose traces also name their clock and hold the calls of gloo's collectives and messages."""

    def start_trace(self) -> None:
        self._messages: list[CallRecord] = []
        self._since_ns = time.time_ns() - EARLIER_NS
        self._originals = _wrap_messages(self._messages) if dist.is_available() else {}
        super().start_trace()

    def stop_trace(self) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        calls = [*collective_calls(self._since_ns), *self._messages] if self._originals else []
        if calls:
            self.add_metadata_json(CALLS_KEY, json.dumps(calls))
        self.add_metadata_json(CLOCK_KEY, json.dumps(boot_id()))
        super().stop_trace()


def collective_calls(since_ns: int) -> list[CallRecord]:
    """The collectives of gloo called since then, as far as the flight recorder goes back."""
    entries: list[_Entry] = []
    with suppress(AttributeError, ImportError, RuntimeError, msgspec.MsgspecError):
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        entries = msgspec.json.decode(_dump_fr_trace_json(), type=_Dump).entries
    return [
        CallRecord(
            each.time_created_ns, each.profiling_name, each.process_group[0], each.collective_seq_id, None
        )
        for each in entries
        if each.profiling_name.startswith(_BACKEND) and not each.is_p2p and each.time_created_ns >= since_ns
    ]


def _wrap_messages(calls: list[CallRecord]) -> dict[str, Any]:
    """Has sends and receives add themselves to `calls`; the methods as they were."""
    # From the class's own dictionary: what `getattr` returns would not bind to a group when it is put back.
    originals = {name: vars(dist.ProcessGroup)[name] for name in _METHODS}
    for name in originals:
        bound = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, _recording(bound, _METHODS[name], calls))
    return originals


def _recording(original: Callable[..., Any], name: str, calls: list[CallRecord]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # observing a program must not end it
            ranks = dist.get_process_group_ranks(group)
            calls.append(CallRecord(time.time_ns(), name, group.group_name, None, ranks[peer]))
        return original(group, tensors, peer, *args, **kwargs)

    return call
