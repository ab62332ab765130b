"""Explains where the time of traces went that wasn't compute, and what to do about it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, inf
from statistics import fmean, median
from typing import Any, TypeVar

from gpurun.launcher.findings.finding import Finding, finding, noticed, ranked, with_figures, worded
from gpurun.launcher.findings.finding_kinds import SPENT
from gpurun.launcher.findings.trace_cases import BY_SHARES, IN_STEP, NOT_RECORDED, OF_STEP, SLOWED
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.trace.causes import (
    EVENTS_LEFT_OUT,
    IN_STACKS,
    LOST,
    MENTION_FROM,
    MOST,
    OF_DEVICE,
    OF_HOST,
    PINNED,
    UNMATCHED,
    UNREAD_NPU,
    Cause,
    MeasuredRanks,
    Part,
    RankTime,
    StageWait,
    advice_finding,
    advice_for,
    cause_finding,
    causes,
    most_lost,
    of_all_ranks,
    with_cpu,
    with_savings,
)
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, SEND_RECV
from gpurun.launcher.trace.model import (
    GAPS_OF_IDLE,
    Breakdown,
    CollectiveReport,
    CpuFacts,
    HostWhileIdle,
    IdleCauses,
    RankTrace,
    StragglerReport,
    TraceReport,
)
from gpurun.launcher.units import format_ms, listed, ranks_text

MENTION_NEXT_FROM = 0.20
FEW_STEPS = 2
"""So many usual steps, or fewer, may be unlike others."""
LATENCY_FROM = 0.01
"""Share of the step from which on the delay after the launching calls is told apart from the rest."""
COPYING = re.compile("Memcpy")
"""Calls in which the CPU copies unless memory is pinned: their length is no cost of launching."""
OWN_OPERATORS = 0.5
"""Share of the operators' time that a thread works, or waits for a core, if it runs most of them."""
MESSAGES = {*POINT_TO_POINT, SEND_RECV}
CPU, NOT_READ, NPU = "CPU", "not read", "NPU"
"""How the device of a rank begins whose trace has no GPU work."""
Causes = TypeVar("Causes", IdleCauses, HostWhileIdle)
NOTHING: Mapping[tuple[int, int], CpuFacts] = {}
_OF_ONE_STRETCH = frozenset({"launch_delay_us", "gpu_span_us"})
_WITHIN_DEVICE = re.compile(r"DtoD|PtoP|Device( -> |_?To_?)Device|Memset|FillBuffer", re.IGNORECASE)
"""How CUDA and ROCm (roctracer, rocprofiler-sdk) call such copies."""


def explain(
    report: TraceReport, unreplayed: str = "", cpu: Mapping[tuple[int, int], CpuFacts] = NOTHING
) -> tuple[Finding, ...]:
    """The traces, the largest losses of usual steps, each with the advice about it, and the other steps.

    Where ranks wait for another stage and also for a slow rank, both are named: they need different cures.

    Args:
        report: of all ranks.
        unreplayed: a case of `BY_SHARES`.
        cpu: what the CPU does, by rank and step.
    """
    first, *more = _explained(report, of_usual_steps(report), unreplayed)
    outlying = outlying_steps(report.ranks)
    if not outlying or {"num_cut", "num_lost"} & {*first.figures}:
        return (first, *more)
    more_ms = {f"step {each.step}": each.more_us / 1000 for each in outlying}
    steps = (_noticed_step(each, report, cpu.get((each.rank, each.step))) for each in outlying)
    return (with_figures(first, outlying_ms=more_ms), *more, *steps)


