"""A model of which one rank is late, runs out of memory, is killed or sleeps, by the size of its batch."""

import os
import signal
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.workloads.base import Workload, device_index

LATE_S = 0.1
ASLEEP_S = 3600.0
TOO_MUCH = {True: (1, 1 << 50), False: (1 << 20, 1 << 30)}
"""Blocks, and bytes of each, by whether the device is the host, whose memory must not become scarce; that of
a GPU has to be full, since freeing it is what is checked."""


class Misbehaving(nn.Module):
    """Two layers; `faults` says what happens on which device when its batch has that size."""

    def __init__(self, faulty_device: int, faults: dict[str, int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        self.faulty_device = faulty_device
        self.fault_of = {size: name for name, size in faults.items()}

    def forward(self, x: Tensor) -> Tensor:
        if device_index() == self.faulty_device and (fault := self.fault_of.get(x.shape[0])):
            misbehave(fault, x)
        out: Tensor = self.layers(x)
        return out


def misbehave(fault: str, x: Tensor) -> None:
    """Does it.

    Raises:
        KeyError: no such fault is known.
        RuntimeError: there is no memory left, for `oom`.
    """
    if fault == "oom":
        count, num_bytes = TOO_MUCH[accelerator_of(x.device.type).is_host]
        blocks = [torch.empty(num_bytes, dtype=torch.uint8, device=x.device) for _ in range(count)]
        raise RuntimeError(f"{len(blocks)} blocks of {num_bytes} bytes were to be had")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({"late": LATE_S, "asleep": ASLEEP_S}[fault])


def build(faulty_device: int, faults: dict[str, int]) -> Workload:
    """The model on random vectors.

    Args:
        faulty_device: its position among the job's devices.
        faults: the samples that it gets where it misbehaves, by what it does then: `late`, `oom`, `killed`
            or `asleep`.
    """

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 256, generator=generator)
        return x, x.mean(1, keepdim=True)

    return Workload(Misbehaving(faulty_device, faults), batch, F.mse_loss)
