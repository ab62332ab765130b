"""Why a variant is slower than another, and what even the fastest loses, as the traces show it.

Only what the figures show: a loss must be a relevant part of the step, and have grown by most of what the
slower variant takes longer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpurun.launcher.compare.figures.slowest import slowest_rank
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import RankFigures, VariantResult
from gpurun.launcher.trace.explain import MENTION_FROM, TRANSFER_OR_WAIT, Kind, cause_named
from gpurun.launcher.units import format_ms

SHOW_GROWTH_BELOW = 0.95
"""Up to this share of a loss its growth is shown too; above, the two are about the same."""
TRACED_AS_TIMED = 0.15
"""From this difference on, it is mentioned: recording makes short steps longer."""
MOST = 0.5
"""Share of a difference that a cause must cover to be named as the cause."""

EVERY = 0.9
"""Share of the loss that each rank must have for the sentence to say "every rank"."""
ALL_HOST = 0.9
"""Share of a rank's work from which on the CPU's own time is the work: there are hardly any operators."""

OWN: tuple[Kind, ...] = ("input", "copies", "host", "transfer")
"""What a rank loses by itself."""


@dataclass(frozen=True)
class Loss:
    """Time in which a rank doesn't compute, and why."""

    kind: Kind
    ranks: tuple[int, ...]
    """Those that lose it; of a wait, the one that the others wait for."""
    ms: float
    span_ms: float
    text: str
    more_ms: float | None = None
    """By how much it grew over the variant compared with: healthy steps lose some of it, too."""

    @property
    def is_wait(self) -> bool:
        return self.kind in ("split", "straggler")

    def __str__(self) -> str:
        text = f"{format_ms(self.ms)} of {format_ms(self.span_ms)} ms"
        if self.more_ms is not None and self.more_ms < SHOW_GROWTH_BELOW * self.ms:
            text += f" ({format_ms(self.more_ms)} more)"
        return self.text.format(ms=text)


def why_slower(slower: VariantResult, faster: VariantResult) -> str | None:
    """`rank 1 waits 11.2 of 60.1 ms for rank 0's larger batch`; `None` where the figures don't say."""
    loss = main_cause(slower, faster)
    return None if loss is None else loss_text(loss, slower)


def loss_text(loss: Loss, variant: VariantResult) -> str:
    """The loss; where traced steps are longer than timed ones, this is added."""
    return f"{loss}{traced_and_timed(loss.span_ms, variant)}"


def on_cpu(ranks: Sequence[RankFigures]) -> bool:
    """Whether the CPU itself is what computes."""
    return all(rank.device.startswith("cpu") for rank in ranks)


def traced_and_timed(span_ms: float, variant: VariantResult) -> str:
    """That the steps of the trace aren't as long as the timed ones, where they differ much."""
    if variant.step_ms is None or abs(span_ms / variant.step_ms.median - 1) <= TRACED_AS_TIMED:
        return ""
    return f" (in traced steps; timed ones take {format_ms(variant.step_ms.median)} ms)"


def main_cause(slower: VariantResult, faster: VariantResult) -> Loss | None:
    """The loss that grew most, if it explains most of the difference; `None` where the figures don't say."""
    if slower.step_ms is None or faster.step_ms is None or slower.global_batch != faster.global_batch:
        return None
    longer_ms = slower.step_ms.median - faster.step_ms.median
    before = losses(faster.ranks)
    if not before or longer_ms <= 0:
        return None
    grown = [(loss.ms - _as_much(loss, before), loss) for loss in losses(slower.ranks)]
    more_ms, most = max(grown, key=lambda item: item[0], default=(0.0, None))
    if most is None or more_ms < max(MOST * longer_ms, MENTION_FROM * most.span_ms):
        return None
    return replace(most, more_ms=more_ms)


def _as_much(loss: Loss, before: Iterable[Loss]) -> float:
    """How much of the like was lost before, in ms; to wait is to wait, for whatever reason."""
    return sum(other.ms for other in before if other.kind == loss.kind or (other.is_wait and loss.is_wait))


def losses(ranks: Sequence[RankFigures]) -> list[Loss]:
    """What the trace of every rank shows; empty where one has no figures."""
    slowest = slowest_rank(ranks)
    traced = [rank for rank in ranks if rank.span_ms is not None]
    if slowest is None or slowest.span_ms is None:
        return []
    found = [_own_loss(kind, slowest, ranks) for kind in OWN]
    if len(traced) == len(ranks) > 1:
        found.append(_wait(traced))
    return found


