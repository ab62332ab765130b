"""The tree of modules and operators: its times add up, and what two captures differ in."""

from collections import Counter
from collections.abc import Sequence, Set
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.launcher.report.terminal.changes import render_operator_changes
from gpurun.launcher.report.terminal.trace import render_tables
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.diff import OperatorChange, diff_traces
from gpurun.launcher.trace.model import OperatorTotal, Table, TraceReport
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, load, rank_info, span, step, write
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
    one, other = (analysed(tmp_path / f"{name}.json", events) for name, events in (("a", a), ("b", b)))
    rows = one.operators or ()
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
    assert on_gpu == round(sum(row.device_us for row in one.ranks[0].kernels), 3)
    by_name: Counter[str] = Counter()
    for row in rows:
        by_name[row.name] += round(1000 * row.self_us) if row.kind == "op" else 0
    is_module_free = all(row.kind != "module" for row in rows)
    if is_module_free:
        assert {name: ns for name, ns in by_name.items() if ns} == {
            row.name: round(1000 * row.device_us) for row in one.ranks[0].ops if row.device_us
        }
    assert diff_traces(one, one).operators == ()
    there, back = (diff_traces(*pair).operators or () for pair in ((one, other), (other, one)))
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
