"""A step's time where the GPU runs behind the CPU: real captures begin while earlier work still runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gpurun.launcher.compare.figures.ranks import quiet_steps
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.tensorboard_plugin.answers.operators import operators_answer
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.diff import diff_traces
from gpurun.launcher.trace.model import RankTrace, StepBreakdown, TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, step, write
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


def test_a_marker_at_the_end_without_gpu_work_is_said(tmp_path: Path) -> None:
    """`step()` has begun it, and the capture ended."""
    path = write(tmp_path / "rank0.json", [*behind(30), step(18, 90, 2)])
    (said,) = (text for text in trace_notes(analyse_paths([path])) if "step 18" in text)
    assert said.endswith("step 18, the last, launched no GPU work; --steps 15:18 leaves it out of the means")
    others = analyse_paths([path], slice(15, 18)), analyse_paths([write(tmp_path / "b.json", behind(30))])
    assert not any("the last" in text for report in others for text in trace_notes(report))


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
