"""The sentence under a trace's tables: its numbers are theirs, and its advice fits the device."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpurun.launcher.findings.finding import screen_of
from gpurun.launcher.report.terminal.trace import render_tables, render_trace
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.causes import PARTS, Cause, Part, with_savings
from gpurun.launcher.trace.explain import (
    explained_stretches,
    is_waiting_unknown,
    last_rank,
    mean_stretch,
    trace_causes,
)
from gpurun.launcher.trace.model import GAPS_OF_IDLE, Saving
from tests.unit.trace.several_ranks.generated_job import RING, Job
from tests.unit.trace.several_ranks.test_trace_groups import grouped
from tests.unit.trace.trace_files import H100, REAL, Event, kernel, launch, rank_info, span, step, write
from tests.wording import Wording


def late_kernel(number: int, begin: float) -> list[Event]:
    """A step of 100 µs whose only kernel, of 25 µs, is launched when 70 are over."""
    return [step(number, begin, 100), launch(begin + 70, 1, number), kernel("k", begin + 75, 25, number)]


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_the_sentence_is_about_the_steps_that_the_table_shows(
    tmp_path: Path, steps: int, wording: Wording
) -> None:
    events = [event for i in range(steps) for event in late_kernel(i + 1, 1000 * i)]
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    text = render_trace(report, 120)
    (mean,) = (line.split() for line in text.splitlines() if line.startswith("mean "))
    assert mean[:2] == ["mean", "0.100"]
    assert mean[-5:-2] == ["0.075", "0.075", "-"]  # idle, all of it the host's
    wording(report.conclusion)
    said = " ".join(text.split())
    assert all(each.text in said for each in report.findings)


def steps_with_copies(copies_us: dict[int, float], num_steps: int = 8) -> list[Event]:
    """Steps with 600 µs of compute and 100 of waiting for the CPU; some also wait in the call for a copy."""
    found: list[Event] = []
    begin = 0.0
    for number in range(num_steps):
        copy_us = copies_us.get(number, 10)
        calls = [("cudaMemcpyAsync", begin + 90, copy_us), ("cudaLaunchKernel", begin + 90 + copy_us, 1)]
        for place, (name, start, length) in enumerate(calls):
            call = span("cuda_runtime", name, start, length, correlation=10 * number + place + 1)
            found.append(call)
        ready = begin + 90 + copy_us
        found.append(kernel("copied", ready, 1, 10 * number + 1))
        found.append(kernel("k", ready + 1, 600, 10 * number + 2))
        found.append(step(number, begin, 701 - 10 + copy_us))
        begin += 691 + copy_us
    return found


def test_causes_are_those_of_usual_steps(tmp_path: Path, wording: Wording) -> None:
    """A call of 900 µs in one of 8 steps would be 14 % of the mean step; it is named by itself."""
    report = analyse_paths([write(tmp_path / "rank0.json", steps_with_copies({3: 900}))])
    assert report.findings[0].figures["outlying_ms"] == {"step 3": pytest.approx(0.890)}
    (cause,) = (each for each in report.findings if each.level == "cause")
    assert (cause.code, cause.figures["lost_ms"]) == ("host-bound", pytest.approx(0.100))
    assert cause.figures["span_ms"] == pytest.approx(0.701)
    assert {each.part: each.saved_us for each in report.savings}["host"] == pytest.approx(100, abs=2)
    (noted,) = (each for each in report.findings if each.figures.get("case") == "outlying-step")
    assert (noted.figures["more_ms"], noted.figures["call"]) == (pytest.approx(0.890), "cudaMemcpyAsync")
    wording(noted.text, report.findings[0].text, report.conclusion)


@pytest.mark.parametrize(("copies_us", "is_said"), [({3: 900}, True), ({}, False)])
def test_that_the_path_has_steps_that_causes_leave_out_is_said(
    tmp_path: Path, copies_us: dict[int, float], is_said: bool
) -> None:
    events = steps_with_copies(copies_us)
    report = analyse_paths([write(tmp_path / "rank0.json", events)], None, {"critical-path"})
    said = "The path and its gains are of all steps; causes are without step 3."
    assert (said in render_tables(report, ("critical-path",), 100)) == is_said


@pytest.mark.parametrize(
    "copies_us",
    [{3: 900, 6: 900}, {3: 100}, {1: 200, 2: 350, 3: 500}, {}],
    ids=["what recurs", "a little longer", "steps that scatter", "equal steps"],
)
def test_steps_are_left_out_only_where_they_stand_apart(tmp_path: Path, copies_us: dict[int, float]) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", steps_with_copies(copies_us))])
    assert "outlying_ms" not in report.findings[0].figures
    (cause,) = (each for each in report.findings if each.level == "cause")
    copying_us = sum(copies_us.get(number, 10) for number in range(8))
    assert cause.figures["lost_ms"] == pytest.approx((90 + copying_us / 8) / 1000)


def outlying_text(path: Path) -> str:
    (noted,) = (
        each.text for each in analyse_paths([path]).findings if each.figures.get("case") == "outlying-step"
    )
    return noted


def late_step(number: int, begin: int, pause_us: int, on_gpu: bool) -> list[Event]:
    """A step of 600 µs of work, and a pause that the CPU makes after it."""
    if not on_gpu:
        return [span("cpu_op", "aten::mm", begin, 600), step(number, begin, 600 + pause_us)]
    work = [launch(begin + 5, 1, number + 1), kernel("k", begin + 7, 593, number + 1)]
    return [*work, step(number, begin, 600 + pause_us)]


def test_an_outlying_step_of_a_cpu_waits_for_no_launches(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(8):
        begin = 700 * number + (900 if number > 3 else 0)
        events += late_step(number, begin, 1000 if number == 3 else 100, on_gpu=False)
    text = outlying_text(write(tmp_path / "rank0.json", events))
    assert "step 3 takes 1.60 instead of 0.700 ms, 0.900 ms more outside of operators;" in text


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("late", [3, 6])
def test_a_pause_at_the_end_of_an_outlying_step_is_none_of_the_next(
    tmp_path: Path, late: int, on_gpu: bool
) -> None:
    """What usual steps save is what they lose, though the program does nothing until the next step."""
    events: list[Event] = []
    for number in range(8):
        begin = 700 * number + (900 if number > late else 0)
        events += late_step(number, begin, 1000 if number == late else 100, on_gpu)
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    (cause,) = (each for each in report.findings if each.level == "cause")
    saved_us = {each.part: each.saved_us for each in report.savings}["host"]
    assert saved_us == pytest.approx(1000 * cause.figures["lost_ms"], abs=1)


def test_communication_of_an_outlying_step_is_no_transfer_where_ranks_are_missing(tmp_path: Path) -> None:
    """The rank that it waits for may be missing."""
    events: list[Event] = []
    begin = 0
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    for number in range(8):
        length = 1000 if number == 3 else 100
        events += [launch(begin, 1, 2 * number + 1), kernel("k", begin + 2, 600, 2 * number + 1)]
        events += [launch(begin + 3, 1, 2 * number + 2), step(number, begin, 602 + length)]
        events.append(kernel(RING, begin + 602, length, 2 * number + 2, **group))
        begin += 602 + length
    text = outlying_text(write(tmp_path / "rank0.json", events, **rank_info(0, 2)))
    assert "0.900 ms more in communication or waiting for it;" in text


def test_real_steps_that_stand_apart_are_left_out() -> None:
    """A call for a copy of 37 ms, and a step in which the CPU is late: neither is what a step costs."""
    report = analyse_paths([REAL / "resnet50_V100" / "num_workers_4.pt.trace.json.gz"])
    assert [*report.findings[0].figures["outlying_ms"]] == ["step 5", "step 9"]
    assert "17 % of its usual step (21.0 of 125 ms) waiting for the CPU" in report.conclusion
    late = next(each for each in report.findings if each.figures.get("outlying_step") == 9)
    in_steps = {step.step: step.idle_by_cause_us.of_launches / 1000 for step in report.ranks[0].steps}
    usual = [ms for number, ms in in_steps.items() if number not in (5, 9)]
    assert late.figures["more_ms"] == pytest.approx(in_steps[9] - sum(usual) / len(usual))
    assert late.text.startswith("step 9 takes 163 instead of 125 ms, 37.2 ms more waiting for the CPU")


def test_the_advice_on_a_copy_that_holds_up_launches_is_about_copies(wording: Wording) -> None:
    """A call that copies 40 ms long from memory that isn't pinned, while the GPU has nothing to do."""
    path = REAL / "resnet50_V100" / "num_workers_4.pt.trace.json.gz"
    _, cause, advice, *_ = analyse_paths([path], slice(5, 6)).findings
    assert cause.figures["call"] == "cudaMemcpyAsync"
    wording(cause.text, advice.text)


def test_a_loss_of_the_rank_that_others_wait_for_saves_what_it_does_on_all_ranks() -> None:
    """The CPU of rank 1 takes as long, but while its GPU waits for rank 0 in a collective of gloo."""
    report = analyse_paths([H100 / "ddp"])
    saved_us = {(each.part, each.rank): each.saved_us for each in report.savings}
    assert saved_us["host", None] > 30 * saved_us["rank", 0]
    first = next(each for each in report.findings if each.level == "cause")
    assert first.code == "host-bound"
    assert (
        f"without that on all ranks, a step would be {saved_us['host', None] / 1000:.1f} ms shorter"
        in first.text
    )


def test_without_one_of_the_losses_of_a_rank_the_others_are_left() -> None:
    """Like the other rank, it would lose neither; without its wait for data, 10 of 30 ms."""
    input_ms = Cause("input", (0,), 10e6, 33e6, {"who": "rank 0"})
    found = with_savings(
        [input_ms, replace(input_ms, part="host", lost_ns=17e6)],
        [Saving("rank", 0, None, 30_000.0), Saving("input", None, None, 9_000.0),
         Saving("host", None, None, 17_000.0)],
        num_ranks=2,
    )  # fmt: skip
    assert [(each.part, each.saved_ns) for each in found] == [("host", 17e6), ("input", 9e6)]


