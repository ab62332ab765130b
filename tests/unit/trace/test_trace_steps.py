"""A step's time where the GPU runs behind the CPU: real captures begin while earlier work still runs."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.figures.ranks import quiet_steps
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.tensorboard_plugin.answers.operators import operators_answer
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.trace.analysis import tables
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.digest import Waits, gpu_activity, measure
from gpurun.launcher.trace.diff import diff_traces
from gpurun.launcher.trace.explain import trace_causes
from gpurun.launcher.trace.intervals import EMPTY, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind
from gpurun.launcher.trace.kineto.columns import Timed
from gpurun.launcher.trace.model import TABLES, RankTrace, StepBreakdown, TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, rank_info, span, step, write
from tests.wording import Wording

ALL = slice(None)
RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def behind(lag_us: float, steps: int = 3, host_us: float = 16, gpu_us: float = 19) -> list[Event]:
    """Steps that the GPU takes longer for than the CPU, recorded when the GPU was behind by `lag_us`.

    As on an MI300X, whose first step began 30 ms behind: what runs until then has no launch in the capture,
    on two streams, with short gaps.
    """
    events = [kernel("earlier", k, 0.9) for k in range(round(lag_us) - 1)]
    events += [kernel("earlier", lag_us - 1, 1), kernel("side", 1, lag_us - 2, stream=4)]
    for number in range(steps):
        host, gpu = number * host_us, lag_us + number * gpu_us
        for part in range(2):
            correlation = 10 * number + part + 1
            events.append(launch(host + 1 + part, 1, correlation))
            events.append(kernel("own", gpu + part * gpu_us / 2, gpu_us / 2, correlation))
        events.append(step(number + 15, host, host_us))
    return events


def steps_of(path: Path, chosen: slice | None = None) -> tuple[StepBreakdown, ...]:
    (rank,) = analyse_paths([path], chosen).ranks
    return rank.steps


def test_the_first_step_begins_when_earlier_work_is_done(tmp_path: Path) -> None:
    found = steps_of(write(tmp_path / "rank0.json", behind(30)))
    assert [(each.start_us, each.span_us, each.compute_us, each.idle_us) for each in found] == [
        (30, 19, 19, 0),
        (49, 19, 19, 0),
        (68, 19, 19, 0),
    ]


def test_a_marker_at_the_end_without_gpu_work_is_no_step(tmp_path: Path) -> None:
    """`step()` has begun it, and the capture ended."""
    path = write(tmp_path / "rank0.json", [*behind(30), step(18, 90, 2)])
    (said,) = (text for text in trace_notes(analyse_paths([path])) if "step 18" in text)
    assert said.endswith("step 18, the last, launched no GPU work and is left out; --steps 18:19 shows it")
    others = analyse_paths([path], slice(15, 18)), analyse_paths([write(tmp_path / "b.json", behind(30))])
    assert not any("the last" in text for report in others for text in trace_notes(report))
    assert [each.step for each in steps_of(path)] == [15, 16, 17]
    assert [each.step for each in steps_of(path, slice(18, 19))] == [18]


def test_a_step_ends_with_the_capture(tmp_path: Path) -> None:
    """Its mark may be open until the trace is written: 13 s, after 2 µs of work."""
    events = [step(1, 0, 9000), launch(5, 2, 1), kernel("own", 10, 20, 1)]
    recording = span("Trace", "PyTorch Profiler (0)", -10, 110)
    (found,) = steps_of(write(tmp_path / "rank0.json", [*events, recording]))
    assert (found.span_us, found.idle_us) == (100, 80)


def test_of_thinned_traces_work_is_of_the_step_in_which_it_runs(tmp_path: Path) -> None:
    """Most launches are gone: what is left of them says nothing about the work without any."""
    events = [kernel("own", 2000 * k, 5) for k in range(1, 10)]
    events += [launch(16500, 1, 1), kernel("known", 17000, 5, 1), step(1, 0, 9000), step(2, 9000, 10000)]
    rank, warnings = rank_with(tmp_path, events)
    assert [(each.span_us, each.compute_us) for each in rank.steps] == [(9000, 20), (10000, 30)]
    said = "9 GPU events without a recorded launch counted for the step during which each began"
    assert warnings[-1].endswith(said)


def test_work_of_calls_before_the_capture_is_no_steps_whatever_gaps_are_in_it(tmp_path: Path) -> None:
    """Calls are numbered; the gap that ends with launched work is no wait for the CPU."""
    events = [kernel("earlier", 0, 50, 7), kernel("earlier", 2000, 10, 8), step(15, 10, 100)]
    report = analyse_paths(
        [write(tmp_path / "t.json", [*events, launch(12, 1, 9), kernel("own", 2010, 5, 9)])]
    )
    (found,) = report.ranks[0].steps
    assert (found.start_us, found.span_us, found.other_steps_us) == (2010, 5, 0)
    assert report.ranks[0].total.idle_by_cause_us.other == 1950


@pytest.mark.parametrize("known", [True, False], ids=["one stream's launches", "no launch"])
def test_work_whose_launch_is_not_recorded_does_not_move_steps(tmp_path: Path, known: bool) -> None:
    """As with NCCL's launches through the driver, which older versions of Kineto don't record."""
    events = [kernel("later", 400, 30)]
    for number in range(3):
        begin = 100 * number
        events += [step(number, begin, 100), kernel("own", begin + 10, 60, number + 1)]
        events += [launch(begin + 5, 1, number + 1)] * known
        events += [kernel(RING, begin + 50, 30, stream=20)]
    found = steps_of(write(tmp_path / "rank0.json", events))
    assert [(each.start_us, each.span_us, each.compute_us) for each in found] == [
        (0, 100, 60),
        (100, 100, 60),
        (200, 100, 60),
    ]


def test_who_is_behind_is_not_blamed_on_the_cpu(tmp_path: Path, wording: Wording) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", behind(30))])
    wording(report.conclusion)
    assert all(each.idle_by_cause_us.host == 0 for each in report.ranks[0].steps)


@pytest.mark.parametrize("lag_us", [0, 30, 200])
def test_a_lag_changes_neither_the_mean_step_nor_a_difference(tmp_path: Path, lag_us: float) -> None:
    a = analyse_paths([write(tmp_path / "a.json", behind(3))])
    b = analyse_paths([write(tmp_path / "b.json", behind(max(lag_us, 3)))])
    diff = diff_traces(a, b)
    assert [(each.name, each.a_us, each.b_us) for each in diff.classes if each.a_us or each.b_us] == [
        ("span", 19, 19),
        ("compute", 19, 19),
    ]
    assert [(each.name, each.a_us, each.b_us) for each in diff.kernels] == [("own", 19, 19)]


@pytest.mark.parametrize(
    ("host_us", "from_capture", "expected"),
    [
        (100, True, [(0, 110, 110, 0), (110, 90, 80, 10), (200, 100, 80, 20)]),
        (20, True, [(0, 110, 110, 0), (110, 80, 80, 0), (190, 100, 80, 20)]),
        (100, False, [(10, 90, 80, 10), (100, 100, 80, 20), (200, 100, 80, 20)]),
        (20, False, [(10, 80, 80, 0), (90, 100, 80, 20), (190, 100, 80, 20)]),
    ],
    ids=["launched by a step", "that and GPU behind", "from before the capture", "that and GPU behind "],
)
def test_work_over_several_steps_moves_none(
    tmp_path: Path, host_us: int, from_capture: bool, expected: list[tuple[int, int, int, int]]
) -> None:
    """Steps of 80 µs every 100 µs on one stream, and one piece of work for 300 µs on another."""
    events = [kernel("side", 0, 300, 99, stream=9), *([launch(0, 1, 99)] if from_capture else [])]
    for number in range(3):
        host, gpu = host_us * number, 10 + 100 * number
        events += [step(number, host, host_us), launch(host + 1, 1, number + 1)]
        events.append(kernel("own", gpu, 80, number + 1))
    found = steps_of(write(tmp_path / "rank0.json", events))
    assert [(s.start_us, s.span_us, s.compute_us, s.other_steps_us) for s in found] == expected
    assert [each.idle_us for each in found] == [0, 0, 0]
    assert [each.num_kernels for each in found] == [1 + from_capture, 1, 1]


def test_side_work_that_begins_after_the_next_step_does_not_delay_it(tmp_path: Path) -> None:
    events = [step(number, 100 * number, 100) for number in range(3)]
    events += [launch(1, 1, 1), launch(2, 1, 2), launch(101, 1, 3), launch(201, 1, 4)]
    events += [kernel("a", 10, 20, 1), kernel("late", 120, 20, 2, stream=9)]
    events += [kernel("b", 105, 10, 3), kernel("c", 205, 20, 4)]
    found = steps_of(write(tmp_path / "rank0.json", events))
    assert [(s.span_us, s.compute_us, s.other_steps_us, s.idle_us) for s in found] == [
        (100, 20, 0, 80),
        (100, 10, 20, 70),
        (100, 20, 0, 80),
    ]


def overlapping(tmp_path: Path) -> Path:
    """While a step's kernels still run, the next one copies its input on a stream of its own."""
    events = []
    for number in range(3):
        host, gpu = 50 * number, 100 * number
        first = 10 * number + 1
        events += [
            step(number, host, 50),
            *(launch(host + 1, 1, first), launch(host + 2, 1, first + 1), launch(host + 3, 1, first + 2)),
            # The copy runs during the step before: 4 µs of it while no kernel does.
            kernel("Memcpy HtoD", max(gpu - 30, 0), 24, first, stream=16) | {"cat": "gpu_memcpy"},
            kernel("forward", gpu + 10, 60, first + 1),
            kernel("backward", gpu + 74, 26, first + 2),
        ]
    return write(tmp_path / "rank0.json", events)


