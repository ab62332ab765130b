"""The structure of the timeline: lanes, steps, classes."""

from __future__ import annotations

from typing import Any

from gpurun.launcher.tensorboard_plugin.timeline.bands import active_ns, compact_answer
from gpurun.launcher.tensorboard_plugin.timeline.blocks import KIND_NAMES
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index

MAX_STEPS = 20_000


def meta_answer(index: Index) -> dict[str, Any]:
    """Lanes by rank, and the steps; see README.md."""
    header = index.header
    devices = {rank.rank: rank.device for rank in header.ranks}
    lanes: dict[int, list[dict[str, Any]]] = {rank: [] for rank in sorted(header.moments)}
    for number, lane in enumerate(header.lanes):
        lanes[lane.rank].append(
            {"lane": number, "kind": lane.kind, "label": lane.label, "rows": len(lane.rows)}
        )
    return {
        "warnings": header.warnings,
        "apart": header.apart,
        "linked": header.linked,
        "base_time_ns": str(header.base_time_ns),
        "end_ns": header.end_ns,
        "num_events": header.num_events,
        "classes": KIND_NAMES,
        "ranks": [
            {
                "rank": rank,
                "label": f"rank {rank}",
                "device": devices.get(rank),
                "active_ns": active_ns(index, rank),
                "lanes": found,
            }
            for rank, found in lanes.items()
        ],
        "compact": compact_answer(index),
        "steps": header.steps[:MAX_STEPS],
    }
