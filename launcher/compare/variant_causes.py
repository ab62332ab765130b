"""Which rank others wait for, why a variant is slower than another, and what even the fastest loses.

Only what traces and figures show: a loss must be a relevant part of the step, and have grown by most of what
the slower variant takes longer.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gpurun.launcher.compare.figures.ranks import RankFigures, slowest_rank
from gpurun.launcher.compare.figures.size_curves import DeviceCost
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.findings.finding import AFTER_ALL, Finding, finding
from gpurun.launcher.findings.trace_cases import OF_TRACED_STEP
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.trace.causes import (
    MENTION_FROM,
    MOST,
    Cause,
    MeasuredRanks,
    Part,
    RankTime,
    StageWait,
    advice_finding,
    advice_for,
    cause_finding,
    causes,
    grown,
    most_lost,
    to_do,
    with_cpu,
    with_savings,
)
from gpurun.launcher.trace.explain import OWN_OPERATORS
from gpurun.launcher.trace.model import IDLE_PARTS, Saving

TRACED_AS_TIMED = 0.15
"""Difference from which on it is mentioned: recording makes short steps longer."""
LARGE_FROM = 0.20
"""Share of the step from which on a loss of the fastest is named as a cause."""


def losses(ranks: Sequence[RankFigures]) -> list[Cause]:
    """Everything but compute that the traces of ranks show, the largest first; empty without figures."""
    slowest = slowest_rank(ranks)
    if slowest is None or slowest.span_ms is None:
        return []
    traced = [rank for rank in ranks if rank.span_ms is not None]
    is_whole = len(traced) == len(ranks)
    bubble = _bubble(traced) if is_whole else None
    # Of all ranks the same, so that they can be compared.
    on_host: Part = "host" if not on_cpu(slowest) else "python" if is_python_known(slowest) else "outside"
    times = tuple(_rank_time(rank, on_host, is_whole) for rank in traced)
    found = causes(MeasuredRanks(times, slowest.rank, is_whole, bubble=bubble))
    several = tuple(rank.rank for rank in traced if "ranks" in rank.savings_ms)
    savings = [
        Saving(
            part, rank.rank if part == "rank" else None, None, 1000 * ms, several if part == "ranks" else ()
        )
        for rank in traced
        for part, ms in rank.savings_ms.items()
    ]
    facts = {rank.rank: rank.cpu for rank in traced}
    return with_savings([with_cpu(each, slowest.cpu, facts) for each in found], savings, len(traced))


def _rank_time(rank: RankFigures, on_host: Part, is_whole: bool) -> RankTime:
    """`is_whole`: no rank's trace is missing, which others may have waited for."""
    transfer: Part = "transfer" if is_whole and rank.wait_ms is not None else "communication"
    span_ms = rank.span_ms or 0.0
    idle_ms = {part: getattr(rank, f"{part}_ms") or 0.0 for part in IDLE_PARTS}
    lost_ms: dict[Part, float] = {
        **{part: ms for part, ms in idle_ms.items() if part != "host"},
        on_host: python_ms(rank),
        "copies": rank.exposed_memcpy_ms or 0.0,
        "other_steps": rank.other_steps_ms or 0.0,
        transfer: rank.exposed_transfer_ms or 0.0,
        "blocked": blocked_ms(rank),
    }
    queued = rank.queue_percent or 0.0
    return RankTime(
        rank.rank,
        1e6 * span_ms,
        {part: 1e6 * ms for part, ms in lost_ms.items()},
        comm_ns=1e6 * (rank.exposed_comm_ms.trace or 0.0),
        wait_ns=1e6 * (rank.exposed_wait_ms or 0.0),
        samples=rank.local_batch,
        queued_ns=1e6 * span_ms * queued / 100 if queued > QUEUE_PERCENT else 0.0,
        added_ns=1e6 * _added_ms(rank),
    )


# The time between a rank's operators: how much of it Python certainly worked, and how much it was blocked.
#
# A thread that steps has CPU time for Python and for the operators that it runs itself. The operators' part
# is at most their time in the trace, and at least that less the waiting for a core: so both bounds are known.
# Other threads don't count, since those of OpenMP spin while nothing runs.


def on_cpu(rank: RankFigures) -> bool:
    """Whether the CPU itself is what computes."""
    return rank.device.startswith(CPU.name)


def is_python_known(rank: RankFigures) -> bool:
    """Whether CPU time separates Python from waiting, where the CPU computes.

    It doesn't where other threads than the one that steps run the operators.
    """
    if rank.thread_cpu_ms is None:
        return False
    return _thread_ms(rank) + _queue_ms(rank) >= OWN_OPERATORS * (rank.compute_ms or 0.0)


