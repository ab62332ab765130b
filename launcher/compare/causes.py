"""Which rank others wait for, why a variant is slower than another, and what even the fastest loses.

Only what traces and figures show: a loss must be a relevant part of the step, and have grown by most of what
the slower variant takes longer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gpurun.launcher.compare.figures.host_time import blocked_ms, is_python_known, on_cpu, python_ms
from gpurun.launcher.compare.figures.ranks import RankFigures, slowest_rank
from gpurun.launcher.compare.interference import interference_of
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.findings.finding import Finding, finding
from gpurun.launcher.stats.busy import QUEUE_PERCENT
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.trace.explain import CODES, MENTION_FROM, TRANSFER_OR_WAIT, Kind, cause_named, in_keys
from gpurun.launcher.units import format_ms, plural

SHOW_GROWTH_BELOW = 0.95
"""Up to this share of a loss its growth is shown too; above, the two are about the same."""
TRACED_AS_TIMED = 0.15
"""From this difference on, it is mentioned: recording makes short steps longer."""
MOST = 0.5
"""Share of a difference that a cause must cover to be named as the cause."""

EVERY = 0.9
"""Share of the slowest rank's loss that each must have for the sentence to say "every rank", and what the one
that loses least loses."""
ALL_HOST = 0.9
"""Share of a rank's work from which on the CPU's own time is the work: there are hardly any operators."""

OWN: tuple[Kind, ...] = ("input", "copies", "host", "transfer")
"""Losses of a rank by itself."""


@dataclass(frozen=True)
class Loss:
    """Time in which a rank doesn't compute, and why."""

    kind: Kind
    ranks: tuple[int, ...]
    """Those that lose it; of a wait for a rank, the one that the others wait for."""
    ms: float
    span_ms: float
    text: str
    more_ms: float | None = None
    """The growth over the variant compared with: healthy steps lose some of it, too."""
    traced_ms: float | None = None
    """A traced step, where `ms` and `span_ms` are those of the median timed one, which is far shorter."""

    @property
    def share(self) -> float:
        """Its share of the step."""
        return self.ms / self.span_ms if self.span_ms else 0.0

    @property
    def is_wait(self) -> bool:
        return self.kind in ("split", "straggler", "bubble")

    def __str__(self) -> str:
        text = f"{format_ms(self.ms)} of {format_ms(self.span_ms)} ms"
        if self.more_ms is not None and self.more_ms < SHOW_GROWTH_BELOW * self.ms:
            text += f" ({format_ms(self.more_ms)} ms more than in the fastest)"
        return self.text.format(ms=text)


def why_slower(slower: VariantResult, faster: VariantResult) -> Loss | None:
    """`rank 1 waits 11.2 of 60.1 ms for rank 0's larger batch`; `None` where the figures don't say."""
    return main_cause(slower, faster) or grown_compute(slower, faster)


def cause(loss: Loss, variant: VariantResult, weight: float | None = None) -> Finding:
    """The loss as a finding about the variant; by default it concerns its share of the step."""
    return finding(
        CODES[loss.kind],
        variant.id,
        loss.ranks,
        weight=loss.share if weight is None else weight,
        cause=_cause_text(loss, variant),
        lost_ms=loss.ms,
        span_ms=loss.span_ms,
        more_ms=loss.more_ms,
    )


def causes_of(variant: VariantResult, fastest: VariantResult | None) -> tuple[Finding, ...]:
    """Why a variant is slower than the fastest, else what it loses most by; and what to do about it."""
    other = fastest if fastest is not None and fastest.id != variant.id else None
    loss = (why_slower(variant, other) if other else None) or largest_loss(variant.ranks)
    if loss is None or loss.ms < MENTION_FROM * loss.span_ms:
        return ()
    return (cause(loss, variant), *_next_step(loss, variant))


