"""Finds the groups of collectives that traces don't name, where only one assignment is possible.

Ranges of gloo carry no group. But all ranks of a group take part in its collectives, so that the number of
those of one kind and size that a rank shows in a step is a sum over the groups that it is in. Where these
equations have one solution, and only one group of a rank has any, they are of that group. Where they have
several solutions, as with the rows and columns of a mesh, nothing is assumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpurun.launcher.trace.analysis.collectives.local_collectives import (
    UNNAMED,
    LocalCollective,
    TracedGroup,
)
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, SAME_SIZE
from gpurun.launcher.trace.kineto.events import RankTuple

Sort = tuple[object, ...]
"""Number of the step, kind, size."""
Located = tuple[int, LocalCollective, int | None]
"""Rank, collective, number of its step."""


def groups_found(collectives: Iterable[Located]) -> dict[int, TracedGroup]:
    """The groups of collectives whose traces don't name one, by the `id` of the collective."""
    unnamed = [each for each in collectives if _is_unnamed(each[1])]
    names: defaultdict[RankTuple, set[str]] = defaultdict(set)
    counts: defaultdict[Sort, Counter[int]] = defaultdict(Counter)
    for rank, local, step in unnamed:
        counts[_sort(local, step)][rank] += 1
        for name, ranks in local.group.possible:
            names[ranks].add(name)
    used = {sort: _used(list(names), by_rank) for sort, by_rank in counts.items()}
    found = {}
    for rank, local, step in unnamed:
        mine = [ranks for ranks in used[_sort(local, step)] if rank in ranks.members]
        if len(mine) == 1:
            called = names[mine[0]]
            name = next(iter(called)) if len(called) == 1 else UNNAMED
            found[id(local)] = TracedGroup(name, mine[0])
    return found


def named(local: LocalCollective, group: TracedGroup | None) -> LocalCollective:
    """The collective with its group, if it may be of any of several and one was found."""
    if group is None or group.ranks is None or not local.group.is_ambiguous:
        return local
    return replace(local, group=group, group_size=len(group.ranks))


def _is_unnamed(local: LocalCollective) -> bool:
    return bool(local.group.possible) and local.kind not in POINT_TO_POINT


def _sort(local: LocalCollective, step: int | None) -> Sort:
    return step, local.kind, local.num_bytes if local.kind in SAME_SIZE else None


def _used(groups: Sequence[RankTuple], counts: Mapping[int, int]) -> list[RankTuple]:
    """The groups that had collectives, by how many each rank shows; none where that isn't certain."""
    able = [ranks for ranks in groups if all(counts.get(rank) for rank in ranks)]
    rows = sorted(counts)
    matrix = np.array([[rank in ranks.members for ranks in able] for rank in rows], dtype=float).reshape(
        len(rows), -1
    )
    if not able or np.linalg.matrix_rank(matrix) < len(able):
        return []
    seen = np.array([counts[rank] for rank in rows], dtype=float)
    numbers = np.rint(np.linalg.lstsq(matrix, seen, rcond=None)[0])
    if (numbers < 0).any() or not np.array_equal(matrix @ numbers, seen):
        return []
    return [ranks for ranks, number in zip(able, numbers.tolist(), strict=True) if number]