def test_what_the_next_step_does_meanwhile_is_no_idle_time(tmp_path: Path) -> None:
    found = steps_of(overlapping(tmp_path))
    assert [(each.start_us, each.span_us) for each in found] == [(0, 100), (100, 100), (200, 100)]
    parts = [(s.compute_us, s.exposed_memcpy_us, s.other_steps_us, s.idle_us) for s in found]
    assert parts == [(86, 10, 4, 0), (86, 0, 4, 10), (86, 0, 0, 14)]
    # The gap before a step's first kernel: it was launched long ago.
    assert [each.idle_by_cause_us.host for each in found[1:]] == [0, 0]


def test_every_page_has_the_work_of_other_steps(tmp_path: Path) -> None:
    report = analyse_paths([overlapping(tmp_path)])
    text = render_trace(report, 160)
    assert "other steps ▫" in text
    others = write(tmp_path / "behind.json", behind(30))
    assert "other steps" not in render_trace(analyse_paths([others]), 160)
    _, ranks = quiet_steps(report.ranks)
    assert ranks[0].other_steps_ns == 4000
    (change,) = (each for each in diff_traces(report, report).classes if each.name == "other_steps")
    assert change.a_us == pytest.approx(8 / 3)


def outside(tmp_path: Path) -> Path:
    """A step with a collective of 10 µs, and others that were launched before the capture and after it."""
    events = [
        kernel("earlier", 0, 20),
        kernel(RING, 0, 30, stream=20),
        step(1, 0, 100),
        span("cpu_op", "nccl:all_reduce", 5, 4),
        *(launch(1, 1, 1), launch(6, 1, 2)),
        kernel("own", 30, 60, 1),
        kernel(RING, 90, 10, 2, stream=20),
        span("cpu_op", "nccl:all_reduce", 205, 4),
        launch(206, 1, 3),
        kernel(RING, 220, 40, 3, stream=20),
    ]
    return write(tmp_path / "rank0.json", events, **rank_info(0, 1))


