"""This machine's NVIDIA GPUs, asked of the driver (NVML): no CUDA context, no torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

BUSY_GIB = 1.0
"""A process that holds less on a GPU is a monitor or a server that waits."""
BUSY_PERCENT = 10
BUSY_SHARE = 0.1
"""Of a GPU's memory: in a container the processes that hold it may not be listed."""

COMMON_ANCESTOR = {
    0: "PCIe, one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, host bridge",
    40: "PCIe, one CPU",
    50: "PCIe, between CPUs",
}
"""Source: `nvmlGpuTopologyLevel_t` of the NVML API reference."""
MIG_ENABLED = 1
"""Source: `NVML_DEVICE_MIG_ENABLE` of the NVML API reference."""
LINK_TO_SWITCH = 2
"""Source: `nvmlIntNvLinkDeviceType_t` of the NVML API reference."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU. The name is `None` where it belongs to another container."""

    pid: int
    name: str | None
    used_gib: float | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. What the driver doesn't say is `None`."""

    index: int
    """Counts the devices that CUDA_VISIBLE_DEVICES leaves visible: `cuda:INDEX` of a job file."""
    uuid: str
    """Names the same device in any order and container."""
    name: str
    memory_gib: float | None
    used_gib: float | None
    utilisation_percent: int | None
    processes: tuple[GpuProcess, ...]
    peer_links: Mapping[int, str]
    """Index of another GPU → `NVLink 18x`, or the way over PCIe."""
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    bus: str = ""
    """PCI address, `0000:1b:00.0`; of a MIG instance that of its GPU."""
    numa_node: int | None = None
    """The node that it is attached to; `None` where there is one only, or it isn't known."""

    @property
    def busy_with(self) -> str | None:
        """What somebody else does on it, as far as it would disturb; `None`: it is free."""
        users = [process for process in self.processes if (process.used_gib or 0.0) >= BUSY_GIB]
        if users:
            names = ", ".join(f"{process.name or 'process'} ({process.pid})" for process in users)
            return f"{names} uses {sum(process.used_gib or 0.0 for process in users):.1f} GiB"
        if (self.utilisation_percent or 0) >= BUSY_PERCENT:
            return f"it is {self.utilisation_percent} % utilised"
        if self.used_gib and self.memory_gib and self.used_gib >= BUSY_SHARE * self.memory_gib:
            return f"{self.used_gib:.1f} of {self.memory_gib:.1f} GiB are in use"
        return None


@dataclass(frozen=True)
class Gpus:
    """What NVML says. Without a driver there are no GPUs, which is no error."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver_version: str | None = None
    """The newest CUDA version that the driver supports, as `13.0`."""
    nvml_error: str | None = None
    """Why NVML gave no answer although its library is there."""


def load_nvml() -> Any:
    """The NVML binding; `None` where it isn't installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def inspect_gpus(nvml: Any, visible: str | None) -> Gpus:
    """The GPUs that `visible` (the value of CUDA_VISIBLE_DEVICES, `None` if unset) leaves, in its order.

    `nvml` has pynvml's functions. Numbers in `visible` count in PCI order, as with
    CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if nvml is None:
        return Gpus()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return Gpus()
    except nvml.NVMLError as error:
        return Gpus(nvml_error=str(error))
    try:
        handles = visible_handles(nvml, visible)
        return Gpus(
            gpus=tuple(_gpu(nvml, index, handles) for index in range(len(handles))),
            driver=_ask(nvml, nvml.nvmlSystemGetDriverVersion),
            cuda_driver_version=_version(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)),
        )
    except nvml.NVMLError as error:
        return Gpus(nvml_error=str(error))
    finally:
        nvml.nvmlShutdown()


def visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """NVML handles by CUDA's rules: UUIDs may be cut short, and the first unknown device ends the list.

    A GPU in MIG mode can't be used itself: its instances stand in its place.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return [instance for handle in handles for instance in _instances(nvml, handle)]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    found = []
    for token in (part.strip() for part in visible.split(",")):
        if token.startswith("MIG-"):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, token)
            named = [] if handle is None else [handle]
        else:
            position = _position(token, uuids)
            named = [] if position is None else _instances(nvml, handles[position])
        if not named:
            break
        found += named
    return found


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """The MIG instances of a GPU; itself where it isn't divided."""
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != MIG_ENABLED:
        return [handle]
    count = _ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found = [_ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(count)]
    return [instance for instance in found if instance is not None]


def _position(token: str, uuids: Sequence[str]) -> int | None:
    if token.isdecimal():
        return int(token) if int(token) < len(uuids) else None
    matches = [i for i, uuid in enumerate(uuids) if token.startswith("GPU-") and uuid.startswith(token)]
    return matches[0] if len(matches) == 1 else None


def _gpu(nvml: Any, index: int, handles: Sequence[Any]) -> Gpu:
    handle = handles[index]
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    usage = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_gib=memory.total / GIB if memory else None,
        used_gib=memory.used / GIB if memory else None,
        utilisation_percent=usage.gpu if usage else None,
        processes=_processes(nvml, handle),
        peer_links=_peer_links(nvml, index, handles),
        sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        power_w=_thousandth(_ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit_w=_thousandth(_ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        bus=_address(nvml, handle),
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    running = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return tuple(
        GpuProcess(
            pid=process.pid,
            name=_process_name(process.pid),
            used_gib=None if process.usedGpuMemory is None else process.usedGpuMemory / GIB,
        )
        for process in running
    )


def _process_name(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return None


def _peer_links(nvml: Any, index: int, handles: Sequence[Any]) -> dict[int, str]:
    others = [other for other in range(len(handles)) if other != index]
    if not others:
        return {}
    to_switch, by_bus = _nvlinks(nvml, handles[index])
    return {other: _peer_link(nvml, handles[index], handles[other], to_switch, by_bus) for other in others}


def _peer_link(nvml: Any, handle: Any, other: Any, to_switch: int, by_bus: Mapping[str, int]) -> str:
    """Links through an NVSwitch reach every GPU behind it, direct ones only their own peer."""
    direct = by_bus.get(_bus(_ask(nvml, nvml.nvmlDeviceGetPciInfo, other)), 0)
    if direct or (to_switch and _nvlinks(nvml, other)[0]):
        return f"NVLink {direct or to_switch}x"
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    return COMMON_ANCESTOR.get(level, "PCIe") if level is not None else "PCIe"


def _nvlinks(nvml: Any, handle: Any) -> tuple[int, dict[str, int]]:
    """Active links to a switch, and to other GPUs by PCI address."""
    to_switch, by_bus = 0, dict[str, int]()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        if _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == LINK_TO_SWITCH:
            to_switch += 1
        else:
            bus = _bus(_ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
            by_bus[bus] = by_bus.get(bus, 0) + 1
    return to_switch, by_bus


def _address(nvml: Any, handle: Any) -> str:
    """The PCI address of a GPU, or of the one that a MIG instance is a part of."""
    pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    if pci is None:
        parent = _ask(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle)
        pci = None if parent is None else _ask(nvml, nvml.nvmlDeviceGetPciInfo, parent)
    return _bus(pci)


def _bus(pci: Any) -> str:
    """`0000:1b:00.0`, however many digits the driver gives the domain."""
    if pci is None:
        return ""
    text = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _ask(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or `None`: old cards, containers and MIG don't answer every question."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _thousandth(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


def _version(number: int | None) -> str | None:
    """`13.0` for 13000."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"
