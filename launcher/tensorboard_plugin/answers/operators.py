"""Operators, kernels and modules by their time per step, on each rank, and against another variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpurun.launcher.report.metrics import OTHER_STEPS
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.trace.kineto.classify import HostKind, host_kind
from gpurun.launcher.trace.model import Breakdown, NameTotal, RankTrace

Kind = Literal["ops", "kernels", "modules"]
KINDS: tuple[Kind, ...] = ("ops", "kernels", "modules")
MAX_ROWS = 1000
_CLASSES = {"compute": "compute", "comm": "transfer", "memcpy": "copy"}
_OUTSIDE: dict[Kind, dict[str, str]] = {
    "ops": {
        "compute": "compute that no operator launched",
        "transfer": "collectives that no operator launched",
        "copy": "copies that no operator launched",
    },
    "modules": {
        "compute": "compute outside of modules",
        "transfer": "collectives outside of modules",
        "copy": "copies outside of modules",
    },
    "kernels": {},
}


@dataclass(frozen=True)
class TimePerStep:
    """Time under one name on one rank, per step."""

    kind: str
    """A kind in `timeline.format.KIND_NAMES`, or `other_steps`; of several the one with most of the time."""
    calls: float
    """0 where it isn't known."""
    self_ms: float
    host_ms: float
    comm_ms: float = 0.0
    """The part of `self_ms` that is communication."""
    copy_ms: float = 0.0
    """The part of `self_ms` that is copies and memsets."""
    wait_ms: float = 0.0
    """The part of `comm_ms` that is waiting for other ranks."""
    is_named: bool = True
    """Whether the trace has the name; else it is ours, for what has none."""


@dataclass(frozen=True)
class RankTimes:
    """One rank's time per step."""

    rank: int
    step_ms: float
    work_ms: float
    """The step without exposed communication: the others wait for the rank with most of it."""
    idle_ms: float
    num_steps: int
    """0 for a trace without steps, which counts as one."""
    names: dict[str, TimePerStep]

    @property
    def rest_ms(self) -> float:
        """The time that no row has: never less than the time in which nothing ran."""
        return max(self.step_ms - self._named_ms, self.idle_ms)

    @property
    def overlap_ms(self) -> float:
        """How much longer the rows are than the step, since some of their work ran side by side.

        Kernels on several streams or devices, operators on several threads, and what ran outside of steps.
        """
        return max(self._named_ms + self.rest_ms - self.step_ms, 0.0)

    @property
    def _named_ms(self) -> float:
        return sum(each.self_ms for each in self.names.values())


def operators_answer(
    header: Header,
    against: Header | None,
    kind: Kind,
    slowest: int | None = None,
    slowest_against: int | None = None,
) -> dict[str, Any]:
    """The table; see README.md.

    Args:
        header: of the index.
        against: of another variant's.
        kind: what the rows are.
        slowest: the rank that the table is about; `None`: the one that works longest by these traces.
        slowest_against: likewise of the other variant.
    """
    ranks = [rank_times(rank, kind) for rank in header.ranks]
    shown = slowest_of(ranks, slowest)
    others = [rank_times(rank, kind) for rank in against.ranks] if against else []
    other = slowest_of(others, slowest_against) if others else None
    names = sorted(
        {name for rank in ranks for name in rank.names} | set(other.names if other else ()),
        key=lambda name: (-_self_ms(shown, name), -_self_ms(other, name), name),
    )
    rows = [_row([name], name, ranks, shown, other) for name in names[:MAX_ROWS]]
    if names[MAX_ROWS:]:
        rows.append(_row(names[MAX_ROWS:], None, ranks, shown, other))
    return {
        "kind": kind,
        "ranks": [each.rank for each in ranks],
        "slowest_rank": shown.rank,
        "steps": shown.num_steps,
        "step_ms": shown.step_ms,
        "step_by_rank_ms": [each.step_ms for each in ranks],
        "rest_ms": shown.rest_ms,
        "rest_by_rank_ms": [each.rest_ms for each in ranks],
        "overlap_ms": shown.overlap_ms,
        "overlap_by_rank_ms": [each.overlap_ms for each in ranks],
        "against_step_ms": other.step_ms if other else None,
        "against_rest_ms": other.rest_ms if other else None,
        "against_overlap_ms": other.overlap_ms if other else None,
        "rows": rows,
    }


def slowest_of(ranks: Sequence[RankTimes], known: int | None = None) -> RankTimes:
    """The rank that is known to be the slowest, else the one that works longest."""
    return max(ranks, key=lambda each: (each.rank == known, each.work_ms, -each.rank))


def rank_times(rank: RankTrace, kind: Kind) -> RankTimes:
    """Per step: the sums of what its steps launched; a trace without steps counts as one."""
    steps: Sequence[Breakdown] = rank.steps or (rank.total,)
    per_step = 1 / (1000 * len(steps))
    span_us = sum(step.span_us for step in steps)
    exposed_us = sum(step.exposed_comm_us for step in steps)
    on_gpu = rank.total.num_kernels > 0
    totals = {"ops": rank.per_step.ops, "kernels": rank.per_step.kernels, "modules": rank.per_step.modules}[
        kind
    ]
    names = {each.name: _name_time(each, kind, on_gpu, len(steps)) for each in totals}
    if not on_gpu and kind != "kernels":
        names |= _cpu_collectives(rank, per_step)
    names |= _outside(names, rank, kind, per_step)
    other_ms = sum(step.other_steps_us for step in steps) * per_step
    if other_ms > 0:
        names[OTHER_STEPS] = TimePerStep("other_steps", 0.0, other_ms, 0.0, is_named=False)
    return RankTimes(
        rank=rank.rank,
        step_ms=span_us * per_step,
        work_ms=(span_us - exposed_us) * per_step,
        idle_ms=sum(step.idle_us for step in steps) * per_step,
        num_steps=len(rank.steps),
        names=_exposed(names, rank, per_step),
    )


