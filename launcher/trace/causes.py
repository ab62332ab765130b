"""Where a step's time goes that isn't compute: one engine, for runs and for anybody's traces."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from gpurun.launcher.findings.finding import Finding, finding
from gpurun.launcher.findings.finding_kinds import ADVICE
from gpurun.launcher.findings.trace_cases import (
    CHANGING,
    GAPS,
    NOT_RECORDED,
    OTHERS_WAIT,
    SHORTENED,
    WITHOUT,
)
from gpurun.launcher.trace.kineto.classify import ALLOCATING_CALLS, LOADING_CALLS
from gpurun.launcher.trace.model import CpuFacts, Remedy, Saving, StragglerReport
from gpurun.launcher.units import format_ms, listed, ranks_text

MENTION_FROM = 0.05
"""A loss of a smaller share of the time, or one that grew by less, is not mentioned: it may be chance."""
MOST = 0.5
"""Share of a difference that a cause must cover to be named as the cause."""
EVERY = 0.9
"""Share of the slowest rank's loss that each must have for the sentence to say "every rank"."""
MOSTLY = 0.9
"""A rank that comes last to fewer of its collectives isn't the only one that others wait for."""
ALL_HOST = 0.9
"""Share of a rank's work from which on the CPU's own time is the work: there are hardly any operators."""

Part = Literal[
    "input",
    "copies",
    "pinned_copies",
    "host",
    "one_off",
    "python",
    "outside",
    "unseen",
    "transfer",
    "model_transfer",
    "communication",
    "gaps",
    "other_steps",
    "unknown",
    "unread",
    "unrecorded",
    "blocked",
    "split",
    "straggler",
    "bubble",
    "compute",
]
PARTS: Mapping[Part, str] = {
    "input": "input-stall",
    "copies": "exposed-copies",
    "pinned_copies": "exposed-copies",
    "host": "host-bound",
    "one_off": "one-off-work",
    "python": "python-bound",
    "outside": "not-recorded",
    "unseen": "not-recorded",
    "transfer": "exposed-transfer",
    "model_transfer": "exposed-transfer",
    "communication": "not-recorded",
    "gaps": "gaps",
    "other_steps": "gaps",
    "unknown": "not-recorded",
    "unread": "not-recorded",
    "unrecorded": "not-recorded",
    "blocked": "blocked",
    "split": "waits-for-larger-batch",
    "straggler": "waits-for-slower-rank",
    "bubble": "pipeline-bubble",
    "compute": "computes-longer",
}
"""The kind of finding of each part of a step."""
OF_HOST: tuple[Part, ...] = ("host", "python", "outside", "unseen", "unread", "unrecorded")
LATE: tuple[Part, ...] = ("input", *OF_HOST)
"""Parts for which a rank comes late while the others wait."""
_WAITS: tuple[Part, ...] = ("split", "straggler", "bubble")
IN_STACKS = "in-stacks"
"""The case of time outside of operators where the trace has Python's stacks."""
_FUNCTIONS: Mapping[Part, str] = {"input": "data", "gaps": "other", **dict.fromkeys(OF_HOST, "host")}
"""Which of `CpuFacts.functions` a part passes in."""
EVENTS_LEFT_OUT, LOST = "left-out", "lost"
"""The cases of gaps in traces that were thinned, and in others that have operators or other launches."""
UNREAD_NPU = "unread-npu"
"""The case of a device of which no calls are read, either: they count with the operators around them."""
UNMATCHED = "unmatched"
"""The case of communication of which no rank is missing: notes say why its waiting isn't known."""
EVERY_RANK, OTHER_RANKS = "every rank", "other ranks"
PINNED, OF_DEVICE = "pinned memory", "the device's own memory"


