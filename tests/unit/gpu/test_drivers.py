"""Which GPUs there are, which can be used, and how they are, by a driver made up at the level of NVML."""

import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import DEVICE_REQUIREMENT, PYTORCH_RELEASES_CODE_CC

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.inspect.stacks import COLLECTIVE, GPU, activity, parse_threads
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import read_spec
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.machine import accelerators
from gpurun.launcher.machine.accelerators import (
    CAPABILITIES,
    CUDA,
    DEFAULT,
    TorchBuild,
    build_for,
    inspect_gpus,
    installed_torch,
    nvidia_problem,
    read_build,
    recorded_uuids,
    runs_on,
)
from gpurun.launcher.machine.gpus import nvml as driver
from gpurun.launcher.machine.gpus.gpu import Gpu, Gpus
from gpurun.launcher.machine.gpus.nvml import GpuHealth, inspect_health, inspect_nvidia_gpus, inspect_sensors
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.devices import (
    MachineLike,
    backend_for,
    busy_notes,
    device_notes,
    node_of,
    resolve_devices,
)
from gpurun.launcher.report.terminal.hardware import render_devices
from gpurun.launcher.selftest import machine_checks
from gpurun.launcher.tensorboard_plugin.answers import live as tab
from gpurun.launcher.worker.accelerators.clock import EventStamps
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.entry.zygote import ForkServer
from gpurun.launcher.worker.selftest import device_program
from gpurun.launcher.worker.training.trainer import Trainer, copied, own_copy
from tests.gpu import machine, test_drivers_here
from tests.gpu.machine import LIMITS, Devices
from tests.gpu.test_jobs_here import largest_job, matrix_job
from tests.known import known
from tests.unit.inspect.test_stacks import USER, stack
from tests.unit.machine.fake_driver import UUIDS, NVMLError, NVMLErrorLibraryNotFound, fake
from tests.unit.plan import machines
from tests.unit.plan.machines import FakeGpu, FakeMachine, planned
from tests.unit.selftest.healthy import evidence, health
from tests.wording import Wording

CUDA_13 = TorchBuild("2.13.0+cu130", {"cuda": "13.0"})
CUDA_12 = TorchBuild("2.13.0+cu126", {"cuda": "12.6"})
CPU_ONLY = TorchBuild("2.13.0+cpu", {})


def spec_of(text: str) -> JobSpec:
    return machines.unchecked(f"name: t\nworkload: gpt\nglobal_batch: 8\n{text}")


# 3: torch's build and the driver


def test_torch_says_how_it_was_built() -> None:
    """The text is that of torch 2.13's `torch/version.py`, of its CUDA build."""
    text = (
        "from typing import Optional\n\n__all__ = ['__version__', 'cuda', 'hip']\n"
        "__version__ = '2.13.0+cu130'\ndebug = False\n"
        "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    assert read_build(text) == CUDA_13
    assert read_build("") is None


def test_the_installed_torch_is_read_without_importing_it() -> None:
    import torch  # here, since this test compares with it

    build = known(installed_torch())
    assert build.version == torch.__version__
    assert build.built_for.get("cuda") == torch.version.cuda


GPUS_OF_570 = Gpus((FakeGpu("GPU-a"),), driver="570.86.10", cuda_driver_version="12.8")  # type: ignore[arg-type]


def problem_of(build: TorchBuild | None, found: Gpus) -> str | None:
    return nvidia_problem(build, found, found.gpus[0], "cuda", "x86_64")


def test_torchs_build_and_the_driver_are_compared(wording: Wording) -> None:
    problem = known(problem_of(CUDA_13, GPUS_OF_570))
    wording(problem)
    assert "--index-url https://download.pytorch.org/whl/cu126" in problem
    assert problem_of(CUDA_12, GPUS_OF_570) is None
    newer = replace(GPUS_OF_570, cuda_driver_version="13.2")
    assert problem_of(CUDA_12, newer) is problem_of(CUDA_13, newer) is None
    without = known(problem_of(CPU_ONLY, newer))
    wording(without)
    assert "whl/cu130" in without
    ancient = known(problem_of(CUDA_12, replace(GPUS_OF_570, cuda_driver_version="11.4")))
    assert "update the driver" in ancient
    assert problem_of(None, newer) is None


def test_gpus_that_torch_cannot_use_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    wording: Wording,
) -> None:
    monkeypatch.setattr(accelerators, "installed_torch", lambda: CPU_ONLY)
    machine = inspect_machine(fake(), {}, pause=lambda seconds: None)
    for devices in ("auto", "cuda", ("cuda:1",)):
        with pytest.raises(MachineError, match="built without CUDA"):
            resolve_devices(devices, machine)
    with pytest.raises(MachineError, match="built without CUDA"):
        resolve_devices("cuda", node_of(machine))
    assert resolve_devices("cpu:2", machine) == ("cpu:0", "cpu:1")
    wording(render_devices(machine, 100).splitlines()[-2:])


