"""One trace of all ranks for Perfetto: clocks aligned, collectives linked from rank to rank."""

from __future__ import annotations

import errno
import gzip
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from launcher.errors import MachineError
from launcher.trace.analyse import Analysis, analyse
from launcher.trace.blocks import TraceFile
from launcher.trace.classify import KERNEL_CATEGORIES, GpuKind, HostKind, gpu_kind, host_kind
from launcher.trace.discover import find_traces
from launcher.trace.events import time_texts
from launcher.trace.match import Collective
from launcher.trace.merged_file import MARK, place_for
from launcher.trace.source import open_source

RawEvent = dict[str, Any]

PIDS_PER_RANK = 10_000
IDS_PER_RANK = 1 << 40
"""Flow ids of different ranks must differ, and stay below 2^53 for JavaScript."""


def merge_traces(paths: Sequence[Path], out: Path) -> None:
    """Writes all ranks in `paths` into one trace, which opens in Perfetto and chrome://tracing.

    Every process gets the rank in its name and comes in the order of ranks. All of a file's events are kept,
    with their times to the nanosecond. The file that stood at `out`, or that `out` links to, is replaced in
    one step, when all is written.

    Raises:
        SpecError: `out` is no place for a file, or is one of the traces to merge.
        TraceError: no path holds a trace that can be read.
        MachineError: `out` can't be written.
    """
    out = place_for(out, find_traces(paths).files)
    analysis = analyse(paths)
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
            name = file.name
            if out.suffix == ".gz":
                # Without the time of day: the same traces give the same bytes.
                with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed:
                    _write(analysis, packed)
            else:
                _write(analysis, file)
        os.chmod(name, 0o644)
        os.replace(name, out)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space or name another file" if full else "name another file"
        raise MachineError(f"can't write {out}: {error.strerror}; {advice}") from error
    finally:
        if name is not None and os.path.exists(name):
            os.unlink(name)


def _write(analysis: Analysis, file: IO[bytes] | gzip.GzipFile) -> None:
    """The events, rank by rank, a block at a time."""
    base_ns = analysis.report.base_time_ns // 1_000_000_000 * 1_000_000_000
    header = MARK | {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
    file.write(msgspec.json.encode(header)[:-1] + b',"traceEvents":[\n')
    encode = msgspec.json.Encoder().encode
    separator = b""
    for block in _blocks(analysis, base_ns):
        if block:
            file.write(separator + b",\n".join(map(encode, block)))
            separator = b",\n"
    file.write(b"\n]}\n")


def _blocks(analysis: Analysis, base_ns: int) -> Iterator[list[RawEvent]]:
    movers: dict[int, _Mover] = {}
    for rank, digest in analysis.ranked.digests:
        parts = [part for each in analysis.matched.collectives for part in each.parts if part.rank == rank]
        starts_ns = frozenset(part.start_ns - digest.zero_ns for part in parts)
        movers[rank] = _Mover(rank, digest.zero_ns - analysis.matched.offsets[rank] - base_ns, starts_ns)
        with open_source(digest.path) as source:
            for events, block in TraceFile(source, RawEvent).blocks():
                yield movers[rank].move(events, block)
        yield movers[rank].labels()
    zeros_ns = {rank: digest.zero_ns for rank, digest in analysis.ranked.digests}
    for number, each in enumerate(analysis.matched.collectives):
        yield _links(number + (max(movers) + 1) * IDS_PER_RANK, each, movers, zeros_ns)


@dataclass
class _Mover:
    """Moves one rank's events to processes and times of their own in the merged trace."""

    rank: int
    shift_ns: int
    """What is added to the file's times."""
    starts_ns: frozenset[int]
    """The file's times at which collectives begin."""
    pids: dict[str, int] = field(default_factory=dict)
    places: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Process and thread of the event at each of `starts_ns`."""

    def move(self, events: Sequence[RawEvent], block: bytes) -> list[RawEvent]:
        """The events, moved; those without any time in the file keep none."""
        times = time_texts(block)
        return [self._one(event, ts) for event, (ts, _) in zip(events, times, strict=True)]

    def _one(self, event: RawEvent, ts_ns: int | None) -> RawEvent:
        moved = event | {"pid": self._pid(event.get("pid"))}
        if ts_ns is not None:
            moved["ts"] = (ts_ns + self.shift_ns) / 1000
        if "id" in event:
            moved["id"] = self._id(event["id"])
        if event.get("ph") == "M":
            return self._named(moved)
        if ts_ns in self.starts_ns and _may_be_collective(event):
            self.places[ts_ns] = (moved["pid"], event.get("tid"))
        return moved

    def _pid(self, pid: Any) -> int:
        return self.pids.setdefault(str(pid), self.rank * PIDS_PER_RANK + len(self.pids))

    def _id(self, identity: Any) -> Any:
        if isinstance(identity, int):
            return identity % IDS_PER_RANK + self.rank * IDS_PER_RANK
        return f"{self.rank}:{identity}"

    def _named(self, event: RawEvent) -> RawEvent:
        args = event.get("args")
        if event.get("name") == "process_name" and isinstance(args, dict):
            event["args"] = args | {"name": f"rank {self.rank}: {args.get('name')}"}
        return event

    def labels(self) -> list[RawEvent]:
        """Keeps the processes in the order of ranks."""
        return [
            {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
            for pid in self.pids.values()
        ]

    def moved_us(self, ts_ns: int) -> float:
        return (ts_ns + self.shift_ns) / 1000


def _may_be_collective(event: RawEvent) -> bool:
    category, name = str(event.get("cat")), str(event.get("name"))
    if event.get("ph") != "X":
        return False
    if category in KERNEL_CATEGORIES:
        return gpu_kind(category, name) is GpuKind.COMM
    return host_kind(category, name) is HostKind.COMM


def _links(
    identity: int, collective: Collective, movers: Mapping[int, _Mover], zeros_ns: Mapping[int, int]
) -> list[RawEvent]:
    """Arrows through one collective, from the first rank to arrive to the last."""
    if not collective.matched:
        return []
    ends = []
    for part in collective.parts:
        ts_ns, mover = part.start_ns - zeros_ns[part.rank], movers[part.rank]
        if ts_ns in mover.places:
            ends.append((mover.moved_us(ts_ns), *mover.places[ts_ns]))
    ends.sort(key=lambda end: end[0])
    common = {"name": collective.kind, "cat": "collective", "id": identity, "bp": "e"}
    phases = ["s", *"t" * (len(ends) - 2), "f"] if len(ends) > 1 else []
    return [
        common | {"ph": phase, "ts": ts, "pid": pid, "tid": tid}
        for phase, (ts, pid, tid) in zip(phases, ends, strict=False)
    ]
