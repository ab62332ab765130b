"""What a rank does with its GPUs, in blocks of steps and around them, by a `torch.cuda` after torch's."""

import ctypes
import gc
import inspect
import itertools
import json
import math
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity

from gpurun.launcher.compare.figures.ranks import rank_figures
from gpurun.launcher.compare.figures.recorded import MeasuredVariant, typical_ms
from gpurun.launcher.compare.notes import full_memory
from gpurun.launcher.inspect.hang_diagnosis import diagnose, find_hang
from gpurun.launcher.inspect.snapshot import (
    CalledCollective,
    Gap,
    RankSnapshot,
    ask_history,
    find_gap,
    find_pending,
    last_ones,
    parse_history,
)
from gpurun.launcher.inspect.stacks import Activity, Frame
from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.gpus import nvml as driver
from gpurun.launcher.machine.gpus.gpu import Gpus, Sensors
from gpurun.launcher.machine.gpus.nvml import NvmlSensors
from gpurun.launcher.machine.resource_limits import remedy
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.report.metrics import METRICS
from gpurun.launcher.run import max_batch
from gpurun.launcher.run.max_batch import MaxBatchSearch, NodeDevices
from gpurun.launcher.rundir.control import ControlDir, RankState, socket_name
from gpurun.launcher.rundir.files import RunDir, read_lines
from gpurun.launcher.rundir.records import (
    Attempt,
    GpuLoad,
    ProfileConfig,
    RoundTime,
    StepRecord,
    VariantConfig,
    VariantFacts,
    VariantStatus,
)
from gpurun.launcher.units import GIB
from gpurun.launcher.worker import profiling
from gpurun.launcher.worker.accelerators.clock import HostClock
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base import process_group
from gpurun.launcher.worker.base.failure import is_out_of_memory, is_secondary
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.nested import join_rows, tensors_of
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.meters import cpu_time
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import GpuMeter, LoadMeter
from gpurun.launcher.worker.micro_benchmark import ProbeRounds, site_of
from gpurun.launcher.worker.strategies import base, ddp, dp
from gpurun.launcher.worker.strategies.ddp import Ddp
from gpurun.launcher.worker.strategies.dp import Single
from gpurun.launcher.worker.training import max_batch_attempts
from gpurun.launcher.worker.training.balanced_split import TimedRanks
from gpurun.launcher.worker.training.batches import BatchSource, DatasetSource, Layout, LoadedStep, MicroBatch
from gpurun.launcher.worker.training.forward_backward import NoClock, forward_backward, loss_of, loss_weight
from gpurun.launcher.worker.training.timed_rounds import TimedRounds, TraceRequests, load_of
from gpurun.launcher.worker.training.trainer import Trainer, new_scaler
from gpurun.workloads.base import Workload
from gpurun.workloads.micro_benchmarks import BenchmarkCase, Cases, Probe
from tests.gpu.machine import why_none, why_unusable
from tests.launches import SETTINGS, max_batch_config
from tests.unit.gpu.fake_cuda import FakeCuda, Stream, fake_cuda, launch  # noqa: F401 - a fixture
from tests.unit.gpu.test_drivers import spec_of
from tests.unit.plan.machines import FakeGpu, FakeMachine, planned
from tests.unit.worker.test_program_steps import FakeProfiler
from tests.wording import Wording

T = TypeVar("T")

# 6: the two ways of asking for TF32


