"""The cost of each kind of parallelism, and the bubble of a pipeline.

A group of ranks is for data, tensor, pipeline, expert or context parallelism: by what the program calls the
group, else by what it does, else by its place in the mesh of ranks. What none of these decides is `other`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from gpurun.launcher.trace.analysis.collectives.local_collectives import BEGIN_NS, RankPart
from gpurun.launcher.trace.analysis.collectives.match import Collective
from gpurun.launcher.trace.analysis.digest import Scope
from gpurun.launcher.trace.analysis.rank_trace import MatchedRank, Parts, spans_of, transfers
from gpurun.launcher.trace.intervals import EMPTY, Intervals
from gpurun.launcher.trace.model import MessageWaits, ParallelKind, ParallelRank, PipelineStage

OTHER = "other"
WORDS: Mapping[str, Set[str]] = {
    "data": frozenset({"dp", "ddp", "fsdp", "hsdp", "zero", "data", "replicate", "shard"}),
    "tensor": frozenset({"tp", "tensor"}),
    "pipeline": frozenset({"pp", "pipe", "pipeline"}),
    "expert": frozenset({"ep", "expert", "moe"}),
    "context": frozenset({"cp", "sp", "context", "sequence", "ulysses"}),
}
"""Words in the names of groups. Source: `DeviceMesh` of torch, `parallel_state.py` of Megatron-LM."""
_WORD = re.compile(r"[a-z]+")
_REDUCTIONS = frozenset({"all_reduce", "reduce", "broadcast"})
Ranks = tuple[int, ...]
Links = Mapping[int, Set[int]]


@dataclass(frozen=True)
class GroupKinds:
    """The kind of each group's collectives, and of its messages."""

    of_groups: Mapping[str, str]
    """The kinds of those groups that have one, by the group's name in `Collective`."""
    of_messages: Mapping[str, str]
    stages: Mapping[int, int]
    """The stage of each rank of a pipeline; empty if there is none."""

    def of(self, each: Collective) -> str:
        """`data`, `tensor`, `pipeline`, `expert`, `context` or `other`."""
        return (self.of_messages if each.is_message else self.of_groups).get(each.group, OTHER)


@dataclass(frozen=True)
class _Use:
    """A group, and the operations in it."""

    name: str
    ranks: Ranks | None
    kind: str | None
    """The kind that its name shows."""
    ops: Counter[str]


def group_kinds(
    collectives: Sequence[Collective], num_ranks: int | None, wraps_data_parallel: bool
) -> GroupKinds:
    """The kinds of all groups.

    Args:
        collectives: of all ranks.
        num_ranks: of the job; `None` if unknown.
        wraps_data_parallel: whether the traces show torch's DDP or FSDP at work.
    """
    uses = _uses(each for each in collectives if not each.is_message)
    found = {use.name: use.kind for use in uses if use.kind is not None}
    found |= {use.name: "expert" for use in uses if use.name not in found and _is_expert(use, num_ranks)}
    left = [use for use in uses if use.name not in found and use.ranks is not None and len(use.ranks) > 1]
    found |= _by_mesh(left, num_ranks, wraps_data_parallel, set(found.values()))
    messages = [each for each in collectives if each.is_message]
    called = {use.name: use.kind for use in _uses(messages) if use.kind is not None}
    stages = pipeline_stages([each for each in messages if called.get(each.group, "pipeline") == "pipeline"])
    if stages:
        called |= {each.group: "pipeline" for each in messages if each.group not in called}
    return GroupKinds(found, called, stages)


def kind_of_name(text: str) -> str | None:
    """The kind that this text names; `None` if it names none, or several dimensions of the mesh at once.

    Groups of data parallel ranks among those of one expert, or of one context, are of the former.
    """
    words = set(_WORD.findall(text.lower()))
    named = {kind for kind, known in WORDS.items() if words & known}
    if len(named) == 2 and named in ({"data", "expert"}, {"data", "context"}):
        return "data"
    if named == {"tensor", "expert"}:
        return "tensor"
    return named.pop() if len(named) == 1 else None


