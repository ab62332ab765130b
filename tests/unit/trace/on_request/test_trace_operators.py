"""The tree of modules and operators: its times add up, and what two captures differ in."""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.launcher.report.tables_on_request import shown_table
from gpurun.launcher.report.terminal.changes import render_operator_changes, render_trace_diff
from gpurun.launcher.report.terminal.trace import render_tables
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.on_request.shapes import Work, call_of, work_of
from gpurun.launcher.trace.diff import OperatorChange, diff_traces
from gpurun.launcher.trace.explain import trace_causes
from gpurun.launcher.trace.model import TABLES, CriticalPath, OperatorTotal, PathPart, Table, TraceReport
from tests.said import trace_notes
from tests.unit.trace.on_request.simulated_job import (
    COMM_STREAM,
    COMPUTE_STREAM,
    Instruction,
    Job,
    draw,
    plant,
    plant_uneven,
)
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, load, rank_info, span, step, write
from tests.whole import first
from tests.wording import Wording

TREE: frozenset[Table] = frozenset({"operators"})


def module(name: str, start_us: float, length_us: float) -> Event:
    return span("python_function", f"nn.Module: {name}", start_us, length_us)


def analysed(path: Path, events: Sequence[Event], rank: int = 0, ranks: int = 1) -> TraceReport:
    return analyse_paths([write(path, list(events), **rank_info(rank, ranks))], None, TREE)


def rows_of(report: TraceReport) -> list[tuple[Any, ...]]:
    return [
        (row.depth, row.kind, row.name, row.count, row.total_us, row.self_us)
        for row in report.operators or ()
    ]


FLOATS = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}
BY_HAND = [
    step(1, 0, 100),
    module("Net_0", 5, 60),
    module("Linear_0", 10, 20),
    span("cpu_op", "aten::linear", 11, 18),
    span("cpu_op", "aten::addmm", 12, 10, **FLOATS),
    *(launch(13, 1, 1), kernel("gemm", 20, 30, 1)),
    *(launch(25, 1, 2), kernel("bias", 50, 6, 2)),
    span("cpu_op", "aten::relu", 40, 5),
    *(launch(41, 1, 3), kernel("relu", 60, 4, 3)),
    *(launch(80, 1, 4), kernel("by_hand", 90, 7, 4)),
    module("Net_0", 120, 20),
    span("cpu_op", "aten::relu", 121, 5),
    *(launch(122, 1, 5), kernel("relu", 130, 4, 5)),
]


def test_times_are_those_of_the_work_launched_within(tmp_path: Path) -> None:
    report = analysed(tmp_path / "rank0.json", BY_HAND)
    assert rows_of(report) == [
        (0, "module", "Net_0", 2, 44.0, 0.0),
        (1, "module", "Linear_0", 1, 36.0, 0.0),
        (2, "op", "aten::linear", 1, 36.0, 6.0),
        (3, "op", "aten::addmm", 1, 30.0, 30.0),
        (4, "shapes", "4×8, 8×2 float", 1, 30.0, 30.0),
        (1, "op", "aten::relu", 2, 8.0, 8.0),
        (0, "outside", "outside of all operators and modules", 1, 7.0, 7.0),
    ]
    in_steps = {row.name: (row.count, row.total_us) for row in report.operators_in_steps or ()}
    assert in_steps["Net_0"] == (1, 40.0)
    text = render_tables(report, ("operators",), 100)
    assert "0.030    0.030      1        aten::addmm" in text


def test_calls_of_modules_outside_of_steps_are_not_those_of_steps(tmp_path: Path) -> None:
    (rank,) = analysed(tmp_path / "rank0.json", BY_HAND).ranks
    assert [(row.name, row.count) for row in rank.modules] == [("Linear_0", 1), ("Net_0", 2)]
    assert [(row.name, row.count) for row in rank.per_step.modules] == [("Linear_0", 1), ("Net_0", 1)]


def test_where_the_cpu_computes_operators_have_their_time_on_it(tmp_path: Path) -> None:
    events = [event for event in BY_HAND if event["cat"] not in ("kernel", "cuda_runtime")]
    rows = {row[2]: row[4:] for row in rows_of(analysed(tmp_path / "rank0.json", events))}
    assert rows["aten::linear"] == (18.0, 8.0)
    assert rows["aten::addmm"] == rows["4×8, 8×2 float"] == (10.0, 10.0)
    assert rows["Net_0"] == (28.0, 0.0)


