"""Joins the tasks of all ranks at their collectives into one graph, and replays it.

As recorded, the replay gives the critical path; without one of the graph's parts, what that part costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.collectives.match import Collective
from gpurun.launcher.trace.analysis.critical.tasks import NO_LABEL, StepPart, Tasks
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.model import CriticalPath, PathPart

SOURCE = 0
"""The task that all others come after: the start of the capture."""


@dataclass(frozen=True)
class RankTasks:
    """A rank's tasks, with what to add to their times for ns since the start of all, on aligned clocks."""

    rank: int
    tasks: Tasks
    shift_ns: int


@dataclass(frozen=True, eq=False)
class Graph:
    """All ranks' tasks in an order in which each comes after those that it waits for."""

    first: list[int]
    """A task that each waits for; `SOURCE` where there is none."""
    second: list[int]
    costs: Int64
    """Time in ns by task and `StepPart`."""
    rank: NDArray[np.int32]
    label: NDArray[np.int32]
    labels: tuple[tuple[str, str], ...]
    """Part and name of what tasks are labelled with."""
    ends: Int64
    """Recorded ends of the tasks, in ns since the start of all."""
    num_guessed: int
    num_unordered: int
    """Waits that contradict each other, and were left out."""


@dataclass
class _Joined:
    """Tasks of all ranks under one numbering; the first is `SOURCE`."""

    ends: list[Int64] = field(default_factory=lambda: [np.zeros(1, dtype=np.int64)])
    main: list[NDArray[np.int8]] = field(default_factory=lambda: [np.zeros(1, dtype=np.int8)])
    known: list[Int64] = field(default_factory=lambda: [np.zeros((1, len(StepPart)), dtype=np.int64)])
    rank: list[NDArray[np.int32]] = field(default_factory=lambda: [np.full(1, -1, dtype=np.int32)])
    label: list[NDArray[np.int32]] = field(default_factory=lambda: [np.full(1, NO_LABEL, dtype=np.int32)])
    edges: list[NDArray[np.int64]] = field(default_factory=list)
    labels: dict[tuple[str, str], int] = field(default_factory=dict)
    count: int = 1

    def add(self, each: RankTasks) -> int:
        """Adds a rank; the number of its first task."""
        tasks, begin = each.tasks, self.count
        number = [self.labels.setdefault(("compute", name), len(self.labels)) for name in tasks.labels]
        labels = np.array([*number, NO_LABEL], dtype=np.int32)
        self.ends.append(tasks.ends + each.shift_ns)
        self.main.append(tasks.main)
        self.known.append(tasks.known)
        self.rank.append(np.full(len(tasks.ends), each.rank, dtype=np.int32))
        self.label.append(labels[tasks.label])
        self.edges.append(tasks.edges.astype(np.int64) + begin)
        self.count += len(tasks.ends)
        return begin

    def meeting(self, end: int) -> int:
        """A task of no rank, which costs nothing, at that time."""
        self.ends.append(np.array([end], dtype=np.int64))
        self.main.append(np.array([StepPart.TRANSFER], dtype=np.int8))
        self.known.append(np.zeros((1, len(StepPart)), dtype=np.int64))
        self.rank.append(np.full(1, -1, dtype=np.int32))
        self.label.append(np.full(1, NO_LABEL, dtype=np.int32))
        self.count += 1
        return self.count - 1


