"""Writes the columns of an index, rank by rank; no more than one rank's entries are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from gpurun.launcher.tensorboard_plugin.timeline.format import COLUMNS, Lane, Level, Row
from gpurun.launcher.tensorboard_plugin.timeline.index.activity import (
    exclusive,
    ordered,
    shifted,
    split_transfers,
)
from gpurun.launcher.tensorboard_plugin.timeline.index.collect import (
    PartEntry,
    part_columns,
    part_entries,
    split_waits,
    transfers,
    transfers_by_kind,
)
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import Draft, Entries
from gpurun.launcher.tensorboard_plugin.timeline.index.sources import NameNumbers
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.match import Matched
from gpurun.launcher.trace.intervals import Int64, Intervals

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

    def add(self, rank: int, draft: Draft, realigned: Realigned) -> None:
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

    def _moved(self, draft: Draft, realigned: Realigned) -> Entries:
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

    def _add_bands(self, rank: int, draft: Draft, parts: list[PartEntry], realigned: Realigned) -> None:
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
