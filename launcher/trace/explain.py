"""In words for a person: where the time went that wasn't compute, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.trace.model import Breakdown, RankTrace, TraceReport

MENTION_FROM = 0.05
"""A loss below this share of the time isn't worth a person's time."""

MENTION_NEXT_FROM = 0.20

_ADVICE = {
    "transfer": "moving data between ranks: overlap it with compute (other bucket sizes), or move less",
    "copies": "copies that nothing overlaps: pin the memory and copy with non_blocking=True",
    "data": "waiting for input: more DataLoader workers, or less work per sample",
    "host": "waiting for the CPU to launch work: larger batches, torch.compile or CUDA graphs",
    "other": "gaps between work that was already launched: look for synchronisation and dependencies",
}


@dataclass(frozen=True)
class Loss:
    """A cause, and its share of all ranks' time."""

    cause: str
    share: float


def losses(report: TraceReport) -> list[Loss]:
    """What isn't compute, largest first. Shares are of the steps' time, summed over ranks."""
    stretches = [stretch for rank in report.ranks for stretch in _stretches(rank)]
    span_us = sum(each.span_us for each in stretches)
    if span_us == 0:
        return []
    sums_us = {
        "wait": sum(each.exposed_wait_us + each.idle_by_cause_us.comm_wait for each in stretches),
        "transfer": sum(each.exposed_transfer_us for each in stretches),
        "copies": sum(each.exposed_memcpy_us for each in stretches),
        "data": sum(each.idle_by_cause_us.data for each in stretches),
        "host": sum(each.idle_by_cause_us.host for each in stretches),
        "other": sum(each.idle_by_cause_us.other for each in stretches),
    }
    return sorted((Loss(cause, us / span_us) for cause, us in sums_us.items()), key=lambda loss: -loss.share)


def _stretches(rank: RankTrace) -> Sequence[Breakdown]:
    return rank.steps or (rank.total,)


def explain(report: TraceReport) -> str:
    """A sentence about the largest loss, and one about the next if that is large too."""
    found = losses(report)
    if not found:
        return "Nothing to explain: the traces hold no work."
    if found[0].share < MENTION_FROM:
        return f"Compute fills the time: no other cause takes more than {found[0].share:.0%} of it."
    told = [found[0], *(loss for loss in found[1:2] if loss.share >= MENTION_NEXT_FROM)]
    return " ".join(_sentence(report, loss) for loss in told)


def _sentence(report: TraceReport, loss: Loss) -> str:
    if loss.cause == "wait":
        return _explain_wait(report, loss.share)
    return f"{loss.share:.0%} of the time goes into {_ADVICE[loss.cause]}."


def _explain_wait(report: TraceReport, share: float) -> str:
    if not report.stragglers:
        return f"{share:.0%} of the time goes into waiting for collectives."
    last = report.stragglers[0]
    matched = sum(each.last_rank is not None for each in report.collectives)
    return (
        f"{share:.0%} of the time is waiting for other ranks, mostly for rank {last.rank}, which came last "
        f"{last.last_arrivals} of {matched} times and cost the others {last.wait_caused_us / 1000:.1f} ms: "
        "give it less work, or find out what slows it."
    )
