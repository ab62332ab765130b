"""NCCL, pinned memory, dp's outputs, energy and clocks: with fakes that behave as torch 2.13 does."""

import ctypes
import itertools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpurun.launcher.inspect.hang_diagnosis import find_hang
from gpurun.launcher.inspect.snapshot import CalledCollective, Gap
from gpurun.launcher.inspect.stacks import Activity, Frame
from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.machine.gpus.nvml import NvmlSensors
from gpurun.launcher.machine.resource_limits import remedy
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base.failure import is_secondary
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.nested import join_rows, tensors_of
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.meters import cpu_time
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import GpuMeter, LoadMeter
from gpurun.launcher.worker.micro_benchmark import ProbeRounds, site_of
from gpurun.launcher.worker.strategies import dp
from gpurun.launcher.worker.strategies.ddp import Ddp
from gpurun.launcher.worker.training.batches import BatchSource, DatasetSource, Layout, LoadedStep, MicroBatch
from gpurun.launcher.worker.training.forward_backward import NoClock, forward_backward
from gpurun.workloads.base import Workload
from gpurun.workloads.micro_benchmarks import BenchmarkCase, Cases, Probe
from tests.unit.gpu.fake_cuda import FakeCuda, fake_cuda, launch  # noqa: F401 - a fixture
from tests.unit.gpu.test_blocks import Steps, bench_on_gpu
from tests.wording import Wording

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
        assert all(isinstance(one, Tensor) for one in inputs)
        if all(one.dim() == 0 for one in inputs):
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

    def gather_text(self, text: str) -> list[str]:
        return [text, text.replace("cuda:3", "cuda:1")]

    def gather(self, value: float) -> list[float]:
        return [value, value]


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
    ProbeRounds(probe, site_of(config, 0), journal, Texts(), lambda: next(times), quiet, load).run()
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
