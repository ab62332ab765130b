"""The difference of two captures by class, kernel and operator, per step and rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpurun.launcher.trace.model import Breakdown, NameTotal, RankTrace, TraceReport


@dataclass(frozen=True)
class Change:
    """Time under one name in both captures, µs per step and rank."""

    name: str
    a_us: float
    b_us: float
    change_us: float
    percent: float | None
    """`None` for a name that only B has."""


@dataclass(frozen=True)
class TraceDiff:
    """The changes from A to B, per step and rank, sorted by growth, except in `classes`."""

    schema: int
    num_ranks: tuple[int, int]
    num_steps: tuple[int, int]
    """Steps, summed over ranks."""
    classes: tuple[Change, ...]
    """The span and the parts that add up to it, with idle time split by cause."""
    kernels: tuple[Change, ...]
    ops: tuple[Change, ...]
    """By time on the GPU; by time on the CPU where no GPU worked."""


_CLASSES: tuple[tuple[str, Callable[[Breakdown], float]], ...] = (
    ("span", lambda each: each.span_us),
    ("compute", lambda each: each.compute_us),
    ("exposed_transfer", lambda each: each.exposed_transfer_us),
    ("exposed_wait", lambda each: each.exposed_wait_us),
    ("exposed_memcpy", lambda each: each.exposed_memcpy_us),
    ("idle_host", lambda each: each.idle_by_cause_us.host),
    ("idle_comm_wait", lambda each: each.idle_by_cause_us.comm_wait),
    ("idle_data", lambda each: each.idle_by_cause_us.data),
    ("idle_other", lambda each: each.idle_by_cause_us.other),
)


def diff_traces(a: TraceReport, b: TraceReport) -> TraceDiff:
    """The changes from `a` to `b`."""
    on_gpu = any(row.device_us for report in (a, b) for rank in report.ranks for row in rank.ops)
    return TraceDiff(
        schema=1,
        num_ranks=(len(a.ranks), len(b.ranks)),
        num_steps=(_num_steps(a), _num_steps(b)),
        classes=tuple(_change(name, _mean(a, of), _mean(b, of)) for name, of in _CLASSES),
        kernels=_changes(a, b, lambda rank: rank.kernels, True),
        ops=_changes(a, b, lambda rank: rank.ops, on_gpu),
    )


def _num_steps(report: TraceReport) -> int:
    return sum(len(rank.steps) for rank in report.ranks)


def _mean(report: TraceReport, of: Callable[[Breakdown], float]) -> float:
    return sum(of(step) for rank in report.ranks for step in rank.steps) / max(_num_steps(report), 1)


def _changes(
    a: TraceReport, b: TraceReport, rows: Callable[[RankTrace], Iterable[NameTotal]], on_gpu: bool
) -> tuple[Change, ...]:
    before, after = _by_name(a, rows, on_gpu), _by_name(b, rows, on_gpu)
    names = sorted(before.keys() | after.keys())
    changes = [_change(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return tuple(sorted(changes, key=lambda change: -change.change_us))


def _by_name(
    report: TraceReport, rows: Callable[[RankTrace], Iterable[NameTotal]], on_gpu: bool
) -> dict[str, float]:
    steps = max(_num_steps(report), 1)
    sums: dict[str, float] = {}
    for rank in report.ranks:
        for row in rows(rank):
            time_us = row.device_us if on_gpu else row.host_us
            sums[row.name] = sums.get(row.name, 0.0) + time_us / steps
    return sums


def _change(name: str, a_us: float, b_us: float) -> Change:
    percent = 100 * (b_us / a_us - 1) if a_us else None
    return Change(name, a_us, b_us, b_us - a_us, percent)