def _uses(collectives: Iterable[Collective]) -> list[_Use]:
    ops: defaultdict[str, Counter[str]] = defaultdict(Counter)
    first: dict[str, Collective] = {}
    for each in collectives:
        ops[each.group][each.kind] += 1
        first.setdefault(each.group, each)
    return [
        _Use(name, each.group_ranks, kind_of_name(each.description or "") or kind_of_name(name), ops[name])
        for name, each in first.items()
    ]


def _is_expert(use: _Use, num_ranks: int | None) -> bool:
    """Whether a group of some of the ranks mainly exchanges what each has for each other."""
    some = use.ranks is not None and num_ranks is not None and 1 < len(use.ranks) < num_ranks
    return some and 2 * use.ops["all_to_all"] > use.ops.total()


def _by_mesh(
    uses: Sequence[_Use], num_ranks: int | None, wraps_data_parallel: bool, known: Set[str]
) -> dict[str, str]:
    """Takes the inner one of two dimensions that reduce as tensor parallel, the outer one as data parallel.

    A model's shards exchange more than its replicas, so their ranks are next to each other. That holds only
    where the inner one reduces: one that gathers and scatters may hold the shards of a replica's parameters.
    """
    dimensions: defaultdict[tuple[int, int], list[_Use]] = defaultdict(list)
    for use in uses:
        shape = _size_and_stride(use.ranks or ())
        if shape is None:
            return {}
        if use.ranks is not None and (len(use.ranks) != num_ranks or len(uses) == 1):
            dimensions[shape].append(use)
    ordered = sorted(dimensions.items(), key=lambda item: item[0][1])
    if len(ordered) == 1 and wraps_data_parallel and "data" not in known:
        return {use.name: "data" for use in ordered[0][1]}
    if len(ordered) != 2 or known & {"data", "tensor"}:
        return {}
    ((size, stride), inner), ((_, outer_stride), outer) = ordered
    if outer_stride < size * stride or not all(set(use.ops) <= _REDUCTIONS for use in inner):
        return {}
    return {use.name: "tensor" for use in inner} | {use.name: "data" for use in outer}


def _size_and_stride(ranks: Ranks) -> tuple[int, int] | None:
    """Number of ranks and the distance between them; `None` if they aren't evenly spaced."""
    distances = {after - before for before, after in pairwise(ranks)}
    return (len(ranks), distances.pop()) if len(distances) == 1 else None


def pipeline_stages(messages: Iterable[Collective]) -> dict[int, int]:
    """The stage of each rank, from 0 within its pipeline; empty if the messages aren't those of pipelines.

    A pipeline's ranks, in order, send to the next one and maybe back; the last may also send to the first, as
    in an interleaved schedule. All pipelines have the same number of stages.
    """
    there: defaultdict[int, set[int]] = defaultdict(set)
    for source, target in _ways(messages):
        there[source].add(target)
    chains = list(_chains(there))
    if not chains or len({len(chain) for chain in chains}) > 1:
        return {}
    if not all(_is_pipeline(chain, there) for chain in chains):
        return {}
    return {rank: stage for chain in chains for stage, rank in enumerate(chain)}


def _ways(messages: Iterable[Collective]) -> Iterator[tuple[int, int]]:
    """Sender and receiver of each message."""
    for each in messages:
        for part in each.parts:
            for kind, peer in part.local.sent_and_received:
                if peer != part.rank:
                    yield (part.rank, peer) if kind == "send" else (peer, part.rank)


def _chains(there: Links) -> Iterator[Sequence[int]]:
    """The ranks that messages link, in order."""
    near: defaultdict[int, set[int]] = defaultdict(set)
    for source, targets in there.items():
        for target in targets:
            near[source].add(target)
            near[target].add(source)
    left = set(near)
    while left:
        chain, todo = set[int](), [min(left)]
        while todo:
            rank = todo.pop()
            if rank not in chain:
                chain.add(rank)
                todo += near[rank]
        left -= chain
        yield sorted(chain)


def _is_pipeline(chain: Sequence[int], there: Links) -> bool:
    """Whether each rank sends to its neighbours only. A ring that runs one way is attention over a ring."""
    steps = set(pairwise(chain))
    both = steps | {(after, before) for before, after in steps}
    wrap = {(chain[-1], chain[0]), (chain[0], chain[-1])}
    used = {(source, target) for source in chain for target in there.get(source, ())}
    is_ring = len(chain) > 2 and used == steps | {(chain[-1], chain[0])}
    return steps <= used <= both | wrap and not is_ring


