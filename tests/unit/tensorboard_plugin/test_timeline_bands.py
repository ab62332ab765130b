"""The bands of a compact timeline: one row for what a rank does, its colours, and the order of the ranks."""

import random
from pathlib import Path

from gpurun.launcher.tensorboard_plugin.timeline.answers import meta_answer
from tests.unit.tensorboard_plugin.test_timeline_index import (
    TRANSFER,
    WAIT,
    index_of,
    lane,
    shown,
    two_ranks,
)
from tests.unit.trace.several_ranks.test_trace_parallelism import DESCRIBED, mesh, skews

BANDS = ("", " by operation", " by parallelism")


def test_a_row_a_rank_has_the_moments_of_the_overview_by_operation_and_parallelism(tmp_path: Path) -> None:
    chance = random.Random(2)
    job = mesh(chance, skews(chance), DESCRIBED, False, steps=2).job
    index = index_of(tmp_path, [job.events[rank] for rank in range(8)])
    compact = meta_answer(index)["compact"]
    legends = [[each["class"] for each in one["legend"]] for one in compact["colours"]]
    assert legends == [
        ["compute", "all_reduce", "send_recv", "wait", "idle"],
        ["compute", "data", "tensor", "pipeline", "wait", "idle"],
    ]
    for rank in range(8):
        plain, *split = (shown(index, lane(index, rank, f"rank {rank}{by}")) for by in BANDS)
        for band in split:
            assert [(min(kind, WAIT), *rest) if kind < 8 else (TRANSFER, *rest) for kind, *rest in band] == [
                (kind, *rest) for kind, *rest in plain
            ]
    orders = {order["key"]: order for order in compact["orders"]}
    assert list(orders) == ["rank", "wait", "stage", "group-data", "group-tensor"]
    assert orders["group-data"]["ranks"] == [0, 2, 1, 3, 4, 6, 5, 7]
    assert orders["group-data"]["begins_group"] == [True, False] * 4
    assert orders["stage"]["notes"] == ["stage 0"] * 4 + ["stage 1"] * 4
    waits = [float(note.removesuffix(" ms")) for note in orders["wait"]["notes"]]
    assert waits == sorted(waits, reverse=True)
    assert sorted(orders["wait"]["ranks"]) == list(range(8))


def test_one_kind_of_parallelism_is_no_choice(tmp_path: Path) -> None:
    compact = meta_answer(index_of(tmp_path, two_ranks()))["compact"]
    assert [one["key"] for one in compact["colours"]] == ["operation"]
    assert [one["key"] for one in compact["orders"]] == ["rank", "wait"]
