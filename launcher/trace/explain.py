"""Explains where the time went that wasn't compute, and what to do about it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any, Literal, TypeVar

from gpurun.launcher.findings.finding import Finding, finding, ranked
from gpurun.launcher.strategies import Strategy
from gpurun.launcher.trace.model import (
    Breakdown,
    HostWhileIdle,
    IdleCauses,
    RankTrace,
    StragglerReport,
    TraceReport,
)
from gpurun.launcher.units import format_count, format_ms, format_percent, plural

MENTION_FROM = 0.05
"""A loss of a smaller share of the time, or one that grew by less, is not mentioned: it may be chance."""

MENTION_NEXT_FROM = 0.20

CPU = "CPU"
"""How the device of a rank begins whose trace has no GPU work."""
_WAITING = ("bubble", "straggler")
Causes = TypeVar("Causes", IdleCauses, HostWhileIdle)
_OF_ONE_STRETCH = frozenset({"launch_delay_us", "gpu_span_us"})

Kind = Literal[
    "input",
    "copies",
    "host",
    "transfer",
    "other_steps",
    "other",
    "unknown",
    "split",
    "straggler",
    "bubble",
    "blocked",
    "compute",
]
"""Waiting is `split`, for a rank with more samples; `straggler`, for one that is slower; `bubble`, for
another stage of the pipeline."""


@dataclass(frozen=True)
class Cause:
    """The sentence about a cause."""

    advice: str
    """The advice about it."""
    spent: str = ""
    """Completes `every rank spends 11 of 60 ms` and `22 % of the time is spent`.

    Empty for a wait: its sentence names the rank that the others wait for.
    """
    if_balanced: str | None = None
    """The advice where a balanced split was measured already, if that needs another one."""


CAUSES: dict[Kind, Cause] = {
    "input": Cause("raise num_workers, or do less work per sample", "waiting for data"),
    "copies": Cause("pin the memory and copy with non_blocking=True", "on copies that nothing overlaps"),
    "host": Cause("try larger batches, torch.compile or CUDA graphs", "waiting for the CPU to launch work"),
    "transfer": Cause(
        Strategy.transfer_advice,
        "on transfers that nothing overlaps",
    ),
    "blocked": Cause(
        "`gpurun stacks RUN`, while it runs, shows what it waits for",
        "blocked: asleep, or waiting for a lock, a file or a network",
    ),
    "compute": Cause("compare the operators of both traces: `gpurun diff`", "computing"),
    "other_steps": Cause(
        "look at the timeline for what delays the step's own", "on work of other steps only"
    ),
    "other": Cause("look for synchronisation and dependencies", "in gaps between work already launched"),
    "unknown": Cause(
        "record the CPU as well (ProfilerActivity.CPU)",
        "in gaps before work whose launch the trace doesn't have",
    ),
    "split": Cause(
        "try split: balanced",
        if_balanced="find out why the ranks' times differ from those that were measured to find this split",
    ),
    "straggler": Cause(
        "find out what slows that rank down, or give it less work",
        if_balanced="find out what slows that rank down",
    ),
    "bubble": Cause("try more micro-batches per step, or an interleaved schedule"),
}
_ON_CPU = CAUSES | {
    "host": Cause("try larger batches, fewer operators, or torch.compile", "in Python between operators")
}
_ON_UNSEEN_DEVICE = Cause(
    "record the device's work as well", "outside of operators: in Python, or waiting for the device"
)
"""Instead of `host`, where a trace has no work of the device that the CPU launches for."""
_UNTIMED = Cause(
    "the profiler's with_stack=True shows where", "outside of operators: in Python, asleep, or waiting"
)
"""Instead of `host` where the CPU is what computes: a trace doesn't have the time that its threads worked."""


_NEEDS_NO_PINNING = re.compile(r"Pinned|DtoD|PtoP|Device -> Device|Memset")
_OF_PINNED = replace(CAUSES["copies"], advice="copy less, or on another stream while the device computes")
"""Instead of `copies`, where they are from and to pinned memory already."""

