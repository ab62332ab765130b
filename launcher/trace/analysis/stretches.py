"""Long traces in stretches that no range crosses: what is worked out for each adds up to that of the whole.

Sorting and nesting take several times the memory of the columns that they work on; so they work on parts.
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
"""About as many ranges of a column lie in a stretch; more where they leave no moment free to cut at."""
_EVER = np.iinfo(np.int64)


@dataclass(frozen=True)
class Stretch:
    """From `begin_ns` up to, but not including, `end_ns`."""

    begin_ns: int
    end_ns: int

    def holds(self, times_ns: Int64) -> NDArray[np.bool_]:
        """Which of these moments lie in it."""
        return (times_ns >= self.begin_ns) & (times_ns < self.end_ns)


def stretches(*columns: Timed) -> Iterator[Stretch]:
    """Stretches from the beginning to the end of time; every range lies in the one in which it starts.

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
