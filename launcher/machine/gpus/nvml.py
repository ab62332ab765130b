"""NVIDIA GPUs, as their driver's library (NVML) reports them, and their health: no CUDA context, no torch."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpurun.launcher.machine import read_text
from gpurun.launcher.machine.gpus.gpu import (
    HOT_BY_DRIVER,
    HOT_BY_HARDWARE,
    Gpu,
    GpuProcess,
    Gpus,
    Sensors,
    chosen,
    position_of,
)
from gpurun.launcher.units import GIB

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
MIG_PREFIX = "MIG-"
"""How the UUID of a part of a GPU begins."""

COMMON_ANCESTOR = {
    0: "PCIe, one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, host bridge",
    40: "PCIe, one CPU",
    50: "PCIe, between CPUs",
}
"""Source: `nvmlGpuTopologyLevel_t` of the NVML API reference."""
NO_LIBRARY = "NVIDIA's module is loaded, but libnvidia-ml.so.1 is missing (a container needs `utility`)"
MIG_ENABLED = 1
"""Source: `NVML_DEVICE_MIG_ENABLE` of the NVML API reference."""
LINK_TO_SWITCH = 2
"""Source: `nvmlIntNvLinkDeviceType_t` of the NVML API reference."""

THROTTLING = {
    0x40: HOT_BY_HARDWARE,
    0x80: "power brake",
    0x20: HOT_BY_DRIVER,
    0x08: "slowed down by its hardware (power or heat)",
}
"""Reasons for a low clock that come and go, what says most first: 0x08 is set along with 0x40 and with 0x80.

The power cap is none: under full load it is a GPU's usual state.

Source: `nvmlClocksEventReasons` of the NVML API reference.
"""
THERMAL = 1
"""Source: `NVML_PERF_POLICY_THERMAL` of the NVML API reference."""
CLOCK_SAMPLES = 5
"""Source: `NVML_PROCESSOR_CLK_SAMPLES` of the NVML API reference."""


def load_nvml() -> Any:
    """The NVML binding; `None` where it isn't installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def has_module(root: Path = Path("/")) -> bool:
    """Whether the kernel has NVIDIA's module."""
    return any((root / name).exists() for name in ("dev/nvidiactl", "proc/driver/nvidia"))


def has_driver(root: Path = Path("/")) -> bool:
    """Whether a driver may be installed; without one the binding needn't be loaded.

    WSL has `dxg` instead of a module, also where the GPU is another vendor's.
    """
    return has_module(root) or (root / "dev/dxg").exists()


def inspect_nvidia_gpus(environ: Mapping[str, str], root: Path = Path("/"), binding: Any = None) -> Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES of `environ` leaves visible, in its order.

    Numbers in it count in PCI order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        environ: of the processes that will use the GPUs.
        root: where `dev` and `proc` are.
        binding: an object with pynvml's functions; by default pynvml itself.
    """
    nvml = binding or (load_nvml() if has_driver(root) else None)
    visible = environ.get(VISIBLE)
    if nvml is None:
        return Gpus()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        if gpus := _gpus_of_module(visible, root):
            notes = (f"{NO_LIBRARY}; memory, power and other processes aren't known, and NCCL won't start",)
            version = _VERSION.search(read_text(root / "proc/driver/nvidia/version"))
            return Gpus(gpus, notes=notes, driver=version and version[0])
        return Gpus(nvml_error=NO_LIBRARY) if has_module(root) else Gpus()
    except nvml.NVMLError as error:
        return Gpus(nvml_error=str(error))
    try:
        handles = _visible_handles(nvml, visible)
        return Gpus(
            gpus=tuple(_gpu(nvml, index, handles) for index in range(len(handles))),
            notes=(*_hidden_notes(nvml), *_order_notes(nvml, environ)),
            driver=ask(nvml, "nvmlSystemGetDriverVersion"),
            cuda_driver_version=_version(ask(nvml, "nvmlSystemGetCudaDriverVersion")),
        )
    except nvml.NVMLError as error:
        return Gpus(nvml_error=str(error))
    finally:
        nvml.nvmlShutdown()


P2P_READ, P2P_NVLINK, P2P_OK = 0, 2, 0
"""`NVML_P2P_CAPS_INDEX_READ` and `_NVLINK`, and `NVML_P2P_STATUS_OK`: without peer access, messages go
through the host.

