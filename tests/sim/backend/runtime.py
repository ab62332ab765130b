"""The simulated kind of device, as a rank uses it: all it adds to streams is what the kind lacks."""

from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity

from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.worker.accelerators.runtime import StreamRuntime
from tests.sim.machine import KIND


class SimRuntime(StreamRuntime):
    """`torch.sim`. The profiler sees the CPU only, whose time is real."""

    kind = KIND
    activities = (ProfilerActivity.CPU,)

    def allow_tf32(self, allowed: bool) -> None:
        return

    def sensors(self, devices: Sequence[torch.device]) -> Sequence[Sensors]:
        return [Sensors() for _ in devices]
