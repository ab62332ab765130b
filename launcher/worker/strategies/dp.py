"""DataParallel: one process owns all devices."""

from collections.abc import Sequence

import torch
from torch import nn

from gpurun.launcher.rundir.records import LaunchConfig
from gpurun.launcher.worker.base.nested import Tree
from gpurun.launcher.worker.strategies.apply_times import apply_times_ms
from gpurun.launcher.worker.strategies.cpu_parallel import CpuDataParallel
from gpurun.launcher.worker.strategies.cuda_parallel import CudaDataParallel
from gpurun.launcher.worker.strategies.single import OneProcess


class Dp(OneProcess):
    """The model on all devices of the job; outputs are gathered, and the loss computed, on the first."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self.device, self.devices, self.network = devices[0], tuple(devices), model
        self.model: CpuDataParallel | CudaDataParallel = (
            CudaDataParallel(model, device_ids=list(devices))
            if self.device.type == "cuda"
            else CpuDataParallel(model, len(devices))
        )

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, find_unused: bool) -> "Dp":
        """The model on all devices of the launch."""
        return cls(model, [torch.device(device) for device in config.devices], **config.options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        return self.model(inputs, chunks)

    def apply_times_ms(self, inputs: Tree, chunks: Sequence[int]) -> list[float]:
        """What each replica's forward and backward take, all at once; infinite where memory runs out."""
        return apply_times_ms(self.network, self.devices, inputs, chunks)
