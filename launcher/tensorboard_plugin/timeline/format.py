"""The files of an index: raw columns for memory mapping, and `index.json`, which describes them.

Mapped into memory, pages are read on access and dropped when memory is short. Rows are read as blocks; those
too short to be seen are merged. Times are integer ns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.model import ParallelKind, PipelineStage, RankTrace, StragglerReport

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


FORMAT = 14
"""Increase it with every change here or in the meaning of entries; older indexes are then rebuilt."""
INDEX_FILE = "index.json"

ENTRY_COLUMNS: Mapping[str, DTypeLike] = {
    "start": np.int64,
    "end": np.int64,
    "name": np.int32,
    "kind": np.int8,
    "launch": np.int32,
    "correlation": np.int64,
}
LEVEL_COLUMNS: Mapping[str, DTypeLike] = {
    "level_start": np.int64,
    "level_end": np.int64,
    "level_kind": np.int8,
    "level_entry": np.int32,
    "level_count": np.int32,
    "level_busy": np.int64,
}
PART_COLUMNS: Mapping[str, DTypeLike] = {
    "part_collective": np.int32,
    "part_rank": np.int32,
    "part_entry": np.int32,
    "part_start": np.int64,
    "part_split": np.int64,
    "part_end": np.int64,
}
MOMENT_COLUMNS: Mapping[str, DTypeLike] = {
    "moment_start": np.int64,
    "moment_end": np.int64,
    "moment_kind": np.int8,
}
COLUMNS = {**ENTRY_COLUMNS, **LEVEL_COLUMNS, **PART_COLUMNS, **MOMENT_COLUMNS}


@dataclass(frozen=True)
class Level:
    """A row's blocks, merged until none shorter than `shortest_ns` has a neighbour of its kind."""

    shortest_ns: int
    first: int
    """Position in the level columns."""
    last: int
    """Exclusive, as everywhere here."""


@dataclass(frozen=True)
class Row:
    """A row's entries and its levels, the finest first."""

    first: int
    last: int
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Lane:
    """A lane of one rank."""

    rank: int
    kind: str
    """`thread` or `stream`; `overview`, `operation` or `parallelism`, which have no entries, only levels."""
    label: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class StepSpan:
    """A step's window on one rank."""

    rank: int
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class CollectiveFacts:
    """One collective, without the ranks' parts."""

    kind: str
    group: str
    seq: int
    parallelism: str
    """The kind of parallelism, as in `ParallelKind`."""
    num_bytes: int | None
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    last_rank: int | None
    matched: bool


@dataclass(frozen=True)
class UnreadableFile:
    """A file that couldn't be read."""

    file: str
    """The file's name."""
    byte: int | None
    message: str


@dataclass(frozen=True)
class Header:
    """`index.json`. Times are ns since `base_time_ns`."""

    format: int
    base_time_ns: int
    """Unix time of the first entry, on the clock of the lowest rank."""
    end_ns: int
    num_events: int
    num_entries: int
    num_level_blocks: int
    num_parts: int
    moments: Mapping[int, tuple[int, int]]
    """Range in the moment columns by rank."""
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    steps: tuple[StepSpan, ...]
    collectives: tuple[CollectiveFacts, ...]
    ranks: tuple[RankTrace, ...]
    straggler: StragglerReport | None
    """The rank that the others waited for most, but between stages."""
    warnings: tuple[str, ...]
    problems: tuple[UnreadableFile, ...]
    conclusion: str = ""
    """The sentences of `gpurun trace` on where the time goes."""
    apart: bool = False
    """Whether the ranks' traces have no time in common; then each rank's times count from its own start."""
    linked: bool = True
    """Whether collectives or messages link the clocks of all ranks; else those of some are as recorded."""
    parallelism: tuple[ParallelKind, ...] = ()
    pipeline: tuple[PipelineStage, ...] = ()

    def length(self, column: str) -> int:
        """Entries of a column."""
        if column in LEVEL_COLUMNS:
            return self.num_level_blocks
        if column in PART_COLUMNS:
            return self.num_parts
        if column in MOMENT_COLUMNS:
            return max((last for _, last in self.moments.values()), default=0)
        return self.num_entries


Columns = TypeVar("Columns", bound="DataclassInstance")
Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]


class BlockKind(IntEnum):
    """The kind of a block; the page uses its lower-case name."""

    COMPUTE = 0
    TRANSFER = 1
    WAIT = 2
    COPY = 3
    INPUT = 4
    IDLE = 5
    CPU = 6
    CPU_WAIT = 7
    # What a transfer is, in bands: by operation, and by kind of parallelism.
    ALL_REDUCE = 8
    ALL_GATHER = 9
    REDUCE_SCATTER = 10
    ALL_TO_ALL = 11
    SEND_RECV = 12
    OTHER_COMM = 13
    DATA = 14
    TENSOR = 15
    PIPELINE = 16
    EXPERT = 17
    CONTEXT = 18