def join(ranks: Sequence[RankTasks], collectives: Sequence[Collective]) -> Graph:
    """The graph of all ranks.

    All ranks of a collective meet when the last one arrives; from there each needs its time until its end. A
    rank that left before that, as the sender of a small message can, doesn't wait.
    """
    joined = _Joined()
    begins = {each.rank: joined.add(each) for each in ranks}
    found = {
        each.rank: {
            (exchange.start, exchange.end, exchange.device): exchange for exchange in each.tasks.exchanges
        }
        for each in ranks
    }
    shifts = {each.rank: each.shift_ns for each in ranks}
    named: dict[int, int] = {}
    for collective in collectives:
        name = joined.labels.setdefault(("transfer", _name(collective)), len(joined.labels))
        members = []
        for part in collective.parts:
            key = (part.local.start, part.local.end, part.local.device)
            exchange = found.get(part.rank, {}).get(key)
            if exchange is not None:
                begin = begins[part.rank]
                named[begin + exchange.departure] = name
                members.append((exchange.arrival + begin, exchange.departure + begin, part, exchange))
        if collective.matched and len(members) > 1:
            met = max(exchange.start + shifts[part.rank] for _, _, part, exchange in members)
            late = [each for each in members if each[3].end + shifts[each[2].rank] >= met]
            meeting = joined.meeting(met)
            edges = [(arrival, meeting) for arrival, *_ in members]
            edges += [(meeting, departure) for _, departure, *_ in late]
            joined.edges.append(np.array(edges, dtype=np.int64))
    return _ordered(joined, named, sum(each.tasks.num_guessed for each in ranks))


def _name(collective: Collective) -> str:
    return f"{collective.kind} of group {collective.group}"


def _ordered(joined: _Joined, named: Mapping[int, int], num_guessed: int) -> Graph:
    edges = np.concatenate(joined.edges) if joined.edges else np.empty((0, 2), dtype=np.int64)
    ends, known = np.concatenate(joined.ends), np.concatenate(joined.known)
    num_edges = len(edges)
    edges = edges[
        ends[edges[:, 0]] <= ends[edges[:, 1]]
    ]  # some kernels overlap the one before on their stream
    order, kept = _in_order(joined.count, edges)
    edges = edges[kept]
    label = np.concatenate(joined.label)
    for task, number in named.items():
        label[task] = number
    ready = np.zeros(joined.count, dtype=np.int64)
    np.maximum.at(ready, edges[:, 1], ends[edges[:, 0]])
    costs = _costs(np.maximum(ends - ready, 0), known, np.concatenate(joined.main))
    return _binary(
        order, edges, costs, ends, np.concatenate(joined.rank), label, tuple(joined.labels),
        (num_guessed, num_edges - len(edges)),
    )  # fmt: skip


def _costs(own: Int64, known: Int64, main: NDArray[np.int8]) -> Int64:
    """Each task's own time by part: what is known, as far as it goes, and the rest."""
    reached = np.minimum(np.cumsum(known, axis=1), own[:, None])
    costs = np.diff(reached, axis=1, prepend=0)
    costs[np.arange(len(own)), main] += own - reached[:, -1]
    costs[SOURCE] = 0
    return costs


def _in_order(count: int, edges: NDArray[np.int64]) -> tuple[list[int], NDArray[np.bool_]]:
    """All tasks, each after those that it waits for; and which edges that holds for.

    Edges contradict each other only where parts that don't belong together were taken for one collective.
    """
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for before, after in edges.tolist():
        followers[before].append(after)
    missing = np.bincount(edges[:, 1], minlength=count).tolist()
    ready = deque(task for task in range(count) if not missing[task])
    order: list[int] = []
    while ready:
        task = ready.popleft()
        order.append(task)
        for after in followers.get(task, ()):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    if len(order) < count:
        placed = set(order)
        order += [task for task in range(count) if task not in placed]
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    return order, np.asarray(place[edges[:, 0]] < place[edges[:, 1]], dtype=np.bool_)


def _binary(
    order: list[int],
    edges: NDArray[np.int64],
    costs: Int64,
    ends: Int64,
    rank: NDArray[np.int32],
    label: NDArray[np.int32],
    labels: tuple[tuple[str, str], ...],
    counts: tuple[int, int],
) -> Graph:
    """In that order, with two tasks at most that each waits for: more go through tasks that cost nothing."""
    waits: defaultdict[int, list[int]] = defaultdict(list)
    for before, after in edges.tolist():
        waits[after].append(before)
    place: dict[int, int] = {}
    first: list[int] = []
    second: list[int] = []
    origin: list[int] = []

    def put(task: int, left: int, right: int) -> int:
        first.append(left)
        second.append(right)
        origin.append(task)
        return len(first) - 1

    for task in order:
        before = [place[each] for each in waits.get(task, ())]
        while len(before) > 2:
            before = [put(-1, before[0], before[1]), *before[2:]]
        left, right = (before * 2)[:2] if before else (SOURCE, SOURCE)
        place[task] = put(task, left, right)
    chosen = np.array(origin, dtype=np.int64)
    extra = chosen < 0
    spread = costs[chosen]
    spread[extra] = 0
    return Graph(
        first=first,
        second=second,
        costs=spread,
        rank=np.where(extra, -1, rank[chosen]).astype(np.int32),
        label=np.where(extra, NO_LABEL, label[chosen]).astype(np.int32),
        labels=labels,
        ends=np.where(extra, 0, ends[chosen]),
        num_guessed=counts[0],
        num_unordered=counts[1],
    )


