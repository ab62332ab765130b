"""What is measured in a block of steps on a GPU, and the largest batch that GPUs hold."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gpurun.launcher.compare.figures.ranks import rank_figures
from gpurun.launcher.compare.figures.recorded import MeasuredVariant
from gpurun.launcher.compare.notes import full_memory
from gpurun.launcher.machine.gpus import nvml as driver
from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.report.metrics import METRICS
from gpurun.launcher.run import max_batch
from gpurun.launcher.run.max_batch import MaxBatchSearch, Place
from gpurun.launcher.rundir.files import RunDir, read_lines
from gpurun.launcher.rundir.records import (
    Attempt,
    GpuLoad,
    MaxBatchConfig,
    RoundTime,
    StepRecord,
    VariantConfig,
    VariantFacts,
    VariantStatus,
)
from gpurun.launcher.worker.accelerators.clock import HostClock
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.base.process_group import Alone
from gpurun.launcher.worker.meters.gpu_load import GpuMeter, LoadMeter
from gpurun.launcher.worker.strategies.dp import Single
from gpurun.launcher.worker.training import max_batch_attempts
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.timed_rounds import TimedRounds, TraceRequests, load_of
from gpurun.launcher.worker.training.trainer import Trainer, new_scaler
from tests.unit.gpu.fake_cuda import FakeCuda, Stream, fake_cuda, launch  # noqa: F401 - a fixture
from tests.unit.gpu.test_drivers import spec_of
from tests.unit.plan.machines import FakeGpu, FakeMachine, planned
from tests.wording import Wording

# 8, 9, 10, 12: what a block's GPUs did


class Gpu:
    """A GPU whose every figure is set by the test."""

    def __init__(self) -> None:
        self.energy_mj, self.hot_ns, self.now_ns = 1000, 0, 0

    def sensors(self) -> Sensors:
        return Sensors(
            energy_mj=lambda: self.energy_mj,
            hot_ns=lambda: self.hot_ns,
            mean_clock_mhz=lambda since_us: 1500.0,
        )


def meter_of(gpus: Sequence[Gpu]) -> LoadMeter:
    meters = [
        GpuMeter(CudaRuntime(), torch.device("cuda", index), gpu.sensors(), now_ns=lambda: gpus[0].now_ns)
        for index, gpu in enumerate(gpus)
    ]
    return LoadMeter(torch.device("cuda", 0), meters)


def test_peaks_and_heat_are_those_of_every_gpu_of_the_rank(cuda: FakeCuda) -> None:
    gpus = [Gpu(), Gpu()]
    meter = meter_of(gpus)
    cuda.peaks = {0: 7, 1: 7}
    meter.clear()
    assert cuda.peaks == {0: 0, 1: 0}
    with meter.counting():
        gpus[0].now_ns += 1_000_000_000
        gpus[1].hot_ns += 300_000_000
        cuda.peaks = {0: 10, 1: 30}
    first, second = meter.loads()
    assert (first.peak_bytes, second.peak_bytes, meter.peak_bytes()) == (10, 30, 30)
    assert (first.throttled, second.throttled) == (None, "too hot")
    assert first.sm_clock_mhz == 1500.0


@pytest.mark.parametrize(
    ("strategy", "devices", "rank", "own"),
    [
        ("dp", ("cuda:0", "cuda:1"), 0, [0, 1]),
        ("ddp", ("cuda:0", "cuda:0"), 1, [0]),  # each process sees its own GPU only
        ("dp", ("cuda:1", "cuda:1"), 0, [1]),  # one GPU that is listed twice
        ("ddp", ("cpu", "cpu"), 1, []),
    ],
)
def test_the_meter_is_that_of_the_ranks_own_gpus(
    strategy: str, devices: tuple[str, ...], rank: int, own: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "load_nvml", lambda: None)
    meter = load_of(launch(Path(), strategy=strategy, devices=devices), rank)
    assert [gpu.device.index for gpu in meter.gpus] == own


def test_heat_that_lasts_a_moment_is_not_reported(cuda: FakeCuda) -> None:
    gpu = Gpu()
    meter = meter_of([gpu])
    meter.clear()
    with meter.counting():
        gpu.now_ns += 1_000_000_000
        gpu.hot_ns += 5_000_000
    assert meter.loads()[0].throttled is None


def test_energy_is_that_of_the_timed_part_alone(cuda: FakeCuda) -> None:
    gpu = Gpu()
    meter = meter_of([gpu])
    meter.clear()
    for _ in range(2):
        gpu.energy_mj += 5000  # inputs are drawn
        with meter.counting():
            gpu.energy_mj += 200_000
            gpu.now_ns += 1_000_000_000
    assert meter.energy_mj() == 400_000
    assert meter.loads()[0].power_w == 200.0
    gpu.energy_mj = 0  # the driver was loaded again
    with meter.counting():
        gpu.energy_mj = 10
    assert meter.energy_mj() == 400_010


def test_without_all_counters_there_is_no_energy(cuda: FakeCuda) -> None:
    meter = meter_of([Gpu(), Gpu()])
    meter.gpus[1].sensors = Sensors(power_w=lambda: 70.0)
    meter.clear()
    with meter.counting():
        meter.sample()
    assert meter.energy_mj() is None
    assert meter.loads()[1].power_w == 70.0


def test_allocations_that_had_to_wait_are_counted(cuda: FakeCuda) -> None:
    """torch 2.13, torch/cuda/memory.py:231, `memory_stats`: "num_alloc_retries"."""
    meter = meter_of([Gpu()])
    cuda.retries[0] = 3
    meter.clear()
    with meter.counting():
        cuda.retries[0] = 5
    assert meter.loads()[0].alloc_retries == 2


# 8 and 12 in the report


def recorded(
    strategy: str, devices: tuple[str, ...], loads: Mapping[int, tuple[GpuLoad, ...]]
) -> MeasuredVariant:
    variant = Variant(
        id="v", strategy=strategy, devices=devices, split=(8,) * len(devices), split_name="even", varied={},
        workload="gpt", global_batch=16,
    )  # fmt: skip
    steps = {
        rank: [
            StepRecord("l", 1, 0, i, "timed", 1_000_000, {}, 5, gpus=() if i % 2 else own) for i in range(4)
        ]
        for rank, own in loads.items()
    }
    timed = (RoundTime("l", 1, 1_000_000),)
    return MeasuredVariant(variant, "g", VariantStatus("ok"), True, VariantFacts(), steps, timed, (), {})


def test_each_gpu_of_dp_has_its_own_figures(tmp_path: Path, wording: Wording) -> None:
    first, second = GpuLoad(3 << 30, 1700.0, 400.0), GpuLoad(1 << 30, 1500.0, 300.0, "too hot", 1)
    measured = recorded("dp", ("cuda:0", "cuda:1"), {0: (first, second)})
    ranks = rank_figures(RunDir(tmp_path), measured, None)
    assert [rank.peak_gib for rank in ranks] == [3.0, 1.0]
    assert [rank.throttled for rank in ranks] == [None, "too hot"]
    assert [(rank.sm_clock_mhz, rank.power_w) for rank in ranks] == [(1700.0, 400.0), (1500.0, 300.0)]
    (found,) = full_memory(ranks)
    wording(found.text)


def test_a_rank_of_ddp_has_the_figures_of_its_gpu(tmp_path: Path) -> None:
    loads = {rank: (GpuLoad(rank << 30, 1000.0 + rank),) for rank in (0, 1)}
    ranks = rank_figures(RunDir(tmp_path), recorded("ddp", ("cuda:0", "cuda:1"), loads), None)
    assert [(rank.peak_gib, rank.sm_clock_mhz) for rank in ranks] == [(0.0, 1000.0), (1.0, 1001.0)]


def test_clock_and_power_are_columns_where_they_are_known(tmp_path: Path) -> None:
    loads = {0: (GpuLoad(1, 1700.0, 400.0), GpuLoad(1, 1500.0, 300.0))}
    ranks = rank_figures(RunDir(tmp_path), recorded("dp", ("cuda:0", "cuda:1"), loads), None)
    result = cast(Any, SimpleNamespace(ranks=ranks))
    by_key = {metric.key: metric for metric in METRICS}
    assert by_key["sm_clock_mhz"].value(result) == 1500.0
    assert by_key["power_w"].value(result) == 700.0


# 9 and the rest of the timing: as training is


class Steps:
    """A trainer on a GPU; notes what was drawn and what ran."""

    def __init__(self, dataset: object = None) -> None:
        self.said: list[str] = []
        self.workload = SimpleNamespace(dataset=dataset)

    def prepare(self, variant: VariantConfig, step: int) -> Any:
        self.said.append(f"draw {step}")
        return SimpleNamespace(nbytes=0 if self.workload.dataset else 1 << 20, step=step)

    def step(self, step_input: Any, clock: Any, sync: bool = True) -> None:
        self.said.append(f"step {step_input.step}" + (" untimed" if isinstance(clock, NoClock) else ""))


def bench_on_gpu(directory: Path, trainer: Steps) -> TimedRounds:
    config = launch(directory, devices=("cuda:0", "cuda:0"))
    times = itertools.count(0, 1000)

    class Sampled(LoadMeter):
        def sample(self) -> None:
            trainer.said.append("sample")

        @contextmanager
        def counting(self) -> Iterator[None]:
            trainer.said.append("count")
            yield
            trainer.said.append("counted")

    class Said(HostClock):
        """Its read waits for the device, which is idle from then on."""

        def read(self) -> Any:
            trainer.said.append("read")
            return super().read()

    device, requests = torch.device("cuda", 0), TraceRequests(config, 0, None)
    clock = Said(now_ns=lambda: next(times))
    return TimedRounds(
        config, cast(Any, trainer), clock, Alone(), Journal(config, 0), device, requests, Sampled(device)
    )


def test_inputs_of_a_gpu_are_a_pool_and_a_block_is_never_interrupted(tmp_path: Path, cuda: FakeCuda) -> None:
    trainer = Steps()
    made = bench_on_gpu(tmp_path, trainer)
    made.prefetch["a"] = 2
    (variant,) = made.config.variants
    assert len(made.run_steps(variant, 3)) == 3
    first = ["draw 0", "draw 1", "step 0 untimed", "count", "step 1", "step 0", "step 1"]
    first += ["sample", "read", "counted"]
    assert trainer.said == first
    trainer.said.clear()
    made.run_steps(variant, 2)
    assert trainer.said == ["step 0 untimed", "count", "step 1", "step 0", "sample", "read", "counted"]


def test_a_dataset_is_read_on_and_no_sample_twice(tmp_path: Path, cuda: FakeCuda) -> None:
    trainer = Steps(dataset=[1])
    made = bench_on_gpu(tmp_path, trainer)
    (variant,) = made.config.variants
    made.run_steps(variant, 2)
    made.run_steps(variant, 2)
    assert [word for word in trainer.said if word.startswith("draw")] == [f"draw {i}" for i in range(6)]


def test_a_block_on_a_gpu_lasts_a_second() -> None:
    machine = FakeMachine(8, (FakeGpu("GPU-a"), FakeGpu("GPU-b")))
    for devices, block_ms in (("cuda", 1000.0), ("cpu:2", 200.0)):
        _, configs = planned(spec_of(f"devices: {devices}\n"), machine)
        assert configs[0].block_ms == block_ms


# 11: the largest batch


def searching(directory: Path, devices: str, strategies: str) -> list[list[str]]:
    """The devices of each process that tries batches, of each search."""
    spec = spec_of(f"devices: {devices}\ncompare: {{strategy: [{strategies}]}}\n")
    machine: Any = SimpleNamespace(
        memory_available_gib=8,
        cpu_cores=4,
        free_cores=None,
        gpus=(FakeGpu("GPU-a"), FakeGpu("GPU-b")),
        notes=(),
    )
    names = ("cuda:0", "cuda:1") if devices == "cuda" else ("cpu:0", "cpu:1")
    found = []
    for together in max_batch._ways(spec, names, 0):
        search = MaxBatchSearch(
            spec, machine, machine, directory, directory, names, "fp32", {}, Place(0, 0, 2), together
        )
        configs = [search.config(index, 0, None) for index in range(search.num_processes)]
        found.append([" ".join(config.devices) for config in configs])
    return found


def test_for_dp_all_gpus_are_tried_in_one_process(tmp_path: Path) -> None:
    """The first one also holds the outputs of all, which no GPU alone would show."""
    apart, together = ["cuda:0", "cuda:0"], ["cuda:0 cuda:1"]
    assert searching(tmp_path, "cuda", "ddp, single") == [apart]
    assert searching(tmp_path, "cuda", "dp") == [together]
    assert searching(tmp_path, "cuda", "dp, ddp") == [apart, together]
    assert searching(tmp_path, "cpu:2", "dp") == [["cpu", "cpu"]]


def test_a_step_that_runs_out_of_memory_leaves_no_half_made_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch/optim/adam.py:139, `_init_group`: a state that isn't empty is taken to have all its tensors."""
    trainer = Trainer.__new__(Trainer)
    trainer.model, trainer.precision = torch.nn.Linear(2, 2), PRECISIONS["fp16"]
    trainer.strategy = Single(trainer.model, torch.device("cpu"))
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
    trainer.scaler = new_scaler(trainer.device, trainer.precision)

    def step() -> None:
        trainer.scaler.scale(trainer.model(torch.ones(1, 2)).sum()).backward()
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    def full(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", full)
        with pytest.raises(torch.OutOfMemoryError):
            step()
    before = trainer.model.weight.detach().clone()
    trainer.abandon_step()
    step()
    assert all(len(state) == 3 for state in trainer.optimizer.state.values())
    gradient = trainer.model.weight.grad
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(2, 2))  # unscaled
    assert not torch.equal(trainer.model.weight, before)


