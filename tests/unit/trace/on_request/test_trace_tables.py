"""The tables on request, on traces made by hand; and the formulas behind them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.report.terminal.changes import render_trace_diff
from gpurun.launcher.report.terminal.trace import render_tables
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.on_request.shapes import Work, call_of, work_of
from gpurun.launcher.trace.diff import diff_traces
from gpurun.launcher.trace.model import TABLES, TraceReport
from tests.said import trace_notes
from tests.unit.trace.on_request.simulated_job import draw
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, step, write
from tests.wording import Wording

RING = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
H100 = {"deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}]}


def op(name: str, start_us: float, length_us: float, dims: Any, types: Any, values: Any = ()) -> Event:
    args = {"Input Dims": dims, "Input type": types, "Concrete Inputs": list(values)}
    return span("cpu_op", name, start_us, length_us, **args)


def rank_events(late_us: float) -> list[Event]:
    bf16 = ["c10::BFloat16", "c10::BFloat16"]
    copy = kernel("Memcpy HtoD (Pinned -> Device)", 5, 10, 3, stream=9, bytes=250_000)
    facts = {"Collective name": "allreduce", "In msg nelems": 500, "Out msg nelems": 500, "dtype": "BFloat16"}
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2, "Seq": 1}
    return [
        step(1, 0, 200),
        op("aten::mm", 20, 10, [[1024, 512], [512, 2048]], bf16),
        launch(22, 2, 1),
        kernel("sm90_gemm", 30, 4, 1),
        op("aten::mm", 40, 10, [[1024, 512], [512, 2048]], bf16),
        launch(42, 2, 2),
        kernel("sm90_gemm", 50, 6, 2),
        launch(1, 1, 3),
        copy | {"cat": "gpu_memcpy"},
        launch(60, 1, 4),
        kernel(RING, 70 + late_us, 30 - late_us, 4, stream=20, **facts | group),
    ]


def test_shapes_of_one_capture_only_are_said_and_no_row_is_new(tmp_path: Path, wording: Wording) -> None:
    reports = []
    for name in ("a", "b"):
        mm = op("aten::mm", 20, 5, [[64, 64], [64, 64]], ["float", "float"])
        if name == "a":
            mm["args"] = {}
        events = [step(1, 0, 100), mm, launch(21, 1, 1), kernel("gemm", 25, 4, 1)]
        file = write(tmp_path / f"{name}.json", events, **rank_info(0, 1))
        reports.append(analyse_paths([file], None, frozenset({"shapes", "operators"})))
    found = diff_traces(*reports)
    wording(trace_notes(found))
    assert (found.shapes, found.operators) == ((), ())


@pytest.fixture
def report(tmp_path: Path) -> TraceReport:
    for rank in (0, 1):
        write(tmp_path / f"r{rank}.json", rank_events(10.0 * rank), **rank_info(rank, 2) | H100)
    return analyse_paths([tmp_path], None, frozenset(TABLES))


def test_operators_by_shape_with_the_share_of_the_roofline(report: TraceReport) -> None:
    assert report.shapes is not None
    (row,) = report.shapes
    assert (row.name, row.shapes, row.types) == ("aten::mm", "1024×512, 512×2048", "BFloat16, BFloat16")
    assert (row.count, row.device_us) == (4, 20.0)
    assert row.flops == 2 * 1024 * 512 * 2048
    assert row.bytes == 2 * (1024 * 512 + 512 * 2048 + 1024 * 2048)
    assert row.tflop_per_s == pytest.approx(row.flops / 5e-6 / 1e12)
    # 7.3 MB take 2.19 µs at 3350 GB/s, 2.1 GFLOP 2.17 µs at 989.4 TFLOP/s; the calls took 5.
    assert (row.bound, round(row.roofline_percent or 0, 1)) == ("memory", 43.8)


def test_kernels_by_the_operator_that_launched_them(report: TraceReport) -> None:
    assert report.kernels_by_shape is not None
    rows = {row.name: row for row in report.kernels_by_shape}
    gemm = rows["sm90_gemm"]
    assert (gemm.op, gemm.shapes, gemm.count) == ("aten::mm", "1024×512, 512×2048", 4)
    assert (gemm.device_us, gemm.min_us, gemm.max_us) == (20.0, 4.0, 6.0)
    assert (rows[RING].op, rows[RING].kind) == (None, "comm")


def test_collectives_by_size_and_type(report: TraceReport) -> None:
    assert report.collective_totals is not None
    (row,) = report.collective_totals
    assert (row.kind, row.bytes, row.dtype, row.count) == ("all_reduce", 1000, "BFloat16", 1)
    assert (row.transfer_us, row.arrival_spread_us, row.wait_us) == (20.0, 10.0, 10.0)
    assert (row.algorithm_gb_per_s, row.bus_gb_per_s) == (0.05, 0.05)


def test_copies_by_direction(report: TraceReport) -> None:
    assert report.copies is not None
    (row,) = report.copies
    assert (row.direction, row.count, row.bytes) == ("HtoD (Pinned -> Device)", 2, 500_000)
    assert (row.gb_per_s, row.exposed_us) == (25.0, 20.0)


def test_launches_and_the_queue(report: TraceReport) -> None:
    assert report.launches is not None
    first, _ = report.launches
    assert first.delay_percentiles_us == (8.0, 10.0, 10.0, 10.0)
    assert first.queue_max == 1
    # Launched at 1, 22, 42 and 60 µs, done at 15, 34, 56 and 100: 80 of 99 µs with one piece of work.
    assert first.queue_mean == pytest.approx(80 / 99)
    assert first.queue_empty_percent == pytest.approx(100 * 19 / 99)
    assert (first.short_kernels, first.short_us, first.slow_launches) == (2, 10.0, 0)


def test_tables_only_on_request(tmp_path: Path) -> None:
    write(tmp_path / "r0.json", rank_events(0), **rank_info(0, 1))
    found = analyse_paths([tmp_path])
    assert found.shapes is None
    assert found.critical_path is None
    assert analyse_paths([tmp_path], None, frozenset({"copies"})).shapes is None


def test_two_captures_by_shape(tmp_path: Path) -> None:
    reports = []
    for name, sides in (("a", (64, 128)), ("b", (64, 256))):
        events = [step(1, 0, 100)]
        for number, side in enumerate(sides, 1):
            events += [
                op("aten::mm", 20 * number, 5, [[side, side], [side, side]], ["float", "float"]),
                launch(20 * number + 1, 1, number),
                kernel("gemm", 20 * number + 5, side / 16, number),
            ]
        file = write(tmp_path / f"{name}.json", events, **rank_info(0, 1))
        reports.append(analyse_paths([file], None, frozenset({"shapes"})))
    found = diff_traces(*reports)
    assert [(each.name, each.a_us, each.b_us) for each in found.shapes] == [
        ("aten::mm 256×256, 256×256 float, float", 0.0, 16.0),
        ("aten::mm 64×64, 64×64 float, float", 4.0, 4.0),
        ("aten::mm 128×128, 128×128 float, float", 8.0, 0.0),
    ]
    lines = render_trace_diff(found, 100).splitlines()
    states = {line.split()[-4:][0]: line.split()[3] for line in lines if "aten::mm " in line and "×" in line}
    assert states == {"256×256,": "new", "64×64,": "0.0", "128×128,": "gone"}


def test_all_tables_as_text(
    report: TraceReport, snapshot: Callable[[str, str], None], tmp_path: Path
) -> None:
    job, skews_us = draw(0)
    directory = tmp_path / "simulated"
    directory.mkdir()
    job.write(directory, skews_us)
    simulated = analyse_paths([directory], None, frozenset({"critical-path"}))
    texts = (render_tables(report, TABLES, 100), render_tables(simulated, ("critical-path",), 80))
    snapshot("trace-tables.txt", "\n".join(texts))


@pytest.mark.parametrize(
    ("name", "dims", "values", "flops", "elements"),
    [
        ("aten::addmm", [[5], [2, 3], [3, 5]], (), 60, 6 + 15 + 10 + 5),
        ("aten::bmm", [[4, 2, 3], [4, 3, 5]], (), 240, 4 * (6 + 15 + 10)),
        ("aten::mm", [[2, 3], [4, 5]], (), None, 0),
        ("aten::linear", [[7, 2, 3], [5, 3]], (), 420, 42 + 15 + 70),
        (
            "aten::convolution",
            [[8, 3, 224, 224], [64, 3, 7, 7], []],
            ("", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"),
            2 * 8 * 64 * 112 * 112 * 3 * 49,
            8 * 3 * 224 * 224 + 64 * 3 * 49 + 8 * 64 * 112 * 112,
        ),
        ("aten::convolution", [[8, 3, 224, 224], [64, 3, 7, 7], []], (), None, 0),
        (
            "aten::convolution",
            [[8, 3, 224, 224], [64, 3, 7, 7], []],
            ("", "", "", "[0, 0]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"),
            None,
            0,
        ),
        (
            "aten::convolution_backward",
            [[1, 4, 8, 8], [1, 2, 8, 8], [4, 2, 3, 3]],
            ("", "", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, True]"),
            2 * 4 * 64 * 18,
            256 + 128 + 72 + 72,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 4, 16, 8], [2, 4, 16, 8], [2, 4, 16, 8]],
            ("", "", "", "0.", "True", "False"),
            4 * 2 * 4 * 16 * 16 * 8 // 2,
            4 * 2 * 4 * 16 * 8,
        ),
        (
            "aten::_flash_attention_forward",
            [[2, 16, 4, 8], [2, 16, 4, 8], [2, 16, 4, 8]],
            (),
            4 * 2 * 4 * 16 * 16 * 8,
            4 * 2 * 4 * 16 * 8,
        ),
        ("aten::relu", [[4]], (), None, 0),
    ],
)
def test_what_a_call_has_to_do(
    name: str, dims: Any, values: tuple[str, ...], flops: int | None, elements: int
) -> None:
    found = work_of(name, call_of(dims, ["float"] * len(dims), values))
    assert found == (None if flops is None else Work(flops, 4 * elements))


def test_work_counts_once_where_operators_hand_it_on(tmp_path: Path) -> None:
    """`aten::linear` calls `aten::addmm` on the CPU; another one does the product itself."""
    dims, floats = [[8, 4], [2, 4], [2]], ["float"] * 3
    events = [
        step(1, 0, 100),
        op("aten::linear", 10, 30, dims, floats),
        op("aten::addmm", 15, 20, [[2], [8, 4], [4, 2]], floats),
        op("aten::linear", 50, 10, dims, floats),
    ]
    file = write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    shapes = analyse_paths([file], None, frozenset({"shapes"})).shapes
    assert shapes is not None
    found = {(row.name, row.device_us, row.flops) for row in shapes}
    assert found == {("aten::addmm", 20, 128), ("aten::linear", 10, None), ("aten::linear", 10, 128)}
