"""Faults under a running `gpurun selftest`: three simulated devices, which NVIDIA's driver, made up, reports.

No torch: what ranks do wrong is in `tests.sim.backend.faulty`.
"""

import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gpurun.launcher.machine import host
from gpurun.launcher.machine.accelerators import ACCELERATORS, CUDA
from gpurun.launcher.machine.gpus import nvml
from gpurun.launcher.machine.host import Topology
from gpurun.launcher.units import GIB
from tests.sim.machine import KIND, DeviceModel, MachineModel
from tests.unit.machine.fake_driver import NVMLError, fake, well

VARIABLE = "GPURUN_INJECTED_FAULTS"
TWO_NODES = Topology({0: (0,), 1: (1,)}, ((0,), (1,)))
FULL_GIB, EMPTY_GIB = 70.0, 0.5
TOO_HOT = 0x40
"""A bit of `nvmlClocksEventReasons`."""


def environment(faults: Collection[str]) -> dict[str, str]:
    """What has a command run on a machine of three devices with these faults."""
    opens_another = DeviceModel(opens=0 if "wrong ids" in faults else None)
    slow = DeviceModel(slowdown=10 if "slow device" in faults else 1)
    machine = MachineModel(devices=(DeviceModel(), opens_another, slow))
    return {**machine.environment(), VARIABLE: ", ".join(faults)}


def injected(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    return frozenset(filter(None, environ.get(VARIABLE, "").split(", ")))


def install(faults: Collection[str]) -> None:
    """To be called when a process starts: the simulated devices pass for NVIDIA's."""
    sys.modules["pynvml"] = driver(faults)
    setattr(nvml, "has_driver", lambda root=None: True)  # noqa: B010  # as a test's monkeypatch does
    setattr(host, "inspect_topology", lambda root: TWO_NODES)  # noqa: B010
    ACCELERATORS.pop(CUDA.name, None)
    ACCELERATORS[KIND] = replace(
        CUDA,
        name=KIND,
        backend=KIND,
        backend_bytes=0,
        interface_variable="GLOO_SOCKET_IFNAME",
        start_s=3.0,
        runtime="tests.sim.backend.faulty:FaultyRuntime",
        inspect=nvml.inspect_nvidia_gpus,
    )


def driver(faults: Collection[str], is_full: Any = lambda: False) -> Any:
    """NVML of a machine with these faults, as far as it knows of them; links have no known rates.

    Args:
        faults: keys of the table in `test_faults`.
        is_full: whether the last GPU's memory is in use.
    """
    answers: dict[str, Any] = {
        "nvmlDeviceGetNvLinkState": lambda *_: 0,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: None,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: energy_mj(),
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(
            total=140 * GIB, used=round(GIB * (FULL_GIB if gpu == 2 and is_full() else EMPTY_GIB))
        ),
    }
    for fault in faults:
        answers |= OF_DRIVER.get(fault, {})
    return well(**answers)


def energy_mj() -> int:
    """At 600 W."""
    return 600 * time.monotonic_ns() // 1_000_000


def refused(gpu: int) -> Any:
    """An answer of all GPUs but the last one."""
    if gpu == 2:
        raise NVMLError("Insufficient Permissions")
    return fake().nvmlDeviceGetUUID(gpu)


def _part(gpu: int, number: int) -> int:
    """A handle of an instance, of which each GPU has two."""
    return 10 * (gpu + 1) + number


OF_DRIVER: Mapping[str, Mapping[str, Any]] = {
    "ECC errors": {"nvmlDeviceGetTotalEccErrors": lambda gpu, *_: 3 if gpu == 1 else 0},
    "throttled": {
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: TOO_HOT if gpu == 2 else 0,
    },
    "no energy counter": {
        "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: (
            None if gpu == 0 else time.monotonic_ns() // 1_000_000
        ),
    },
    "no permission": {"nvmlDeviceGetUUID": refused},
    "driver too old": {"nvmlSystemGetCudaDriverVersion": lambda: 12080},
    "MIG": {
        "nvmlDeviceGetMigMode": lambda gpu: (int(gpu == 0), 0),
        "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 2,
        "nvmlDeviceGetMigDeviceHandleByIndex": _part,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda part: part // 10 - 1,
        "nvmlDeviceGetUUID": lambda gpu: f"MIG-{gpu}" if gpu >= 10 else fake().nvmlDeviceGetUUID(gpu),
    },
}
"""What a driver answers otherwise, by fault; the other faults are none that it knows of."""