_OF_MODEL = replace(
    CAUSES["transfer"], advice="overlap it with compute, or place its ranks where links are fastest"
)
"""Instead of `transfer`, where it isn't the gradients of data parallel ranks."""

TRANSFER_OR_WAIT = "on communication, or waiting for it, that nothing overlaps"
"""Instead of what `transfer` says, where waiting can't be separated from it."""


def cause_named(kind: Kind, on_cpu: bool, is_balanced: bool = False, is_cpu_timed: bool = False) -> Cause:
    """The cause, with the words and the advice that fit.

    Args:
        kind: its key in the table.
        on_cpu: whether the CPU itself is what computes.
        is_balanced: whether the split is a balanced one already.
        is_cpu_timed: whether CPU time shows that the CPU was working; a trace alone doesn't.
    """
    found = (_ON_CPU if on_cpu else CAUSES)[kind]
    if kind == "host" and on_cpu and not is_cpu_timed:
        found = _UNTIMED
    return replace(found, advice=found.if_balanced) if is_balanced and found.if_balanced else found


KEYS = {
    "the profiler's with_stack=True": "`profile: {stacks: true}`",
    "raise num_workers": "raise `workers`",
    "give it less work": "give it less work (split: balanced)",
}
"""Advice in the words of a job file."""


def in_keys(advice: str, of_program: bool) -> str:
    """The advice for a job of ours; a program has its own loader and split."""
    for words, key in [*KEYS.items()][: 1 if of_program else None]:
        advice = advice.replace(words, key)
    return advice


@dataclass(frozen=True)
class Loss:
    """A cause, and its share of all ranks' time."""

    kind: Kind
    share: float

    @property
    def percent(self) -> str:
        return format_percent(100 * self.share)


CUT = "no cause is named: the files are cut off, so work may be missing where a device looks idle"


def losses(report: TraceReport) -> list[Loss]:
    """Everything but compute, largest first. Shares are of the total time of `explained_stretches`.

    None where all files end early: what they lack would look like waiting.
    """
    is_cut = all(rank.is_cut for rank in report.ranks)
    stretches = [] if is_cut else explained_stretches(report)
    mean = mean_stretch(stretches) if stretches else None
    if mean is None or mean.span_us == 0:
        return []
    causes_us = mean.idle_by_cause_us
    bubble_us = min(_bubble_us(report), mean.exposed_wait_us)
    parts_us: dict[Kind, float] = {
        "bubble": bubble_us,
        "straggler": mean.exposed_wait_us - bubble_us + causes_us.comm_wait,
        "transfer": mean.exposed_transfer_us,
        "copies": mean.exposed_memcpy_us,
        "input": causes_us.data,
        "host": causes_us.host,
        "other_steps": mean.other_steps_us,
        "other": causes_us.other,
        "unknown": causes_us.unknown,
    }
    return sorted((Loss(kind, us / mean.span_us) for kind, us in parts_us.items()), key=lambda x: -x.share)


def _bubble_us(report: TraceReport) -> float:
    """The mean of all ranks that are explained."""
    in_stages = sum(stage.bubble_us * len(stage.ranks) for stage in report.pipeline)
    return in_stages / len(whole_ranks(report.ranks))


CODES: Mapping[Kind, str] = {
    "input": "input-stall",
    "copies": "exposed-copies",
    "host": "host-bound",
    "transfer": "exposed-transfer",
    "split": "waits-for-larger-batch",
    "straggler": "waits-for-slower-rank",
    "bubble": "pipeline-bubble",
    "blocked": "blocked",
    "compute": "computes-longer",
    **dict.fromkeys(("other_steps", "other", "unknown"), "gaps"),
}
"""The kind of finding of each loss."""


