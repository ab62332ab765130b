"""Replays a dependency graph, as recorded and without one of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.critical.graph import SOURCE, Graph
from gpurun.launcher.trace.analysis.critical.tasks import NO_LABEL, Part
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.requested_tables import CriticalPath, PathPart

MAX_NAMES = 20
"""Kernels and collectives whose gain is computed: those with most time on the path."""
WORDS = {
    Part.COMPUTE: "compute",
    Part.TRANSFER: "transfer",
    Part.COPIES: "copies",
    Part.INPUT: "input",
    Part.HOST: "host",
    Part.LATENCY: "latency",
    Part.BEFORE: "before",
}


def critical_path(graph: Graph, num_steps: int) -> CriticalPath:
    """What decides how long the job takes, and what it would gain without each part.

    Args:
        graph: of all ranks.
        num_steps: how many steps it holds; 0 if unknown.
    """
    ends = replay(graph, graph.costs)
    length = int(ends.max(initial=0))
    path = on_path(graph, ends)
    spent = _sums(graph, path)
    parts = [
        PathPart(WORDS[part], None, None, ns / 1000, _gain_us(graph, length, _without(graph, part)))
        for part, ns in _by_part(graph, path)
    ]
    names = [
        PathPart(*graph.labels[label], None, ns / 1000, _gain_us(graph, length, _without_label(graph, label)))
        for label, ns in spent
    ]
    even = evenly(graph)
    return CriticalPath(
        length_us=length / 1000,
        recorded_us=int(graph.ends.max(initial=0)) / 1000,
        num_steps=num_steps,
        parts=tuple(parts),
        names=tuple(names),
        ranks=tuple(_by_rank(graph, path)),
        even_gain_us=None if even is None else _gain_us(graph, length, even),
        guessed_waits=graph.num_guessed,
        contradictions=graph.num_unordered,
    )


def replay(graph: Graph, costs: Int64) -> Int64:
    """When each task ends, in ns since the start, if they cost that much."""
    ends = [0]
    end = ends.append
    durations = costs.sum(axis=1).tolist()
    for one, other, ns in zip(graph.first[1:], graph.second[1:], durations[1:], strict=True):
        a, b = ends[one], ends[other]
        end((a if a > b else b) + ns)
    return np.array(ends, dtype=np.int64)


def on_path(graph: Graph, ends: Int64) -> Int64:
    """The tasks of the critical path, last first: each begins when the next one ends."""
    found = []
    task = int(ends.argmax())
    while task != SOURCE:
        found.append(task)
        one, other = graph.first[task], graph.second[task]
        task = one if ends[one] >= ends[other] else other
    return np.array(found, dtype=np.int64)


def evenly(graph: Graph) -> Int64 | None:
    """Costs with each rank's compute, copies and host time scaled to the mean; `None` for a single rank."""
    columns = [Part.COMPUTE, Part.COPIES]
    ranks = sorted(set(graph.rank.tolist()) - {-1})
    sums = np.array([graph.costs[graph.rank == rank][:, columns].sum() for rank in ranks])
    if len(ranks) < 2 or not sums.all():
        return None
    costs = graph.costs.copy()
    for rank, total in zip(ranks, sums.tolist(), strict=True):
        mine = np.flatnonzero(graph.rank == rank)
        for column in columns:
            costs[mine, column] = np.rint(costs[mine, column] * (sums.mean() / total)).astype(np.int64)
    return costs


def _without(graph: Graph, part: Part) -> Int64:
    costs = graph.costs.copy()
    costs[:, part] = 0
    return costs


def _without_label(graph: Graph, label: int) -> Int64:
    part = Part.TRANSFER if graph.labels[label][0] == WORDS[Part.TRANSFER] else Part.COMPUTE
    costs = graph.costs.copy()
    costs[graph.label == label, part] = 0
    return costs


def _gain_us(graph: Graph, length: int, costs: Int64) -> float:
    return (length - int(replay(graph, costs).max(initial=0))) / 1000


def _by_part(graph: Graph, path: Int64) -> list[tuple[Part, int]]:
    sums = graph.costs[path].sum(axis=0).tolist()
    return sorted(((part, sums[part]) for part in Part if graph.costs[:, part].any()), key=lambda x: -x[1])


def _sums(graph: Graph, path: Int64) -> list[tuple[int, int]]:
    """Labels with most time on the path."""
    labels = graph.label[path]
    named = labels != NO_LABEL
    own = graph.costs[path][:, [Part.COMPUTE, Part.TRANSFER]].sum(axis=1)
    found: Counter[int] = Counter()
    for label, ns in zip(labels[named].tolist(), own[named].tolist(), strict=True):
        found[label] += ns
    return [(label, ns) for label, ns in found.most_common(MAX_NAMES) if ns]


def _by_rank(graph: Graph, path: Int64) -> Sequence[PathPart]:
    """What the path spends on each rank; transfer belongs to no rank."""
    costs, ranks = graph.costs[path], graph.rank[path]
    found = []
    for rank in sorted(set(ranks.tolist()) - {-1}):
        mine: NDArray[np.bool_] = ranks == rank
        sums = costs[mine].sum(axis=0).tolist()
        found += [
            PathPart(WORDS[part], None, rank, sums[part] / 1000, None)
            for part in Part
            if sums[part] and part is not Part.TRANSFER
        ]
    return sorted(found, key=lambda each: -each.path_us)