def _name_time(total: NameTotal, kind: Kind, on_gpu: bool, num_steps: int) -> TimePerStep:
    """Time on the device; where the CPU is the device, on the CPU."""
    per_step = 1 / (1000 * num_steps)
    own_us = total.device_us if on_gpu or kind == "kernels" else total.host_us
    comm_us, copy_us = (total.comm_us, total.memcpy_us) if on_gpu else (0.0, 0.0)
    what = _main_class(own_us, comm_us, copy_us)
    if kind == "kernels":
        what = _CLASSES.get(total.kind, "compute")
        comm_us, copy_us = (own_us if what == each else 0.0 for each in ("transfer", "copy"))
    elif kind == "ops" and host_kind("cpu_op", total.name) is HostKind.COMM_CALL:
        what = "transfer"
    return TimePerStep(
        kind=what,
        calls=total.count / num_steps,
        self_ms=own_us * per_step,
        host_ms=total.host_us * per_step,
        comm_ms=comm_us * per_step,
        copy_ms=copy_us * per_step,
    )


def _main_class(own_us: float, comm_us: float, copy_us: float) -> str:
    most_us = max(own_us - comm_us - copy_us, comm_us, copy_us)
    return "transfer" if comm_us == most_us > 0 else "copy" if copy_us == most_us > 0 else "compute"


def _cpu_collectives(rank: RankTrace, per_step: float) -> dict[str, TimePerStep]:
    """Times of collectives on the CPU, whose threads of their own no operator or module shows."""
    groups = rank.per_step.groups
    several = len(groups) > 1
    return {
        f"collectives of group {each.group}" if several else "collectives": TimePerStep(
            kind="transfer",
            calls=0.0,
            self_ms=each.comm_us * per_step,
            host_ms=0.0,
            comm_ms=each.comm_us * per_step,
            is_named=False,
        )
        for each in groups
    }


def _outside(
    names: Mapping[str, TimePerStep], rank: RankTrace, kind: Kind, per_step: float
) -> dict[str, TimePerStep]:
    """The device's work that no name has: launched by hand, by a CUDA graph, or while no module ran."""
    found = {}
    for what, title in _OUTSIDE[kind].items():
        # Exact to the nanosecond: only rounding is cut off.
        left_ms = round(_of_device(rank, what) * per_step - _of_names(names, what), 6)
        if left_ms > 0:
            comm_ms, copy_ms = (left_ms if what == each else 0.0 for each in ("transfer", "copy"))
            found[title] = TimePerStep(what, 0.0, left_ms, 0.0, comm_ms, copy_ms, is_named=False)
    return found


def _of_device(rank: RankTrace, what: str) -> float:
    """All of the steps' time of this class, in µs."""
    names = rank.per_step
    if rank.total.num_kernels > 0:
        return sum(each.device_us for each in names.kernels if _CLASSES.get(each.kind) == what)
    if what == "transfer":
        return sum(each.comm_us for each in names.groups)
    return sum(each.host_us for each in names.ops) if what == "compute" else 0.0


def _of_names(names: Mapping[str, TimePerStep], what: str) -> float:
    """The names' time of this class, in ms."""
    if what == "compute":
        return sum(each.self_ms - each.comm_ms - each.copy_ms for each in names.values())
    return sum(each.comm_ms if what == "transfer" else each.copy_ms for each in names.values())


def _exposed(names: Mapping[str, TimePerStep], rank: RankTrace, per_step: float) -> dict[str, TimePerStep]:
    """Communication cut to its exposed part; that is known for the rank, and shared out by time."""
    comm_ms = sum(each.comm_ms for each in names.values())
    steps: Sequence[Breakdown] = rank.steps or (rank.total,)
    exposed_ms = sum(step.exposed_comm_us for step in steps) * per_step
    wait_ms = sum(step.exposed_wait_us for step in steps) * per_step
    if comm_ms == 0:
        return dict(names)
    return {
        name: replace(
            each,
            self_ms=each.self_ms - each.comm_ms * (1 - exposed_ms / comm_ms),
            comm_ms=each.comm_ms * exposed_ms / comm_ms,
            wait_ms=each.comm_ms * wait_ms / comm_ms,
        )
        if each.comm_ms
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
    shown = next(each.names[names[0]] for each in (slowest, *ranks, other) if each and names[0] in each.names)
    return {
        "name": title,
        "named": shown.is_named,
        "class": shown.kind if title is not None else "compute",
        "calls": sum(each.calls for each in own) or None,
        "self_ms": self_ms,
        "wait_ms": sum(each.wait_ms for each in own),
        "host_ms": sum(each.host_ms for each in own),
        "share_percent": 100 * self_ms / slowest.step_ms if slowest.step_ms else None,
        "by_rank_ms": [sum(_self_ms(rank, name) for name in names) for rank in ranks],
        "wait_by_rank_ms": [
            sum(rank.names[name].wait_ms for name in names if name in rank.names) for rank in ranks
        ],
        "against_ms": against_ms,
        "difference_ms": None if against_ms is None else self_ms - against_ms,
    }
