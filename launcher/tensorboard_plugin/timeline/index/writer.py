"""Writes the columns of an index, rank by rank; no more than one rank's entries are in memory.

Of collectives: their entries on each rank, and where their waiting ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.bands import band_kinds
from gpurun.launcher.tensorboard_plugin.timeline.blocks import (
    MERGED,
    BlockKind,
    Blocks,
    Int8,
    merge,
    single,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import COLUMNS, CollectiveFacts, Lane, Level, Row
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import Entries, RankDraft
from gpurun.launcher.tensorboard_plugin.timeline.index.sources import (
    NameNumbers,
    exclusive,
    ordered,
    shifted,
    split_transfers,
)
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.collective import Collective
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.analysis.collectives.match import Matched
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.model import CollectiveReport


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


class Writer:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        found = exclusive(draft.activities, transfers(draft))
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
        self.lanes.append(Lane(rank, name, _band_label(rank, name), (row,)))

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


def _band_label(rank: int, name: str) -> str:
    return f"rank {rank}" if name == "overview" else f"rank {rank} by {name}"


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
