"""What a strategy does for a step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from gpurun.launcher.worker.base.nested import Tree


class Strategy(Protocol):
    """A model on the devices of this process."""

    device: torch.device
    """Where inputs and targets go, and outputs come from."""
    world_size: int
    """Over how many ranks gradients are averaged."""

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        """The model's outputs on `device`; the devices of this process get `chunks` samples each."""

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        """Forward and backward within it leave their gradients on this rank, if `active`."""

    def skip(self) -> torch.Tensor:
        """What a rank without samples adds to the loss: zero."""

    def total(self, count: int) -> int:
        """`count` added up over all ranks."""

    def share(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, on every rank."""
