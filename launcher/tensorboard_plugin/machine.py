"""The devices of this machine as they are now."""

from __future__ import annotations

import platform
import threading
import time
from typing import Any

import psutil

from launcher.gpus import GIB, Gpu, inspect_gpus, load_nvml

FRESH_S = 1.0
"""The driver is asked at most this often, however many pages are open."""


class LiveDevices:
    """Asks the driver, and remembers the answer for a moment. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._answer: list[dict[str, Any]] = []

    def of(self, hostname: str) -> list[dict[str, Any]]:
        """What the devices do now; nothing, unless `hostname` is this machine."""
        if hostname != platform.node():
            return []
        with self._lock:
            if time.monotonic() - self._asked_s > FRESH_S:
                self._answer, self._asked_s = _ask(), time.monotonic()
            return self._answer


def _ask() -> list[dict[str, Any]]:
    gpus = inspect_gpus(load_nvml(), None).gpus
    return [_gpu(gpu) for gpu in gpus] or [_cpu()]


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "device": f"cuda:{gpu.index}",
        "name": gpu.name,
        "memory_gib": gpu.used_gib,
        "memory_total_gib": gpu.memory_gib,
        "utilisation_percent": gpu.utilisation_percent,
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "sm_clock_max_mhz": gpu.max_sm_clock_mhz,
        "power_w": gpu.power_w,
        "power_limit_w": gpu.power_limit_w,
        "temperature_c": gpu.temperature_c,
        "pids": [process.pid for process in gpu.processes],
    }


def _cpu() -> dict[str, Any]:
    """Without GPUs the processor, whose use counts since the last question."""
    memory = psutil.virtual_memory()
    unknown = ("sm_clock_mhz", "sm_clock_max_mhz", "power_w", "power_limit_w", "temperature_c")
    return {
        "device": "cpu",
        "name": platform.processor() or platform.machine(),
        "memory_gib": (memory.total - memory.available) / GIB,
        "memory_total_gib": memory.total / GIB,
        "utilisation_percent": psutil.cpu_percent(None),
        **dict.fromkeys(unknown),
        "pids": [],
    }