def _next_step(loss: Loss, variant: VariantResult, is_said: bool = True) -> tuple[Finding, ...]:
    """What to do about a loss; nothing where timed steps may not have it."""
    if variant.step_ms is not None and is_far_from_timed(loss.span_ms, variant.step_ms.estimate):
        return ()
    about = {
        "advice": advice(loss.kind, variant),
        "where": variant_label(variant),
        "found": None if is_said else str(loss),
        "of": _cause_text(loss, variant),
    }
    return (finding("act-on-cause", variant.id, loss.ranks, weight=loss.share, **about),)


def _cause_text(loss: Loss, variant: VariantResult) -> str:
    return f"in {variant_label(variant)} {loss_text(loss, variant)}"


def loss_text(loss: Loss, variant: VariantResult) -> str:
    """The loss, and which steps it was seen in: in the parentheses of a figure that ends it, if one does."""
    text, steps = str(loss), traced_steps(loss.span_ms, variant)
    if loss.traced_ms is not None:
        steps = f"the median timed step; a traced one takes {format_ms(loss.traced_ms)} ms"
    return f"{text[:-1]}; {steps})" if text.endswith(")") else f"{text} ({steps})"


def traced_steps(span_ms: float, variant: VariantResult) -> str:
    """`in the 8 quietest of 16 traced steps`, with the timed step where it is far from the traced one.

    How much was traced, and whether other load affected the variant, says how far it is to be trusted.
    """
    steps, more = variant.traced_steps, ""
    if variant.step_ms is not None and is_far_from_timed(span_ms, variant.step_ms.estimate):
        more = f"; timed ones take {format_ms(variant.step_ms.estimate)} ms"
    if interference_of(variant):
        more += "; under other load"
    if steps is not None and steps.recorded == 1:
        return f"in the only traced step{more}"
    if steps is None or steps.used == steps.recorded:
        return f"in traced steps{more}"
    quietest = "quietest" if steps.used == 1 else f"{steps.used} quietest"
    return f"in the {quietest} of {steps.recorded} traced steps{more}"


def is_far_from_timed(span_ms: float, step_ms: float) -> bool:
    """Whether the steps of the trace are much longer or shorter than the timed ones."""
    return abs(span_ms / step_ms - 1) > TRACED_AS_TIMED


def main_cause(slower: VariantResult, faster: VariantResult) -> Loss | None:
    """The loss that grew most, if it explains most of the difference; `None` where the figures don't say."""
    if slower.step_ms is None or faster.step_ms is None or slower.global_batch != faster.global_batch:
        return None
    longer_ms = slower.step_ms.estimate - faster.step_ms.estimate
    before = losses(faster.ranks)
    if not before or longer_ms <= 0:
        return None
    grown = [(loss.ms - _as_much(loss, before), loss) for loss in losses(slower.ranks)]
    more_ms, most = max(grown, key=lambda item: item[0], default=(0.0, None))
    if most is None or more_ms < max(MOST * longer_ms, MENTION_FROM * most.span_ms):
        return None
    return replace(most, more_ms=more_ms)


def grown_compute(slower: VariantResult, faster: VariantResult) -> Loss | None:
    """Compute itself, if it grew by most of the difference, with what the GPU shows of the reason."""
    if slower.step_ms is None or faster.step_ms is None or slower.global_batch != faster.global_batch:
        return None
    one, other = slowest_rank(slower.ranks), slowest_rank(faster.ranks)
    if one is None or other is None or one.compute_ms is None or other.compute_ms is None:
        return None
    if any(rank.span_ms is None for rank in (*slower.ranks, *faster.ranks)):
        return None  # another rank may be the one that computes for longer
    more_ms = one.compute_ms - other.compute_ms
    span_ms = one.span_ms or 0.0
    longer_ms = slower.step_ms.estimate - faster.step_ms.estimate
    if longer_ms <= 0 or more_ms < max(MOST * longer_ms, MENTION_FROM * span_ms):
        return None
    spent = cause_named("compute", on_cpu(slower.ranks)).spent
    # Operators of replicas in one process aren't compared with those of ranks: on a CPU their time includes
    # waits for the interpreter's lock and for cores that replicas share, and `dp` has operators of its own
    # (scatter, replicate, gather). What grew would be the strategy, under the name of an operator.
    is_alike = STRATEGIES[slower.strategy].has_replicas == STRATEGIES[faster.strategy].has_replicas
    which = grown_operators(one, other, more_ms) if is_alike else ""
    text = f"rank {one.rank} spends {{ms}} {spent}{which}{_why_compute_grew(one, other)}"
    return Loss("compute", (one.rank,), one.compute_ms, span_ms, text, more_ms)