def _explained(whole: TraceReport, report: TraceReport, unreplayed: str) -> tuple[Finding, ...]:
    """The causes of all of the capture's usual steps."""
    if all(rank.is_partial for rank in report.ranks):  # what they lack would look like waiting
        num_cut = sum(rank.is_cut for rank in report.ranks)
        num_lost = sum(rank.lost_events for rank in report.ranks)
        return (_traced(whole, num_cut=num_cut or None, num_lost=None if num_cut else num_lost),)
    found = trace_causes(whole)
    first = _once(found) or most_lost(found)
    if first is None:
        return (_traced(whole),)
    percent = _compute_percent(report)
    if first.weight < MENTION_FROM:
        found = trace_causes(whole, hidden=True)
        largest = max(found, key=lambda cause: cause.share)
        others = 100 * max(largest.share, _issuing_share(report))
    if first.weight < MENTION_FROM and (largest.share >= MENTION_NEXT_FROM or 100 * largest.share > percent):
        first = largest  # compute isn't what takes most, or something else takes much of a rank's time
    elif first.weight < MENTION_FROM:
        bound = ceil(others) if others >= 1 else ceil(10 * others) / 10  # rounded down, it would be too small
        whose = _whose(report)
        of_each = "any rank's" if whose else None
        return (_traced(whole, percent=percent, whose=whose, most_percent=bound or None, of_each=of_each),)
    found = [first, *(cause for cause in found if cause is not first)]
    named = [found[0], *(cause for cause in found[1:] if cause.weight >= MENTION_NEXT_FROM)]
    if any(cause.is_wait for cause in named):
        waits = [cause for cause in found if cause.is_wait and cause.weight >= MENTION_FROM]
        named = [cause for cause in found if cause in named or cause in waits]
    # The first says most, though another may take more; of what saves nothing, its share counts.
    most = max(*(cause.weight for cause in named), first.share if first.saves_nothing else 0.0)
    said = [(cause, each) for cause in named for each in _said(cause, report, first.has_advice)]
    weighed = (replace(each, weight=most) if cause is first else each for cause, each in said)
    slowed = "; ".join(_slowed(named, report)) or None
    return ranked((_traced(whole, basis=BY_SHARES.get(unreplayed), slowed=slowed), *weighed))


def _slowed(named: Sequence[Cause], report: TraceReport) -> Iterator[str]:
    """What has made causes larger: recording stacks, and other programs on the cores."""
    has_stacks = any(rank.cpu.has_stacks for rank in report.ranks)
    if has_stacks and any(cause.part in ("input", "one_off", *OF_HOST) for cause in named):
        yield SLOWED["stacks"]
    queued = {rank.rank: _queue_percent(rank) for rank in report.ranks if rank.facts and rank.steps}
    most = max(queued, key=lambda rank: queued[rank], default=None)
    if most is not None and queued[most] > QUEUE_PERCENT:
        yield worded(SLOWED["queued"], {"rank": str(most), "queue_percent": queued[most]})


def _queue_percent(rank: RankTrace) -> float:
    """The share of a step in which the thread that steps waits for a core."""
    span_us = fmean(step.span_us for step in rank.steps)
    return 100 * _thread_us(rank)[1] / span_us if span_us else 0.0


def _once(found: Sequence[Cause]) -> Cause | None:
    """The cause `one_off`, if it is large: other shares are then not those of a usual step."""
    least = max([MENTION_FROM, *(MOST * each.weight for each in found)])
    return next((each for each in found if each.part == "one_off" and each.weight >= least), None)


def _said(cause: Cause, report: TraceReport, is_first_advised: bool) -> tuple[Finding, ...]:
    """A cause, and what to do about it; that names it where there is no advice on the first cause."""
    if not cause.has_advice:
        return (cause_finding(cause),)
    in_use = {remedy for rank in report.ranks for remedy in rank.cpu.remedies}
    advice = advice_finding(cause, advice_for(cause, in_use=in_use))
    about = None if is_first_advised else f"for time {SPENT[cause.part]}"
    return (cause_finding(cause), with_figures(advice, about=about))