def test_auto_leaves_out_gpus_that_torch_has_no_kernels_for(wording: Wording) -> None:
    older = replace(FakeGpu("GPU-b", "V100"), unusable="torch has no kernels for it")
    mixed = FakeMachine(8, (older, FakeGpu("GPU-a", busy_with="python (7) uses 9 GiB"), FakeGpu("GPU-c")))
    assert resolve_devices("auto", mixed) == ("cuda:2",)
    wording(busy_notes("auto", ("cuda:2",), mixed)[0])
    busy = replace(mixed, gpus=mixed.gpus[:2])
    assert resolve_devices("auto", busy) == ("cuda:1",)
    with wording.raises(MachineError):
        resolve_devices("cuda", mixed)


# 4: GPUs that can't be opened


def hiding(*hidden: int) -> Any:
    """A driver that counts three GPUs and gives no handle for some, as `nvmlDeviceGetCount_v2` documents."""
    nvml = fake()

    def handle(index: int) -> int:
        if index in hidden:
            raise NVMLError("Insufficient Permissions")
        return index

    nvml.nvmlDeviceGetHandleByIndex = handle
    return nvml


def test_a_gpu_that_cannot_be_opened_hides_no_other(wording: Wording) -> None:
    found = inspect_nvidia_gpus({}, binding=hiding(1))
    assert [gpu.uuid for gpu in found.gpus] == [UUIDS[0], UUIDS[2]]
    wording(found.notes)
    assert found.nvml_error is None
    second = inspect_nvidia_gpus({"CUDA_VISIBLE_DEVICES": "1"}, binding=hiding(1))
    assert [gpu.uuid for gpu in second.gpus] == [UUIDS[2]]  # CUDA's ordinals leave it out


@pytest.fixture
def nvml() -> Any:
    """A driver with three GPUs, to be spoiled."""
    return fake()


def test_a_gpu_that_fell_off_the_bus_hides_no_other(nvml: Any) -> None:
    def uuid(handle: int) -> str:
        if handle == 0:
            raise NVMLError("GPU is lost")
        return UUIDS[handle]

    nvml.nvmlDeviceGetUUID = uuid
    found = inspect_nvidia_gpus({}, binding=nvml)
    assert [gpu.uuid for gpu in found.gpus] == list(UUIDS[1:])
    assert "GPU is lost" in found.notes[0]


# 5: MIG

TWO_PARTS = FakeMachine(
    8,
    (
        FakeGpu("MIG-a", bus="0000:01:00.0"),
        FakeGpu("MIG-b", bus="0000:01:00.0"),
        FakeGpu("GPU-c", bus="0000:02:00.0"),
    ),
)


WITHOUT_NVML = FakeMachine(8, (FakeGpu("GPU-a"), FakeGpu("GPU-b")), notes=(f"{driver.NO_LIBRARY}; more",))