@st.composite
def nested(draw: st.DrawFn) -> list[Event]:
    """Calls of a thread, in one another, which launch kernels; some outside of all."""
    events, numbers = [step(1, 0, 10_000)], count(1)
    now = 10.0

    def call(depth: int) -> None:
        nonlocal now
        begin, name = now, draw(st.sampled_from("abc"))
        now += 1
        for _ in range(draw(st.integers(0, 3 if depth < 3 else 0))):
            call(depth + 1)
        if draw(st.booleans()):
            work()
        now += 1
        is_module = draw(st.booleans()) and depth < 2
        length = now - begin
        events.append(
            module(name, begin, length) if is_module else span("cpu_op", name, begin, length, **FLOATS)
        )

    def work() -> None:
        nonlocal now
        number = next(numbers)
        events.extend(
            [launch(now, 0.5, number), kernel("k", 5000 + 20 * number, draw(st.integers(1, 15)), number)]
        )
        now += 1

    for _ in range(draw(st.integers(1, 3))):
        call(0)
    work()
    return events


def parents(rows: Sequence[OperatorTotal]) -> list[int | None]:
    """The position of the row around each."""
    around: list[int] = []
    found: list[int | None] = []
    for i, row in enumerate(rows):
        del around[row.depth :]
        assert len(around) == row.depth, "a row is at most one deeper than the one before it"
        found.append(around[-1] if around else None)
        around.append(i)
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=nested(), b=nested())
def test_rows_add_up_and_differences_turn_around(tmp_path: Path, a: list[Event], b: list[Event]) -> None:
    before, other = (analysed(tmp_path / f"{name}.json", events) for name, events in (("a", a), ("b", b)))
    rows = before.operators or ()
    inside: Counter[int] = Counter()
    for row, around in zip(rows, parents(rows), strict=True):
        if around is not None:
            inside[around] += round(1000 * row.total_us)
    for i, row in enumerate(rows):
        below = rows[i + 1 :]
        divides_itself = any(each.depth == row.depth + 1 and each.kind == "shapes" for each in below)
        assert inside[i] <= round(1000 * row.total_us) or divides_itself
        assert row.self_us <= row.total_us
    on_gpu = round(sum(row.total_us for row in rows if row.depth == 0), 3)
    assert on_gpu == round(sum(row.device_us for row in before.ranks[0].kernels), 3)
    by_name: Counter[str] = Counter()
    for row in rows:
        by_name[row.name] += round(1000 * row.self_us) if row.kind == "op" else 0
    is_module_free = all(row.kind != "module" for row in rows)
    if is_module_free:
        assert {name: ns for name, ns in by_name.items() if ns} == {
            row.name: round(1000 * row.device_us) for row in before.ranks[0].ops if row.device_us
        }
    assert diff_traces(before, before).operators == ()
    there, back = (diff_traces(*pair).operators or () for pair in ((before, other), (other, before)))
    assert sorted(facts(there)) == sorted(facts(back, -1))


def facts(changes: Sequence[OperatorChange], sign: int = 1) -> list[tuple[Any, ...]]:
    turned = {"new": "gone", "gone": "new", "slower": "faster", "faster": "slower", "same": "same"}
    return [
        (each.depth, each.name, sign * each.change_us, each.state if sign > 0 else turned[each.state])
        for each in changes
    ]