@dataclass(frozen=True)
class RankTime:
    """One rank's mean step in ns; all of its time where its trace has no steps."""

    rank: int
    span_ns: float
    lost_ns: Mapping[Part, float]
    """Time that the rank loses by itself, by part."""
    comm_ns: float = 0.0
    """Communication that nothing overlaps, waiting included."""
    wait_ns: float = 0.0
    """The part of it until another rank came."""
    samples: int | None = None
    queued_ns: float = 0.0
    """Time in which it waited for cores that other programs used."""
    added_ns: float = 0.0
    """Time that recording added to the step, and to the wait of its GPU for the host."""

    @property
    def largest_share(self) -> float:
        """The largest share of the step that it loses to one thing, or waits."""
        return max(self.wait_ns, *self.lost_ns.values(), 0.0) / self.span_ns if self.span_ns else 0.0

    @property
    def work_ns(self) -> float:
        """The step without what communication adds to it."""
        return self.span_ns - self.comm_ns


@dataclass(frozen=True)
class StageWait:
    """How long a stage of a pipeline does nothing but wait for others in a step: the mean of its ranks."""

    stage: int
    awaited: tuple[int, ...]
    """The stages that it waits for."""
    ranks: tuple[int, ...]
    """The ranks of the stage."""
    wait_ns: float
    span_ns: float


@dataclass(frozen=True)
class MeasuredRanks:
    """The time of ranks."""

    ranks: tuple[RankTime, ...]
    """The ranks whose time is known."""
    slowest: int
    """The rank among them that works longest."""
    is_whole: bool = True
    """Whether they are all ranks of the job."""
    by_collectives: bool = False
    """Whether single collectives are known; else the rank with most work is the one waited for."""
    last: StragglerReport | None = None
    """The rank that came last to most collectives; `None` where none is to blame."""
    copied: str = PINNED
    """What most copies that need no pinning are of."""
    bubble: StageWait | None = None
    """The wait of the pipeline stage that waits most."""
    of: str = "its step"
    """The whole that the times are a part of, as a sentence calls it."""
    transfer_groups: str | None = None
    """The groups with most of the transfer, where there are several kinds of parallelism."""
    wait_groups: str | None = None
    """The groups with most of the waiting, where there are several kinds of parallelism."""


@dataclass(frozen=True)
class Cause:
    """Time in which a rank doesn't compute, and why."""

    part: Part
    ranks: tuple[int, ...]
    """The ranks that lose it; of a wait for a rank, the one that the others wait for."""
    lost_ns: float
    """Time that is lost to it."""
    span_ns: float
    figures: Mapping[str, Any]
    """Figures in the sentence, by name with units."""
    more_ns: float | None = None
    """The growth over the variant compared with: healthy steps lose some of it, too."""
    replayed_ns: float | None = None
    """Time by which the step would be shorter without it, by a replay; `None` where there is none."""

    @property
    def code(self) -> str:
        return PARTS[self.part]

    @property
    def saved_ns(self) -> float:
        """Time by which the step would be shorter without it: by a replay, else at most all that is lost."""
        return self.lost_ns if self.replayed_ns is None else self.replayed_ns

    @property
    def weight(self) -> float:
        """The share of the step that it would be shorter by."""
        return self.saved_ns / self.span_ns if self.span_ns else 0.0

    @property
    def share(self) -> float:
        """Share of the step that is lost to it."""
        return self.lost_ns / self.span_ns if self.span_ns else 0.0

    @property
    def is_wait(self) -> bool:
        return self.part in _WAITS

    def waits_for(self, ranks: Collection[int]) -> bool:
        """Whether it may be a wait for these ranks: none of them waits."""
        return self.figures["who"] not in {f"rank {rank}" for rank in ranks}

    @property
    def is_changing(self) -> bool:
        """Whether it is a wait for another rank in each step."""
        return self.figures.get("other") == CHANGING

    @property
    def saves_nothing(self) -> bool:
        """Whether, by a replay, a step would hardly be shorter without it: something else takes as long."""
        return self.replayed_ns is not None and self.weight < MENTION_FROM

    @property
    def has_advice(self) -> bool:
        """Whether something may be done about it that helps: not about waiting for no rank in particular."""
        is_unknown = self.part == "straggler" and not self.ranks and not self.is_changing
        is_recorded = self.part == "unread" and self.figures.get("has_stacks")
        is_known = not (is_unknown or is_recorded or self.figures.get("case") in (IN_STACKS, UNMATCHED))
        return is_known and not self.saves_nothing

    @property
    def text(self) -> str:
        """`rank 1 waits 19 % of its step (11.2 of 60.1 ms) for rank 0's larger batch`."""
        return cause_finding(self).text


