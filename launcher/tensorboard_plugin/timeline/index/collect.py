"""Collectives in the index: their entries on each rank, and where their waiting ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpurun.launcher.tensorboard_plugin.timeline.blocks import BlockKind
from gpurun.launcher.tensorboard_plugin.timeline.format import CollectiveFacts
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import Draft
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.collective import Collective
from gpurun.launcher.trace.analysis.collectives.local_collectives import Part
from gpurun.launcher.trace.analysis.collectives.match import Matched
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.model import CollectiveReport


@dataclass(frozen=True)
class PartEntry:
    """One rank's part of a collective. Times in ns since the rank's trace base."""

    collective: int
    entry: int
    """Its wait, among the rank's entries."""
    start: int
    split: int
    """Where waiting ends."""
    end: int


def part_entries(rank: int, draft: Draft, matched: Matched) -> list[PartEntry]:
    """The rank's parts in all collectives, in their order."""
    entries = _entries_by_times(draft)
    found = []
    for number, collective in enumerate(matched.collectives):
        for part in collective.parts:
            candidates = entries[part.local.start, part.local.end] if part.rank == rank else []
            if candidates:
                found.append(_part_entry(number, collective, part, candidates.pop(0)))
    return found


def _entries_by_times(draft: Draft) -> defaultdict[tuple[int, int], list[int]]:
    """The waits by start and end of their collective."""
    waits = draft.collectives
    starts, ends = draft.entries.start[waits].tolist(), draft.entries.end[waits + 1].tolist()
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for entry, start, end in zip(waits.tolist(), starts, ends, strict=True):
        found[start, end].append(entry)
    return found


def _part_entry(number: int, collective: Collective, part: Part, entry: int) -> PartEntry:
    local = part.local
    return PartEntry(number, entry, local.start, collective.moving(part)[0], local.end)


def split_waits(draft: Draft, parts: list[PartEntry]) -> None:
    """Moves the border between wait and transfer, in place, to where the other ranks' traces show it."""
    at = np.array([part.entry for part in parts], dtype=np.int64)
    split = np.array([part.split for part in parts], dtype=np.int64)
    draft.entries.end[at] = split
    draft.entries.start[at + 1] = split


def transfers(draft: Draft) -> Intervals:
    """When data moved."""
    moving = draft.collectives + 1
    return union(draft.entries.start[moving], draft.entries.end[moving])


def transfers_by_kind(
    draft: Draft, parts: Sequence[PartEntry], kinds: Sequence[BlockKind]
) -> dict[BlockKind, Intervals]:
    """When data moved, by the kind of each collective; `kinds` has one for each number."""
    entries: defaultdict[BlockKind, list[int]] = defaultdict(list)
    for part in parts:
        entries[kinds[part.collective]].append(part.entry + 1)
    start, end = draft.entries.start, draft.entries.end
    return {kind: union(start[entries[kind]], end[entries[kind]]) for kind in sorted(entries)}


def facts(collectives: Sequence[CollectiveReport]) -> tuple[CollectiveFacts, ...]:
    """The part of each collective that all ranks share."""
    return tuple(
        CollectiveFacts(
            kind=each.kind,
            group=each.group,
            seq=each.seq,
            parallelism=each.parallelism,
            num_bytes=each.bytes,
            algorithm_gb_per_s=each.algorithm_gb_per_s,
            bus_gb_per_s=each.bus_gb_per_s,
            last_rank=each.last_rank,
            matched=each.ranks[0].transfer_us is not None,
        )
        for each in collectives
    )


def part_columns(
    rank: int, parts: list[PartEntry], first_entry: int, realigned: Realigned
) -> dict[str, Int64]:
    """The parts as columns of the index."""
    return {
        "part_collective": _column(part.collective for part in parts),
        "part_rank": np.full(len(parts), rank, dtype=np.int64),
        "part_entry": _column(part.entry + first_entry for part in parts),
        "part_start": _column(realigned.one(part.start) for part in parts),
        "part_split": _column(realigned.one(part.split) for part in parts),
        "part_end": _column(realigned.one(part.end) for part in parts),
    }


def _column(values: object) -> Int64:
    return np.fromiter(values, dtype=np.int64)  # type: ignore[call-overload,no-any-return]
