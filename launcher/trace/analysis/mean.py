"""The mean of several stretches: the row under a table of steps, and what the sentence below is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any, TypeVar

from gpurun.launcher.trace.model import Breakdown, HostWhileIdle, IdleCauses, RankTrace, TraceReport

Causes = TypeVar("Causes", IdleCauses, HostWhileIdle)
_OF_ONE_STRETCH = frozenset({"launch_delay_us", "gpu_span_us"})


def tells_steps(report: TraceReport) -> bool:
    """Whether steps say more than the totals: there are several, or the one isn't all of its file."""
    return any(rank.steps and not _is_total(rank) for rank in report.ranks)


def _is_total(rank: RankTrace) -> bool:
    return len(rank.steps) == 1 and all(
        getattr(rank.steps[0], field.name) == getattr(rank.total, field.name) for field in fields(Breakdown)
    )


def stretches_told(report: TraceReport) -> list[Breakdown]:
    """What is to be explained: every step of every rank, or, where steps say no more, every rank's total.

    Where a rank has several devices, that of each device.
    """
    rows = [row for rank in report.ranks for row in rank.devices or (rank,)]
    if not tells_steps(report):
        return [row.total for row in rows]
    return [stretch for row in rows for stretch in row.steps or (row.total,)]


def mean_stretch(stretches: Sequence[Breakdown]) -> Breakdown:
    """The mean of each figure; `None` where some stretch has none."""
    means: dict[str, Any] = {}
    for field in fields(Breakdown):
        values = [getattr(each, field.name) for each in stretches]
        if None in values or field.name in _OF_ONE_STRETCH:
            means[field.name] = None
        elif isinstance(values[0], IdleCauses | HostWhileIdle):
            means[field.name] = _mean_causes(values)
        else:
            means[field.name] = fmean(values)
    means["num_kernels"] = round(means["num_kernels"])
    return Breakdown(**means)


def _mean_causes(causes: Sequence[Causes]) -> Causes:
    names = [field.name for field in fields(causes[0])]
    return type(causes[0])(**{name: fmean(getattr(each, name) for each in causes) for name in names})