def with_cpu(cause: Cause, rank: CpuFacts, ranks: Mapping[int, CpuFacts]) -> Cause:
    """With the function, operator or call that the CPU is in; of several ranks, where they have the same.

    Args:
        cause: what takes the time.
        rank: the facts of the rank that works longest.
        ranks: those of all ranks, by rank.
    """
    is_shared = len(cause.ranks) > 1
    alike = [facts for number, facts in ranks.items() if number in cause.ranks]
    shown = reduce(CpuFacts.common, alike) if is_shared and alike else rank
    figures = {**cause.figures, "function": shown.functions.get(_FUNCTIONS.get(cause.part, ""))}
    if cause.part == "outside" and rank.has_stacks:
        figures["case"] = IN_STACKS
    if cause.part == "host":
        figures["operator"] = None if is_shared else rank.computes_in
        figures["inside"] = None if figures["operator"] else shown.inside
        figures["held"] = (shown.function_holds and not figures["operator"]) or None
    if cause.part == "unrecorded":
        figures["inside"] = shown.inside
    if cause.part in ("host", "unread"):
        figures["has_stacks"] = rank.has_stacks or None
    if cause.part == "gaps" and shown.blocked_in:
        once_us = None if is_shared else shown.blocked_once_us
        once_ms = None if once_us is None else once_us / 1000
        figures |= {"case": "waiting", "call": shown.blocked_in, "call_ms": once_ms}
    return replace(cause, figures=figures)


SAVED_AS_LOST = 0.1
"""Difference, as a share of the step, up to which what is saved is about what is lost."""
SHOW_GROWTH_BELOW = 0.95
"""Up to this share of a loss its growth is shown too; above, the two are about the same."""


def cause_finding(
    cause: Cause,
    variant: str | None = None,
    weight: float | None = None,
    than: str = "the fastest",
    **figures: Any,
) -> Finding:
    """The cause as a finding; by default it concerns its share of the step.

    `than`: the name of what its growth is over.
    """
    is_part = cause.more_ns is not None and cause.more_ns < SHOW_GROWTH_BELOW * cause.lost_ns
    more = {"more_ms": (cause.more_ns or 0.0) / 1e6, "than": than}
    known = {
        "percent": 100 * cause.share,
        "lost_ms": cause.lost_ns / 1e6,
        "span_ms": cause.span_ns / 1e6,
        "whole_ms": cause.span_ns / 1e6,
        "saved_ms": _other_saved_ms(cause),
        **cause.figures,
        **(more if is_part or cause.part == "compute" else {}),
        **figures,
    }
    if known["saved_ms"] is not None:
        known.setdefault("without", WITHOUT[""])
        known["shortened"] = SHORTENED[known.get("of", "its step")]
    return finding(
        cause.code, variant, cause.ranks, weight=cause.weight if weight is None else weight, **known
    )


def _other_saved_ms(cause: Cause) -> float | None:
    """Milliseconds that a step would be shorter, where they differ from the lost time."""
    is_alike = abs(cause.saved_ns - cause.lost_ns) <= SAVED_AS_LOST * cause.span_ns
    return None if is_alike else max(cause.saved_ns, 0.0) / 1e6


def causes(measured: MeasuredRanks) -> list[Cause]:
    """Everything but compute, the largest first."""
    slowest = next(each for each in measured.ranks if each.rank == measured.slowest)
    lost = (item for each in measured.ranks for item in each.lost_ns.items())
    parts = dict.fromkeys(part for part, lost_ns in lost if lost_ns > 0 and part != "blocked")
    found = [_own(part, slowest, measured) for part in parts]
    if measured.is_whole:
        wait, bubble = _wait(measured), _bubble(measured)
        waits = (bubble, wait) if measured.by_collectives else (bubble if not wait.lost_ns else None, wait)
        found += [each for each in waits if each is not None]
        if any(each.lost_ns.get("blocked") for each in measured.ranks):
            found.append(_own("blocked", slowest, measured))
    return sorted(found, key=lambda cause: -cause.saved_ns)


