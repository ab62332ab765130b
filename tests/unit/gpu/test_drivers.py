"""Which GPUs there are, and which can be used: a driver that is made up at the level of NVML's functions."""

import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import read_spec
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.machine import accelerators
from gpurun.launcher.machine.accelerators import (
    TorchBuild,
    inspect_gpus,
    installed_torch,
    nvidia_problem,
    read_build,
    recorded_uuids,
)
from gpurun.launcher.machine.gpus import nvml as driver
from gpurun.launcher.machine.gpus.gpu import Gpus
from gpurun.launcher.machine.gpus.nvml import inspect_nvidia_gpus, inspect_sensors
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
from gpurun.launcher.tensorboard_plugin.answers import live as tab
from tests.known import known
from tests.unit.machine.fake_driver import UUIDS, NVMLError, NVMLErrorLibraryNotFound, fake
from tests.unit.plan import machines
from tests.unit.plan.machines import FakeGpu, FakeMachine, planned
from tests.wording import Wording

CUDA_13 = TorchBuild("2.13.0+cu130", {"cuda": "13.0"})
CUDA_12 = TorchBuild("2.13.0+cu126", {"cuda": "12.6"})
CPU_ONLY = TorchBuild("2.13.0+cpu", {})


def spec_of(text: str) -> JobSpec:
    return machines.spec_of(f"name: t\nworkload: gpt\nglobal_batch: 8\n{text}")


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


def test_a_gpu_that_fell_off_the_bus_hides_no_other() -> None:
    nvml = fake()

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
def test_a_driver_without_its_library_is_not_passed_over(tmp_path: Path, has_module: bool) -> None:
    def missing() -> None:
        raise NVMLErrorLibraryNotFound

    if has_module:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    nvml = fake()
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
    lists_processes: bool, answers: dict[int, list[int]], pauses_s: list[float], wording: Wording
) -> None:
    """A second run right after the first: no process holds the GPU, but the driver's average is high.

    Where processes aren't listed, it is looked at twice.
    """
    nvml = fake()
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
def test_on_unlike_gpus_the_order_is_noted(environ: dict[str, str], noted: bool) -> None:
    nvml = fake()
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