def _traced(report: TraceReport, **figures: Any) -> Finding:
    num_steps = max(len(rank.steps) for rank in report.ranks)
    unmarked = max(rank.optimizer_steps for rank in report.ranks)
    is_few = num_steps - len(outlying_steps(report.ranks)) <= FEW_STEPS
    return finding(
        "traced",
        num_ranks=len(report.ranks),
        devices=listed(sorted({rank.device for rank in report.ranks})),
        num_steps=None if is_few else num_steps,
        num_few=num_steps or None if is_few else None,
        num_unmarked=unmarked if 0 < unmarked <= FEW_STEPS and not num_steps else None,
        **figures,
    )


OUTLYING, APART = 0.25, 2.0
"""Share of the median that an outlying step takes more, and how many times as much more as any usual step."""
USUAL = 2 / 3
"""Share of the steps that are usual; of fewer, none is."""


@dataclass(frozen=True)
class OutlyingStep:
    """A step that takes far longer than the others, for a reason that no other such step has."""

    step: int
    span_us: float
    """The longest of its ranks; so is the next."""
    more_us: float
    """Beyond the mean of the usual steps."""
    rank: int
    cause: str
    """The part of the step that grew most, waiting for other ranks apart; and on which rank."""
    cause_us: float
    """By how much it grew over the mean of the usual steps."""


def outlying_steps(ranks: Sequence[RankTrace]) -> tuple[OutlyingStep, ...]:
    """The steps that causes leave out. What recurs isn't one of them: its mean is what it costs."""
    numbers = [[step.step for step in rank.steps] for rank in ranks]
    spans: defaultdict[int, float] = defaultdict(float)
    for step in (step for rank in ranks for step in rank.steps):
        spans[step.step] = max(spans[step.step], step.span_us)
    middle = median(spans.values()) if spans else 0.0
    slow = {number for number, us in spans.items() if us > (1 + OUTLYING) * middle}
    usual = spans.keys() - slow
    if not slow or len(usual) < USUAL * len(spans) or any(len(set(of)) < len(of) for of in numbers):
        return ()
    apart = APART * max(spans[number] - middle for number in usual)
    if any(spans[number] - middle < apart for number in slow):
        return ()
    usual_us = fmean(spans[number] for number in usual)
    found = [
        _outlying(number, spans[number], spans[number] - usual_us, ranks, usual) for number in sorted(slow)
    ]
    times = Counter(each.cause for each in found)
    return tuple(each for each in found if times[each.cause] == 1)


def _outlying(
    number: int, span_us: float, more_us: float, ranks: Sequence[RankTrace], usual: Collection[int]
) -> OutlyingStep:
    grown: list[tuple[float, str, int]] = [(0.0, "", ranks[0].rank)]
    for rank in ranks:
        mine = [_parts_us(step) for step in rank.steps if step.step in usual]
        for parts in (_parts_us(step) for step in rank.steps if step.step == number and mine):
            grown += [
                (us - fmean(each[part] for each in mine), part, rank.rank) for part, us in parts.items()
            ]
    cause_us, cause, of_rank = max(grown, key=lambda each: each[0])
    if cause == "host":  # in other sentences, too, it stands for all that launches are waited for
        found = next(rank for rank in ranks if rank.rank == of_rank)
        waited_us = {
            step.step: _outside_us(step) if _is_on_cpu(found) else step.idle_by_cause_us.of_launches
            for step in found.steps
        }
        cause_us = waited_us[number] - fmean(waited_us[each] for each in usual if each in waited_us)
    return OutlyingStep(number, span_us, more_us, of_rank, cause, cause_us)


def _parts_us(step: Breakdown) -> dict[str, float]:
    """What a rank does in a step by itself: everything but waiting for others."""
    idle = {name: us for name, us in vars(step.idle_by_cause_us).items() if name != "comm_wait"}
    return {
        **idle,
        "compute": step.compute_us,
        "transfer": step.exposed_transfer_us,
        "copies": step.exposed_memcpy_us,
        "other_steps": step.other_steps_us,
    }