def explain(report: TraceReport) -> tuple[Finding, ...]:
    """The largest loss, and the second if it is large too, each with what to do; before them what was traced.

    Where ranks wait for another stage and also for a slow rank, both are named: they need different cures.
    """
    if all(rank.is_cut for rank in report.ranks):
        return (_traced(report, CUT),)
    found = losses(report)
    if not found:
        return (_traced(report, "nothing to explain: the traces hold no work"),)
    if found[0].share < MENTION_FROM:
        most = (
            f": no other cause takes more than {found[0].percent} of it" if found[0].share >= 0.0005 else ""
        )
        return (_traced(report, f"compute fills {_time(report)}{most}"),)
    mentioned = [found[0], *(loss for loss in found[1:2] if loss.share >= MENTION_NEXT_FROM)]
    if any(loss.kind in _WAITING for loss in mentioned):
        waits = [loss for loss in found if loss.kind in _WAITING and loss.share >= MENTION_FROM]
        mentioned = [loss for loss in found if loss in mentioned or loss in waits]
    return ranked((_traced(report), *(each for loss in mentioned for each in _said(report, loss))))


def _traced(report: TraceReport, filled: str | None = None) -> Finding:
    return finding("traced", traced=capture_text(report), filled=filled)


def capture_text(report: TraceReport) -> str:
    """`2 ranks on CPU, 3 steps`."""
    devices = ", ".join(sorted({rank.device for rank in report.ranks}))
    num = max(len(rank.steps) for rank in report.ranks)
    steps = plural(num, "step") if num else "no steps"
    return f"{plural(len(report.ranks), 'rank')} on {devices}, {steps}"


def _time(report: TraceReport) -> str:
    """The time that shares refer to: the mean step where the table has steps."""
    if not steps_add_detail(report):
        return "the time"
    numbers = {step.step for rank in report.ranks for row in rank.devices or (rank,) for step in row.steps}
    return "the only step's time" if len(numbers) == 1 else "the steps' time"


def _said(report: TraceReport, loss: Loss) -> Iterator[Finding]:
    """A loss, and what to do about it."""
    on_cpu = all(rank.device.startswith(CPU) for rank in report.ranks)
    cause = cause_named(loss.kind, on_cpu)
    if loss.kind == "host" and on_cpu and any(rank.device != CPU for rank in report.ranks):
        cause = _ON_UNSEEN_DEVICE
    if loss.kind == "copies" and _are_pinned(report):
        cause = _OF_PINNED
    spent = cause.spent or (_bubble(report) if loss.kind == "bubble" else _waiting(report))
    if loss.kind == "transfer":
        kind = _most_transfer(report)
        spent = TRANSFER_OR_WAIT if _is_waiting_unknown(report) else spent
        cause = _OF_MODEL if kind is not None and kind != "data" else cause
        if kind is not None and len(report.parallelism) > 1:
            where = "between stages of the pipeline" if kind == "pipeline" else f"in {kind} parallel groups"
            spent += f", mostly {where}"
    text = f"{loss.percent} of {_time(report)} is spent {spent}"
    yield finding(CODES[loss.kind], weight=loss.share, cause=text, percent=100 * loss.share)
    if loss.kind != "straggler" or last_rank(report) is not None:
        yield finding("act-on-cause", weight=loss.share, advice=cause.advice, of=text)


def _are_pinned(report: TraceReport) -> bool:
    """Whether most of the time of copies is in those that need no pinning: their names say between what."""
    copies = [row for rank in report.ranks for row in rank.per_step.kernels if row.kind == "memcpy"]
    pageable_us = sum(row.device_us for row in copies if not _NEEDS_NO_PINNING.search(row.name))
    return 2 * pageable_us < sum(row.device_us for row in copies)


def _is_waiting_unknown(report: TraceReport) -> bool:
    """Whether of most collectives it isn't known how much of them is waiting."""
    unknown = [part.wait_us is None for each in report.collectives for part in each.ranks]
    return 2 * sum(unknown) > len(unknown)