def test_what_is_new_gone_slower_and_by_shape(tmp_path: Path, wording: Wording) -> None:
    def events(side: int, gemm_us: float, last: str) -> list[Event]:
        dims = {"Input Dims": [[side, 8], [8, 2]], "Input type": ["float", "float"]}
        return [
            step(1, 0, 100),
            module("Net_0", 5, 60),
            span("cpu_op", "aten::mm", 12, 10, **dims),
            *(launch(13, 1, 1), kernel("gemm", 20, gemm_us, 1)),
            span("cpu_op", last, 30, 5),
            *(launch(31, 1, 2), kernel("last", 70, 5, 2)),
            span("cpu_op", "aten::add", 40, 5),
            *(launch(41, 1, 3), kernel("add", 80, 5, 3)),
        ]

    reports = [
        analysed(tmp_path / "a.json", events(4, 20, "aten::relu")),
        analysed(tmp_path / "b.json", events(6, 30, "aten::gelu")),
    ]
    diff = diff_traces(*reports)
    assert [(each.depth, each.name, each.state, each.change_us) for each in diff.operators or ()] == [
        (0, "Net_0", "slower", 10.0),
        (1, "aten::mm", "slower", 10.0),
        (2, "6×8, 8×2 float", "new", 30.0),
        (2, "4×8, 8×2 float", "gone", -20.0),
        (1, "aten::gelu", "new", 5.0),
        (1, "aten::relu", "gone", -5.0),
    ]
    wording(render_operator_changes(diff, 100).splitlines())
    wording(render_operator_changes(diff_traces(*reports[:1] * 2), 100))


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces next to the repository")
def test_two_real_ranks_as_walked_by_hand(tmp_path: Path) -> None:
    """Ranks 0 and 1 of 128: every path's time per step is that of a walk over the events, one at a time."""
    files = [REAL / "ddp_2of128" / f"sampled_rank-{rank}.json.gz" for rank in (0, 1)]
    reports = [analyse_paths([file], None, TREE) for file in files]
    walked = [
        by_hand(load(file)["traceEvents"], {row.name for row in report.ranks[0].ops})
        for file, report in zip(files, reports, strict=True)
    ]
    for report, expected in zip(reports, walked, strict=True):
        rows = report.operators or ()
        found = {
            path: round(row.total_us, 3)
            for path, row in zip(paths(rows), rows, strict=True)
            if row.kind == "op"
        }
        assert found == {path: round(us, 3) for path, us in expected.items()}


def paths(rows: Sequence[OperatorTotal]) -> list[tuple[str, ...]]:
    path: list[str] = []
    found = []
    for row in rows:
        path[row.depth :] = [row.name]
        found.append(tuple(path))
    return found


def by_hand(events: Sequence[dict[str, Any]], names: Set[str]) -> dict[tuple[str, ...], float]:
    """Time of the GPU work launched within each path of operators, which have these names."""
    timed = [event for event in events if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event
        for event in timed
        if event["cat"].lower() in ("cuda_runtime", "runtime") and "correlation" in event.get("args", {})
    }
    ops: dict[Any, list[dict[str, Any]]] = {}
    for event in timed:
        if event["cat"] in ("cpu_op", "user_annotation") and event["name"] in names:
            ops.setdefault(event["tid"], []).append(event)
    found: Counter[tuple[str, ...]] = Counter()
    for event in timed:
        call = launches.get(event.get("args", {}).get("correlation"))
        if (
            event["cat"].lower() in ("kernel", "memcpy", "memset", "gpu_memcpy", "gpu_memset")
            and call is not None
        ):
            around = [
                op
                for op in ops.get(call["tid"], ())
                if op["ts"] <= call["ts"] < op["ts"] + max(op["dur"], 0.001)
            ]
            path = tuple(op["name"] for op in sorted(around, key=lambda op: (op["ts"], -op["dur"])))
            for end in range(1, len(path) + 1):
                found[path[:end]] += event["dur"]
    return dict(found)


# The tables on request, on traces made by hand; and the formulas behind them


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
    assert first.delay_percentiles_us == (6.0, 9.0, 9.0, 9.0)
    assert first.queue_max == 1
    # Launched at 2, 24, 44 and 61 µs, done at 15, 34, 56 and 100: 74 of 98 µs with one piece of work.
    assert first.queue_mean == pytest.approx(74 / 98)
    assert first.queue_empty_percent == pytest.approx(100 * 24 / 98)
    assert (first.short_kernels, first.short_us, first.slow_launches) == (2, 10.0, 0)


def test_work_is_in_the_queue_once_its_call_has_ended(tmp_path: Path) -> None:
    running = [
        launch(10, 1000, 1),
        kernel("loaded", 1005, 10, 1),
        launch(1020, 5, 2),
        kernel("k", 1030, 5, 2),
    ]
    report = analyse_paths([write(tmp_path / "r.json", running)], None, {"launches"})
    assert report.launches is not None
    (row,) = report.launches
    # Launched at 1005, when the first began during its call, and at 1025; done at 1015 and 1035.
    assert row.delay_percentiles_us == (5.0, 5.0, 5.0, 5.0)
    assert row.queue_empty_percent == pytest.approx(100 * 10 / 30)
    delay = report.ranks[0].total.launch_delay_us
    assert delay is not None
    assert (delay.median, delay.max) == (2.5, 5.0)


