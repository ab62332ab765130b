"""Builds the index of one variant: reads each rank's trace, matches the ranks, writes the columns.

Ranks are written one by one; no more than one rank's entries are in memory. Of collectives: their entries on
each rank, and where their waiting ends.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.errors import TraceError
from gpurun.launcher.findings.finding import Finding, noticed, of_level
from gpurun.launcher.machine.helper_process import yield_to_others
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.tensorboard_plugin.timeline.bands import band_kinds
from gpurun.launcher.tensorboard_plugin.timeline.format import (
    COLUMNS,
    FORMAT,
    INDEX_FILE,
    MAX_HEADER_BYTES,
    MERGED,
    BlockKind,
    Blocks,
    CollectiveFacts,
    Header,
    Int8,
    Lane,
    Level,
    Row,
    StepSpan,
    UnreadableFile,
    merge,
    single,
)
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import (
    Entries,
    NameNumbers,
    RankDraft,
    draft,
    exclusive,
    ordered,
    shifted,
    split_transfers,
)
from gpurun.launcher.tensorboard_plugin.timeline.index_store import with_file_names
from gpurun.launcher.trace.analysis.analyse import Analysis, combine
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.analysis.collectives.match import Collective, Matched
from gpurun.launcher.trace.analysis.digest import Digest, digest
from gpurun.launcher.trace.explain import last_rank
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.kineto.read_trace import read_trace
from gpurun.launcher.trace.kineto.trace_file import ReadLimits
from gpurun.launcher.trace.model import CollectiveReport
from gpurun.launcher.trace.parallel import PARALLEL_FROM_BYTES, weight
from gpurun.launcher.units import format_count


@dataclass(frozen=True)
class PartEntry:
    """One rank's part of a collective. Times in ns since the rank's trace base."""

    collective: int
    entry: int
    """Number of the entry of its wait, among the rank's entries."""
    start: int
    split: int
    """The time at which waiting ends."""
    end: int


def part_entries(rank: int, draft: RankDraft, matched: Matched) -> list[PartEntry]:
    """The rank's parts in all collectives, in their order."""
    entries = _entries_by_times(draft)
    found = []
    for number, collective in enumerate(matched.collectives):
        for part in collective.parts:
            candidates = entries[part.local.start, part.local.end] if part.rank == rank else []
            if candidates:
                found.append(_part_entry(number, collective, part, candidates.pop(0)))
    return found


def _entries_by_times(draft: RankDraft) -> defaultdict[tuple[int, int], list[int]]:
    """The waits by start and end of their collective."""
    waits = draft.collectives
    starts, ends = draft.entries.start[waits].tolist(), draft.entries.end[waits + 1].tolist()
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for entry, start, end in zip(waits.tolist(), starts, ends, strict=True):
        found[start, end].append(entry)
    return found


def _part_entry(number: int, collective: Collective, part: RankPart, entry: int) -> PartEntry:
    local = part.local
    return PartEntry(number, entry, local.start, collective.moving(part)[0], local.end)


def split_waits(draft: RankDraft, parts: list[PartEntry]) -> None:
    """Moves the border between wait and transfer, in place, to where the other ranks' traces show it."""
    at = np.array([part.entry for part in parts], dtype=np.int64)
    split = np.array([part.split for part in parts], dtype=np.int64)
    draft.entries.end[at] = split
    draft.entries.start[at + 1] = split


def transfers(draft: RankDraft) -> Intervals:
    """When data moved."""
    moving = draft.collectives + 1
    return union(draft.entries.start[moving], draft.entries.end[moving])


def transfers_by_kind(
    draft: RankDraft, parts: Sequence[PartEntry], kinds: Sequence[BlockKind]
) -> dict[BlockKind, Intervals]:
    """When data moved, by the kind of each collective; `kinds` has one for each number."""
    entries: defaultdict[BlockKind, list[int]] = defaultdict(list)
    for part in parts:
        entries[kinds[part.collective]].append(part.entry + 1)
    start, end = draft.entries.start, draft.entries.end
    return {kind: union(start[entries[kind]], end[entries[kind]]) for kind in sorted(entries)}