def test_all_steps_are_what_steps_launched(tmp_path: Path) -> None:
    path = outside(tmp_path)
    (whole,) = analyse_paths([path]).ranks
    (chosen,) = analyse_paths([path], ALL).ranks
    assert (whole.total.span_us, whole.total.comm_us, whole.total.num_kernels) == (260, 80, 5)
    assert (chosen.total.span_us, chosen.total.comm_us, chosen.total.num_kernels) == (70, 10, 2)
    assert [(row.name, row.count) for row in chosen.kernels] == [("own", 1), (RING, 1)]
    assert [(row.name, row.count, row.device_us) for row in chosen.ops] == [("nccl:all_reduce", 1, 10)]
    assert whole.in_steps is not None
    assert (whole.in_steps.kernels, whole.in_steps.ops) == (chosen.kernels, chosen.ops)
    assert whole.in_steps.groups == chosen.groups
    assert chosen.in_steps is None


def header_of(report: TraceReport) -> Header:
    return cast(Header, SimpleNamespace(ranks=report.ranks))


def test_the_operators_of_a_step_are_its_own(tmp_path: Path) -> None:
    answer = operators_answer(header_of(analyse_paths([outside(tmp_path)])), None, "kernels")
    rows = {row["name"]: (row["calls"], row["self_ms"]) for row in answer["rows"]}
    assert rows == {"own": (1, 0.06), RING: (1, pytest.approx(0.01))}
    assert (answer["step_ms"], answer["rest_ms"]) == (0.07, pytest.approx(0, abs=1e-9))