Source: `nvmlGpuP2PCapsIndex_t` of the NVML API reference.
"""


_VERSION = re.compile(r"\b\d{3,}(\.\d+){1,2}\b")
"""`550.54.15` in the first line of `proc/driver/nvidia/version`."""


def _gpus_of_module(visible: str | None, root: Path) -> tuple[Gpu, ...]:
    """The GPUs that the kernel's module names and whose device file is here, those in `visible` if it is
    given; torch needs no NVML.

    Source: NVIDIA driver README, appendix "Proc Filesystem Interface".
    """
    found = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        rows = [line.partition(":") for line in read_text(file).splitlines()]
        facts = {key.strip(): value.strip() for key, _, value in rows}
        device = root / f"dev/nvidia{facts.get('Device Minor', '')}"
        if facts.get("GPU UUID", "").startswith("GPU-") and device.exists():
            found.append((facts["GPU UUID"], facts.get("Model", "NVIDIA GPU"), file.parent.name.lower()))
    return tuple(
        Gpu(uuid, name, index=index, bus=bus)
        for index, (uuid, name, bus) in enumerate(
            found[position] for position in chosen(visible, [uuid for uuid, _, _ in found])
        )
    )


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """NVML handles by CUDA's rules: UUIDs may be cut short, the first unknown device ends the list, and one
    that is named twice empties it.

    A GPU in MIG mode can't be used itself: its instances take its place.
    Source: torch/cuda/__init__.py, `_parse_visible_devices` and `_transform_uuid_to_ordinals`.

    Raises:
        NVMLError: the driver doesn't say how many GPUs there are.
    """
    handles = [handle for handle in _openable(nvml) if not isinstance(handle, str)]
    if visible is None:
        return [instance for handle in handles for instance in _instances(nvml, handle)]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    found = []
    for token in (part.strip() for part in visible.split(",")):
        if token.startswith(MIG_PREFIX):
            handle = ask(nvml, "nvmlDeviceGetHandleByUUID", token)
            named = [] if handle is None else [handle]
        else:
            position = position_of(token, uuids)
            named = [] if position is None else _instances(nvml, handles[position])
        if not named:
            break
        found += named
    named_by = [nvml.nvmlDeviceGetUUID(handle) for handle in found]
    return found if len(set(named_by)) == len(found) else []


def _openable(nvml: Any) -> list[Any]:
    """A handle for each GPU of the machine, or why this process can't open it.

    NVML counts also GPUs that a cgroup keeps from this process, or that have fallen off the bus; CUDA's
    ordinals leave them out. Source: `nvmlDeviceGetCount_v2` of the NVML API reference.
    """
    found: list[Any] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetUUID(handle)
            found.append(handle)
        except nvml.NVMLError as error:
            found.append(str(error) or type(error).__name__)
    return found


def _hidden_notes(nvml: Any) -> list[str]:
    """Which GPUs of the machine this process can't open."""
    found = _openable(nvml)
    return [
        f"GPU {index} of this machine's {len(found)} can't be opened by this process: {why}"
        for index, why in enumerate(found)
        if isinstance(why, str)
    ]


def _order_notes(nvml: Any, environ: Mapping[str, str]) -> list[str]:
    """How GPUs are counted, where CUDA would count unlike ones in another order."""
    named_by_uuid = all(part.strip()[:1].isalpha() for part in environ.get(VISIBLE, "0").split(","))
    names = {ask(nvml, "nvmlDeviceGetName", gpu) for gpu in _openable(nvml) if not isinstance(gpu, str)}
    if len(names) < 2 or named_by_uuid or environ.get(ORDER) == "PCI_BUS_ID":
        return []
    return [
        "GPUs are counted in PCI order, as nvidia-smi does; a program of its own would count the fastest "
        f"first unless {ORDER}=PCI_BUS_ID is set"
    ]


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """The MIG instances of a GPU; itself where it isn't divided."""
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or mode[0] != MIG_ENABLED:
        return [handle]
    count = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    found = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index) for index in range(count)]
    return [instance for instance in found if instance is not None]


