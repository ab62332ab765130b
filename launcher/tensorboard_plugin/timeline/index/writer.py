"""Writes the columns of an index, rank by rank; no more than one rank's entries are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.blocks import MERGED, Blocks, merge, single
from gpurun.launcher.tensorboard_plugin.timeline.format import COLUMNS, Lane, Level, Row
from gpurun.launcher.tensorboard_plugin.timeline.index.activity import exclusive, ordered, shifted
from gpurun.launcher.tensorboard_plugin.timeline.index.collect import (
    part_columns,
    part_entries,
    split_waits,
    transfers,
)
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import Draft, Entries
from gpurun.launcher.tensorboard_plugin.timeline.index.sources import NameTable
from gpurun.launcher.trace.analysis.collectives.match import Matched

FEW_BLOCKS = 2000
"""A row with fewer is merged on request."""
FINEST_NS = 256
STEP = 4
"""Ratio of block lengths from one level to the next."""
WORTH = 0.6
"""A level with more than this share of the blocks of the finer one isn't kept."""


class Writer:
    """Appends to the column files in `directory`, and keeps count of what they hold."""

    def __init__(self, directory: Path, matched: Matched) -> None:
        self.matched = matched
        self.names = NameTable()
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

    def add(self, rank: int, draft: Draft, shift_ns: int) -> None:
        """Appends a rank. `shift_ns` turns its times into those of the index."""
        parts = part_entries(rank, draft, self.matched)
        split_waits(draft, parts)
        self._add_overview(rank, draft, shift_ns)
        entries = self._moved(draft, shift_ns)
        for lane in draft.lanes:
            rows = tuple(self._row(entries, first, last) for first, last in lane.rows)
            self.lanes.append(Lane(rank, lane.kind, lane.label, rows))
        self._write(**vars(entries))
        self._write(**part_columns(rank, parts, self.num_entries, shift_ns))
        self.num_entries += len(entries)
        self.num_parts += len(parts)
        self.num_events += draft.num_events
        self.num_hidden += draft.num_hidden

    def _moved(self, draft: Draft, shift_ns: int) -> Entries:
        """The rank's entries with the times, names and places of the index."""
        entries = draft.entries
        names = self.names.numbers(draft.names)
        entries.start[:] += shift_ns
        entries.end[:] += shift_ns
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

    def _add_overview(self, rank: int, draft: Draft, shift_ns: int) -> None:
        """Device activity: moments of each class, unchanged for sums and merged for the overview."""
        parts = exclusive(draft.activities, transfers(draft))
        start, end, kind = ordered({kind: shifted(each, shift_ns) for kind, each in parts.items()})
        self._write(moment_start=start, moment_end=end, moment_kind=kind)
        begin = max((last for _, last in self.moments.values()), default=0)
        self.moments[rank] = (begin, begin + len(start))
        zeros = np.zeros(len(start), dtype=np.int32)
        blocks = single(start, end, kind, zeros + np.int32(MERGED), zeros)
        levels = [self._level(0, blocks)]
        levels += [self._level(shortest_ns, coarse) for shortest_ns, coarse in coarser(blocks)]
        row = Row(self.num_entries, self.num_entries, tuple(levels))
        self.lanes.append(Lane(rank, "overview", f"rank {rank}", (row,)))

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