def test_no_delay_of_a_launch_is_negative(tmp_path: Path) -> None:
    """The GPU's clock is 2 µs behind."""
    events = [launch(10, 5, 1), kernel("k", 8, 10, 1)]
    report = analyse_paths([write(tmp_path / "r.json", events)], None, {"launches"})
    (row,) = report.launches or ()
    delay = report.ranks[0].total.launch_delay_us
    assert delay is not None
    assert (*row.delay_percentiles_us, delay.median, delay.max) == (0, 0, 0, 0, 0, 0)


def test_tables_only_on_request(tmp_path: Path) -> None:
    write(tmp_path / "r0.json", rank_events(0), **rank_info(0, 1))
    found = analyse_paths([tmp_path])
    assert found.shapes is None
    assert found.critical_path is None
    found = analyse_paths([tmp_path], None, frozenset({"copies"}))
    assert (found.shapes, found.critical_path) == (None, None)


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


@pytest.mark.parametrize(("gain_us", "is_said"), [(3.0, True), (-3.0, False)])
def test_that_even_ranks_would_take_longer_is_no_advice(gain_us: float, is_said: bool) -> None:
    path = CriticalPath(10.0, 10.0, 1, (PathPart("host", None, None, 10.0, 9.0),), (), (), gain_us, 0, 0)
    report = replace(analyse_paths([REAL / "vit_H100"]), critical_path=path)
    said = " ".join(shown_table(report, "critical-path").notes)
    assert ("If all ranks computed and copied equally long" in said) == is_said
    assert "longer" not in said


@pytest.mark.parametrize(("part", "said"), [("host", "all of the CPU's time"), ("compute", "compute")])
def test_a_later_begin_of_a_trace_is_nothing_to_gain(part: str, said: str) -> None:
    """Though nothing else of the path would be gained, either."""
    parts = PathPart("before", None, None, 70.0, None), PathPart(part, None, None, 30.0, 0.0)
    path = CriticalPath(100.0, 100.0, 2, parts, (), (), None, 0, 0)
    report = replace(analyse_paths([REAL / "vit_H100"]), critical_path=path)
    assert shown_table(report, "critical-path").notes[-1].startswith(f"Without {said}")


@pytest.mark.parametrize(
    ("name", "dims", "values", "flops", "elements"),
    [
        ("aten::addmm", [[5], [2, 3], [3, 5]], (), 60, 6 + 15 + 10 + 5),
        ("aten::bmm", [[4, 2, 3], [4, 3, 5]], (), 240, 4 * (6 + 15 + 10)),
        (
            "aten::baddbmm",
            [[4, 2, 5], [4, 2, 3], [4, 3, 5]],
            ("", "", "", "1", "1"),
            240,
            4 * (10 + 6 + 15 + 10),
        ),
        ("aten::baddbmm", [[4, 2, 5], [4, 2, 3], [4, 3, 5]], ("", "", "", "0.", "1"), 240, 4 * (6 + 15 + 10)),
        ("aten::addmm_", [[2, 5], [2, 3], [3, 5]], ("", "", "", "0", "1"), 60, 6 + 15 + 10),
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
            256 + 128 + 72,
        ),
        (
            "aten::convolution_backward",
            [[1, 4, 8, 8], [1, 2, 8, 8], [4, 2, 3, 3]],
            ("", "", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"),
            2 * 2 * 4 * 64 * 18,
            256 + 2 * (128 + 72),
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
            None,
            4 * 2 * 4 * 16 * 8,
        ),
        (
            "aten::_efficient_attention_forward",
            [[2, 16, 4, 8], [2, 16, 4, 8], [2, 16, 4, 8], [2, 4, 16, 16], [], []],
            ("", "", "", "", "", "", "16", "16", "0.", "0", "False"),
            4 * 2 * 4 * 16 * 16 * 8,
            4 * 2 * 4 * 16 * 8 + 2 * 4 * 16 * 16,
        ),
        (
            "aten::_efficient_attention_forward",
            [[1, 32, 4, 8], [1, 32, 4, 8], [1, 32, 4, 8], [], [3], [3]],
            ("", "", "", "", "", "", "16", "16", "0.", "0", "False"),
            None,
            0,
        ),
        (
            "aten::_scaled_dot_product_efficient_attention",
            [[2, 4, 16, 8], [2, 4, 16, 8], [2, 4, 16, 8], [], []],
            ("", "", "", "False", "True"),
            None,
            4 * 2 * 4 * 16 * 8,
        ),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            [[2, 4, 16, 8]] * 4 + [[], [2, 4, 16, 8], [2, 4, 16], [], [], [], [], []],
            ("", "", "", "", "", "", "", "", "", "0.", "[True, True, True, False]", "True"),
            10 * 2 * 4 * 16 * 16 * 8 // 2,
            8 * 2 * 4 * 16 * 8,
        ),
        (
            "aten::_scaled_dot_product_efficient_attention_backward",
            [[2, 4, 16, 8]] * 4 + [[2, 4, 16, 16], [2, 4, 16, 8], [2, 4, 16], [], [], [], [], []],
            ("", "", "", "", "", "", "", "", "", "0.", "[True, True, True, True]", "False"),
            10 * 2 * 4 * 16 * 16 * 8,
            None,
        ),
        ("aten::relu", [[4]], (), None, 0),
    ],
)
def test_what_a_call_has_to_do(
    name: str, dims: Any, values: tuple[str, ...], flops: int | None, elements: int | None
) -> None:
    """`None`: unknown; 0 elements: of the operator, or of such a call, nothing is known."""
    found = work_of(name, call_of(dims, ["float"] * len(dims), values))
    num_bytes = None if elements is None else 4 * elements
    assert found == (None if elements == 0 else Work(flops, num_bytes))


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