def python_ms(rank: RankFigures) -> float:
    """The least of `host_ms` in which Python worked; what isn't blocked, where that isn't known."""
    host_ms = rank.host_ms or 0.0
    if on_cpu(rank) and is_python_known(rank):
        others_ms = (rank.compute_ms or 0.0) + (rank.one_off_ms or 0.0)
        return min(host_ms, max(0.0, _thread_ms(rank) - others_ms))
    return host_ms - blocked_ms(rank)


def blocked_ms(rank: RankFigures) -> float:
    """The least of `host_ms` in which the rank slept or waited; nothing where CPU time wasn't counted."""
    host_ms, most_ms = rank.host_ms or 0.0, []
    if rank.cpu_ms is not None:
        most_ms.append(_longer(rank) * rank.cpu_ms)
    if on_cpu(rank) and is_python_known(rank):
        own_ms = max(0.0, (rank.compute_ms or 0.0) - _queue_ms(rank))
        most_ms.append(max(0.0, _thread_ms(rank) - own_ms))
    return max(0.0, host_ms - min(most_ms, default=host_ms))


def _thread_ms(rank: RankFigures) -> float:
    """CPU time of the thread that steps in ms, for a step that recording makes longer."""
    return _longer(rank) * (rank.thread_cpu_ms or 0.0)


def _queue_ms(rank: RankFigures) -> float:
    return (rank.span_ms or 0.0) * (rank.queue_percent or 0.0) / 100


def _longer(rank: RankFigures) -> float:
    return max(1.0, (rank.span_ms or 0.0) / rank.step_ms) if rank.step_ms else 1.0


def _added_ms(rank: RankFigures) -> float:
    """Milliseconds that recording adds to a GPU's wait for its host, if they are many."""
    if on_cpu(rank) or rank.step_ms is None or rank.span_ms is None:
        return 0.0
    return max(0.0, rank.span_ms - rank.step_ms) if is_far_from_timed(rank.span_ms, rank.step_ms) else 0.0


def _bubble(ranks: Sequence[RankFigures]) -> StageWait | None:
    """The wait of the stage with the largest bubble; `None` without a pipeline."""
    found = [rank.bubble for rank in ranks if rank.bubble is not None]
    if not found:
        return None
    most = max(found, key=lambda bubble: bubble.ms)
    own = [rank for rank in ranks if rank.bubble is not None and rank.bubble.stage == most.stage]
    span_ms = sum(rank.span_ms or 0.0 for rank in own) / len(own)
    return StageWait(most.stage, most.awaited, tuple(rank.rank for rank in own), 1e6 * most.ms, 1e6 * span_ms)


def is_far_from_timed(span_ms: float, step_ms: float) -> bool:
    """Whether the steps of the trace are much longer or shorter than the timed ones."""
    return abs(span_ms / step_ms - 1) > TRACED_AS_TIMED


def largest_loss(ranks: Sequence[RankFigures]) -> Cause | None:
    """The loss that takes most of the step, apart from compute; `None` without traces."""
    return most_lost(losses(ranks))


def why_slower(slower: VariantResult, faster: VariantResult) -> Cause | None:
    """`rank 1 waits 19 % of its step (11.2 of 60.1 ms) for rank 0's larger batch`; `None`: it isn't known."""
    found = main_cause(slower, faster) or grown_compute(slower, faster)
    return found or _by_costs(slower, faster) or _by_ablation(slower, faster)


def loss_of(result: VariantResult, leader: VariantResult | None) -> Cause | None:
    """Why it is slower than the leader; else its own largest loss, if that is a relevant part of its step."""
    own, why = largest_loss(result.ranks), why_slower(result, leader) if leader else None
    return why or (own if own and own.weight >= MENTION_FROM else None)


def main_cause(slower: VariantResult, faster: VariantResult) -> Cause | None:
    """The loss that grew most, if it explains most of the difference; `None` where the figures don't say."""
    longer_ms = _longer_ms(slower, faster)
    return None if longer_ms is None else grown(losses(slower.ranks), losses(faster.ranks), 1e6 * longer_ms)


def _longer_ms(slower: VariantResult, faster: VariantResult) -> float | None:
    """The difference of their steps, as timed; `None` where they do different work or have no times."""
    if slower.step_ms is None or faster.step_ms is None or slower.global_batch != faster.global_batch:
        return None
    return slower.step_ms.estimate - faster.step_ms.estimate


def _by_costs(slower: VariantResult, faster: VariantResult) -> Cause | None:
    """The wait that grew, by the costs of samples on each device, where these were measured for a split."""
    longer_ms, balanced = _longer_ms(slower, faster), faster.balanced or slower.balanced
    is_split = (slower.strategy, slower.varied) == (faster.strategy, faster.varied)
    if longer_ms is None or balanced is None or not is_split:
        return None
    waits, waits_before = (_waits(each, balanced.devices) for each in (slower, faster))
    return grown(waits, waits_before, 1e6 * longer_ms)


