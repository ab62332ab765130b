"""The compact timeline: a band for each rank, its colours, and the orders in which ranks can be shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpurun.launcher.tensorboard_plugin.timeline.format import KIND_NAMES, BlockKind, Index
from gpurun.launcher.trace.model import RankTrace

ENTRY_LANES = frozenset({"thread", "stream"})
"""The lanes whose blocks are entries; those of the others are what the rank's device did."""
OPERATIONS = {
    "all_reduce": BlockKind.ALL_REDUCE,
    "all_gather": BlockKind.ALL_GATHER,
    "reduce_scatter": BlockKind.REDUCE_SCATTER,
    "all_to_all": BlockKind.ALL_TO_ALL,
    **dict.fromkeys(("send", "recv", "send_recv"), BlockKind.SEND_RECV),
}
PARALLELISM = {
    "data": BlockKind.DATA,
    "tensor": BlockKind.TENSOR,
    "pipeline": BlockKind.PIPELINE,
    "expert": BlockKind.EXPERT,
    "context": BlockKind.CONTEXT,
}
LABELS = {
    BlockKind.ALL_REDUCE: "all-reduce",
    BlockKind.ALL_GATHER: "all-gather",
    BlockKind.REDUCE_SCATTER: "reduce-scatter",
    BlockKind.ALL_TO_ALL: "all-to-all",
    BlockKind.SEND_RECV: "send/recv",
    BlockKind.OTHER_COMM: "other communication",
}
TITLES = {"operation": "colours by operation", "parallelism": "colours by parallelism"}
LEGEND = (
    BlockKind.COMPUTE,
    *(kind for kind in BlockKind if kind >= BlockKind.ALL_REDUCE and kind != BlockKind.OTHER_COMM),
    BlockKind.OTHER_COMM,
    BlockKind.WAIT,
    BlockKind.COPY,
    BlockKind.INPUT,
)


def band_kinds(operations: Sequence[str], parallelism: Sequence[str]) -> dict[str, list[BlockKind]]:
    """The kind of each collective's transfer, by lane; kinds of parallelism only where there are several.

    Args:
        operations: of each collective, as in `Collective.kind`.
        parallelism: of each, as in `ParallelKind`.
    """
    other = BlockKind.OTHER_COMM
    found = {"operation": [OPERATIONS.get(each, other) for each in operations]}
    if len(set(parallelism)) > 1:
        found["parallelism"] = [PARALLELISM.get(each, other) for each in parallelism]
    return found


def active_ns(index: Index, rank: int) -> tuple[int, int]:
    """Start and end of the activity of the rank's device; outside of it nothing is known."""
    first, last = index.header.moments[rank]
    if first == last:
        return 0, 0
    ends = index.columns["moment_end"][first:last]
    return int(index.columns["moment_start"][first]), int(ends.max())


def compact_answer(index: Index) -> dict[str, Any]:
    """Legends by lane, and orders of the ranks; see README.md."""
    return {
        "colours": [
            {"key": name, "title": title, "legend": legend}
            for name, title in TITLES.items()
            if (legend := _legend(index, name))
        ],
        "orders": [_by_rank(index), *_by_wait(index), *_by_stage(index), *_by_group(index)],
    }


def _legend(index: Index, lane_kind: str) -> list[dict[str, str]]:
    """The classes that the lanes of this kind show, and idle."""
    seen: set[int] = set()
    for lane in index.header.lanes:
        if lane.kind == lane_kind:
            level = lane.rows[0].levels[0]
            seen.update(np.unique(index.columns["level_kind"][level.first : level.last]).tolist())
    kinds = [kind for kind in LEGEND if kind in seen]
    return [
        {"class": KIND_NAMES[kind], "label": LABELS.get(kind, KIND_NAMES[kind])}
        for kind in (*kinds, BlockKind.IDLE)
        if kinds
    ]


def _by_rank(index: Index) -> dict[str, Any]:
    ranks = sorted(index.header.moments)
    return _order("rank", "by rank", ranks, [""] * len(ranks))


def _by_wait(index: Index) -> list[dict[str, Any]]:
    """The ranks that wait most for others, in their mean step, come first."""
    waits = {rank.rank: _exposed_wait_ms(rank) for rank in index.header.ranks}
    if not any(waits.values()):
        return []
    ranks = sorted(waits, key=lambda rank: (-waits[rank], rank))
    notes = [f"{waits[rank]:.2f} ms" for rank in ranks]
    has_steps = any(rank.steps for rank in index.header.ranks)
    note_title = "exposed wait per step" if has_steps else "exposed wait"
    return [_order("wait", "by wait", ranks, notes, note_title)]


def _exposed_wait_ms(rank: RankTrace) -> float:
    scopes = rank.steps or (rank.total,)
    return sum(scope.exposed_wait_us for scope in scopes) / len(scopes) / 1000


def _by_stage(index: Index) -> list[dict[str, Any]]:
    stages = {
        rank: (stage.stage, f"stage {stage.stage}") for stage in index.header.pipeline for rank in stage.ranks
    }
    return _grouped(index, "stage", "by pipeline stage", stages)


def _by_group(index: Index) -> list[dict[str, Any]]:
    """An order for each kind of parallelism whose groups divide the ranks."""
    found = []
    for kind, groups in sorted(_members(index).items()):
        places: dict[int, tuple[int, str]] = {}
        largest_last = sorted(groups.items(), key=lambda each: (len(each[1]), -min(each[1])))
        for name, ranks in largest_last:
            if 1 < len(ranks) < len(index.header.moments):
                places |= dict.fromkeys(ranks, (min(ranks), name))
        title = "by group" if kind == "other" else f"by {kind} group"
        found += _grouped(index, f"group-{kind}", title, places)
    return found


def _members(index: Index) -> dict[str, dict[str, set[int]]]:
    """The ranks of each group whose traces show it, by kind of parallelism."""
    numbers: dict[tuple[str, str], int] = {}
    of_collective = [
        numbers.setdefault((each.parallelism, each.group), len(numbers)) for each in index.header.collectives
    ]
    groups = list(numbers)
    by_part = np.array(of_collective, dtype=np.int64)[index.columns["part_collective"]]
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for number, rank in np.unique(np.stack((by_part, index.columns["part_rank"])), axis=1).T.tolist():
        kind, group = groups[number]
        found[kind][group].add(rank)
    return found


def _grouped(
    index: Index, key: str, title: str, places: Mapping[int, tuple[int, str]]
) -> list[dict[str, Any]]:
    """The ranks of a group next to each other; nothing if there are no two groups.

    Args:
        places: of each rank in a group, what groups are sorted by, and the group's name.
    """
    if len(set(places.values())) < 2:
        return []
    ranks = sorted(
        index.header.moments, key=lambda rank: (rank not in places, places.get(rank, (0, "")), rank)
    )
    names = [places[rank][1] if rank in places else "no group" for rank in ranks]
    firsts = [position == 0 or names[position - 1] != name for position, name in enumerate(names)]
    return [_order(key, title, ranks, names, firsts=firsts)]


def _order(
    key: str,
    title: str,
    ranks: Sequence[int],
    notes: Sequence[str],
    note_title: str = "",
    firsts: Sequence[bool] = (),
) -> dict[str, Any]:
    """Ranks from top to bottom with the note of each, and whether a group begins with it."""
    return {
        "key": key,
        "title": title,
        "ranks": ranks,
        "note_title": note_title,
        "notes": notes,
        "begins_group": firsts or [False] * len(ranks),
    }