def plan_and_backends(text: str, machine: MachineLike) -> tuple[list[str], list[str | None], str]:
    spec = spec_of(text)
    plan = build_plan(spec, machine)
    backends = [backend_for(variant.strategy, variant.devices, (machine,)) for variant in plan.variants]
    return [variant.id for variant in plan.variants], backends, "\n".join(plan.notes)


def test_parts_of_one_gpu_communicate_by_gloo(wording: Wording) -> None:
    """NCCL 2.27, src/init.cc: two ranks of one bus id are "Duplicate GPU detected"."""
    _, backends, notes = plan_and_backends("devices: [cuda:0, cuda:1]\n", TWO_PARTS)
    assert backends == ["gloo"]
    wording(notes)
    assert plan_and_backends("devices: [cuda:1, cuda:2]\n", TWO_PARTS)[1] == ["nccl"]
    assert plan_and_backends("devices: [cuda:1, cuda:2]\n", node_of(TWO_PARTS))[1] == ["nccl"]
    assert plan_and_backends("devices: [cuda:0, cuda:1]\n", node_of(TWO_PARTS))[1] == ["gloo"]


def test_dp_on_several_mig_instances_is_refused(wording: Wording) -> None:
    with wording.raises(SpecError):
        plan_and_backends("devices: [cuda:0, cuda:1]\nstrategy: dp\n", TWO_PARTS)
    ids, _, _ = plan_and_backends("devices: [cuda:0, cuda:1]\ncompare: {strategy: [ddp, dp]}\n", TWO_PARTS)
    assert ids == ["ddp-2-even"]


@pytest.mark.parametrize(
    ("devices", "strategy", "ids"),
    [
        ("[cuda:0, cuda:1]", "ddp, dp, single", ["single-1"]),
        ("[cuda:0]", "ddp, fsdp, single", ["single-1"]),
        ("[cuda:0]", "dp", ["dp-1-even"]),
        ("[cuda:0, cuda:0]", "ddp", ["ddp-2-even"]),
        ("cpu:2", "ddp, dp", ["ddp-2-even", "dp-2-even"]),
    ],
)
def test_without_nvmls_library_nothing_is_planned_that_needs_nccl(
    devices: str, strategy: str, ids: list[str]
) -> None:
    text = f"devices: {devices}\ncompare: {{strategy: [{strategy}]}}\n"
    assert plan_and_backends(text, WITHOUT_NVML)[0] == ids


def test_without_nvmls_library_copies_between_gpus_are_planned() -> None:
    spec = machines.unchecked("name: t\nworkload: h2d\nstrategy: dp\ndevices: [cuda:0, cuda:1]\n")
    assert [variant.strategy for variant in build_plan(spec, WITHOUT_NVML).variants] == ["dp"]


@pytest.mark.parametrize("machine_of", [lambda: WITHOUT_NVML, lambda: node_of(WITHOUT_NVML)])
def test_a_job_that_needs_nccl_is_refused_without_nvmls_library(
    machine_of: Callable[[], MachineLike], wording: Wording
) -> None:
    with wording.raises(SpecError):
        plan_and_backends("devices: [cuda:0, cuda:1]\n", machine_of())


@pytest.mark.parametrize(
    ("devices", "is_warned"), [("[cuda:0, cuda:1]", True), ("[cuda:1, cuda:2]", True), ("[cuda:0]", False)]
)
def test_a_program_on_parts_of_gpus_is_warned_before_it_starts(devices: str, is_warned: bool) -> None:
    """Also by `gpurun check`, which shows the plan's notes."""
    text = f"name: t\nscript: t.py\ndevices: {devices}\n"
    spec, _ = read_spec(parse_source(text.encode(), "j"))
    warning = (
        "each rank sees its own MIG instance alone, as cuda:0: a program that takes cuda:LOCAL_RANK fails"
    )
    for nodes in ((), (node_of(TWO_PARTS),)):
        assert (warning in build_plan(spec, TWO_PARTS, nodes).notes) == is_warned


