"""Steps of real optimizers, observed from outside, on a clock that ticks once per look."""

import importlib
import itertools
import os
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

import gpurun
from gpurun.launcher.compare.figures.recorded import queue_percent
from gpurun.launcher.rundir.files import RunDir, append_lines
from gpurun.launcher.rundir.records import (
    CaptureRequest,
    Event,
    ProfileConfig,
    ProgramConfig,
    StepRecord,
    VariantRef,
)
from gpurun.launcher.stats.core_waiting import waiting_of_ranks
from gpurun.launcher.worker import profiling
from gpurun.launcher.worker.accelerators.clock import EventStamps
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.profiling import StepTracer
from gpurun.launcher.worker.program import program_rank as recorder_module
from gpurun.launcher.worker.program.program_rank import (
    ProgramRank,
    StepRecorder,
    keep_groups_alive,
    own_traces_text,
    report_other_stores,
    watch_steps,
)
from gpurun.launcher.worker.program.step_rules import Classifier
from tests.known import known
from tests.wording import Wording

TICK_NS = 1_000_000


class Ticks:
    """Every look at the clock is a millisecond after the one before."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.count = itertools.count()

    def now(self) -> int:
        return next(self.count) * TICK_NS

    def elapsed_ns(self, start: int, end: int) -> int:
        return end - start

    def wait(self) -> None:
        pass


def program_config(directory: Path, warmup: int = 10) -> ProgramConfig:
    return ProgramConfig(
        launch="01-script-1",
        run_dir=str(directory),
        job_dir=str(directory),
        script="train.py",
        module=None,
        args=(),
        seed=None,
        world_size=1,
        warmup=warmup,
        variants=(VariantRef("script-1"),),
    )


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[StepRecorder]:
    config = program_config(tmp_path)
    recorder = StepRecorder(config, 0, RunDir(tmp_path), stamps=Ticks())
    with watch_steps(recorder):
        yield recorder


def steps_of(recorder: StepRecorder) -> list[StepRecord]:
    recorder.close(wait=True)
    return recorder.run.read_steps("script-1").get(0, [])


def train(
    layer: torch.nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, micro_batches: int = 1
) -> None:
    for _ in range(steps):
        for _ in range(micro_batches):
            layer(torch.ones(3, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def layer() -> torch.nn.Linear:
    return torch.nn.Linear(4, 2)


def test_a_step_is_from_call_to_call(layer: torch.nn.Linear, recorder: StepRecorder) -> None:
    train(layer, [torch.optim.SGD(layer.parameters(), 0.1)], 4)
    assert [step.step_ns for step in steps_of(recorder)] == [TICK_NS] * 3


def test_accumulated_micro_batches_are_one_step(layer: torch.nn.Linear, recorder: StepRecorder) -> None:
    train(layer, [torch.optim.SGD(layer.parameters(), 0.1)], 3, micro_batches=4)
    assert len(steps_of(recorder)) == 2


def test_two_optimizers_in_turn_make_one_step(layer: torch.nn.Linear, recorder: StepRecorder) -> None:
    pair: list[torch.optim.Optimizer] = [
        torch.optim.SGD([layer.weight], 0.1),
        torch.optim.Adam([layer.bias], 0.1),
    ]
    train(layer, pair, 5)
    assert len(steps_of(recorder)) == 4


def test_a_closure_that_is_called_many_times_is_one_step(
    layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=5)
    calls: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = layer(torch.ones(3, 4)).square().sum()
        loss.backward()
        calls.append(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(calls) > 3
    assert len(steps_of(recorder)) == 2


def test_an_optimizer_per_parameter_in_the_backward_pass(
    layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in layer.parameters()}
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for _ in range(4):
        layer(torch.ones(3, 4)).sum().backward()
    assert len(steps_of(recorder)) == 3


def test_steps_that_a_grad_scaler_skips_are_distinguished(
    layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for factor in (1.0, 1.0, float("inf"), 1.0):
        loss = layer(torch.ones(3, 4)).sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [step.kind for step in steps_of(recorder)] == ["warmup", "skipped", "warmup"]
    assert recorder.classifier.num_skipped == 1


def test_a_disabled_scaler_skips_nothing(layer: torch.nn.Linear, recorder: StepRecorder) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        scaler.scale(layer(torch.ones(3, 4)).sum()).backward()
        scaler.step(optimizer)
    assert [step.kind for step in steps_of(recorder)] == ["warmup", "warmup"]


def test_marked_steps_count_instead_of_the_optimizers(layer: torch.nn.Linear, recorder: StepRecorder) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        with gpurun.step(), gpurun.step():  # an inner one means nothing
            train(layer, [optimizer], 2)
        recorder.stamps.now()  # type: ignore[union-attr]  # the loop waits for data: belongs to the next step
    assert [step.step_ns for step in steps_of(recorder)] == [TICK_NS, 2 * TICK_NS, 2 * TICK_NS]


def test_a_marked_step_that_fails_is_none(recorder: StepRecorder) -> None:
    with pytest.raises(ValueError, match="oops"), gpurun.step():
        raise ValueError("oops")
    with gpurun.step():
        pass
    assert [step.step_ns for step in steps_of(recorder)] == [TICK_NS]  # from its own beginning


def test_marking_steps_means_nothing_outside_of_gpurun() -> None:
    with gpurun.step() as nothing:
        assert nothing is None


def classified(steps_ns: list[int], warmup: int = 10) -> tuple[Classifier, list[StepRecord]]:
    classifier = Classifier("01", warmup)
    return classifier, [classifier.add(step_ns, "timed") for step_ns in steps_ns]


def test_the_warm_up_ends_when_steps_are_steady() -> None:
    slow_start = [900, 500, 300, 200, 150]
    classifier, records = classified([*slow_start, *[100] * 25])
    kinds = [record.kind for record in records]
    assert kinds == ["warmup"] * 15 + ["timed"] * 15  # two windows of 5 that agree come after the slow one
    assert classifier.unsteady is None
    assert {record.round for record in records if record.kind == "timed"} == {4, 5, 6}


def test_a_warm_up_that_never_ends_is_said_to_be_unsteady(wording: Wording) -> None:
    classifier, records = classified([1000 - 25 * step for step in range(35)])
    assert [record.kind for record in records].count("warmup") == 30
    wording(classifier.unsteady)


def test_more_warm_up_steps_can_be_asked_for() -> None:
    _, records = classified([100] * 60, warmup=40)
    assert [record.kind for record in records].count("warmup") == 40


def test_steps_of_a_gpu_are_written_when_it_has_done_them(tmp_path: Path) -> None:
    finished: set[int] = set()

    class Event:
        def __init__(self, number: int) -> None:
            self.number = number

        def record(self, stream: Any = None) -> None:
            pass

        def query(self) -> bool:
            return self.number in finished

        def elapsed_time(self, end: Any) -> float:
            return 2.0 * float(end.number - self.number)

    numbers = itertools.count()
    stamps = EventStamps(torch.device("cuda"), lambda: Event(next(numbers)), lambda event: None, lambda: None)
    first, second = stamps.now(), stamps.now()
    assert stamps.elapsed_ns(first, second) is None
    finished.update((0, 1))
    assert stamps.elapsed_ns(first, second) == 2_000_000


class FakeProfiler:
    """Keeps its calls, in order, among what else is said."""

    def __init__(self, said: list[str] | None = None) -> None:
        self.said: list[str] = [] if said is None else said

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            self.said.append(name)
            if name == "export_chrome_trace":
                Path(arguments[0]).write_text("{}")

        return note


def test_the_traced_steps_are_the_same_on_all_ranks_and_never_timed(tmp_path: Path) -> None:
    profiler = FakeProfiler()
    tracer = StepTracer(ProfileConfig(steps=2), tmp_path / "trace.json", 30, new_profiler=lambda: profiler)
    config = program_config(tmp_path)
    recorder = StepRecorder(config, 0, RunDir(tmp_path), tracer=tracer, stamps=Ticks())
    for _ in range(40):
        recorder.enter_step()
        recorder.leave_step(completed=True)
    kinds = [step.kind for step in steps_of(recorder)]
    assert profiler.said == ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"]
    assert kinds[29:32] == ["profile"] * 3  # one in which the profiler starts, and two
    assert set(kinds[:29]) == {"warmup", "timed"}
    assert tracer.written
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_no_step_is_timed_after_a_trace(tmp_path: Path, device: str) -> None:
    """CUPTI stays attached."""
    tracer = StepTracer(ProfileConfig(steps=2), tmp_path / "trace.json", 30, new_profiler=FakeProfiler)
    stamps = Ticks()
    stamps.device = torch.device(device)
    recorder = StepRecorder(program_config(tmp_path), 0, RunDir(tmp_path), tracer=tracer, stamps=stamps)
    for number in range(60):
        recorder.enter_step()
        recorder.leave_step(completed=True)
        if number == 40:
            tracer.close()
    kinds = [step.kind for step in steps_of(recorder)]
    assert set(kinds[:29]) == {"warmup", "timed"}
    assert set(kinds[42:]) == {"profile" if device == "cuda" else "timed"}


@pytest.mark.parametrize("has_settled", [True, False])
def test_a_program_that_ends_before_its_trace_says_so_whether_or_not_its_steps_had_settled(
    tmp_path: Path, has_settled: bool
) -> None:
    config = program_config(tmp_path)
    run, tracer = RunDir(tmp_path), StepTracer(ProfileConfig(steps=3), tmp_path / "trace.json", 30)
    recorder = StepRecorder(config, 0, run, tracer=tracer, stamps=Ticks())
    for number in range(15):
        recorder.classifier.add(TICK_NS * (1 if has_settled else number + 1), "timed")
    assert bool(recorder.classifier.num_timed) == has_settled
    program = ProgramRank(config, 0, run, recorder, os.getpid(), lambda: True, lambda: False)
    said = "no trace: the program ended before step 34, and steps 31 to 33 are traced"
    assert program.facts().warnings == (said,)
    assert program.facts(completed=False).warnings == (), "its failure is reported"


PROFILERS: dict[str, tuple[Callable[[], Any], set[int]]] = {
    "scheduled": (lambda: profile(schedule=schedule(wait=2, warmup=1, active=2, repeat=1)), {1, 2, 3, 4}),
    "waiting": (lambda: profile(schedule=schedule(wait=50, warmup=1, active=2)), set()),
    "whole": (profile, {*range(9)}),
    "autograd": (torch.autograd.profiler.profile, {*range(9)}),
    "disabled": (lambda: torch.autograd.profiler.profile(enabled=False), set()),
}
"""By the way it records: a profiler, and the steps in which it records, prepares that or writes."""


@pytest.mark.parametrize("how", PROFILERS)
def test_steps_that_the_programs_own_profiler_slows_are_not_timed(
    how: str, layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    new_profiler, slowed = PROFILERS[how]
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with warnings.catch_warnings(action="ignore"), new_profiler() as profiler:
        for _ in range(10):
            train(layer, [optimizer], 1)
            getattr(profiler, "step", lambda: None)()
    train(layer, [optimizer], 2)  # it ends in the first
    kinds = {step.step: step.kind for step in steps_of(recorder)}
    ends_in = {9} if 8 in slowed else set()
    assert {number for number, kind in kinds.items() if kind == "profile"} == slowed | ends_in
    assert len(kinds) == 11


CPU_WORK, GPU_WORK = ProfilerActivity.CPU, ProfilerActivity.CUDA


@pytest.mark.parametrize(
    ("device", "activities", "first_slow", "after"),
    [
        ("cuda", {CPU_WORK, GPU_WORK}, 20, "profile"),
        ("cuda", {CPU_WORK}, 20, "timed"),
        ("cpu", {CPU_WORK, GPU_WORK}, 20, "timed"),
        ("cuda", {CPU_WORK, GPU_WORK}, None, "timed"),
    ],
)
def test_on_a_gpu_no_step_is_timed_after_the_programs_own_profiler_has_recorded_the_gpu(
    tmp_path: Path, device: str, activities: set[object], first_slow: int | None, after: str
) -> None:
    """CUPTI stays attached: on an H100 steps took 1.91 instead of 1.62 ms from then on."""
    stamps = Ticks()
    stamps.device = torch.device(device)
    recorder = StepRecorder(program_config(tmp_path), 0, RunDir(tmp_path), stamps=stamps)
    theirs = SimpleNamespace(activities=activities, current_action=ProfilerAction.NONE)
    recorder.enter_step()
    recorder.profilers._begins(theirs)
    for number in range(40):
        if number == first_slow:
            theirs.current_action = ProfilerAction.RECORD
        recorder.leave_step(completed=True)
        recorder.enter_step()
        if number == 22:
            recorder.profilers._ends(theirs)
    kinds = [step.kind for step in steps_of(recorder)]
    assert set(kinds[:20]) == {"warmup", "timed"}
    assert set(kinds[20:22]) == ({"timed"} if first_slow is None else {"profile"})
    assert set(kinds[24:]) == {after}
    assert recorder.profilers.num_steps == kinds.count("profile")


def test_a_trace_shows_no_warning_of_torch_that_other_traces_are_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11, torch/profiler/profiler.py; all others stay. This test fails by any that is shown."""
    texts = ["Warning: Profiler clears events at the end of each cycle.", "Profiler is out of memory"]
    monkeypatch.setattr(profile, "prepare_trace", lambda _: warnings.warn(texts.pop(0), stacklevel=2))
    traced = profiling.CallProfile.__new__(profiling.CallProfile)
    traced.prepare_trace()
    with pytest.warns(UserWarning, match="out of memory"):
        traced.prepare_trace()