def _own_loss(kind: Kind, slowest: RankFigures, ranks: Sequence[RankFigures]) -> Loss:
    """Of the rank that works longest: what it loses, the step loses."""
    ms = _part_ms(slowest, kind)
    traced = [rank for rank in ranks if rank.span_ms is not None]
    alike = tuple(rank.rank for rank in traced if _part_ms(rank, kind) >= MOST * ms)
    is_every = len(traced) == len(ranks) > 1 and all(_part_ms(rank, kind) >= EVERY * ms for rank in traced)
    who = "every rank" if is_every else f"rank {slowest.rank}"
    spent = cause_named(kind, on_cpu(ranks)).spent
    if kind == "transfer" and slowest.wait_ms is None:
        spent = TRANSFER_OR_WAIT
    return Loss(kind, alike, ms, slowest.span_ms or 0.0, f"{who} spends {{ms}} {spent}")


def _part_ms(rank: RankFigures, kind: Kind) -> float:
    parts = {
        "input": rank.input_ms,
        "copies": rank.exposed_memcpy_ms,
        "host": rank.host_ms,
        "transfer": rank.exposed_transfer_ms,
    }
    return parts[kind] or 0.0


def _wait(ranks: Sequence[RankFigures]) -> Loss:
    """The longest wait of a rank, as far as another one's longer computing explains it.

    One without samples only ever waits, and is meant to.
    """
    busy = [rank for rank in ranks if rank.local_batch != 0] or ranks
    waiting = max(busy, key=lambda rank: rank.exposed_wait_ms or 0.0)
    cause = max(ranks, key=_work_ms)
    wait_ms = waiting.exposed_wait_ms or 0.0
    if _work_ms(cause) - _work_ms(waiting) < MOST * wait_ms:
        wait_ms = 0.0  # it waits, but not because some rank has more to do
    if any(_more_ms(kind, cause, waiting) >= MOST * wait_ms for kind in ("input", "copies", "host")):
        wait_ms = 0.0  # that rank isn't slow at computing: what it loses itself says why it is late
    kind: Kind = "split" if _samples_ratio(cause, waiting) > 1 else "straggler"
    text = f"rank {waiting.rank} waits {{ms}} for rank {cause.rank}{_reason(cause, waiting)}"
    return Loss(kind, (cause.rank,), wait_ms, waiting.span_ms or 0.0, text)


def _more_ms(kind: Kind, cause: RankFigures, waiting: RankFigures) -> float:
    """What the cause loses more than its samples explain; nothing where that is all that ranks do."""
    if kind == "host" and all(_part_ms(rank, kind) >= ALL_HOST * _work_ms(rank) for rank in (cause, waiting)):
        return 0.0
    samples = max(1.0, _samples_ratio(cause, waiting))
    return _part_ms(cause, kind) - samples * _part_ms(waiting, kind)


def _reason(cause: RankFigures, waiting: RankFigures) -> str:
    if cause.local_batch is None:
        return ", which takes longer"
    ratio = _samples_ratio(cause, waiting)
    if ratio > 1:
        return "'s larger batch"
    return f", which takes longer for {'as many' if ratio == 1 else 'fewer'} samples"


def _samples_ratio(cause: RankFigures, waiting: RankFigures) -> float:
    """1 where the samples of ranks aren't known."""
    return (cause.local_batch or 1) / (waiting.local_batch or 1)


def _work_ms(rank: RankFigures) -> float:
    """The rank's step without what communication adds to it."""
    return (rank.span_ms or 0.0) - (rank.exposed_comm_ms.trace or 0.0)


LARGE_FROM = 0.20
"""From this share of the step on, it is part of the summary."""


def remaining_loss(fastest: VariantResult, alone: bool = False) -> str | None:
    """`Even in ddp 32/32 every rank spends 24.1 of 60.2 ms waiting for data: …`; `None` if all are small.

    Args:
        fastest: the variant that leads.
        alone: whether there is no other.
    """
    found = largest_loss(fastest.ranks)
    if found is None or found.ms < LARGE_FROM * found.span_ms:
        return None
    where = "In" if alone else "Even in"
    return f"{where} {variant_label(fastest)} {loss_text(found, fastest)}: {advice(found.kind, fastest)}."


def advice(kind: Kind, variant: VariantResult) -> str:
    """What to do about a loss, other than what the variant does already."""
    return cause_named(kind, on_cpu(variant.ranks), variant.split_name == "balanced").advice


def largest_loss(ranks: tuple[RankFigures, ...]) -> Loss | None:
    """What takes most of the step that isn't compute; `None` without traces."""
    return max(losses(ranks), key=lambda loss: loss.ms, default=None)
