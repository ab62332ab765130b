"""Operators, kernels and modules by their time per step, on each rank, and against another variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launcher.tensorboard_plugin.timeline.format import Header
from launcher.trace.classify import HostKind, host_kind
from launcher.trace.model import NameTotal, RankTrace

Kind = Literal["ops", "kernels", "modules"]
KINDS: tuple[Kind, ...] = ("ops", "kernels", "modules")
MAX_ROWS = 1000
_CLASSES = {"compute": "compute", "comm": "transfer", "memcpy": "copy"}


@dataclass(frozen=True)
class NameTime:
    """Time under one name on one rank, per step."""

    kind: str
    """As in `timeline.blocks.KIND_NAMES`."""
    calls: float
    self_ms: float
    host_ms: float
    wait_ms: float = 0.0
    """The part of `self_ms` that is waiting for other ranks."""


@dataclass(frozen=True)
class RankTimes:
    """One rank's time per step."""

    rank: int
    step_ms: float
    work_ms: float
    """The step without exposed communication: the others wait for the rank with most of it."""
    idle_ms: float
    num_steps: int
    names: dict[str, NameTime]

    @property
    def rest_ms(self) -> float:
        """What no row has: never less than the time in which nothing ran."""
        return max(self.step_ms - self._named_ms, self.idle_ms)

    @property
    def overlap_ms(self) -> float:
        """By how much the rows are longer than the step, since some of their work ran side by side.

        Kernels on several streams or devices, operators on several threads, and what ran outside of steps.
        """
        return max(self._named_ms + self.rest_ms - self.step_ms, 0.0)

    @property
    def _named_ms(self) -> float:
        return sum(each.self_ms for each in self.names.values())


def operators_answer(
    header: Header, against: Header | None, kind: Kind, straggler: int | None = None
) -> dict[str, Any]:
    """The table; see README.md.

    Args:
        header: of the index.
        against: of another variant's.
        kind: what the rows are.
        straggler: the rank that the table is about; `None`: the one that works longest.
    """
    ranks = [rank_times(rank, kind) for rank in header.ranks]
    slowest = next((each for each in ranks if each.rank == straggler), None) or slowest_of(ranks)
    other = slowest_of([rank_times(rank, kind) for rank in against.ranks]) if against else None
    names = sorted(
        {name for rank in ranks for name in rank.names} | set(other.names if other else ()),
        key=lambda name: (-_self_ms(slowest, name), -_self_ms(other, name), name),
    )
    rows = [_row([name], name, ranks, slowest, other) for name in names[:MAX_ROWS]]
    if names[MAX_ROWS:]:
        rows.append(_row(names[MAX_ROWS:], None, ranks, slowest, other))
    return {
        "kind": kind,
        "ranks": [each.rank for each in ranks],
        "slowest_rank": slowest.rank,
        "is_straggler": slowest.rank == straggler,
        "steps": slowest.num_steps,
        "step_ms": slowest.step_ms,
        "step_by_rank_ms": [each.step_ms for each in ranks],
        "rest_ms": slowest.rest_ms,
        "rest_by_rank_ms": [each.rest_ms for each in ranks],
        "overlap_ms": slowest.overlap_ms,
        "overlap_by_rank_ms": [each.overlap_ms for each in ranks],
        "against_step_ms": other.step_ms if other else None,
        "against_rest_ms": other.rest_ms if other else None,
        "against_overlap_ms": other.overlap_ms if other else None,
        "rows": rows,
    }


def slowest_of(ranks: Sequence[RankTimes]) -> RankTimes:
    return max(ranks, key=lambda each: (each.work_ms, -each.rank))