def test_each_rank_of_a_program_sees_its_own_part_of_a_gpu() -> None:
    """As torch does: a process that names several enumerates the first alone."""
    spec, _ = read_spec(parse_source(b"name: t\nscript: t.py\ndevices: [cuda:0, cuda:2, cuda:3]\n", "j"))
    parts = (*(FakeGpu(f"MIG-{i}", bus=f"0000:0{i}:00.0") for i in range(3)), FakeGpu("GPU-w", bus="9"))
    (launch,) = build_plan(spec, FakeMachine(8, parts)).launches
    seen = [process.env["CUDA_VISIBLE_DEVICES"] for process in launch.processes]
    assert seen == ["MIG-0", "MIG-2", "GPU-w"]


@pytest.mark.parametrize("has_module", [True, False])
def test_a_driver_without_its_library_is_not_passed_over(nvml: Any, tmp_path: Path, has_module: bool) -> None:
    def missing() -> None:
        raise NVMLErrorLibraryNotFound

    if has_module:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    nvml.nvmlInit = missing
    error = inspect_nvidia_gpus({}, tmp_path, nvml).nvml_error
    assert ("libnvidia-ml.so.1 is missing" in (error or "")) == has_module


# 10: throttling over a block; 9: energy of whole GPUs only


def measuring(parts: dict[str, str] | None = None, **changes: Any) -> Any:
    """A driver whose GPUs count heat, energy and clocks."""
    nvml = fake()
    nvml.nvmlDeviceGetViolationStatus = lambda handle, policy: SimpleNamespace(
        violationTime={1: 7_000_000}[policy], referenceTime=1
    )
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 1000 * (handle + 1)
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x40 | 0x4
    sample = lambda at, mhz: SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=mhz))  # noqa: E731
    nvml.nvmlDeviceGetSamples = lambda handle, kind, since: (
        1,
        [sample(10, 900), sample(20, 1500), sample(30, 1700)],
    )
    for name, value in changes.items():
        setattr(nvml, name, value)
    return nvml


def test_sensors_are_those_of_the_ranks_own_gpus(wording: Wording) -> None:
    first, second = inspect_sensors([1, 0], {"CUDA_VISIBLE_DEVICES": "GPU-cccc-2,GPU-aaaa-0"}, measuring())
    assert (first.energy_mj(), second.energy_mj()) == (1000, 3000)
    assert first.hot_ns() == 7_000_000
    wording(first.throttling())
    assert first.mean_clock_mhz(15) == 1600.0
    assert first.power_w() == 212.4


def test_the_power_cap_is_normal_and_an_old_driver_has_another_name_for_the_reasons() -> None:
    (capped,) = inspect_sensors([0], {}, measuring(nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x4))
    assert capped.throttling() is None
    older = measuring(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x80)
    del older.nvmlDeviceGetCurrentClocksEventReasons
    assert inspect_sensors([0], {}, older)[0].throttling() == "power brake"


def test_sensors_that_the_driver_lacks_know_nothing() -> None:
    (plain,) = inspect_sensors([0], {}, fake())
    assert (plain.energy_mj(), plain.hot_ns(), plain.throttling()) == (None, None, None)
    assert plain.mean_clock_mhz(0) == 1755.0  # the clock now
    (beyond,) = inspect_sensors([7], {}, fake())
    assert beyond.mean_clock_mhz(0) is beyond.power_w() is None


def test_without_a_binding_sensors_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_nvml", lambda: None)
    assert inspect_sensors([0], {})[0].energy_mj() is None