def test_where_ranks_wait_in_a_ring_no_rank_is_blamed(tmp_path: Path, wording: Wording) -> None:
    """Each rank waits for its own neighbours, so none is the last."""
    job = Job(4)
    job.all_reduce("0", [0, 1, 2, 3], [3_100] * 4, 3_110)
    for rank in range(4):
        messages = [("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)]
        grouped(job, rank, messages, 1_000 + 600 * rank, 3_000)
    text = job.report(tmp_path).conclusion
    wording(text)
    assert "rank 0" not in text


@pytest.mark.parametrize("lacks", ["kernel", "user_annotation"])
def test_no_cause_is_named_for_what_a_truncated_file_lacks(
    tmp_path: Path, lacks: str, wording: Wording
) -> None:
    """It may lack the last kernel, or all steps; then its whole time is none of the steps."""
    events = sorted([*late_kernel(1, 0), *late_kernel(2, 1000)], key=lambda event: event["cat"] == lacks)
    paths = [write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2)) for rank in (0, 1)]
    text = paths[1].read_text()
    paths[1].write_text(text[: (text.rindex if lacks == "kernel" else text.index)(f'"{lacks}"')])
    assert "1 file cut off" in analyse_paths(paths[1:]).conclusion
    report = analyse_paths(paths)
    assert [rank.is_cut for rank in report.ranks] == [False, True]
    wording(report.conclusion)
    mean = mean_stretch(explained_stretches(report))
    assert mean.span_us == pytest.approx(100, abs=20)


def test_without_steps_the_sentence_is_about_the_total(tmp_path: Path, wording: Wording) -> None:
    events = [kernel("a", 0, 25), launch(70, 1, 2), kernel("b", 75, 25, 2)]
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    assert "mean" not in render_trace(report, 120)
    wording(report.conclusion)


def test_gaps_between_operators_of_a_cpu_are_not_called_python(tmp_path: Path, wording: Wording) -> None:
    """It may sleep: a trace doesn't have the time that its threads worked. Nor is there advice about GPUs."""
    on_cpu = [step(1, 0, 100), span("cpu_op", "aten::mm", 0, 20), span("cpu_op", "aten::mm", 80, 20)]
    wording(analyse_paths([write(tmp_path / "cpu.json", on_cpu)]).conclusion)
    on_cpu.append(span("cpu_op", "record_param_comms", 30, 10))  # an operator, though it computes nothing
    wording(analyse_paths([write(tmp_path / "calls.json", on_cpu)]).conclusion)


@pytest.mark.parametrize(
    "name", ["Memcpy DtoD (Device -> Device)", "CopyDeviceToDevice", "MEMORY_COPY_DEVICE_TO_DEVICE"]
)
def test_copies_within_a_device_are_not_called_those_of_pinned_memory(tmp_path: Path, name: str) -> None:
    copies = [(name, 400), ("Memcpy HtoD (Pinned -> Device)", 100)]
    events, at = [launch(0, 1, 1), kernel("k", 1, 100, 1)], 110
    for number, (called_so, length) in enumerate(copies, 2):
        events += [
            launch(number, 1, number),
            span("gpu_memcpy", called_so, at, length, correlation=number, device=0),
        ]
        at += length
    said = analyse_paths([write(tmp_path / "t.json", events)]).conclusion
    assert "on copies of the device's own memory that nothing overlaps" in said


@pytest.mark.parametrize(
    "damage", [{"dur": -500}, {"dur": 1e300}, {"ts": 1e18}, {"ts": "1e400"}, {"ts": None}]
)
def test_no_cause_is_named_where_work_is_lost(tmp_path: Path, damage: dict[str, Any]) -> None:
    """A kernel of two is damaged: the gap in its place would look like a loss. One of 200 is nothing."""
    for num, is_lossy in ((2, True), (200, False)):
        events = launches_of([(1_000.0 * number, 10.0) for number in range(num)])
        next(each for each in events if each["cat"] == "kernel").update(damage)
        report = analyse_paths([write(tmp_path / "t.json", events)])
        assert report.ranks[0].lost_events == is_lossy
        assert report.findings[0].text.endswith("1 damaged event left out, so no cause is named") == is_lossy
        assert "cause" not in {each.level for each in report.findings} or not is_lossy


def test_what_saves_nothing_is_shown_without_advice(tmp_path: Path) -> None:
    """Copies take 3 of 5 ms of the GPU, and the CPU, which waits for nothing, as long as all of it."""
    events: list[Event] = []
    for number in range(4):
        begin = 5_020 * number
        copy = kernel("Memcpy HtoD (Pinned -> Device)", begin + 10, 3_000, 2 * number + 1, stream=20)
        events += [step(number, begin, 5_020), launch(begin, 5, 2 * number + 1), copy | {"cat": "gpu_memcpy"}]
        events += [launch(begin + 20, 5, 2 * number + 2), kernel("k", begin + 3_012, 2_000, 2 * number + 2)]
    report = analyse_paths([write(tmp_path / "t.json", events)])
    (answer, why), shown = screen_of(report.findings).lines, report.findings[1]
    assert (answer[0], why[0], why[1]) == ("Traces", "Why", shown.text)
    assert (shown.code, shown.figures["saved_ms"]) == ("exposed-copies", 0)
    assert not [each for each in report.findings if each.level == "remedy"]


def test_work_of_other_steps_is_no_gap(tmp_path: Path) -> None:
    """The device works, on another stream, for the step before."""
    events = [launch(1, 1, 9), kernel("long", 5, 290, 9, stream=20)]
    for number in range(3):
        at = 100 * number
        events += [step(number, at, 100), launch(at + 1, 1, number + 1), kernel("k", at + 5, 10, number + 1)]
    (rank,) = (report := analyse_paths([write(tmp_path / "t.json", events)])).ranks
    assert [each.idle_us for each in rank.steps][1:] == [0, 5]
    said = next(each for each in report.findings if each.code == "gaps")
    assert "in work of other steps alone" in said.text


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"samples": 8, "thread_cpu_ns": 90_000}, "in Python between operators"),
        ({"samples": 8, "thread_cpu_ns": 42_000}, "blocked"),
        ({"samples": 8, "thread_cpu_ns": 1_000}, "outside of operators"),  # other threads run them
        ({"samples": 8, "thread_cpu_ns": 1_000, "queue_ns": 25_000}, "blocked"),  # they wait for a core
        ({"samples": 8, "thread_cpu_ns": 90_000, "queue_ns": -1}, "outside of operators"),
        ({"samples": 8}, "outside of operators"),
        ({"samples": "8", "thread_cpu_ns": 90_000}, "outside of operators"),
        ({"samples": 8, "thread_cpu_ns": -1}, "outside of operators"),
        ({"samples": 1 << 70, "thread_cpu_ns": 90_000}, "outside of operators"),
        ("odd", "outside of operators"),
    ],
)
def test_a_trace_of_ours_knows_whether_its_thread_worked(tmp_path: Path, facts: object, said: str) -> None:
    """Its operators take 40 of 100 µs."""
    events = [step(1, 0, 100), span("cpu_op", "aten::mm", 0, 20), span("cpu_op", "aten::mm", 80, 20)]
    assert said in analyse_paths([write(tmp_path / "cpu.json", events, gpurunRank=facts)]).conclusion


def test_a_trace_of_ours_knows_whose_batch_is_larger(tmp_path: Path) -> None:
    job = Job(2)
    for rank, samples in enumerate((24, 8)):
        job.headers[rank]["gpurunRank"] = {"samples": samples, "thread_cpu_ns": 0}
        job.kernel(rank, "gemm", 0, 1_000 * samples, False)
    job.all_reduce("0", [0, 1], [24_000, 8_000], 24_100)
    assert "for rank 0's larger batch: try split: even or balanced." in job.report(tmp_path).conclusion


@pytest.mark.parametrize(
    "launches",
    [[], [span("cpu_op", "aten::mm", 0, 10)], [launch(0, 1, 1), launch(900, 1, 3)]],
    ids=["nothing of the CPU is recorded", "no launch is recorded", "that of the next work is lost"],
)
def test_gaps_are_of_an_unknown_cause_where_the_launch_of_what_came_next_is(
    tmp_path: Path, launches: list[Event], wording: Wording
) -> None:
    work = [kernel("k", 100, 100, 1), kernel("k", 800, 100, 2), kernel("k", 905, 95, 3)]
    report = analyse_paths([write(tmp_path / "t.json", [*launches, *work])])
    causes = report.ranks[0].total.idle_by_cause_us
    assert (causes.unknown, causes.other) == (600 if len(launches) == 2 else 605, 0)
    wording(report.conclusion)


def launches_of(calls: list[tuple[float, float]], name: str = "cudaLaunchKernel") -> list[Event]:
    """Kernels of 1 ms that start 5 µs after their launching call ends; `calls`: start and length, in µs."""
    works = [kernel("sgemm", start + length + 5, 1_000, i) for i, (start, length) in enumerate(calls, 1)]
    return [span("cuda_runtime", name, *call, correlation=i) for i, call in enumerate(calls, 1)] + works


def called(name: str, start: float, end: float, category: str = "cuda_runtime") -> Event:
    return span(category, name, start, end - start)


