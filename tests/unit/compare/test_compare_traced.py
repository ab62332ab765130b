"""What a comparison takes from traces: one step that adds up, kept until a trace changes."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.launcher.compare.build import _stated_peaks
from gpurun.launcher.compare.figures.ranks import (
    RankBreakdown,
    RankFigures,
    Traced,
    of_devices,
    of_timed,
    read_traced,
    slowest_rank,
    with_breakdown,
)
from gpurun.launcher.compare.notes import _without_peak
from gpurun.launcher.compare.variant_causes import largest_loss, losses
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.trace.model import Bubble, CpuFacts
from tests.known import known
from tests.unit.compare.test_compare_explain import rank as rank_figures
from tests.unit.compare.test_compare_explain import variant
from tests.unit.compare.test_compare_summary import result, sentence
from tests.unit.trace.several_ranks.generated_job import Job
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, step, write
from tests.wording import Wording

RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
FIELDS = ("compute_ns", "exposed_transfer_ns", "exposed_wait_ns", "exposed_memcpy_ns", "idle_ns")


def record(run: RunDir, rank: int, compute_us: dict[int, float], world_size: int = 2) -> Path:
    """A trace with a step per entry: compute for so long, then a collective until 80 µs after its begin."""
    events = []
    for number, busy_us in compute_us.items():
        begin = 1000 * number
        events += [
            step(number, begin, 100),
            span("cpu_op", "aten::mm", begin, 5),
            launch(begin, 1, 2 * number),
            launch(begin + 2, 1, 2 * number + 1),
            kernel("gemm", begin + 10, busy_us, 2 * number),
            kernel(RING, begin + 10 + busy_us, 70 - busy_us, 2 * number + 1),
        ]
    path = run.trace("v", rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, events, **rank_info(rank, world_size))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Rank 0 computes 60.25 µs in step 2, rank 1 40; steps 1 and 3 are shorter and longer."""
    run = RunDir(tmp_path)
    record(run, 0, {1: 50, 2: 60.25, 3: 65})
    record(run, 1, {1: 50, 2: 40, 3: 30})
    return run


def test_a_pipeline_whose_ranks_work_alike_loses_its_bubble() -> None:
    """Ranks 0 and 1 are stages that each sleep 120 ms and wait 30 to 40 for the other."""
    bubbles = (Bubble(0, (1,), 33.0), Bubble(1, (0, 2), 37.4))
    stages = tuple(
        replace(rank_figures(number, 1, 130.0, bubble.ms, host=128.0), bubble=bubble)
        for number, bubble in enumerate(bubbles)
    )
    said = "stage 1 waits 22 % of its step (37.4 of 167 ms) for stages 0 and 2 (pipeline bubble)"
    asleep_ = tuple(replace(stage, step_ms=167.0, cpu_ms=1.1, thread_cpu_ms=1.1) for stage in stages)
    assert known(largest_loss(asleep_)).text == said
    text = sentence([variant("pp", (1, 1), 167.0, *asleep_)], {})
    assert "(37.3 of 167 ms) for stages 0 and 2 (pipeline bubble).\nTry more micro-batches" in text
    slow = (rank_figures(0, 1, 167.0), stages[1])
    assert "(37.4 of 167 ms) for rank 0, which takes 167 ms" in known(largest_loss(slow)).text


def test_a_stages_bubble_is_of_the_steps_that_its_other_figures_are_of(tmp_path: Path) -> None:
    """Stage 1 waits 20, 30 and 40 ms for stage 0's message, then stage 0 5 ms for stage 1's."""
    run, job = RunDir(tmp_path), Job(2)
    for number in (1, 2, 3):
        begin, sent, back = 1e5 * number, 1e5 * number + 1e4 + 1e4 * number, 1e5 * number + 7e4
        job.message(0, 1, (sent, begin), (sent + 10, sent + 10))
        job.message(1, 0, (back, back - 5e3), (back + 10, back + 10))
        for rank in (0, 1):
            job.events[rank].append(step(number, begin - 100, 9e4))
    run.trace("v", 0).parent.mkdir(parents=True)
    for rank, events in job.events.items():
        write(run.trace("v", rank), events, **rank_info(rank, 2))
    traced = known(read_traced(run, "v"))
    assert traced.steps == (2, 3)
    assert traced.bubbles == {0: Bubble(0, (1,), 5.0), 1: Bubble(1, (0,), 35.0)}
    assert read_traced(run, "v") == traced