def of_usual_steps(report: TraceReport) -> TraceReport:
    """The report as if the outlying steps hadn't been recorded."""
    left_out = {each.step for each in outlying_steps(report.ranks)}
    if not left_out:
        return report
    windows = {
        rank.rank: [(s.start_us, s.start_us + s.span_us) for s in rank.steps if s.step in left_out]
        for rank in report.ranks
    }

    def is_usual(each: CollectiveReport) -> bool:
        first = each.ranks[0]
        return not any(begin <= first.start_us < end for begin, end in windows.get(first.rank, ()))

    ranks = [
        replace(rank, steps=tuple(step for step in rank.steps if step.step not in left_out))
        for rank in report.ranks
    ]
    return replace(report, ranks=tuple(ranks), collectives=tuple(filter(is_usual, report.collectives)))


def _noticed_step(each: OutlyingStep, report: TraceReport, cpu: CpuFacts | None) -> Finding:
    """The outlying step, and what is in it."""
    is_known = each.cause in IN_STEP and each.cause_us >= MOST * each.more_us
    calls = {"launching": cpu.launches_in, **dict.fromkeys(GAPS_OF_IDLE, cpu.blocked_in)} if cpu else {}
    return noticed(
        "outlying-step",
        ranks=[each.rank],
        outlying_step=each.step,
        left_out="causes",
        step_ms=each.span_us / 1000,
        usual_ms=(each.span_us - each.more_us) / 1000,
        spent=_spent(each, report) if is_known else None,
        call=calls.get(each.cause) if is_known else None,
        more_ms=each.cause_us / 1000,
        who=f"rank {each.rank}" if len(report.ranks) > 1 else None,
    )


def _spent(each: OutlyingStep, report: TraceReport) -> str:
    """What the outlying step does longer, as far as the traces tell it apart."""
    if each.cause == "transfer" and is_waiting_unknown(report):
        return NOT_RECORDED["untraced"]
    if each.cause == "host" and any(rank.rank == each.rank and _is_on_cpu(rank) for rank in report.ranks):
        part = _host_part(report, on_cpu=True)
        return NOT_RECORDED[part if part in ("unseen", "unread") else IN_STACKS]
    return IN_STEP[each.cause]


def capture_text(report: TraceReport) -> str:
    """`2 ranks on CPU, 3 steps`."""
    return _traced(report).text


def _compute_percent(report: TraceReport) -> float:
    """The share of compute in the time of all ranks."""
    stretches = explained_stretches(report)
    return 100 * sum(each.compute_us for each in stretches) / sum(each.span_us for each in stretches)


def _whose(report: TraceReport) -> str | None:
    """The ranks that a share of all their time is of; `None` of a single one."""
    if len(report.ranks) == 1:
        return None
    ranks = [rank.rank for rank, _ in _means(report)]
    return "all ranks" if len(ranks) == len(report.ranks) else ranks_text(ranks)