MAX_MESSAGES = 256
"""The limit of one direction in a step; those after it count in the totals only."""
Views = Sequence[tuple[int, MatchedRank]]


def parallel_kinds(views: Views, kinds: GroupKinds) -> tuple[ParallelKind, ...]:
    """The communication of each kind of parallelism, in the order of their names; `other` comes last."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    ranks: defaultdict[str, list[ParallelRank]] = defaultdict(list)
    for rank, view in views:
        by_kind: defaultdict[str, list[tuple[Collective, RankPart]]] = defaultdict(list)
        for each, part in view.parts:
            by_kind[kinds.of(each)].append((each, part))
            groups[kinds.of(each)].add(each.group)
        for kind, parts in by_kind.items():
            ranks[kind].append(_parallel_rank(rank, view, parts))
    ordered = sorted(groups, key=lambda kind: (kind == "other", kind))
    return tuple(ParallelKind(kind, tuple(sorted(groups[kind])), tuple(ranks[kind])) for kind in ordered)


def _parallel_rank(rank: int, view: MatchedRank, parts: Parts) -> ParallelRank:
    scopes = _scopes(view)
    comm_ns, exposed_ns, exposed_wait_ns = 0, 0, 0
    for scope, mine in _with_parts(scopes, parts):
        running = spans_of((part.local.start, part.local.end) for _, part in mine)
        exposed = scope.measure.exposed_comm.intersect(running)
        comm_ns += running.length_ns
        exposed_ns += exposed.length_ns
        exposed_wait_ns += exposed.subtract(transfers(mine)).length_ns
    known = any(each.matched for each, _ in parts)
    per = 1000 * max(len(scopes), 1)
    return ParallelRank(rank, comm_ns / per, exposed_ns / per, exposed_wait_ns / per if known else None)


def _scopes(view: MatchedRank) -> Sequence[Scope]:
    """The rank's steps; all of its trace where that has none."""
    return view.digest.steps or (view.digest.total,)


def _with_parts(scopes: Sequence[Scope], parts: Parts) -> Iterator[tuple[Scope, Parts]]:
    """Each step with its own parts; the whole trace with all."""
    by_step: defaultdict[int | None, list[tuple[Collective, RankPart]]] = defaultdict(list)
    for each in parts:
        by_step[each[1].local.step].append(each)
    for scope in scopes:
        yield scope, parts if scope.position is None else by_step[scope.position]


