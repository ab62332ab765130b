"""Sets of points in time, as sorted disjoint half-open intervals of integer nanoseconds.

Arithmetic is exact: the lengths of a set's parts always add up to the length of the set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Intervals:
    """[starts[i], ends[i]), sorted, disjoint, none empty."""

    starts: Int64
    ends: Int64

    @property
    def length_ns(self) -> int:
        return int((self.ends - self.starts).sum())

    def intersect(self, other: Intervals) -> Intervals:
        """The points that lie in both sets."""
        if not len(self.starts) or not len(other.starts):
            return EMPTY
        first = np.searchsorted(other.ends, self.starts, "right")
        counts = np.maximum(np.searchsorted(other.starts, self.ends, "left") - first, 0)
        mine = np.repeat(np.arange(len(self.starts)), counts)
        skipped = np.repeat(np.cumsum(counts) - counts, counts)
        theirs = first[mine] + np.arange(len(mine)) - skipped
        return Intervals(
            np.maximum(self.starts[mine], other.starts[theirs]),
            np.minimum(self.ends[mine], other.ends[theirs]),
        )

    def subtract(self, other: Intervals) -> Intervals:
        """The points of this set that aren't in the other."""
        if not len(self.starts) or not len(other.starts):
            return self
        return self.intersect(other.gaps(int(self.starts[0]), int(self.ends[-1])))

    def gaps(self, start_ns: int, end_ns: int) -> Intervals:
        """The points between `start_ns` and `end_ns` that aren't in this set."""
        inside = self.clip(start_ns, end_ns)
        starts = np.concatenate((np.array([start_ns], dtype=np.int64), inside.ends))
        ends = np.concatenate((inside.starts, np.array([end_ns], dtype=np.int64)))
        return _without_empty(starts, ends)

    def longer_than(self, least_ns: int) -> Intervals:
        """The intervals of this set that are longer."""
        some = self.ends - self.starts > least_ns
        return Intervals(self.starts[some], self.ends[some])

    def clip(self, start_ns: int, end_ns: int) -> Intervals:
        """The points of this set from `start_ns` to `end_ns`."""
        first = int(np.searchsorted(self.ends, start_ns, "right"))
        last = max(int(np.searchsorted(self.starts, end_ns, "left")), first)
        starts = np.maximum(self.starts[first:last], start_ns)
        return _without_empty(starts, np.minimum(self.ends[first:last], end_ns))

    def inside_ns(self, starts: Int64, ends: Int64) -> Int64:
        """How much of each stretch lies in this set; nothing of one that ends before it starts."""
        return np.asarray(np.maximum(self._until(ends) - self._until(starts), 0), np.int64)

    def _until(self, times: Int64) -> Int64:
        """How much of the set lies before each of these times."""
        place = np.searchsorted(self.starts, times, "right")
        sums = np.append(0, np.cumsum(self.ends - self.starts))
        last_end = np.append(self.ends, 0)[place - 1]
        return np.asarray(sums[place] - np.where(place > 0, np.maximum(last_end - times, 0), 0), np.int64)

    def join(self, other: Intervals) -> Intervals:
        """The points that lie in either set."""
        starts = np.concatenate((self.starts, other.starts))
        return union(starts, np.concatenate((self.ends, other.ends)))


def clipped(sets: Mapping[str, Intervals], start_ns: int, end_ns: int) -> dict[str, Intervals]:
    """The points of each set from `start_ns` to `end_ns`."""
    return {name: each.clip(start_ns, end_ns) for name, each in sets.items()}


def lengths_ns(sets: Mapping[str, Intervals]) -> dict[str, int]:
    """The length of each set."""
    return {name: each.length_ns for name, each in sets.items()}


def divided(whole: Intervals, parts: Mapping[str, Intervals], rest: str) -> dict[str, Intervals]:
    """The points of a set that lie in each part, which don't overlap in it, and the rest of them."""
    found = {name: whole.intersect(part) for name, part in parts.items()}
    return {**found, rest: reduce(Intervals.subtract, found.values(), whole)}


def union(starts: Int64, ends: Int64) -> Intervals:
    """The points covered by any of the given intervals, which may overlap and come in any order.

    The i-th start, counted from 0, opens a gap before it if i intervals have ended by then. So starts and
    ends can be sorted separately, which takes little memory.
    """
    some = ends > starts
    starts, ends = starts[some], ends[some]
    if not len(starts):
        return EMPTY
    starts.sort()
    ends.sort()
    opens = starts[1:] > ends[:-1]
    edge = np.ones(1, dtype=bool)
    return Intervals(starts[np.concatenate((edge, opens))], ends[np.concatenate((opens, edge))])


def _without_empty(starts: Int64, ends: Int64) -> Intervals:
    some = ends > starts
    return Intervals(starts[some], ends[some])


EMPTY = Intervals(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
