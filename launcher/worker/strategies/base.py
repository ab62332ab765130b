"""What a strategy does for a step."""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self, cast

import torch
from torch import nn
from torch.optim import Optimizer

from gpurun.launcher.rundir.records import LaunchConfig
from gpurun.launcher.strategies import strategy_named
from gpurun.launcher.worker.base.nested import Tree


class Strategy(Protocol):
    """A model on the devices of this process."""

    device: torch.device
    """Where inputs and targets go, and outputs come from."""
    world_size: int
    """Over how many ranks gradients are averaged."""

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, find_unused: bool) -> Self:
        """The model, on its device already, as a rank of the launch runs it."""

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        """The model's outputs on `device`; the devices of this process get `chunks` samples each."""

    def optimizer(self, whole: Optimizer) -> Optimizer:
        """What updates the parameters: `whole`, or the part of it that is this rank's."""

    def gathered(self) -> AbstractContextManager[bool]:
        """Within it, if true, the model has all its parameters on this rank, which can run it by itself.

        What is trained within it is lost. False where memory doesn't suffice. All ranks enter and leave it.
        """

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a parameter or gradient of which this rank may have a part; all ranks call it."""

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        """Forward and backward within it leave their gradients on this rank, if `active`."""

    def alone(self) -> AbstractContextManager[object]:
        """Forward, backward and the optimizer's step within it communicate with no other rank."""

    def skip(self) -> torch.Tensor:
        """What a rank without samples adds to the loss: zero."""

    def total(self, count: int) -> int:
        """`count` added up over all ranks."""

    def share(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, on every rank."""


def strategy_of(model: nn.Module, config: LaunchConfig, rank: int, find_unused: bool) -> Strategy:
    """The model, on its device already, under the launch's strategy.

    Args:
        model: what is trained.
        config: of the launch.
        rank: of this process.
        find_unused: some parameters get no gradient.

    Raises:
        ValueError: there is no such strategy.
    """
    module, _, name = strategy_named(config.strategy).worker.partition(":")
    strategy = cast("type[Strategy]", getattr(importlib.import_module(module), name))
    return strategy.of(model, config, rank, find_unused)
