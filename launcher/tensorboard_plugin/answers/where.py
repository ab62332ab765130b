"""Where each traced step's time went, per rank, from the index alone: also for traces that aren't ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpurun.launcher.compare.figures.ranks import (
    RankBreakdown,
    mean_breakdown,
    quiet_steps,
    rank_breakdown,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.trace.explain import whole_ranks
from gpurun.launcher.trace.model import RankTrace
from gpurun.launcher.units import format_ms, format_number

PARTS = (
    "span",
    "compute",
    "exposed_transfer",
    "exposed_wait",
    "exposed_memcpy",
    "other_steps",
    "idle",
    "input",
)
MAX_STEPS = 200
"""Per rank; a capture has 3 to 50."""


def breakdown_answer(header: Header, ours: bool = True) -> dict[str, Any]:
    """The steps of each rank, and what is typical of them; see README.md.

    Args:
        header: of the index.
        ours: whether the traces are of a run of ours, whose comparison takes the half of its steps
            with the least interference. Of other traces all steps count, as for `gpurun trace`.
    """
    typical = quiet_steps(header.ranks)[1] if ours else mean_steps(header)
    whole = whole_ranks(header.ranks)
    has_steps = any(rank.steps for rank in whole)
    every = [rank_breakdown(each) for rank in whole for each in rank.steps or (rank.total,)]
    return {
        "has_steps": has_steps,
        "warnings": header.warnings,
        "mean": figures(mean_breakdown(every)) if every else None,
        "sentence": _sentence(header, has_steps),
        "parallelism": parallelism_sentences(header),
        "ranks": [
            {
                "rank": rank.rank,
                "device": rank.device,
                "typical": figures(typical[rank.rank]) if rank.rank in typical else None,
                "steps": [
                    {"step": step.step, **figures(rank_breakdown(step))} for step in rank.steps[:MAX_STEPS]
                ],
            }
            for rank in header.ranks
        ],
    }


def mean_steps(header: Header) -> dict[int, RankBreakdown]:
    """Each rank's mean over all of its steps; all of its trace where that has no steps."""
    return {rank.rank: mean_of(rank) for rank in header.ranks}


def mean_of(rank: RankTrace) -> RankBreakdown:
    """The mean of the rank's steps; its whole trace where that has none."""
    return mean_breakdown([rank_breakdown(each) for each in rank.steps or (rank.total,)])


def _sentence(header: Header, has_steps: bool) -> str:
    """The time of a step on the rank on which it takes longest, and what `gpurun trace` concludes."""
    means = {rank.rank: mean for rank in whole_ranks(header.ranks) if (mean := mean_of(rank)).span_ns}
    if not means:
        return "These traces have no time to divide."
    slowest = max(means, key=lambda rank: means[rank].span_ns)
    what = "A step" if has_steps else "The recorded work"
    where = f" on rank {slowest}, the longest of all" if len(means) > 1 else ""
    share = format_number(100 * means[slowest].compute_ns / means[slowest].span_ns, 0)
    takes = f"{what} takes {format_ms(means[slowest].span_ns / 1e6)} ms{where}"
    return f"{takes}; {share} % of it is compute. {header.conclusion}"


def parallelism_sentences(header: Header) -> list[str]:
    """The cost of each kind of parallelism, and the stages' waits; empty for a single kind without stages."""
    found = []
    if len(header.parallelism) > 1:
        kinds = ", ".join(
            f"{each.kind} {format_ms(each.mean_us(len(whole_ranks(header.ranks)))[1] / 1000)} ms"
            for each in header.parallelism
        )
        found.append(f"Communication that no compute overlaps, by kind of parallelism: {kinds}.")
    if header.pipeline:
        stages = ", ".join(
            f"stage {each.stage} {format_ms(each.bubble_us / 1000)} of {format_ms(each.span_us / 1000)} ms"
            for each in header.pipeline
        )
        found.append(f"Pipeline bubble: {stages}.")
    return found


def figures(step: RankBreakdown) -> Mapping[str, float]:
    """The parts of a step in ms."""
    return {f"{part}_ms": getattr(step, f"{part}_ns") / 1e6 for part in PARTS}
