"""AMD GPUs: which there are by the kernel's topology, their state by AMD's amdsmi where it is installed.

Written by documentation and torch's sources, and tested with fakes: it has not run on AMD hardware yet.
"""

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpurun.launcher.machine import read_numbers, read_text
from gpurun.launcher.machine.gpus.gpu import (
    HOT_BY_DRIVER,
    HOT_BY_HARDWARE,
    Gpu,
    GpuProcess,
    Gpus,
    Sensors,
    chosen,
)
from gpurun.launcher.machine.gpus.nvml import GpuHealth
from gpurun.launcher.units import GIB, plural

VISIBLE = "HIP_VISIBLE_DEVICES"
ROCR_VISIBLE = "ROCR_VISIBLE_DEVICES"
"""Limits all of ROCm; HIP counts what is left. Source: ROCm documentation, "GPU isolation techniques"."""
NODES = "sys/class/kfd/kfd/topology/nodes"
"""Source: the kernel's amdkfd driver; HIP counts GPUs in this order, by way of the ROCm runtime."""
XGMI = 11
"""Source: `HSA_IOLINK_TYPE_XGMI` of the ROCm runtime's hsakmttypes.h."""
OF_FRAME_BUFFER = (1, 2)
"""Source: there, `HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC` and `HSA_HEAPTYPE_FRAME_BUFFER_PRIVATE`."""
MIB = 1 << 20
THROTTLING = {
    "active_prochot_thrm": HOT_BY_HARDWARE,
    "active_socket_thrm": HOT_BY_DRIVER,
    "active_hbm_thrm": "memory too hot",
    "active_vr_thrm": "voltage regulator too hot",
}
"""The power cap is none, as for NVIDIA's. Source: AMD SMI, `amdsmi_get_violation_status`; MI300 and later."""
MT_PER_S = (2500, 5000, 8000, 16000, 32000, 64000)
"""The rate by generation of PCIe, from 1. Source: AMD SMI, `amdsmi_get_pcie_info`, has MT/s."""
WITHOUT_LIBRARY = (
    "amdsmi isn't installed here: clocks, power, energy and other processes on AMD GPUs are unknown"
)


@dataclass(frozen=True)
class TopologyNode:
    """A GPU in the kernel's topology."""

    number: int
    directory: Path
    properties: Mapping[str, int]

    @property
    def bus(self) -> str:
        """`0000:1b:00.0`."""
        place, domain = self.properties.get("location_id", 0), self.properties.get("domain", 0)
        return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"

    @property
    def uuid(self) -> str | None:
        """The UUID as HIP_VISIBLE_DEVICES takes it; cards for consumers may have none."""
        serial = self.properties.get("unique_id", 0)
        return f"GPU-{serial:016x}" if serial else None

    @property
    def target(self) -> str:
        """`gfx90a`. Source: the ROCm runtime's topology.c: major, minor and stepping by two digits each."""
        version = self.properties.get("gfx_target_version", 0)
        return f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}"

    @property
    def memory_bytes(self) -> int:
        banks = (read_numbers(path) for path in self.directory.glob("mem_banks/*/properties"))
        return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in OF_FRAME_BUFFER)

    @property
    def fabric(self) -> frozenset[int]:
        """Nodes that it is linked to by xGMI (Infinity Fabric)."""
        found = (read_numbers(path) for path in self.directory.glob("io_links/*/properties"))
        return frozenset(link["node_to"] for link in found if link.get("type") == XGMI and "node_to" in link)


def gpu_nodes(root: Path = Path("/")) -> list[TopologyNode]:
    """All GPUs of the topology in its order; the other nodes are CPUs. A cgroup may hide what a node is."""
    numbers = sorted(int(path.name) for path in (root / NODES).glob("*") if path.name.isdecimal())
    directories = ((number, root / NODES / str(number)) for number in numbers)
    return [
        TopologyNode(number, directory, read_numbers(directory / "properties"))
        for number, directory in directories
        if read_text(directory / "gpu_id") not in ("", "0")
    ]