_OF_REPLAY: Mapping[Part, str] = {
    "input": "input",
    "copies": "copies",
    "pinned_copies": "copies",
    "one_off": "one-off",
    "host": "host",
    "outside": "host",
    "unseen": "host",
    "unread": "host",
    "unrecorded": "host",
    "transfer": "transfer",
    "model_transfer": "transfer",
    "split": "rank",
    "straggler": "rank",
}
"""The part that a replay leaves out to find the cost of a part."""


def with_savings(found: Sequence[Cause], savings: Sequence[Saving], num_ranks: int) -> list[Cause]:
    """The causes with what a step would be shorter by without each, where that is known; the most first.

    That ranks wait for no rank in particular says least: another cause of half as much goes first. What
    several ranks do beyond the others may be another cause of about as much, which says why.
    """
    causes = [_with_saving(_for_several(cause, savings), savings, num_ranks) for cause in found]
    return sorted(causes, key=lambda each: -each.saved_ns * _says(each))


def _says(cause: Cause) -> float:
    if not cause.is_wait or len(cause.ranks) == 1:
        return 1.0
    return EVERY if cause.ranks or cause.is_changing else MOST


def _for_several(cause: Cause, savings: Sequence[Saving]) -> Cause:
    """A wait with the ranks that it is for, where no single one explains it, or with none in particular."""
    alone_us = [each.saved_us for each in savings if each.part == "rank" and each.rank in cause.ranks]
    if cause.part != "straggler" or not cause.lost_ns:
        return cause
    found = [each for each in savings if each.part in ("ranks", "changing") and cause.waits_for(each.ranks)]
    several = max(found, key=lambda each: each.saved_us, default=None)
    least_us = MENTION_FROM * cause.span_ns / 1000
    figures = {name: cause.figures.get(name) for name in ("who", "of", "groups")}
    if several and several.saved_us >= max(least_us, max(alone_us, default=0.0) / MOST):
        other = ranks_text(several.ranks) if several.ranks else CHANGING
        figures |= {"other": other, "without": WITHOUT["any"]}
        return replace(
            cause,
            ranks=several.ranks,
            figures=figures,
            replayed_ns=min(1000 * several.saved_us, cause.span_ns),
        )
    if alone_us and max(alone_us) < least_us <= cause.lost_ns / 1000:
        return replace(
            cause, ranks=(), figures={**figures, "other": OTHER_RANKS}, replayed_ns=1000 * max(alone_us)
        )
    return cause


def _with_saving(cause: Cause, savings: Sequence[Saving], num_ranks: int) -> Cause:
    """With what a step would be shorter by without the cause; of one rank's loss, with it like the others.

    On all ranks, where that saves far more: others may lose as much while they wait for this rank.
    Not for a loss that isn't worth a sentence by itself.
    """
    if cause.replayed_ns is not None:
        return cause
    part = _OF_REPLAY.get(cause.part)
    saved_us: dict[str, float] = {}
    for each in savings:
        if each.parallelism is None and (each.part != "rank" or each.rank in cause.ranks):
            saved_us[each.part] = max(each.saved_us, saved_us.get(each.part, 0.0))
    least_us = MENTION_FROM * cause.span_ns / 1000
    is_worth = cause.share >= MENTION_FROM or (part == "rank" and saved_us.get(part, 0.0) >= least_us)
    if not is_worth or (part == "rank" and not cause.lost_ns):
        part = None
    is_of_one = part not in (None, "transfer") and len(cause.ranks) == 1 < num_ranks
    if is_of_one and "rank" in saved_us and saved_us["rank"] >= MOST * saved_us.get(part or "", 0.0):
        # Like the others, the rank would lose less of everything, and not of this part alone.
        saved_us["rank"] = min(saved_us["rank"], saved_us.get(part or "", saved_us["rank"]))
        part = "rank"
    of_all = part in saved_us and part != "rank" and num_ranks > 1 and cause.figures.get("who") != EVERY_RANK
    without = WITHOUT["all"] if of_all else None
    if cause.is_wait and part in saved_us:
        without = WITHOUT["rank"].format(cause.ranks[0])
    figures = {**cause.figures, "without": without} if without else cause.figures
    replayed_ns = min(1000 * saved_us[part], cause.span_ns) if part in saved_us else None
    return replace(cause, replayed_ns=replayed_ns, figures=figures)