def test_a_batch_that_fails_otherwise_is_an_upper_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """As "CUDA error: invalid configuration argument", after which the process can't use its GPU any more."""
    config = MaxBatchConfig(
        workload="mlp", job_dir=".", params={}, devices=("cpu",), index=0, num_devices=1, precision="fp32",
        accumulate=1, keeps_gradients=False, gradients_are_views=False, seed=0, threads=1, limit_bytes=None,
        attempts=str(tmp_path / "0.jsonl"), fits=0, fails=None,
    )  # fmt: skip

    def attempt(trainer: Any, config: Any, batch: int) -> bool:
        if batch > 5:
            raise RuntimeError("CUDA error: invalid configuration argument\nmore")
        return True

    monkeypatch.setattr(max_batch_attempts, "attempt", attempt)
    max_batch_attempts.search(config)
    attempts = list(read_lines(tmp_path / "0.jsonl", Attempt))
    assert attempts[-1] == Attempt("fails", 8, "CUDA error: invalid configuration argument")
    assert max_batch.bounds(attempts) == (4, 8)
    max_batch_attempts.search(replace(config, fits=4, fails=8))  # a fresh process goes on from there
    max_batch_attempts.search(replace(config, fits=4, fails=6))
    attempts = list(read_lines(tmp_path / "0.jsonl", Attempt))
    assert (attempts[-1].outcome, max_batch.bounds(attempts)) == ("done", (5, 6))
    nothing = cast(Any, None)
    place = Place(0, 0, 1)
    search = MaxBatchSearch(nothing, nothing, nothing, tmp_path, tmp_path, ("cpu:0",), "fp32", {}, place)
    room = search.found(0)
    wording(str(room))
    monkeypatch.setattr(max_batch_attempts, "attempt", lambda *_: attempt(None, None, 9))
    with pytest.raises(RuntimeError, match="invalid configuration"):  # not even the first batch works
        max_batch_attempts.search(replace(config, attempts=str(tmp_path / "1.jsonl")))
