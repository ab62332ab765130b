"""The tab's operators: rows, rest and overlap add up to the step, and the rest is never less than nothing."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gpurun.launcher.tensorboard_plugin.answers.operators import KINDS, Kind, operators_answer
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TraceReport
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, step, write

SIDE_BY_SIDE = {
    "streams": [launch(0, 1, 1), launch(2, 1, 2), kernel("a", 5, 80, 1), kernel("b", 5, 90, 2, stream=8)],
    "threads": [span("cpu_op", "aten::a", 5, 80), span("cpu_op", "aten::b", 5, 90, tid=2)],
    "outside": [launch(150, 1, 1), kernel("a", 155, 300, 1)],
}


def header_of(report: TraceReport) -> Header:
    """As much of an index as the table of operators is made from."""
    return cast(Header, SimpleNamespace(ranks=report.ranks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("events", SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_the_rest_is_never_negative(tmp_path: Path, events: list[Event], kind: Kind) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *events])])
    answer = operators_answer(header_of(report), None, kind)
    rows_ms = sum(row["self_ms"] for row in answer["rows"])
    assert answer["rest_ms"] >= report.ranks[0].steps[0].idle_us / 1000
    assert answer["overlap_ms"] >= 0
    assert rows_ms + answer["rest_ms"] - answer["overlap_ms"] == pytest.approx(answer["step_ms"])


RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
BY_HAND = [
    span("cpu_op", "aten::mm", 0, 5),
    *(launch(1, 1, 1), kernel("gemm", 10, 50, 1)),
    span("cpu_op", "aten::copy_", 6, 5),
    *(launch(7, 1, 2), kernel("Memcpy HtoD", 60, 10, 2) | {"cat": "gpu_memcpy"}),
    *(launch(20, 1, 3), kernel(RING, 70, 20, 3, stream=20)),
    *(launch(22, 1, 4), kernel("triton_mm", 90, 7, 4)),
]


def test_what_no_operator_launched_has_rows_of_its_class(tmp_path: Path) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *BY_HAND])])
    shown = {kind: operators_answer(header_of(report), None, kind) for kind in KINDS}
    rows = {kind: {row["name"]: row for row in answer["rows"]} for kind, answer in shown.items()}
    assert {name: (row["class"], row["self_ms"], row["named"]) for name, row in rows["ops"].items()} == {
        "aten::mm": ("compute", 0.05, True),
        "aten::copy_": ("copy", 0.01, True),
        "collectives that no operator launched": ("transfer", 0.02, False),
        "compute that no operator launched": ("compute", 0.007, False),
    }
    assert {(row["class"], row["self_ms"]) for row in rows["modules"].values()} == {
        ("compute", 0.057), ("transfer", 0.02), ("copy", 0.01),
    }  # fmt: skip
    assert all(answer["rest_ms"] == pytest.approx(0.013) for answer in shown.values())
    assert all(answer["overlap_ms"] == pytest.approx(0) for answer in shown.values())


def test_on_the_cpu_what_ran_outside_of_modules_is_no_idle_time(tmp_path: Path) -> None:
    events = [span("cpu_op", "aten::a", 5, 80), span("cpu_op", "gloo:all_reduce", 85, 10, tid=2)]
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *events])])
    answer = operators_answer(header_of(report), None, "modules")
    assert {row["name"]: (row["class"], row["self_ms"]) for row in answer["rows"]} == {
        "compute outside of modules": ("compute", 0.08),
        "collectives": ("transfer", 0.01),
    }
    assert answer["rest_ms"] == pytest.approx(0.01)


def test_a_collectives_row_says_how_much_of_it_is_waiting(tmp_path: Path) -> None:
    for rank, start in enumerate((10, 40)):
        events = [step(1, 0, 60), span("cpu_op", "nccl:all_reduce", 1, 5), launch(2, 1, 1)]
        events.append(kernel(RING, start, 50 - start, 1, stream=20))
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    (row,) = operators_answer(header_of(replace(report, ranks=report.ranks[:1])), None, "ops")["rows"]
    assert (row["self_ms"], row["wait_ms"]) == (pytest.approx(0.04), pytest.approx(0.03))


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_other_steps_alone_is_no_idle_time(tmp_path: Path, kind: Kind) -> None:
    events = [step(1, 0, 50), launch(1, 1, 1), kernel("a", 10, 20, 1), kernel("lost", 32, 8)]
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    answer = operators_answer(header_of(report), None, kind)
    (other,) = (row for row in answer["rows"] if row["class"] == "other_steps")
    assert (other["name"], other["named"], other["self_ms"]) == ("only work of other steps", False, 0.008)
    assert (answer["rest_ms"], answer["overlap_ms"]) == (pytest.approx(0.022), pytest.approx(0))
