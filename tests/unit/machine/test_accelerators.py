"""Kinds of device are looked up in one table: another kind is a row and a runtime, and nothing else."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpurun.launcher.errors import SpecError
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU, CUDA, accelerator_of, precision_problem
from gpurun.launcher.worker import ORDER
from gpurun.launcher.worker.accelerators import runtime
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.base.failure import if_it_fits, is_out_of_memory
from tests.unit.house.source import imports, modules
from tests.wording import Wording

ROOT = Path(__file__).parents[3]


def test_directories_of_the_worker_import_in_one_order() -> None:
    room = "gpurun.launcher.worker."
    there = {directory(name) for name in modules() if name.startswith(room)} - {"__main__"}
    assert there == set(ORDER), "ORDER in launcher/worker/__init__.py must name what launcher/worker/ holds"
    above = [
        f"{module.path}:{imported.line}: imports {imported.module}"
        for module in modules().values()
        if module.name.startswith(room)
        for imported in imports(module)
        if imported.module.startswith(room)
        if directory(module.name) in ORDER
        if ORDER.index(directory(module.name)) < ORDER.index(directory(imported.module))
    ]
    assert not above, "\n".join(above)


def directory(module: str) -> str:
    return module.split(".")[3]


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "cuda:1@0", "GPU-1b2c", "MIG-5c/1/0"])
def test_a_gpu_has_many_names(name: str) -> None:
    assert accelerator_of(name) is CUDA


@pytest.mark.parametrize("name", ["xpu", "cudas:0", "", "gpu-1", "cpu2"])
def test_an_unknown_kind_is_a_mistake(name: str, wording: Wording) -> None:
    with wording.raises(SpecError):
        accelerator_of(name)
    with pytest.raises(SpecError):
        runtime.runtime_of_kind(name)


def test_a_precision_that_only_one_kind_has(wording: Wording) -> None:
    wording(precision_problem("tf32", CPU))
    assert precision_problem("tf32", CUDA) is precision_problem("bf16", CPU) is None


def test_every_row_has_a_runtime() -> None:
    for kind in ACCELERATORS.values():
        assert isinstance(runtime.load(kind), runtime.Runtime)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_the_cpu_is_what_is_used() -> None:
    assert isinstance(runtime.used_runtime(), CpuRuntime)


class XpuRuntime(CpuRuntime):
    """Another kind's runtime."""


XPU = replace(
    CUDA,
    name="xpu",
    title="XPU",
    noun="Intel GPU",
    backend="xccl",
    runtime=f"{__name__}:XpuRuntime",
    visible_variable="ZE_AFFINITY_MASK",
    uuid_prefixes=("XPU-",),
    memory_errors=("UR_RESULT_ERROR_OUT_OF_RESOURCES",),
)


def test_another_kind_is_used_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "xpu", XPU)
    sys.modules.setdefault(__name__, sys.modules[XpuRuntime.__module__])
    assert isinstance(runtime.load(XPU), XpuRuntime)
    assert accelerator_of("xpu:3") is accelerator_of("XPU-77") is XPU


FROM_JOB_TO_LAUNCH = """
from dataclasses import replace
from pathlib import Path
from gpurun.launcher.machine import accelerators
from gpurun.launcher.machine.accelerators import CUDA
xpu = replace(CUDA, name="xpu", title="XPU", noun="Intel GPU", backend="xccl", only_here={},
    visible_variable="ZE_AFFINITY_MASK", uuid_prefixes=("XPU-",), interface_variable="CCL_SOCKET_IFNAME")
accelerators.ACCELERATORS["xpu"] = xpu
from gpurun.launcher.jobfile.load import read_spec
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.launch_config import launch_config_for
from tests.unit.plan.machines import FakeGpu, FakeMachine
machine = FakeMachine(8, (FakeGpu("GPU-a"), FakeGpu("XPU-a", kind="xpu"), FakeGpu("XPU-b", kind="xpu")))
for devices in ("xpu", "[xpu:0, xpu:1]", "[XPU-a, xpu:1]"):
    text = f"name: t\\nworkload: gpt\\nglobal_batch: 8\\ndevices: {devices}\\n"
    spec, mistakes = read_spec(parse_source(text.encode(), "job.yaml"))
    assert not mistakes, mistakes
    plan = build_plan(spec, machine)
    (launch, *_) = plan.launches
    assert [process.devices for process in launch.processes] == [("xpu:0",), ("xpu:1",)]
    assert [process.env["ZE_AFFINITY_MASK"] for process in launch.processes] == ["XPU-a", "XPU-b"]
    assert {process.env["CUDA_VISIBLE_DEVICES"] for process in launch.processes} == {""}
    config = launch_config_for(plan, spec, launch, run_dir=Path("/r"), job_dir=Path("/j"), machine=machine)
    assert (config.devices, config.backend) == (("xpu:0", "xpu:0"), "xccl")
for wrong, words in (("[xpu:0, cuda:0]", "CUDA and XPU devices"), ("npu", "a valid list of devices")):
    text = f"name: t\\nworkload: gpt\\nglobal_batch: 8\\ndevices: {wrong}\\n"
    spec, mistakes = read_spec(parse_source(text.encode(), "job.yaml"))
    assert words in str(mistakes), mistakes
"""


def test_another_kind_goes_from_the_job_file_to_the_launch() -> None:
    """With a row alone: no other module of the command changes."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", FROM_JOB_TO_LAUNCH],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", ["CUDA_ERROR_OUT_OF_MEMORY: x", "CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory"]
)
def test_each_kinds_words_mean_out_of_memory(words: str) -> None:
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("out of luck"))


def test_only_what_runs_out_of_memory_has_no_result() -> None:
    def failing(error: Exception) -> int:
        raise error

    assert if_it_fits(lambda: 7) == 7
    assert if_it_fits(lambda: failing(MemoryError())) is None
    assert if_it_fits(lambda: failing(torch.OutOfMemoryError())) is None
    with pytest.raises(RuntimeError, match="out of luck"):
        if_it_fits(lambda: failing(RuntimeError("out of luck")))
