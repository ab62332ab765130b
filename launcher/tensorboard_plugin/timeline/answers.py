"""Answers from an index alone, also for traces that aren't ours.

Of the timeline: its structure, the blocks of a window, sums of a selection, a search, an entry. Of each
traced step: where its time went, per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.compare.figures.ranks import (
    RankBreakdown,
    mean_breakdown,
    quiet_steps,
    rank_breakdown,
)
from gpurun.launcher.tensorboard_plugin.timeline.bands import ENTRY_LANES, active_ns, compact_answer
from gpurun.launcher.tensorboard_plugin.timeline.format import (
    KIND_NAMES,
    MERGED,
    NO_BLOCKS,
    BlockKind,
    Blocks,
    Header,
    Index,
    Row,
    join,
    merge,
    short_name,
)
from gpurun.launcher.trace.explain import whole_ranks
from gpurun.launcher.trace.intervals import Int64, union
from gpurun.launcher.trace.model import RankTrace
from gpurun.launcher.units import format_ms, format_number

MAX_LISTED_STEPS = 20_000
SHORTEST_PX = 0.5
"""Shorter blocks are indistinguishable."""
MAX_LINK_PARTS = 2000
SHORTEST_LINK_PX = 1
"""The ends of a collective shorter than this on every rank aren't linked."""
MAX_SELECTED_NAMES = 50
BATCH_ENTRIES = 500_000
BATCH_ROWS = 500
SHOWN = (BlockKind.COMPUTE, BlockKind.TRANSFER, BlockKind.WAIT, BlockKind.COPY, BlockKind.INPUT)
MAX_FOUND = 200
MAX_FOUND_NAMES = 100


def meta_answer(index: Index) -> dict[str, Any]:
    """Lanes by rank, and the steps; see README.md."""
    header = index.header
    devices = {rank.rank: rank.device for rank in header.ranks}
    lanes: dict[int, list[dict[str, Any]]] = {rank: [] for rank in sorted(header.moments)}
    for number, lane in enumerate(header.lanes):
        lanes[lane.rank].append(
            {"lane": number, "kind": lane.kind, "label": lane.label, "rows": len(lane.rows)}
        )
    return {
        "warnings": header.warnings,
        "apart": header.apart,
        "linked": header.linked,
        "base_time_ns": str(header.base_time_ns),
        "end_ns": header.end_ns,
        "num_events": header.num_events,
        "classes": KIND_NAMES,
        "ranks": [
            {
                "rank": rank,
                "label": f"rank {rank}",
                "device": devices.get(rank),
                "active_ns": active_ns(index, rank),
                "lanes": found,
            }
            for rank, found in lanes.items()
        ],
        "compact": compact_answer(index),
        "steps": header.steps[:MAX_LISTED_STEPS],
    }


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
    """The blocks of the coarsest level with enough detail for the window."""
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
    what = {"kind": facts.kind, "group": facts.group, "label": f"#{facts.seq}"}
    return {"collective": number, **what, "parts": parts}


def _part(index: Index, part: int) -> list[int]:
    column = index.columns
    entry = int(column["part_entry"][part])
    place = index.place(entry)
    times = [int(column[name][part]) for name in ("part_start", "part_split", "part_end")]
    return [int(column["part_rank"][part]), place.lane, place.row, entry, *times]


def search_answer(index: Index, text: str, after_ns: int) -> dict[str, Any]:
    """The entries whose name, or whose lane's label, contains `text`; see README.md."""
    wanted = text.casefold()
    names = [number for number, name in enumerate(index.header.names) if wanted in name.casefold()]
    is_wanted = np.zeros(len(index.header.names), dtype=bool)
    is_wanted[names] = True
    found = is_wanted[index.columns["name"]] if len(index.header.names) else np.zeros(0, dtype=bool)
    counted = _by_name(index, np.flatnonzero(found))
    for first, last in _labelled(index, wanted):
        found[first:last] = True
    # A collective has two entries; its wait represents both.
    found[index.part_entries + 1] = False
    chosen = np.flatnonzero(found)
    later = chosen[index.columns["start"][chosen] >= after_ns]
    shown = later[np.argsort(index.columns["start"][later], kind="stable")[:MAX_FOUND]]
    return {
        "total": len(chosen),
        "names": counted,
        "events": [_found(index, entry) for entry in shown.tolist()],
    }


