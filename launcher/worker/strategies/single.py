"""One device: the whole batch, the bare model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from gpurun.launcher.rundir.records import LaunchConfig
from gpurun.launcher.worker.base.nested import Tree
from gpurun.launcher.worker.strategies.base import Hints
from gpurun.workloads.base import on_device


class OneProcess:
    """What all strategies of a single process share: there are no other ranks."""

    network: nn.Module
    """As the workload made it."""
    world_size = 1
    compression = ""
    first_passes = 0

    def optimizer(self, whole: Optimizer) -> Optimizer:
        return whole

    def unwrapped(self) -> nn.Module:
        return self.network

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def abandon(self) -> None:
        return

    def alone(self) -> AbstractContextManager[object]:
        return nullcontext()

    def skip(self) -> torch.Tensor:
        raise AssertionError("one process has all samples")

    def total(self, count: int) -> int:
        return count

    def share(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Single(OneProcess):
    """The model on one device."""

    def __init__(self, model: nn.Module, device: torch.device, index: int = 0) -> None:
        """`index`: the device's position among the job's."""
        self.network, self.device, self.index = model, device, index

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> "Single":
        """The model on the device of the rank."""
        return cls(model, torch.device(config.devices[rank]), rank, **config.options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        with on_device(self.index):
            return self.network(inputs)
