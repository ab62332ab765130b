"""Details of one entry and of its collective."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpurun.launcher.tensorboard_plugin.timeline.blocks import KIND_NAMES, BlockKind
from gpurun.launcher.tensorboard_plugin.timeline.format import Row
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.trace.intervals import Intervals, union

MAX_COLLECTIVE_RANKS = 1024


def event_answer(index: Index, entry: int) -> dict[str, Any]:
    """The details of an entry for the panel below the timeline; see README.md."""
    part = index.part_at(entry)
    entry = entry if part is None else int(index.columns["part_entry"][part])
    start, end = _span(index, entry, part)
    place = index.place(entry)
    lane = index.lane(place.lane)
    launch = int(index.columns["launch"][entry])
    correlation = int(index.columns["correlation"][entry])
    return {
        "id": entry,
        "name": index.name_of(entry),
        "class": KIND_NAMES[int(index.columns["kind"][entry if part is None else entry + 1])],
        "rank": lane.rank,
        "lane": place.lane,
        "row": place.row,
        "lane_label": lane.label,
        "step": _step(index, lane.rank, start if launch < 0 else int(index.columns["start"][launch])),
        "start_ns": start,
        "end_ns": end,
        "duration_ns": end - start,
        "self_ns": _self_ns(index, place.lane, place.row, start, end),
        "exposed_ns": _exposed_ns(index, lane.rank, start, end) if part is not None else None,
        "launched_by": None if launch < 0 else _brief(index, launch),
        "launch_to_start_ns": None if launch < 0 else start - int(index.columns["start"][launch]),
        "launches": _launches(index, entry) if lane.kind == "thread" else {"count": 0, "first_id": None},
        "parent": _parent(index, entry if launch < 0 else launch),
        "correlation": correlation if correlation >= 0 else None,
        "collective": None if part is None else collective_answer(index, part),
    }


def entry_of(index: Index, collective: int, rank: int) -> int | None:
    """The entry that identifies a rank's part in a collective."""
    first, last = np.searchsorted(index.by_number, (collective, collective + 1)).tolist()
    for part in index.number_order[first:last].tolist():
        if int(index.columns["part_rank"][part]) == rank:
            return int(index.columns["part_entry"][part])
    return None


def collective_answer(index: Index, part: int) -> dict[str, Any]:
    """The collective over all ranks that show it."""
    number = int(index.columns["part_collective"][part])
    facts = index.header.collectives[number]
    first, last = np.searchsorted(index.by_number, (number, number + 1)).tolist()
    parts = index.number_order[first : min(last, first + MAX_COLLECTIVE_RANKS)].tolist()
    return {
        "collective": number,
        "kind": facts.kind,
        "group": facts.group,
        "seq": facts.seq,
        "bytes": facts.num_bytes,
        "algorithm_gb_per_s": facts.algorithm_gb_per_s,
        "bus_gb_per_s": facts.bus_gb_per_s,
        "last_rank": facts.last_rank,
        "next": _neighbour(index, number, 1),
        "previous": _neighbour(index, number, -1),
        "ranks": [_rank_part(index, each, facts.matched) for each in parts],
    }


def _rank_part(index: Index, part: int, matched: bool) -> dict[str, Any]:
    column = index.columns
    start, split, end = (int(column[name][part]) for name in ("part_start", "part_split", "part_end"))
    return {
        "rank": int(column["part_rank"][part]),
        "id": int(column["part_entry"][part]),
        "start_ns": start,
        "wait_ns": split - start if matched else None,
        "transfer_ns": end - split,
    }


def _neighbour(index: Index, number: int, step: int) -> int | None:
    """The next collective of the same group, in order of time."""
    group = index.header.collectives[number].group
    other = number + step
    while 0 <= other < len(index.header.collectives):
        if index.header.collectives[other].group == group:
            return other
        other += step
    return None


def _span(index: Index, entry: int, part: int | None) -> tuple[int, int]:
    last = entry if part is None else entry + 1
    return int(index.columns["start"][entry]), int(index.columns["end"][last])


def _step(index: Index, rank: int, time_ns: int) -> int | None:
    for step in index.header.steps:
        if step.rank == rank and step.start_ns <= time_ns < step.end_ns:
            return step.step
    return None


def _self_ns(index: Index, lane: int, row: int, start: int, end: int) -> int:
    """The time that nothing in the row below covers."""
    rows = index.lane(lane).rows
    if row + 1 >= len(rows):
        return end - start
    first, last = index.entries_touching(rows[row + 1], start, end)
    starts, ends = index.columns["start"][first:last], index.columns["end"][first:last]
    inside = np.clip(ends, start, end) - np.clip(starts, start, end)
    return end - start - int(inside.sum())


def _exposed_ns(index: Index, rank: int, start: int, end: int) -> int:
    """The part of a communication during which the rank doesn't compute."""
    return end - start - moments(index, rank, BlockKind.COMPUTE).clip(start, end).length_ns


def moments(index: Index, rank: int, kind: BlockKind) -> Intervals:
    """When the rank's device was in `kind` and in no kind of higher priority."""
    first, last = index.header.moments[rank]
    chosen = index.columns["moment_kind"][first:last] == kind
    column = index.columns
    return union(column["moment_start"][first:last][chosen], column["moment_end"][first:last][chosen])


def _brief(index: Index, entry: int) -> dict[str, Any]:
    column = index.columns
    times = {"start_ns": int(column["start"][entry]), "end_ns": int(column["end"][entry])}
    return {"id": entry, "name": index.name_of(entry), **times}


def _launches(index: Index, entry: int) -> dict[str, Any]:
    """The GPU work that this call launched."""
    found = np.flatnonzero(index.columns["launch"] == entry)
    return {"count": len(found), "first_id": int(found[0]) if len(found) else None}


def _parent(index: Index, entry: int) -> dict[str, Any] | None:
    """The enclosing range, one row above; for GPU work the one around its launch."""
    place = index.place(entry)
    if place.row == 0:
        return None
    above: Row = index.lane(place.lane).rows[place.row - 1]
    start = int(index.columns["start"][entry])
    at = (
        above.first
        + int(np.searchsorted(index.columns["start"][above.first : above.last], start, "right"))
        - 1
    )
    if at < above.first or int(index.columns["end"][at]) < start:
        return None
    return {"id": at, "name": index.name_of(at)}