def rank_times(rank: RankTrace, kind: Kind) -> RankTimes:
    """Per step: the trace's sums over its steps, of which a trace without any has one."""
    num_steps = max(len(rank.steps), 1)
    per_step = 1 / (1000 * num_steps)
    spans_us = [step.span_us for step in rank.steps] or [rank.total.span_us]
    exposed_us = sum(step.exposed_comm_us for step in rank.steps)
    on_gpu = rank.total.num_kernels > 0
    totals = {"ops": rank.ops, "kernels": rank.kernels, "modules": rank.modules}[kind]
    names = {each.name: _name_time(each, kind, on_gpu, per_step, num_steps) for each in totals}
    if not on_gpu and kind == "ops":
        names |= _cpu_collectives(rank, per_step, num_steps)
    return RankTimes(
        rank=rank.rank,
        step_ms=sum(spans_us) * per_step,
        work_ms=(sum(spans_us) - exposed_us) * per_step,
        idle_ms=sum(step.idle_us for step in rank.steps) * per_step,
        num_steps=num_steps,
        names=_exposed(names, rank, per_step),
    )


def _name_time(total: NameTotal, kind: Kind, on_gpu: bool, per_step: float, num_steps: int) -> NameTime:
    """Time on the device; where the CPU is the device, on the CPU."""
    what = _CLASSES.get(total.kind, "compute")
    if kind == "ops" and host_kind("cpu_op", total.name) is HostKind.COMM_CALL:
        what = "transfer"
    own_us = total.device_us if on_gpu or kind == "kernels" else total.host_us
    return NameTime(what, total.count / num_steps, own_us * per_step, total.host_us * per_step)


def _cpu_collectives(rank: RankTrace, per_step: float, num_steps: int) -> dict[str, NameTime]:
    """On the CPU collectives run on threads of their own, where no operator shows them."""
    several = len(rank.groups) > 1
    return {
        f"collectives of group {each.group}" if several else "collectives": NameTime(
            "transfer", each.count / num_steps, each.comm_us * per_step, 0.0
        )
        for each in rank.groups
    }


def _exposed(names: dict[str, NameTime], rank: RankTrace, per_step: float) -> dict[str, NameTime]:
    """Communication cut to its exposed part; that is known for the rank, and shared out by time."""
    comm_ms = sum(each.self_ms for each in names.values() if each.kind == "transfer")
    exposed_ms = sum(step.exposed_comm_us for step in rank.steps) * per_step
    wait_ms = sum(step.exposed_wait_us for step in rank.steps) * per_step
    if comm_ms == 0:
        return names
    return {
        name: replace(
            each,
            self_ms=each.self_ms * exposed_ms / comm_ms,
            wait_ms=each.self_ms * wait_ms / comm_ms,
        )
        if each.kind == "transfer"
        else each
        for name, each in names.items()
    }


def _self_ms(rank: RankTimes | None, name: str) -> float:
    found = rank.names.get(name) if rank else None
    return found.self_ms if found else 0.0


def _row(
    names: Sequence[str],
    title: str | None,
    ranks: Sequence[RankTimes],
    slowest: RankTimes,
    other: RankTimes | None,
) -> dict[str, Any]:
    """One name, or the sum of many."""
    own = [slowest.names[name] for name in names if name in slowest.names]
    self_ms = sum(each.self_ms for each in own)
    against_ms = sum(_self_ms(other, name) for name in names) if other else None
    kinds = [
        rank.names[names[0]].kind for rank in (*ranks, *((other,) if other else ())) if names[0] in rank.names
    ]
    return {
        "name": title,
        "class": kinds[0] if title is not None else "compute",
        "calls": sum(each.calls for each in own) or None,  # of collectives no operator tells
        "self_ms": self_ms,
        "host_ms": sum(each.host_ms for each in own),
        "share_percent": 100 * self_ms / slowest.step_ms if slowest.step_ms else None,
        "by_rank_ms": [sum(_self_ms(rank, name) for name in names) for rank in ranks],
        "wait_by_rank_ms": [
            sum(rank.names[name].wait_ms for name in names if name in rank.names) for rank in ranks
        ],
        "against_ms": against_ms,
        "difference_ms": None if against_ms is None else self_ms - against_ms,
    }
