"""The files of an index: raw columns for memory mapping, and `index.json`, which describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from gpurun.launcher.trace.model import ParallelKind, PipelineStage, RankTrace, StragglerReport

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