NAMED_OPERATORS = 2
"""That are named at the most, those that grew most."""
NAMED_FROM = 0.2
"""Share of the growth of compute from which on an operator is named."""


def grown_operators(one: RankFigures, other: RankFigures, more_ms: float) -> str:
    """`, mostly in aten::mm (+8.12 ms a step)`: what grew by a relevant part of `more_ms`.

    Only the longest operators are known. One that the other rank's list lacks took at most as long there as
    the last of it.
    """
    before = other.operators_ms
    least_ms = min(before.values(), default=0.0)
    grown = {name: ms - before.get(name, least_ms) for name, ms in one.operators_ms.items() if before}
    most = sorted(grown, key=lambda name: -grown[name])[:NAMED_OPERATORS]
    named = [name for name in most if grown[name] >= NAMED_FROM * more_ms]
    parts = [f"{name} (+{format_ms(grown[name])} ms a step)" for name in named]
    return f", mostly in {' and '.join(parts)}" if parts else ""


LOWER_CLOCK = 0.95
"""Below this share of the other's clock, it is mentioned."""


def _why_compute_grew(one: RankFigures, other: RankFigures) -> str:
    reasons = []
    if one.sm_clock_mhz and other.sm_clock_mhz and one.sm_clock_mhz < LOWER_CLOCK * other.sm_clock_mhz:
        reasons.append(f"at {one.sm_clock_mhz:.0f} instead of {other.sm_clock_mhz:.0f} MHz")
    if one.alloc_retries > other.alloc_retries:
        reasons.append(
            f"while memory was nearly full and torch released its cache {plural(one.alloc_retries, 'time')}"
        )
    if (one.local_batch or 0) > (other.local_batch or 0):
        reasons.append(f"{one.local_batch} samples instead of {other.local_batch}")
    return f", {', '.join(reasons)}" if reasons else ""


def _as_much(loss: Loss, before: Iterable[Loss]) -> float:
    """How much of the like was lost before, in ms; to wait is to wait, for whatever reason."""
    return sum(other.ms for other in before if other.kind == loss.kind or (other.is_wait and loss.is_wait))


def losses(ranks: Sequence[RankFigures]) -> list[Loss]:
    """The losses that the trace of every rank shows; empty where one has no figures."""
    slowest = slowest_rank(ranks)
    traced = [rank for rank in ranks if rank.span_ms is not None]
    if slowest is None or slowest.span_ms is None:
        return []
    found = [_own_loss(kind, slowest, ranks) for kind in OWN]
    if len(traced) == len(ranks) > 1:
        wait, bubble = _wait(traced), _bubble(traced)
        found.append(bubble if bubble is not None and not wait.ms else wait)
    return [*found, *([_own_loss("blocked", slowest, ranks)] if len(traced) == len(ranks) else [])]