def inspect_amd_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """The GPUs that the variables of `environ` leave visible, in HIP's order.

    Args:
        environ: of the processes that will use the GPUs.
        root: where `dev` and `sys` are.
    """
    nodes = gpu_nodes(root)
    of_rocm = rocm_nodes(nodes, root, environ)
    visible = hip_nodes(of_rocm, environ)
    library = load_amdsmi()
    handles = _handles(library)
    notes = [
        f"an AMD GPU, {node.bus}, can't be opened by this process: it needs access to /dev/dri and /dev/kfd"
        for node in nodes
        if not can_open(node, root)
    ]
    version = _ask(library, "amdsmi_get_gpu_driver_info", next(iter(handles.values()), None))
    return Gpus(
        gpus=tuple(
            _gpu(library, handles.get(node.bus), index, visible, root, _name_for_hip(node, of_rocm))
            for index, node in enumerate(visible)
        ),
        driver=str((version or {}).get("driver_version") or read_text(root / "sys/module/amdgpu/version"))
        or None,
        notes=(*notes, *([WITHOUT_LIBRARY] if visible and not handles else [])),
    )


def _name_for_hip(node: TopologyNode, nodes: Sequence[TopologyNode]) -> str:
    """What HIP_VISIBLE_DEVICES takes for one of these GPUs: its UUID; its number where that isn't its alone,
    as consumers' cards may have none, and partitions that of their GPU."""
    same = [other for other in nodes if other.uuid == node.uuid]
    return node.uuid if node.uuid and len(same) == 1 else str(nodes.index(node))


def can_open(node: TopologyNode, root: Path) -> bool:
    """Whether this process may open its device file, without which HIP leaves it out."""
    minor = node.properties.get("drm_render_minor", 0)
    return not minor or os.access(root / f"dev/dri/renderD{minor}", os.R_OK | os.W_OK)


def rocm_nodes(nodes: Sequence[TopologyNode], root: Path, environ: Mapping[str, str]) -> list[TopologyNode]:
    """The GPUs that ROCR_VISIBLE_DEVICES leaves, in which HIP counts."""
    return _chosen([node for node in nodes if can_open(node, root)], environ.get(ROCR_VISIBLE))


def hip_nodes(of_rocm: Sequence[TopologyNode], environ: Mapping[str, str]) -> list[TopologyNode]:
    """The GPUs that HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, leaves of those.

    Source: torch/cuda/__init__.py, `_parse_visible_devices` and `_device_count_amdsmi`.
    """
    return _chosen(of_rocm, environ.get(VISIBLE, environ.get("CUDA_VISIBLE_DEVICES")))


def _chosen(nodes: Sequence[TopologyNode], named: str | None) -> list[TopologyNode]:
    """The GPUs that a variable chooses; the case of a UUID's digits makes no difference."""
    lower = named and re.sub(r"(?<=GPU-)\w+", lambda digits: digits[0].lower(), named)
    return [nodes[position] for position in chosen(lower, [node.uuid for node in nodes])]


def _gpu(
    library: Any, handle: Any, index: int, visible: Sequence[TopologyNode], root: Path, name_for_hip: str
) -> Gpu:
    node = visible[index]
    ask = partial(_ask, library, handle=handle)
    clock = _clock(library, handle)
    num_parts = sum(other.bus == node.bus for other in visible)
    name = _name(ask("amdsmi_get_gpu_asic_info"), node, root)
    return Gpu(
        index=index,
        uuid=name_for_hip,
        name=f"{name} partition" if num_parts > 1 else name,
        memory_gib=node.memory_bytes / GIB or None,
        used_gib=_gib(_number(ask("amdsmi_get_gpu_vram_usage"), "vram_used"), MIB),
        utilisation_percent=_whole(_number(ask("amdsmi_get_gpu_activity"), "gfx_activity")),
        processes=_processes(ask("amdsmi_get_gpu_process_list")),
        peer_links={
            other: "xGMI" if visible[other].number in node.fabric else "PCIe"
            for other in range(len(visible))
            if other != index
        },
        sm_clock_mhz=_whole(_number(clock, "clk", "cur_clk")),
        max_sm_clock_mhz=_whole(_number(clock, "max_clk")),
        power_w=AmdSensors(library, handle).power_w(),
        power_limit_w=_millionth(_number(ask("amdsmi_get_power_cap_info"), "power_cap")),
        temperature_c=_temperature(library, handle),
        bus=node.bus,
    )


