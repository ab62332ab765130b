"""One trace of all ranks for Perfetto: clocks aligned, collectives linked from rank to rank."""

from __future__ import annotations

import errno
import gzip
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.files import replacing
from gpurun.launcher.trace.analysis.analyse import Analysis, analyse
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.analysis.collectives.match import Collective
from gpurun.launcher.trace.analysis.digest import Digest
from gpurun.launcher.trace.analysis.discover import find_traces, mark_of_merged, place_for
from gpurun.launcher.trace.kineto.classify import KERNEL_CATEGORIES, GpuKind, HostKind, gpu_kind, host_kind
from gpurun.launcher.trace.kineto.columns import MAX_NS, time_texts
from gpurun.launcher.trace.kineto.trace_file import ReadLimits, TraceBlocks, allowed_bytes, open_source
from gpurun.launcher.trace.model import Table, TraceReport

RawEvent = dict[str, Any]

PIDS_PER_RANK = 10_000
IDS_PER_RANK = 1 << 40
"""Flow ids of different ranks must differ, and stay below 2^53 for JavaScript: they go by the position among
the ranks, not by the rank, which may be any number that a file has in its name."""


def merge_traces(
    paths: Sequence[Path],
    out: Path,
    steps: slice | None = None,
    show: Set[Table] = frozenset(),
    within: Sequence[Path] = (),
) -> TraceReport:
    """The report, as of `analyse_paths`; writes all ranks into one trace for Perfetto or chrome://tracing.

    Process names contain the rank, and processes are sorted by rank. All events are kept, with their times to
    the nanosecond, but those at times that no clock shows. With `steps`, only events that start between the
    begin of the first step and the end of the last step's work are kept, and flow arrows within that window.
    An existing file at `out` is replaced atomically when everything is written; a link is refused. `within`:
    as `find_traces` takes it.

    Raises:
        SpecError: `out` can't be a file, or is one of the traces to merge.
        TraceError: no readable trace is found.
        MachineError: `out` can't be written.
    """
    directory: int | None = None
    try:
        found = find_traces(paths, within)
        out = place_for(out, found.files)
        # What is in its place when the traces have been read, minutes later, may lead elsewhere.
        directory = os.open(out.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        analysis = analyse(paths, steps, show, within=found.within)
        with replacing(out.name, directory) as file:
            if out.suffix == ".gz":
                # Without the time of day: the same traces give the same bytes.
                with gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0) as packed:
                    _write(analysis, found.within, packed)
            else:
                _write(analysis, found.within, file)
        return analysis.report
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space or name another file" if full else "name another file"
        raise MachineError(f"can't write {out}: {error.strerror}; {advice}") from error
    finally:
        if directory is not None:
            os.close(directory)


def _write(analysis: Analysis, within: Sequence[Path], file: IO[bytes] | gzip.GzipFile) -> None:
    """The events, rank by rank, a block at a time."""
    base_ns = analysis.report.base_time_ns // 1_000_000_000 * 1_000_000_000
    mark = mark_of_merged([digest.path for _, digest in analysis.ranked.digests])
    header = mark | {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns}
    file.write(msgspec.json.encode(header)[:-1] + b',"traceEvents":[\n')
    encode = msgspec.json.Encoder().encode
    separator = b""
    for block in _blocks(analysis, within, base_ns):
        if block:
            file.write(separator + b",\n".join(map(encode, block)))
            separator = b",\n"
    file.write(b"\n]}\n")


def _blocks(analysis: Analysis, within: Sequence[Path], base_ns: int) -> Iterator[list[RawEvent]]:
    movers: dict[int, _Mover] = {}
    room = ReadLimits(allowed_bytes([digest.path for _, digest in analysis.ranked.digests]), within)
    for position, (rank, digest) in enumerate(analysis.ranked.digests):
        parts = [part for each in analysis.matched.collectives for part in each.parts if part.rank == rank]
        starts_ns = frozenset(_in_file_ns(part, digest) for part in parts)
        realigned = analysis.matched.clocks.realigned(rank, digest.base_ns, base_ns)
        since_base_ns = digest.zero_ns - digest.base_ns
        movers[rank] = _Mover(rank, position, realigned, since_base_ns, starts_ns, _window(digest))
        with open_source(digest.path, room) as source:
            for events, block in TraceBlocks(source, RawEvent).blocks():
                yield movers[rank].move(events, block)
        yield movers[rank].labels()
    digests = dict(analysis.ranked.digests)
    for number, each in enumerate(analysis.matched.collectives):
        yield _links(number + len(movers) * IDS_PER_RANK, each, movers, digests)


def _in_file_ns(part: RankPart, digest: Digest) -> int:
    """The start of a part, in the file's own time."""
    return part.local.start + digest.base_ns - digest.zero_ns


def _window(digest: Digest) -> tuple[int, int] | None:
    """The digest's window, in the file's own time."""
    if digest.window is None:
        return None
    since_zero_ns = digest.base_ns - digest.zero_ns
    return digest.window[0] + since_zero_ns, digest.window[1] + since_zero_ns


