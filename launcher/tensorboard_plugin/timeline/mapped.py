"""An index mapped into memory: pages are read on access and dropped when memory is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.blocks import Blocks, single
from gpurun.launcher.tensorboard_plugin.timeline.format import (
    COLUMNS,
    FORMAT,
    INDEX_FILE,
    LEVEL_COLUMNS,
    Header,
    Lane,
    Level,
    Row,
)
from gpurun.launcher.trace.intervals import Int64

MAX_HEADER_BYTES = 128 << 20
"""Decoded it takes up to five times as much."""


class DamagedIndex(Exception):
    """The files are damaged; the index must be rebuilt."""


@dataclass(frozen=True)
class LaneRow:
    """The row in which an entry is shown."""

    lane: int
    row: int


@dataclass(frozen=True, eq=False)
class Index:
    """The index of one variant's timeline."""

    version: str
    header: Header
    columns: dict[str, NDArray[Any]]
    places: tuple[LaneRow, ...]
    """The rows over all lanes, by their number."""
    row_ends: Int64
    """Last entry + 1 of each row over all lanes."""
    by_entry: NDArray[np.intp]
    """The parts of collectives in the order of their entries."""
    part_entries: Int64
    """The entries of `by_entry`."""
    number_order: NDArray[np.intp]
    """The parts by number of the collective, then rank."""
    by_number: Int64
    """The numbers of `number_order`."""
    longest_stays: Int64
    """The longest stays in ns by number of the collective, over its ranks."""

    def place(self, entry: int) -> LaneRow:
        return self.places[int(np.searchsorted(self.row_ends, entry, "right"))]

    def lane(self, number: int) -> Lane:
        return self.header.lanes[number]

    def name_of(self, entry: int) -> str:
        return self.header.names[int(self.columns["name"][entry])]

    def part_at(self, entry: int) -> int | None:
        """The part of a collective whose wait or transfer this entry is."""
        at = int(np.searchsorted(self.part_entries, entry, "right")) - 1
        if at < 0 or entry - int(self.part_entries[at]) > 1:
            return None
        return int(self.by_entry[at])

    def level_blocks(self, level: Level, row: int, from_ns: int, to_ns: int) -> Blocks:
        """The level's blocks that touch the window, as blocks of row `row`."""
        start, end = self.columns["level_start"], self.columns["level_end"]
        first, last = _touching(start, end, (level.first, level.last), from_ns, to_ns)
        part = {name: np.asarray(self.columns[name][first:last]) for name in LEVEL_COLUMNS}
        return Blocks(
            start=part["level_start"],
            end=part["level_end"],
            kind=part["level_kind"],
            entry=part["level_entry"],
            count=part["level_count"],
            busy=part["level_busy"],
            row=np.full(last - first, row, dtype=np.int32),
        )

    def entry_blocks(self, entries: Row, row: int, from_ns: int, to_ns: int) -> Blocks:
        """The row's entries that touch the window."""
        start, end = self.columns["start"], self.columns["end"]
        first, last = _touching(start, end, (entries.first, entries.last), from_ns, to_ns)
        numbers = np.arange(first, last, dtype=np.int32)
        rows = np.full(last - first, row, dtype=np.int32)
        kind = np.asarray(self.columns["kind"][first:last])
        return single(np.asarray(start[first:last]), np.asarray(end[first:last]), kind, numbers, rows)

    def entries_touching(self, row: Row, from_ns: int, to_ns: int) -> tuple[int, int]:
        """First and last + 1 of the row's entries that touch the window."""
        start, end = self.columns["start"], self.columns["end"]
        return _touching(start, end, (row.first, row.last), from_ns, to_ns)


def _touching(
    start: NDArray[Any], end: NDArray[Any], place: tuple[int, int], from_ns: int, to_ns: int
) -> tuple[int, int]:
    first, last = place
    begin = first + int(np.searchsorted(end[first:last], from_ns, "left"))
    stop = first + int(np.searchsorted(start[first:last], to_ns, "right"))
    return begin, max(begin, stop)


def open_index(directory: Path) -> Index:
    """The index in `directory`.

    Raises:
        DamagedIndex: it is of another format, or its files aren't as long as they should be.
    """
    try:
        if (directory / INDEX_FILE).stat().st_size > MAX_HEADER_BYTES:
            raise DamagedIndex(f"{directory.name}: {INDEX_FILE} is too large")
        header = msgspec.json.decode((directory / INDEX_FILE).read_bytes(), type=Header)
        columns = {name: _mapped(directory / name, header.length(name), name) for name in COLUMNS}
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedIndex(f"{directory.name}: {error}") from error
    if header.format != FORMAT:
        raise DamagedIndex(f"{directory.name}: format {header.format}")
    rows = [(LaneRow(n, m), row) for n, lane in enumerate(header.lanes) for m, row in enumerate(lane.rows)]
    order = np.argsort(columns["part_entry"], kind="stable")
    number_order = np.lexsort((columns["part_rank"], columns["part_collective"]))
    return Index(
        version=directory.name,
        header=header,
        columns=columns,
        places=tuple(place for place, _ in rows),
        row_ends=np.array([row.last for _, row in rows], dtype=np.int64),
        by_entry=order,
        part_entries=columns["part_entry"][order].astype(np.int64),
        number_order=number_order,
        by_number=columns["part_collective"][number_order].astype(np.int64),
        longest_stays=_longest_stays(columns, len(header.collectives)),
    )


def _longest_stays(columns: Mapping[str, NDArray[Any]], num_collectives: int) -> Int64:
    stays = np.zeros(num_collectives, dtype=np.int64)
    np.maximum.at(stays, columns["part_collective"], columns["part_end"] - columns["part_start"])
    return stays


def _mapped(path: Path, length: int, name: str) -> NDArray[Any]:
    dtype = np.dtype(COLUMNS[name])
    if path.is_symlink() or path.stat().st_size != length * dtype.itemsize:
        raise DamagedIndex(f"{path.parent.name}: {name} is not {length} entries long")
    if length == 0:
        return np.empty(0, dtype)  # an empty file can't be mapped
    return np.memmap(path, dtype, "r", shape=(length,))