def test_the_mean_of_all_ranks_adds_up_to_the_nanosecond(run: RunDir) -> None:
    traced = known(read_traced(run, "v"))
    assert traced.notes == ()
    busy, waiting = traced.ranks[0], traced.ranks[1]
    assert traced.steps == (2, 3)  # in step 1 no rank waits: both are busy all the time
    assert (busy.compute_ns, busy.exposed_transfer_ns, busy.exposed_wait_ns) == (62_625, 7_375, 0)
    assert (waiting.compute_ns, waiting.exposed_transfer_ns, waiting.exposed_wait_ns) == (
        35_000,
        7_375,
        27_625,
    )
    for rank in (busy, waiting):
        assert sum(getattr(rank, name) for name in FIELDS) == rank.span_ns == 100_000
    assert (waiting.wait_ns, waiting.transfer_ns, waiting.exposed_comm_ns) == (27_625, 7_375, 35_000)


def test_what_was_found_out_is_kept_until_a_trace_changes(run: RunDir) -> None:
    first = read_traced(run, "v")
    kept = run.traced("v").read_bytes()
    os.utime(run.traced("v"), ns=(0, 0))
    assert read_traced(run, "v") == first
    assert run.traced("v").stat().st_mtime_ns == 0  # not written again
    record(run, 1, {1: 50, 2: 45, 3: 30})
    again = known(read_traced(run, "v"))
    assert again.ranks[1].compute_ns == 37_500
    assert run.traced("v").read_bytes() != kept


def test_nothing_is_written_into_a_strangers_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
    before = sorted(run.path.rglob("*"))
    assert read_traced(run, "v") is not None
    assert sorted(run.path.rglob("*")) == before


def test_a_gpu_whose_work_was_not_recorded_has_no_figures_of_the_cpu(run: RunDir, wording: Wording) -> None:
    """Another profiler has CUPTI: Kineto then writes a trace of the CPU alone."""
    write(run.trace("v", 1), [step(2, 2000, 100), span("cpu_op", "aten::mm", 2000, 50)], **rank_info(1, 2))
    found = known(read_traced(run, "v"))
    assert found.ranks[1].compute_ns == 50_000
    assert of_devices(found, ("cpu:0", "cpu:1")) == found
    of_gpus = known(of_devices(found, ("cuda:0", "cuda:1")))
    assert of_gpus.ranks == {0: found.ranks[0]}
    wording(of_gpus.notes[-1].text)


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 0}'])
def test_a_kept_file_that_cannot_be_read_is_made_again(run: RunDir, content: bytes) -> None:
    first = read_traced(run, "v")
    run.traced("v").write_bytes(content)
    assert read_traced(run, "v") == first


@pytest.mark.parametrize("damaged", ["host_ns", "operators_ns"])
def test_a_kept_file_whose_times_no_trace_can_have_is_made_again(run: RunDir, damaged: str) -> None:
    first = read_traced(run, "v")
    kept = json.loads(run.traced("v").read_bytes())
    (kept[damaged]["1"] if damaged in kept else kept["ranks"]["1"])[damaged] = 10**400
    run.traced("v").write_text(json.dumps(kept))
    assert read_traced(run, "v") == first


@pytest.mark.parametrize(
    "changed",
    [
        {"code": "of-the-future"},
        {"figures": {"of": "", "case": "of-the-future"}},
        {"figures": {"of": "", "case": "one-rank-present"}},
        {"figures": {"of": "", "case": "lost-launches", "num_lost": [3]}},
        {"figures": {"of": "", "case": "no-gpu-work", "who": 3.5}},
    ],
    ids=["code", "case", "lacks figures", "a list for a number", "a number for a name"],
)
def test_a_kept_file_with_a_note_that_no_trace_has_is_made_again(
    run: RunDir, changed: dict[str, object]
) -> None:
    run.trace("v", 1).unlink()
    first = read_traced(run, "v")
    kept = json.loads(run.traced("v").read_bytes())
    assert [note["figures"]["case"] for note in kept["notes"]] == ["one-rank-present"]
    kept["notes"][0] |= changed
    run.traced("v").write_text(json.dumps(kept))
    assert read_traced(run, "v") == first