def rank_with(tmp_path: Path, events: list[Event]) -> tuple[RankTrace, tuple[str, ...]]:
    report = analyse_paths([write(tmp_path / "rank0.json", events, **rank_info(0, 1))])
    return report.ranks[0], trace_notes(report)


def test_without_any_launch_work_belongs_to_the_step_during_which_it_began(
    tmp_path: Path, wording: Wording
) -> None:
    events = [step(1, 0, 50), step(2, 50, 50), kernel("a", 10, 20), kernel("b", 60, 30)]
    rank, warnings = rank_with(tmp_path, events)
    assert [(each.compute_us, each.other_steps_us, each.idle_us) for each in rank.steps] == [
        (20, 0, 30),
        (30, 0, 20),
    ]
    wording(warnings)


def test_work_that_lost_its_launch_belongs_to_no_step(tmp_path: Path, wording: Wording) -> None:
    events = [step(1, 0, 50), launch(1, 1, 1), kernel("a", 10, 20, 1), kernel("lost", 32, 8)]
    rank, warnings = rank_with(tmp_path, events)
    (only,) = rank.steps
    assert (only.start_us, only.compute_us, only.other_steps_us, only.idle_us) == (0, 20, 8, 22)
    wording(warnings)


# Several GPUs in one process: what one does while another doesn't is busy for one and idle for the other


def on_device(device: int, start_us: float, length_us: float, correlation: int = 0) -> Event:
    made = kernel("k", start_us, length_us, correlation)
    return made | {"pid": device, "args": made["args"] | {"device": device}}


@pytest.fixture
def replicas(tmp_path: Path) -> TraceReport:
    """Two steps of 100 µs: device 0 works for 80 of each, device 1 for the first 30."""
    events = []
    for i in (0, 1):
        begin = 100 * i
        events += [step(i, begin, 100), launch(begin, 1, 2 * i + 1), launch(begin, 1, 2 * i + 2)]
        events += [on_device(0, begin + 20, 80, 2 * i + 1), on_device(1, begin + 20, 30, 2 * i + 2)]
    return analyse_paths([write(tmp_path / "rank0.json", events)])


def test_each_device_has_a_breakdown_of_its_own_over_the_same_steps(replicas: TraceReport) -> None:
    (rank,) = replicas.ranks
    assert [each.device for each in rank.devices] == ["0", "1"]
    found = [[(s.span_us, s.compute_us, s.idle_us) for s in each.steps] for each in rank.devices]
    assert found == [[(100, 80, 20)] * 2, [(100, 30, 70)] * 2]
    assert [each.total.compute_us for each in rank.devices] == [160, 60]
    assert rank.total == rank.devices[0].total
    assert rank.steps == rank.devices[0].steps
    assert any("several devices (0 and 1)" in text for text in trace_notes(replicas))