def _own_loss(kind: Kind, slowest: RankFigures, ranks: Sequence[RankFigures]) -> Loss:
    """The loss of the rank that works longest: what it loses, the step loses.

    Where all lose about as much, what each loses at least; always so where they are blocked: if one is
    blocked for longer, the others wait for it.
    """
    ms = _lost_ms(slowest, kind)
    traced = [rank for rank in ranks if rank.span_ms is not None]
    alike = tuple(rank.rank for rank in traced if _lost_ms(rank, kind) >= MOST * ms)
    least = min(traced, key=lambda rank: _lost_ms(rank, kind))
    is_alike = kind == "blocked" or _lost_ms(least, kind) >= EVERY * ms
    is_every = len(traced) == len(ranks) > 1 and is_alike
    shown = least if is_every else slowest
    is_equal = len({format_ms(_lost_ms(rank, kind)) for rank in traced}) == 1
    who = (
        f"every rank spends {'' if is_equal else 'at least '}" if is_every else f"rank {slowest.rank} spends "
    )
    spent = cause_named(kind, on_cpu(ranks), is_cpu_timed=is_python_known(slowest)).spent
    if kind == "transfer" and slowest.wait_ms is None:
        spent = TRANSFER_OR_WAIT
    span_ms, added_ms = shown.span_ms or 0.0, _added_ms(shown, kind)
    loss = Loss(kind, alike, _lost_ms(shown, kind), span_ms - added_ms, f"{who}{{ms}} {spent}")
    return replace(loss, traced_ms=span_ms) if added_ms else loss


def _lost_ms(rank: RankFigures, kind: Kind) -> float:
    """The loss in a step as it is timed."""
    return max(0.0, _part_ms(rank, kind) - _added_ms(rank, kind))


def _added_ms(rank: RankFigures, kind: Kind) -> float:
    """What recording adds to a GPU's wait for its host, where that is much: kernels take no longer."""
    if kind != "host" or on_cpu((rank,)) or rank.step_ms is None or rank.span_ms is None:
        return 0.0
    return max(0.0, rank.span_ms - rank.step_ms) if is_far_from_timed(rank.span_ms, rank.step_ms) else 0.0


