"""The devices of this machine as they are now."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from gpurun.launcher.machine.accelerators import CPU, inspect_gpus, recorded_uuids
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.units import GIB

FRESH_S = 1.0
"""The driver is asked at most this often, however many pages are open."""


class LiveDevices:
    """Asks the driver, and remembers the answer for a moment. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._gpus: tuple[Gpu, ...] = ()
        self._cpu: list[dict[str, Any]] = []
        self._cpu_times: CpuTimes | None = None

    def of(self, host: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The devices' load now; nothing, unless a run's `host.json` is of this machine.

        A GPU is called as in the run, which may have seen only some of them; others by their UUID.
        """
        if host.get("hostname") != platform.node():
            return []
        with self._lock:
            if time.monotonic() - self._asked_s > FRESH_S:
                self._gpus, self._asked_s = inspect_gpus({}).gpus, time.monotonic()
                self._cpu = [] if self._gpus else [_cpu(self._cpu_percent())]
            names = recorded_uuids(host)
            return [_gpu(gpu, names.get(gpu.uuid, gpu.uuid[:12])) for gpu in self._gpus] or self._cpu

    def _cpu_percent(self) -> float | None:
        """Since the last question; `None` at the first. psutil's own counts by thread, of which each request
        may have another."""
        before, self._cpu_times = self._cpu_times, _cpu_times()
        return None if before is None else self._cpu_times.busy_percent_since(before)


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores together."""

    busy_s: float
    all_s: float

    def busy_percent_since(self, before: CpuTimes) -> float | None:
        """Share of the cores' time; `None` where none has passed."""
        passed_s = self.all_s - before.all_s
        return 100 * (self.busy_s - before.busy_s) / passed_s if passed_s > 0 else None


def _cpu_times() -> CpuTimes:
    found = psutil.cpu_times()
    twice_s = getattr(found, "guest", 0.0) + getattr(found, "guest_nice", 0.0)  # also counted as user time
    all_s = sum(found) - twice_s
    return CpuTimes(all_s - found.idle - getattr(found, "iowait", 0.0), all_s)


def _gpu(gpu: Gpu, name: str) -> dict[str, Any]:
    return {
        "device": name,
        "name": gpu.name,
        "memory_gib": gpu.used_gib,
        "memory_total_gib": gpu.memory_gib,
        "utilisation_percent": gpu.utilisation_percent,
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "sm_clock_max_mhz": gpu.max_sm_clock_mhz,
        "power_w": gpu.power_w,
        "power_limit_w": gpu.power_limit_w,
        "temperature_c": gpu.temperature_c,
        "pids": [process.pid for process in gpu.processes or ()],
    }


def _cpu(busy_percent: float | None) -> dict[str, Any]:
    """Figures of the processor, for machines without GPUs."""
    memory = psutil.virtual_memory()
    unknown = ("sm_clock_mhz", "sm_clock_max_mhz", "power_w", "power_limit_w", "temperature_c")
    return {
        "device": CPU.name,
        "name": platform.processor() or platform.machine(),
        "memory_gib": (memory.total - memory.available) / GIB,
        "memory_total_gib": memory.total / GIB,
        "utilisation_percent": busy_percent,
        **dict.fromkeys(unknown),
        "pids": [],
    }
