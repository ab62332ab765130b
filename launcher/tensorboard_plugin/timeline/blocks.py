"""Blocks in a row, and the merging of blocks too short to be seen. Times are integer ns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
    celled = _by_cell(blocks.pick(short), shortest_ns)
    firsts = short[celled.firsts]
    keep = np.ones(len(blocks), dtype=bool)
    keep[short] = False
    kept = np.flatnonzero(keep)
    order = np.argsort(np.concatenate((firsts, kept)), kind="stable")
    both = join((celled.blocks, blocks.pick(kept))).pick(order)
    return _join_runs(both, order < len(firsts), shortest_ns)


@dataclass(frozen=True, eq=False)
class _Celled:
    blocks: Blocks
    firsts: NDArray[np.intp]
    """Position of the first block that went into each."""


def _by_cell(blocks: Blocks, cell_ns: int) -> _Celled:
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
    return blocks if new.all() else _grouped(blocks, new).blocks


def _grouped(blocks: Blocks, new: NDArray[np.bool_]) -> _Celled:
    """One block for each run that begins where `new` is true."""
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
    return _Celled(grouped, firsts)


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
