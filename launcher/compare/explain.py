"""Why a variant is slower than another: what its ranks lose, as the traces show it.

Nothing is said that the figures don't show: a loss must be a part of the step worth mentioning, and have
grown by most of what the slower variant takes longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.compare.model import RankFigures, VariantResult
from launcher.compare.slowest import slowest_rank
from launcher.units import format_ms

MENTION_FROM = 0.05
"""A loss below this share of the step isn't worth a person's time."""
MOST = 0.5
"""Share of a difference that a cause must cover to be named as the cause."""


@dataclass(frozen=True)
class Loss:
    """Time in which a rank doesn't compute, and why."""

    kind: str
    ms: float
    span_ms: float
    text: str


def why_slower(slower: VariantResult, faster: VariantResult) -> str | None:
    """`rank 1 waits 11.2 of 60.1 ms for rank 0's larger batch`; `None` where the figures don't say."""
    if slower.step_ms is None or faster.step_ms is None or slower.global_batch != faster.global_batch:
        return None
    longer_ms = slower.step_ms.median - faster.step_ms.median
    before_ms = {loss.kind: loss.ms for loss in losses(faster)}
    if not before_ms or longer_ms <= 0:
        return None
    grown = [(loss.ms - before_ms.get(loss.kind, 0.0), loss) for loss in losses(slower)]
    told = [
        (more_ms, loss)
        for more_ms, loss in grown
        if loss.ms >= MENTION_FROM * loss.span_ms and more_ms >= MOST * longer_ms
    ]
    if not told:
        return None
    loss = max(told, key=lambda item: item[0])[1]
    return loss.text.format(ms=f"{format_ms(loss.ms)} of {format_ms(loss.span_ms)} ms")


def losses(result: VariantResult) -> list[Loss]:
    """What the trace of every rank shows; empty where one has no figures."""
    slowest = slowest_rank(result.ranks)
    traced = [rank for rank in result.ranks if rank.span_ms is not None]
    if slowest is None or slowest.span_ms is None:
        return []
    found = list(_own_losses(slowest, slowest.span_ms))
    if len(traced) == len(result.ranks) > 1:
        found.append(_wait(traced))
    return found


def _own_losses(rank: RankFigures, span_ms: float) -> Iterable[Loss]:
    """Of the rank that works longest: what it loses, the step loses."""
    who = f"rank {rank.rank}"
    yield Loss("input", rank.input_ms or 0.0, span_ms, f"{who} waits {{ms}} for its data")
    text = f"{who} spends {{ms}} on copies that nothing overlaps"
    yield Loss("copies", rank.exposed_memcpy_ms or 0.0, span_ms, text)
    what = "communication" if rank.wait_ms is not None else "communication, or waiting for it,"
    text = f"{who} spends {{ms}} on {what} that nothing overlaps"
    yield Loss("transfer", rank.exposed_transfer_ms or 0.0, span_ms, text)


def _wait(ranks: list[RankFigures]) -> Loss:
    """The longest wait of a rank, as far as another one's longer work explains it."""
    waiting = max(ranks, key=lambda rank: rank.exposed_wait_ms or 0.0)
    cause = max(ranks, key=_work_ms)
    wait_ms = waiting.exposed_wait_ms or 0.0
    if _work_ms(cause) - _work_ms(waiting) < MOST * wait_ms:
        wait_ms = 0.0  # it waits, but not because some rank has more to do
    text = f"rank {waiting.rank} waits {{ms}} for rank {cause.rank}{_reason(cause, waiting)}"
    return Loss("wait", wait_ms, waiting.span_ms or 0.0, text)


def _reason(cause: RankFigures, waiting: RankFigures) -> str:
    if cause.local_batch > waiting.local_batch:
        return "'s larger batch"
    if cause.local_batch == waiting.local_batch:
        return ", which takes longer for as many samples"
    return ", which takes longer for fewer samples"


def _work_ms(rank: RankFigures) -> float:
    """The rank's step without what communication adds to it."""
    return (rank.span_ms or 0.0) - (rank.exposed_comm_ms.trace or 0.0)