def _labelled(index: Index, wanted: str) -> list[tuple[int, int]]:
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
    used = order[counts[order] > 0][:MAX_FOUND_NAMES]
    return [
        {"name": index.header.names[n], "count": int(counts[n]), "total_ns": int(total[n])}
        for n in used.tolist()
    ]


def _found(index: Index, entry: int) -> dict[str, Any]:
    """What an entry is, and where it stands; of a collective, with its wait and its transfer."""
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


def selection_answer(index: Index, from_ns: int, to_ns: int, lanes: Iterable[int]) -> dict[str, Any]:
    """Each rank's device time from `from_ns` to `to_ns`, and the names with most time; see README.md."""
    ranks = sorted(index.header.moments)
    return {
        "from_ns": from_ns,
        "to_ns": to_ns,
        "span_ns": to_ns - from_ns,
        "ranks": [_rank_sums(index, rank, from_ns, to_ns) for rank in ranks],
        "names": _longest_names(index, from_ns, to_ns, lanes),
    }


def _rank_sums(index: Index, rank: int, from_ns: int, to_ns: int) -> dict[str, int]:
    """The classes exclude each other, so that with idle they add up to the stretch."""
    first, last = index.header.moments[rank]
    start = np.clip(index.columns["moment_start"][first:last], from_ns, to_ns)
    end = np.clip(index.columns["moment_end"][first:last], from_ns, to_ns)
    kind = index.columns["moment_kind"][first:last]
    # Exact: a stretch is shorter than 2^53 ns, which doubles count exactly.
    sums = np.bincount(kind, end - start, minlength=len(BlockKind)).astype(np.int64).tolist()
    parts = {f"{KIND_NAMES[each]}_ns": sums[each] for each in SHOWN}
    return {"rank": rank, **parts, "idle_ns": to_ns - from_ns - sum(parts.values())}