def of_all_ranks(cause: Cause, measured: MeasuredRanks) -> Cause:
    """The cause with all ranks' losses and the last rank, where that is saved which it costs all of them.

    Not where some rank loses hardly any.
    """
    is_shown = cause.figures.get("without") == WITHOUT["all"] and _other_saved_ms(cause) is not None
    least = min(measured.ranks, key=lambda each: _lost_ns(each, cause.part))
    lost_ns = _lost_ns(least, cause.part)
    if not is_shown or not measured.is_whole or lost_ns < MENTION_FROM * least.span_ns:
        return cause
    of_one = ("operator", "inside", "held", "function", "call", "call_ms", "latency_ms", "waits_ms")
    figures = {name: value for name, value in cause.figures.items() if name not in of_one}
    if measured.last and cause.part in LATE:
        figures |= _last_figures(measured.last)
    lost = {"who": EVERY_RANK, **_range_figures(measured.ranks, cause.part)}
    return replace(cause, figures={**figures, **lost}, ranks=tuple(each.rank for each in measured.ranks))


def _last_figures(last: StragglerReport) -> dict[str, Any]:
    return {
        "last": f"rank {last.rank}",
        "last_arrivals": last.last_arrivals,
        "num_collectives": last.collectives,
    }


def most_lost(found: Sequence[Cause]) -> Cause | None:
    """The cause that takes most of the step.

    That ranks are blocked says least about why: it counts where nothing else is significant, and where what
    else they lose by themselves is far less.
    """
    blocked_ns = sum(cause.saved_ns for cause in found if cause.part == "blocked")
    known = (
        cause
        for cause in found
        if cause.part != "blocked"
        and cause.saved_ns >= max(MENTION_FROM * cause.span_ns, 0.0 if cause.is_wait else MOST * blocked_ns)
    )
    return next(known, next(iter(found), None))


def grown(found: Iterable[Cause], before: Sequence[Cause], longer_ns: float) -> Cause | None:
    """The cause that grew most, if that explains most of what a step takes longer.

    Args:
        found: causes of the slower steps.
        before: of the faster ones.
        longer_ns: the difference.
    """
    if not before or longer_ns <= 0:
        return None
    more = [(cause.lost_ns - _as_much(cause, before), cause) for cause in found]
    more_ns, most = max(more, key=lambda item: item[0], default=(0.0, None))
    if most is None or more_ns < max(MOST * longer_ns, MENTION_FROM * most.span_ns):
        return None
    return replace(most, more_ns=more_ns)


def _as_much(cause: Cause, before: Iterable[Cause]) -> float:
    """How much of the like was lost before; to wait is to wait, for whatever reason."""
    return sum(
        other.lost_ns for other in before if other.part == cause.part or (other.is_wait and cause.is_wait)
    )