def test_a_part_of_a_gpu_asks_the_whole_one_for_its_clock_and_has_no_energy() -> None:
    parent = measuring(
        nvmlDeviceGetMigMode=lambda gpu: [int(gpu == 1), 0],
        nvmlDeviceGetMaxMigDeviceCount=lambda gpu: 1,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda gpu, number: 10,
        nvmlDeviceGetHandleByUUID=lambda uuid: 10,
        nvmlDeviceGetUUID=lambda gpu: "MIG-1111" if gpu == 10 else UUIDS[gpu],
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda gpu: 1,
        nvmlDeviceGetViolationStatus=lambda gpu, policy: SimpleNamespace(violationTime={1: 5}[gpu]),
    )
    (part,) = inspect_sensors([0], {"CUDA_VISIBLE_DEVICES": "MIG-1111"}, parent)
    assert part.hot_ns() == 5
    assert part.pcie_link() is None
    assert part.energy_mj() is part.power_w() is None


# 18: utilisation is an average over the past


@pytest.mark.parametrize(
    ("lists_processes", "answers", "pauses_s"),
    [(True, {0: [97], 1: [97], 2: [97]}, []), (False, {0: [97, 0], 1: [97, 95], 2: [0, 0]}, [1.0])],
)
def test_utilisation_alone_makes_no_gpu_busy_unless_processes_are_not_listed(
    nvml: Any,
    lists_processes: bool,
    answers: dict[int, list[int]],
    pauses_s: list[float],
    wording: Wording,
) -> None:
    """A second run right after the first: no process holds the GPU, but the driver's average is high.

    Where processes aren't listed, it is looked at twice.
    """
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=answers[handle].pop(0))
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=100, used=1)
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: []
    if not lists_processes:
        del nvml.nvmlDeviceGetComputeRunningProcesses
    pauses: list[float] = []
    machine = inspect_machine(nvml, {}, pause=pauses.append)
    wording([gpu.busy_with for gpu in machine.gpus])
    assert pauses == pauses_s


# 19: in which order GPUs are counted


@pytest.mark.parametrize(
    ("environ", "noted"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, True),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaa-0,GPU-cccc-2"}, False),
    ],
)
def test_on_unlike_gpus_the_order_is_noted(nvml: Any, environ: dict[str, str], noted: bool) -> None:
    nvml.nvmlDeviceGetName = lambda handle: ("Tesla T4", "NVIDIA A100", "NVIDIA A100")[handle]
    notes = inspect_nvidia_gpus(environ, binding=nvml).notes
    assert ["CUDA_DEVICE_ORDER=PCI_BUS_ID" in note for note in notes] == [True] * noted
    assert inspect_nvidia_gpus(environ, binding=fake()).notes == ()


def test_what_is_known_about_the_gpus_is_in_the_plan(wording: Wording) -> None:
    machine = FakeMachine(8, (FakeGpu("GPU-a"),), notes=("GPU 1 can't be opened",))
    wording(device_notes("cuda", ("cuda:0",), machine))
    wording(device_notes("auto", ("cpu:0",), machine))
    assert device_notes("cpu:1", ("cpu:0",), machine) == ()


# 20: the tab's table of devices


def test_the_tab_calls_a_gpu_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    all_gpus = inspect_gpus({}, binding=fake())
    seen = inspect_gpus({"CUDA_VISIBLE_DEVICES": "2,1"}, binding=fake()).gpus
    host = {
        "hostname": platform.node(),
        "gpus": [{"kind": gpu.kind, "index": gpu.index, "uuid": gpu.uuid} for gpu in seen],
    }
    assert recorded_uuids(host) == {UUIDS[2]: "cuda:0", UUIDS[1]: "cuda:1"}
    monkeypatch.setattr(tab, "inspect_gpus", lambda environ: all_gpus)
    live = tab.LiveDevices()
    assert [device["device"] for device in live.of(host)] == [UUIDS[0][:12], "cuda:1", "cuda:0"]
    assert live.of({"hostname": "elsewhere"}) == []


# 22: a precision that older GPUs lack