def _by_ablation(slower: VariantResult, faster: VariantResult) -> Cause | None:
    """Communication that grew, as measured by leaving it out; `None` with traces, which show it better."""
    longer_ms, rank = _longer_ms(slower, faster), slowest_rank(slower.ranks)
    before_ms, lost_ms = (each.exposed_comm_ms.ablation or 0.0 for each in (faster, slower))
    if rank is None or longer_ms is None or slower.step_ms is None or slower.traced_steps is not None:
        return None
    if faster.exposed_comm_ms.ablation is None and len(faster.ranks) > 1:
        return None  # it may lose as much
    figures = {"who": f"rank {rank.rank}", "of": "its step", "case": "untraced"}
    found = Cause("communication", (rank.rank,), 1e6 * lost_ms, 1e6 * slower.step_ms.estimate, figures)
    before = replace(found, lost_ns=1e6 * max(0.0, before_ms))
    return grown((found,), (before,), 1e6 * longer_ms)


def _waits(result: VariantResult, costs: Sequence[DeviceCost]) -> list[Cause]:
    """The wait for the rank whose samples take longest; empty where the costs aren't known."""
    batches = [rank.local_batch for rank in result.ranks if rank.local_batch is not None]
    if result.step_ms is None or len(batches) != len(costs) or not all(cost.straight for cost in costs):
        return []
    step_ns = 1e6 * result.step_ms.estimate
    works_ns = [1e6 * cost.ms(samples) for cost, samples in zip(costs, batches, strict=True)]
    times = tuple(
        RankTime(rank.rank, step_ns, {}, step_ns - work_ns, max(works_ns) - work_ns, samples)
        for rank, work_ns, samples in zip(result.ranks, works_ns, batches, strict=True)
    )
    return causes(MeasuredRanks(times, max(times, key=lambda each: each.work_ns).rank))


def grown_compute(slower: VariantResult, faster: VariantResult) -> Cause | None:
    """Compute itself, if it grew by most of the difference, with what the GPU shows of the reason."""
    longer_ms = _longer_ms(slower, faster)
    rank, other = slowest_rank(slower.ranks), slowest_rank(faster.ranks)
    if longer_ms is None or rank is None or other is None:
        return None
    if rank.compute_ms is None or other.compute_ms is None:
        return None
    if any(rank.span_ms is None for rank in (*slower.ranks, *faster.ranks)):
        return None  # another rank may be the one that computes for longer
    more_ms, span_ms = rank.compute_ms - other.compute_ms, rank.span_ms or 0.0
    if longer_ms <= 0 or more_ms < max(MOST * longer_ms, MENTION_FROM * span_ms):
        return None
    # Operators of replicas in one process aren't compared with those of ranks: on a CPU their time includes
    # waits for the interpreter's lock and for cores that replicas share, and `dp` has operators of its own
    # (scatter, replicate, gather). What grew would be the strategy, under the name of an operator.
    is_alike = STRATEGIES[slower.strategy].has_replicas == STRATEGIES[faster.strategy].has_replicas
    figures: dict[str, Any] = {"who": f"rank {rank.rank}", "of": "its step", **_why_compute_grew(rank, other)}
    if is_alike:
        figures["grown_ms"] = grown_operators(rank, other, more_ms) or None
    return Cause("compute", (rank.rank,), 1e6 * rank.compute_ms, 1e6 * span_ms, figures, 1e6 * more_ms)


NAMED_OPERATORS = 2
"""The most operators that are named, those that grew most."""
NAMED_FROM = 0.2
"""Share of the growth of compute from which on an operator is named."""


def grown_operators(rank: RankFigures, other: RankFigures, more_ms: float) -> dict[str, float]:
    """The operators that grew by a relevant part of `more_ms`, with their growth in ms.

    Only the longest operators are known. One that the other rank's list lacks took at most as long there as
    the last of it.
    """
    before = other.operators_ms
    least_ms = min(before.values(), default=0.0)
    more = {name: ms - before.get(name, least_ms) for name, ms in rank.operators_ms.items() if before}
    most = sorted(more, key=lambda name: -more[name])[:NAMED_OPERATORS]
    return {name: more[name] for name in most if more[name] >= NAMED_FROM * more_ms}


LOWER_CLOCK = 0.95
"""Below this share of the other's clock, it is mentioned."""


