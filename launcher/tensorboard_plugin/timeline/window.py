"""A window of the timeline: blocks of the requested lanes, and collectives that link ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.blocks import (
    MERGED,
    NO_BLOCKS,
    Blocks,
    join,
    merge,
    short_name,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import Row
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.trace.intervals import Int64

SHORTEST_PX = 0.5
"""Shorter blocks are indistinguishable."""
MAX_LINK_PARTS = 2000
SHORTEST_LINK_PX = 1
"""The ends of a collective shorter than this on every rank aren't linked."""


@dataclass(frozen=True)
class Window:
    """A stretch of time on a screen."""

    from_ns: int
    to_ns: int
    width_px: int
    lanes: tuple[int, ...]

    @property
    def shortest_ns(self) -> int:
        return max(1, int(SHORTEST_PX * (self.to_ns - self.from_ns) / self.width_px))


def window_answer(index: Index, window: Window) -> dict[str, Any]:
    """The blocks of each lane as columns, and the links; see README.md."""
    blocks = window_blocks(index, window)
    names, numbers = _names(index, blocks)
    ids = block_ids(index, blocks.entry)
    lanes, first_row = [], 0
    for lane in window.lanes:
        last_row = first_row + len(index.lane(lane).rows)
        begin, end = np.searchsorted(blocks.row, (first_row, last_row)).tolist()
        place = slice(begin, end)
        shown = blocks.pick(place)
        lanes.append(
            {
                "lane": lane,
                "row": (shown.row - first_row).tolist(),
                "start_ns": shown.start.tolist(),
                "end_ns": shown.end.tolist(),
                "class": shown.kind.tolist(),
                "name": numbers[place].tolist(),
                "id": ids[place].tolist(),
                "count": shown.count.tolist(),
                "busy_ns": shown.busy.tolist(),
            }
        )
        first_row = last_row
    shape = {"from_ns": window.from_ns, "to_ns": window.to_ns, "width_px": window.width_px}
    labels = [short_name(name) for name in names]
    return {**shape, "names": names, "labels": labels, "lanes": lanes, **_links(index, window)}


def window_blocks(index: Index, window: Window) -> Blocks:
    """The blocks of all requested lanes; `row` counts through all their rows."""
    rows = [row for lane in window.lanes for row in index.lane(lane).rows]
    parts = [_row_blocks(index, row, number, window) for number, row in enumerate(rows)]
    return merge(join(parts), window.shortest_ns) if parts else NO_BLOCKS


def _row_blocks(index: Index, row: Row, number: int, window: Window) -> Blocks:
    """From the coarsest level with enough detail for the window."""
    fine = [level for level in row.levels if level.shortest_ns <= window.shortest_ns]
    if fine:
        return index.level_blocks(fine[-1], number, window.from_ns, window.to_ns)
    return index.entry_blocks(row, number, window.from_ns, window.to_ns)


def _names(index: Index, blocks: Blocks) -> tuple[list[str], Int64]:
    """The names that the window shows, and the number of each block's name among them."""
    alone = blocks.entry >= 0
    found = np.full(len(blocks), MERGED, dtype=np.int64)
    found[alone] = index.columns["name"][blocks.entry[alone]]
    used, numbers = np.unique(found, return_inverse=True)
    skipped = int(len(used) > 0 and used[0] == MERGED)
    return [index.header.names[name] for name in used[skipped:].tolist()], numbers - skipped


def block_ids(index: Index, entries: NDArray[np.int32]) -> NDArray[np.int32]:
    """Ids of blocks: of a collective's two entries the first, its wait."""
    waits = index.part_entries
    if not len(waits):
        return entries
    at = np.maximum(np.searchsorted(waits, entries, "right") - 1, 0)
    return np.asarray(entries - (waits[at] + 1 == entries), dtype=np.int32)


def _links(index: Index, window: Window) -> dict[str, Any]:
    """The collectives in the window, those with the longest stays if there are too many."""
    column = index.columns
    inside = np.flatnonzero((column["part_start"] < window.to_ns) & (column["part_end"] > window.from_ns))
    numbers = np.unique(column["part_collective"][inside])
    first, last = (np.searchsorted(index.by_number, numbers, side) for side in ("left", "right"))
    shortest_ns = SHORTEST_LINK_PX * (window.to_ns - window.from_ns) // window.width_px
    kept = _longest(index, numbers, last - first, shortest_ns)
    links = [_link(index, int(numbers[i]), int(first[i]), int(last[i])) for i in kept.tolist()]
    return {"links": links, "links_left_out": len(numbers) - len(kept)}


def _longest(index: Index, numbers: Int64, num_parts: Int64, shortest_ns: int) -> NDArray[np.intp]:
    """Positions of the collectives to be shown, in their order."""
    stay = index.longest_stays[numbers]
    seen = np.flatnonzero(stay >= shortest_ns)
    order = seen[np.argsort(-stay[seen], kind="stable")]
    fit = np.cumsum(num_parts[order]) <= MAX_LINK_PARTS
    return np.sort(order[fit])


def _link(index: Index, number: int, first: int, last: int) -> dict[str, Any]:
    facts = index.header.collectives[number]
    parts = [_part(index, part) for part in index.number_order[first:last].tolist()]
    return {"collective": number, "kind": facts.kind, "label": f"#{facts.seq}", "parts": parts}


def _part(index: Index, part: int) -> list[int]:
    column = index.columns
    entry = int(column["part_entry"][part])
    place = index.place(entry)
    times = [int(column[name][part]) for name in ("part_start", "part_split", "part_end")]
    return [int(column["part_rank"][part]), place.lane, place.row, entry, *times]