def trace_causes(report: TraceReport, hidden: bool = False) -> list[Cause]:
    """Everything but compute, the largest first, of usual steps; none where the traces hold no time.

    `hidden`: of the rank that loses most of its time to anything, not of the one that works longest.
    """
    of = OF_STEP[bool(outlying_steps(report.ranks))]
    report = of_usual_steps(report)
    copied = _copied(report)
    copies: Part = "pinned_copies" if copied else "copies"
    hosts = {on_cpu: _host_part(report, on_cpu) for on_cpu in (False, True)}
    most_transfer, unknown = _most_transfer(report), _ranks_of_unknown_waits(report)
    transfer: Part = "transfer" if most_transfer in (None, "data") else "model_transfer"
    parts = {
        rank.rank: _Parts(
            copies, hosts[_is_on_cpu(rank)], "communication" if rank.rank in unknown else transfer
        )
        for rank in report.ranks
    }
    waits_us = _waits_us(report)
    ranks = [
        _rank_time(rank, mean, parts[rank.rank], waits_us.get(rank.rank, mean.exposed_wait_us))
        for rank, mean in _means(report)
        if mean.span_us > 0
    ]
    if not ranks:
        return []
    slowest = max(ranks, key=lambda each: each.largest_share if hidden else each.work_ns).rank
    measured = MeasuredRanks(
        tuple(ranks),
        slowest,
        by_collectives=True,
        last=last_rank(report),
        copied=copied or PINNED,
        bubble=_bubble(report),
        of=of if steps_add_detail(report) else "its time",
        transfer_groups=_groups(report, most_transfer),
        wait_groups=_groups(report, _most_waiting(report)),
    )
    rank, mean = next(each for each in _means(report) if each[0].rank == slowest)
    whole = whole_ranks(report.ranks)
    facts = {each.rank: each.cpu for each in whole}
    has_all = len(report.ranks) > 1 and not _is_rank_missing(report)
    found = [
        _named(with_cpu(cause, rank.cpu, facts), rank, mean, whole, has_all) for cause in causes(measured)
    ]
    found = with_savings(found, report.savings, len(whole))
    return [of_all_ranks(cause, measured) for cause in found]


def _named(
    cause: Cause, rank: RankTrace, mean: Breakdown, whole: Sequence[RankTrace], has_all: bool
) -> Cause:
    """With the latency, what is done once, and whether this may be a first step.

    Args:
        cause: what takes the time.
        rank: the one that works longest.
        mean: its step.
        whole: all ranks.
        has_all: no rank is missing.
    """
    figures = dict(cause.figures)
    if cause.part == "communication" and has_all:
        figures["case"] = UNMATCHED
    if cause.part == "unknown" and (rank.is_thinned or rank.ops or rank.total.launch_delay_us):
        figures["case"] = EVENTS_LEFT_OUT if rank.is_thinned else LOST
    if cause.part == "unread" and NPU in rank.device:
        figures["case"] = UNREAD_NPU
    idle = mean.idle_by_cause_us
    if cause.part == "host" and len(cause.ranks) == 1:
        if idle.latency >= LATENCY_FROM * mean.span_us:
            figures["latency_ms"] = idle.latency / 1000
        call = rank.cpu.launches_in
        if call and COPYING.search(call) and idle.launching >= MOST * idle.of_launches:
            figures |= {"call": call, "operator": None, "inside": None}
    if cause.part != "one_off":
        return replace(cause, figures=figures)
    figures |= _once_figures([each for each in whole if each.rank in cause.ranks])
    if len(rank.steps) + rank.optimizer_steps == 1:
        figures["alone"] = "the only step"
    return replace(cause, figures=figures)