def test_the_table_has_both_and_the_sentence_is_about_the_busiest(replicas: TraceReport) -> None:
    text = render_trace(replicas, 100)
    rows = [line.split()[:4] for line in text.splitlines() if line.lstrip().startswith(("0:", "1  0:"))]
    assert ["0:0", "0.180", "0.160", "-"] in rows
    assert ["0:1", "0.180", "0.060", "-"] in rows
    assert trace_causes(replicas)[0].share == pytest.approx(20 / 100)


def test_the_replicas_of_a_run_have_their_own_figures(replicas: TraceReport) -> None:
    _, ranks = quiet_steps(replicas.ranks)
    assert {rank: (each.span_ns, each.compute_ns) for rank, each in ranks.items()} == {
        0: (100_000, 80_000),
        1: (100_000, 30_000),
    }


def test_a_touch_of_another_device_makes_no_second_one(tmp_path: Path, wording: Wording) -> None:
    events = [on_device(3, 0, 1000), on_device(0, 1000, 2), on_device(3, 1500, 500)]
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    (rank,) = report.ranks
    assert rank.devices == ()
    assert (rank.total.span_us, rank.total.compute_us) == (2000, 1500)
    wording(trace_notes(report))


def test_the_name_of_a_rank_is_that_of_its_device(tmp_path: Path) -> None:
    """Each trace lists all devices of its machine, by numbers or numbers in quotes."""
    listed = [
        {"id": 0, "name": "V100"},
        {"id": "1", "name": "A100"},
        {"id": 2, "name": "H100"},
        {"name": "?"},
    ]
    for device, name in ((0, "V100"), (1, "A100"), (2, "H100"), (3, "V100")):
        file = write(tmp_path / f"{device}.json", [on_device(device, 0, 10)], deviceProperties=listed)
        (rank,) = analyse_paths([file]).ranks
        assert rank.device == name


# Working through a trace in stretches changes its memory, and no figure


RANGES = st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 12)), max_size=12)
SIZES = (1, 3, 50)


def timed(ranges: list[tuple[int, int]]) -> Timed:
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    return Timed(starts, np.array([length for _, length in ranges], dtype=np.int64))


@given(RANGES, RANGES, st.integers(1, 4))
def test_stretches_follow_each_other_and_cut_no_range(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "SIZE", size)
        found = list(tables.stretches(timed(ranges), timed(others)))
    assert [each.end_ns for each in found[:-1]] == [each.begin_ns for each in found[1:]]
    for start, length in ranges + others:
        (mine,) = (each for each in found if each.holds(np.array([start])).all())
        assert start + max(length, 1) <= mine.end_ns


