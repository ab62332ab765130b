"""Fully sharded data parallel (FSDP2, HSDP): ranks have parts of parameters, gradients, optimizer state."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gpurun.launcher.errors import SpecError
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.worker.base.failure import if_it_fits
from gpurun.launcher.worker.base.nested import Tree
from gpurun.launcher.worker.base.precision import PRECISIONS, Precision
from gpurun.launcher.worker.strategies.base import Hints, ProcessPerDevice
from gpurun.workloads.base import on_device

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
except ImportError:
    missing = f"`fsdp` needs torch 2.9 or later, but this is {torch.__version__}"
    raise SpecError(f"{missing}: its collectives can't be left out for a while") from None


class OwnGather(DefaultAllGather):
    """An all-gather in which a rank repeats its own part, instead of asking the others for theirs."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # its own part lies there already: the input is a view of it
                part.copy_(input_tensor)


class OwnScatter(DefaultReduceScatter):
    """A reduce-scatter in which a rank keeps its part of its own gradient."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))


class Fsdp(ProcessPerDevice):
    """One rank's part of a model, each of whose blocks is put together while it computes."""

    def __init__(
        self, model: nn.Module, device: torch.device, rank: int, precision: Precision, hints: Hints,
        *, keeps_plan: bool, reshard: bool,
    ) -> None:  # fmt: skip
        """Keeps this rank's part of rank 0's weights.

        Args:
            model: on `device` already; sharded in place.
            device: this rank's.
            rank: position of the device in the split.
            precision: of the job; what computes in a smaller type is communicated in it, too.
            hints: on the model.
            keeps_plan: whether `unwrapped` will be asked for.
            reshard: whether a block's parameters are freed between its forward and its backward.

        Raises:
            SpecError: torch's reduce-scatter doesn't average on this backend.
        """
        super().__init__(device, rank)
        self.check_averages()
        self.plan = plan_of(model) if keeps_plan else None
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.model, self.units = model, [*hints.blocks, model]
        for unit in self.units:
            fully_shard(
                unit,
                mesh=self.mesh(),
                # The last of a forward is needed first in the backward.
                reshard_after_forward=reshard and unit is not model,
                mp_policy=mixed_precision(precision),
            )

    @classmethod
    def of(cls, model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> Self:
        """The model as a rank of the launch runs it."""
        device, precision = torch.device(config.devices[rank]), PRECISIONS[config.precision]
        return cls(
            model, device, rank, precision, hints, keeps_plan=config.gradient_check, **config.strategy_options
        )

    def mesh(self) -> DeviceMesh:
        """The ranks over which parameters are divided."""
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, self.device.type)

    def check_averages(self) -> None:
        """Raises `SpecError` where a reduce-scatter of averages gives something else.

        Older versions of gloo's ignore that they are to average. Source: pytorch issue 162338.
        """
        sent = torch.arange(1, self.world_size + 1, dtype=torch.float32, device=self.device)
        found = torch.zeros(1, device=self.device)
        assert dist.group.WORLD is not None
        DefaultReduceScatter()(found, sent, dist.group.WORLD, dist.ReduceOp.AVG)
        if float(found) != self.rank + 1:
            kind = self.device.type
            raise SpecError(
                f"torch {torch.__version__} doesn't average in a reduce-scatter on {kind} devices, so "
                "FSDP's gradients would be wrong: use a newer torch, or another strategy"
            )

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        with on_device(self.rank):
            return self.model(inputs)

    def unwrapped(self) -> nn.Module | None:
        """A copy on rank 0, if it fits there; the others help to fill it."""
        assert self.plan is not None
        copied = if_it_fits(partial(self.room_for_copy, self.plan)) if self.rank == 0 else None
        (fits,) = self.share([float(copied is not None)])
        targets = dict(copied.named_parameters()) if copied else {}
        for name, part in self.model.named_parameters() if fits else ():
            whole = self.full(part.detach())
            if name in targets:
                targets[name].data.copy_(whole)
        return copied

    def room_for_copy(self, plan: nn.Module) -> nn.Module:
        """The plan with memory for all parameters, and the model's buffers."""
        real: dict[int, object] = {
            id(p): nn.Parameter(torch.empty_like(p, device=self.device), p.requires_grad)
            for p in plan.parameters()
        }
        copied = copy.deepcopy(plan, real)
        for mine, current in zip(copied.buffers(), self.model.buffers(), strict=True):
            mine.copy_(current)
        return copied

    def full(self, tensor: Tensor) -> Tensor:
        """All rows of a parameter or gradient, of which each rank of a group has a part.

        `DTensor.full_tensor` gathers with a functional collective, which ends the process over gloo on GPUs.
        Source: pytorch pull request 132709; seen with torch 2.11.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
        own: Tensor = tensor.to_local().detach()
        num_rows, *row = tensor.shape
        padded = own.new_zeros(-(-num_rows // group.size()), *row)  # parts are those of `torch.chunk`
        padded[: len(own)] = own
        gathered = own.new_empty(group.size() * len(padded), *row)
        DefaultAllGather()(gathered, padded, group)
        return gathered[:num_rows]

    @contextmanager
    def accumulating(self, active: bool) -> Iterator[None]:
        self.root.set_requires_gradient_sync(not active)
        yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.communicate_by(OwnGather(), OwnScatter())
        try:
            yield
        finally:
            self.communicate_by(DefaultAllGather(), DefaultReduceScatter())

    def communicate_by(self, gather: DefaultAllGather, scatter: DefaultReduceScatter) -> None:
        for unit in self.units:
            assert isinstance(unit, FSDPModule)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)

    def abandon(self) -> None:
        self.root.reset_iter_state()

    @property
    def root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model


class Hsdp(Fsdp):
    """Parameters are divided within a group of ranks, and gradients averaged over all groups, too (HSDP)."""

    def __init__(self, *args: Any, shard_size: int, **options: Any) -> None:
        """`shard_size`: ranks of each group, in their order; the others as for `Fsdp`."""
        self.shard_size = shard_size
        super().__init__(*args, **options)

    def mesh(self) -> DeviceMesh:
        return mesh_of_groups(self.device.type, self.world_size // self.shard_size, self.shard_size)

    @contextmanager
    def alone(self) -> Iterator[None]:
        meshes = [group.mesh_info for unit in self.units for group in parameter_groups(unit)]
        replicas = [mesh.replicate_process_group for mesh in meshes]
        with super().alone():
            for mesh in meshes:
                mesh.replicate_process_group = None
            try:
                yield
            finally:
                for mesh, group in zip(meshes, replicas, strict=True):
                    mesh.replicate_process_group = group


@cache
def mesh_of_groups(device_type: str, num_groups: int, shard_size: int) -> DeviceMesh:
    """One row of ranks for each group; the same one for all trainers of a process.

    torch takes meshes of one shape for equal, so it may use the process groups of the first one for others.
    Their collectives may take as long as the job's: torch would give them up after its own default.
    Source: torch/distributed/device_mesh.py, `DeviceMesh.__eq__` and `_init_one_process_group`.
    """
    device, world = torch.device(device_type), dist.group.WORLD
    assert world is not None
    mesh = init_device_mesh(device_type, (num_groups, shard_size), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        group._get_backend(device)._set_default_timeout(world._get_backend(device).options._timeout)
    return mesh


def parameter_groups(unit: nn.Module) -> list[Any]:
    """torch's groups of a unit's parameters that are communicated together.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `_all_reduce_process_group`: where a
    mesh has no group of replicas, gradients are not averaged over them.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else list(groups)


def mixed_precision(precision: Precision) -> MixedPrecisionPolicy:
    """Weights in the type that autocast computes in, gradients added up in their own."""
    if precision.autocast_dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=precision.autocast_dtype, reduce_dtype=precision.weights)


def plan_of(model: nn.Module) -> nn.Module:
    """A copy of the modules without memory for parameters."""
    shapes: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, shapes)
