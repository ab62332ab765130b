"""Finds enclosing ranges, without a loop over them, and divides long traces into parts that none crosses.

Sorting and nesting take several times the memory of their columns, so they work on parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.columns import Spans, Timed

NONE = -1


@dataclass(frozen=True, eq=False)
class Nesting:
    """Ranges of all threads laid end to end on one line, in order of their start, outer before inner.

    The depth of a range is the number of ranges that are open when it starts; the range that encloses it is
    the last one before it whose depth is one less.
    """

    order: Int64
    """Position in the original column of each range on the line."""
    starts: Int64
    ends: Int64
    """A range without length ends 1 ns after its start: work may be launched from within it."""
    lengths: Int64
    sorted_ends: Int64
    depths: NDArray[np.int32]
    first_ns: int
    stride_ns: int
    """Length of the line that one thread takes."""

    @cached_property
    def levels(self) -> list[Int64]:
        """Positions on the line, by depth."""
        by_depth = np.argsort(self.depths, kind="stable")
        deepest = int(self.depths.max(initial=NONE))
        cuts = np.searchsorted(self.depths[by_depth], np.arange(deepest + 2))
        return [by_depth[begin:end] for begin, end in pairwise(cuts)]

    @cached_property
    def outer(self) -> Int64:
        """Position on the line of the range around each; −1 where there is none."""
        found = np.full(len(self.starts), NONE, dtype=np.int64)
        for outer, inner in pairwise(self.levels):
            place = np.searchsorted(outer, inner) - 1
            found[inner] = np.where(place >= 0, outer[place], NONE)
        return found

    def self_ns(self) -> Int64:
        """Time of each range, in the order of its column, less that of the ranges directly inside."""
        own = self.lengths.copy()
        inner = np.flatnonzero(self.outer >= 0)
        np.subtract.at(own, self.outer[inner], self.lengths[inner])
        np.maximum(own, 0, out=own)
        result = np.empty_like(own)
        result[self.order] = own
        return result

    def around(self, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which ranges have one of the marked ones inside; both in the order of the column."""
        inside, found = marked[self.order], np.zeros(len(self.order), dtype=bool)
        for members in reversed(self.levels):
            outer = self.outer[members[inside[members] | found[members]]]
            found[outer[outer >= 0]] = True
        result = np.empty_like(found)
        result[self.order] = found
        return result

    def innermost(self, threads: NDArray[np.int32], times_ns: Int64) -> Int64:
        """Position in the column of the innermost range that is open then and there; −1 where none is."""
        line = times_ns - self.first_ns
        on_line = (line >= 0) & (line < self.stride_ns)
        line = line + threads.astype(np.int64) * self.stride_ns
        opened = np.searchsorted(self.starts, line, "right")
        depth = opened - np.searchsorted(self.sorted_ends, line, "right")
        found = np.full(len(line), NONE, dtype=np.int64)
        for level, members in enumerate(self.levels):
            asks = np.flatnonzero((depth == level + 1) & on_line)
            last = np.searchsorted(members, opened[asks]) - 1
            candidate = members[np.maximum(last, 0)]
            holds = (last >= 0) & (self.ends[candidate] > line[asks])
            found[asks[holds]] = self.order[candidate[holds]]
        return found


def nest(spans: Spans) -> Nesting | None:
    """The nesting of `spans`; `None` if there are none, or they are too far apart for one line."""
    if not len(spans):
        return None
    first_ns = int(spans.start.min())
    stride_ns = int(spans.end.max()) - first_ns + 2
    if stride_ns * (int(spans.thread.max()) + 1) >= 1 << 62:
        return None
    # In place where possible: this is where a large trace needs most memory.
    starts = spans.thread.astype(np.int64)
    starts *= stride_ns
    starts += spans.start
    starts -= first_ns
    order = np.lexsort((-spans.duration, starts))
    starts = starts[order]
    lengths = spans.duration[order]
    ends = np.maximum(lengths, 1)
    ends += starts
    sorted_ends = np.sort(ends)
    depths = np.arange(len(starts), dtype=np.int32)
    depths -= np.searchsorted(sorted_ends, starts, "right").astype(np.int32)
    return Nesting(order, starts, ends, lengths, sorted_ends, depths, first_ns, stride_ns)


SIZE = 1 << 17
"""Approximate number of ranges in a stretch; more if there is no free moment to cut at."""
_EVER = np.iinfo(np.int64)


@dataclass(frozen=True)
class Stretch:
    """A stretch of time from `begin_ns` up to, but not including, `end_ns`."""

    begin_ns: int
    end_ns: int

    def holds(self, times_ns: Int64) -> NDArray[np.bool_]:
        """Which of these times are inside."""
        return (times_ns >= self.begin_ns) & (times_ns < self.end_ns)


def stretches(*columns: Timed) -> Iterator[Stretch]:
    """Stretches from the beginning to the end of time; every range is inside one of them.

    A cut is a moment in which a range of any column starts while none is open.
    """
    wanted = np.concatenate([column.start[SIZE::SIZE] for column in columns])
    cuts = _free(columns, wanted).tolist() if len(wanted) else []
    for begin_ns, end_ns in pairwise([_EVER.min, *cuts, _EVER.max]):
        yield Stretch(int(begin_ns), int(end_ns))


def _free(columns: Sequence[Timed], wanted: Int64) -> Int64:
    """The first moments from the wanted ones on in which a cut is possible."""
    covered = columns[0].covered
    for column in columns[1:]:
        if len(column):
            covered = covered.join(column.covered)
    place = np.unique(np.searchsorted(covered.starts, wanted))
    return covered.starts[place[place < len(covered.starts)]]
