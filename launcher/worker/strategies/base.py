"""The interface of a strategy for a step, and the layers of a model that strategies treat one by one."""

import importlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.strategies import strategy_named
from gpurun.launcher.worker.base.nested import Tree


@dataclass(frozen=True)
class Hints:
    """Hints about a model for a strategy."""

    has_unused: bool = False
    """Whether some parameters get no gradient."""
    blocks: tuple[nn.Module, ...] = ()
    """The layers to treat one by one."""


class WorkerStrategy(ABC):
    """A model on the devices of this process; what isn't overridden is so where there are no other ranks."""

    device: torch.device
    """The device that inputs and targets go to, and outputs come from."""
    network: nn.Module
    """The network as the workload made it."""
    world_size = 1
    """Ranks over which gradients are averaged."""
    compression = ""
    """How gradients are compressed on their way, so that they aren't exact; empty where they aren't."""
    first_passes = 0
    """Passes of all ranks that must come before all others."""

    @classmethod
    @abstractmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> Self:
        """The model, on its device already, as a rank of the launch runs it."""

    @abstractmethod
    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        """The model's outputs on `device`; the devices of this process get `chunks` samples each."""

    def optimizer(self, whole: Optimizer) -> Optimizer:
        """The optimizer that updates the parameters: `whole`, or the part of it that is this rank's."""
        return whole

    def unwrapped(self) -> nn.Module | None:
        """The model with all its parameters, on rank 0 at least; `None` where there is no room for it.

        All ranks call it.
        """
        return self.network

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a parameter or gradient of which this rank may have a part; all ranks call it."""
        return tensor

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        """Forward and backward within it leave their gradients on this rank, if `active`."""
        return nullcontext()

    def abandon(self) -> None:
        """Drops what a forward or backward that failed has left."""
        return

    def alone(self) -> AbstractContextManager[object]:
        """Forward, backward and the optimizer's step within it communicate with no other rank."""
        return nullcontext()

    def skip(self) -> torch.Tensor:
        """The loss of a rank without samples: zero."""
        raise AssertionError("every rank has samples")

    def total(self, count: int) -> int | torch.Tensor:
        """`count` added up over all ranks; on a GPU a tensor, for which the host need not wait."""
        return count

    def share(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, on every rank."""
        return list(values)


class ProcessPerDevice(WorkerStrategy):
    """The base of strategies with a process per device; the process group must be there already."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank, self.world_size = device, rank, dist.get_world_size()

    def total(self, count: int) -> int | torch.Tensor:
        tensor = torch.full((), count, dtype=torch.float64, device=self.device)  # a copy would be waited for
        dist.all_reduce(tensor)
        return int(tensor) if accelerator_of(self.device.type).is_host else tensor

    def share(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return [float(value) for value in tensor]


def strategy_of(model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> WorkerStrategy:
    """The model, on its device already, under the launch's strategy.

    Args:
        model: what is trained.
        config: of the launch.
        rank: of this process.
        hints: on the model.

    Raises:
        ValueError: there is no such strategy.
    """
    return class_of(config.strategy).of(model, config, rank, hints)


def class_of(name: str) -> type[WorkerStrategy]:
    """The class that trains under the strategy of that name.

    Raises:
        ValueError: there is no such strategy.
    """
    module, _, worker = strategy_named(name).worker.partition(":")
    return cast("type[WorkerStrategy]", getattr(importlib.import_module(module), worker))


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def checkpoint_blocks(blocks: Sequence[nn.Module], which: int | str) -> None:
    """Has some of the blocks drop their activations, and compute them again in the backward pass.

    By a class of their own, as FSDP does it: names of parameters stay, and so do copies of the model.

    Args:
        blocks: of a model, in its order.
        which: `none`, `full`, or a number n for every n-th one, the first one included.
    """
    if which == "none":
        return
    classes = {kind: checkpointed(kind) for kind in {type(block) for block in blocks}}
    for block in blocks[:: which if isinstance(which, int) else 1]:
        block.__class__ = classes[type(block)]


def checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of modules, with a forward pass that keeps nothing but its inputs."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def blocks_of(model: nn.Module, named: Sequence[type[nn.Module]] = ()) -> list[nn.Module]:
    """The modules that are sharded one by one: those of the classes `named`, else the layers that repeat.

    Among modules next to each other, nearest to the top, those of one class count that have most parameters.
    Empty where parameters of a block are used elsewhere, too.
    """
    if named:
        blocks = [module for module in model.modules() if isinstance(module, tuple(named))]
    else:
        level, blocks = [model], []
        while level and not blocks:
            groups = [layers_of(module) for module in level]
            blocks = max((repeated(layers) for layers in groups), key=num_parameters, default=[])
            level = [layer for layers in groups for layer in layers]
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    own = Counter(id(p) for b in blocks for m in b.modules() for p in m._parameters.values() if p is not None)
    seen = Counter(id(p) for block in blocks for p in block.parameters())
    is_shared = any(uses[p] != count for p, count in own.items()) or any(n > 1 for n in seen.values())
    return [] if is_shared else blocks


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The module's children; in place of lists and sequences the modules in them."""
    return [
        layer
        for child in module.children()
        for layer in (layers_of(child) if type(child) in CONTAINERS else [child])
    ]


def repeated(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers of the class with most parameters, among classes with several layers."""
    by_class = grouped(layers, type)
    several = (found for found in by_class.values() if len(found) > 1 and num_parameters(found))
    return max(several, key=num_parameters, default=[])


def num_parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
