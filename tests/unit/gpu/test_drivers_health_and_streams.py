"""What drivers say of health and parts of GPUs, which GPUs are visible, and streams of steps."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pynvml
import pytest
import torch
from torch import nn

from gpurun.launcher.inspect.stacks import COLLECTIVE, GPU, activity, parse_threads
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.gpus.gpu import Gpus
from gpurun.launcher.machine.gpus.nvml import GpuHealth, inspect_health, inspect_nvidia_gpus
from gpurun.launcher.selftest import machine_checks
from gpurun.launcher.worker.accelerators.clock import EventStamps
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.entry.zygote import ForkServer
from gpurun.launcher.worker.selftest import device_program
from gpurun.launcher.worker.training.trainer import Trainer, new_scaler
from tests.gpu import machine, test_drivers_here
from tests.gpu.machine import LIMITS, Devices
from tests.gpu.test_jobs_here import largest_job, matrix_job
from tests.known import known
from tests.unit.inspect.test_stacks import USER, stack
from tests.unit.machine.fake_driver import UUIDS, NVMLError, fake
from tests.unit.plan.machines import FakeGpu
from tests.unit.selftest.healthy import evidence, health
from tests.wording import Wording

# 42 and 43: drivers that fail, or are old


def test_a_driver_that_counts_no_gpus_says_nothing_of_their_health() -> None:
    def failing() -> int:
        raise NVMLError("Unknown Error")

    nvml = fake()
    nvml.nvmlDeviceGetCount = failing
    assert inspect_health([0, 1], {}, nvml) == (GpuHealth(), GpuHealth())


def test_a_driver_without_the_newest_functions_is_still_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ml-py, pynvml.py, `throwOnVersionMismatch`: without `nvmlDeviceGetComputeRunningProcesses_v3`,
    which came with driver 510, it raises an error that is no `NVMLError`."""

    def missing(name: str) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", missing)
    nvml = fake()
    nvml.NVMLError = pynvml.NVMLError
    if hasattr(pynvml, "NVMLLibraryMismatchError"):  # not in older bindings, nor do they raise it
        nvml.NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    nvml.nvmlDeviceGetComputeRunningProcesses = pynvml.nvmlDeviceGetComputeRunningProcesses
    nvml.nvmlDeviceGetMigMode = pynvml.nvmlDeviceGetMigMode
    nvml.nvmlDeviceGetEnforcedPowerLimit = pynvml.nvmlDeviceGetEnforcedPowerLimit
    nvml.nvmlDeviceGetNvLinkState = pynvml.nvmlDeviceGetNvLinkState
    found = inspect_nvidia_gpus({}, binding=nvml)
    assert [gpu.uuid for gpu in found.gpus] == list(UUIDS)
    assert {gpu.processes for gpu in found.gpus} == {None}


# 44: a GPU that is named twice


@pytest.mark.parametrize("visible", ["0,0", "1,0,1", "GPU-aaaa-0,GPU-aaaa", "0,GPU-aaaa-0"])
def test_a_gpu_that_is_named_twice_hides_all(visible: str) -> None:
    """torch 2.13, torch/cuda/__init__.py:860, `_parse_visible_devices`: "Repeated ordinal results in empty
    set", and `_transform_uuid_to_ordinals` the same; CUDA shows no device then."""
    assert inspect_nvidia_gpus({"CUDA_VISIBLE_DEVICES": visible}, binding=fake()).gpus == ()


# 45: going back to a state takes the optimizer's memory twice


