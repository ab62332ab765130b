"""What the ranks exchange between blocks: on the CPU, by gloo, never inside a timed step."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Peers(Protocol):
    """The other ranks."""

    def barrier(self) -> None:
        """Returns on all ranks within some tens of microseconds."""

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Element by element, the largest value over ranks."""

    def gather(self, value: float) -> list[float]:
        """Every rank's value, by rank."""


class Alone:
    """One process has no peers."""

    def barrier(self) -> None:
        return

    def maximum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather(self, value: float) -> list[float]:
        return [value]


class Group:
    """The ranks of a process group. CPU tensors use gloo, whatever backend the gradients use."""

    def __init__(self) -> None:
        self._token = torch.zeros(1)

    def barrier(self) -> None:
        # Not dist.barrier: that uses NCCL where there is one, and waits for the GPU too.
        dist.all_reduce(self._token)

    def maximum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def gather(self, value: float) -> list[float]:
        everyone = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.tensor([value], dtype=torch.float64))
        return [float(tensor) for tensor in everyone]