@pytest.mark.parametrize(("name", "expected"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_all_readers_of_tf32_agree(name: str, expected: bool) -> None:
    """After `fp32_precision` alone, the old properties raise: torch 2.13, aten/src/ATen/Context.cpp:223,
    `allowTF32CuDNN`, 359, `allowTF32CuBLAS`, and 382, `float32MatmulPrecision`."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        PRECISIONS[name].apply()
        assert torch.backends.cudnn.allow_tf32 is expected
        assert torch.backends.cuda.matmul.allow_tf32 is expected
        assert torch.get_float32_matmul_precision() == ("high" if expected else "highest")
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if expected else "ieee")
        with torch.backends.cudnn.flags(enabled=True):
            pass
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# 13: traced steps run as timed ones


def test_traced_steps_synchronize_once_at_the_end(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.allocated = {0: 1, 1: 2}
    made: list[str] = []
    monkeypatch.setattr(profiling, "new_profiler", lambda config, all_threads: FakeProfiler(made))
    monkeypatch.setattr(cuda, "synchronize", lambda device=None: made.append(f"wait {cuda.index(device)}"))
    profiling.capture(lambda: made.append("step"), ProfileConfig(steps=3), tmp_path / "t.json")
    starting = ["prepare_trace", "step", "wait 1", "wait 0", "start_trace"]
    assert made == [*starting, *["step"] * 3, "wait 1", "wait 0", "stop_trace", "export_chrome_trace"]


# 14: NCCL's flight recorder


def dump(backend: str, last: int) -> bytes:
    entry = (
        '{"collective_seq_id": %d, "process_group": ["0", "default_pg"], "profiling_name": "%s:all_reduce"}'
    )
    entries = ", ".join(entry % (number, backend) for number in range(1, last + 1))
    return f'{{"entries": [{entries}]}}'.encode()


def test_a_rank_that_nccl_waits_for_is_found() -> None:
    """Both backends are one process group, "cpu:gloo,cuda:nccl", and each counts for itself."""
    histories = {
        rank: (*parse_history(dump("gloo", 5)), *parse_history(dump("nccl", last)))
        for rank, last in ((0, 12), (1, 11))
    }
    gap = find_gap(histories)
    assert gap is not None
    assert (gap.collective, gap.waiting, gap.missing) == (
        CalledCollective("0", 12, "all_reduce", "nccl"),
        (0,),
        (1,),
    )
    assert [(each.backend, each.seq) for each in last_ones(histories[0])] == [("gloo", 5), ("nccl", 12)]
    same = {rank: parse_history(dump("gloo", 5)) for rank in (0, 1)}
    assert find_gap(same) is None


def test_both_recorders_are_asked(tmp_path: Path) -> None:
    """torch registers "fr_trace_json" (Handlers.cpp:70) and, with NCCL, "dump_nccl_trace_json"
    (FlightRecorderCuda.cpp:63); a build without it answers 404."""
    answers = {"/handler/fr_trace_json": dump("gloo", 1), "/handler/dump_nccl_trace_json": dump("nccl", 2)}

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found = answers.get(self.path, b"Handler not found")
            self.send_response(200)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_request(self, *_: object) -> None:
            return

    with UnixStreamServer(str(tmp_path / socket_name(0)), Answers) as server, ControlDir(tmp_path) as control:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            me = RankState(0, os.getpid(), 1, 0)
            assert [(each.backend, each.seq) for each in ask_history(control, me) or ()] == [
                ("gloo", 1),
                ("nccl", 1),
                ("nccl", 2),
            ]
            del answers["/handler/dump_nccl_trace_json"]
            assert [collective.backend for collective in ask_history(control, me) or ()] == ["gloo"]
            assert ask_history(control, replace(me, pid=1)) is None  # another process listens there
            answers.clear()  # a torch without recorders
            assert ask_history(control, me) is None
        finally:
            server.shutdown()


# 15: replicas are timed on their own device


class Watched(CudaRuntime):
    """Notes which device is the current one while a replica runs; work itself is the CPU's."""

    inside: list[str]

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        self.inside.append(str(device))
        yield
        self.inside.append("out")

    def clock(self, device: torch.device) -> HostClock:
        return HostClock()


def test_a_replica_is_timed_with_its_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Watched()
    runtime.inside = []
    monkeypatch.setattr(dp, "runtime_of", lambda device: runtime)

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runtime.inside.append("runs")
            return super().forward(x)

    replica = dp.replica_of(Model(2, 2), 1, torch.ones(3, 2), torch.device("cpu"))
    assert dp.timed_ms(replica, torch.device("cuda", 1)) > 0
    assert runtime.inside == ["cuda:1", "runs", "out"]


def test_a_replica_whose_copy_does_not_fit_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dp.replica_of

    def second_is_full(network: nn.Module, index: int, *rest: Any) -> Any:
        if index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(network, index, *rest)

    monkeypatch.setattr(dp, "replica_of", second_is_full)
    three = dp.Dp(nn.Linear(2, 2), [torch.device("cpu")] * 3)
    times_ms = three.apply_times_ms(torch.ones(4, 2), (2, 2, 0))
    assert (times_ms[0] > 0, times_ms[1:]) == (True, [math.inf, 0.0])


# 16: the process group


def test_a_group_of_gpus_connects_at_once_and_waits_as_long_as_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch/distributed/distributed_c10d.py:2335, `eager_connect_single_device`: with a `device_id`, NCCL
    connects at once. Its own limit is 10 minutes."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(process_group, "open_store", lambda *arguments: None)
    monkeypatch.setattr(process_group, "stay_on_this_machine", lambda: None)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **rest: asked.append({"backend": backend, **rest}),
    )
    chosen = {"algorithm": "tree", "protocol": "ll", "channels": 4}
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"):
        monkeypatch.setenv(name, "unset")
    shared = launch(
        tmp_path, devices=("cuda:0", "cuda:0"), backend="nccl", collective_timeout_s=2100.0, nccl=chosen
    )
    for config in (shared, replace(shared, devices=("cpu", "cpu"), backend="gloo")):
        process_group.init_group(config, 0)
    on_gpu, on_cpu = asked
    assert (on_gpu["backend"], on_gpu["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 0))
    assert on_gpu["timeout"].total_seconds() == 2100
    assert (on_cpu["backend"], on_cpu["device_id"]) == ("gloo", None)
    assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("allreduce:tree,tree", "ll")
    assert os.environ["NCCL_MIN_NCHANNELS"] == os.environ["NCCL_MAX_NCHANNELS"] == "4"


# 17: memory that runs out in a collective


class FullTrainer:
    """A trainer whose step finds no memory."""

    workload = model = nn.Linear(1, 1)
    device = torch.device("cpu")

    def prepare(self, variant: VariantConfig, step: int) -> Any:
        return type("Input", (), {"nbytes": 1})()

    def step(self, *arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def abandon_step(self) -> None:
        return


class Clock:
    def start(self) -> None:
        return


class Waiting:
    """Ranks of which the others sit in a collective: to be gathered with them would hang."""

    def __init__(self) -> None:
        self.gathered = 0

    def barrier(self) -> None:
        return

    def gather(self, value: float) -> list[float]:
        self.gathered += 1
        return [value]


def test_memory_that_runs_out_while_others_wait_in_a_collective_ends_the_rank() -> None:
    peers = Waiting()
    variant = VariantConfig("a", (4, 4), 1)
    ranks = TimedRanks(variant, cast(Any, FullTrainer()), cast(Any, Clock()), cast(Any, peers))
    with pytest.raises(torch.OutOfMemoryError):
        ranks.whole_ms((4, 4), 1)
    assert peers.gathered == 0
    assert ranks.own_ms((4, 4), 1) == [math.inf]  # without communication no one waits


# 22: torch's own defaults


def test_dp_on_unlike_gpus_prints_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13, torch/nn/parallel/data_parallel.py:24: `_check_balance` warns of unlike GPUs."""
    advice = "\n    There is an imbalance between your GPUs. You may want to exclude GPU 1"

    def unlike(self: Any, module: Any, device_ids: Any = None) -> None:
        warnings.warn(advice, stacklevel=2)

    monkeypatch.setattr(DataParallel, "__init__", unlike)
    dp.stock(nn.Linear(1, 1), [torch.device("cuda", 0), torch.device("cuda", 1)])


@pytest.mark.parametrize(("key", "searches"), [("", False), ("cudnn_benchmark: true\n", True)])
def test_cudnn_searches_only_where_the_job_says_so(
    key: str, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the job's key to `torch.backends`: a trainer on the CPU asks the runtime of GPUs."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not searches)
    monkeypatch.setattr(CpuRuntime, "set_convolution_search", CudaRuntime.set_convolution_search)
    _, configs = planned(spec_of(f"devices: cpu:1\nstrategy: dp\n{key}"), FakeMachine(8))
    perceptron = Workload(
        nn.Linear(4, 1), lambda size, _: (torch.ones(size, 4), torch.ones(size, 1)), F.mse_loss
    )
    Trainer(perceptron, configs[0], 0)
    assert torch.backends.cudnn.benchmark is searches


def ddp_of(key: str) -> Ddp:
    """Rank 0's replica in a job with that key."""
    _, configs = planned(spec_of(f"devices: cpu:2\nstrategy: ddp\n{key}"), FakeMachine(8))
    return Ddp.of(nn.Linear(1, 1), configs[0], 0, base.Hints())


def test_ddps_options_are_torchs_unless_the_job_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    own = inspect.signature(DistributedDataParallel).parameters
    given: dict[str, Any] = {}
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **options: given.update(options))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    ddp_of("")
    ours = {name: value for name, value in given.items() if own[name].default != value}
    assert ours == {}
    ddp_of("gradient_as_bucket_view: true\n")
    assert given["gradient_as_bucket_view"] is True


# What is measured in a block of steps on a GPU, and the largest batch that GPUs hold


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
    return MeasuredVariant(variant, "g", VariantStatus("ok"), True, VariantFacts(), steps, timed, {})


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


@pytest.mark.parametrize(("device", "ms"), [("cuda:0", 1.0), ("cpu:0", 0.6)])
def test_a_gpus_step_counts_as_it_is_while_its_rank_waits_for_a_core(device: str, ms: float) -> None:
    waiting = StepRecord("l", 1, 0, 0, "timed", 1_000_000, {}, None, queue_ns=400_000, others_ns=500_000)
    measured = replace(recorded("single", (device,), {}), steps={0: [waiting]})
    assert typical_ms(measured)[0] == pytest.approx(ms)


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

    def set_process_state(self) -> None:
        pass

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
        config, cast(Any, trainer), clock, Peers(), Journal(config, 0), device, requests, Sampled(device)
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
            spec, machine, machine, directory, directory, names, SETTINGS, NodeDevices(0, 0, 2), together
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


@pytest.mark.parametrize(
    ("names", "together", "limit_gib"),
    [
        (("cuda:0", "cuda:1"), False, None),
        (("cuda:0", "cuda:0"), False, 0.8 * 64 / 2),
        (("cuda:1", "cuda:0", "cuda:0"), False, 0.8 * 64 / 2),
        (("cuda:0", "cuda:0"), True, None),
        (("cuda:2", "cuda:2"), False, None),
        (("cpu:0", "cpu:1"), False, 0.8 * 8 / 2),
    ],
)
def test_batches_are_tried_in_a_part_of_the_free_memory_that_devices_share(
    names: tuple[str, ...], together: bool, limit_gib: float | None, tmp_path: Path
) -> None:
    """Others hold 16 of 80 GiB; of the third GPU the driver says nothing."""
    gpus = [SimpleNamespace(memory_gib=memory_gib, used_gib=16) for memory_gib in (80, 80, None)]
    machine: Any = SimpleNamespace(memory_available_gib=8, cpu_cores=4, free_cores=None, gpus=gpus)
    search = MaxBatchSearch(
        spec_of("devices: cuda\n"),
        machine,
        machine,
        tmp_path,
        tmp_path,
        names,
        SETTINGS,
        NodeDevices(0, 0, 2),
        together,
    )
    expected = None if limit_gib is None else int(limit_gib * GIB)
    assert search.config(search.num_processes - 1, 0, None).limit_bytes == expected


def test_a_rank_of_a_shared_gpu_takes_no_more_of_it_than_its_part(cuda: FakeCuda) -> None:
    """torch/cuda/memory.py:176: a fraction of all of its memory, free or not, which is at most 1."""
    for num_bytes in (20 << 30, 99 << 30):
        CudaRuntime().limit_memory(torch.device("cuda:1"), num_bytes)
    assert cuda.fractions == [(1, 0.25), (1, 1.0)]


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
    config = max_batch_config(attempts=str(tmp_path / "0.jsonl"))

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
    place = NodeDevices(0, 0, 1)
    search = MaxBatchSearch(nothing, nothing, nothing, tmp_path, tmp_path, ("cpu:0",), SETTINGS, place)
    room = search.found(0)
    wording(str(room))
    monkeypatch.setattr(max_batch_attempts, "attempt", lambda *_: attempt(None, None, 9))
    with pytest.raises(RuntimeError, match="invalid configuration"):  # not even the first batch works
        max_batch_attempts.search(replace(config, attempts=str(tmp_path / "1.jsonl")))


# NCCL, pinned memory, dp's outputs, energy and clocks: with fakes that behave as torch 2.13 does


# 24: NCCL's errors


def nccl_error(code: str, last: str) -> RuntimeError:
    """torch/csrc/distributed/c10d/NCCLUtils.cpp:774, `getNcclErrorDetailStr`."""
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {code}\nLast error:\n{last}"
    )


FULL = "Error while creating shared memory segment /dev/shm/nccl-VPyhzw (size 9637888)"
SYSTEM = (
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
)


def test_a_rank_whose_own_system_call_failed_is_the_cause() -> None:
    assert not is_secondary(nccl_error(SYSTEM, FULL))
    assert is_secondary(nccl_error(SYSTEM, "Call to connect to 10.0.0.1<4000> failed : Connection refused"))
    remote = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    assert is_secondary(nccl_error(remote, "socketProgress: Connection closed by remote peer"))


@pytest.mark.parametrize("last", [FULL, f"{FULL}, error: No space left on device (28)"])
def test_nccls_full_shared_memory_has_its_remedy(last: str) -> None:
    assert "/dev/shm is full" in (remedy(f"{SYSTEM}\n{last}") or "")


# 25: a rank that has put nothing on its GPU yet


def test_no_peak_is_reset_before_cuda_is_initialized(cuda: FakeCuda) -> None:
    """torch/cuda/memory.py:396, `_cuda_resetPeakMemoryStats`: it is called without initializing anything, and
    c10's `assertValidDevice` refuses; torch/cuda/memory.py:354, `is_initialized`: statistics are empty."""
    cuda.initialized = False
    CudaRuntime().reset_peak(torch.device("cuda", 0))
    assert not cuda.initialized
    assert CudaRuntime().peak_bytes(torch.device("cuda", 0)) == 0
    assert CudaRuntime().alloc_retries(torch.device("cuda", 0)) == 0
    cuda.initialized, cuda.peaks = True, {0: 7}
    CudaRuntime().reset_peak(torch.device("cuda", 0))
    assert cuda.peaks == {0: 0}


# 26: own work without any communication


def test_a_step_without_synchronization_issues_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose memory runs out in it takes part in nothing any more; the others must not wait for it."""
    asked: list[Any] = []
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *arguments, **options: asked.append(arguments))
    layer = nn.Linear(2, 1)
    strategy = Ddp.__new__(Ddp)
    strategy.device, strategy.rank, strategy.world_size = torch.device("cpu"), 0, 2
    strategy.model = cast(Any, Unsynchronized(layer))
    counted = Workload(
        model=layer,
        batch=None,
        loss=lambda outputs, targets: outputs.mean(),
        dataset=[1],
        count=lambda targets: 3,
    )
    micro = MicroBatch(torch.ones(4, 2), torch.ones(4), (4,), (3,))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = LoadedStep((micro,), None)
    with strategy.alone():  # as `Trainer.step` does
        forward_backward(strategy, counted, PRECISIONS["fp32"], step, scaler, NoClock(), sync=False)
    assert asked == []
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.ones(1, 2))  # W·n/N is 1 where N = W·n
    forward_backward(strategy, counted, PRECISIONS["fp32"], step, scaler, NoClock(), sync=True)
    assert len(asked) == 2  # the total, and the buffers


class NoCopies(TorchFunctionMode):
    """Refuses what makes a tensor of a list: of a GPU's tensor it is copied there, and the host waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(isinstance(each, list) for each in args), func
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_the_losses_of_replicas() -> None:
    """Each has returned its own, and the second had no sample; they are weighted in full precision."""
    model, losses = (
        Workload(model=nn.Linear(1, 1), batch=None, loss=None, dataset=[1]),
        torch.tensor([1.001, float("nan"), 2.0]),
    )
    with NoCopies(), torch.autocast("cpu", torch.bfloat16):
        found = loss_of(model, losses, None, (3, 0, 1))
    assert float(found) == pytest.approx((3 * 1.001 + 2) / 4, rel=1e-6)


def test_the_host_does_not_wait_for_the_number_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of all ranks are added up on the GPU; a value on `meta` can't be looked at."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    strategy = Ddp.__new__(Ddp)
    strategy.device, strategy.rank, strategy.world_size = torch.device("cpu"), 0, 2
    assert strategy.total(3) == 6
    monkeypatch.setattr(base, "accelerator_of", lambda kind: SimpleNamespace(is_host=False))
    total = strategy.total(3)
    assert isinstance(total, Tensor)
    assert loss_weight("mean", 2, total, 2) == pytest.approx(4 / 6)

    layer = nn.Linear(2, 1, device="meta")
    strategy.model = cast(Any, Unsynchronized(layer))
    monkeypatch.setattr(strategy, "total", lambda count: total.to("meta"))
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    counted = Workload(
        model=layer, batch=None, loss=lambda outputs, targets: outputs.mean(), dataset=[1], count=lambda _: 3
    )
    micro = MicroBatch(torch.ones(4, 2, device="meta"), torch.ones(4), (4,), (3,))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    forward_backward(strategy, counted, PRECISIONS["fp32"], LoadedStep((micro,), None), scaler, NoClock())
    assert layer.weight.grad is not None


class Unsynchronized(nn.Module):
    """`DistributedDataParallel`, torch/nn/parallel/distributed.py:2382, `will_sync_module_buffers`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.require_forward_param_sync = module, True

    def forward(self, inputs: Tensor) -> Any:
        if self.require_forward_param_sync:
            dist.broadcast(inputs, src=0)  # torch's `_sync_buffers`
        return self.module(inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


# 27: what replicas may return


class FakeGather:
    """torch/nn/parallel/_functions.py:82, `Gather`: tensors only; makes a vector of scalars, and warns."""

    @staticmethod
    def apply(device: Any, dim: int, *inputs: Any) -> Tensor:
        assert all(isinstance(tensor, Tensor) for tensor in inputs)
        if all(tensor.dim() == 0 for tensor in inputs):
            warnings.warn("Was asked to gather along dimension 0, but all were scalars", stacklevel=2)
        return torch.cat(inputs, dim)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor
    name: str = "plain"


def test_dp_on_gpus_gathers_whatever_dp_on_cpus_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's `gather` calls `type(out)(map(...))` on a dataclass, and iterates over plain numbers."""
    monkeypatch.setattr(dp, "Gather", FakeGather)
    outputs = [
        {
            "out": Output(torch.full((n, 2), float(n)), torch.tensor(float(n))),
            "temperature": 0.5,
            "none": None,
        }
        for n in (3, 1)
    ]
    gathered = dp.StockDataParallel(nn.Identity()).gather(outputs, 0)
    expected = join_rows(outputs)
    assert gathered["temperature"] == 0.5
    assert gathered["out"].name == "plain"
    for ours, theirs in zip(tensors_of(gathered), tensors_of(expected), strict=True):
        assert torch.equal(ours, theirs)


# 28 and 30: page-locked memory


class Pinning:
    """Memory that is pinned, without CUDA: torch keeps a tensor's strides when it pins or copies it.

    Source: aten/src/ATen/native/Memory.cpp:58, `_pin_memory`: the storage of `storage().nbytes()` is copied
    by `computeStorageNbytes(sizes, strides)`; `empty_like` makes rows that lie next to each other.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: list[int] = []
        original = torch.empty_like

        def empty_like(tensor: Tensor, pin_memory: bool = False, **options: Any) -> Tensor:
            made = original(tensor, **options)
            if pin_memory:
                self.pinned.append(made.data_ptr())
            return made

        def pin_memory(tensor: Tensor) -> Tensor:
            made = tensor.new_empty(0).set_(
                tensor.new_empty(tensor.untyped_storage().nbytes()).untyped_storage(),
                0,
                tensor.size(),
                tensor.stride(),
            )
            self.pinned.append(made.data_ptr())
            return made.copy_(tensor)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)

    def holds(self, tensor: Tensor) -> bool:
        """Whether one call copies it to the GPU at once: pinned, and without gaps."""
        dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
        return tensor.data_ptr() in self.pinned and dense


def test_a_slice_is_pinned_without_its_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch whose samples don't lie next to each other, as `x.T` or `x[:, :-1]`."""
    pinning = Pinning(monkeypatch)
    drawn = torch.arange(40.0).view(8, 5)

    workload = Workload(
        model=nn.Linear(4, 1),
        loss=nn.functional.mse_loss,
        batch=lambda size, generator: (drawn[:, :-1], drawn[:, 1:]),
    )
    source = BatchSource(workload, 0, Layout((0,), PRECISIONS["fp32"], pin=True))
    (micro,) = source.prepare(variant_of(8), 0).micro_batches
    assert pinning.holds(micro.inputs)
    assert pinning.holds(micro.targets)
    assert torch.equal(micro.inputs, drawn[:, :-1])


def variant_of(*split: int) -> Any:
    return SimpleNamespace(id="a", split=split, accumulate=1, sync_every=None)


@pytest.mark.parametrize(("precision", "channels_last"), [("fp64", False), ("fp32", True)])
def test_a_dataset_is_arranged_before_it_is_pinned(
    precision: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The DataLoader pins what `collate_fn` gives it; a later copy is made in pageable memory."""
    pinning = Pinning(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    images = [(torch.full((3, 2, 2), float(i)), i) for i in range(4)]
    workload = Workload(model=nn.Linear(1, 1), batch=None, loss=nn.functional.cross_entropy, dataset=images)
    layout = Layout((0,), PRECISIONS[precision], pin=True, channels_last=channels_last)
    source = DatasetSource(workload, 0, layout)
    (micro,) = source.load(variant_of(4), 0).micro_batches
    assert pinning.holds(micro.inputs)
    assert micro.inputs.dtype == PRECISIONS[precision].weights
    assert micro.inputs.is_contiguous(memory_format=torch.channels_last) == channels_last


# 29: energy


def test_the_untimed_step_is_done_before_energy_is_counted(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Steps()
    monkeypatch.setattr(cuda, "synchronize", lambda device: trainer.said.append("synchronized"))
    rounds = bench_on_gpu(tmp_path, trainer)
    monkeypatch.setattr(rounds.peers, "barrier", lambda: trainer.said.append("barrier"))
    rounds.prefetch["a"] = 1
    rounds.run_steps(rounds.config.variants[0], 1)
    assert trainer.said[1:5] == ["barrier", "step 0 untimed", "synchronized", "count"]


# 31: micro-benchmarks


class Texts(Peers):
    """Two ranks: the other one's GPU is slowed down, too."""

    def gather(self, value: T) -> list[T]:
        other: Any = value.replace("cuda:3", "cuda:1") if isinstance(value, str) else value
        return [value, other]


def test_a_micro_benchmark_says_whose_clock_was_throttled(
    tmp_path: Path, cuda: FakeCuda, wording: Wording
) -> None:
    devices: dict[str, Any] = {"devices": ("cuda:0", "cuda:0"), "device_names": ("cuda:3", "cuda:1")}
    config = launch(tmp_path, **devices)
    assert [site_of(config, rank).names for rank in (0, 1)] == [("cuda:3",), ("cuda:1",)]
    said: list[str] = []
    sensors = Sensors(throttling=lambda: said.append("asked") or "power brake")  # type: ignore[func-returns-value]
    load = LoadMeter(torch.device("cuda", 0), [GpuMeter(CudaRuntime(), torch.device("cuda", 0), sensors)])
    probe = Probe("rows", lambda site: Cases((BenchmarkCase("x", 1, lambda: said.append("ran")),)))
    journal = Journal(config, 0)
    times = itertools.count(0, 10_000_000)
    quiet = NoiseMeter(dict, lambda: 0, lambda: False)
    ProbeRounds(probe, site_of(config, 0), journal, Texts(), quiet, load, lambda: next(times)).run()
    wording(journal.facts["a"].warnings)
    assert said[-3:] == ["ran", "ran", "asked"]  # after the timed block, while an untimed one runs


# 32: a rank that waits for NCCL in `loss.item()`

AT_ITEM = Activity(None, Frame("/home/me/train.py", "30", "main"), None)


def test_a_rank_that_reads_a_value_while_nccl_waits_is_no_busy_one(wording: Wording) -> None:
    """NCCL's calls return at once: the rank has called the collective, and waits where it needs a value."""
    nccl, gloo = (
        Gap(CalledCollective("0", 7, "all_reduce", backend), (0,), (1,)) for backend in ("nccl", "gloo")
    )
    hang = find_hang({0: AT_ITEM, 1: AT_ITEM}, nccl)
    assert hang.rank == 1
    wording(hang.headline)
    wording(hang.details[0])
    assert "rank 0" not in find_hang({0: AT_ITEM, 1: AT_ITEM}, gloo).headline


# 33: threads that communicate


@pytest.mark.parametrize(
    ("name", "communicates"),
    [(b"pt_nccl_watchdg", True), (b"NCCL Progress 0", True), (b"pt_gloo_runloop", True), (b"python", False)],
)
def test_threads_of_nccl_are_known_by_their_names(name: bytes, communicates: bool) -> None:
    cpu_time._communicates.cache_clear()
    found: list[bool] = []

    def work() -> None:
        ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
        found.append(cpu_time._communicates(str(threading.get_native_id())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cpu_time._communicates.cache_clear()
    assert found == [communicates]


# 34: why a clock is low


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        (0x48, "too hot (slowed down by its hardware)"),
        (0x88, "power brake"),
        (0x28, "too hot (slowed down by the driver)"),
        (0x0C, "slowed down by its hardware (power or heat)"),
    ],
)
def test_the_reason_that_says_most_is_given(reasons: int, text: str) -> None:
    """NVML API reference: `HwSlowdown` is set whenever `HwThermalSlowdown` or `HwPowerBrakeSlowdown` is."""
    driver = SimpleNamespace(NVMLError=OSError, nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: reasons)
    assert NvmlSensors(driver, 0).throttling() == text


# Traces of programs, memory that NCCL and loader processes need, and collectives that no GPU completes


# 35: traces of programs that don't make their GPU the current one


def test_a_trace_ends_on_a_gpu_of_the_program(cuda: FakeCuda) -> None:
    """torch 2.13, torch/autograd/profiler.py:419, `profile.__exit__`: `torch.cuda.synchronize()` without a
    device, which makes a context on the current one: GPU 0 of every rank."""
    cuda.allocated = {1: 7}
    ended_on: list[int] = []
    profiling.stop(lambda: ended_on.append(cuda.current_device()))
    assert ended_on == [1]
    assert cuda.current == 0


def test_a_program_on_the_cpu_is_traced_without_cuda(cuda: FakeCuda) -> None:
    """`profile.__exit__` synchronizes CUDA wherever it is among the activities, used or not."""
    cuda.initialized = False
    made = profiling.new_profiler(ProfileConfig(1), all_threads=False)
    assert set(made.activities) == {ProfilerActivity.CPU}
    profiling.stop(lambda: None)
    assert not cuda.initialized


# 36: words


@pytest.mark.parametrize("part", ["HOST", "DEVICE"])
def test_words_of_cudnn_9_mean_out_of_memory(part: str) -> None:
    """aten/src/ATen/cudnn/Exceptions.h prints `cudnnGetErrorString`; version 9 has new statuses."""
    error = RuntimeError(f"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_{part}_ALLOCATION_FAILED")
    assert is_out_of_memory(error)


# 37: `global_batch: max`


def test_the_largest_batch_leaves_room_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers are outside of torch's allocator, and as large for one sample as for many."""
    made: list[Any] = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: made.append((size, str(device))))
    config = max_batch_config(devices=("cuda:0",), keeps_gradients=True)
    max_batch_attempts.reserved_memory(config)
    assert made == [(CUDA.backend_bytes, "cuda:0")]
    max_batch_attempts.reserved_memory(replace(config, devices=("cpu",)))
    max_batch_attempts.reserved_memory(replace(config, keeps_gradients=False))
    assert len(made) == 1


# 38: forks of a process that has used CUDA


class Cycle:
    """Garbage that only the collector finds, as a tensor that an exception's traceback holds."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_before_loader_processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(
        model=nn.Linear(1, 1), batch=None, loss=nn.functional.mse_loss, dataset=[(torch.ones(1), 1)] * 4
    )
    source = DatasetSource(workload, 0, Layout((0,), PRECISIONS["fp32"], pin=False))
    found: list[bool] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            found.append(garbage() is None)
            return iter(())

    monkeypatch.setattr(source, "loader", Loader())
    gc.disable()
    try:
        garbage = weakref.ref(Cycle())
        source.prepare(SimpleNamespace(id="a", split=(2,), accumulate=1, sync_every=None), 0)  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert found == [True]


# 39: collectives on GPUs


def history(*states: str) -> Any:
    entries = [
        {
            "collective_seq_id": number,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "state": state,
        }
        for number, state in enumerate(states, 1)
    ]
    return parse_history(json.dumps({"entries": entries}).encode())


def test_a_collective_that_no_gpu_completes_is_named(wording: Wording) -> None:
    """torch/csrc/distributed/c10d/FlightRecorderDetail.hpp:507, `dump_json`: NCCL's entries have a state."""
    stuck = history("completed", "scheduled", "scheduled")
    snapshots = [RankSnapshot(rank, 7, 3, (), stuck) for rank in (0, 1)]
    assert str(find_pending({0: stuck, 1: stuck})) == "all_reduce #2"
    found = diagnose(snapshots)
    wording(found.headline)
    assert found.rank is None
    further = history("completed", "completed", "scheduled")
    assert find_pending({0: stuck, 1: further}) is None
    assert find_pending({0: history("completed")}) is find_pending({}) is None
    at_item = Activity(None, Frame("/home/me/train.py", "30", "main"), None)
    wording(find_hang({0: at_item, 1: at_item}).headline)


# 40: tests that need GPUs


def test_gpu_tests_fail_where_torch_cannot_use_what_the_driver_shows(wording: Wording) -> None:
    two: Any = (FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    assert why_none(Gpus()) == "no GPU here"
    assert why_unusable(Gpus(), 0) is why_none(Gpus(two)) is why_unusable(Gpus(two), 2) is None
    wording(why_unusable(Gpus(two), 0))
    refused: Any = (replace(two[0], unusable="torch was built without CUDA"), two[1])
    wording(why_unusable(Gpus(refused), 0))
    silent = Gpus(nvml_error="Driver/library version mismatch")
    assert why_none(silent) is None
    assert "Driver/library version mismatch" in (why_unusable(silent, 0) or "")
