"""AMD's GPUs under a torch for ROCm: the kernel's topology as files, and a stand-in for the package amdsmi.

The answers are those that AMD documents, not those of hardware.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.machine import accelerators
from gpurun.launcher.machine.accelerators import (
    ACCELERATORS,
    CPU,
    CUDA,
    ROCM,
    inspect_gpus,
    kinds_of,
    peak_gb_per_s,
    peak_tflop_per_s,
    read_build,
)
from gpurun.launcher.machine.gpus import amd
from gpurun.launcher.machine.gpus.gpu import memory_sizes_gb
from gpurun.launcher.machine.gpus.nvml import GpuHealth
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.plan.devices import resolve_devices, visible_gpus
from gpurun.launcher.report.terminal.hardware import render_devices
from gpurun.launcher.selftest.machine_checks import driver, identities
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from tests.gpu import test_drivers_here
from tests.gpu.machine import Devices, Report
from tests.unit.gpu.test_drivers import CPU_ONLY, plan_and_backends
from tests.unit.selftest.healthy import evidence
from tests.wording import Wording

SERIALS = (0x7B91F0A1C2D3E4F5, 0x1234567890ABCDEF, 0x00000000DEADBEEF)
UUIDS = tuple(f"GPU-{serial:016x}" for serial in SERIALS)
BUSES = ("0000:05:00.0", "0000:26:00.0", "0001:85:00.0")
OF_TORCH = "__version__ = '2.13.0+rocm7.2'\ncuda = None\nhip: Optional[str] = '7.2.26015'\n"


def lines(values: dict[str, int]) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two CPUs and three GPUs, of which two are linked by xGMI."""
    for number in range(5):
        node = tmp_path / amd.NODES / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text("0" if number < 2 else f"{number}4711")
        if number < 2:
            continue
        gpu, linked = number - 2, {2: 3, 3: 2}.get(number)
        domain, bus = BUSES[gpu].split(":")[:2]
        properties = {
            "gfx_target_version": 90402,
            "unique_id": SERIALS[gpu],
            "location_id": int(bus, 16) << 8,
            "domain": int(domain, 16),
            "drm_render_minor": 128 + gpu,
        }
        (node / "properties").write_text(lines(properties))
        for bank, heap in enumerate((1, 4)):
            (node / f"mem_banks/{bank}").mkdir(parents=True)
            (node / f"mem_banks/{bank}/properties").write_text(
                lines({"heap_type": heap, "size_in_bytes": 192 << 30})
            )
        for link, other in enumerate((0, linked)):
            (node / f"io_links/{link}").mkdir(parents=True)
            values = {"type": 11 if link else 2, "node_from": number, "node_to": other or 0}
            (node / f"io_links/{link}/properties").write_text(lines(values))
        (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"dev/dri/renderD{128 + gpu}").touch()
    return tmp_path


class AmdSmiException(Exception):
    """As amdsmi's."""