def test_a_broken_trace_is_a_warning_and_costs_only_itself(run: RunDir) -> None:
    path = run.trace("v", 1)
    path.write_bytes(path.read_bytes()[:60])
    traced = known(read_traced(run, "v"))
    assert set(traced.ranks) == {0}
    assert traced.ranks[0].wait_ns is None
    assert any(note.text.startswith("variants/v/rank1.pt.trace.json.gz") for note in traced.notes)
    run.trace("v", 0).write_bytes(b"no trace")
    traced = known(read_traced(run, "v"))
    assert (traced.steps, traced.ranks) == ((), {})
    assert "rank0.pt.trace.json.gz" in traced.notes[0].text


def test_ranks_whose_traces_have_no_step_in_common_have_no_mean(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    record(run, 0, {1: 50})
    record(run, 1, {2: 50})
    traced = read_traced(run, "v")
    assert traced is not None
    assert (traced.steps, traced.ranks) == ((), {})
    assert not any(facts.functions for facts in traced.cpu.values())


def test_no_trace_no_figures(tmp_path: Path) -> None:
    assert read_traced(RunDir(tmp_path), "v") is None


def test_the_mean_is_of_the_half_in_which_all_ranks_were_busy_least(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lengths_us = {1: (300, 90), 2: (100, 100), 3: (100, 110), 4: (90, 90), 5: (100, 99)}
    for rank in (0, 1):
        events = [step(number, 1000 * number, both[rank]) for number, both in lengths_us.items()]
        path = run.trace("v", rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [span("cpu_op", "aten::mm", 999, 1), *events], **rank_info(rank, 2))
    traced = known(read_traced(run, "v"))
    assert (traced.steps, traced.num_steps) == ((2, 4, 5), 5)
    assert [rank.span_ns for rank in traced.ranks.values()] == [96_667, 96_333]


@pytest.mark.parametrize(
    ("busy_us", "used"),
    [([5, 55, 5, 55, 5, 55], 6), ([5, 5, 60, 5, 5, 60], 6), ([20, 20, 20, 20, 20, 65], 3), ([20, 60], 1)],
)
def test_long_steps_that_come_back_count_and_one_that_does_not_is_left_out(
    tmp_path: Path, busy_us: list[float], used: int
) -> None:
    """As of a loader that delivers several batches at once; one alone may be the machine's."""
    run = RunDir(tmp_path)
    events = [step(number, 1000 * number, busy) for number, busy in enumerate(busy_us, 1)]
    run.trace("v", 0).parent.mkdir(parents=True)
    write(run.trace("v", 0), [span("cpu_op", "aten::mm", 999, 1), *events], **rank_info(0, 1))
    found = known(read_traced(run, "v"))
    assert len(found.steps) == used
    assert found.ranks[0].span_ns == pytest.approx(1000 * sum(sorted(busy_us)[:used]) / used, abs=1)


@pytest.mark.parametrize(("step_ms", "is_used"), [(None, True), (0.05, True), (0.199, True), (0.201, False)])
def test_traces_of_far_shorter_steps_than_timed_ones_have_no_figures(
    run: RunDir, step_ms: float | None, is_used: bool, wording: Wording
) -> None:
    """Of 100 µs: what takes the rest of the timed step isn't in them."""
    found = known(of_timed(read_traced(run, "v"), {1: step_ms} if step_ms else {}))
    assert (bool(found.ranks), bool(found.steps), not found.notes) == (is_used, is_used, is_used)
    wording(*(note.text for note in found.notes))


def test_a_step_with_long_waiting_is_as_good_as_another(tmp_path: Path) -> None:
    """The sum of all ranks' lengths is the same in all steps; what counts is what they do in them."""
    run = RunDir(tmp_path)
    record(run, 0, {1: 60, 2: 62, 3: 60})
    record(run, 1, {1: 30, 2: 20, 3: 50})
    traced = known(read_traced(run, "v"))
    assert traced.steps == (1, 2)
    assert traced.ranks[1].exposed_wait_ns == (30_000 + 42_000) // 2


def steps_of(run: RunDir, wait_us: dict[int, float], *others: Event, tail_us: float = 0) -> None:
    """A kernel, nothing for so long until the next is launched, and nothing for `tail_us` after that."""
    events = [*others]
    for number, us in wait_us.items():
        begin = 20_000 * number
        events += [
            step(number, begin, us + 1_000 + tail_us),
            span("cpu_op", "aten::mm", begin, 5),
            launch(begin, 5, 2 * number),
            kernel("gemm", begin + 5, 495, 2 * number),
            launch(begin + us + 495, 5, 2 * number + 1),
            kernel("gemm", begin + us + 500, 500, 2 * number + 1),
        ]
    run.trace("v", 0).parent.mkdir(parents=True, exist_ok=True)
    write(run.trace("v", 0), events, **rank_info(0, 1))


def test_time_after_the_last_work_waits_for_the_cpu(tmp_path: Path) -> None:
    steps_of(RunDir(tmp_path), {1: 100}, tail_us=2_000)
    found = known(read_traced(RunDir(tmp_path), "v")).ranks[0]
    assert (found.host_ns, found.idle_ns) == (2_105_000, 2_105_000)
    figures = RankFigures(0, "cuda:0", 4, 3.1, {}, None, None)
    most = known(largest_loss((with_breakdown(figures, read_traced(RunDir(tmp_path), "v")),)))
    assert (most.part, most.lost_ns, most.has_advice) == ("host", 2_105_000, True)


def function(name: str, start_us: float, end_us: float) -> Event:
    return span("python_function", name, start_us, end_us - start_us)


def test_what_the_cpu_does_is_that_of_the_steps_that_count(tmp_path: Path) -> None:
    """The step in which a checkpoint is saved is long, and left out."""
    pads = [function("t.py(5): pad", begin + 510, begin + 900) for begin in (20_000, 40_000)]
    save = function("t.py(9): save", 60_510, 69_900)
    compiled = kernel("triton_poi_fused_add_0", 20_995, 5, 3)
    steps_of(RunDir(tmp_path), {1: 500, 2: 500, 3: 9_500}, *pads, save, compiled)
    traced = known(read_traced(RunDir(tmp_path), "v"))
    assert traced.steps == (1, 2)
    assert traced.cpu[0] == CpuFacts(
        {"host": "pad (t.py:5)"},
        launches_in="cudaLaunchKernel",
        remedies=("torch.compile",),
        has_stacks=True,
    )
    assert read_traced(RunDir(tmp_path), "v") == traced
    figures = with_breakdown(RankFigures(0, "cuda:0", 4, 3.5, {}, None, None), traced)
    assert figures.cpu == traced.cpu[0]
    own = replace(figures, cpu=CpuFacts(remedies=("CUDA graphs",)))  # as the job says
    assert with_breakdown(own, traced).cpu.remedies == ("CUDA graphs", "torch.compile")
    host = next(each for each in losses((figures,)) if each.part == "host")
    assert host.text.endswith("waiting for the CPU to launch work, for most of it in pad (t.py:5)")


def test_a_function_of_one_step_only_is_not_named(tmp_path: Path) -> None:
    steps_of(RunDir(tmp_path), {1: 500, 2: 500}, function("t.py(5): pad", 20_510, 20_900))
    traced = known(read_traced(RunDir(tmp_path), "v"))
    assert traced.steps in ((1,), (2,))
    assert traced.cpu[0].functions == ({"host": "pad (t.py:5)"} if traced.steps == (1,) else {})


def test_the_figures_of_a_rank_are_those_of_its_trace() -> None:
    figures = RankFigures(0, "cpu:0", 4, 1.0, {}, None, None)
    assert with_breakdown(figures, None) == figures
    breakdown = RankBreakdown(10, 3, 3, 1, 0, 1, 3, 1, 1, 0, 0, 0, 1, None, None)
    traced = Traced(1, {}, (1,), 1, {0: breakdown}, ())
    found = with_breakdown(figures, traced)
    assert (found.span_ms, found.input_ms, found.host_ms, found.wait_ms) == (1e-5, 1e-6, 1e-6, None)
    assert found.exposed_comm_ms.trace == pytest.approx(5e-6)  # with the idle time of a collective on the CPU
    assert with_breakdown(figures, traced, alone=True).exposed_comm_ms.trace is None


@pytest.mark.parametrize(
    ("thread_cpu_ms", "python", "blocked"),
    [(4.0, 0.0, 10.0), (14.0, 10.0, 0.0), (7.0, 3.0, 7.0), (None, 10.0, 0.0), (0.5, 10.0, 0.0)],
    ids=["asleep", "in Python", "some of both", "older run", "other threads compute"],
)
def test_only_the_thread_that_steps_can_be_in_python(
    thread_cpu_ms: float | None, python: float, blocked: float
) -> None:
    """It computes for 4 of 14 ms; threads of OpenMP spin on all cores meanwhile."""
    figures = replace(
        rank_figures(0, 8, 14.0, host=10.0), step_ms=14.0, cpu_ms=28.0, thread_cpu_ms=thread_cpu_ms
    )
    found = {loss.part: loss.saved_ns / 1e6 for loss in losses((figures,))}
    is_known = thread_cpu_ms not in (None, 0.5)
    between = found.get("python" if is_known else "outside", 0.0)
    assert (between, found.get("blocked", 0.0)) == (python, blocked)


def test_neither_python_nor_blocked_is_more_than_is_certain() -> None:
    """Of 4 ms of operators the thread waited up to 1.4 for a core: 3 to 4.4 of its 7 ms are Python's."""
    figures = replace(
        rank_figures(0, 8, 14.0, host=10.0), step_ms=14.0, thread_cpu_ms=7.0, queue_percent=10.0
    )
    found = {loss.part: loss.saved_ns / 1e6 for loss in losses((figures,))}
    assert found["python"] == pytest.approx(3.0)
    assert found["blocked"] == pytest.approx(10.0 - 4.4)


@pytest.mark.parametrize(("ablation_ms", "slowest"), [(0.1, 0), (-3.0, 1)])
def test_of_ranks_that_are_alike_without_communication_the_awaited_one_is_the_slowest(
    ablation_ms: float, slowest: int
) -> None:
    """In the trace rank 1 waits for rank 0; by the ablation it is slower, by chance or clearly."""
    awaited, waiting = rank_figures(0, 32, 24.0), rank_figures(1, 32, 18.0, 6.0)
    known_ms = ((awaited, 0.3), (waiting, ablation_ms))
    ranks = [
        replace(figures, step_ms=23.8, exposed_comm_ms=replace(figures.exposed_comm_ms, ablation=ms))
        for figures, ms in known_ms
    ]
    found = known(slowest_rank(ranks))
    assert found.rank == slowest


@pytest.mark.parametrize(("device", "percent"), [("cuda:0", 10.0), ("cpu:0", 40.0)])
def test_a_gpu_that_has_work_is_not_slowed_by_a_rank_that_waits_for_a_core(
    device: str, percent: float
) -> None:
    breakdown = RankBreakdown(100, 90, 0, 0, 0, 0, 10, 0, 10, 0, 0, 0, 0, None, None)
    traced = Traced(1, {}, (1,), 1, {0: breakdown}, ())
    waiting = RankFigures(0, device, 8, None, {}, None, None, queue_percent=40.0)
    assert with_breakdown(waiting, traced).queue_percent == percent
    # Without a trace it isn't known whether the GPU had work.
    assert with_breakdown(waiting, None).queue_percent == (None if device.startswith("cuda") else 40.0)


@pytest.mark.parametrize("stated", [None, 3, "x", {"bf16": "x", "fp32": -1, "fp16": 10.0}])
def test_peaks_of_a_strangers_job_are_taken_if_they_are_some(stated: object) -> None:
    assert _stated_peaks({"peak_tflops": stated}) == ({"fp16": 10.0} if isinstance(stated, dict) else {})


def test_a_gpu_without_a_known_peak_is_named(wording: Wording) -> None:
    host = {"gpus": [{"index": i, "name": name} for i, name in enumerate(("NVIDIA H200", "NVIDIA X9"))]}
    trained = replace(result("a", (8, 8), 10.0), devices=("cuda:0", "cuda:1"), precision="bf16", mfu=None)
    (note,) = _without_peak(replace(trained, flop_per_s=1e15), host)
    wording(note.text)
    assert not _without_peak(replace(trained, flop_per_s=1e15, mfu=0.4), host)
    assert not _without_peak(replace(trained, flop_per_s=None), host)
    assert not _without_peak(replace(trained, flop_per_s=1e15, devices=("cpu:0", "cpu:1")), host)
