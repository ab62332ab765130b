"""What the GPUs of a rank take from the wall, by the driver's own counter."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpurun.launcher.machine.gpus import load_nvml, visible_handles
from gpurun.launcher.rundir.records import LaunchOrder
from gpurun.launcher.strategies import STRATEGIES


@dataclass(frozen=True)
class EnergyMeter:
    """The counters of some GPUs; none where there are no GPUs, or their driver doesn't count."""

    counters: Sequence[Callable[[], int | None]]
    """Each gives the millijoules since the driver was loaded."""

    def read_mj(self) -> float | None:
        """The counters added up; `None` unless all of them answer."""
        read = [counter() for counter in self.counters]
        known = [value for value in read if value is not None]
        return float(sum(known)) if known and len(known) == len(read) else None


NO_METER = EnergyMeter(())


def difference(before_mj: float | None, after_mj: float | None) -> float | None:
    """Millijoules between two readings; `None` where one is missing, or the driver has begun anew."""
    if before_mj is None or after_mj is None or after_mj < before_mj:
        return None
    return after_mj - before_mj


def meter_for(order: LaunchOrder, rank: int, nvml: Any = None) -> EnergyMeter:
    """The meter of a rank's own GPUs; NVML is asked only where there are some."""
    positions = STRATEGIES[order.strategy].positions_of(rank, len(order.devices))
    names = [order.devices[position] for position in positions]
    indices = sorted({torch.device(name).index or 0 for name in names if name.startswith("cuda")})
    binding = (nvml or load_nvml()) if indices else None
    if binding is None:
        return NO_METER
    try:
        binding.nvmlInit()
        handles = visible_handles(binding, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except binding.NVMLError:
        return NO_METER
    return EnergyMeter([_counter(binding, handles[index]) for index in indices if index < len(handles)])


def _counter(nvml: Any, handle: Any) -> Callable[[], int | None]:
    """Source: `nvmlDeviceGetTotalEnergyConsumption` of the NVML API reference; Volta and later have it."""

    def read() -> int | None:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError:
            return None

    return read
