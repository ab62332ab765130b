"""DistributedDataParallel: a process per device, gradients averaged while they are computed."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from gpurun.launcher.errors import SpecError
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.worker.base.nested import Tree
from gpurun.launcher.worker.strategies.base import Hints, ProcessPerDevice
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


TORCHS_BUCKETS_MB = (1, 25)
"""The first bucket and the others where torch is given no size.
Source: torch/nn/parallel/distributed.py, `bucket_bytes_cap_default`.
"""
POWERSGD_BEGINS = 2
"""Passes before PowerSGD begins: DDP makes its buckets again after the first pass.
Source: torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, `start_powerSGD_iter`.
"""


class Ddp(ProcessPerDevice):
    """One rank's replica."""

    is_static = False

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        rank: int,
        find_unused: bool,
        skippable: bool,
        *,
        bucket_mb: int,
        first_bucket_mb: int | None,
        gradient_as_bucket_view: bool,
        static_graph: bool,
        comm_hook: str,
    ) -> None:
        """Broadcasts rank 0's weights.

        Args:
            model: on `device` already.
            device: this rank's.
            rank: position of the device in the split.
            find_unused: some parameters get no gradient; finding out which costs a walk through the graph.
            skippable: a split may leave a rank without samples.
            bucket_mb: MiB of gradients that are averaged in one all-reduce.
            first_bucket_mb: MiB of those that are averaged first; `None`: torch's own choice.
            gradient_as_bucket_view: gradients are views into the buckets, not copied from them.
            static_graph: the graph is the same in every step.
            comm_hook: how gradients are compressed.

        Raises:
            SpecError: this torch has no first bucket of that size.
        """
        super().__init__(device, rank)
        self.network = model
        self.model = DistributedDataParallel(
            Skippable(model) if skippable else model,
            device_ids=None if accelerator_of(device.type).is_host else [device],
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused and not static_graph,
            static_graph=static_graph,
            **bucket_sizes(bucket_mb, first_bucket_mb),
        )
        # A pass of the model without DDP would count as part of a static graph that isn't known yet.
        self.is_static, self.first_passes = static_graph, int(static_graph)
        if comm_hook in COMM_HOOKS:
            self.compression, (passes, register) = comm_hook, COMM_HOOKS[comm_hook]
            self.first_passes = max(self.first_passes, passes)
            register(self.model)

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> Self:
        """The model as a rank of the launch runs it."""
        skippable = any(0 in v.split or (v.balance and v.balance.minimum == 0) for v in config.variants)
        device = torch.device(config.devices[rank])
        return cls(model, device, rank, hints.has_unused, skippable, **config.strategy_options)

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        with on_device(self.rank):
            return self.model(inputs)

    def accumulating(self, active: bool) -> AbstractContextManager[object]:
        # torch fails if the pass that finds out about a static graph isn't synchronized.
        is_first = self.is_static and not self.model._static_graph_delay_allreduce_enqueued
        return self.model.no_sync() if active and not is_first else nullcontext()

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


def bucket_sizes(bucket_mb: int, first_mb: int | None) -> dict[str, Any]:
    """Options of DistributedDataParallel for buckets of these sizes, in MiB.

    Raises:
        SpecError: it has none for them.
    """
    if (first_mb, bucket_mb) in (TORCHS_BUCKETS_MB, (None, TORCHS_BUCKETS_MB[1])):
        return {}
    if first_mb in (None, bucket_mb):
        return {"bucket_cap_mb": bucket_mb}
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        sizes = f"a first bucket of {first_mb} MiB next to others of {bucket_mb} MiB"
        raise SpecError(f"torch {torch.__version__} can't have {sizes}: use a newer one")
    return {"bucket_cap_mb_list": [first_mb, bucket_mb]}


def average_in_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """torch's hook by another name: by its own, it is refused for all backends but newer ones of NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def use_powersgd(model: DistributedDataParallel) -> None:
    """Compresses gradients by matrices of rank 1; loads numpy."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=POWERSGD_BEGINS), powerSGD_hook)


COMM_HOOKS: Mapping[str, tuple[int, Callable[[DistributedDataParallel], None]]] = MappingProxyType(
    {
        "fp16": (0, lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook)),
        "bf16": (0, lambda model: model.register_comm_hook(dist.group.WORLD, average_in_bf16)),
        "powersgd": (POWERSGD_BEGINS, use_powersgd),
    }
)
"""Passes before each begins, and what registers it."""