@dataclass
class _StageTotals:
    """Sums over the steps of a stage's ranks, in ns."""

    ranks: list[int] = field(default_factory=list)
    num_steps: int = 0
    span: int = 0
    bubble: int = 0
    by_stage: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    messages: defaultdict[tuple[int, str], defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """The messages by the other stage and `from` or `to`, then by position in the step."""


def pipeline(
    views: Views, stages: Mapping[int, int], offsets: Mapping[int, int], steps: Set[int] | None = None
) -> tuple[PipelineStage, ...]:
    """The stages of the pipeline with the mean of their ranks and steps; empty where there is none.

    What a rank waited for a message that the other rank's trace lacks isn't known: its step doesn't count,
    unless a stage has no other.

    Args:
        views: the ranks.
        stages: of each rank.
        offsets: of the ranks' clocks.
        steps: numbers of the steps that count; `None`: all.
    """
    totals: defaultdict[int, _StageTotals] = defaultdict(_StageTotals)
    asked = {
        rank: [each for each in _scopes(view) if steps is None or each.step in steps]
        for rank, view in views
        if rank in stages
    }
    known = {rank: _with_known_messages(view, asked[rank]) for rank, view in views if rank in asked}
    known_stages = {stages[rank] for rank, scopes in known.items() if scopes}
    for rank, view in views:
        if rank in asked:
            stage = stages[rank]
            scopes = known[rank] if stage in known_stages else asked[rank]
            _add_rank(totals[stage], rank, view, scopes, _Others(stages, offsets))
    return tuple(_stage(stage, totals[stage]) for stage in sorted(totals))


def _with_known_messages(view: MatchedRank, scopes: Sequence[Scope]) -> list[Scope]:
    return [
        scope
        for scope, parts in _with_parts(scopes, view.parts)
        if all(each.matched for each, _ in parts if each.is_message)
    ]


@dataclass(frozen=True)
class _Others:
    """Finds the stage that a rank waits for."""

    stages: Mapping[int, int]
    offsets: Mapping[int, int]

    def awaited(self, each: Collective, part: RankPart) -> int | None:
        """The stage of the last rank to come; `None` if it is of the rank's own stage, or unknown."""
        if not each.matched or not each.waits[part.rank]:
            return None
        last = max(each.awaited(part), key=lambda other: other.start_ns - self.offsets[other.rank])
        stage = self.stages.get(last.rank)
        return None if stage == self.stages[part.rank] else stage


def _add_rank(
    totals: _StageTotals, rank: int, view: MatchedRank, scopes: Sequence[Scope], others: _Others
) -> None:
    totals.ranks.append(rank)
    for scope, parts in _with_parts(scopes, view.parts):
        totals.num_steps += 1
        totals.span += scope.measure.span
        free = scope.measure.exposed_comm.subtract(_other_communication(parts, others))
        _add_waits(totals, free, parts, others)
        _add_messages(totals, free, parts, others)


def _other_communication(parts: Parts, others: _Others) -> Intervals:
    """When a rank moved data, or was in a collective in which it didn't wait for another stage."""
    inside = (
        (part.local.start, part.local.end)
        for each, part in parts
        if not each.is_message and others.awaited(each, part) is None
    )
    return transfers(parts).join(spans_of(inside))


def _add_waits(totals: _StageTotals, free: Intervals, parts: Parts, others: _Others) -> None:
    waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for each, part in parts:
        stage = others.awaited(each, part)
        if stage is not None:
            waits[stage].append(each.waiting(part))
    bubble = EMPTY
    for stage, spans in waits.items():
        waited = free.intersect(spans_of(spans))
        totals.by_stage[stage] += waited.length_ns
        bubble = bubble.join(waited)
    totals.bubble += bubble.length_ns


def _add_messages(totals: _StageTotals, free: Intervals, parts: Parts, others: _Others) -> None:
    """Adds the wait for each message of a step, in the order in which they came.

    A moment is of one message: of the first that it asked for, where there are several, and of none that it
    sends while it waits for one to come.
    """
    messages = [(each, part) for each, part in parts if each.is_message and part.local.peer in others.stages]
    sent = [(each, part) for each, part in messages if part.local.kind == "send"]
    got = [(each, part) for each, part in messages if part.local.kind != "send"]
    waited_ns = _shares(free, got)
    waited_ns |= _shares(free.subtract(spans_of(each.waiting(part) for each, part in got)), sent)
    seen: defaultdict[tuple[int, str], int] = defaultdict(int)
    for _, part in sorted(messages, key=lambda pair: pair[1].local.end):
        way = (others.stages[part.local.peer or 0], "to" if part.local.kind == "send" else "from")
        totals.messages[way][seen[way]] += waited_ns[part]
        seen[way] += 1


def _shares(free: Intervals, messages: Parts) -> dict[RankPart, int]:
    """The time that each message adds to the wait for those before it."""
    found, reached = dict[RankPart, int](), BEGIN_NS
    for each, part in sorted(messages, key=lambda pair: pair[0].waiting(pair[1])):
        start, end = each.waiting(part)
        found[part] = free.clip(max(start, reached), max(end, reached)).length_ns
        reached = max(reached, end)
    return found


def _stage(stage: int, totals: _StageTotals) -> PipelineStage:
    per = 1000 * max(totals.num_steps, 1)
    return PipelineStage(
        stage=stage,
        ranks=tuple(totals.ranks),
        span_us=totals.span / per,
        bubble_us=totals.bubble / per,
        waits_us={str(other): ns / per for other, ns in sorted(totals.by_stage.items())},
        messages=tuple(
            MessageWaits(other, way, tuple(waits[i] / per for i in range(min(len(waits), MAX_MESSAGES))))
            for (other, way), waits in sorted(totals.messages.items())
        ),
    )