@pytest.mark.parametrize(
    ("launched", "calls", "said"),
    [
        (
            50,
            [called("hipMemcpyWithStream", 60, 8_990)],
            "in which the CPU is mostly in hipMemcpyWithStream",
        ),
        (9_000, [called("cudaStreamSynchronize", 60, 8_990)], "the CPU is mostly in cudaStreamSynchronize"),
        (50, [called("aten::mm", 60, 8_990, "cpu_op")], "in gaps between work already launched"),
        (9_000, [called("aten::mm", 60, 8_990, "cpu_op")], "waiting for the CPU to launch work"),
        (
            9_000,
            [],
            "the CPU, of which mostly nothing is recorded: record the profiler's with_stack=True",
        ),
        (9_000, [called("a.py(1): f", 0, 9_990, "python_function")], "waiting for the CPU to launch work"),
        (9_000, [called("hf/a.py(1): preprocess", 60, 8_990, "python_function")], "waiting for data"),
        (
            9_000,
            [called("torch/_dynamo/convert_frame.py(715): _compile", 60, 8_990, "python_function")],
            "in what is done once (torch.compile: 8.89 ms)",
        ),
        (
            9_000,
            [called("Torch-Compiled Region: 0/0", 60, 9_010, "cpu_op")],
            "the CPU, of which mostly nothing is recorded but that it is in Torch-Compiled Region: 0/0",
        ),
    ],
)
def test_a_gap_is_named_by_what_the_cpu_does_in_it(
    tmp_path: Path, launched: float, calls: list[Event], said: str
) -> None:
    """The GPU works for 100 µs, and again from 9,010 µs on."""
    events = [launch(0, 1, 1), kernel("k", 2, 100, 1), launch(launched, 5, 2), kernel("k", 9_010, 100, 2)]
    assert said in analyse_paths([write(tmp_path / "t.json", [*events, *calls])]).conclusion


def python(name: str, start: float, end: float, tid: int = 1) -> Event:
    return span("python_function", name, start, end - start, tid)


LATE = [launch(0, 1, 1), kernel("k", 2, 100, 1), launch(9_000, 5, 2), kernel("k", 9_010, 100, 2)]
"""The GPU works for 100 µs, and again from 9,010 µs on, when the CPU launches more."""
LOOP = [python("train.py(3): main", -100, 9_900), python("train.py(9): step", 0, 9_500)]


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (
            [python("a/tok.py(7): pad", 300, 8_900), python("torch/nn/m.py(1): _call_impl", 350, 8_900)],
            "launch work, for most of it in pad (a/tok.py:7): look into pad (a/tok.py:7): nothing",
        ),
        (
            [
                python("a/tok.py(7): pad", 300, 8_900),
                *(called("cudaStreamIsCapturing", at, at + 1) for at in range(400, 8_900, 700)),
            ],
            "for most of it in pad (a/tok.py:7): try larger",
        ),
        ([python("a/tok.py(7): pad", 300, 4_000)], "to launch work: try larger"),
        ([python("a/tok.py(7): pad", 300, 8_900, tid=2)], "to launch work: try larger"),
        (
            [python("torch/optim/sgd.py(7): step", 300, 8_900), python("<built-in method x>", 350, 8_800)],
            "for most of it in step (torch/optim/sgd.py:7)",
        ),
        ([python("<built-in function sleep>", 300, 8_900)], "for most of it in sleep: look into sleep"),
        (
            [python("<built-in method acquire of lock object at 0x7f>", 300, 8_900)],
            "for most of it in acquire: look into acquire",
        ),
        ([python("<ipython-input-3>(7): pad", 300, 8_900)], "most of it in pad (<ipython-input-3>:7)"),
        (
            [python("d.py(41): preprocess", 300, 8_900), span("cpu_op", "aten::pad", 400, 8_000)],
            "waiting for data, for most of it in preprocess (d.py:41)",
        ),
    ],
    ids=[
        *("most of it", "while it launches", "less", "on another thread", "of a library"),
        *("built in", "a built-in method", "in a notebook", "for data"),
    ],
)
def test_the_function_around_most_of_a_wait_is_named(
    tmp_path: Path, functions: list[Event], said: str
) -> None:
    report = analyse_paths([write(tmp_path / "t.json", [*LATE, *LOOP, *functions])])
    assert said in report.conclusion
    assert "main" not in report.conclusion
    assert "with Python's stacks, which slow the CPU" in "".join(each.text for each in report.findings)


def test_functions_are_those_of_the_steps(tmp_path: Path) -> None:
    """Between the steps the CPU is in another one for longer."""
    events = [*LATE, step(1, 0, 110), step(2, 8_000, 1_200), *LOOP, python("log.py(1): write", 120, 7_990)]
    events += [python("t.py(5): pad", 8_050, 8_990)]
    (rank,) = analyse_paths([write(tmp_path / "t.json", events)]).ranks
    assert rank.cpu.functions == {"host": "pad (t.py:5)"}


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([], "waiting for the CPU to launch work"),
        ([python("queue.py(154): get", 200, 8_900)], "waiting for data"),
        ([python("lib/python3.11/threading.py(320): wait", 200, 4_000)], "for the CPU to launch work"),
        ([python("queue.py(154): get", 200, 8_900, tid=3)], "waiting for the CPU to launch work"),
    ],
    ids=["it doesn't wait", "it waits", "it waits for less", "another one waits"],
)
def test_what_another_thread_prepares_is_awaited_only_where_the_launching_one_waits(
    tmp_path: Path, calls: list[Event], said: str
) -> None:
    events = [*LATE, *LOOP, *calls, span("cpu_op", "aten::mm", 8_990, 30)]
    events.append(python("d.py(1): preprocess", 150, 8_900, 2))
    assert said in analyse_paths([write(tmp_path / "t.json", events)]).conclusion


def test_threads_with_numbers_of_their_own_leave_the_data_awaited(tmp_path: Path) -> None:
    """Some traces number the threads of calls in another way than those of operators."""
    data = span("user_annotation", "enumerate(DataLoader)#_X.__next__", 150, 8_750, 7)
    events = [*LATE, data, span("cpu_op", "aten::mm", 8_990, 30, 7)]
    assert "waiting for data" in analyse_paths([write(tmp_path / "t.json", events)]).conclusion


EVERYTHING = "try larger batches, torch.compile or CUDA graphs"
COMPILED_KERNEL = [launch(9_200, 5, 3), kernel("triton_poi_fused_add_0", 9_210, 10, 3)]
GRAPH = [span("cuda_runtime", "cudaGraphLaunch", 9_300, 5, correlation=4), kernel("g", 9_310, 10, 4)]


@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ([], EVERYTHING),
        (COMPILED_KERNEL, "try larger batches or CUDA graphs"),
        ([called("CompiledFunction", 9_100, 9_120, "cpu_op")], "try larger batches or CUDA graphs"),
        ([called("Torch-Compiled Region: 0/0", 9_100, 9_120, "cpu_op")], "try larger batches or CUDA graphs"),
        ([launch(9_200, 5, 3), kernel("_attn_fwd", 9_210, 10, 3)], EVERYTHING),
        (GRAPH, "try larger batches or torch.compile"),
        ([*COMPILED_KERNEL, *GRAPH], "try larger batches"),
    ],
)
def test_what_is_in_use_is_not_advised(tmp_path: Path, others: list[Event], advice: str) -> None:
    operators = [called("aten::view", begin, begin + 800, "cpu_op") for begin in range(200, 8_000, 900)]
    events = [*LATE, *operators, *others]
    assert analyse_paths([write(tmp_path / "t.json", events)]).conclusion.endswith(f": {advice}.")


def test_time_after_the_last_work_waits_for_the_cpu(tmp_path: Path) -> None:
    """The step ends 700 µs after its work: the next one can't begin earlier."""
    work = [launch(0, 5, 1), kernel("k", 10, 200, 1), launch(265, 5, 2), kernel("k", 280, 20, 2)]
    report = analyse_paths([write(tmp_path / "t.json", [step(1, 0, 1_000), *work])])
    idle = report.ranks[0].steps[0].idle_by_cause_us
    assert (idle.host + idle.launching, idle.latency) == (765, 15)
    causes = {each.part: each for each in trace_causes(report)}
    assert causes["host"].lost_ns == 780_000
    assert causes["host"].replayed_ns == pytest.approx(780_000, abs=15_000)
    assert "78 % of its step (0.780 of 1.00 ms) waiting for the CPU to launch work" in report.conclusion


def other_thread(*events: Event) -> list[Event]:
    """The events on a thread that launches nothing, or but copies."""
    return [event | {"tid": 7} for event in events]


COPIES = [
    span("cuda_runtime", "cudaMemcpyAsync", 4_000, 5, 7, correlation=8),
    kernel("Memcpy HtoD (Pinned -> Device)", 4_010, 10, 8) | {"cat": "gpu_memcpy"},
]
NOT_KNOWN = "waiting for the CPU, of which mostly nothing is recorded"


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], f"{NOT_KNOWN}: record"),
        (other_thread(called("aten::mul", 150, 8_900, "cpu_op")), f"{NOT_KNOWN}: record"),
        ([*other_thread(called("aten::mul", 150, 8_900, "cpu_op")), *COPIES], f"{NOT_KNOWN}: record"),
        (other_thread(called("cudaEventSynchronize", 150, 8_900)), f"{NOT_KNOWN}: record"),
        ([called("aten::mul", 150, 8_900, "cpu_op")], "computes itself, as in aten::mul"),
    ],
    ids=["nothing", "another thread", "a copying thread", "a waiting thread", "its own"],
)
def test_only_what_the_launching_thread_does_counts(tmp_path: Path, events: list[Event], says: str) -> None:
    """It is in Python until 9,000 µs, unless its operator says more."""
    own = called("aten::empty", 9_100, 9_110, "cpu_op")
    assert says in analyse_paths([write(tmp_path / "t.json", [*LATE, own, *events])]).conclusion


@pytest.mark.parametrize("launches_within", [True, False])
def test_an_operator_that_waits_for_the_thread_that_launches_computes_nothing(
    tmp_path: Path, launches_within: bool
) -> None:
    """As where a backward pass runs in the thread of autograd, which has operators of its own, or sleeps."""
    events = [launch(0, 1, 1), kernel("forward", 2, 100, 1), called("aten::waits", 150, 9_950, "cpu_op")]
    for number in range(2, 11):
        begin = 1_000 * (number - 1)
        events += [launch(begin, 5, number) | {"tid": 7}, kernel("backward", begin + 6, 300, number)]
        if launches_within:
            events.append(called("MmBackward0", begin - 50, begin + 900, "cpu_op") | {"tid": 7})
    said = analyse_paths([write(tmp_path / "t.json", events)]).conclusion
    assert "aten::waits" not in said