@dataclass
class _Mover:
    """Maps one rank's events to process ids and times of the merged trace."""

    rank: int
    position: int
    """Among the ranks."""
    realigned: Realigned
    since_base_ns: int
    """Added to the file's times before they are realigned."""
    starts_ns: frozenset[int]
    """Start times of collectives, in the file's time."""
    window_ns: tuple[int, int] | None = None
    """The window to keep, in the file's time; `None` keeps everything."""
    pids: dict[str, int] = field(default_factory=dict)
    places: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Process and thread of the event at each of `starts_ns`."""
    labelled: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Processes that the file has metadata for, by the kind of metadata."""
    half_arrows: dict[tuple[Any, Any], RawEvent] = field(default_factory=dict)
    """Ends of arrows in a window, until the other end of each is found in it."""

    def move(self, events: Sequence[RawEvent], block: bytes) -> list[RawEvent]:
        """The mapped events; events without a time keep none."""
        times = time_texts(block)
        moved = [
            (event, self._moved(event, ts))
            for event, (ts, _) in zip(events, times, strict=True)
            if self._is_kept(event, ts)
        ]
        if self.window_ns is None:
            return [each for _, each in moved]
        return [each for event, new in moved for each in self._whole_arrows(event, new)]

    def _is_kept(self, event: RawEvent, ts_ns: int | None) -> bool:
        if event.get("ph") == "M":
            return True
        if ts_ns is None:
            return self.window_ns is None
        first_ns, end_ns = self.window_ns or (-MAX_NS - self.since_base_ns, MAX_NS - self.since_base_ns)
        return first_ns <= ts_ns < end_ns

    def _whole_arrows(self, event: RawEvent, moved: RawEvent) -> list[RawEvent]:
        """The event itself; for an arrow both ends, once both are known."""
        if event.get("ph") not in ("s", "f"):
            return [moved]
        key = (str(event.get("cat")), str(event.get("id")))
        other = self.half_arrows.pop(key, None)
        if other is not None and other["ph"] != moved["ph"]:
            return [other, moved]
        self.half_arrows[key] = moved
        return []

    def _moved(self, event: RawEvent, ts_ns: int | None) -> RawEvent:
        moved = event | {
            "pid": self.pids.setdefault(str(event.get("pid")), self.rank * PIDS_PER_RANK + len(self.pids))
        }
        if ts_ns is not None:
            moved["ts"] = self.moved_us(ts_ns)
        if "id" in event:
            moved["id"] = self._id(event["id"])
        if event.get("ph") == "M":
            return self._named(moved)
        if ts_ns in self.starts_ns and _may_be_collective(event):
            self.places[ts_ns] = (moved["pid"], event.get("tid"))
        return moved

    def _id(self, identity: Any) -> Any:
        if isinstance(identity, int):
            return identity % IDS_PER_RANK + self.position * IDS_PER_RANK
        return f"{self.rank}:{identity}"

    def _named(self, event: RawEvent) -> RawEvent:
        name, args = event.get("name"), event.get("args")
        if name == "process_name" and isinstance(args, dict):
            event["args"] = args | {"name": f"rank {self.rank}: {args.get('name')}"}
        if name == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        self.labelled[str(name)].add(event["pid"])
        return event

    def labels(self) -> list[RawEvent]:
        """Metadata that names unnamed processes and sorts all by rank."""
        named, placed = self.labelled["process_name"], self.labelled["process_sort_index"]
        found = []
        for spelled, pid in self.pids.items():
            common = {"ph": "M", "pid": pid, "tid": 0}
            if pid not in named:
                args = {"name": f"rank {self.rank}: process {spelled}"}
                found.append(common | {"name": "process_name", "args": args})
            if pid not in placed:
                found.append(common | {"name": "process_sort_index", "args": {"sort_index": pid}})
        return found

    def moved_us(self, ts_ns: int) -> float:
        return self.realigned.time_ns(ts_ns + self.since_base_ns) / 1000


def _may_be_collective(event: RawEvent) -> bool:
    category, name = str(event.get("cat")), str(event.get("name"))
    if event.get("ph") != "X":
        return False
    if category in KERNEL_CATEGORIES:
        return gpu_kind(category, name) is GpuKind.COMM
    return host_kind(category, name) is HostKind.COMM


def _links(
    identity: int, collective: Collective, movers: Mapping[int, _Mover], digests: Mapping[int, Digest]
) -> list[RawEvent]:
    """Arrows through one collective, from the first rank to arrive to the last."""
    if not collective.matched:
        return []
    ends = []
    for part in collective.parts:
        ts_ns, mover = _in_file_ns(part, digests[part.rank]), movers[part.rank]
        if ts_ns in mover.places:
            ends.append((mover.moved_us(ts_ns), *mover.places[ts_ns]))
    ends.sort(key=lambda end: end[0])
    common = {"name": collective.kind, "cat": "collective", "id": identity, "bp": "e"}
    phases = ["s", *"t" * (len(ends) - 2), "f"] if len(ends) > 1 else []
    return [
        common | {"ph": phase, "ts": ts, "pid": pid, "tid": tid}
        for phase, (ts, pid, tid) in zip(phases, ends, strict=False)
    ]
