"""Steps of a known duration: the forward pass sleeps alpha + beta·b milliseconds on each device."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload, device_index

PerDevice = float | Sequence[float]
"""One value for all devices, or one for each in the job's order."""


class Sleep(nn.Module):
    """Scales its input by one parameter, after a sleep that grows with the number of samples."""

    def __init__(self, alpha_ms: PerDevice, beta_ms: PerDevice) -> None:
        super().__init__()
        self.alpha_ms, self.beta_ms = alpha_ms, beta_ms
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        index = device_index()
        sleep_ms = of_device(self.alpha_ms, index) + of_device(self.beta_ms, index) * x.shape[0]
        if sleep_ms > 0:
            time.sleep(sleep_ms / 1000)
        return x * self.scale


def of_device(values: PerDevice, index: int) -> float:
    """The value of device `index`.

    Raises:
        ValueError: there is a list, and it ends before `index`.
    """
    if not isinstance(values, Sequence):
        return values
    if index >= len(values):
        raise ValueError(f"sleep has times for {len(values)} devices, but the job runs on device {index} too")
    return values[index]


def build(alpha_ms: PerDevice = 0.0, beta_ms: PerDevice = 0.0) -> Workload:
    """A step that lasts alpha + beta·b ms for b samples on a device; both 0 is the zero sleep.

    Args:
        alpha_ms: fixed time of a step; one number, or one per device.
        beta_ms: time per sample; one number, or one per device.
    """

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 1, generator=generator)
        return x, 2 * x

    return Workload(Sleep(alpha_ms, beta_ms), batch, F.mse_loss)