def _own(part: Part, slowest: RankTime, measured: MeasuredRanks) -> Cause:
    """The loss of the rank that works longest: what it loses, the step loses; said of all that lose alike.

    Where all lose nearly as much, what each loses at least; always so where they are blocked: if one is
    blocked for longer, the others wait for it.
    """
    lost_ns = _lost_ns(slowest, part)
    alike = [each for each in measured.ranks if part == "blocked" or _lost_ns(each, part) >= MOST * lost_ns]
    least = min(measured.ranks, key=lambda each: _lost_ns(each, part))
    is_even = part == "blocked" or _lost_ns(least, part) >= EVERY * lost_ns
    shown = least if is_even and measured.is_whole else slowest
    added_ns = shown.added_ns if part in OF_HOST else 0.0
    figures: dict[str, Any] = {
        "who": _whose(alike, measured),
        "of": measured.of,
        "case": case if (case := part.replace("_", "-")) in {**NOT_RECORDED, **GAPS} else None,
    }
    if part == "pinned_copies":
        figures["memory"] = measured.copied
    if part in ("transfer", "model_transfer"):
        figures["groups"] = measured.transfer_groups
    if added_ns:
        figures["traced_ms"] = shown.span_ns / 1e6
    if len(alike) > 1:
        figures |= _range_figures(alike, part)
    if part in LATE and measured.is_whole:
        if len(alike) == 1:
            figures |= {"waits_ms": _waits_ms(slowest, measured), "waiting": _waiting(slowest, measured)}
        elif measured.last and not is_even:
            figures |= _last_figures(measured.last)
    ranks = tuple(each.rank for each in alike)
    return Cause(part, ranks, _lost_ns(shown, part), shown.span_ns - added_ns, figures)


def _whose(alike: Sequence[RankTime], measured: MeasuredRanks) -> str:
    """Whose loss it is: of a single rank only where no other loses about as much."""
    if len(alike) == 1:
        return f"rank {alike[0].rank}"
    is_every = measured.is_whole and len(alike) == len(measured.ranks)
    return EVERY_RANK if is_every else f"each of {ranks_text([each.rank for each in alike])}"


def _waiting(late: RankTime, measured: MeasuredRanks) -> str:
    others = [each.rank for each in measured.ranks if each.rank != late.rank]
    return f"rank {others[0]} waits" if len(others) == 1 else OTHERS_WAIT


def _waits_ms(late: RankTime, measured: MeasuredRanks) -> list[float] | None:
    """The least and the most that other ranks wait; `None` where some hardly wait."""
    waits = [each.wait_ns for each in measured.ranks if each.rank != late.rank and each.samples != 0]
    if not waits or min(waits) < MENTION_FROM * late.span_ns:
        return None
    ends_ms = [min(waits) / 1e6, max(waits) / 1e6]
    return ends_ms if format_ms(ends_ms[0]) != format_ms(ends_ms[1]) else ends_ms[:1]


def _range_figures(ranks: Sequence[RankTime], part: Part) -> dict[str, Any]:
    """The smallest and the largest share that ranks lose, each with its ms; of shares alike, only the ms."""
    lost_ms = [_lost_ns(each, part) / 1e6 for each in ranks]
    spans_ms = [(each.span_ns - (each.added_ns if part in OF_HOST else 0.0)) / 1e6 for each in ranks]
    rows = [(100 * ms / span if span else 0.0, ms, span) for ms, span in zip(lost_ms, spans_ms, strict=True)]
    least, most = min(rows), max(rows)
    is_of_one = len({format_ms(span) for span in spans_ms}) == 1
    if round(most[0]) > round(least[0]):
        ends = {"percent": least[0], "lost_ms": least[1], "most_percent": most[0], "most_ms": most[1]}
        return {**ends, "whole_ms": most[2], "least_whole_ms": None if is_of_one else least[2]}
    figures: dict[str, Any] = {"percent": least[0], "lost_ms": min(lost_ms), "whole_ms": None}
    if format_ms(max(lost_ms)) != format_ms(min(lost_ms)):
        return {**figures, "most_ms": max(lost_ms)}
    return {**figures, "whole_ms": spans_ms[0] if is_of_one else None}


def _lost_ns(rank: RankTime, part: Part) -> float:
    """The loss in a step as it is timed."""
    return max(0.0, rank.lost_ns.get(part, 0.0) - (rank.added_ns if part in OF_HOST else 0.0))