def _longest_names(index: Index, from_ns: int, to_ns: int, lanes: Iterable[int]) -> list[dict[str, Any]]:
    """Time within the stretch by name and kind, whatever lies inside it; those with most time first."""
    num_kinds = len(BlockKind)
    size = len(index.header.names) * num_kinds
    totals, counts = np.zeros(size), np.zeros(size, dtype=np.int64)
    for sort, inside in _batches(index, from_ns, to_ns, lanes):
        totals += np.bincount(sort, inside, minlength=size)
        counts += np.bincount(sort[inside > 0], minlength=size)
    order = np.argsort(-totals, kind="stable")[:MAX_SELECTED_NAMES]
    return [
        {
            "name": (name := index.header.names[sort // num_kinds]),
            "label": short_name(name),
            "class": KIND_NAMES[sort % num_kinds],
            "count": int(counts[sort]),
            "total_ns": int(totals[sort]),
        }
        for sort in order.tolist()
        if counts[sort]
    ]


def _batches(index: Index, from_ns: int, to_ns: int, lanes: Iterable[int]) -> Iterator[tuple[Int64, Int64]]:
    """Name and kind as one number, and time within the stretch, of the lanes' entries; many at a time."""
    column = index.columns
    sorts: list[Int64] = []
    insides: list[Int64] = []
    for row in (row for lane in lanes for row in index.lane(lane).rows):
        first, last = index.entries_touching(row, from_ns, to_ns)
        inside = np.clip(column["end"][first:last], from_ns, to_ns)
        insides.append(inside - np.clip(column["start"][first:last], from_ns, to_ns))
        sorts.append(column["name"][first:last] * len(BlockKind) + column["kind"][first:last])
        if sum(map(len, sorts)) > BATCH_ENTRIES or len(sorts) >= BATCH_ROWS:
            yield np.concatenate(sorts), np.concatenate(insides)
            sorts, insides = [], []
    if sorts:
        yield np.concatenate(sorts), np.concatenate(insides)


MAX_COLLECTIVE_RANKS = 1024


def event_answer(index: Index, entry: int) -> dict[str, Any]:
    """The details of an entry for the panel below the timeline; see README.md."""
    part = index.part_at(entry)
    entry = entry if part is None else int(index.columns["part_entry"][part])
    found = _found(index, entry)
    start, end, lane = found["start_ns"], found["end_ns"], index.lane(found["lane"])
    launch = int(index.columns["launch"][entry])
    correlation = int(index.columns["correlation"][entry])
    return {
        **found,
        "lane_label": lane.label,
        "step": _step(index, lane.rank, start if launch < 0 else int(index.columns["start"][launch])),
        "duration_ns": end - start,
        "self_ns": _self_ns(index, found["lane"], found["row"], start, end),
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
    first, last = index.header.moments[rank]
    kind, starts, ends = (
        index.columns[name][first:last] for name in ("moment_kind", "moment_start", "moment_end")
    )
    computes = kind == BlockKind.COMPUTE
    return end - start - union(starts[computes], ends[computes]).clip(start, end).length_ns


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


PARTS = (
    "span",
    "compute",
    "exposed_transfer",
    "exposed_wait",
    "exposed_memcpy",
    "other_steps",
    "idle",
    "input",
)
MAX_STEPS = 200
"""Per rank; a capture has 3 to 50."""


def breakdown_answer(header: Header, ours: bool = True) -> dict[str, Any]:
    """The steps of each rank, and what is typical of them; see README.md.

    Args:
        header: of the index.
        ours: whether the traces are of a run of ours, whose comparison takes the half of its steps
            with the least interference. Of other traces all steps count, as for `gpurun trace`.
    """
    typical = quiet_steps(header.ranks)[1] if ours else {rank.rank: mean_of(rank) for rank in header.ranks}
    whole = whole_ranks(header.ranks)
    has_steps = any(rank.steps for rank in whole)
    every = [rank_breakdown(each) for rank in whole for each in rank.steps or (rank.total,)]
    return {
        "has_steps": has_steps,
        "warnings": header.warnings,
        "mean": figures(mean_breakdown(every)) if every else None,
        "sentence": _sentence(header, has_steps),
        "parallelism": parallelism_sentences(header),
        "ranks": [
            {
                "rank": rank.rank,
                "device": rank.device,
                "typical": figures(typical[rank.rank]) if rank.rank in typical else None,
                "steps": [
                    {"step": step.step, **figures(rank_breakdown(step))} for step in rank.steps[:MAX_STEPS]
                ],
            }
            for rank in header.ranks
        ],
    }


def mean_of(rank: RankTrace) -> RankBreakdown:
    """The mean of the rank's steps; its whole trace where that has none."""
    return mean_breakdown([rank_breakdown(each) for each in rank.steps or (rank.total,)])


def _sentence(header: Header, has_steps: bool) -> str:
    """The time of a step on the rank on which it takes longest, and what `gpurun trace` concludes."""
    means = {rank.rank: mean for rank in whole_ranks(header.ranks) if (mean := mean_of(rank)).span_ns}
    if not means:
        return "These traces have no time to divide."
    slowest = max(means, key=lambda rank: means[rank].span_ns)
    what = "A step" if has_steps else "The recorded work"
    where = f" on rank {slowest}, the longest of all" if len(means) > 1 else ""
    share = format_number(100 * means[slowest].compute_ns / means[slowest].span_ns, 0)
    takes = f"{what} takes {format_ms(means[slowest].span_ns / 1e6)} ms{where}"
    return f"{takes}; {share} % of it is compute. {header.conclusion}"


def parallelism_sentences(header: Header) -> list[str]:
    """The cost of each kind of parallelism, and the stages' waits; empty for a single kind without stages."""
    found = []
    if len(header.parallelism) > 1:
        kinds = ", ".join(
            f"{each.kind} {format_ms(each.mean_us(len(whole_ranks(header.ranks)))[1] / 1000)} ms"
            for each in header.parallelism
        )
        found.append(f"Communication that no compute overlaps, by kind of parallelism: {kinds}.")
    if header.pipeline:
        stages = ", ".join(
            f"stage {each.stage} {format_ms(each.bubble_us / 1000)} of {format_ms(each.span_us / 1000)} ms"
            for each in header.pipeline
        )
        found.append(f"Pipeline bubble: {stages}.")
    return found


def figures(step: RankBreakdown) -> Mapping[str, float]:
    """The parts of a step in ms."""
    return {f"{part}_ms": getattr(step, f"{part}_ns") / 1e6 for part in PARTS}