def _why_compute_grew(rank: RankFigures, other: RankFigures) -> dict[str, Any]:
    """Figures that differ between the ranks and may be the reason."""
    found: dict[str, Any] = {}
    if rank.sm_clock_mhz and other.sm_clock_mhz and rank.sm_clock_mhz < LOWER_CLOCK * other.sm_clock_mhz:
        found |= {"sm_clock_mhz": rank.sm_clock_mhz, "other_sm_clock_mhz": other.sm_clock_mhz}
    if rank.alloc_retries > other.alloc_retries:
        found["num_retries"] = rank.alloc_retries
    if (rank.local_batch or 0) > (other.local_batch or 0):
        found |= {"num_samples": rank.local_batch, "other_samples": other.local_batch}
    return found


def cause(
    found: Cause, variant: VariantResult, weight: float | None = None, than: str = "the fastest"
) -> Finding:
    """The cause as a finding about the variant, in ms of its timed step.

    Where the traced step is far from that, in ms of the traced one, next to the timed one.
    """
    timed_ms, step_ms = _other_timed_ms(found, variant), variant.step_ms
    if timed_ms is None and step_ms is not None and found.span_ns:
        found = _scaled(found, 1e6 * step_ms.estimate / found.span_ns)
    of = {} if timed_ms is None else {"of": OF_TRACED_STEP, "timed_ms": timed_ms}
    return cause_finding(found, variant.id, weight, than, where=variant_label(variant), **of)


def _scaled(found: Cause, factor: float) -> Cause:
    """The cause with all its times so many times as long, but that of the traced step itself."""

    def scaled(name: str, value: Any) -> Any:
        if not name.endswith("_ms") or name == "traced_ms":
            return value
        if isinstance(value, list):
            return [factor * ms for ms in value]
        return (
            {each: factor * ms for each, ms in value.items()} if isinstance(value, dict) else factor * value
        )

    return replace(
        found,
        lost_ns=factor * found.lost_ns,
        replayed_ns=None if found.replayed_ns is None else factor * found.replayed_ns,
        span_ns=factor * found.span_ns,
        more_ns=None if found.more_ns is None else factor * found.more_ns,
        figures={name: value and scaled(name, value) for name, value in found.figures.items()},
    )


def _other_timed_ms(found: Cause, variant: VariantResult) -> float | None:
    step_ms = variant.step_ms.estimate if variant.step_ms else None
    is_far = step_ms is not None and is_far_from_timed(found.span_ns / 1e6, step_ms)
    return step_ms if is_far else None


def remaining(fastest: VariantResult, is_explained: bool = False) -> tuple[Finding, ...]:
    """The largest loss of the fastest variant, if it is large, and the next thing to try.

    `is_explained`: whether it is known why others are slower.
    """
    found, where = largest_loss(fastest.ranks), variant_label(fastest)
    if found is None and is_explained and len(set(fastest.split or ())) > 1:
        return (to_do("fastest", "uneven"),)
    if found is None and not any(rank.trace for rank in fastest.ranks):
        return (to_do("not-recorded", "why-untraced" if fastest.kind.runs_program else "untraced"),)
    if found is None or _other_timed_ms(found, fastest) is not None:
        return (to_do("noticed", "far"),)
    if found.weight < MENTION_FROM:
        most = max(1, math.ceil(100 * found.weight))
        return (finding("nothing-left", fastest.id, where=where, most=most),)
    is_large = found.weight >= LARGE_FROM
    is_named = is_large and not is_explained
    return (cause(found, fastest, None if is_large else AFTER_ALL), *_next_step(found, fastest, is_named))


def _next_step(found: Cause, variant: VariantResult, is_named: bool) -> tuple[Finding, ...]:
    """The next step against a loss; empty where nothing is known to do."""
    if not found.has_advice:
        return ()
    where = None if is_named else variant_label(variant)
    return (advice_finding(found, advice(found, variant), variant.id, where),)


def advice(found: Cause, variant: VariantResult) -> str:
    """The advice about a loss, other than what the variant does already."""
    of_program = variant.kind.runs_program
    has_no_other_split = variant.split_name == "balanced" or of_program
    strategy = STRATEGIES[variant.strategy]
    of_transfer = "transfer-buckets" if _fills_buckets(variant) else strategy.transfer_advice
    in_use = {remedy for rank in variant.ranks for remedy in rank.cpu.remedies}
    return advice_for(found, not of_program, has_no_other_split, of_transfer, in_use)


SMALLEST_BUCKET_GIB = 1 / 1024
"""The smallest bucket that is worth a try: other sizes change nothing for smaller gradients."""


def _fills_buckets(variant: VariantResult) -> bool:
    gradients_gib = max((rank.memory_gib.get("gradients") or 0.0 for rank in variant.ranks), default=0.0)
    strategy = STRATEGIES[variant.strategy]
    has_buckets = strategy.has_buckets and not strategy.transfer_advice
    return has_buckets and gradients_gib > SMALLEST_BUCKET_GIB