def test_a_restored_optimizer_never_holds_its_state_twice() -> None:
    """torch 2.13, torch/optim/optimizer.py:881, `load_state_dict`: the new state is made on the parameters'
    device before it takes the place of the old one."""
    held: list[int] = []

    class Watched(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            held.append(len(self.state))
            super().load_state_dict(state_dict)

    trainer = Trainer.__new__(Trainer)
    trainer.model, trainer.precision = nn.Linear(2, 2), PRECISIONS["fp32"]
    trainer.optimizer = Watched(trainer.model.parameters())
    trainer.scaler = new_scaler(torch.device("cpu"), trainer.precision)
    trainer.model(torch.ones(1, 2)).sum().backward()
    trainer.optimizer.step()
    trainer.restore_state(trainer.save_state())
    assert held == [0]
    assert len(trainer.optimizer.state) == 2


# 46: memory that can't be repaired


def test_a_gpu_whose_memory_has_no_spare_rows_left_is_not_well(wording: Wording) -> None:
    """NVML API reference, `nvmlDeviceGetRemappedRows`: the fourth answer is a remapping that has failed."""
    lost = health(nvmlDeviceGetRemappedRows=lambda gpu: (0, 9, 0, int(gpu == 1)))
    found = machine_checks.memory_errors(replace(evidence(), health=lost))
    wording(found.found)
    assert found.status == "failed"


# 47 and 48: stacks of torch's newer modules


def test_a_rank_that_waits_for_any_accelerator_waits_for_its_gpu() -> None:
    """torch 2.13, torch/accelerator/__init__.py:246, `synchronize`: what device-agnostic programs call."""
    seen = activity(parse_threads(stack("torch/accelerator/__init__.py:283 synchronize", f"{USER}:9 train")))
    assert known(seen).waiting == GPU


def test_a_model_inside_of_fsdp_computes() -> None:
    """torch 2.13, torch/distributed/fsdp/fully_sharded_data_parallel.py:835, `forward`: calls the model."""
    fsdp = "torch/distributed/fsdp/fully_sharded_data_parallel.py:854 forward"
    inner = ("torch/nn/modules/linear.py:134 forward", "torch/nn/modules/module.py:1790 _call_impl")
    computing = activity(parse_threads(stack(*inner, fsdp, f"{USER}:9 train")))
    assert known(computing).waiting is None
    gather = "torch/distributed/distributed_c10d.py:3000 all_gather_into_tensor"
    assert known(activity(parse_threads(stack(gather, fsdp, f"{USER}:9 train")))).waiting == COLLECTIVE


# 49 and 50: parts of GPUs


def test_no_import_before_the_fork_asks_cuda_about_parts_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13, torch/cuda/__init__.py:1092, `_device_count_nvml`: "Skip MIG parsing", and then
    `_cuda_getDeviceCount`, after which no fork can use CUDA: torch/csrc/utils/device_lazy_init.h:77,
    `register_fork_handler_for_device_init`."""
    asked: list[str] = []

    def ask_cuda() -> int:
        asked.append("CUDA")
        return 1

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", ask_cuda, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1b2c")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "an_asking_one.py").write_text("import torch\nFOUND = torch.cuda.is_available()\n")
    ForkServer._preload(cast(Any, None), ["an_asking_one"])
    assert sys.modules.pop("an_asking_one").FOUND
    assert not asked
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-1b2c"


def test_gpu_tests_use_one_instance_of_a_divided_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's count, of whole GPUs or of one instance, is no mistake of the machine's."""
    parts = Gpus(tuple(cast(Any, FakeGpu(uuid)) for uuid in ("MIG-1", "MIG-2")))
    for module in (machine, test_drivers_here):
        monkeypatch.setattr(module, "inspect_gpus", lambda environ: parts)
    devices = machine.devices_here(None)
    assert devices.count == 1
    with pytest.raises(pytest.skip.Exception, match="MIG"):
        test_drivers_here.gpus_of(devices)


# A fifth reading: `make gpu-test`


def test_a_report_of_skipped_tests_says_so_once_and_names_driver_and_torch() -> None:
    results = {"test_a": "skipped: no GPU here", "test_b": "skipped: no GPU here"}
    text = machine.report_text(results)
    assert "\n2 skipped: nothing of this machine was tested\n" in text
    assert "- skipped: no GPU here (test_a, test_b)\n" in text
    assert re.search(r"^- torch: \d.*, built for \w", text, re.MULTILINE)
    assert re.search("^- driver: ", text, re.MULTILINE)
    assert machine.summary({"a": "passed", "b": "failed", "c": "passed"}) == "2 passed, 1 failed"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", LIMITS)
def test_the_jobs_of_gpu_test_are_valid(precision: str, kind: str, tmp_path: Path) -> None:
    """They run on machines with GPUs only, where a key that is gone would be the first thing to be seen."""
    devices = Devices(kind, 2)
    for text in (matrix_job(devices, 1, precision), matrix_job(devices, 2, precision), largest_job(devices)):
        if precision != "tf32" or kind == "cuda":
            assert load_text(text, "job.yaml", (), tmp_path).workload == "gpt"


# A fifth reading: ranks


def test_a_rank_whose_torch_sees_no_gpu_fails_with_torchs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch/cuda/__init__.py:1150, `device_count`: 0 where the driver can't be used, without an error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = device_program.own_device(CUDA)
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        torch.zeros(1, device=device)


class LateEvent:
    """c10/cuda/CUDAEvent.h:195, `elapsed_time`: both events have to be done."""

    elapsed_ms = 0.0

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: "LateEvent") -> float:
        if not (self.is_done and end.is_done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return self.elapsed_ms


@pytest.mark.parametrize(
    ("done", "elapsed_ms", "step_ns"),
    [((True, True), 2.0, 2_000_000), ((False, True), 2.0, None), ((True, True), 0.0, 1)],
)
def test_a_step_that_began_on_another_stream_is_waited_for(
    done: tuple[bool, bool], elapsed_ms: float, step_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may begin a step on a stream of its own and end it on the default one, which doesn't wait.

    Where it has submitted nothing in between, torch says 0, and a step of no time has no rate.
    """
    monkeypatch.setattr(LateEvent, "elapsed_ms", elapsed_ms)
    stamps = EventStamps(torch.device("cuda", 0), LateEvent, lambda event: None, lambda: None)  # type: ignore[arg-type]
    start, end = map(LateEvent, done)
    assert stamps.elapsed_ns(start, end) == step_ns