def test_tf32_is_refused_on_gpus_before_ampere(wording: Wording) -> None:
    machine = FakeMachine(8, (FakeGpu("GPU-a", capability=(9, 0)), FakeGpu("GPU-b", capability=(7, 5))))
    with wording.raises(SpecError):
        plan_and_backends("devices: cuda\nprecision: tf32\n", machine)
    assert plan_and_backends("devices: [cuda:0]\nprecision: tf32\n", machine)[0] == ["ddp-1-even"]
    assert inspect_nvidia_gpus({}, binding=fake()).gpus[0].capability == (9, 0)


# 16: how long torch waits for a collective


def test_torch_gives_a_collective_up_after_the_command_has() -> None:
    spec = spec_of("devices: cpu:2\ntimeout: 30m\n")
    _, (config,) = planned(spec, FakeMachine())
    assert config.collective_timeout_s > spec.timeout_s


# What drivers say of health and parts of GPUs, which GPUs are visible, and streams of steps


# 42 and 43: drivers that fail, or are old


def test_a_driver_that_counts_no_gpus_says_nothing_of_their_health(nvml: Any) -> None:
    def failing() -> int:
        raise NVMLError("Unknown Error")

    nvml.nvmlDeviceGetCount = failing
    assert inspect_health([0, 1], {}, nvml) == (GpuHealth(), GpuHealth())


def test_a_driver_without_the_newest_functions_is_still_asked(
    nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-ml-py, pynvml.py, `throwOnVersionMismatch`: without `nvmlDeviceGetComputeRunningProcesses_v3`,
    which came with driver 510, it raises an error that is no `NVMLError`."""

    def missing(name: str) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", missing)
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


def test_a_restored_optimizer_never_holds_its_state_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13, torch/optim/optimizer.py:881, `load_state_dict`: the new state is made on the parameters'
    device before it takes the place of the old one. A tensor's deep copy is on its own device."""
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", Mock(side_effect=AssertionError))
    held: list[int] = []

    class Watched(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            held.append(len(self.state))
            super().load_state_dict(state_dict)

    trainer = Trainer.__new__(Trainer)
    trainer.model, trainer.precision = nn.Linear(2, 2), PRECISIONS["fp32"]
    trainer.strategy = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    trainer.optimizer = Watched(trainer.model.parameters())
    trainer.model(torch.ones(1, 2)).sum().backward()
    trainer.optimizer.step()
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer.scaler.scale(torch.ones(()))
    state = trainer.save_state()
    trainer.scaler.update(2.0)
    trainer.restore_state(state)
    assert trainer.scaler.get_scale() == 1024.0
    assert held == [0]
    assert len(trainer.optimizer.state) == 2
    assert trainer.state_bytes == 3 * (4 + 2) * 4 + 2 * 4  # parameters, two moments of each, two counters


def test_a_state_is_copied_once_more_only_where_the_optimizer_would_keep_it() -> None:
    """A GPU gets a copy of its own; a counter stays on the CPU, torch/optim/optimizer.py:774."""
    state: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}},
        "param_groups": [{"lr": 1}],
    }
    for device, is_same in (("cpu", False), ("cuda", True)):
        mine = copied(partial(own_copy, torch.device(device)), state)
        assert mine["state"][0]["step"] is not state["state"][0]["step"]
        assert (mine["state"][0]["exp_avg"] is state["state"][0]["exp_avg"]) == is_same
        assert mine["param_groups"] == [{"lr": 1}]


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


# Which build of torch serves which GPUs, by torch's own tables


# 23: a build of torch lacks the kernels of some GPUs


def test_the_table_of_builds_is_torchs_own() -> None:
    assert dict(CAPABILITIES) == PYTORCH_RELEASES_CODE_CC


@given(st.sampled_from(sorted(set().union(*CAPABILITIES["12.6"].values(), *CAPABILITIES["13.0"].values()))))
def test_kernels_run_on_the_gpus_that_torch_says(code: int) -> None:
    for major in range(4, 15):
        for minor in range(10):
            expected = 10 * major + minor in DEVICE_REQUIREMENT[code]
            assert runs_on(code, (major, minor)) == expected, (code, major, minor)