def _once_figures(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """What these ranks do longest of all that they do once, with its time in a step; empty if unlike."""
    longest = [max(each.cpu.once_us.items(), key=lambda item: item[1], default=("", 0.0)) for each in ranks]
    names = {name for name, _ in longest}
    if len(names) != 1 or "" in names:
        return {}
    times_ms = [us / 1000 / max(len(each.steps), 1) for each, (_, us) in zip(ranks, longest, strict=True)]
    ends_ms = [min(times_ms), max(times_ms)]
    is_one = len(set(map(format_ms, ends_ms))) == 1
    return {"call": names.pop(), "call_ms": ends_ms[1] if is_one else ends_ms}


def _means(report: TraceReport) -> list[tuple[RankTrace, Breakdown]]:
    """Each rank's mean step; all of its time where steps add no detail."""
    by_step = steps_add_detail(report)
    whole = whole_ranks(report.ranks)
    if by_step:
        return [(rank, mean_stretch(rank.steps)) for rank in whole if rank.steps]
    return [(rank, rank.total) for rank in whole]


@dataclass(frozen=True)
class _Parts:
    """The parts that copies, the host and transfers of a rank are."""

    copies: Part
    host: Part
    transfer: Part


def _rank_time(rank: RankTrace, mean: Breakdown, parts: _Parts, wait_us: float) -> RankTime:
    idle = mean.idle_by_cause_us
    worked_us, queue_us = _thread_us(rank)
    lost_us: dict[Part, float] = {
        **{parts.host if part == "host" else part: us for part, us in idle.by_part.items()},
        parts.copies: mean.exposed_memcpy_us,
        parts.transfer: mean.exposed_transfer_us,
        "other_steps": mean.other_steps_us,
    }
    if parts.host == "outside":
        lost_us["outside"] = _outside_us(mean)
    if parts.host == "python":  # what is more than its operators take; it was blocked for more than all of it
        lost_us["python"] = min(idle.host, max(0.0, worked_us - mean.compute_us))
        lost_us["blocked"] = max(0.0, idle.host - worked_us - queue_us)
    return RankTime(
        rank.rank,
        1000 * mean.span_us,
        {part: 1000 * us for part, us in lost_us.items()},
        comm_ns=1000 * (mean.exposed_comm_us + idle.comm_wait),
        wait_ns=1000 * (min(mean.exposed_wait_us, wait_us) + idle.comm_wait),
        samples=rank.facts.samples if rank.facts else None,
    )


def _outside_us(stretch: Breakdown) -> float:
    """Idle time of a CPU outside of operators; calls that issue collectives are operators, too."""
    return max(0.0, stretch.idle_by_cause_us.of_launches - stretch.host_while_idle_us.op)


def _issuing_share(report: TraceReport) -> float:
    """The largest share of a rank's time in which its CPU does nothing but issue collectives."""
    means = [mean for rank, mean in _means(report) if _is_on_cpu(rank) and mean.span_us > 0]
    return max((mean.host_while_idle_us.op / mean.span_us for mean in means), default=0.0)


def _waits_us(report: TraceReport) -> dict[int, float]:
    """Each rank's exposed wait apart from the bubble of a pipeline; empty where there is none."""
    found: dict[int, float] = {}
    if report.pipeline:
        for kind in (kind for kind in report.parallelism if kind.kind != "pipeline"):
            for each in kind.ranks:
                found[each.rank] = found.get(each.rank, 0.0) + (each.exposed_wait_us or 0.0)
        found = {rank.rank: found.get(rank.rank, 0.0) for rank in report.ranks}
    return found


def _is_on_cpu(rank: RankTrace) -> bool:
    """Whether its trace has no GPU work."""
    return rank.device.startswith(CPU)


def _host_part(report: TraceReport, on_cpu: bool) -> Part:
    """The wait of the ranks' device without work; of a CPU, traces of ours say whether its thread worked."""
    if not on_cpu:
        on_gpu = tuple(rank for rank in report.ranks if not _is_on_cpu(rank))
        idle = [each.idle_by_cause_us for each in explained_stretches(replace(report, ranks=on_gpu))]
        is_unknown = sum(each.unrecorded for each in idle) > MOST * sum(each.of_launches for each in idle)
        return "unrecorded" if is_unknown else "host"
    if any(rank.device != CPU for rank in report.ranks):
        return "unread" if any(NOT_READ in rank.device for rank in report.ranks) else "unseen"
    return "python" if all(map(_is_python_known, whole_ranks(report.ranks))) else "outside"


def _is_python_known(rank: RankTrace) -> bool:
    """Whether the CPU time of the rank's thread separates Python from waiting: it runs operators itself."""
    worked_us, queue_us = _thread_us(rank)
    compute_us = fmean(step.compute_us for step in rank.steps) if rank.steps else 0.0
    return bool(rank.steps) and worked_us > 0 and worked_us + queue_us >= OWN_OPERATORS * compute_us


def _thread_us(rank: RankTrace) -> tuple[float, float]:
    """Work of the thread that steps, and its wait for a core, in µs per step; 0 in traces of others."""
    return (rank.facts.thread_cpu_ns / 1000, rank.facts.queue_ns / 1000) if rank.facts else (0.0, 0.0)


def _copied(report: TraceReport) -> str | None:
    """What most of the time of copies is spent on, where that needs no pinning: their names say it."""
    copies = [row for rank in report.ranks for row in rank.per_step.kernels if row.kind == "memcpy"]
    times_us: dict[str | None, float] = dict.fromkeys((OF_DEVICE, PINNED, None), 0.0)
    for row in copies:
        is_pinned, is_within = "Pinned" in row.name, _WITHIN_DEVICE.search(row.name)
        times_us[OF_DEVICE if is_within else PINNED if is_pinned else None] += row.device_us
    if 2 * times_us[None] >= sum(times_us.values()):
        return None
    return max((OF_DEVICE, PINNED), key=lambda memory: times_us[memory])


def is_waiting_unknown(report: TraceReport) -> bool:
    """Whether of most collectives it isn't known how much is waiting."""
    unknown = _unknown_waits(report)
    return 2 * sum(unknown) > len(unknown)


def is_some_waiting_unknown(report: TraceReport) -> bool:
    """Whether of any collective it isn't known how much is waiting."""
    return any(_unknown_waits(report))


def _ranks_of_unknown_waits(report: TraceReport) -> set[int]:
    """The ranks of most of whose collectives it isn't known how much is waiting."""
    more_known = Counter[int]()
    for each, is_unknown in zip(report.collectives, _unknown_waits(report), strict=True):
        for part in each.ranks:
            more_known[part.rank] += -1 if is_unknown else 1
    return {rank for rank, num in more_known.items() if num < 0}


def _unknown_waits(report: TraceReport) -> list[bool]:
    """Of each collective, whether it isn't known how much is waiting: the last rank may be missing."""
    sizes = group_sizes(report)
    return [each.ranks[0].wait_us is None or lacks_rank(each, sizes) for each in report.collectives]


def group_sizes(report: TraceReport) -> dict[str, float]:
    """The number of ranks in each group; where that isn't known, infinite if a rank is missing, else 0."""
    unknown = inf if _is_rank_missing(report) else 0
    return {group: unknown if ranks is None else len(ranks) for group, ranks in report.groups.items()}


def lacks_rank(each: CollectiveReport, sizes: Mapping[str, float]) -> bool:
    """Whether the rank that it waited for may be missing; a message has but two."""
    is_known = each.ranks[0].wait_us is not None
    return is_known and len(each.ranks) < sizes[each.group] and each.kind not in MESSAGES


def _is_rank_missing(report: TraceReport) -> bool:
    return any((rank.world_size or 0) > len(report.ranks) for rank in report.ranks)


def _bubble(report: TraceReport) -> StageWait | None:
    """The wait of the stage with the largest bubble, for the stage that it waits for most."""
    found = [stage for stage in report.pipeline if stage.bubble_us > 0]
    if not found:
        return None
    most = max(found, key=lambda stage: stage.bubble_us)
    awaited = max(most.waits_us, key=lambda stage: most.waits_us[stage])
    return StageWait(most.stage, (int(awaited),), most.ranks, 1000 * most.bubble_us, 1000 * most.span_us)


def _groups(report: TraceReport, kind: str | None) -> str | None:
    """The name of a kind of parallelism's groups, where there are several kinds."""
    if kind is None or len(report.parallelism) < 2:
        return None
    return "messages between stages" if kind == "pipeline" else f"{kind} parallel groups"


def _most_waiting(report: TraceReport) -> str | None:
    """The kind of parallelism that most of the waiting is in, apart from bubbles; `None` if not known."""
    waits = {
        each.kind: each.mean_us(len(whole_ranks(report.ranks)))[2] or 0.0
        for each in report.parallelism
        if each.kind != "pipeline"
    }
    most = max(waits, key=lambda kind: waits[kind], default="other")
    return most if len(waits) > 1 and most != "other" and waits[most] > 0 else None


def _most_transfer(report: TraceReport) -> str | None:
    """The kind of parallelism that most of the exposed transfer is in; `None` if it isn't known."""
    means = {each.kind: each.mean_us(len(whole_ranks(report.ranks))) for each in report.parallelism}
    moved_us = {kind: exposed_us - (wait_us or 0.0) for kind, (_, exposed_us, wait_us) in means.items()}
    most = max(moved_us, key=lambda kind: moved_us[kind], default="other")
    return None if most == "other" or 2 * moved_us[most] < sum(moved_us.values()) else most


def last_rank(report: TraceReport) -> StragglerReport | None:
    """The rank that the others waited for most, if for any; between stages, waiting is the bubble.

    Where another one's extra work costs far more, that one: most waiting for it may be overlapped. Not by
    collectives of which a rank is missing: it may have come later still.
    """
    between_stages = "pipeline" if report.pipeline else None
    sizes = group_sizes(report)
    whole = (each for each in report.collectives if not lacks_rank(each, sizes))
    known = stragglers(each for each in whole if each.parallelism != between_stages)
    rows = [row for row in known if row.wait_caused_us]
    if not rows:
        return None
    saved_us = dict.fromkeys((row.rank for row in rows), 0.0)
    saved_us |= {each.rank: each.saved_us for each in report.savings if each.rank is not None}
    costliest = max(rows, key=lambda row: saved_us[row.rank])
    least_us = MENTION_FROM * max((mean.span_us for _, mean in _means(report)), default=0.0)
    is_far_more = MOST * saved_us[costliest.rank] >= max(saved_us[rows[0].rank], MOST * least_us)
    return costliest if is_far_more else rows[0]


def stragglers(collectives: Iterable[CollectiveReport], ranks: Sequence[int] = ()) -> list[StragglerReport]:
    """These ranks, and all that show who came last, sorted by how long the others waited for them."""
    known, arrivals, caused_ns = Counter(dict.fromkeys(ranks, 0)), Counter[int](), Counter[int]()
    for each in filter(_shows_last, collectives):
        known.update(part.rank for part in each.ranks)
        if (last := each.last_rank) is not None:
            arrivals[last] += 1
            waits_us = (part.wait_us or 0.0 for part in each.ranks if part.rank != last)
            caused_ns[last] += sum(round(1000 * us) for us in waits_us)
    rows = [StragglerReport(rank, num, arrivals[rank], caused_ns[rank] / 1000) for rank, num in known.items()]
    return sorted(rows, key=lambda row: (-row.wait_caused_us, row.rank))


def _shows_last(each: CollectiveReport) -> bool:
    """Whether it shows which rank came last, or that several did: not messages that link several ranks."""
    num_ranks = len(each.ranks)
    return (
        each.ranks[0].wait_us is not None and num_ranks > 1 and (each.kind not in MESSAGES or num_ranks == 2)
    )


def has_launches(report: TraceReport) -> bool:
    """Whether the launch of any GPU work is recorded."""
    return any(rank.total.launch_delay_us for rank in report.ranks)


def steps_add_detail(report: TraceReport) -> bool:
    """Whether steps add detail: there are several, or the only one doesn't cover its whole file."""
    return any(rank.steps and not _is_total(rank) for rank in report.ranks)


def _is_total(rank: RankTrace) -> bool:
    return len(rank.steps) == 1 and all(
        getattr(rank.steps[0], field.name) == getattr(rank.total, field.name) for field in fields(Breakdown)
    )


def whole_ranks(ranks: Sequence[RankTrace]) -> Sequence[RankTrace]:
    """The ranks whose files lack nothing; all, where every file does."""
    return [rank for rank in ranks if not rank.is_partial] or ranks


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