def library(**changes: Any) -> SimpleNamespace:
    """Handles are in another order than HIP's numbers; values as ROCm 6.3 and later have them."""
    answers: dict[str, Any] = {
        "amdsmi_init": lambda: None,
        "amdsmi_get_processor_handles": lambda: [2, 0, 1],
        "amdsmi_get_gpu_device_bdf": lambda gpu: BUSES[gpu].upper(),
        "amdsmi_get_gpu_driver_info": lambda gpu: {"driver_version": "6.14.14"},
        "amdsmi_get_gpu_asic_info": lambda gpu: {"market_name": "AMD Instinct MI300X"},
        "amdsmi_get_gpu_vram_usage": lambda gpu: {"vram_total": 196592, "vram_used": 512 * (gpu + 1)},
        "amdsmi_get_gpu_activity": lambda gpu: {"gfx_activity": 3, "umc_activity": "N/A"},
        "amdsmi_get_gpu_process_list": lambda gpu: [
            {"name": "python", "pid": 42, "memory_usage": {"vram_mem": 2 << 30}}
        ],
        "amdsmi_get_clock_info": lambda gpu, kind: {"clk": 1300 + gpu, "max_clk": 2100},
        "amdsmi_get_power_info": lambda gpu: {"average_socket_power": "N/A", "current_socket_power": 700},
        "amdsmi_get_power_cap_info": lambda gpu: {"power_cap": 750_000_000},
        "amdsmi_get_temp_metric": lambda gpu, sensor, metric: 51,
        "amdsmi_get_energy_count": lambda gpu: {"energy_accumulator": 2_000_000, "counter_resolution": 15.3},
        "amdsmi_get_violation_status": lambda gpu: {"active_ppt_pwr": True, "active_hbm_thrm": gpu == 1},
        "amdsmi_get_gpu_total_ecc_count": lambda gpu: {"uncorrectable_count": gpu},
        "amdsmi_get_pcie_info": lambda gpu: {
            "pcie_static": {"max_pcie_width": 16, "max_pcie_speed": 32000},
            "pcie_metric": {"pcie_width": 8, "pcie_speed": 16000},
        },
        "AmdSmiException": AmdSmiException,
        "AmdSmiClkType": SimpleNamespace(GFX=1),
        "AmdSmiTemperatureType": SimpleNamespace(JUNCTION=2),
        "AmdSmiTemperatureMetric": SimpleNamespace(CURRENT=0),
    }
    return SimpleNamespace(**{**answers, **changes})


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process as it is with a torch for ROCm and with amdsmi."""
    monkeypatch.setitem(ACCELERATORS, "cuda", ROCM)
    monkeypatch.setitem(sys.modules, "amdsmi", library())


def test_the_build_of_torch_decides_which_gpus_are_meant() -> None:
    assert kinds_of(read_build(OF_TORCH)) == (CPU, ROCM)
    assert kinds_of(read_build("__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n")) == (CPU, CUDA)
    assert kinds_of(None) == (CPU, CUDA)


def test_a_torch_that_cannot_use_them_does_not_pass_them_over_in_silence(
    root: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setitem(ACCELERATORS, "cuda", CUDA)
    monkeypatch.setattr(accelerators, "installed_torch", lambda: CPU_ONLY)
    found = inspect_gpus({}, root)
    assert found.gpus == ()
    (note,) = found.notes
    wording(note)


def test_gpus_are_those_of_the_kernel_with_the_state_that_the_library_reports(
    root: Path, wording: Wording
) -> None:
    found = inspect_gpus({}, root)
    first, second, third = found.gpus
    assert [(gpu.uuid, gpu.bus, gpu.kind) for gpu in found.gpus] == [
        (uuid, bus, "cuda") for uuid, bus in zip(UUIDS, BUSES, strict=True)
    ]
    assert (first.name, first.memory_gib, second.used_gib) == ("AMD Instinct MI300X", 192.0, 1.0)
    assert (first.power_w, first.power_limit_w, first.temperature_c) == (700.0, 750.0, 51)
    assert (third.sm_clock_mhz, third.max_sm_clock_mhz, third.utilisation_percent) == (1302, 2100, 3)
    wording(first.busy_with)
    assert (first.peer_links, third.peer_links) == ({1: "xGMI", 2: "PCIe"}, {0: "PCIe", 1: "PCIe"})
    assert (found.driver, found.notes) == ("6.14.14", ())


def test_without_the_library_the_gpus_are_there_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise AmdSmiException

    for missing in (None, library(amdsmi_init=fails)):
        monkeypatch.setitem(sys.modules, "amdsmi", missing)
        found = inspect_gpus({}, root)
        assert [(gpu.name, gpu.memory_gib, gpu.power_w) for gpu in found.gpus] == [
            ("AMD GPU gfx942", 192.0, None)
        ] * 3
        assert found.notes == (amd.WITHOUT_LIBRARY,)
        assert amd.amd_sensors([0], {}, root)[0].energy_mj() is None


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, (2, 0)),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, (2,)),
        ({"ROCR_VISIBLE_DEVICES": f"{UUIDS[2]},0"}, (2, 0)),
        ({"HIP_VISIBLE_DEVICES": "GPU-12", "CUDA_VISIBLE_DEVICES": "0"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "1"}, (1,)),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ()),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, (0,)),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, ()),
    ],
)
def test_variables_limit_them_as_in_torch(
    root: Path, environ: dict[str, str], numbers: tuple[int, ...]
) -> None:
    """torch/cuda/__init__.py:860, `_parse_visible_devices`: HIP counts in what ROCR leaves."""
    assert [gpu.uuid for gpu in inspect_gpus(environ, root).gpus] == [UUIDS[number] for number in numbers]


def test_one_without_access_is_named(root: Path) -> None:
    (root / "dev/dri/renderD129").unlink()
    found = inspect_gpus({}, root)
    assert [gpu.uuid for gpu in found.gpus] == [UUIDS[0], UUIDS[2]]
    assert f"an AMD GPU, {BUSES[1]}, can't be opened" in found.notes[0]


def test_sensors_and_health_are_those_of_the_ranks_own_gpus(root: Path) -> None:
    environ = {"HIP_VISIBLE_DEVICES": f"{UUIDS[1]},{UUIDS[0]}"}
    first, second = amd.amd_sensors([0, 1], environ, root)
    assert (first.energy_mj(), first.power_w(), first.mean_clock_mhz(0)) == (30_600, 700.0, 1301.0)
    assert (first.throttling(), second.throttling()) == ("memory too hot", None)  # nor is the power cap
    assert (first.pcie_link(), first.hot_ns()) == ((4, 8), None)
    assert amd.amd_health([0], environ, root) == (
        GpuHealth(ecc_errors=1, pcie_lanes=8, max_pcie_lanes=16, pcie_generation=5),
    )


def test_a_rank_asks_amds_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    row = replace(ROCM, sensors=lambda indices, environ: asked.append(list(indices)) or ())  # type: ignore[func-returns-value]
    monkeypatch.setitem(ACCELERATORS, "cuda", row)
    CudaRuntime().sensors([SimpleNamespace(index=2)])  # type: ignore[list-item]
    assert asked == [[2]]


def test_a_job_gets_them_by_uuid_and_rccl(root: Path, wording: Wording) -> None:
    machine = inspect_machine(None, {}, root, lambda seconds: None)
    assert resolve_devices(("cuda:2", "cuda:0"), machine) == ("cuda:2", "cuda:0")
    assert visible_gpus(("cuda:2", "cuda:0"), machine) == {"HIP_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}"}
    assert visible_gpus(("cpu:0",), machine) == {"HIP_VISIBLE_DEVICES": "-1"}
    assert plan_and_backends("devices: cuda\nsplit: even\n", machine)[1] == ["nccl"]
    with wording.raises(SpecError):
        plan_and_backends("devices: cuda\nprecision: tf32\n", machine)
    assert "AMD driver 6.14.14\n" in render_devices(machine, 100)


def test_the_selftest_knows_torchs_way_of_writing_uuids(root: Path) -> None:
    machine = inspect_machine(None, {}, root, lambda seconds: None)
    facts = tuple(
        replace(each, uuid=f"{f'{serial:016x}'.encode().hex()[:8]}-{f'{serial:016x}'.encode().hex()[8:]}")
        for each, serial in zip(evidence().facts, SERIALS, strict=True)
    )
    seen = replace(evidence(), kind=ROCM, machine=machine, facts=facts)
    assert identities(seen).status == "ok"
    swapped = replace(seen, facts=(replace(facts[0], uuid=facts[1].uuid), *facts[1:]))
    assert identities(swapped).status == "failed"
    assert driver(seen).found.startswith("AMD driver 6.14.14; torch")


def test_make_gpu_test_names_them_as_a_rank_does(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torch_of(command: Any, env: dict[str, str], **_: Any) -> Any:
        texts = [uuid.removeprefix("GPU-").encode().hex() for uuid in env["HIP_VISIBLE_DEVICES"].split(",")]
        return SimpleNamespace(stdout=" ".join(f"{text[:8]}-{text[8:]}" for text in texts))

    monkeypatch.setattr(test_drivers_here, "inspect_gpus", lambda environ: inspect_gpus({}, root))
    monkeypatch.setattr(subprocess, "run", torch_of)
    report = Report()
    test_drivers_here.test_torch_numbers_them_as_gpurun_does_in_a_rank(Devices("cuda", 3), report)
    assert report.lines[0].startswith("UUIDs in HIP_VISIBLE_DEVICES: ok")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("H100 80GB", (80,)),
        ("H100 HBM3", (80,)),
        ("H100", (80, 94)),
        ("NVIDIA A100-SXM4-40GB", (40,)),
        ("a100 40 GB", (40,)),
        ("rtx 4090", (24,)),
        ("L4", (24,)),
        ("MI300X", (192,)),
        ("NVIDIA", ()),
        ("H100 81GB", ()),
    ],
)
def test_memory_by_name(name: str, sizes: tuple[int, ...]) -> None:
    assert memory_sizes_gb(name) == sizes


@pytest.mark.parametrize(
    ("name", "bf16", "gb_per_s"),
    [
        ("AMD Instinct MI300X OAM", 1307.4, 5300.0),
        ("AMD Instinct MI250X", 191.5, 1638.4),
        ("AMD Instinct MI250X / MI250", 191.5, 1638.4),  # one of two: of the slower one, MFU is too low
    ],
)
def test_peaks(name: str, bf16: float, gb_per_s: float) -> None:
    assert (peak_tflop_per_s(name, "bf16"), peak_gb_per_s(name)) == (bf16, gb_per_s)
    assert peak_tflop_per_s("AMD Instinct MI300X partition", "bf16") is None
