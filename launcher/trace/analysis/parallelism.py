"""What each kind of parallelism costs, and the bubble of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpurun.launcher.trace.analysis.collectives.collective import Collective
from gpurun.launcher.trace.analysis.collectives.group_kinds import GroupKinds
from gpurun.launcher.trace.analysis.collectives.local_collectives import Part
from gpurun.launcher.trace.analysis.digest import Scope
from gpurun.launcher.trace.analysis.rank_trace import Parts, RankView, spans_of, transfers
from gpurun.launcher.trace.intervals import EMPTY, Intervals
from gpurun.launcher.trace.model import MessageWaits, ParallelKind, ParallelRank, PipelineStage

MAX_MESSAGES = 256
"""Of one direction in a step; those after it count in the totals only."""
Views = Sequence[tuple[int, RankView]]


def parallel_kinds(views: Views, kinds: GroupKinds) -> tuple[ParallelKind, ...]:
    """The communication of each kind of parallelism, in the order of their names; `other` comes last."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    ranks: defaultdict[str, list[ParallelRank]] = defaultdict(list)
    for rank, view in views:
        by_kind: defaultdict[str, list[tuple[Collective, Part]]] = defaultdict(list)
        for each, part in view.parts:
            by_kind[kinds.of(each)].append((each, part))
            groups[kinds.of(each)].add(each.group)
        for kind, parts in by_kind.items():
            ranks[kind].append(_parallel_rank(rank, view, parts))
    ordered = sorted(groups, key=lambda kind: (kind == "other", kind))
    return tuple(ParallelKind(kind, tuple(sorted(groups[kind])), tuple(ranks[kind])) for kind in ordered)


def _parallel_rank(rank: int, view: RankView, parts: Parts) -> ParallelRank:
    scopes, by_step = _scopes(view), _by_step(parts)
    comm_ns, exposed_ns, exposed_wait_ns = 0, 0, 0
    for scope in scopes:
        mine = by_step[scope.position] if scope.position is not None else parts
        running = spans_of((part.local.start, part.local.end) for _, part in mine)
        exposed = scope.measure.exposed_comm.intersect(running)
        comm_ns += running.length_ns
        exposed_ns += exposed.length_ns
        exposed_wait_ns += exposed.subtract(transfers(mine)).length_ns
    known = any(each.matched for each, _ in parts)
    per = 1000 * max(len(scopes), 1)
    return ParallelRank(rank, comm_ns / per, exposed_ns / per, exposed_wait_ns / per if known else None)


def _scopes(view: RankView) -> Sequence[Scope]:
    """The rank's steps; all of its trace where that has none."""
    return view.digest.steps or (view.digest.total,)


def _by_step(parts: Parts) -> defaultdict[int | None, list[tuple[Collective, Part]]]:
    found: defaultdict[int | None, list[tuple[Collective, Part]]] = defaultdict(list)
    for each in parts:
        found[each[1].local.step].append(each)
    return found


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
    """By the other stage and `from` or `to`, then by position in the step."""


def pipeline(
    views: Views, stages: Mapping[int, int], offsets: Mapping[int, int]
) -> tuple[PipelineStage, ...]:
    """The stages of the pipeline with the mean of their ranks and steps; empty where there is none."""
    totals: defaultdict[int, _StageTotals] = defaultdict(_StageTotals)
    for rank, view in views:
        if rank in stages:
            _add_rank(totals[stages[rank]], rank, view, _Others(stages, offsets))
    return tuple(_stage(stage, totals[stage]) for stage in sorted(totals))


@dataclass(frozen=True)
class _Others:
    """Finds the stage that a rank waits for."""

    stages: Mapping[int, int]
    offsets: Mapping[int, int]

    def awaited(self, each: Collective, part: Part) -> int | None:
        """The stage of the last rank to come; `None` if it is of the rank's own stage, or unknown."""
        if not each.matched or not each.waits[part.rank]:
            return None
        last = max(each.awaited(part), key=lambda other: other.start_ns - self.offsets[other.rank])
        stage = self.stages.get(last.rank)
        return None if stage == self.stages[part.rank] else stage


def _add_rank(totals: _StageTotals, rank: int, view: RankView, others: _Others) -> None:
    totals.ranks.append(rank)
    by_step = _by_step(view.parts)
    for scope in _scopes(view):
        parts = by_step[scope.position] if scope.position is not None else view.parts
        totals.num_steps += 1
        totals.span += scope.measure.span
        _add_waits(totals, scope.measure.exposed_comm, parts, others)
        _add_messages(totals, scope.measure.exposed_comm, parts, others)


def _add_waits(totals: _StageTotals, exposed: Intervals, parts: Parts, others: _Others) -> None:
    waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for each, part in parts:
        stage = others.awaited(each, part)
        if stage is not None:
            waits[stage].append(each.waiting(part))
    bubble = EMPTY
    for stage, spans in waits.items():
        waited = exposed.intersect(spans_of(spans))
        totals.by_stage[stage] += waited.length_ns
        bubble = bubble.join(waited)
    totals.bubble += bubble.length_ns


def _add_messages(totals: _StageTotals, exposed: Intervals, parts: Parts, others: _Others) -> None:
    """Adds the wait for each message of a step, in the order in which they came."""
    seen: defaultdict[tuple[int, str], int] = defaultdict(int)
    messages = [(each, part) for each, part in parts if each.is_message and part.local.peer in others.stages]
    for each, part in sorted(messages, key=lambda pair: pair[1].local.end):
        way = (others.stages[part.local.peer or 0], "to" if part.local.kind == "send" else "from")
        totals.messages[way][seen[way]] += exposed.clip(*each.waiting(part)).length_ns
        seen[way] += 1


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