KIND_NAMES = tuple(kind.name.lower() for kind in BlockKind)
MERGED = -1
"""The entry of a block that represents several."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one or more rows, by row, then start; inside a row nothing overlaps."""

    start: Int64
    end: Int64
    kind: Int8
    entry: Int32
    """Position in the index; `MERGED` for a block that represents several."""
    count: Int32
    busy: Int64
    """How much of the block is filled."""
    row: Int32

    def __len__(self) -> int:
        return len(self.start)

    def pick(self, chosen: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Blocks:
        return Blocks(*(getattr(self, field.name)[chosen] for field in fields(Blocks)))


NO_BLOCKS = Blocks(*(np.empty(0, dtype) for dtype in ("i8", "i8", "i1", "i4", "i4", "i8", "i4")))


def single(start: Int64, end: Int64, kind: Int8, entry: Int32, row: Int32) -> Blocks:
    """One block per entry; a collective's wait is left out if it has no length."""
    some = (end > start) | (kind != BlockKind.WAIT)
    if not some.all():
        start, end, kind, entry, row = start[some], end[some], kind[some], entry[some], row[some]
    return Blocks(start, end, kind, entry, np.ones(len(start), dtype=np.int32), end - start, row)


def join(parts: Sequence[Columns]) -> Columns:
    """The columns of several parts as one; at least one part."""
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(kind)))


def merge(blocks: Blocks, shortest_ns: int) -> Blocks:
    """The blocks, with those shorter than `shortest_ns` merged with others of their kind.

    Time is divided into cells of that length, counted from 0, so that panning moves no border. The short
    blocks that begin in a cell become one, of the kind with most of their time; then neighbours of one kind
    with less than a cell between them become one. Longer blocks are unchanged.
    """
    short = np.flatnonzero(blocks.end - blocks.start < shortest_ns)
    if len(short) < 2:
        return blocks
    celled, positions = _by_cell(blocks.pick(short), shortest_ns)
    firsts = short[positions]
    keep = np.ones(len(blocks), dtype=bool)
    keep[short] = False
    kept = np.flatnonzero(keep)
    order = np.argsort(np.concatenate((firsts, kept)), kind="stable")
    both = join((celled, blocks.pick(kept))).pick(order)
    return _join_runs(both, order < len(firsts), shortest_ns)


def _by_cell(blocks: Blocks, cell_ns: int) -> tuple[Blocks, NDArray[np.intp]]:
    cell = blocks.start // cell_ns
    new = np.ones(len(blocks), dtype=bool)
    new[1:] = (cell[1:] != cell[:-1]) | (blocks.row[1:] != blocks.row[:-1])
    return _grouped(blocks, new)


def _join_runs(blocks: Blocks, is_short: NDArray[np.bool_], gap_ns: int) -> Blocks:
    """Joins neighbours of one kind in a row that both come from short blocks."""
    new = np.ones(len(blocks), dtype=bool)
    new[1:] = ~(
        is_short[1:]
        & is_short[:-1]
        & (blocks.kind[1:] == blocks.kind[:-1])
        & (blocks.row[1:] == blocks.row[:-1])
        & (blocks.start[1:] - blocks.end[:-1] < gap_ns)
    )
    return blocks if new.all() else _grouped(blocks, new)[0]


def _grouped(blocks: Blocks, new: NDArray[np.bool_]) -> tuple[Blocks, NDArray[np.intp]]:
    """One block for each run that begins where `new` is true, and the position of the first of each run."""
    firsts = np.flatnonzero(new)
    lasts = np.append(firsts[1:], len(blocks)) - 1
    alone = firsts == lasts
    grouped = Blocks(
        start=blocks.start[firsts],
        end=blocks.end[lasts],
        kind=_main_kind(blocks, new, len(firsts)),
        entry=np.where(alone, blocks.entry[firsts], MERGED).astype(np.int32),
        count=np.add.reduceat(blocks.count, firsts, dtype=np.int32),
        busy=np.add.reduceat(blocks.busy, firsts),
        row=blocks.row[firsts],
    )
    return grouped, firsts


def _main_kind(blocks: Blocks, new: NDArray[np.bool_], num_groups: int) -> Int8:
    """The kind with most of each group's time; of instants, the most frequent one."""
    if num_groups == len(blocks):
        return blocks.kind
    num_kinds = len(BlockKind)
    group = np.cumsum(new) - 1
    weights = blocks.busy + np.minimum(blocks.count, 1) * 1e-3
    sums = np.bincount(group * num_kinds + blocks.kind, weights, minlength=num_groups * num_kinds)
    return np.asarray(sums.reshape(num_groups, num_kinds).argmax(axis=1), dtype=np.int8)


def short_name(name: str) -> str:
    """A name without template arguments and parameters: `at::native::add` as `native::add`."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = bare.partition("<")[0].partition("(")[0].strip() or name
    return "::".join(bare.split("::")[-2:])


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
        parts = (np.asarray(self.columns[name][first:last]) for name in LEVEL_COLUMNS)
        return Blocks(*(*parts, np.full(last - first, row, dtype=np.int32)))

    def entry_blocks(self, entries: Row, row: int, from_ns: int, to_ns: int) -> Blocks:
        """The row's entries that touch the window."""
        start, end = self.columns["start"], self.columns["end"]
        first, last = self.entries_touching(entries, from_ns, to_ns)
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