def _wait(measured: MeasuredRanks) -> Cause:
    """The longest wait of a rank for another.

    By their work: as far as another one's longer computing explains it. One without samples only ever waits,
    and is meant to.
    """
    busy = [each for each in measured.ranks if each.samples != 0] or measured.ranks
    waiting = max(busy, key=lambda each: each.wait_ns)
    figures: dict[str, Any] = {"of": measured.of, "groups": measured.wait_groups}
    last, by_number = measured.last, {each.rank: each for each in measured.ranks}
    if last is not None and last.rank == waiting.rank:  # it caused most waiting, and waits longest itself
        others = [each for each in busy if each.rank != last.rank]
        waiting = max(others, key=lambda each: each.wait_ns, default=waiting)
    figures["who"] = f"rank {waiting.rank}"
    if measured.by_collectives:
        awaited = by_number.get(last.rank) if last is not None else None
    else:
        awaited = max(measured.ranks, key=lambda each: each.work_ns)
    if awaited is None:
        figures["other"] = OTHER_RANKS
        return Cause("straggler", (), waiting.wait_ns, waiting.span_ns, figures)
    wait_ns = 0.0 if _is_late_for_own_loss(awaited, waiting) else waiting.wait_ns
    if not measured.by_collectives:
        wait_ns = min(wait_ns, _explained_ns(waiting, awaited))
    split_ns = min(wait_ns, max(0.0, waiting.work_ns) * max(0.0, _samples_ratio(awaited, waiting) - 1))
    slow_ns = wait_ns - split_ns
    figures["other"] = f"rank {awaited.rank}"
    if split_ns > slow_ns:
        if slow_ns >= MENTION_FROM * waiting.span_ns:
            figures["slow_ms"] = slow_ns / 1e6
        return Cause("split", (awaited.rank,), wait_ns, waiting.span_ns, figures)
    if awaited.work_ns - waiting.work_ns >= MOST * wait_ns:  # else it doesn't explain the wait
        figures |= {"other_work_ms": awaited.work_ns / 1e6, "work_ms": waiting.work_ns / 1e6}
        if awaited.samples is not None:
            figures |= {"num_samples": awaited.samples, "own_samples": waiting.samples}
    if last is not None:
        if last.last_arrivals < MOSTLY * last.collectives and len(measured.ranks) > 2:
            figures["other"] = f"other ranks, mostly rank {awaited.rank}"
        figures |= _last_figures(last)
    return Cause("straggler", (awaited.rank,), wait_ns, waiting.span_ns, figures)


def _explained_ns(waiting: RankTime, cause: RankTime) -> float:
    """The wait, if that rank has more to do, and other load isn't the reason; else 0."""
    enough_ns = MOST * waiting.wait_ns
    if cause.work_ns - waiting.work_ns < enough_ns:
        return 0.0
    if _samples_ratio(cause, waiting) <= 1 and cause.queued_ns >= enough_ns:
        return 0.0
    return waiting.wait_ns


def _is_late_for_own_loss(cause: RankTime, waiting: RankTime) -> bool:
    """Whether what the other rank loses by itself explains most of the wait: it isn't slow at computing."""
    own: tuple[Part, ...] = ("input", "copies", "pinned_copies", "one_off", *OF_HOST)
    return any(_more_ns(part, cause, waiting) >= MOST * waiting.wait_ns > 0 for part in own)


def _more_ns(part: Part, cause: RankTime, waiting: RankTime) -> float:
    """The cause's loss beyond what its samples explain; nothing where that is all that ranks do."""
    lost_ns = [rank.lost_ns.get(part, 0.0) for rank in (cause, waiting)]
    ranks = (cause, waiting)
    if part in OF_HOST and all(
        ns >= ALL_HOST * rank.work_ns for ns, rank in zip(lost_ns, ranks, strict=True)
    ):
        return 0.0
    return lost_ns[0] - max(1.0, _samples_ratio(cause, waiting)) * lost_ns[1]


def _samples_ratio(cause: RankTime, waiting: RankTime) -> float:
    """1 where the samples of ranks aren't known."""
    return (cause.samples or 1) / (waiting.samples or 1)