def _bubble(report: TraceReport) -> str:
    """The wait of the stage with the largest bubble."""
    most = max(report.pipeline, key=lambda stage: stage.bubble_us)
    awaited = max(most.waits_us, key=lambda stage: most.waits_us[stage])
    waits = f"{format_ms(most.waits_us[awaited] / 1000)} of {format_ms(most.span_us / 1000)} ms"
    mean = f", mean of its {len(most.ranks)} ranks" if len(most.ranks) > 1 else ""
    waiting = f"stage {most.stage} waits {waits} for stage {awaited}"
    return f"waiting for other stages; {waiting} (pipeline bubble{mean})"


def last_rank(report: TraceReport) -> StragglerReport | None:
    """The rank that the others waited for most, if for any; between stages, waiting is the bubble."""
    between_stages = "pipeline" if report.pipeline else None
    known, arrivals, caused_us = Counter[int](), Counter[int](), defaultdict[int, float](float)
    for each in report.collectives:
        last = each.last_rank
        if last is None or each.parallelism == between_stages:
            continue
        known.update(part.rank for part in each.ranks)
        arrivals[last] += 1
        caused_us[last] += sum(part.wait_us or 0.0 for part in each.ranks if part.rank != last)
    rows = [StragglerReport(rank, known[rank], arrivals[rank], us) for rank, us in caused_us.items() if us]
    return max(rows, key=lambda row: (row.wait_caused_us, -row.rank), default=None)


def _waiting(report: TraceReport) -> str:
    last = last_rank(report)
    if last is None:
        return (
            f"waiting for other ranks{_in_kind(report)}" if report.stragglers else "waiting for collectives"
        )
    return (
        f"waiting for other ranks{_in_kind(report)}, mostly for rank {last.rank}, which came last "
        f"{how_often_last(last)} and cost the others {format_ms(last.wait_caused_us / 1000)} ms"
    )


def how_often_last(straggler: StragglerReport) -> str:
    """`3 of 4 times`: of the collectives that it took part in."""
    return f"{format_count(straggler.last_arrivals)} of {plural(straggler.collectives, 'time')}"


def _most_transfer(report: TraceReport) -> str | None:
    """The kind of parallelism that most of the exposed transfer is in; `None` if it isn't known."""
    means = {each.kind: each.mean_us(len(whole_ranks(report.ranks))) for each in report.parallelism}
    moved_us = {kind: exposed_us - (wait_us or 0.0) for kind, (_, exposed_us, wait_us) in means.items()}
    most = max(moved_us, key=lambda kind: moved_us[kind], default="other")
    return None if most == "other" or 2 * moved_us[most] < sum(moved_us.values()) else most


def _in_kind(report: TraceReport) -> str:
    """The kind of parallelism that most of the waiting is in, where there are several."""
    waits = {
        each.kind: each.mean_us(len(whole_ranks(report.ranks)))[2] or 0.0
        for each in report.parallelism
        if each.kind != "pipeline"
    }
    most = max(waits, key=lambda kind: waits[kind], default="other")
    several = len(waits) > 1 and most != "other" and waits[most] > 0
    return f" in {most} parallel groups" if several else ""


def steps_add_detail(report: TraceReport) -> bool:
    """Whether steps add detail: there are several, or the only one doesn't cover its whole file."""
    return any(rank.steps and not _is_total(rank) for rank in report.ranks)


def _is_total(rank: RankTrace) -> bool:
    return len(rank.steps) == 1 and all(
        getattr(rank.steps[0], field.name) == getattr(rank.total, field.name) for field in fields(Breakdown)
    )


def whole_ranks(ranks: Sequence[RankTrace]) -> Sequence[RankTrace]:
    """Those whose files don't end early; all, where all do."""
    return [rank for rank in ranks if not rank.is_cut] or ranks


def explained_stretches(report: TraceReport) -> list[Breakdown]:
    """The time to explain: every step of every rank, or every rank's total where steps add no detail.

    A rank with several devices contributes each of them; one without steps nothing where others have some.
    """
    rows = [row for rank in whole_ranks(report.ranks) for row in rank.devices or (rank,)]
    if not steps_add_detail(report):
        return [row.total for row in rows]
    return [step for row in rows for step in row.steps]


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