def _gpu(nvml: Any, index: int, handles: Sequence[Any]) -> Gpu:
    handle = handles[index]
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    usage = ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=memory.total / GIB if memory else None,
        used_gib=memory.used / GIB if memory else None,
        utilisation_percent=usage.gpu if usage else None,
        processes=_processes(nvml, handle),
        peer_links=_peer_links(nvml, index, handles),
        sm_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        power_w=_thousandth(ask(nvml, "nvmlDeviceGetPowerUsage", handle)),
        power_limit_w=_thousandth(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)),
        temperature_c=ask(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        bus=_address(nvml, handle),
        capability=_pair(ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)),
        persistence=_is_on(ask(nvml, "nvmlDeviceGetPersistenceMode", handle)),
    )


def _is_on(mode: int | None) -> bool | None:
    return None if mode is None else bool(mode)


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...] | None:
    """The processes that compute on it. NVML lists clients of MPS apart; the server is among the others.

    Source: `nvmlDeviceGetMPSComputeRunningProcesses` of the NVML API reference.
    """
    running = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    if running is None:
        return None
    running = [*running, *(ask(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", handle) or ())]
    return tuple(
        GpuProcess(
            pid=process.pid,
            name=read_text(Path(f"/proc/{process.pid}/comm")) or None,
            used_gib=None if process.usedGpuMemory is None else process.usedGpuMemory / GIB,
        )
        for process in {process.pid: process for process in running}.values()
    )


def _peer_links(nvml: Any, index: int, handles: Sequence[Any]) -> dict[int, str]:
    others = [other for other in range(len(handles)) if other != index]
    if not others:
        return {}
    to_switch, by_bus = _nvlinks(nvml, handles[index])
    return {other: _peer_link(nvml, handles[index], handles[other], to_switch, by_bus) for other in others}


def _peer_link(nvml: Any, handle: Any, other: Any, to_switch: int, by_bus: Mapping[str, int]) -> str:
    """Links through an NVSwitch reach every GPU behind it, direct ones only their own peer.

    In a virtual machine single links may not be reported, but whether there are any between two GPUs.
    """
    direct = by_bus.get(_bus(ask(nvml, "nvmlDeviceGetPciInfo", other)), 0)
    if direct or (to_switch and _nvlinks(nvml, other)[0]):
        return f"NVLink {direct or to_switch}x"
    if ask(nvml, "nvmlDeviceGetP2PStatus", handle, other, P2P_NVLINK) == P2P_OK:
        return "NVLink"
    level = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, other)
    link = COMMON_ANCESTOR.get(level, "PCIe") if level is not None else "PCIe"
    has_access = ask(nvml, "nvmlDeviceGetP2PStatus", handle, other, P2P_READ) in (None, P2P_OK)
    return link if has_access else f"{link}, no peer access"


def _nvlinks(nvml: Any, handle: Any) -> tuple[int, dict[str, int]]:
    """Active links to a switch, and to other GPUs by PCI address."""
    to_switch, by_bus = 0, dict[str, int]()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not ask(nvml, "nvmlDeviceGetNvLinkState", handle, link):
            continue
        if ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == LINK_TO_SWITCH:
            to_switch += 1
        else:
            bus = _bus(ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
            by_bus[bus] = by_bus.get(bus, 0) + 1
    return to_switch, by_bus


def _address(nvml: Any, handle: Any) -> str:
    """The PCI address of a GPU, or of the one that a MIG instance is a part of."""
    parent = _parent_of(nvml, handle)
    return _bus(ask(nvml, "nvmlDeviceGetPciInfo", handle if parent is None else parent))


def _parent_of(nvml: Any, handle: Any) -> Any:
    """The whole GPU of a MIG instance; `None` for a whole GPU."""
    if not (ask(nvml, "nvmlDeviceGetUUID", handle) or "").startswith(MIG_PREFIX):
        return None
    return ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)


def _bus(pci: Any) -> str:
    """`0000:1b:00.0`, however many digits the driver gives the domain."""
    if pci is None:
        return ""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def ask(nvml: Any, query: str, *arguments: Any) -> Any:
    """The answer, or `None`: old cards, old drivers, containers and MIG don't answer every question.

    Where a driver lacks the newest version of a function, some raise an error that is no `NVMLError`.
    Source: pynvml.py, `throwOnVersionMismatch`.
    """
    too_old = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
    try:
        return getattr(nvml, query)(*arguments)
    except (nvml.NVMLError, too_old, AttributeError):
        return None


def _pair(capability: Sequence[int] | None) -> tuple[int, int] | None:
    return None if capability is None else (capability[0], capability[1])


def _thousandth(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


def _version(number: int | None) -> str | None:
    """`13.0` for 13000."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def inspect_sensors(
    indices: Sequence[int], environ: Mapping[str, str], binding: Any = None
) -> tuple[Sensors, ...]:
    """The sensors of the visible GPUs at `indices`; where NVML doesn't answer, ones that know nothing.

    Args:
        indices: CUDA's ordinals in this process.
        environ: of this process.
        binding: an object with pynvml's functions; by default pynvml itself.
    """
    nvml = binding or load_nvml()
    try:
        if nvml is not None:
            nvml.nvmlInit()
        handles = _visible_handles(nvml, environ.get(VISIBLE)) if nvml is not None else []
    except nvml.NVMLError:
        handles = []
    return tuple(_sensors(nvml, handles[i]) if i < len(handles) else Sensors() for i in indices)


def _sensors(nvml: Any, handle: Any) -> Sensors:
    """The sensors that a MIG instance's whole GPU has; energy and power are not the instance's alone."""
    parent = _parent_of(nvml, handle)
    asked = NvmlSensors(nvml, handle if parent is None else parent)
    shared = Sensors(
        hot_ns=asked.hot_ns,
        throttling=asked.throttling,
        mean_clock_mhz=asked.mean_clock_mhz,
        pcie_link=asked.pcie_link,
    )
    if parent is not None:
        return shared
    energy_mj = partial(ask, nvml, "nvmlDeviceGetTotalEnergyConsumption", handle)  # Volta and later have it
    return replace(shared, energy_mj=energy_mj, power_w=asked.power_w)


@dataclass(frozen=True)
class NvmlSensors:
    """One whole GPU."""

    nvml: Any
    handle: Any

    def hot_ns(self) -> int | None:
        """Source: `nvmlDeviceGetViolationStatus` of the NVML API reference: nanoseconds."""
        found = ask(self.nvml, "nvmlDeviceGetViolationStatus", self.handle, THERMAL)
        return None if found is None else int(found.violationTime)

    def throttling(self) -> str | None:
        reasons = ask(self.nvml, "nvmlDeviceGetCurrentClocksEventReasons", self.handle)
        if reasons is None:  # its name before driver 535
            reasons = ask(self.nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", self.handle)
        return next((text for bit, text in THROTTLING.items() if (reasons or 0) & bit), None)

    def mean_clock_mhz(self, since_us: int) -> float | None:
        """The driver keeps samples of the last seconds; where it doesn't, this is the clock now."""
        _, samples = ask(self.nvml, "nvmlDeviceGetSamples", self.handle, CLOCK_SAMPLES, since_us) or (0, ())
        if clocks := [sample.sampleValue.uiVal for sample in samples if sample.timeStamp >= since_us]:
            return float(sum(clocks) / len(clocks))
        now = ask(self.nvml, "nvmlDeviceGetClockInfo", self.handle, self.nvml.NVML_CLOCK_SM)
        return None if now is None else float(now)

    def power_w(self) -> float | None:
        return _thousandth(ask(self.nvml, "nvmlDeviceGetPowerUsage", self.handle))

    def pcie_link(self) -> tuple[int, int] | None:
        generation = ask(self.nvml, "nvmlDeviceGetCurrPcieLinkGeneration", self.handle)
        lanes = ask(self.nvml, "nvmlDeviceGetCurrPcieLinkWidth", self.handle)
        return (generation, lanes) if generation and lanes else None


UNCORRECTED, SINCE_START = 1, 0
"""Source: `nvmlMemoryErrorType_t` and `nvmlEccCounterType_t` of the NVML API reference."""
NVLINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
"""The rate of a link in one direction, by the number of its version (`nvmlNvlinkVersion_t`).

Source: NVIDIA's white papers: P100 160 GB/s by 4 links of both directions, V100 300 by 6, A100 600 by 12,
H100 900 by 18, B200 1,800 by 18.
"""
GA102, GA102_NVLINK_GB_PER_S = (8, 6), 14.0625
"""The compute capability of RTX 3090, A6000, A40 and others, whose links of version 3 have half the lanes.

Source: NVIDIA Ampere GA102 GPU Architecture white paper, third-generation NVLink.
"""
PCIE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""The rate of a lane in one direction, by generation. Source: PCI Express Base Specification."""


@dataclass(frozen=True)
class GpuHealth:
    """One GPU. What the driver doesn't report is `None`."""

    ecc_errors: int | None = None
    """Errors of its memory since the driver was loaded that ECC could not correct."""
    needs_reset: bool | None = None
    """Whether rows of its memory wait for a reset to be replaced."""
    has_lost_rows: bool | None = None
    """Whether rows of its memory could not be replaced, since none are left to replace them."""
    nvlink_gb_per_s: float | None = None
    """One NVLink, in one direction."""
    pcie_lanes: int | None = None
    max_pcie_lanes: int | None = None
    """The most that card and slot have in common."""
    pcie_generation: int | None = None
    """The newest that card and slot have in common: an idle link may run at an older one."""

    @property
    def pcie_gb_per_s(self) -> float | None:
        """In one direction, over the lanes in use."""
        per_lane = PCIE_GB_PER_S.get(self.pcie_generation or 0)
        return per_lane * self.pcie_lanes if per_lane and self.pcie_lanes else None


def inspect_health(
    indices: Sequence[int], environ: Mapping[str, str], binding: Any = None
) -> tuple[GpuHealth, ...]:
    """The health of the visible GPUs at `indices`; of a MIG instance that of its whole GPU.

    Args:
        indices: as `Gpu.index`.
        environ: as `inspect_nvidia_gpus` takes it.
        binding: an object with pynvml's functions; by default pynvml itself.
    """
    nvml, unknown = binding or load_nvml(), tuple(GpuHealth() for _ in indices)
    if nvml is None:
        return unknown
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return unknown
    try:
        handles = _visible_handles(nvml, environ.get(VISIBLE))
        return tuple(_health(nvml, handles[i]) if i < len(handles) else GpuHealth() for i in indices)
    except nvml.NVMLError:  # a driver that has failed since it was loaded
        return unknown
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, handle: Any) -> GpuHealth:
    parent = _parent_of(nvml, handle)
    gpu = handle if parent is None else parent
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", gpu)
    return GpuHealth(
        ecc_errors=ask(nvml, "nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, SINCE_START),
        needs_reset=None if rows is None else bool(rows[2]),
        has_lost_rows=None if rows is None else bool(rows[3]),
        nvlink_gb_per_s=_nvlink_gb_per_s(nvml, gpu),
        pcie_lanes=ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", gpu),
        max_pcie_lanes=ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", gpu),
        pcie_generation=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", gpu),
    )


def _nvlink_gb_per_s(nvml: Any, gpu: Any) -> float | None:
    version = ask(nvml, "nvmlDeviceGetNvLinkVersion", gpu, 0) or 0
    if version in NVLINK_GB_PER_S and _pair(ask(nvml, "nvmlDeviceGetCudaComputeCapability", gpu)) == GA102:
        return GA102_NVLINK_GB_PER_S
    return NVLINK_GB_PER_S.get(version)