def _name(asic: Any, node: TopologyNode, root: Path) -> str:
    """`AMD Instinct MI300X`; without the library and a name in sysfs by its instruction set."""
    known = (
        (asic or {}).get("market_name", ""),
        read_text(root / "sys/bus/pci/devices" / node.bus / "product_name"),
    )
    return next((name for name in map(str, known) if name and name != "N/A"), f"AMD GPU {node.target}")


def _processes(found: Any) -> tuple[GpuProcess, ...] | None:
    """Source: AMD SMI, `amdsmi_get_gpu_process_list`: memory in bytes."""
    if found is None or not all(isinstance(process, Mapping) for process in found):
        return None
    return tuple(
        GpuProcess(
            pid=int(process["pid"]),
            name=None if process.get("name") in (None, "", "N/A") else str(process["name"]),
            used_gib=_gib(_number(process.get("memory_usage"), "vram_mem"), 1),
        )
        for process in found
    )


def _temperature(library: Any, handle: Any) -> int | None:
    try:
        kinds = (library.AmdSmiTemperatureType.JUNCTION, library.AmdSmiTemperatureMetric.CURRENT)
    except AttributeError:
        return None
    found = _ask(library, "amdsmi_get_temp_metric", handle, *kinds)
    return int(found) if isinstance(found, int | float) else None


def _clock(library: Any, handle: Any) -> Any:
    try:
        graphics = library.AmdSmiClkType.GFX
    except AttributeError:
        return None
    return _ask(library, "amdsmi_get_clock_info", handle, graphics)


@dataclass(frozen=True)
class AmdSensors:
    """One GPU, by AMD SMI's Python API.

    Source: its README and amdsmi_interface.py; torch/cuda/__init__.py asks it alike.
    """

    library: Any
    handle: Any

    def energy_mj(self) -> int | None:
        """The counter times its resolution in microjoules."""
        found = _ask(self.library, "amdsmi_get_energy_count", self.handle)
        counter, unit_uj = _number(found, "energy_accumulator", "power"), _number(found, "counter_resolution")
        return None if counter is None or unit_uj is None else round(counter * unit_uj / 1000)

    def throttling(self) -> str | None:
        found = _ask(self.library, "amdsmi_get_violation_status", self.handle) or {}
        return next((text for key, text in THROTTLING.items() if found.get(key) is True), None)

    def mean_clock_mhz(self, since_us: int) -> float | None:
        """The clock now: AMD SMI keeps no samples."""
        return _number(_clock(self.library, self.handle), "clk", "cur_clk")

    def power_w(self) -> float | None:
        found = _ask(self.library, "amdsmi_get_power_info", self.handle)
        return _number(found, "average_socket_power", "current_socket_power")

    def pcie_link(self) -> tuple[int, int] | None:
        metric = (_ask(self.library, "amdsmi_get_pcie_info", self.handle) or {}).get("pcie_metric")
        lanes, speed = _number(metric, "pcie_width"), _number(metric, "pcie_speed")
        return (MT_PER_S.index(int(speed)) + 1, int(lanes)) if lanes and speed in MT_PER_S else None