def _bubble(measured: MeasuredRanks) -> Cause | None:
    """The wait of the stage with the largest bubble; `None` without a pipeline."""
    if measured.bubble is None:
        return None
    bubble = measured.bubble
    awaited = f"stage{'s' if len(bubble.awaited) > 1 else ''} {listed([*map(str, bubble.awaited)])}"
    figures = {
        "who": f"stage {bubble.stage}",
        "other": awaited,
        "of": measured.of,
    }
    return Cause("bubble", bubble.ranks, bubble.wait_ns, bubble.span_ns, figures)


def to_do(about: str, case: str, weight: float = 0.0, **figures: Any) -> Finding:
    """Advice about a kind of finding, by its code.

    Args:
        case: of `ADVICE`, which has slots for the figures.
    """
    return finding("act-on-cause", weight=weight, case=case, what=about, **figures)


def advice_finding(cause: Cause, case: str, variant: str | None = None, where: str | None = None) -> Finding:
    """The advice about a cause; with its share where the cause itself isn't shown.

    Args:
        cause: the cause.
        case: of `advice_for`, or of a strategy.
        variant: the id of the variant that it is about.
        where: the label of that variant, to name the part of its step and the share.
    """
    return finding(
        "act-on-cause",
        variant,
        cause.ranks,
        weight=cause.weight,
        case=case,
        where=where,
        percent=100 * cause.share if where else None,
        who=cause.figures["who"] if not cause.is_wait else _awaited_text(cause),
        what=cause.code,
        **(_inside_figures(cause, variant) if case == "host-inside" else {}),
        **({"function": cause.figures["function"]} if case == "host-function" else {}),
    )


def _inside_figures(cause: Cause, variant: str | None) -> dict[str, Any]:
    """What to look into, and how to record more of it: in a job, or by torch's profiler."""
    how = "with_stack=True" if variant is None else "`profile: {stacks: true}`"
    return {"inside": cause.figures["inside"], "stacks": None if cause.figures.get("has_stacks") else how}


def _awaited_text(cause: Cause) -> str:
    return ranks_text(cause.ranks) if cause.ranks else "the last rank"


_WITH: Mapping[Collection[Remedy], str] = {
    frozenset({"torch.compile"}): "with-compile",
    frozenset({"CUDA graphs"}): "with-graphs",
    frozenset({"torch.compile", "CUDA graphs"}): "with-both",
}


def advice_for(
    found: Cause,
    of_job: bool = False,
    is_balanced: bool = False,
    of_transfer: str = "",
    in_use: Collection[Remedy] = (),
) -> str:
    """The case of the advice about a part of a step: in the keys of a job, or in torch's terms for others.

    Args:
        found: what takes the time.
        of_job: whether a job of ours can set its keys.
        is_balanced: whether no other split can be chosen.
        of_transfer: the case of the advice about transfers; by default that of data parallel training.
        in_use: what isn't advised, as it is in use.
    """
    if found.part == "transfer" and of_transfer:
        return of_transfer
    is_alike = found.part == "straggler" and "other_work_ms" not in found.figures
    call = str(found.figures.get("call") or "")
    forms = {
        "several": found.part == "straggler" and len(found.ranks) > 1,
        "changing": found.is_changing,
        "computing": bool(found.figures.get("operator")),
        "copying": bool(call),
        "allocating": bool(ALLOCATING_CALLS.match(call)),
        "loading": bool(LOADING_CALLS.match(call)),
        "once": found.figures.get("call_ms") is not None,
        "inside": bool(found.figures.get("inside")),
        "function": bool(found.figures.get("held")),
        "late": bool(found.figures.get("waits_ms")),
        _WITH.get(frozenset(in_use), ""): bool(in_use),
        "balanced": is_balanced or (of_job and is_alike),
        "alike": is_alike,
        "recorded": found.figures.get("case") == EVENTS_LEFT_OUT,
        "lost": found.figures.get("case") == LOST,
        "in-job": of_job,
    }
    part = found.part.replace("_", "-")
    cases = (f"{part}-{form}" for form, is_so in forms.items() if is_so)
    return next((case for case in cases if case in ADVICE), part)