def _part_ms(rank: RankFigures, kind: Kind) -> float:
    parts = {
        "input": rank.input_ms,
        "copies": rank.exposed_memcpy_ms,
        "host": python_ms(rank),
        "blocked": blocked_ms(rank),
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
    if _samples_ratio(cause, waiting) <= 1 and _queued_ms(cause) >= MOST * wait_ms:
        wait_ms = 0.0  # it waited for cores that other programs used
    split_ms = min(wait_ms, _work_ms(waiting) * max(0.0, _samples_ratio(cause, waiting) - 1))
    kind: Kind = "split" if split_ms > wait_ms - split_ms else "straggler"
    span_ms = waiting.span_ms or 0.0
    reason = _reason(cause, waiting, split_ms, wait_ms - split_ms, MENTION_FROM * span_ms)
    text = f"rank {waiting.rank} waits {{ms}} for rank {cause.rank}{reason}"
    return Loss(kind, (cause.rank,), wait_ms, span_ms, text)


def _bubble(ranks: Sequence[RankFigures]) -> Loss | None:
    """The wait of the stage with the largest bubble; `None` without a pipeline."""
    found = [(rank.bubble, rank) for rank in ranks if rank.bubble is not None]
    if not found:
        return None
    most, _ = max(found, key=lambda pair: pair[0].ms)
    own = [rank for bubble, rank in found if bubble.stage == most.stage]
    span_ms = fmean(rank.span_ms or 0.0 for rank in own)
    awaited = f"stage{'s' if len(most.awaited) > 1 else ''} {' and '.join(map(str, most.awaited))}"
    text = f"stage {most.stage} waits {{ms}} for {awaited} (pipeline bubble)"
    return Loss("bubble", tuple(rank.rank for rank in own), most.ms, span_ms, text)


def _more_ms(kind: Kind, cause: RankFigures, waiting: RankFigures) -> float:
    """The cause's loss beyond what its samples explain; nothing where that is all that ranks do."""
    if kind == "host" and all(_part_ms(rank, kind) >= ALL_HOST * _work_ms(rank) for rank in (cause, waiting)):
        return 0.0
    samples = max(1.0, _samples_ratio(cause, waiting))
    return _part_ms(cause, kind) - samples * _part_ms(waiting, kind)


def _reason(
    cause: RankFigures, waiting: RankFigures, split_ms: float, slow_ms: float, mention_ms: float
) -> str:
    """For which reason the other takes longer; for both with what the larger batch explains.

    Args:
        split_ms: what its samples explain, if each takes as long as on the rank that waits. That is an upper
            bound, since a part of a step is the same for any batch.
        slow_ms: the rest of the wait.
        mention_ms: a smaller part isn't mentioned.
    """
    if cause.local_batch is None:
        return ", which takes longer"
    ratio = _samples_ratio(cause, waiting)
    if ratio > 1 and split_ms > slow_ms:
        also = (
            f"; rank {cause.rank} is also slower per sample ({format_ms(slow_ms)} ms)"
            if slow_ms >= mention_ms
            else ""
        )
        return f"'s larger batch{also}"
    if ratio > 1:
        also = f" (its larger batch accounts for {format_ms(split_ms)} ms)" if split_ms >= mention_ms else ""
        return f", which is slower per sample{also}"
    return (
        ", which is slower on the same number of samples"
        if ratio == 1
        else f", although rank {cause.rank} has fewer samples"
    )


def _queued_ms(rank: RankFigures) -> float:
    """How long the rank waited for cores under other load, of its traced step; 0 where that is little."""
    percent = rank.queue_percent or 0.0
    return percent / 100 * (rank.span_ms or 0.0) if percent > QUEUE_PERCENT else 0.0


def _samples_ratio(cause: RankFigures, waiting: RankFigures) -> float:
    """1 where the samples of ranks aren't known."""
    return (cause.local_batch or 1) / (waiting.local_batch or 1)


def _work_ms(rank: RankFigures) -> float:
    """The rank's step without what communication adds to it."""
    return (rank.span_ms or 0.0) - (rank.exposed_comm_ms.trace or 0.0)


LARGE_FROM = 0.20
"""From this share of the step on, it is part of the summary."""


def remaining(fastest: VariantResult) -> tuple[Finding, ...]:
    """The largest loss of the fastest variant, if it is large, and the next thing to try."""
    found, where = largest_loss(fastest.ranks), variant_label(fastest)
    if found is None:
        return (finding("record-traces"),) if fastest.traced_steps is None else ()
    if found.share < MENTION_FROM:
        most = max(1, math.ceil(100 * found.share))
        return (finding("nothing-left", fastest.id, where=where, most=most),)
    causes = (cause(found, fastest),) if found.share >= LARGE_FROM else ()
    return (*causes, *_next_step(found, fastest, bool(causes)))


def advice(kind: Kind, variant: VariantResult) -> str:
    """The advice about a loss, other than what the variant does already."""
    if kind == "transfer":
        return STRATEGIES[variant.strategy].transfer_advice
    has_no_other_split = variant.split_name == "balanced" or variant.kind.runs_program
    slowest = slowest_rank(variant.ranks)
    is_cpu_timed = slowest is not None and is_python_known(slowest)
    found = cause_named(kind, on_cpu(variant.ranks), has_no_other_split, is_cpu_timed)
    return in_keys(found.advice, variant.kind.runs_program)


def largest_loss(ranks: tuple[RankFigures, ...]) -> Loss | None:
    """The loss that takes most of the step, apart from compute; `None` without traces.

    That ranks are blocked says least about why: it counts where nothing else is significant, and where what
    else they lose by themselves is far less.
    """
    found = sorted(losses(ranks), key=lambda loss: -loss.ms)
    blocked_ms = sum(loss.ms for loss in found if loss.kind == "blocked")
    known = (
        loss
        for loss in found
        if loss.kind != "blocked"
        and loss.ms >= max(MENTION_FROM * loss.span_ms, 0.0 if loss.is_wait else MOST * blocked_ms)
    )
    return next(known, next(iter(found), None))