def amd_sensors(
    indices: Sequence[int], environ: Mapping[str, str], root: Path = Path("/")
) -> tuple[Sensors, ...]:
    """The sensors of the visible GPUs at `indices`, HIP's numbers in a process with `environ`."""
    library = load_amdsmi()
    return tuple(
        Sensors()
        if handle is None
        else Sensors(
            energy_mj=(asked := AmdSensors(library, handle)).energy_mj,
            throttling=asked.throttling,
            mean_clock_mhz=asked.mean_clock_mhz,
            power_w=asked.power_w,
            pcie_link=asked.pcie_link,
        )
        for handle in _handles_at(library, indices, environ, root)
    )


def amd_health(
    indices: Sequence[int], environ: Mapping[str, str], root: Path = Path("/")
) -> tuple[GpuHealth, ...]:
    """The health of the visible GPUs at `indices`."""
    library = load_amdsmi()
    return tuple(_health(library, handle) for handle in _handles_at(library, indices, environ, root))


def _health(library: Any, handle: Any) -> GpuHealth:
    errors = _ask(library, "amdsmi_get_gpu_total_ecc_count", handle)
    link = _ask(library, "amdsmi_get_pcie_info", handle) or {}
    best, now = link.get("pcie_static"), link.get("pcie_metric")
    speed = _number(best, "max_pcie_speed")
    return GpuHealth(
        ecc_errors=_whole(_number(errors, "uncorrectable_count")),
        pcie_lanes=_whole(_number(now, "pcie_width")),
        max_pcie_lanes=_whole(_number(best, "max_pcie_width")),
        pcie_generation=MT_PER_S.index(int(speed)) + 1 if speed in MT_PER_S else None,
    )


def _handles_at(library: Any, indices: Sequence[int], environ: Mapping[str, str], root: Path) -> list[Any]:
    """The handles of the visible GPUs at `indices`; `None` where the library doesn't know one."""
    visible = hip_nodes(rocm_nodes(gpu_nodes(root), root, environ), environ)
    handles = _handles(library)
    return [handles.get(visible[i].bus) if i < len(visible) else None for i in indices]


def load_amdsmi() -> Any:
    """AMD SMI's Python package; `None` where it isn't installed, or finds no library."""
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, OSError, AttributeError, KeyError):
        return None


def _handles(library: Any) -> dict[str, Any]:
    """The handles by PCI address: the library counts GPUs in its own order. It stays loaded, as in torch."""
    if library is None:
        return {}
    try:
        library.amdsmi_init()
        found = library.amdsmi_get_processor_handles()
    except library.AmdSmiException:
        return {}
    buses = ((_ask(library, "amdsmi_get_gpu_device_bdf", handle), handle) for handle in found)
    return {str(bus).lower(): handle for bus, handle in buses if bus}


def _ask(library: Any, query: str, handle: Any, *arguments: Any) -> Any:
    """The answer; `None` where this version or this GPU has none."""
    if library is None or handle is None:
        return None
    try:
        return getattr(library, query)(handle, *arguments)
    except (library.AmdSmiException, AttributeError):
        return None


def _number(answer: Any, *keys: str) -> float | None:
    """The first of `keys` with a number: what isn't known is "N/A", and versions name some differently."""
    values = (answer.get(key) for key in keys) if isinstance(answer, Mapping) else ()
    numbers = (value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
    return next(map(float, numbers), None)


def _gib(amount: float | None, unit_bytes: int) -> float | None:
    return None if amount is None else amount * unit_bytes / GIB


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _millionth(micro: float | None) -> float | None:
    return None if micro is None else micro / 1e6


def amd_notes(root: Path, torch: str) -> tuple[str, ...]:
    """The note that there are AMD GPUs, which a torch that wasn't built for ROCm can't use."""
    count = len(gpu_nodes(root))
    if not count:
        return ()
    found = "an AMD GPU" if count == 1 else plural(count, "AMD GPU")
    return (
        f"this machine has {found}, but torch {torch} was not built for ROCm\n"
        "    https://pytorch.org/get-started/locally has a build that is",
    )
