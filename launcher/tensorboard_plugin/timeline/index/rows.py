"""Rows of a lane: ranges in which others lie go above them, and inside a row nothing overlaps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64

MAX_ROWS = 32
"""Deeper ranges than that aren't shown; real stacks of modules and operators are 10 to 20 deep."""


def order_and_rows(start: Int64, end: Int64) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """The ranges in order of time, outer before inner, and the row of each in that order, from 0.

    A range goes below all ranges that are open when it begins. Where ranges nest, that is their depth.
    """
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    rows = np.arange(len(start)) - np.searchsorted(np.sort(np.maximum(end, start + 1)), start, "right")
    rows = rows.astype(np.int32)
    if _overlaps(start, end, rows):
        rows = _by_stack(start, end)
    return order, rows


def _overlaps(start: Int64, end: Int64, rows: NDArray[np.int32]) -> bool:
    """Whether two ranges in a row overlap: they don't nest then."""
    by_row = np.argsort(rows, kind="stable")
    start, end, rows = start[by_row], end[by_row], rows[by_row]
    same = rows[1:] == rows[:-1]
    return bool((same & (start[1:] < end[:-1])).any())


def _by_stack(start: Int64, end: Int64) -> NDArray[np.int32]:
    """A range leaves the stack when one begins after its end, and nothing lies on it any more."""
    stack: list[int] = []
    rows = np.empty(len(start), dtype=np.int32)
    for i, (begin_ns, end_ns) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while stack and stack[-1] <= begin_ns:
            stack.pop()
        rows[i] = len(stack)
        stack.append(max(end_ns, begin_ns + 1))
    return rows