# The critical path of jobs whose every dependency is known


PARTS = ("compute", "transfer", "copies", "input", "host", "one-off")


def path_of(directory: Path) -> CriticalPath:
    found = analyse_paths([directory], None, frozenset({"critical-path"})).critical_path
    assert found is not None
    return found


@pytest.mark.parametrize("seed", first(15, range(100)))
def test_what_a_job_would_gain_is_what_the_job_without_the_part_takes(tmp_path: Path, seed: int) -> None:
    job, skews_us = draw(seed)
    job.write(tmp_path, skews_us)
    found = path_of(tmp_path)
    length_us = job.length_ns() / 1000
    assert found.length_us == pytest.approx(length_us, rel=1e-6)
    assert found.contradictions == 0
    assert sum(each.path_us for each in found.parts) == pytest.approx(found.length_us)
    gains = {each.part: each.gain_us for each in found.parts}
    for part in PARTS:
        left_us = length_us - (gains.get(part) or 0.0)
        assert left_us == pytest.approx(job.length_ns(part) / 1000, rel=0.01), part
    for each in found.parts:  # without a part, the rest of the path is left
        assert (each.gain_us or 0) <= each.path_us + 1e-6, each.part


PART_OF = {"slow link": "transfer", "launching": "host", "input": "input", "one-off": "one_off"}


@pytest.mark.parametrize("seed", first(12, range(60)))
def test_the_cause_is_what_saves_most_and_by_how_much(tmp_path: Path, seed: int) -> None:
    """Of jobs with one cause each, of one to eight ranks, with one to four buckets in flight."""
    planted = plant(seed)
    planted.job.write(tmp_path, planted.skews_us)
    report = analyse_paths([tmp_path])
    cause = trace_causes(report)[0]
    assert cause.part == PART_OF.get(planted.cause, "straggler")
    if planted.cause in ("larger batch", "slower rank"):
        assert cause.ranks == (planted.rank,)
    saved_ns = (planted.job.length_ns() - planted.without) / len(report.ranks[0].steps)
    assert cause.saved_ns == pytest.approx(saved_ns, rel=0.02)


@pytest.mark.parametrize("seed", first(20, range(100)))
def test_ranks_that_have_more_to_do_are_named_with_what_that_costs(tmp_path: Path, seed: int) -> None:
    """Of one rank, of some, or of another one in each step; transfers, where they cost more."""
    planted, late = plant_uneven(seed)
    planted.job.write(tmp_path, planted.skews_us)
    report = analyse_paths([tmp_path])
    num_steps, length_ns = len(report.ranks[0].steps), planted.job.length_ns()
    saved_ns = (length_ns - planted.without) / num_steps
    transfer_ns = (length_ns - planted.job.length_ns("transfer")) / num_steps
    cause = trace_causes(report)[0]
    if saved_ns > transfer_ns:
        assert (cause.part, cause.ranks) == ("straggler", late)
        assert cause.has_advice
        assert cause.saved_ns == pytest.approx(saved_ns, rel=0.02)
    else:
        assert cause.part == "transfer"
        assert cause.saved_ns == pytest.approx(transfer_ns, rel=0.02)


