"""NVIDIA's driver (NVML), made up: a namespace with pynvml's functions."""

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from gpurun.launcher.units import GIB

UUIDS = ("GPU-aaaa-0", "GPU-abbb-1", "GPU-cccc-2")


class NVMLError(Exception):
    """As in pynvml: the parent of all of its errors."""


class NVMLErrorLibraryNotFound(NVMLError):
    """As in pynvml: there is no NVIDIA driver."""


def unsupported(*_: Any) -> Any:
    raise NVMLError("Not Supported")


def fake(links: Mapping[int, tuple[int, ...]] | None = None) -> Any:
    """A driver with three GPUs, as a namespace with pynvml's functions."""
    leads = links if links is not None else {0: (1, 1), 1: (0, 0), 2: ()}

    def link(handle: int, number: int) -> int:
        if number >= len(leads[handle]):
            raise NVMLError("Invalid Argument")
        return leads[handle][number]

    def bus(handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0")

    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=6 * GIB)
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_LibraryNotFound=NVMLErrorLibraryNotFound,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        NVML_NVLINK_MAX_LINKS=4,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlSystemGetCudaDriverVersion=lambda: 13010,
        nvmlDeviceGetCount=lambda: len(UUIDS),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=unsupported,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=140 * GIB, used=handle * 10 * GIB),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 if handle else 0),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [process] if handle == 1 else [],
        nvmlDeviceGetClockInfo=lambda handle, kind: 1755,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetPowerUsage=lambda handle: 212_400,
        nvmlDeviceGetEnforcedPowerLimit=unsupported,
        nvmlDeviceGetTemperature=lambda handle, sensor: 41,
        nvmlDeviceGetPciInfo=bus,
        nvmlDeviceGetMigMode=unsupported,
        nvmlDeviceGetCudaComputeCapability=lambda handle: [9, 0],
        nvmlDeviceGetNvLinkState=lambda handle, number: int(link(handle, number) is not None),
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, number: 2 if link(handle, number) == -1 else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, number: bus(link(handle, number)),
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 40,
        nvmlDeviceGetP2PStatus=lambda a, b, index: 5 if index == 2 else 0,  # not over NVLink
    )


def well(**changes: Any) -> Any:
    """The driver of three GPUs that are free and well; functions may be replaced."""
    nvml = fake()
    answers: dict[str, Any] = {
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=140 * GIB, used=GIB // 2),
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=0),
        "nvmlDeviceGetTotalEccErrors": lambda *_: 0,
        "nvmlDeviceGetRemappedRows": lambda _: (0, 0, 0, 0),
        "nvmlDeviceGetNvLinkVersion": lambda *_: 6,
        "nvmlDeviceGetPersistenceMode": lambda _: 1,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
    }
    for name, answer in {**answers, **changes}.items():
        setattr(nvml, name, answer)
    return nvml
