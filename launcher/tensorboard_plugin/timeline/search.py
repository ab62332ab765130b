"""Entries by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.tensorboard_plugin.timeline.bands import ENTRY_LANES
from gpurun.launcher.tensorboard_plugin.timeline.blocks import KIND_NAMES
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.tensorboard_plugin.timeline.window import block_ids

MAX_EVENTS = 200
MAX_NAMES = 100


def search_answer(index: Index, text: str, after_ns: int) -> dict[str, Any]:
    """The entries whose name, or whose lane's label, contains `text`; see README.md."""
    wanted = text.casefold()
    names = [number for number, name in enumerate(index.header.names) if wanted in name.casefold()]
    is_wanted = np.zeros(len(index.header.names), dtype=bool)
    is_wanted[names] = True
    found = is_wanted[index.columns["name"]] if len(index.header.names) else np.zeros(0, dtype=bool)
    counted = _by_name(index, np.flatnonzero(found))
    for first, last in _lanes(index, wanted):
        found[first:last] = True
    # A collective has two entries; its wait represents both.
    found[index.part_entries + 1] = False
    chosen = np.flatnonzero(found)
    later = chosen[index.columns["start"][chosen] >= after_ns]
    shown = later[np.argsort(index.columns["start"][later], kind="stable")[:MAX_EVENTS]]
    return {
        "total": len(chosen),
        "names": counted,
        "events": [_event(index, entry) for entry in shown.tolist()],
    }


def _lanes(index: Index, wanted: str) -> list[tuple[int, int]]:
    """The entries of lanes whose label contains the text."""
    return [
        (lane.rows[0].first, lane.rows[-1].last)
        for lane in index.header.lanes
        if wanted in lane.label.casefold() and lane.kind in ENTRY_LANES
    ]


def _by_name(index: Index, chosen: NDArray[np.intp]) -> list[dict[str, Any]]:
    """Count and time of the names found, sorted by time."""
    size = len(index.header.names)
    name = index.columns["name"][chosen]
    duration = index.columns["end"][chosen] - index.columns["start"][chosen]
    counts = np.bincount(name[block_ids(index, chosen.astype(np.int32)) == chosen], minlength=size)
    total = np.bincount(name, duration, minlength=size)
    order = np.argsort(-total, kind="stable")
    used = order[counts[order] > 0][:MAX_NAMES]
    return [
        {"name": index.header.names[n], "count": int(counts[n]), "total_ns": int(total[n])}
        for n in used.tolist()
    ]


def _event(index: Index, entry: int) -> dict[str, Any]:
    column = index.columns
    place = index.place(entry)
    last = entry if index.part_at(entry) is None else entry + 1
    return {
        "id": entry,
        "name": index.name_of(entry),
        "class": KIND_NAMES[int(column["kind"][last])],
        "rank": index.lane(place.lane).rank,
        "lane": place.lane,
        "row": place.row,
        "start_ns": int(column["start"][entry]),
        "end_ns": int(column["end"][last]),
    }
