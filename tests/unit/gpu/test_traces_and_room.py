"""Traces of programs, memory that NCCL and loader processes need, and collectives that no GPU completes."""

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from gpurun.launcher.inspect.hang_diagnosis import diagnose, find_hang
from gpurun.launcher.inspect.snapshot import RankSnapshot, find_pending, parse_history
from gpurun.launcher.inspect.stacks import Activity, Frame
from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.gpus.gpu import Gpus
from gpurun.launcher.rundir.records import MaxBatchConfig, ProfileConfig
from gpurun.launcher.worker import profiling
from gpurun.launcher.worker.base.failure import is_out_of_memory
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.training import max_batch_attempts
from gpurun.launcher.worker.training.batches import DatasetSource, Layout
from gpurun.workloads.base import Workload
from tests.gpu.machine import why_none, why_unusable
from tests.unit.gpu.fake_cuda import FakeCuda, fake_cuda  # noqa: F401 - a fixture
from tests.unit.plan.machines import FakeGpu
from tests.wording import Wording

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
    config = MaxBatchConfig(
        workload="mlp", job_dir=".", params={}, devices=("cuda:0",), index=0, num_devices=1,
        precision="fp32", accumulate=1, keeps_gradients=True, gradients_are_views=False, seed=0, threads=1,
        limit_bytes=None, attempts="", fits=0, fails=None,
    )  # fmt: skip
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