def build(cuda: str) -> TorchBuild:
    return TorchBuild(f"2.13.0+cu{cuda.replace('.', '')}", {"cuda": cuda})


def problem(cuda: str, newest: str | None, *capabilities: tuple[int, int] | None) -> str | None:
    """Of the first GPU of a machine that has GPUs of these capabilities."""
    gpus = tuple(
        cast(Gpu, SimpleNamespace(capability=capability, name=f"GPU {i}"))
        for i, capability in enumerate(capabilities)
    )
    made = TorchBuild("2.13.0+cpu", {}) if cuda == "cpu" else build(cuda)
    return nvidia_problem(made, Gpus(gpus, "570.86.10", newest), gpus[0], "cuda", "x86_64")


V100, A100, H200, B200 = (7, 0), (8, 0), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("cuda", "newest", "capabilities", "index"),
    [
        ("13.0", "13.0", (V100,), "cu126"),  # by torch/cuda/__init__.py:326, `PYTORCH_RELEASES_CODE_CC`
        ("13.0", "12.8", (B200,), "cu129"),  # cu126 has no sm_100
        ("12.6", "13.2", (B200,), "cu130"),
        ("13.0", "12.8", (H200,), "cu126"),
        ("13.0", "12.8", (A100, B200), "cu129"),
        ("cpu", "13.0", (V100,), "cu126"),
        ("cpu", "13.0", (A100,), "cu130"),
        ("cpu", "13.0", (A100, V100), "cu126"),  # one build for both
        ("cpu", None, (None,), "cu130"),
    ],
)
def test_the_hint_names_a_build_for_driver_and_gpu(
    cuda: str, newest: str | None, capabilities: Sequence[Any], index: str
) -> None:
    found = known(problem(cuda, newest, *capabilities))
    assert found.endswith(f"--index-url https://download.pytorch.org/whl/{index}")


def test_a_gpu_that_torch_has_no_kernels_for_is_refused_before_the_first_one_fails(wording: Wording) -> None:
    found = known(problem("13.0", "13.0", V100))
    wording(found)
    assert problem("12.6", "13.0", V100) is None
    assert problem("13.0", "13.0", A100, V100) is None  # the other GPU is refused, not this one
    kepler = known(problem("12.6", "12.6", (3, 7)))
    wording(kepler)
    old = known(problem("13.0", "11.4", A100))
    assert old.endswith("\n    update the driver")
    blackwell = known(problem("cpu", "11.4", B200))
    assert blackwell.endswith("\n    update the driver")


def test_what_is_not_in_the_table_is_left_to_torch() -> None:
    """A build from source, a container's own, a GPU newer than torch, a driver that gives no capability."""
    gpus = Gpus((cast(Gpu, SimpleNamespace(capability=V100)),), "580", "13.0")
    own = TorchBuild("2.13.0a0+gitcf30153", {"cuda": "13.0"})
    assert nvidia_problem(own, gpus, gpus.gpus[0], "cuda", "x86_64") is None
    assert problem("13.0", "13.0", (14, 0)) is None
    assert problem("13.0", "13.0", None) is None
    assert problem("12.8", "13.0", V100) is None


def test_setting_up_takes_the_build_that_the_hint_names() -> None:
    def gpus(newest: str | None, *capabilities: tuple[int, int]) -> Gpus:
        found = tuple(cast(Gpu, SimpleNamespace(capability=each)) for each in capabilities)
        return Gpus(found, "570.86.10", newest)

    assert build_for(gpus("13.0", H200), "x86_64") == DEFAULT
    assert build_for(gpus("13.0", A100, V100), "x86_64") == "cu126"
    assert build_for(gpus("12.8", B200), "x86_64") == "cu129"
    assert build_for(gpus("11.4", A100), "x86_64") is None
    assert build_for(gpus("13.0"), "x86_64") is None
    assert f"cu{next(iter(CAPABILITIES)).replace('.', '')}" == DEFAULT