def test_a_long_trace_is_cut() -> None:
    apart = timed([(10 * i, 5) for i in range(40)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "SIZE", 10)
        found = list(tables.stretches(apart))
    assert [each.begin_ns for each in found[1:]] == [100, 200, 300]


def assert_same_in_stretches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = msgspec.json.encode(analyse_paths([path]))
    for size in SIZES:
        monkeypatch.setattr(tables, "SIZE", size)
        assert msgspec.json.encode(analyse_paths([path])) == whole


def made_events() -> list[Event]:
    """Two steps with modules around operators, gaps that a late launch explains, work on two streams."""
    events: list[Event] = []
    for i in range(12):
        at = 100 * i
        events += [
            span("python_function", "nn.Module: Linear_0", at, 60),
            span("cpu_op", "aten::linear", at + 1, 50),
            span("cpu_op", "aten::addmm", at + 2, 30),
            span("cpu_op", "AddmmBackward0", at + 5, 20, tid=2),
            launch(at + 5, 2, 2 * i + 1),
            launch(at + 70, 2, 2 * i + 2),
            kernel("gemm", at + 20 + i, 20, 2 * i + 1),
            kernel("ncclDevKernel_AllReduce_Sum_f32", at + 30, 30 + 5 * i, 2 * i + 2, stream=9),
        ]
    return [*events, step(1, 0, 590), step(2, 600, 590)]


def test_a_made_trace_says_the_same_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_in_stretches(write(tmp_path / "rank0.json", made_events()), monkeypatch)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces next to the repository")
@pytest.mark.parametrize("directory", ["nccl_args_A100", "vit_H100"])
def test_a_real_trace_says_the_same_in_stretches(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SIZE", 1 << 30)
    path = min((REAL / directory).glob("*.json.gz"))
    whole = msgspec.json.encode(analyse_paths([path]))
    monkeypatch.setattr(tables, "SIZE", 500)
    assert msgspec.json.encode(analyse_paths([path])) == whole


# Work that CUDA graphs replay: of the operators that were captured, if the trace shows the capture


GRAPH_ID = 5 << 32
"""In the upper half of its nodes' numbers."""
MARK = "no capture in the trace is certain"


def call(name: str, start_us: float, correlation: int, **args: Any) -> Event:
    return span("cuda_runtime", name, start_us, 1, correlation=correlation, **args)


def op(name: str, start_us: float, length_us: float, side: int) -> Event:
    dims = [[side, side], [side, side]]
    args = {"Input Dims": dims, "Input type": ["float", "float"], "Concrete Inputs": []}
    return span("cpu_op", name, start_us, length_us, **args)


def capture(at_us: float, first: int, sides: Sequence[int], kernels: Sequence[str] = ()) -> list[Event]:
    """Products of these sides, each after a memset; with names of the kernels, as ROCm has them."""
    events = [
        call("cudaStreamBeginCapture", at_us, first),
        call("cudaStreamEndCapture", at_us + 90, first + 1),
    ]
    for i, side in enumerate(sides):
        start = at_us + 10 + 10 * i
        name = {"kernel": kernels[i]} if kernels else {}
        events += [
            op("aten::mm", start, 8, side),
            call("cudaMemsetAsync", start + 1, first + 2 + 2 * i),
            call("cudaLaunchKernel", start + 3, first + 3 + 2 * i, **name),
        ]
    return events


def replay(
    at_us: float, correlation: int, lengths: Sequence[float], numbered: bool = True, graph: int = GRAPH_ID
) -> list[Event]:
    """A memset and a kernel of each of these lengths, 1 ms after the launch; branches run the last first."""
    events = [span("cpu_op", "graphed", at_us, 4), call("cudaGraphLaunch", at_us + 1, correlation)]
    start = at_us + 1000
    for i, length in enumerate(lengths):
        begin = start + (100 * (len(lengths) - i) if numbered else 100 * i)
        nodes = [{"graph node id": graph + 2 * i + each} if numbered else {} for each in (0, 1)]
        memset = kernel("Memset (Device)", begin, 1, correlation, **nodes[0]) | {"cat": "gpu_memset"}
        events += [memset, kernel(f"gemm{i}", begin + 2, length, correlation, **nodes[1])]
    return events


def report_of(directory: Path, *parts: list[Event]) -> TraceReport:
    events = [event for part in parts for event in part]
    return analyse_paths([write(directory / "r0.json", events, **rank_info(0, 1))], None, frozenset(TABLES))


def marked(report: TraceReport) -> bool:
    return any(MARK in text for text in trace_notes(report))


@pytest.mark.parametrize("numbered", [True, False], ids=["CUDA", "ROCm"])
def test_replays_are_of_the_operators_that_were_captured(tmp_path: Path, numbered: bool) -> None:
    steps = [step(1, 0, 500), step(2, 1000, 500), step(3, 3000, 500)]
    eager = [op("aten::mm", 200, 8, 64), call("cudaLaunchKernel", 201, 90), kernel("gemm0", 300, 7, 90)]
    other = capture(600, 60, [8])  # another number of calls: not this graph's
    names = () if numbered else ("gemm0", "gemm1")
    launches = [replay(1010, 100, (10, 20), numbered), replay(3010, 101, (12, 24), numbered)]
    modules = [
        span("python_function", f"nn.Module: {name}", start_us, length_us)
        for name, start_us, length_us in (("Model_0", 18, 100), ("Block_0", 25, 60))
    ]
    report = report_of(tmp_path, steps, eager, modules, capture(20, 1, (64, 32), names), other, *launches)
    (rank,) = report.ranks
    assert not marked(report)
    assert {row.name: row.device_us for row in rank.ops} == {"aten::mm": 7 + 66 + 4, "graphed": 0}
    assert [each.compute_us for each in rank.steps] == [7, 30, 36]
    rows = {row.shapes: (row.count, row.device_us) for row in report.shapes or ()}
    assert rows == {"64×64, 64×64": (3, 7 + 11 + 13), "32×32, 32×32": (2, 21 + 25)}
    found = {(row.name, row.graph): (row.op, row.count) for row in report.kernels_by_shape or ()}
    assert found["gemm1", True] == ("aten::mm", 2)
    assert found["gemm0", False] == ("aten::mm", 1)
    tree = [(row.depth, row.name, row.count) for row in report.operators or ()]
    assert tree == [
        (0, "Model_0", 1),  # called once, to capture the graph
        (1, "Block_0", 2),  # captured, so it runs with each replay
        (2, "aten::mm", 4),
        (3, "32×32, 32×32 float", 2),
        (3, "64×64, 64×64 float", 2),
        (0, "aten::mm", 2),  # one of them in the other capture, of which no replay is known
        (1, "64×64, 64×64 float", 1),
    ]
    counts = {(row.depth, row.name): row.count for row in report.operators_in_steps or ()}
    assert counts[2, "aten::mm"] == 4
    assert (report.launches or ())[0].slow_launches == 0


REPLAY = replay(1010, 100, (10, 20))
UNCERTAIN: dict[str, list[list[Event]]] = {
    "no capture": [REPLAY],
    "of another number of calls": [capture(20, 1, (64,)), REPLAY],
    "two that differ": [capture(20, 1, (64, 32)), capture(200, 30, (8, 4)), REPLAY],
    "captured after it was launched": [capture(20_000, 1, (64, 32)), REPLAY],
    "cut off": [capture(20, 1, (64, 32))[:1], capture(20, 1, (64, 32))[2:], REPLAY],
    "a kernel of another name": [capture(20, 1, (64,), ["relu"]), replay(1010, 100, (10,), False)],
    "kernels without names or numbers": [capture(20, 1, (64,)), replay(1010, 100, (10,), False)],
    "one node again and again": [capture(20, 1, (64,)), REPLAY[:4], REPLAY[2:3]],
}


@pytest.mark.parametrize("events", UNCERTAIN.values(), ids=UNCERTAIN)
def test_without_a_capture_that_is_certain_that_is_said(tmp_path: Path, events: list[list[Event]]) -> None:
    report = report_of(tmp_path, *events)
    assert marked(report)
    (rank,) = report.ranks
    assert {row.name for row in rank.ops if row.device_us} == {"graphed"}


def test_as_many_graphs_as_captures_are_theirs_in_order(tmp_path: Path) -> None:
    graphs = [replay(5000, 101, (3, 4), graph=9 << 32), replay(1010, 100, (10, 20), graph=7 << 32)]
    report = report_of(tmp_path, capture(20, 1, (64, 32)), capture(200, 30, (8, 4)), *graphs)
    assert not marked(report)
    rows = {row.shapes.partition("×")[0]: row.device_us for row in report.shapes or ()}
    assert rows == {"64": 11, "32": 21, "8": 4, "4": 5}


def test_a_replayed_collective_has_the_group_of_its_capture(tmp_path: Path) -> None:
    facts = {"Collective name": "allreduce", "In msg nelems": 500, "Out msg nelems": 500, "dtype": "Float"}
    group = {"Process Group Name": "tp", "Process Group Ranks": "[0, 1]", "Group size": 2, "Seq": 3}
    for rank in (0, 1):
        events = [
            call("cudaStreamBeginCapture", 1, 1),
            span("cpu_op", "record_param_comms", 10, 9, **facts | group),
            call("cudaLaunchKernelExC", 12, 2),
            call("cudaStreamEndCapture", 30, 3),
        ]
        for number in range(2):
            start, late = 1000.0 * (1 + number), 10.0 * rank
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            events += [
                call("cudaGraphLaunch", start, 10 + number),
                kernel(name, start + 50 + late, 30 - late, 10 + number, **{"graph node id": GRAPH_ID}),
            ]
        write(tmp_path / f"r{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    assert [(each.group, report.groups[each.group], each.bytes) for each in report.collectives] == [
        ("tp", (0, 1), 2000)
    ] * 2
    assert [rank.total.wait_us for rank in report.ranks] == [20, 0]


# The interval algebra against the plainest reference there is: sets of whole nanoseconds


def build(ranges: list[tuple[int, int]]) -> Intervals:
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    return union(starts, starts + np.array([length for _, length in ranges], dtype=np.int64))


def points(ranges: list[tuple[int, int]]) -> set[int]:
    return {point for start, length in ranges for point in range(start, start + length)}


def covered(intervals: Intervals) -> set[int]:
    pairs = zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True)
    return {point for start, end in pairs for point in range(start, end)}


def assert_is(intervals: Intervals, expected: set[int]) -> None:
    """The set is right, and in the form that all other functions rely on."""
    assert covered(intervals) == expected
    assert intervals.length_ns == len(expected)
    assert (intervals.starts < intervals.ends).all()
    assert (intervals.ends[:-1] <= intervals.starts[1:]).all()


@given(RANGES)
def test_union(ranges: list[tuple[int, int]]) -> None:
    merged = build(ranges)
    assert_is(merged, points(ranges))
    assert (merged.ends[:-1] < merged.starts[1:]).all()


@given(RANGES, RANGES)
def test_intersect_subtract_and_join(some: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = build(some), build(other)
    assert_is(a.intersect(b), points(some) & points(other))
    assert_is(a.subtract(b), points(some) - points(other))
    assert_is(a.join(b), points(some) | points(other))
    assert_is(a.subtract(b).subtract(a), set())


@given(RANGES, st.integers(-25, 70), st.integers(0, 50))
def test_clip_and_gaps(ranges: list[tuple[int, int]], start: int, length: int) -> None:
    window = set(range(start, start + length))
    assert_is(build(ranges).clip(start, start + length), points(ranges) & window)
    assert_is(build(ranges).gaps(start, start + length), window - points(ranges))


WORK = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12), st.sampled_from(list(GpuKind))), min_size=1, max_size=15
)