def facts(collectives: Sequence[CollectiveReport]) -> tuple[CollectiveFacts, ...]:
    """The part of each collective that all ranks share."""
    return tuple(
        CollectiveFacts(
            kind=each.kind,
            group=each.group,
            seq=each.seq,
            parallelism=each.parallelism,
            num_bytes=each.bytes,
            algorithm_gb_per_s=each.algorithm_gb_per_s,
            bus_gb_per_s=each.bus_gb_per_s,
            last_rank=each.last_rank,
            matched=each.ranks[0].transfer_us is not None,
        )
        for each in collectives
    )


def part_columns(
    rank: int, parts: list[PartEntry], first_entry: int, realigned: Realigned
) -> dict[str, Int64]:
    """The parts as columns of the index."""
    return {
        "part_collective": _column(part.collective for part in parts),
        "part_rank": np.full(len(parts), rank, dtype=np.int64),
        "part_entry": _column(part.entry + first_entry for part in parts),
        "part_start": _column(realigned.time_ns(part.start) for part in parts),
        "part_split": _column(realigned.time_ns(part.split) for part in parts),
        "part_end": _column(realigned.time_ns(part.end) for part in parts),
    }


def _column(values: object) -> Int64:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]


FEW_BLOCKS = 2000
"""A row with fewer is merged on request."""
FINEST_NS = 256
STEP = 4
"""Ratio of block lengths from one level to the next."""
WORTH = 0.6
"""A level with more than this share of the blocks of the finer one isn't kept."""