TAILS: Mapping[str, tuple[str, Event]] = {
    "host": ("host", span("cpu_op", "logging", 3_020, 2_900)),
    "unrecorded": ("unrecorded", span("cpu_op", "short", 3_020, 10)),
    "input": ("input", span("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 3_010, 2_990)),
    "blocked": ("gaps", span("cuda_runtime", "cudaDeviceSynchronize", 3_010, 2_990)),
}
"""What the CPU does after the work of a step, and the part of the step that it is."""


@pytest.mark.parametrize(("part", "does"), TAILS.values(), ids=TAILS)
def test_a_step_saves_as_much_however_many_are_traced(tmp_path: Path, part: str, does: Event) -> None:
    """Steps of 6 ms, whose GPU works for the first 3: the end of the last one is like that of any other."""
    for num in (1, 2, 3, 8):
        events: list[Event] = []
        for number in range(num):
            begin = 6_000 * number
            events += [step(number, begin, 6_000), launch(begin, 5, number + 1)]
            events += [kernel("k", begin + 5, 3_000, number + 1), does | {"ts": begin + does["ts"]}]
        report = analyse_paths([write(tmp_path / "t.json", events)])
        most, *_ = trace_causes(report)
        assert (most.code, most.share) == (PARTS[cast(Part, part)], pytest.approx(0.5, abs=0.005))
        assert most.saved_ns == pytest.approx(3e6, abs=1e4)
        assert part == "gaps" or most.replayed_ns is not None


def test_a_cpu_with_stacks_lacks_none(tmp_path: Path) -> None:
    """Whether its thread worked or slept isn't known, but in which function it was."""
    ops = [span("cpu_op", "aten::mm", 0, 2_000), span("cpu_op", "aten::mm", 8_000, 2_000)]
    functions = [python("t.py(3): main", -10, 9_999), python("io.py(7): read_all", 2_050, 7_900)]
    said = analyse_paths([write(tmp_path / "t.json", [*ops, *functions])]).conclusion
    assert "outside of operators, for most of it in read_all (io.py:7)" in said
    assert "with_stack" not in said


def test_a_kernel_of_triton_is_no_sign_of_compiling(tmp_path: Path) -> None:
    """Triton compiles a program's own kernels, too: only what torch.compile does is called that."""
    frames = {
        "torch.compile": "torch/_inductor/compile_fx.py(1): compile_fx",
        "Triton's compiler": "triton/compiler/compiler.py(226): compile",
    }
    for name, frame in frames.items():
        events = [*LATE, *LOOP, python(frame, 200, 8_900)]
        assert f"done once ({name}: 8.70 ms" in analyse_paths([write(tmp_path / "t.json", events)]).conclusion
    events = [launch(0, 1, 1), kernel("triton_poi_fused_0", 2, 100, 1), *LATE[2:]]
    said = analyse_paths([write(tmp_path / "t.json", events)]).conclusion
    assert "torch.compile" not in said


def test_each_cause_has_its_own_advice(tmp_path: Path) -> None:
    """Also where both are of one kind and of the same rank."""
    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    events = [launch(0, 1, 1), kernel(ring, 2, 4_000, 1), launch(9_000, 5, 2), kernel("k", 9_010, 100, 2)]
    report = analyse_paths([write(tmp_path / "t.json", events, **rank_info(0, 2))])
    assert [each.partition(": ")[2] for each in report.sentences] == [
        "record the profiler's with_stack=True.",
        "record the traces of all ranks.",
    ]


@pytest.mark.parametrize(
    ("others", "says", "lacks"),
    [
        (
            [],
            "mostly while that computes itself, as in aten::mul: let the device compute that",
            "torch.compile",
        ),
        (
            [called("cudaStreamIsCapturing", 5_000, 5_001)],
            "launch work, mostly in aten::mul: find out what aten::mul does on rank 0",
            "computes itself",
        ),
        ([called("aten::add", 200, 8_000, "cpu_op") | {"tid": 5}], "as in aten::mul", "aten::add"),
    ],
    ids=["it computes", "it calls the GPU", "others compute"],
)
def test_an_operator_that_the_cpu_computes_itself_is_named(
    tmp_path: Path, others: list[Event], says: str, lacks: str
) -> None:
    operators = [called("aten::mul", 200, 6_000, "cpu_op"), called("aten::fill_", 6_100, 8_800, "cpu_op")]
    if others and "cuda" in others[0]["name"]:
        operators = [called("aten::mul", 200, 8_800, "cpu_op")]
    said = analyse_paths([write(tmp_path / "t.json", [*LATE, *operators, *others])]).conclusion
    assert says in said
    assert lacks not in said


def test_an_operator_that_allocates_memory_computes_nothing(tmp_path: Path) -> None:
    operators = [
        called("aten::empty", 200, 6_000, "cpu_op"),
        called("aten::empty_like", 6_100, 8_800, "cpu_op"),
    ]
    said = analyse_paths([write(tmp_path / "t.json", [*LATE, *operators])]).conclusion
    assert "launch work, mostly in aten::empty: find out" in said


@pytest.mark.parametrize("nested", [500, 3_000])
def test_what_holds_up_launches_is_named_by_the_innermost_range(tmp_path: Path, nested: int) -> None:
    """Many short operators in an annotation; or with a long one around most of the time."""
    stage = span("user_annotation", "my_input_stage", 200, 8_700)
    operators = [called("aten::copy", begin, begin + 500, "cpu_op") for begin in range(300, 8_000, 600)]
    decode = called("decode", 250, 250 + 2 * nested, "cpu_op")
    said = analyse_paths([write(tmp_path / "t.json", [*LATE, stage, decode, *operators])]).conclusion
    name = "decode" if nested > 2_500 else "my_input_stage"
    assert f"launch work, mostly in {name}: find out what {name} does on rank 0" in said


@pytest.mark.parametrize(
    ("functions", "hint"),
    [([], " (with_stack=True records Python's functions)"), ([python("d.py(4): load", 300, 8_900)], "")],
)
def test_stacks_that_are_recorded_are_not_advised(tmp_path: Path, functions: list[Event], hint: str) -> None:
    stage = span("user_annotation", "stage", 200, 8_700)
    operators = [called("aten::copy", begin, begin + 500, "cpu_op") for begin in range(300, 8_000, 600)]
    said = analyse_paths([write(tmp_path / "t.json", [*LATE, stage, *operators, *functions])]).conclusion
    assert said.endswith(f": find out what stage does on rank 0{hint}.")
    unread = [*operators, span("mtia_runtime", "launch", 1, 5_000), *functions]
    found = analyse_paths([write(tmp_path / "u.json", unread)]).findings
    advised = [each.text for each in found if each.level == "remedy"]
    assert advised == ([] if functions else ["record the profiler's with_stack=True"])


@pytest.mark.parametrize("present", [[0], [0, 1], [0, 1, 2, 3]])
def test_communication_is_transfer_only_where_all_ranks_of_its_group_are_seen(
    tmp_path: Path, present: list[int]
) -> None:
    """Rank 3 comes last, after 80 of 90 µs."""
    job = Job(4)
    job.all_reduce("0", [0, 1, 2, 3], [10, 10, 10, 90], 100)
    for rank in present:
        write(tmp_path / f"rank{rank}.json", job.events[rank], **rank_info(rank, 4))
    found = {cause.part: cause for cause in trace_causes(analyse_paths([tmp_path]))}
    if len(present) == 4:
        assert "transfer" in found
        assert "communication" not in found
    else:
        assert "transfer" not in found
        assert "the traces lack other ranks" in found["communication"].text


def test_communication_that_lacks_a_rank_is_no_transfer_though_its_trace_is_here(tmp_path: Path) -> None:
    """Rank 2 comes last, after 70 of 80 µs, but its trace lacks that, as where it begins later."""
    job = Job(3)
    job.all_reduce("0", [0, 1, 2], [10, 20, 90], 100)
    job.events[2].clear()
    for rank in range(3):
        job.kernel(rank, "gemm", 0, 5, False)
    report = job.report(tmp_path)
    assert [len(each.ranks) for each in report.collectives] == [2]
    assert last_rank(report) is None
    cause = trace_causes(report)[0]
    assert (cause.part, cause.figures["case"]) == ("communication", "unmatched")
    assert "came last of present" in render_trace(report, 100)


@pytest.mark.parametrize("num_present", [2, 3, 4])
def test_a_rank_is_blamed_only_where_the_one_that_is_missing_cannot_be_later(
    tmp_path: Path, num_present: int
) -> None:
    """Rank 3 comes last to two of three collectives; to the second all come at once."""
    job = Job(4)
    for begin, starts in enumerate(([0, 10, 20, 80], [0, 0, 0, 0], [0, 10, 20, 80])):
        job.all_reduce("0", [0, 1, 2, 3], [100 * begin + 10 + start for start in starts], 100 * begin + 100)
    for rank in range(4 - num_present, 4):
        write(tmp_path / f"rank{rank}.json", job.events[rank], **rank_info(rank, 4))
    report = analyse_paths([tmp_path])
    last = last_rank(report)
    assert (last and (last.rank, last.last_arrivals, last.collectives)) == (
        (3, 2, 3) if num_present == 4 else None
    )
    assert {row.collectives for row in report.stragglers} == {3}
    waits = [each for each in trace_causes(report) if each.part == "straggler"]
    assert [each.ranks for each in waits] == [(3,) if num_present == 4 else ()]


def num_looks(directory: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a collective is looked at to find the causes of so many ranks."""
    job, looks = Job(num_ranks), list[object]()

    def looked(each: object, sizes: object) -> bool:
        looks.append(each)
        return False

    job.all_reduce("0", [*range(num_ranks)], [10.0] * num_ranks, 100)
    directory.mkdir()
    report = job.report(directory)
    with monkeypatch.context() as patch:
        patch.setattr("gpurun.launcher.trace.explain.lacks_rank", looked)
        trace_causes(report)
    return len(looks)


def test_more_ranks_take_no_more_looks_at_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two, of_six = (num_looks(tmp_path / str(num), num, monkeypatch) for num in (2, 6))
    assert of_six == of_two > 0


def test_messages_whose_both_ends_are_seen_are_transfer_though_other_ranks_are_missing(
    tmp_path: Path,
) -> None:
    job = Job(4)
    job.message(0, 1, (10, 12), (90, 90))
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.json", job.events[rank], **rank_info(rank, 4))
    report = analyse_paths([tmp_path])
    assert not is_waiting_unknown(report)


def test_real_ranks_of_a_larger_job_lack_the_others_and_events_of_the_cpu() -> None:
    """Of 128 ranks, 2; each has calls of the CPU for all that its GPU does, but far fewer than were made."""
    said = analyse_paths([REAL / "ddp_2of128"]).conclusion
    assert "in gaps, which may hold work: events were left out of the traces: take the file as" in said
    assert "or waiting for it; the traces lack other ranks, which would show why: record the" in said
    assert "transfers" not in said


def test_what_a_path_lacks_stands_above_it(tmp_path: Path) -> None:
    """Its length is that of a replay, and a thinned trace has none."""
    late = [launch(0, 5, 1), kernel("k", 5000, 10, 1), launch(9000, 5, 2), kernel("k", 9050, 10, 2)]
    thinned = [each for i in range(120) for each in (launch(100 * i, 5, 200 * i + 1),)]
    thinned += [kernel("k", 100 * i + 50, 10, 200 * i + 1) for i in range(120)]
    said = []
    for events in (late, thinned):
        report = analyse_paths([write(tmp_path / "t.json", events)], None, {"critical-path"})
        said.append(render_tables(report, ("critical-path",), 100, details=False))
    assert "The path and its gains are uncertain: the traces don't show what all work waited for." in said[0]
    assert "no critical path: events were left out of the traces" in said[1]


@pytest.mark.parametrize("step_of_numbers", [1, 5, 200])
def test_gaps_of_a_thinned_trace_are_unknown(tmp_path: Path, step_of_numbers: int) -> None:
    """Each call that CUDA has counts, and far fewer are in the trace."""
    events = []
    for i in range(120):
        number = 1 + i * step_of_numbers
        events += [launch(100 * i, 5, number), kernel("k", 100 * i + 50, 10, number)]
    report = analyse_paths([write(tmp_path / "t.json", events)])
    idle = report.ranks[0].total.idle_by_cause_us
    is_thinned = step_of_numbers == 200
    assert idle.unknown == (119 * 90 if is_thinned else 0)
    said = "in gaps, which may hold work: events were left out of the traces: take the file as"
    assert (said in report.conclusion) == is_thinned
    assert any("120 calls of the CPU recorded" in each.text for each in report.findings) == is_thinned


def test_the_set_up_of_a_cuda_graph_is_done_once(tmp_path: Path) -> None:
    """As in a trace of xDiT: most of it passes before and after the capture itself."""
    frame = python("torch/_inductor/cudagraph_trees.py(800): __init__", 200, 8_900)
    capture = [
        span("cuda_runtime", "hipStreamBeginCapture", 8_000, 5),
        span("cuda_runtime", "hipStreamEndCapture", 8_500, 5),
    ]
    report = analyse_paths([write(tmp_path / "t.json", [*LATE, *LOOP, frame, *capture])])
    assert "done once (capture of a graph: 8.70 ms)" in report.conclusion
    assert report.ranks[0].total.idle_by_cause_us.one_off == 8_700


def test_a_share_of_the_time_of_several_ranks_says_so(tmp_path: Path) -> None:
    for rank, busy_us in enumerate((1_000, 990)):
        events = [launch(0, 1, 1), kernel("k", 2, busy_us, 1)]
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    said = analyse_paths([tmp_path]).conclusion
    assert said == "2 ranks on GPU; compute takes 100 % of the time of all ranks."
    assert "all ranks" not in analyse_paths([tmp_path / "rank1.json"]).conclusion


@pytest.mark.parametrize(("gap_us", "said"), [(40, ", no other cause more than 4 % of any rank's"), (0, "")])
def test_the_bound_of_other_causes_is_of_a_rank(tmp_path: Path, gap_us: int, said: str) -> None:
    for rank, later_us in enumerate((0, gap_us)):
        events = [launch(0, 1, 1), kernel("k", 2, 500, 1), launch(500 + later_us, 1, 2)]
        events.append(kernel("k", 502 + later_us, 500, 2))
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    assert analyse_paths([tmp_path]).conclusion.endswith(f"of the time of all ranks{said}.")


@pytest.mark.parametrize(
    ("queue_us", "said"), [(60, "; rank 0 waited for a free core in 30 % of its step"), (2, "")]
)
def test_load_and_few_steps_are_said_next_to_causes(tmp_path: Path, queue_us: int, said: str) -> None:
    """As a run's report says of its steps."""
    facts = {"samples": 8, "thread_cpu_ns": 190_000, "queue_ns": 1000 * queue_us}
    events = [step(number, 200 * number, 200) for number in range(2)]
    events += [called("aten::mm", 200 * number, 200 * number + 100, "cpu_op") for number in range(2)]
    report = analyse_paths([write(tmp_path / "cpu.json", events, gpurunRank=facts)])
    assert report.findings[0].text == f"1 rank on CPU, 2 steps, which may be unlike others{said}"


def test_what_passes_until_launched_work_starts_is_said_where_it_is_much(tmp_path: Path) -> None:
    """Of each gap of 30 µs, 15."""
    events = [launch(40 * i, 5, i + 1) for i in range(10)]
    events += [kernel("k", 40 * i + 20, 10, i + 1) for i in range(10)]
    said = analyse_paths([write(tmp_path / "t.json", events)]).conclusion
    assert "waiting for the CPU to launch work, 0.135 ms of it from launch to start" in said


def test_what_no_other_cause_exceeds_is_rounded_up(tmp_path: Path) -> None:
    """The gap takes 0.12 % of the time."""
    events = [launch(0, 1, 1), kernel("k", 2, 1_000, 1), launch(1_000, 1, 2), kernel("k", 1_004.4, 1_000, 2)]
    said = analyse_paths([write(tmp_path / "t.json", events)]).conclusion
    assert "compute takes 100 % of the time, no other cause more than 0.2 %" in said


@pytest.mark.parametrize("begin", [800, 1_500], ids=["before the gap", "in the gap"])
def test_the_gpu_waits_for_a_launching_call_until_it_ends(tmp_path: Path, begin: int) -> None:
    """Whether it had begun when the GPU ran dry makes no difference; one of 1 ms or more loads a module."""
    for length, part in ((900, "launching"), (50_000, "one_off")):
        events = launches_of([(0, 10), (begin, length)])
        idle = analyse_paths([write(tmp_path / "t.json", events)]).ranks[0].total.idle_by_cause_us
        running = begin + length - max(begin, 1_015)
        assert (getattr(idle, part), idle.host, idle.latency) == (running, max(begin - 1_015, 0), 5)


def test_work_whose_length_is_rounded_to_0_waits_for_its_own_launch(tmp_path: Path) -> None:
    """Older traces have whole microseconds: a gap that such work divides has several launches."""
    work = [kernel("k", 10, 100, 1), kernel("short", 160, 0, 2), kernel("k", 300, 100, 3)]
    events = [launch(0, 5, 1), launch(140, 8, 2), launch(200, 90, 3), kernel("short", 500, 0, 4), *work]
    idle = analyse_paths([write(tmp_path / "t.json", [step(1, 0, 600), *events, launch(450, 40, 4)])])
    found = idle.ranks[0].steps[0].idle_by_cause_us
    host = 30 + 40 + 50 + 100
    assert (found.host, found.launching, found.latency) == (host, 5 + 8 + 90 + 40, 5 + 12 + 10 + 10)


def test_what_is_done_once_is_named_first(tmp_path: Path, wording: Wording) -> None:
    allocation = span("cuda_runtime", "cudaMalloc", 1_100, 2_000)
    events = launches_of([(0, 10), (4_000, 9_000), (14_000, 10)])
    report = analyse_paths([write(tmp_path / "t.json", [*events, allocation])], None, {"launches"})
    assert report.ranks[0].total.idle_by_cause_us.one_off == 11_000
    assert [(row.name, row.count, row.host_us) for row in report.ranks[0].one_off] == [
        ("cudaLaunchKernel", 1, 9_000),
        ("cudaMalloc", 1, 2_000),
    ]
    wording(report.conclusion, render_tables(report, ("launches",), 100, details=False))
    alone = [step(1, 0, 14_100), *events, allocation, launch(20_000, 1, 9), kernel("k", 20_002, 1, 9)]
    wording(analyse_paths([write(tmp_path / "t.json", alone)]).conclusion)


def test_of_what_is_done_once_what_the_gpu_waits_for_is_named_with_its_time_in_a_step(tmp_path: Path) -> None:
    """Of two steps, in the first: a longer call runs while the GPU works."""
    events = [called("cudaFree", 100, 9_000), called("cudaMalloc", 10_100, 14_100)]
    for number, begin in enumerate((0, 20_000)):
        events.append(step(number, begin, 20_000))
        for place, (at, length) in enumerate(((5, 10_000), (15_000, 4_985)), 2 * number + 1):
            events += [launch(begin + at, 5, place), kernel("k", begin + at + 10, length, place)]
    report = analyse_paths([write(tmp_path / "t.json", events)])
    assert "in what is done once (cudaMalloc: 2.00 ms):" in report.conclusion


@pytest.mark.parametrize(
    ("calls", "named"),
    [(("cudaMalloc", "cudaMalloc"), " (cudaMalloc: 2.00 to 3.00 ms)"), (("cudaMalloc", "cudaFree"), "")],
)
def test_what_several_ranks_do_once_is_named_where_all_do_it(
    tmp_path: Path, calls: tuple[str, str], named: str
) -> None:
    for rank, call in enumerate(calls):
        length = 2_000 + 1_000 * rank
        events = [*launches_of([(0, 10), (1_100 + length, 10)]), called(call, 1_050, 1_050 + length)]
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    said = analyse_paths([tmp_path]).conclusion
    assert said.startswith("Every rank spends 49 % to 59 % of its time (2.00 of 4.10 to 3.00 of 5.10 ms")
    assert f"in what is done once{named}: trace later steps" in said


@pytest.mark.parametrize(("num_steps", "named"), [(90, " (torch.compile: 0.362 ms)"), (120, "")])
def test_what_an_outlying_step_does_once_is_not_named_for_the_others(
    tmp_path: Path, num_steps: int, named: str
) -> None:
    """Of many steps, not each one's CPU is looked at."""
    events, begin = list[Event](), 0
    for i in range(num_steps):
        length = 60_000 if i == num_steps // 2 else 2_000
        busy, frame = length - 400, "entire_frame_compile (dynamo_timed)"
        if length == 60_000:
            busy, events = 90, [*events, called("cudaMalloc", begin + 100, begin + 59_000)]
        elif i % 4 == 0:
            busy, events = 90, [*events, called(frame, begin + 100, begin + 1_500, "user_annotation")]
        events += [step(i, begin, length), launch(begin + 5, 5, 2 * i + 1)]
        events += [kernel("k", begin + 10, busy, 2 * i + 1), launch(begin + length - 400, 5, 2 * i + 2)]
        events.append(kernel("k", begin + length - 390, 390, 2 * i + 2))
        begin += length
    report = analyse_paths([write(tmp_path / "t.json", events)])
    assert f"in what is done once{named}: trace later steps" in report.conclusion


@pytest.mark.parametrize(("data_us", "is_said"), [(6_000, True), (2_000, False)])
def test_that_what_is_done_once_goes_before_a_larger_gain_is_beside_the_path(
    tmp_path: Path, data_us: int, is_said: bool
) -> None:
    begin = 300 + data_us
    events = [launch(0, 1, 1), kernel("k", 2, 100, 1), launch(begin + 4_100, 5, 2)]
    events += [kernel("k", begin + 4_110, 100, 2), called("cudaMalloc", begin, begin + 4_000)]
    events.append(span("user_annotation", "enumerate(DataLoader)#_X.__next__", 200, data_us))
    report = analyse_paths([write(tmp_path / "t.json", events)], None, {"critical-path"})
    assert next(each.code for each in report.findings if each.level == "cause") == "one-off-work"
    said = " ".join(render_tables(report, ("critical-path",), 100).split())
    assert (
        "the first cause, though not the largest gain here: later steps are without it" in said
    ) == is_said


@pytest.mark.parametrize(
    ("optimizers", "is_marked", "said"),
    [
        (["SGD"], False, "1 rank on CPU, 1 optimizer step, which may be unlike others; "),
        (["Adam", "SGD", "Adam", "SGD"], False, ", 2 optimizer steps, which may be unlike others; "),
        (["SGD", "SGD", "SGD"], False, "1 rank on CPU; "),
        (["SGD", "SGD"], True, "1 rank on CPU, 1 step, which may be unlike others; "),
    ],
)
def test_few_optimizer_steps_are_said_first_where_no_step_is_marked(
    tmp_path: Path, optimizers: list[str], is_marked: bool, said: str
) -> None:
    events = [span("cpu_op", "aten::mm", 0, 1_000)] + [step(1, 0, 1_000)] * is_marked
    for i, name in enumerate(optimizers):
        events.append(span("user_annotation", f"Optimizer.step#{name}.step", 100 * i, 50))
    assert said in analyse_paths([write(tmp_path / "t.json", events)]).findings[0].text


def test_compiling_is_done_once(tmp_path: Path) -> None:
    compiling = [
        span("user_annotation", "entire_frame_compile (dynamo_timed)", 1_100, 5_000),
        span("user_annotation", "backend_compile (dynamo_timed)", 2_000, 3_000),
    ]
    events = [*launches_of([(0, 10), (8_000, 10)]), *compiling]
    rank = analyse_paths([write(tmp_path / "t.json", events)]).ranks[0]
    assert rank.total.idle_by_cause_us.one_off == 5_000
    assert [(row.name, row.count, row.host_us) for row in rank.one_off] == [("torch.compile", 1, 5_000)]
    recording = [span("user_annotation", "CUDAGraphNode.record (dynamo_timed)", 1_100, 5_000)]
    captured = write(tmp_path / "t.json", [*launches_of([(0, 10), (8_000, 10)]), *recording])
    assert analyse_paths([captured]).ranks[0].one_off == ()


def test_compiling_is_no_compute_of_a_cpu(tmp_path: Path) -> None:
    """Its ranges hold operators; those of another thread compute meanwhile."""
    events = [
        span("cpu_op", "aten::mm", 0, 1_000),
        span("cpu_op", "entire_frame_compile (dynamo_timed)", 1_000, 8_000),
        span("cpu_op", "compile_file", 2_000, 5_000),
        span("cpu_op", "aten::mm", 9_000, 1_000),
    ]
    file = write(tmp_path / "t.json", events)
    report = analyse_paths([file], None, frozenset({"critical-path", "launches"}))
    assert report.conclusion.startswith(
        "Rank 0 spends 80 % of its time (8.00 of 10.0 ms) in what is done once (torch.compile: 8.00 ms):"
    )
    assert "8.000      1  torch.compile" in render_tables(report, ("launches",), 100)
    assert report.critical_path is not None
    parts = {each.part: each.path_us for each in report.critical_path.parts if each.path_us}
    assert parts == {"compute": 2_000, "one-off": 8_000}
    write(file, [*events, span("cpu_op", "aten::mm", 3_000, 4_000, tid=2)])
    total = analyse_paths([file]).ranks[0].total
    assert (total.compute_us, total.idle_by_cause_us.one_off) == (6_000, 4_000)


def test_the_first_call_makes_the_context(tmp_path: Path) -> None:
    """Whatever it asks for; of it counts what lies in the time that is measured."""
    asked = span("cuda_runtime", "cudaDeviceGetStreamPriorityRange", -9_000, 14_000)
    rank = analyse_paths([write(tmp_path / "t.json", [*launches_of([(0, 10), (8_000, 10)]), asked])]).ranks[0]
    (row,) = rank.one_off
    assert (row.name, row.host_us) == ("cudaDeviceGetStreamPriorityRange", 5_000 - 15)


def test_calls_of_the_profiler_are_not_in_a_cpus_path(tmp_path: Path) -> None:
    events = [span("cpu_op", "aten::mm", 0, 50), span("cuda_runtime", "cudaDeviceSynchronize", 60, 900)]
    found = analyse_paths([write(tmp_path / "t.json", events)], None, frozenset({"critical-path"}))
    assert found.critical_path is not None
    assert found.critical_path.length_us == 50


def test_what_recurs_is_not_done_once(tmp_path: Path) -> None:
    """As in an allocator that is short of memory; but the first, longer one loads what all need."""
    calls = [
        span("cuda_runtime", "cudaMalloc", 1_000 * i + 10, 900 if i else 9_900) for i in range(0, 400, 10)
    ]
    rank = analyse_paths([write(tmp_path / "t.json", [*launches_of([(0, 5), (399_999, 5)]), *calls])]).ranks[
        0
    ]
    assert [(row.name, row.count, row.host_us) for row in rank.one_off] == [("cudaMalloc", 1, 9_900)]


@pytest.mark.parametrize(("num_queued", "work_us"), [(300, 30_000), (20, 30_000), (600, 8_000)])
def test_a_launch_that_waits_for_a_full_queue_is_not_done_once(
    tmp_path: Path, num_queued: int, work_us: int
) -> None:
    """Its GPU works all the time; where little is queued, or all done before, the call loads a module."""
    events = [step(1, 0, 30_000), launch(3_000, 9_000, num_queued + 1)]
    for i in range(num_queued + 1):
        events += [launch(5 * i, 4, i + 1)] * (i < num_queued)
        begin, length = work_us / num_queued * i, work_us / num_queued - 2
        events.append(kernel("k", max(10 + begin, 12_000 if i == num_queued else 0), length, i + 1))
    report = analyse_paths([write(tmp_path / "t.json", events)])
    names = [] if num_queued == 300 else ["cudaLaunchKernel"]
    assert [row.name for row in report.ranks[0].one_off] == names
    assert ("one-off" in {each.part for each in report.savings}) == bool(names)


@pytest.mark.parametrize("num_late", [2, 3])
def test_a_loss_that_several_ranks_share_is_named(tmp_path: Path, num_late: int) -> None:
    """Without that of one of them, no step would be shorter."""
    for rank in range(4):
        events: list[Event] = []
        for number in range(3):
            begin, data_us = 10_000 * number, 4_000 if rank < num_late else 10
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            events += [step(number, begin, 9_990), span("user_annotation", name, begin, data_us)]
            events += [launch(begin + data_us, 5, 2 * number + 1)]
            events.append(kernel("gemm", begin + data_us + 10, 5_000, 2 * number + 1))
            facts = {
                "Collective name": "allreduce",
                "In msg nelems": 10,
                "Out msg nelems": 10,
                "dtype": "Float",
            }
            group = {"Process Group Name": "dp", "Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4}
            arrival, end = begin + data_us + 5_010, begin + 9_100
            events.append(launch(begin + data_us + 6, 1, 2 * number + 2))
            waiting = end - begin - data_us - 10
            events.append(span("cuda_runtime", "cudaDeviceSynchronize", end - waiting, waiting))
            ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            events.append(kernel(ring, arrival, end - arrival, 2 * number + 2, stream=20, **facts, **group))
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 4))
    (cause, *_) = trace_causes(analyse_paths([tmp_path]))
    assert (cause.part, cause.share) == ("input", pytest.approx(0.4, abs=0.05))
    assert cause.saved_ns > 3.5e6


@pytest.mark.parametrize(("sleep_ms", "part", "ranks"), [(30, "outside", (1,)), (8, "transfer", (0, 1))])
def test_with_two_buckets_in_flight_what_saves_most_is_named(
    tmp_path: Path, sleep_ms: int, part: str, ranks: tuple[int, ...]
) -> None:
    """Rank 1 sleeps in its forward pass; without transfers of 12 ms each a step would be 13 ms shorter."""
    for rank in (0, 1):
        events: list[Event] = []
        for number in range(3):
            begin, forward_us, late_us = (30 + sleep_ms) * 1_000 * number, 5_000, sleep_ms * 1_000
            own_us = begin + late_us * rank
            events += [step(number, begin, late_us + 30_000), span("cpu_op", "aten::mm", begin, forward_us)]
            events.append(span("cpu_op", "aten::mm_backward", own_us + forward_us, 4_900))
            for bucket, ready_us in enumerate((10_000, 15_000)):
                end_us = begin + late_us + ready_us + 12_000 + 1_000 * bucket
                events.append(span("cpu_op", "c10d::allreduce_", own_us + ready_us, 50))
                at_us = own_us + ready_us + 20
                name, thread = "gloo:all_reduce", f"gloo {bucket}"
                events.append(span("user_annotation", name, at_us, end_us - at_us, thread))
            events.append(span("cpu_op", "aten::mm_backward", own_us + 10_100, 4_800))
            events.append(span("cpu_op", "aten::add_", begin + late_us + 28_000, 2_000))
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    (cause, *_) = trace_causes(analyse_paths([tmp_path]))
    assert (cause.part, cause.ranks) == (part, ranks)
    assert cause.saved_ns == pytest.approx(1e6 * max(sleep_ms, 13), rel=0.02)


def test_a_wait_is_one_though_the_end_of_its_collective_is_recorded_late(tmp_path: Path) -> None:
    """On busy cores the collective's thread notes its end after the step, and an operator has run by then."""
    for rank, issued in ((0, 183_000), (1, 60_000)):
        events = [step(1, 0, 187_000), span("cpu_op", "aten::mm", issued - 5_000, 5_000)]
        events.append(span("cpu_op", "c10d::allreduce_", issued, 100))
        events.append(span("user_annotation", "gloo:all_reduce", issued + 50, 190_950 - issued, 2))
        events += [span("cpu_op", "aten::div_", 183_300, 100), span("cpu_op", "aten::add_", 183_450, 100)]
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    saved_us = {each.rank: each.saved_us for each in analyse_paths([tmp_path]).savings if each.part == "rank"}
    assert saved_us[0] == pytest.approx(123_000, rel=0.05)


def test_a_cpu_that_runs_ahead_costs_nothing(tmp_path: Path) -> None:
    """Each step loads its batch for 6 ms and launches for 9: the GPU waits for the batch, 1 ms for launches.

    Without any of the CPU's time, the next batch would be loaded while the GPU works: 7 ms would be saved.
    """
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events: list[Event] = []
    for number, begin in enumerate(range(0, 60_000, 15_000)):
        events += [step(number, begin, 15_000), span("user_annotation", name, begin, 6_000)]
        events += [launch(begin + ms * 1_000, 10, 10 * number + ms) for ms in range(7, 15)]
        events += [kernel("k", begin + 15 + ms * 1_000, 1_000, 10 * number + ms) for ms in range(7, 15)]
    report = analyse_paths([write(tmp_path / "t.json", events)])
    saved_us = {each.part: each.saved_us for each in report.savings}
    assert (saved_us["input"], saved_us["host"]) == pytest.approx((6_000, 1_000), rel=0.05)
    assert trace_causes(report)[0].part == "input"


def test_a_graph_is_captured_once(tmp_path: Path) -> None:
    """What is launched meanwhile doesn't run: no larger batch makes it shorter."""
    calls = {"cudaStreamBeginCapture": (1_100, 10), "cudaLaunchKernel": (2_000, 10)}
    calls |= {"cudaStreamEndCapture": (6_000, 100)}
    events = launches_of([(0, 10), (6_200, 10)])
    events += [span("cuda_runtime", name, *call, correlation=call[0]) for name, call in calls.items()]
    rank = analyse_paths([write(tmp_path / "t.json", events)]).ranks[0]
    idle = rank.total.idle_by_cause_us
    assert [(row.name, row.host_us) for row in rank.one_off] == [("capture of a graph", 5_000)]
    assert (idle.one_off, idle.host, idle.launching, idle.latency) == (5_000, 185, 10, 5)


def test_traces_that_lack_ranks_are_explained_by_shares(tmp_path: Path) -> None:
    trace = write(tmp_path / "rank0.json", late_kernel(1, 0), **rank_info(0, 2))
    assert "causes by their shares, as ranks are missing" in analyse_paths([trace]).findings[0].text
    write(tmp_path / "rank1.json", late_kernel(1, 0), **rank_info(1, 2))
    assert "by their shares" not in analyse_paths([tmp_path]).findings[0].text


def test_damage_that_leaves_shares_alone_is_called_what_it_is(tmp_path: Path) -> None:
    events = [*late_kernel(1, 0), *late_kernel(2, 1000)]
    for rank in (0, 1):
        path = write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    path.write_text(path.read_text().rpartition('{"ph"')[0])
    assert analyse_paths([tmp_path]).findings[0].text.endswith("by their shares, as a trace is cut off")
    after_2262 = write(tmp_path / "late.json", late_kernel(1, 1 << 60))
    report = analyse_paths([after_2262], None, {"critical-path"})
    assert report.findings[0].text.endswith("shares, as times are out of range")
    assert "no critical path: times are out of range" in render_tables(report, ("critical-path",), 100)
    write(after_2262, late_kernel(1, 1 << 60), **rank_info(0, 2))
    report = analyse_paths([after_2262], None, {"critical-path"})
    assert "no critical path: times are out of range" in render_tables(report, ("critical-path",), 100)


@pytest.mark.parametrize(
    ("calls", "cause", "advice"),
    [
        (("cudaFree", "cudaMalloc"), "allocating", "expandable_segments:True"),
        (("cuModuleLoadData", "cuLibraryGetKernel"), "loading", "find out which code is loaded anew"),
        (("cudaStreamSynchronize", "cudaStreamSynchronize"), "blocked", "look for synchronisation"),
    ],
)
def test_calls_that_allocate_or_load_code_in_each_step_have_their_own_advice(
    tmp_path: Path, calls: tuple[str, str], cause: str, advice: str
) -> None:
    """Of 3 ms between kernels, one takes 1.5 ms and the other 1.4 ms."""
    begins = range(0, 15_000, 5_000)
    events = launches_of([(begin + at, 5) for begin in begins for at in (0, 3_990)])
    for i, begin in enumerate(begins):
        events += [step(i, begin, 5_000), called(calls[0], begin + 1_020, begin + 2_520)]
        events.append(called(calls[1], begin + 2_530, begin + 3_930))
    report = analyse_paths([write(tmp_path / "t.json", events)])
    said = report.conclusion
    assert f"in gaps in which the CPU is mostly in {' and '.join(dict.fromkeys(calls))}: " in said
    assert advice in said
    idle = report.ranks[0].total.idle_by_cause_us
    assert {name for name in GAPS_OF_IDLE if getattr(idle, name)} == {cause}
    assert getattr(idle, cause) >= 3 * 2_900


def test_a_single_call_that_takes_most_of_the_gaps_is_named_with_its_length(tmp_path: Path) -> None:
    events = [*launches_of([(0, 10), (5_000, 10)]), called("hipMemcpyWithStream", 200, 4_900)]
    report = analyse_paths([write(tmp_path / "t.json", events)])
    said = "the CPU is mostly in hipMemcpyWithStream (a single call of 4.70 ms): trace more steps, which show"
    assert said in report.conclusion
    events = [*launches_of([(0, 10), (5_000, 10), (9_800, 10)])]
    events += [called("hipMemcpyWithStream", begin, begin + 4_600) for begin in (200, 5_200)]
    report = analyse_paths([write(tmp_path / "t.json", events)])
    assert "the CPU is mostly in hipMemcpyWithStream: " in report.conclusion


@pytest.mark.parametrize(("second_us", "once_us"), [(2_900, 0), (1_000, 3_900)])
def test_what_both_of_two_steps_do_alike_is_not_done_once(
    tmp_path: Path, second_us: int, once_us: int
) -> None:
    """An allocator that still grows in the second step, but far less, may be done afterwards."""
    events = [step(i, 10_000 * i, 10_000) for i in range(2)]
    events += launches_of([(10_000 * i + at, 10) for i in range(2) for at in (0, 5_000)])
    for begin, length in ((1_100, 2_900), (11_100, second_us)):
        events.append(called("cudaMalloc", begin, begin + length))
    total = analyse_paths([write(tmp_path / "t.json", events)]).ranks[0].total
    assert total.idle_by_cause_us.one_off == once_us


def test_what_each_of_several_steps_does_is_not_done_once(tmp_path: Path) -> None:
    marks = [step(i, 10_000 * i, 10_000) for i in range(3)]
    events = launches_of([(10_000 * i, 3_000) for i in range(3)])
    total = analyse_paths([write(tmp_path / "t.json", [*marks, *events])]).ranks[0].total
    assert (total.idle_by_cause_us.one_off, total.idle_by_cause_us.launching) == (0, 6_000)


@pytest.mark.parametrize(
    ("others", "device", "compute_us"),
    [
        ([span("mtia_ccp_events", "k", 10, 60)], "CPU (MTIA not read)", 40),
        ([span("mtia_runtime", "runFunction", 10, 15)], "CPU (MTIA not read)", 30),
        ([span("cuda_runtime", "cudaLaunchKernel", 10, 15)], "CPU (GPU not recorded)", 30),
        ([span("cuda_runtime", "cudaLaunchKernel", 10, 15, 2)], "CPU (GPU not recorded)", 40),
    ],
)
def test_what_the_cpu_waits_for_on_a_device_that_the_trace_lacks_is_not_called_python(
    tmp_path: Path, wording: Wording, others: list[Event], device: str, compute_us: float
) -> None:
    """Nor is the time that an operator of this thread is in a call for the device called compute."""
    ops = [span("cpu_op", "aten::mm", 0, 20), span("cpu_op", "aten::mm", 80, 20)]
    (tmp_path / "t").mkdir()
    report = analyse_paths([write(tmp_path / "t" / "t.json", [*ops, *others])])
    (rank,) = report.ranks
    assert (rank.device, rank.total.compute_us) == (device, compute_us)
    wording(report.conclusion)


@pytest.mark.parametrize("calls", [[], [launch(10, 15, 1)]], ids=["none", "a launch"])
def test_a_rank_whose_gpu_is_not_recorded_does_not_wait_for_launches(
    tmp_path: Path, calls: list[Event]
) -> None:
    """The profiler of rank 0 records the CPU alone, that of rank 1 its GPU, too."""
    ops = [step(1, 0, 100), span("cpu_op", "aten::mm", 0, 20), span("cpu_op", "aten::mm", 80, 20)]
    write(tmp_path / "rank0.json", [*ops, *calls], **rank_info(0, 2))
    work = [step(1, 0, 100), launch(1, 1, 1), kernel("gemm", 3, 97, 1)]
    write(tmp_path / "rank1.json", work, **rank_info(1, 2))
    report = analyse_paths([tmp_path])
    said = "outside of operators or in calls for a device, whose work the traces lack: record the device's"
    assert said in report.conclusion
    assert "waiting for the CPU" not in report.conclusion
    assert report.savings == ()
    assert "causes by their shares, as device work is missing" in report.findings[0].text


@pytest.mark.parametrize(("memory", "advised"), [("Pageable", True), ("Pinned", False)])
def test_pinning_is_advised_only_where_copies_are_not_pinned(
    tmp_path: Path, memory: str, advised: bool, wording: Wording
) -> None:
    copy = kernel(f"Memcpy HtoD ({memory} -> Device)", 10, 80, 1) | {"cat": "gpu_memcpy"}
    text = analyse_paths([write(tmp_path / "t.json", [launch(9, 1, 1), copy])]).conclusion
    wording(text)
    assert ("pin the memory" in text) == advised


def test_the_sentence_names_the_stage_that_waits(tmp_path: Path, wording: Wording) -> None:
    """Stage 1 asks at once and gets its input after 25 of 70 ms; then stage 0 waits 5 ms for the gradient."""
    job = Job(2)
    for number in range(3):
        begin = 70_000.0 * number + 1_000
        for rank, spans in enumerate(([(0, 25_000), (60_000, 70_000)], [(25_000, 60_000)])):
            job.events[rank].append(step(number, begin - 50, 70_000))
            for start, end in spans:
                job.kernel(rank, "gemm", begin + start, begin + end, False)
        job.message(0, 1, (begin + 25_000, begin), (begin + 25_000, begin + 25_000))
        job.message(1, 0, (begin + 60_000, begin + 25_000), (begin + 60_000, begin + 60_000))
    wording(job.report(tmp_path).conclusion)


def test_a_bubble_is_nothing_but_waiting_and_a_rank_that_costs_no_time_is_not_named(
    tmp_path: Path, wording: Wording
) -> None:
    """Stage 0 is 18 and 8 ms too early; meanwhile rank 0 waits 9 ms for rank 1, and data moves for 1 ms.

    Without that wait, both would wait for stage 1 for longer.

    None of rank 0's 10 ms in that all-reduce is part of the bubble, nor is rank 1's last one.
    """
    job = Job(4)
    for rank, end_us in enumerate([2_000, 12_000, 20_000, 20_000]):
        job.kernel(rank, "gemm", 0, end_us, False)
    job.all_reduce("tp", [0, 1], [3_000, 12_000], 13_000)
    for rank, asks_us in ((0, 2_000), (1, 12_000)):
        job.message(rank, rank + 2, (asks_us, 20_000), (20_100, 20_100))
    report = job.report(tmp_path)
    assert [(stage.ranks, stage.bubble_us) for stage in report.pipeline] == [((0, 1), 7_500), ((2, 3), 0)]
    wording(report.conclusion)


@pytest.mark.parametrize("description", ["mesh_dp", "mesh_tp", "undefined"])
def test_advice_on_transfer_fits_the_kind_of_parallelism(
    tmp_path: Path, description: str, wording: Wording
) -> None:
    """Bucket sizes are of gradients; a group of unknown kind is taken for one of them."""
    job = Job(4)
    for ranks in ([0, 1], [2, 3]):
        described: dict[str, object] = {"Process Group Description": description}
        job.all_reduce("1", ranks, [1_000, 1_000], 3_000, args=described)
    wording(job.report(tmp_path).conclusion)


def in_call(begin: int, issue_us: int) -> list[Event]:
    """DDP's call within an operator of autograd; while it lasts, gloo works for 10 ms at its end."""
    return [
        span("cpu_op", "autograd::AccumulateGrad", begin, issue_us, 2),
        span("cpu_op", "c10d::allreduce_", begin, issue_us, 2),
        span("user_annotation", "gloo:all_reduce", begin + issue_us - 10_000, 10_000, 3),
    ]


def test_a_call_for_a_collective_within_an_operator_is_not_compute(tmp_path: Path) -> None:
    """On few cores, it lasts while gloo works: neither computes."""
    for rank in (0, 1):
        events: list[Event] = []
        for begin in (0, 50_000):
            events += [step(begin // 50_000, begin, 50_000), span("cpu_op", "aten::mm", begin, 20_000)]
            events += in_call(begin + 20_000, 30_000)
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path], show={"operators", "critical-path"})
    mean = report.ranks[0].steps[0]
    assert (mean.compute_us, mean.exposed_comm_us, mean.idle_us) == (20_000, 10_000, 20_000)
    assert mean.host_while_idle_us.op == 20_000
    assert [(row.name, row.count, row.host_us) for row in report.ranks[0].ops] == [
        ("c10d::allreduce_", 2, 60_000),
        ("aten::mm", 2, 40_000),
        ("autograd::AccumulateGrad", 2, 0),
    ]
    assert [(row.name, row.depth, row.total_us, row.self_us) for row in report.operators or ()] == [
        ("autograd::AccumulateGrad", 0, 120_000, 0),
        ("c10d::allreduce_", 1, 120_000, 120_000),
        ("aten::mm", 0, 80_000, 80_000),
    ]
    assert not [each for each in report.savings if each.part == "host" and each.saved_us > 100]


def test_no_cause_is_said_to_be_less_than_it_is(tmp_path: Path) -> None:
    """Rank 1 sleeps, which costs little, as rank 0 takes as long: yet it isn't compute that takes most."""
    for rank, length in ((0, 50_000), (1, 51_000)):
        events: list[Event] = []
        for number in (0, 1):
            begin = number * length
            events += [step(number, begin, length), span("cpu_op", "aten::mm", begin, 15_000)]
            events += [] if rank else in_call(begin + 15_000, 35_000)
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    traced, cause, *_ = (each.text for each in analyse_paths([tmp_path]).findings)
    assert traced == "2 ranks on CPU, 2 steps, which may be unlike others"
    assert cause.startswith("rank 1 spends 71 % of its step (36.0 of 51.0 ms")


def test_that_a_capture_begins_later_is_no_part_of_its_steps(tmp_path: Path) -> None:
    """Rank 1 is traced 70 ms before rank 0, for which it waits 50 ms in each step."""
    for rank in (0, 1):
        events: list[Event] = []
        for begin in (0, 100_000):
            late = 70_000 if rank == 0 and not begin else 0
            events.append(step(begin // 100_000, begin + late, 100_000 - late))
            events.append(span("cpu_op", "aten::mm", begin + late, 95_000 - late if rank == 0 else 40_000))
            came = begin + (95_000 if rank == 0 else 45_000)
            events.append(span("user_annotation", "gloo:all_reduce", came, begin + 96_000 - came, 2))
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path], show={"critical-path"})
    path = report.critical_path
    assert path is not None
    before = next(each for each in path.parts if each.part == "before")
    assert (before.path_us, before.gain_us) == (70_000, None)
    assert path.step_us == (path.length_us - 70_000) / 2
    text = render_tables(report, ("critical-path",), 80)
    assert f"all, 2 steps: {path.step_us / 1000:.3f} ms each" in text
    assert "launch" not in text


def test_what_waits_for_replicas_is_not_outside_of_operators(tmp_path: Path) -> None:
    """Of a step of 150 ms, replicas are at work for 100, and compute for 50 of them."""
    events: list[Event] = []
    for begin in (0, 150_000):
        events += [
            step(begin // 150_000, begin, 150_000),
            span("cpu_op", "aten::mm", begin + 10_000, 50_000, 2),
        ]
        events.append(span("cpu_op", "DataParallelReplicas", begin, 100_000))
    report = analyse_paths([write(tmp_path / "t.json", events)])
    assert report.ranks[0].steps[0].compute_us == 50_000
    assert report.findings[1].text.startswith("rank 0 spends 33 % of its step (50.0 of 150 ms")
