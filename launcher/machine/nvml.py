"""NVIDIA GPUs as their driver's library (NVML) reports them: no CUDA context, no torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpurun.launcher.machine.gpu import GIB, EnergyMeter, Gpu, GpuProcess, Gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"

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
THROTTLING = {
    0x08: "slowed down by its hardware (power or heat)",
    0x20: "too hot (slowed down by the driver)",
    0x40: "too hot (slowed down by its hardware)",
    0x80: "power brake",
}
"""Reasons for a low clock that come and go. The power cap is none: under full load it is a GPU's usual state.

Source: `nvmlClocksEventReasons` of the NVML API reference.
"""


def load_nvml() -> Any:
    """The NVML binding; `None` where it isn't installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def has_driver(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA driver is installed (`dxg` under WSL); without one the binding needn't be loaded."""
    return any((root / name).exists() for name in ("dev/nvidiactl", "proc/driver/nvidia", "dev/dxg"))


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

    A GPU in MIG mode can't be used itself: its instances take its place.
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


def energy_meter(indices: Sequence[int], visible: str | None, binding: Any = None) -> EnergyMeter:
    """The energy counters of the visible GPUs at `indices`; an empty meter where NVML doesn't answer."""
    nvml = binding or load_nvml()
    if nvml is None:
        return EnergyMeter()
    try:
        nvml.nvmlInit()
        handles = visible_handles(nvml, visible)
    except nvml.NVMLError:
        return EnergyMeter()
    return EnergyMeter([_energy_counter(nvml, handles[index]) for index in indices if index < len(handles)])


def _energy_counter(nvml: Any, handle: Any) -> Callable[[], int | None]:
    """Source: `nvmlDeviceGetTotalEnergyConsumption` of the NVML API reference; Volta and later have it."""

    def read() -> int | None:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError:
            return None

    return read


def throttling_of(uuid: Callable[[], str]) -> Callable[[], str | None]:
    """A function that returns why the clock of a GPU is low now; `None` where it isn't, or NVML can't say.

    Args:
        uuid: of the GPU, with or without `GPU-`; called only where there is NVML.
    """
    nvml = load_nvml()
    if nvml is None:
        return lambda: None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid().removeprefix('GPU-')}")
    except nvml.NVMLError:
        return lambda: None
    return lambda: throttling(nvml, handle)


def throttling(nvml: Any, handle: Any) -> str | None:
    """The first throttling reason that NVML reports, if any."""
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except nvml.NVMLError:
        return None
    return next((text for bit, text in THROTTLING.items() if reasons & bit), None)