@given(WORK, RANGES, RANGES, RANGES, st.integers(-5, 30), st.integers(0, 60))
def test_the_parts_of_a_window_add_up(
    work: list[tuple[int, int, GpuKind]],
    others: list[tuple[int, int]],
    data: list[tuple[int, int]],
    comm: list[tuple[int, int]],
    start: int,
    length: int,
) -> None:
    starts = np.array([each[0] for each in work], dtype=np.int64)
    ends = starts + np.array([each[1] for each in work], dtype=np.int64)
    kinds = np.array([each[2] for each in work], dtype=np.int8)
    waits = Waits(data=build(data), comm=build(comm), runtime=EMPTY, ops=EMPTY)
    activity = gpu_activity(starts, ends, kinds, build(others))
    found = measure(activity, start, start + length, waits, None)

    window = set(range(start, start + length))
    by_kind = {kind: points([each[:2] for each in work if each[2] is kind]) & window for kind in GpuKind}
    copies = by_kind[GpuKind.MEMCPY] | by_kind[GpuKind.MEMSET]
    compute, collectives = by_kind[GpuKind.COMPUTE], by_kind[GpuKind.COMM]
    other_steps = (points(others) & window) - compute - collectives - copies
    idle = window - compute - collectives - copies - other_steps
    assert (found.compute, found.comm, found.copy) == (len(compute), len(collectives), len(copies))
    assert found.overlap == len(compute & collectives)
    assert covered(found.exposed_comm) == collectives - compute
    assert found.exposed_copy == len(copies - compute - collectives)
    assert (found.other_steps, found.idle) == (len(other_steps), len(idle))
    exposed = found.exposed_comm.length_ns + found.exposed_copy
    assert found.compute + exposed + found.other_steps + found.idle == length
    causes, doing = found.idle_by_cause, found.idle_by_host
    assert causes.data == len(idle & points(data))
    assert causes.comm_wait == len(idle & points(comm) - points(data))
    assert sum(vars(causes).values()) == len(idle)
    assert doing.runtime + doing.data + doing.op + doing.other == len(idle)