def test_a_program_of_which_its_own_profiler_slows_every_step_has_no_times(
    layer: torch.nn.Linear, recorder: StepRecorder, wording: Wording
) -> None:
    with profile():
        train(layer, [torch.optim.SGD(layer.parameters(), 0.1)], 40)
    recorder.flush()
    program = ProgramRank(recorder.config, 0, recorder.run, recorder, os.getpid(), bool, bool)
    wording(program.facts().untimed)
    wording(program.facts().warnings)


def test_its_traces_are_where_it_has_written_them_wherever_the_program_ends(
    recorder: StepRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path)
    with profile(activities=[CPU_WORK]) as profiler:
        torch.ones(1)
    profiler.export_chrome_trace("trace.json")
    monkeypatch.chdir("gone")
    Path("../gone").rmdir()
    alone, beside = (own_traces_text(recorder.profilers.traces, num_ranks) for num_ranks in (1, 2))
    monkeypatch.chdir(tmp_path)
    assert alone.endswith(f"reads what it wrote to {tmp_path}")
    assert beside == f"{alone} on rank 0 (name the directories of all ranks)"


def test_a_rank_that_waits_at_another_address_says_where_the_others_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_create_c10d_store", lambda hostname, port: hostname)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    addresses = ("127.0.0.1", 0), ("127.0.0.2", 0)
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(address)) for address in addresses]
        port, other = (server.getsockname()[1] for server in servers)
        report_other_stores(("127.0.0.1", port))
        for host in ("127.0.0.1", "localhost"):
            assert module._create_c10d_store(host, port) == host
        assert module._create_c10d_store("127.0.0.2", port) == "127.0.0.1"  # this machine's, too
        assert capsys.readouterr().err == ""
        module._create_c10d_store("127.0.0.1", other)
    said = f"waits at 127.0.0.1:{other} for the others, and nothing listens there: their store is at"
    assert f"{said} 127.0.0.1:{port}; leave MASTER_ADDR" in capsys.readouterr().err


