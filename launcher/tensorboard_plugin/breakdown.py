"""Where each traced step's time went, per rank, from the index alone: also for traces that aren't ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.compare.traced import RankBreakdown, rank_breakdown, undisturbed_steps
from launcher.tensorboard_plugin.timeline.format import Header

PARTS = ("span", "compute", "exposed_transfer", "exposed_wait", "exposed_memcpy", "idle", "input")
MAX_STEPS = 200
"""Per rank; a capture has 3 to 50."""


def breakdown_answer(header: Header) -> dict[str, Any]:
    """The steps of each rank, and what is typical of them; see README.md."""
    _, typical = undisturbed_steps(header.ranks)
    return {
        "warnings": header.warnings,
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


def figures(step: RankBreakdown) -> Mapping[str, float]:
    """The parts of a step in ms."""
    return {f"{part}_ms": getattr(step, f"{part}_ns") / 1e6 for part in PARTS}
