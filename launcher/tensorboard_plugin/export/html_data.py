"""What the report as a file is drawn from: the answers that the TensorBoard tab would be given."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.report.order import by_rank
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.tensorboard_plugin.answers.breakdown import breakdown_answer
from gpurun.launcher.tensorboard_plugin.answers.runs import own, run_answer, steps_answer
from gpurun.launcher.tensorboard_plugin.logdir.listing import Listed
from gpurun.launcher.tensorboard_plugin.timeline.indexing import Indexes
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.tensorboard_plugin.timeline.meta import meta_answer
from gpurun.launcher.tensorboard_plugin.timeline.window import Window, window_answer

WIDTH_PX = 4096
"""Finer than a screen, so that there is something to zoom into."""
MAX_LANES = 256
MAX_TIMELINE_BYTES = 24 << 20
"""Before compression, of all timelines together: about a tenth of it in the file."""

Answer = dict[str, Any]


def report_data(comparison: Comparison, run: RunDir) -> Answer:
    """Run, steps and timelines, as the page asks for them."""
    ids = [variant.id for variant in comparison.variants]
    return {
        "run": {**run_answer(run), "status": "done"},
        "steps": steps_answer(run, ids)["variants"],
        "timelines": dict(_timelines(comparison, own(run))),
    }


def _timelines(comparison: Comparison, listed: Listed) -> Iterator[tuple[str, Answer]]:
    """Of the variants in the order of the table, as many as there is room for."""
    ranked, others = by_rank(comparison)
    indexes, room = Indexes(), MAX_TIMELINE_BYTES
    for variant in (*ranked, *others):
        timeline = _timeline(indexes, listed, variant.id)
        if timeline is None:
            continue
        room -= len(msgspec.json.encode(timeline))
        if room < 0:
            return
        yield variant.id, timeline


def _timeline(indexes: Indexes, listed: Listed, variant: str) -> Answer | None:
    """A variant's timeline in one answer; `None` without a trace that can be read."""
    traces = listed.indexed(variant)
    if traces is None:
        return None
    indexes.get(traces)
    indexes.wait()
    index = indexes.get(traces)
    if not isinstance(index, Index):
        return None
    meta = meta_answer(index)
    lanes = tuple(lane["lane"] for rank in meta["ranks"] for lane in rank["lanes"])[:MAX_LANES]
    window = window_answer(index, Window(0, max(1, meta["end_ns"]), WIDTH_PX, lanes))
    return {
        "meta": _ready(_without(meta, lanes)),
        "window": _ready(window),
        "breakdown": _ready(breakdown_answer(index.header)),
    }


def _ready(answer: Mapping[str, Any]) -> Answer:
    return {"state": "ready", "problems": [], **answer}


def _without(meta: Mapping[str, Any], lanes: tuple[int, ...]) -> Answer:
    """Only the lanes that the file holds."""
    kept = set(lanes)
    ranks = [
        {**rank, "lanes": [lane for lane in rank["lanes"] if lane["lane"] in kept]} for rank in meta["ranks"]
    ]
    return {**meta, "ranks": [rank for rank in ranks if rank["lanes"]]}