def loop(computes_ns: Sequence[int], data_ns: int = 0) -> list[list[Instruction]]:
    """Steps of each of two ranks: its batch, a kernel of that length, and an all-reduce."""
    return [
        [
            Instruction("cpu", "input", data_ns),
            Instruction("launch", "compute", ns),
            Instruction("wait", stream=COMM_STREAM, other=COMPUTE_STREAM),
            Instruction("collective", "transfer", 100_000, COMM_STREAM, key=((0, 1), number)),
            Instruction("wait", stream=COMPUTE_STREAM, other=COMM_STREAM),
            Instruction("launch", "compute", 1_000, name="optimizer"),
            Instruction("sync"),
        ]
        for number, ns in enumerate(computes_ns)
    ]


def test_ranks_that_are_even_on_average_would_gain_by_being_even_in_each_step(tmp_path: Path) -> None:
    """One of them takes 3 instead of 1 ms, the other one in the next step: even, they would take 2."""
    long, short = 3_000_000, 1_000_000
    job = Job([loop([long, short] * 2), loop([short, long] * 2)], [1_000_000] * 2, recorded=True)
    job.write(tmp_path, [0.0, 0.0])
    assert path_of(tmp_path).even_gain_us == pytest.approx(4 * 1_000, rel=0.01)


@pytest.mark.parametrize(
    ("data_ns", "said"),
    [
        (
            1_900_000,
            "47 % of its step (1.90 of 4.01 ms; without that, a step would be 0.0 ms shorter)",
        ),
        (400_000, "compute takes 88 % of the time of all ranks, no other cause more than 16 % of any rank's"),
    ],
)
def test_a_wait_for_data_that_another_rank_hides_is_said_as_it_is(
    tmp_path: Path, data_ns: int, said: str
) -> None:
    """Rank 0 waits for data while rank 1 computes for longer: without either, the other one is left."""
    job = Job([loop([2_000_000] * 4, data_ns), loop([2_000_000 + data_ns] * 4)], [1_000_000] * 2, True)
    job.write(tmp_path, [0.0, 0.0])
    assert said in " ".join(each.text for each in analyse_paths([tmp_path]).findings)


def test_what_a_clock_gains_changes_no_saving(tmp_path: Path) -> None:
    """100 ppm in 2 s are more than an all-reduce takes; each step rank 0 waits 1 ms for rank 1."""

    def program(rank: int) -> list[list[Instruction]]:
        return [
            [
                Instruction("cpu", ns=10_000),
                Instruction("launch", "compute", 50_000_000 + 1_000_000 * rank),
                Instruction("wait", stream=COMM_STREAM, other=COMPUTE_STREAM),
                Instruction("collective", "transfer", 150_000, COMM_STREAM, key=((0, 1), number)),
                Instruction("wait", stream=COMPUTE_STREAM, other=COMM_STREAM),
                Instruction("launch", "compute", 50_000, name="optimizer"),
                Instruction("sync"),
            ]
            for number in range(40)
        ]

    job = Job([program(0), program(1)], [1_000_000] * 2, recorded=True)
    job.write(tmp_path, [0.0, 5_000.0], [0.0, 1e-4])
    report = analyse_paths([tmp_path])
    assert report.clock_drift_ppm["1"] == pytest.approx(100, rel=0.001)
    saved_us = {(each.part, each.rank): each.saved_us for each in report.savings}
    assert saved_us["rank", 1] == pytest.approx(1_000, rel=0.02)
    transfer_us = (job.length_ns() - job.length_ns("transfer")) / 40 / 1000
    assert saved_us["transfer", None] == pytest.approx(transfer_us, rel=0.02)


def test_kernels_that_overlap_on_one_stream_make_the_path_no_longer(tmp_path: Path) -> None:
    """As where the next one is launched before the last has ended."""
    events = [launch(0, 1, 1), kernel("long", 10, 100, 1), launch(2, 1, 2), kernel("within", 20, 30, 2)]
    events += [launch(4, 1, 3), kernel("next", 60, 80, 3)]
    write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    found = path_of(tmp_path)
    assert (found.length_us, found.recorded_us, found.contradictions) == (140, 140, 1)


def test_kernels_whose_launch_is_lost_are_short_all_the_same(tmp_path: Path) -> None:
    work = [kernel("k", 20, 4, 1), kernel("k", 40, 5, 2), kernel("k", 60, 50, 3)]
    events = [step(1, 0, 100), launch(10, 5, 1), launch(50, 5, 3), *work]
    (row,) = analyse_paths([write(tmp_path / "t.json", events)], None, {"launches"}).launches or ()
    assert (row.short_kernels, row.short_us) == (2, 9.0)