class ColumnWriter(AbstractContextManager["ColumnWriter"]):
    """Appends to the column files in `directory`, and keeps count of what they hold."""

    def __init__(self, directory: Path, matched: Matched, parallelism: Sequence[str]) -> None:
        """`parallelism`: of each collective, as in `ParallelKind`."""
        self.matched = matched
        self.band_kinds = band_kinds([each.kind for each in matched.collectives], parallelism)
        self.names = NameNumbers()
        self.lanes: list[Lane] = []
        self.moments: dict[int, tuple[int, int]] = {}
        self.num_events = 0
        self.num_entries = 0
        self.num_level_blocks = 0
        self.num_parts = 0
        self.num_hidden = 0
        self._stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {
            name: self._stack.enter_context((directory / name).open("wb")) for name in COLUMNS
        }

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, rank: int, draft: RankDraft, realigned: Realigned) -> None:
        """Appends a rank. `realigned` turns its times into those of the index."""
        parts = part_entries(rank, draft, self.matched)
        split_waits(draft, parts)
        self._add_bands(rank, draft, parts, realigned)
        entries = self._moved(draft, realigned)
        for lane in draft.lanes:
            rows = tuple(self._row(entries, first, last) for first, last in lane.rows)
            self.lanes.append(Lane(rank, lane.kind, lane.label, rows))
        self._write(**vars(entries))
        self._write(**part_columns(rank, parts, self.num_entries, realigned))
        self.num_entries += len(entries)
        self.num_parts += len(parts)
        self.num_events += draft.num_events
        self.num_hidden += draft.num_hidden

    def _moved(self, draft: RankDraft, realigned: Realigned) -> Entries:
        """The rank's entries with the times, names and places of the index."""
        entries = draft.entries
        names = self.names.numbers(draft.names)
        entries.start[:] = realigned.each(entries.start)
        entries.end[:] = realigned.each(entries.end)
        launch = entries.launch + np.int32(self.num_entries)
        return Entries(
            start=entries.start,
            end=entries.end,
            name=names[entries.name] if len(entries) else entries.name,
            kind=entries.kind,
            launch=np.where(entries.launch >= 0, launch, entries.launch),
            correlation=entries.correlation,
        )

    def _row(self, entries: Entries, first: int, last: int) -> Row:
        """A row of the rank, whose entries are written later, with its levels, which are written now."""
        place = slice(first, last)
        numbers = np.arange(first, last, dtype=np.int32) + np.int32(self.num_entries)
        zeros = np.zeros(last - first, dtype=np.int32)
        blocks = single(entries.start[place], entries.end[place], entries.kind[place], numbers, zeros)
        levels = tuple(self._level(shortest_ns, coarse) for shortest_ns, coarse in coarser(blocks))
        return Row(first + self.num_entries, last + self.num_entries, levels)

    def _add_bands(self, rank: int, draft: RankDraft, parts: list[PartEntry], realigned: Realigned) -> None:
        """Device activity: moments of each class, unchanged for sums and merged for a lane of each sort."""
        found = exclusive(draft.activity, draft.data, transfers(draft))
        start, end, kind = _on_clock(found, realigned)
        self._write(moment_start=start, moment_end=end, moment_kind=kind)
        begin = max((last for _, last in self.moments.values()), default=0)
        self.moments[rank] = (begin, begin + len(start))
        self._add_band("overview", rank, start, end, kind)
        for name, kinds in self.band_kinds.items():
            split = split_transfers(found, transfers_by_kind(draft, parts, kinds))
            self._add_band(name, rank, *_on_clock(split, realigned))

    def _add_band(self, name: str, rank: int, start: Int64, end: Int64, kind: Int8) -> None:
        zeros = np.zeros(len(start), dtype=np.int32)
        blocks = single(start, end, kind, zeros + np.int32(MERGED), zeros)
        levels = [self._level(0, blocks)]
        levels += [self._level(shortest_ns, coarse) for shortest_ns, coarse in coarser(blocks)]
        row = Row(self.num_entries, self.num_entries, tuple(levels))
        self.lanes.append(
            Lane(rank, name, f"rank {rank}" if name == "overview" else f"rank {rank} by {name}", (row,))
        )

    def _level(self, shortest_ns: int, blocks: Blocks) -> Level:
        self._write(
            level_start=blocks.start,
            level_end=blocks.end,
            level_kind=blocks.kind,
            level_entry=blocks.entry,
            level_count=blocks.count,
            level_busy=blocks.busy,
        )
        first = self.num_level_blocks
        self.num_level_blocks += len(blocks)
        return Level(shortest_ns, first, self.num_level_blocks)

    def _write(self, **columns: NDArray[Any]) -> None:
        for name, values in columns.items():
            values.astype(COLUMNS[name], copy=False).tofile(self._files[name])


def _on_clock(parts: dict[BlockKind, Intervals], realigned: Realigned) -> tuple[Int64, Int64, Int8]:
    return ordered({kind: shifted(each, realigned) for kind, each in parts.items()})


def coarser(blocks: Blocks) -> Iterator[tuple[int, Blocks]]:
    """The row's levels, the finest first, each with the length below which its blocks were merged, in ns."""
    shortest_ns = FINEST_NS
    kept = len(blocks)
    while kept > FEW_BLOCKS and len(blocks):
        blocks = merge(blocks, shortest_ns)
        if len(blocks) <= WORTH * kept:
            kept = len(blocks)
            yield shortest_ns, blocks
        if shortest_ns > int(blocks.end[-1]) - int(blocks.start[0]):
            return
        shortest_ns *= STEP


MAX_WORKERS = 4
"""Each holds one trace's columns, 80 bytes per event."""

Span = tuple[int, int]
Report = Callable[[int, int, int], None]
"""Called with the number of a file, how many of its bytes have been read, and how many they unpacked to."""


@dataclass(frozen=True)
class DraftFile:
    """A worker's result for one trace; its entries are in a file, since they are large."""

    digest: Digest
    path: Path
    first_ns: int
    last_ns: int

    def span(self, realigned: Realigned) -> Span:
        """First start and last end in ns, on another clock."""
        return realigned.time_ns(self.first_ns), realigned.time_ns(self.last_ns)


