"""Divides long traces into stretches that no range crosses, so that their results add up.

Sorting and nesting take several times the memory of their columns, so they work on parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.columns import Timed

SIZE = 1 << 17
"""Approximate number of ranges in a stretch; more if there is no free moment to cut at."""
_EVER = np.iinfo(np.int64)


@dataclass(frozen=True)
class Stretch:
    """From `begin_ns` up to, but not including, `end_ns`."""

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