MAX_NAMES = 20
"""Kernels and collectives whose gain is computed: those with most time on the path."""
WORDS = {
    StepPart.COMPUTE: "compute",
    StepPart.TRANSFER: "transfer",
    StepPart.COPIES: "copies",
    StepPart.INPUT: "input",
    StepPart.HOST: "host",
    StepPart.LATENCY: "latency",
    StepPart.BEFORE: "before",
}


def critical_path(graph: Graph, num_steps: int) -> CriticalPath:
    """The tasks that decide how long the job takes, and what it would gain without each part.

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
    for left, right, ns in zip(graph.first[1:], graph.second[1:], durations[1:], strict=True):
        a, b = ends[left], ends[right]
        end((a if a > b else b) + ns)
    return np.array(ends, dtype=np.int64)


def on_path(graph: Graph, ends: Int64) -> Int64:
    """The tasks of the critical path, last first: each begins when the next one ends."""
    found = []
    task = int(ends.argmax())
    while task != SOURCE:
        found.append(task)
        left, right = graph.first[task], graph.second[task]
        task = left if ends[left] >= ends[right] else right
    return np.array(found, dtype=np.int64)


def evenly(graph: Graph) -> Int64 | None:
    """Costs with each rank's compute and copies scaled to the mean; `None` for a single rank."""
    columns = [StepPart.COMPUTE, StepPart.COPIES]
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


def _without(graph: Graph, part: StepPart) -> Int64:
    costs = graph.costs.copy()
    costs[:, part] = 0
    return costs


def _without_label(graph: Graph, label: int) -> Int64:
    part = StepPart.TRANSFER if graph.labels[label][0] == WORDS[StepPart.TRANSFER] else StepPart.COMPUTE
    costs = graph.costs.copy()
    costs[graph.label == label, part] = 0
    return costs


def _gain_us(graph: Graph, length: int, costs: Int64) -> float:
    return (length - int(replay(graph, costs).max(initial=0))) / 1000


def _by_part(graph: Graph, path: Int64) -> list[tuple[StepPart, int]]:
    sums = graph.costs[path].sum(axis=0).tolist()
    return sorted(
        ((part, sums[part]) for part in StepPart if graph.costs[:, part].any()), key=lambda x: -x[1]
    )


def _sums(graph: Graph, path: Int64) -> list[tuple[int, int]]:
    """Labels with most time on the path."""
    labels = graph.label[path]
    named = labels != NO_LABEL
    own = graph.costs[path][:, [StepPart.COMPUTE, StepPart.TRANSFER]].sum(axis=1)
    found: Counter[int] = Counter()
    for label, ns in zip(labels[named].tolist(), own[named].tolist(), strict=True):
        found[label] += ns
    return [(label, ns) for label, ns in found.most_common(MAX_NAMES) if ns]


def _by_rank(graph: Graph, path: Int64) -> Sequence[PathPart]:
    """The time of the path on each rank; transfer belongs to no rank."""
    costs, ranks = graph.costs[path], graph.rank[path]
    found = []
    for rank in sorted(set(ranks.tolist()) - {-1}):
        mine: NDArray[np.bool_] = ranks == rank
        sums = costs[mine].sum(axis=0).tolist()
        found += [
            PathPart(WORDS[part], None, rank, sums[part] / 1000, None)
            for part in StepPart
            if sums[part] and part is not StepPart.TRANSFER
        ]
    return sorted(found, key=lambda each: -each.path_us)
