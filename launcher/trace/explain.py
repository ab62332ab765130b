"""Explains in a sentence or two where the time went that wasn't compute, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeVar

from gpurun.launcher.trace.advice import Kind, cause_named
from gpurun.launcher.trace.model import Breakdown, HostWhileIdle, IdleCauses, RankTrace, TraceReport
from gpurun.launcher.units import format_percent

MENTION_FROM = 0.05
"""Losses below this share of the time aren't mentioned."""

MENTION_NEXT_FROM = 0.20

CPU = "CPU"
"""How the device of a rank begins whose trace has no GPU work."""
Causes = TypeVar("Causes", IdleCauses, HostWhileIdle)
_OF_ONE_STRETCH = frozenset({"launch_delay_us", "gpu_span_us"})


@dataclass(frozen=True)
class Loss:
    """A cause, and its share of all ranks' time."""

    kind: Kind
    share: float

    @property
    def percent(self) -> str:
        return format_percent(100 * self.share)


def losses(report: TraceReport) -> list[Loss]:
    """Everything but compute, largest first. Shares are of the total time of `explained_stretches`."""
    stretches = explained_stretches(report)
    mean = mean_stretch(stretches) if stretches else None
    if mean is None or mean.span_us == 0:
        return []
    causes_us = mean.idle_by_cause_us
    parts_us: dict[Kind, float] = {
        "straggler": mean.exposed_wait_us + causes_us.comm_wait,
        "transfer": mean.exposed_transfer_us,
        "copies": mean.exposed_memcpy_us,
        "input": causes_us.data,
        "host": causes_us.host,
        "other_steps": mean.other_steps_us,
        "other": causes_us.other,
    }
    return sorted((Loss(kind, us / mean.span_us) for kind, us in parts_us.items()), key=lambda x: -x.share)


def explain(report: TraceReport) -> str:
    """One sentence about the largest loss, and another about the second if it is large too."""
    found = losses(report)
    if not found:
        return "Nothing to explain: the traces hold no work."
    if found[0].share < MENTION_FROM:
        return f"Compute fills {_time(report)}: no other cause takes more than {found[0].percent} of it."
    mentioned = [found[0], *(loss for loss in found[1:2] if loss.share >= MENTION_NEXT_FROM)]
    return " ".join(_sentence(report, loss) for loss in mentioned)


def _time(report: TraceReport) -> str:
    """The time that shares refer to: the mean step where the table has steps."""
    return "the steps' time" if steps_add_detail(report) else "the time"


def _sentence(report: TraceReport, loss: Loss) -> str:
    on_cpu = all(rank.device.startswith(CPU) for rank in report.ranks)
    cause = cause_named(loss.kind, on_cpu)
    spent = cause.spent or _waiting(report)
    advice = "" if loss.kind == "straggler" and not report.stragglers else f": {cause.advice}"
    return f"{loss.percent} of {_time(report)} is spent {spent}{advice}."


def _waiting(report: TraceReport) -> str:
    if not report.stragglers:
        return "waiting for collectives"
    last = report.stragglers[0]
    matched = sum(each.last_rank is not None for each in report.collectives)
    times = f"{last.last_arrivals} of {matched} times"
    return (
        f"waiting for other ranks, mostly for rank {last.rank}, which came last {times} "
        f"and cost the others {last.wait_caused_us / 1000:.1f} ms"
    )


def steps_add_detail(report: TraceReport) -> bool:
    """Whether steps add detail: there are several, or the only one doesn't cover its whole file."""
    return any(rank.steps and not _is_total(rank) for rank in report.ranks)


def _is_total(rank: RankTrace) -> bool:
    return len(rank.steps) == 1 and all(
        getattr(rank.steps[0], field.name) == getattr(rank.total, field.name) for field in fields(Breakdown)
    )


def explained_stretches(report: TraceReport) -> list[Breakdown]:
    """The time to explain: every step of every rank, or every rank's total where steps add no detail.

    A rank with several devices contributes each of them.
    """
    rows = [row for rank in report.ranks for row in rank.devices or (rank,)]
    if not steps_add_detail(report):
        return [row.total for row in rows]
    return [stretch for row in rows for stretch in row.steps or (row.total,)]


def mean_stretch(stretches: Sequence[Breakdown]) -> Breakdown:
    """The mean of each figure; `None` if any stretch lacks it."""
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
