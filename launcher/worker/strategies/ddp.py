"""DistributedDataParallel: one process per device, gradients averaged while they are computed."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.rundir.records import LaunchConfig
from gpurun.launcher.worker.base.nested import Tree
from gpurun.launcher.worker.strategies.base import Hints, Ranks
from gpurun.workloads.base import on_device


class Skippable(nn.Module):
    """A model that a rank without samples can pass by, without missing the others' collectives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tree) -> Tree:
        """The model's outputs; for `None` a zero that reaches every parameter, since DDP waits for each."""
        if inputs is not None:
            return self.model(inputs)
        return torch.stack([p.sum() * 0 for p in self.model.parameters() if p.requires_grad]).sum()


TORCHS_BUCKET_MB = 25
"""What torch uses where no size is given; only then is its first bucket small, to start communication early.
Source: torch/nn/parallel/distributed.py, `bucket_bytes_cap_default`.
"""


class Ddp(Ranks):
    """One rank's replica."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        rank: int,
        find_unused: bool,
        skippable: bool = False,
        bucket_mb: int = TORCHS_BUCKET_MB,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        """Broadcasts rank 0's weights.

        Args:
            model: on `device` already.
            device: this rank's.
            rank: position of the device in the split.
            find_unused: some parameters get no gradient; finding out which costs a walk through the graph.
            skippable: a split may leave a rank without samples.
            bucket_mb: MiB of gradients that are averaged in one all-reduce; at 25, torch's default, the first
                bucket holds 1 MiB.
            gradient_as_bucket_view: gradients are views into the buckets, not copied from them.
        """
        super().__init__(device, rank)
        self.network = model
        self.model = DistributedDataParallel(
            Skippable(model) if skippable else model,
            device_ids=None if accelerator_of(device.type).is_host else [device],
            bucket_cap_mb=None if bucket_mb == TORCHS_BUCKET_MB else bucket_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused,
        )

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> Self:
        """The model as a rank of the launch runs it."""
        skippable = any(0 in v.split or (v.balance and v.balance.minimum == 0) for v in config.variants)
        device = torch.device(config.devices[rank])
        return cls(model, device, rank, hints.has_unused, skippable, **config.options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        with on_device(self.rank):
            return self.model(inputs)

    def optimizer(self, whole: Optimizer) -> Optimizer:
        return whole

    def unwrapped(self) -> nn.Module:
        return self.network

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        return self.model.no_sync() if active else nullcontext()

    def abandon(self) -> None:
        return

    @contextmanager
    def alone(self) -> Iterator[None]:
        # `no_sync` alone leaves a broadcast of the buffers in the first forward after a synchronized step.
        # Source: torch/nn/parallel/distributed.py, `will_sync_module_buffers`.
        before, self.model.require_forward_param_sync = self.model.require_forward_param_sync, False
        try:
            with self.model.no_sync():
                yield
        finally:
            self.model.require_forward_param_sync = before

    def skip(self) -> torch.Tensor:
        zero: torch.Tensor = self.model(None)
        return zero
