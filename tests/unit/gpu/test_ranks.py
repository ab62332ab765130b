"""What a rank does with its GPUs, with a `torch.cuda` that is made up after torch's own sources."""

import inspect
import math
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gpurun.launcher.inspect.snapshot import CalledCollective, ask_history, find_gap, last_ones, parse_history
from gpurun.launcher.rundir.control import ControlDir, RankState, socket_name
from gpurun.launcher.rundir.records import (
    ProfileConfig,
    VariantConfig,
)
from gpurun.launcher.worker import profiling
from gpurun.launcher.worker.accelerators.clock import HostClock
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base import process_group
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.strategies import ddp, dp
from gpurun.launcher.worker.training.balanced_split import TimedRanks
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.base import Workload
from tests.unit.gpu.fake_cuda import FakeCuda, Stream, fake_cuda, launch  # noqa: F401 - a fixture
from tests.unit.gpu.test_drivers import spec_of
from tests.unit.plan.machines import FakeMachine, planned

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

    class Profiler:
        def __getattr__(self, name: str) -> Any:
            def note(*arguments: Any) -> None:
                made.append(name)
                if name == "export_chrome_trace":
                    Path(arguments[0]).write_text("{}")

            return note

    monkeypatch.setattr(profiling, "new_profiler", lambda config, all_threads: Profiler())
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
    assert [(one.backend, one.seq) for one in last_ones(histories[0])] == [("gloo", 5), ("nccl", 12)]
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
            assert [(one.backend, one.seq) for one in ask_history(control, me) or ()] == [
                ("gloo", 1),
                ("nccl", 1),
                ("nccl", 2),
            ]
            del answers["/handler/dump_nccl_trace_json"]
            assert [one.backend for one in ask_history(control, me) or ()] == ["gloo"]
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

    replica = dp.replica_on(Model(2, 2), 1, torch.device("cpu"), torch.ones(3, 2))
    assert dp.timed_ms(replica, torch.device("cuda", 1)) > 0
    assert runtime.inside == ["cuda:1", "runs", "out"]


def test_a_replica_whose_copy_does_not_fit_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dp.replica_on

    def second_is_full(network: nn.Module, index: int, *rest: Any) -> Any:
        if index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(network, index, *rest)

    monkeypatch.setattr(dp, "replica_on", second_is_full)
    cpu = torch.device("cpu")
    times_ms = dp.apply_times_ms(nn.Linear(2, 2), [cpu] * 3, torch.ones(4, 2), (2, 2, 0))
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


def test_ddps_options_are_torchs_unless_the_job_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    own = inspect.signature(DistributedDataParallel).parameters
    given: dict[str, Any] = {}
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **options: given.update(options))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    ddp.Ddp(nn.Linear(1, 1), torch.device("cpu"), 0, find_unused=False)
    ours = {name: value for name, value in given.items() if own[name].default != value}
    assert ours == {}
    ddp.Ddp(nn.Linear(1, 1), torch.device("cpu"), 0, find_unused=False, gradient_as_bucket_view=True)
    assert given["gradient_as_bucket_view"] is True