def build(files: Sequence[Path], within: Path, directory: Path, report: Report) -> None:
    """Writes the index of `files`, one per rank, into `directory`, which is empty.

    `within`: where the files have to be when they are opened.

    Raises:
        BrokenTraces: none of them can be read, or their index would be too large to be opened.
        OSError: the disk is full.
    """
    found = _read_all(files, ReadLimits(within=(within,)), directory, report)
    problems = tuple(each for each in found if isinstance(each, UnreadableFile))
    drafts = {each.digest.path: each for each in found if isinstance(each, DraftFile)}
    if not drafts:
        raise BrokenTraces(problems)
    analysis = combine([each.digest for each in drafts.values()])
    header = _write(analysis, drafts, directory, problems)
    content = msgspec.json.encode(header)
    if len(content) > MAX_HEADER_BYTES:
        text = (
            "too many names, threads and collectives for a timeline:"
            f" {format_count(len(content))} bytes to describe them"
        )
        raise BrokenTraces(
            (*problems, UnreadableFile(files[0].parent.name, None, f"{text}; trace fewer steps"))
        )
    (directory / INDEX_FILE).write_bytes(content)


class BrokenTraces(Exception):
    """No trace of the variant can be read."""

    def __init__(self, problems: tuple[UnreadableFile, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


def _read_all(
    files: Sequence[Path], room: ReadLimits, directory: Path, report: Report
) -> list[DraftFile | UnreadableFile]:
    workers = min(len(files), MAX_WORKERS, len(os.sched_getaffinity(0)))
    if workers < 2 or sum(map(weight, files)) < PARALLEL_FROM_BYTES:
        return [_read(number, file, room, directory, report) for number, file in enumerate(files)]
    with ProcessPoolExecutor(workers, get_context("spawn"), die_with, (os.getpid(),)) as pool:
        tasks = [
            pool.submit(_read, number, file, room, directory, report) for number, file in enumerate(files)
        ]
        return [task.result() for task in tasks]


def _read(
    number: int, file: Path, room: ReadLimits, directory: Path, report: Report
) -> DraftFile | UnreadableFile:
    """One file's digest and draft; runs in a worker."""
    try:
        trace = read_trace(file, lambda read, unpacked: report(number, read, unpacked), room=room)
        digested = digest(trace, file, None)
    except TraceError as error:
        return problem(file, str(error))
    made = draft(trace)
    path = directory / f"draft{number}"
    with path.open("wb") as target:
        pickle.dump(made, target, protocol=5)
    windows = [scope.measure for scope in (digested.total, *digested.steps)]
    first_ns = int(made.entries.start.min(initial=min(each.start for each in windows)))
    last_ns = int(made.entries.end.max(initial=max(each.end for each in windows)))
    return DraftFile(digested, path, first_ns, last_ns)


def problem(file: Path, message: str) -> UnreadableFile:
    """The problem of a file, without the path of its directory."""
    text = message.replace(f"{file}: ", "").replace(str(file), file.name)
    byte = re.search(r"byte ([\d,]+)", text)
    return UnreadableFile(file.name, int(byte[1].replace(",", "")) if byte else None, text)


def _write(
    analysis: Analysis, drafts: dict[Path, DraftFile], directory: Path, problems: tuple[UnreadableFile, ...]
) -> Header:
    ranked = [(rank, drafts[found.path]) for rank, found in analysis.ranked.digests]
    clocks = analysis.matched.clocks
    spans = {rank: each.span(clocks.realigned(rank, each.digest.base_ns, 0)) for rank, each in ranked}
    base_ns = min(start for start, _ in spans.values())
    is_apart = recorded_apart(list(spans.values()), analysis.matched.collectives)
    zeros = {rank: span[0] if is_apart else base_ns for rank, span in spans.items()}
    steps: list[StepSpan] = []
    end_ns = 0
    parallelism = [each.parallelism for each in analysis.report.collectives]
    with ColumnWriter(directory, analysis.matched, parallelism) as writer:
        for rank, each in ranked:
            realigned = clocks.realigned(rank, each.digest.base_ns, zeros[rank])
            writer.add(rank, _load(each.path), realigned)
            steps += _steps(rank, each.digest, realigned)
            end_ns = max(end_ns, realigned.time_ns(each.last_ns))
    for each in drafts.values():
        each.path.unlink()
    return Header(
        format=FORMAT,
        base_time_ns=base_ns,
        end_ns=end_ns,
        num_events=writer.num_events,
        num_entries=writer.num_entries,
        num_level_blocks=writer.num_level_blocks,
        num_parts=writer.num_parts,
        moments=writer.moments,
        names=tuple(writer.names),
        lanes=tuple(writer.lanes),
        steps=tuple(steps),
        collectives=facts(analysis.report.collectives),
        ranks=analysis.report.ranks,
        straggler=last_rank(analysis.report),
        warnings=tuple(each.text for each in _notes(analysis, writer.num_hidden, is_apart)),
        problems=problems,
        conclusion=analysis.report.conclusion,
        apart=is_apart,
        linked=not analysis.matched.clocks.unlinked,
        parallelism=analysis.report.parallelism,
        pipeline=analysis.report.pipeline,
    )


def recorded_apart(spans: Sequence[Span], collectives: Sequence[Collective]) -> bool:
    """Whether traces have no moment and no collective in common: on one clock they would be too far apart to
    be seen.

    Args:
        spans: first start and last end of each rank, in ns on one clock.
        collectives: of all ranks.
    """
    ordered = sorted(spans)
    disjoint = all(end < start for (_, end), (start, _) in itertools.pairwise(ordered))
    return len(ordered) > 1 and disjoint and all(len(each.parts) < 2 for each in collectives)


def _load(path: Path) -> RankDraft:
    with path.open("rb") as source:
        made: RankDraft = pickle.load(source)  # our own, from this build's directory
    return made


def _steps(rank: int, found: Digest, realigned: Realigned) -> list[StepSpan]:
    return [
        StepSpan(rank, scope.step, *map(realigned.time_ns, (scope.measure.start, scope.measure.end)))
        for scope in found.steps
        if scope.step is not None and scope.position is not None
    ]


def _notes(analysis: Analysis, num_hidden: int, is_apart: bool) -> Iterator[Finding]:
    files = [found.path for _, found in analysis.ranked.digests]
    yield from with_file_names(of_level(analysis.report.findings, "detail"), files)
    if is_apart:
        yield noticed("no-common-moment")
    if num_hidden:
        yield noticed("nested-too-deeply", num_ranges=num_hidden)


class Order(msgspec.Struct, frozen=True):
    """The index to build, as JSON on stdin."""

    parent: int
    """Process id of the server."""
    files: tuple[str, ...]
    within: str
    """The directory in which they have to be."""
    directory: str
    """An empty directory for the index."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line on stdout."""

    file: int = -1
    position: int = 0
    """Bytes of that file that have been read."""
    unpacked: int = 0
    """How many they unpacked to."""
    problems: tuple[UnreadableFile, ...] = ()
    """The last line if no trace can be read."""
    done: bool = False
    """The last line if the index was built."""


def main() -> None:
    """Builds the index described on stdin; progress and outcome go to stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    die_with(order.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the server, which ends this process
    yield_to_others()
    try:
        build(
            [Path(file) for file in order.files], Path(order.within), Path(order.directory), report_position
        )
    except BrokenTraces as error:
        _report(News(problems=error.problems))
    else:
        _report(News(done=True))


def report_position(file: int, position: int, unpacked: int) -> None:
    """Also called in this process's workers; writes this short are atomic in a pipe."""
    _report(News(file=file, position=position, unpacked=unpacked))


def _report(news: News) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(news) + b"\n")