def test_from_another_machine_each_address_of_others_leads_to_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_create_c10d_store", lambda hostname, port: hostname)
    monkeypatch.setattr("gpurun.launcher.worker.program.program_rank.listens", lambda *_: False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    report_other_stores(("192.0.2.1", 29500))  # no machine has addresses of that network
    assert module._create_c10d_store("192.0.2.7", 29500) == "192.0.2.1"
    assert capsys.readouterr().err == ""
    assert module._create_c10d_store("127.0.0.1", 29500) == "127.0.0.1"
    assert "waits at 127.0.0.1:29500 for the others" in capsys.readouterr().err


class CaptureOf:
    """In place of `StepCapture`: records `steps` steps from number `first` on."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.last, self.count = first, first + steps - 1, 0

    def between_steps(self, waits: bool = False) -> bool:
        self.count += 1
        return not waits and self.first <= self.count <= self.last


def test_captured_steps_and_the_one_in_which_they_are_written_are_not_timed(
    layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    capture = CaptureOf(first=3, steps=2)
    recorder.capture = capture  # type: ignore[assignment]
    train(layer, [torch.optim.SGD(layer.parameters(), 0.1)], 10)
    assert [step.kind for step in steps_of(recorder)][3:7] == ["profile"] * 3 + ["warmup"]
    assert capture.count == 9


def test_a_capture_puts_the_programs_own_trace_off(recorder: StepRecorder, tmp_path: Path) -> None:
    tracer = StepTracer(ProfileConfig(2), tmp_path / "rank0.pt.trace.json.gz", first=4)
    tracer.postpone(3)
    assert tracer.first == 5
    tracer.postpone(1)
    assert tracer.first == 5


def test_steps_have_their_share_of_the_time_that_the_rank_waited_for_a_core(
    layer: torch.nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks at each look; half of the time the rank waits."""
    now_ns = [0]

    def tick() -> int:
        now_ns[0] += TICK_NS
        return now_ns[0]

    monkeypatch.setattr(time, "perf_counter_ns", tick)
    half = NoiseMeter(lambda: {"main": now_ns[0] // 2}, lambda: now_ns[0], lambda: False)
    recorder = StepRecorder(program_config(tmp_path), 0, RunDir(tmp_path), stamps=Ticks(), noise=half)
    recorder._flushed_ns = now_ns[0]
    with watch_steps(recorder):
        train(layer, [torch.optim.SGD(layer.parameters(), 0.1)], 20)
    timed = [step for step in steps_of(recorder) if step.kind == "timed"]
    assert queue_percent(waiting_of_ranks({0: timed}, {})[0]) == pytest.approx(50, abs=1)


def test_of_a_long_program_a_sample_and_the_last_step_are_kept(
    layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    """The file also has lines of an earlier launch, one of them damaged, which stay as they are."""
    path, launch = recorder.run.steps("script-1", 0), recorder.config.launch
    earlier = [StepRecord("00", 1, 0, number, "timed", 1, {}, None) for number in range(3)]
    append_lines(path, earlier)
    path.write_bytes(path.read_bytes() + b"{damaged\n")
    before = path.read_bytes()
    recorder.kept.sample.most = 8
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(20):
        train(layer, [optimizer], 20)
        recorder.flush()
    steps = steps_of(recorder)
    assert path.read_bytes().startswith(before)
    own = [step for step in steps if step.launch == launch]
    warm = [step for step in own if step.kind == "warmup"]
    assert [step.step for step in warm] == list(range(len(warm)))
    kept = [step.step for step in own if step.kind == "timed"]
    assert kept == sorted(set(kept))
    assert kept[-1] == recorder.classifier.count - 1
    assert len({number // 5 for number in kept}) <= 9
    events = recorder.run.read_events(launch)
    assert events[-1].round == recorder.classifier.count


def test_the_last_report_of_progress_says_when_steps_began_and_ended(
    layer: torch.nn.Linear, recorder: StepRecorder
) -> None:
    recorder.report_progress()
    before = time.monotonic_ns()
    train(layer, [torch.optim.SGD(layer.parameters(), 0.1)], 3)
    after = time.monotonic_ns()
    steps_of(recorder)
    first, *_, last = recorder.run.read_events(recorder.config.launch)
    assert (first.round, first.steps_ns) == (0, None)
    assert last.round == 2
    began, ended = known(last.steps_ns)
    assert before <= began <= ended <= after <= last.monotonic_ns


def test_of_a_long_program_reports_of_progress_thin_out(
    recorder: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_PROGRESS", 8)
    path, launch = recorder.run.events(recorder.config.launch), recorder.config.launch
    append_lines(path, [Event(0, "build")])
    for number in range(100):
        recorder.add_progress(Event(number, "run", round=number))
    first, *reports = recorder.run.read_events(launch)
    assert first.stage == "build"
    assert 4 <= len(reports) <= 8
    assert (reports[0].round, reports[-1].round) == (0, 99)


def test_a_capture_has_as_many_steps_as_were_asked_for_after_one_that_warms_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "stop", "export"):
        monkeypatch.setattr(profiling, name, Mock())
    calls, block = [], Mock(bell=1, steps=0)
    profiler = Mock(
        prepare_trace=lambda: calls.append(("prepare", block.steps)),
        start_trace=lambda: calls.append(("start", block.steps)),
    )
    monkeypatch.setattr(profiling, "new_profiler", Mock(return_value=profiler))
    monkeypatch.setattr(profiling, "read_request", Mock(return_value=CaptureRequest(1, 3, None, 2)))
    capture = profiling.StepCapture(RunDir(tmp_path), "00", 0, block)
    recorded = []
    for block.steps in range(8):
        recorded.append(capture.between_steps())
    assert recorded == [False, True, True, True, True, False, False, False]
    assert calls == [("prepare", 1), ("start", 2)]


class Group:
    """A process group that can be watched."""


def test_of_groups_only_those_that_end_with_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would keep their connections, epoch by epoch."""
    known: dict[Any, Any] = {Group(): None}
    for module in (distributed_c10d, torch.distributed):
        monkeypatch.setattr(module, "destroy_process_group", lambda group=None: known.pop(group, None))
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=known, default_pg=None))
    has_had_group = keep_groups_alive()
    (last,) = map(weakref.ref, known)
    for _ in range(3):
        group: Any = Group()
        known[group], gone = None, weakref.ref(group)
        torch.distributed.destroy_process_group(group)
        del group
        assert gone() is None
    torch.distributed.destroy_process_group()
    known.clear()
    assert last() is not None
    assert has_had_group()
