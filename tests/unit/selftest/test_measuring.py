"""Faults are put under what the ranks of a self-test run: it measures them, and the checks name them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import DeviceFacts
from gpurun.launcher.selftest import machine_checks, run_checks
from gpurun.launcher.selftest.run_checks import LATE_MS, NUM_STEPS
from gpurun.launcher.worker.accelerators.clock import HostClock, StepTiming
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.program import program_rank as recorder_module
from gpurun.launcher.worker.program.program_rank import StepRecorder, watch_steps
from gpurun.launcher.worker.selftest import device_program, misbehaving_model, plain_programs
from tests.unit.selftest.healthy import evidence
from tests.unit.worker.test_program_steps import program_config
from tests.wording import Wording

HOST = torch.device("cpu")
Patch = pytest.MonkeyPatch


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone, with gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    """Less work than in a self-test."""
    monkeypatch.setattr(device_program, "AT_WORK_NS", 3_000_000)
    monkeypatch.setattr(device_program, "BLOCK_NS", 1_000_000)
    monkeypatch.setattr(device_program, "MATRIX_ROWS", {True: 16})
    monkeypatch.setattr(device_program, "REDUCED_BYTES", {True: (1 << 10, 1 << 12)})
    monkeypatch.setattr(device_program, "SENT_BYTES", {True: 1000})


def measured() -> DeviceFacts:
    return device_program.device_facts(0, HOST, CPU, ())


# Devices


class Queue(CpuRuntime):
    """A device that works only while something has been queued since it was last waited for."""

    queued = 0

    def synchronize(self, device: torch.device | None = None) -> None:
        Queue.queued = 0

    def sensors(self, devices: Any) -> tuple[Sensors]:
        def at_work(value: Any) -> Callable[[], Any]:
            return lambda: value if Queue.queued else None

        return (Sensors(throttling=at_work("too hot"), power_w=at_work(600.0)),)


@pytest.mark.usefixtures("alone")
def test_power_and_throttling_are_sampled_while_the_device_works(monkeypatch: Patch) -> None:
    product = torch.mm

    def queue(*matrices: Tensor, out: Tensor) -> Tensor:
        Queue.queued += 1
        return product(*matrices, out=out)

    monkeypatch.setattr(torch, "mm", queue)
    monkeypatch.setattr(device_program, "runtime_of", lambda device: Queue())
    monkeypatch.setattr("gpurun.launcher.worker.meters.gpu_load.runtime_of", lambda device: Queue())
    found = measured()
    assert (found.throttled, found.power_w) == ("too hot", 600.0)


class FakeTime:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: Patch, module: Any) -> None:
        self.now_ns = 0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: self.now_ns))

    def taking(self, duration_ns: int) -> Callable[..., None]:
        def pass_time(*args: object, **more: object) -> None:
            self.now_ns += duration_ns

        return pass_time


@pytest.fixture
def clock(monkeypatch: Patch) -> FakeTime:
    return FakeTime(monkeypatch, device_program)


def test_a_device_is_as_fast_as_its_fastest_block(clock: FakeTime, monkeypatch: Patch) -> None:
    durations = iter([*[400_000] * 4, *[100_000] * 12, *[200_000] * 100])
    monkeypatch.setattr(torch, "mm", lambda *args, out: clock.taking(next(durations))())
    best_ns, _, host_ns = device_program.blocks(torch.ones(2, 2), HostClock(), lambda: None)
    assert best_ns == 100_000
    assert host_ns >= device_program.AT_WORK_NS


class FastClock(HostClock):
    """A device's clock by which a second lasts 1.1 s."""

    def read(self) -> list[StepTiming]:
        return [replace(step, step_ns=step.step_ns * 11 // 10) for step in super().read()]


class LateClock(HostClock):
    """The process loses the core between looks at the host's clock and marks of the device."""

    def __init__(self, clock: FakeTime) -> None:
        super().__init__(lambda: clock.now_ns)
        self.lose_the_core = clock.taking(50_000_000)

    def start(self) -> None:
        self.lose_the_core()
        super().start()
        self.lose_the_core()

    def end_step(self) -> None:
        self.lose_the_core()
        super().end_step()
        self.lose_the_core()


def test_no_clock_is_off_by_what_a_busy_machine_takes(clock: FakeTime, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch, "mm", lambda *args, out: clock.taking(5_000_000)())
    _, off, host_ns = device_program.blocks(torch.ones(2, 2), LateClock(clock), lambda: None)
    assert (off, host_ns) == (0, clock.now_ns)


def test_a_device_whose_clock_is_fast_is_named(clock: FakeTime, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch, "mm", lambda *args, out: clock.taking(5_000_000)())
    _, off, _ = device_program.blocks(torch.ones(2, 2), FastClock(lambda: clock.now_ns), lambda: None)
    seen = evidence()
    facts = (replace(seen.facts[0], clock_off=off), *seen.facts[1:])
    found = machine_checks.clocks_agree(replace(seen, facts=facts))
    assert (found.status, found.found) == ("failed", "cuda:0 is off by 10 %")


@pytest.mark.usefixtures("alone")
def test_a_healthy_device_has_no_fault() -> None:
    found = measured()
    assert (found.throttled, found.wrong_sums, found.pairs) == (None, (), ())
    assert [each.num_bytes for each in found.reduces] == [1 << 10, 1 << 12]
    assert found.gflop_per_s > 0
    assert found.matrix_rows == 16


# Links


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", device_program.TYPES)
def test_an_all_reduce_that_gives_another_sum_in_one_type_is_named(
    dtype: torch.dtype, monkeypatch: Patch, wording: Wording
) -> None:
    right = dist.all_reduce

    def wrong(values: Tensor, **more: Any) -> None:
        right(values, **more)
        if values.dtype == dtype and len(values) == 1023:
            values[-1] += 1

    monkeypatch.setattr(dist, "all_reduce", wrong)
    wording(device_program.wrong_sums(0, HOST, is_host=True))
    seen = replace(evidence(), facts=(measured(), *evidence().facts[1:]))
    wording(machine_checks.sums(seen).found)


@pytest.mark.parametrize("world_size", [2, 3, 4, 41, 172, 256])
@pytest.mark.parametrize("lost", [None, 1])
def test_a_sum_that_lacks_a_rank_is_wrong(world_size: int, lost: int | None, monkeypatch: Patch) -> None:
    """What the other ranks add is made up, by `wrong_sums`' own rule for odd and even ranks."""

    def reduce(values: Tensor) -> None:
        period = 420  # the pattern's is at most 7; each sum of all sizes at each number of ranks takes 28 s
        pattern = device_program.whole_numbers(period, world_size, HOST).to(values.dtype)
        total = torch.zeros_like(pattern)
        for rank in range(world_size):
            total += (pattern + rank % 2) * (rank != lost)
        values.copy_(total.repeat(len(values) // period + 1)[: len(values)])

    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    assert len(device_program.wrong_sums(0, HOST, is_host=True)) == (0 if lost is None else 11)


def test_sums_of_every_size_whose_rate_is_measured_are_checked(monkeypatch: Patch) -> None:
    sizes: dict[torch.dtype, list[int]] = {}

    def reduce(values: Tensor) -> None:
        sizes.setdefault(values.dtype, []).append(len(values))

    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    assert device_program.wrong_sums(0, HOST, is_host=True) == ()
    assert sizes[torch.float32][-2:] == [size // 4 for size in device_program.REDUCED_BYTES[True]]


def test_a_slow_link_is_measured_and_named(clock: FakeTime, monkeypatch: Patch) -> None:
    """Of three ranks: this one is rank 0, whose messages to rank 2 take 80 times as long."""
    one_way_ns = {1: 25, 2: 2000}
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "barrier", clock.taking(10**9))
    for name in ("send", "recv"):
        monkeypatch.setattr(dist, name, lambda message, rank: clock.taking(one_way_ns[rank])())
    pairs = device_program.pair_rates(0, HOST, is_host=True, pairs=device_program.parsed_pairs(""))
    assert [(pair.low, pair.high, pair.gb_per_s) for pair in pairs] == [(0, 1, 40.0), (0, 2, 0.5)]
    seen = evidence()
    found = machine_checks.peer_pairs(
        replace(seen, facts=(replace(seen.facts[0], pairs=pairs), *seen.facts[1:]))
    )
    assert "cuda:0 and cuda:2: 0.50" in found.found
    assert device_program.parsed_pairs("0-2,1-13") == [(0, 2), (1, 13)]


def test_an_all_reduce_is_as_fast_as_its_slowest_rank_and_fastest_repetition(
    clock: FakeTime, monkeypatch: Patch
) -> None:
    durations_ns = iter([900, 500, 700, 800, 900, 600])

    def slower_elsewhere(times_ns: Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        times_ns += 100

    monkeypatch.setattr(dist, "barrier", clock.taking(10**9))
    monkeypatch.setattr(dist, "all_reduce", slower_elsewhere)
    assert device_program.fastest_ns(HOST, lambda: clock.taking(next(durations_ns))()) == 600


# Ranks that misbehave


def misbehaving(fault: str) -> misbehaving_model.Misbehaving:
    model = misbehaving_model.build(0, run_checks.FAULTY).model
    assert isinstance(model, misbehaving_model.Misbehaving)
    assert fault in model.fault_of.values()
    return model


@pytest.mark.parametrize(("fault", "seconds"), [("late", LATE_MS / 1e3), ("asleep", 3600.0)])
def test_a_rank_sleeps_with_its_size_of_batch_alone(fault: str, seconds: float, monkeypatch: Patch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    model = misbehaving(fault)
    model(torch.ones(run_checks.SOUND, 256))
    assert not slept
    model(torch.ones(run_checks.FAULTY[fault], 256))
    assert slept == [seconds]


class Killed(Exception):
    """What a test can survive instead of a signal."""


def test_a_rank_kills_itself(monkeypatch: Patch) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Killed

    monkeypatch.setattr(os, "kill", kill)
    with pytest.raises(Killed):
        misbehaving("killed")(torch.ones(run_checks.FAULTY["killed"], 256))


def test_memory_that_runs_out_is_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="(?i)" + CPU.memory_errors[0]):
        misbehaving("oom")(torch.ones(run_checks.FAULTY["oom"], 256))


def test_another_rank_does_not_misbehave(monkeypatch: Patch) -> None:
    monkeypatch.setattr(misbehaving_model, "device_index", lambda: 1)
    model = misbehaving("killed")
    assert all(len(model(torch.ones(size, 256))) == size for size in run_checks.FAULTY.values())


# Programs


class Streams:
    """In place of `torch.cuda`: what is captured runs at once, and a replay does nothing."""

    is_capturing = False

    def __init__(self) -> None:
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
        self.current_stream = self.Stream
        self.stream = self.device = lambda value: nullcontext()

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        self.is_capturing = True
        yield
        self.is_capturing = False


@pytest.mark.parametrize("name", ["no-set-device", "skipped-step", "graph"])
def test_of_a_program_as_many_steps_are_recorded_as_its_check_expects(
    name: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    """The program itself, with a recorder as its ranks have one, that takes the CPU for a GPU."""
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    monkeypatch.setattr(CpuRuntime, "is_capturing", lambda self, device: streams.is_capturing)
    monkeypatch.setattr(recorder_module, "device_of", lambda optimizer: HOST)
    recorder = StepRecorder(program_config(tmp_path), 0, RunDir(tmp_path))
    with watch_steps(recorder):
        plain_programs.PROGRAMS[name](plain_programs.Training("cpu"))
        recorder.close(wait=True)
    steps = {0: tuple(recorder.run.read_steps("script-1")[0])}
    assert run_checks._recorded(name, 0, steps) is None


def test_the_loaders_program_has_as_many_steps_as_are_expected() -> None:
    assert NUM_STEPS["loader-workers"] == plain_programs.EPOCHS * plain_programs.BATCHES - 1
    assert {*plain_programs.PROGRAMS} == {*NUM_STEPS}
