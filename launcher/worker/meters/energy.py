"""The energy that the devices of a rank use, by their driver's own counters."""

import os
from typing import Any

import torch

from gpurun.launcher.machine.gpus import EnergyMeter
from gpurun.launcher.machine.nvml import VISIBLE, energy_meter
from gpurun.launcher.rundir.records import LaunchConfig

NO_METER = EnergyMeter()


def difference(before_mj: float | None, after_mj: float | None) -> float | None:
    """Millijoules between two readings; `None` where one is missing, or the driver has begun anew."""
    if before_mj is None or after_mj is None or after_mj < before_mj:
        return None
    return after_mj - before_mj


def meter_for(order: LaunchConfig, rank: int, nvml: Any = None) -> EnergyMeter:
    """The meter of a rank's own GPUs; NVML is asked only where there are some."""
    names = order.devices if order.strategy == "dp" else (order.devices[rank],)
    indices = sorted({torch.device(name).index or 0 for name in names if name.startswith("cuda")})
    return energy_meter(indices, os.environ.get(VISIBLE), nvml) if indices else NO_METER
