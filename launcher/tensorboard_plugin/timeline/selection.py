"""Sums over a stretch of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gpurun.launcher.tensorboard_plugin.timeline.blocks import KIND_NAMES, BlockKind, short_name
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.trace.intervals import Int64

MAX_NAMES = 50
BATCH_ENTRIES = 500_000
BATCH_ROWS = 500
SHOWN = (BlockKind.COMPUTE, BlockKind.TRANSFER, BlockKind.WAIT, BlockKind.COPY, BlockKind.INPUT)


def selection_answer(index: Index, from_ns: int, to_ns: int, lanes: Iterable[int]) -> dict[str, Any]:
    """What each rank's device did from `from_ns` to `to_ns`, and the names with most time; see README.md."""
    ranks = sorted(index.header.moments)
    return {
        "from_ns": from_ns,
        "to_ns": to_ns,
        "span_ns": to_ns - from_ns,
        "ranks": [_rank(index, rank, from_ns, to_ns) for rank in ranks],
        "names": _names(index, from_ns, to_ns, lanes),
    }


def _rank(index: Index, rank: int, from_ns: int, to_ns: int) -> dict[str, int]:
    """The classes exclude each other, so that with idle they add up to the stretch."""
    first, last = index.header.moments[rank]
    start = np.clip(index.columns["moment_start"][first:last], from_ns, to_ns)
    end = np.clip(index.columns["moment_end"][first:last], from_ns, to_ns)
    kind = index.columns["moment_kind"][first:last]
    # Exact: a stretch is shorter than 2^53 ns, which doubles count exactly.
    sums = np.bincount(kind, end - start, minlength=len(BlockKind)).astype(np.int64).tolist()
    parts = {f"{KIND_NAMES[each]}_ns": sums[each] for each in SHOWN}
    return {"rank": rank, **parts, "idle_ns": to_ns - from_ns - sum(parts.values())}


def _names(index: Index, from_ns: int, to_ns: int, lanes: Iterable[int]) -> list[dict[str, Any]]:
    """Time within the stretch by name and kind, whatever lies inside it; those with most time first."""
    num_kinds = len(BlockKind)
    size = len(index.header.names) * num_kinds
    totals, counts = np.zeros(size), np.zeros(size, dtype=np.int64)
    for sort, inside in _batches(index, from_ns, to_ns, lanes):
        totals += np.bincount(sort, inside, minlength=size)
        counts += np.bincount(sort[inside > 0], minlength=size)
    order = np.argsort(-totals, kind="stable")[:MAX_NAMES]
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
