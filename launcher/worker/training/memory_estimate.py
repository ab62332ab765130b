"""Estimates the memory that a step of a variant would hold, by part, without running it.

A process of its own carries steps out on tensors that have shapes but no data, with ranks that are only
claimed to exist, and `MemoryLog` sees them as it sees a real step. So an estimate and what a run measures
are defined alike. DDP's buckets are the exception: its C++ part reads data, so they are made here.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.machine.accelerators import CPU, accelerator_of
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.records import MemoryEstimate, MemoryPeak, VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.base.failure import text_of
from gpurun.launcher.worker.base.nested import map_tensors
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.meters.memory import label, peak_of_step
from gpurun.launcher.worker.strategies import dp
from gpurun.launcher.worker.strategies.base import (
    Hints,
    WorkerStrategy,
    blocks_of,
    checkpoint_blocks,
    class_of,
)
from gpurun.launcher.worker.strategies.dp import Single
from gpurun.launcher.worker.training.batches import LoadedStep
from gpurun.launcher.worker.training.forward_backward import NoClock, PhaseClock, forward_backward
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.trainer import (
    accept_several_inputs,
    make_optimizer,
    source_of,
    with_implementation,
)
from gpurun.workloads.base import Workload

WITHOUT_DATA = "meta"
"""The type of device of storages without data."""


def main() -> None:
    """Answers the request in the file `argv[2]` in the file `argv[3]`; ends with the process `argv[1]`."""
    die_with(int(sys.argv[1]))
    request, answer = map(Path, sys.argv[2:])
    launches = read_json(request, list[LaunchConfig])
    found = {variant.id: estimate(launch, variant) for launch in launches for variant in launch.variants}
    write_json(answer, found)


def estimate(config: LaunchConfig, variant: VariantConfig) -> MemoryEstimate:
    """The estimate of the fullest rank; or why there is no estimate."""
    reason = refusal(config, variant)
    if reason:
        return MemoryEstimate(reason=reason)
    try:
        torch.manual_seed(config.seed)
        workload = load_workload(config.workload, dict(config.params), Path(config.job_dir))
        if not isinstance(workload, Workload):
            return MemoryEstimate(reason="a micro-benchmark trains no model")
        return estimate_of(workload, config, variant)
    except GpurunError as error:
        return MemoryEstimate(reason=str(error).partition("\n")[0])
    except Exception as error:  # what a model does with tensors that have no data is anyone's guess
        words = text_of(error).strip().partition("\n")[0]
        return MemoryEstimate(reason=f"a step without data fails: {type(error).__name__}: {words}")


def estimate_of(workload: Workload, config: LaunchConfig, variant: VariantConfig) -> MemoryEstimate:
    """The estimate of the rank of `config` that is fullest in a step of the variant."""
    peaks = [peak_on_rank(workload, config, variant, rank) for rank in ranks_of(config, variant)]
    return MemoryEstimate(max(peaks, key=lambda peak: peak.total))


def refusal(config: LaunchConfig, variant: VariantConfig) -> str:
    """Why the variant isn't estimated; empty if it is."""
    is_host = accelerator_of(config.devices[0]).is_host
    reasons = {
        "torch.compile decides what is kept": config.compile,
        "its split is found when it runs": variant.balance is not None,
        "the buffers of `comm_hook` aren't known": config.comm_hook != "none",
        "the replicas of dp aren't alike on GPUs": STRATEGIES[config.strategy].has_replicas and not is_host,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def ranks_of(config: LaunchConfig, variant: VariantConfig) -> Sequence[int]:
    """The ranks that may be fullest: one per number of samples, or all where each has a part of its own."""
    ranks = range(config.world_size)
    if config.world_size == 1 or STRATEGIES[config.strategy].shards_optimizer:
        return ranks
    return [variant.split.index(size) for size in sorted(set(variant.split)) if size]


def peak_on_rank(workload: Workload, config: LaunchConfig, variant: VariantConfig, rank: int) -> MemoryPeak:
    """The peak that `Trainer.memory_peak` would measure on the rank.

    Bytes of storages don't depend on the kind of device, so the host's serve for GPUs, too; but torch's
    optimizers update all parameters at once there.
    """
    host = replace(config, devices=(CPU.name,) * len(config.devices), gradient_check=False)
    if not accelerator_of(config.devices[0]).is_host and config.optimizer == "default":
        host = replace(host, optimizer="foreach")
    has_peers = STRATEGIES[config.strategy].has_backend
    with claimed_ranks(config.world_size, rank) if has_peers else nullcontext():
        return peak_without_data(replace(workload, num_workers=0), host, variant, rank)


def peak_without_data(
    workload: Workload, config: LaunchConfig, variant: VariantConfig, rank: int
) -> MemoryPeak:
    """The fullest moment of the second step of a copy of the workload's model."""
    precision = PRECISIONS[config.precision]
    loaded = source_of(workload, config, rank, precision).prepare(variant, 0).load()
    precision.prepare_model(workload.model)
    if config.channels_last:
        workload.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = without_data(workload.model, mode)
    with mode, replicas_in_turn():
        accept_several_inputs(model)
        blocks = tuple(blocks_of(model, workload.blocks))
        checkpoint_blocks(blocks, config.checkpointing)
        strategy = strategy_without_peers(model, config, rank, Hints(blocks=blocks))
        whole = with_implementation(make_optimizer(workload, model), config.optimizer, workload)
        optimizer = strategy.optimizer(whole)
        step = partial(run_step, strategy, workload, config, inputs_of(loaded, strategy, mode), optimizer)
        step(NoClock())
        return peak_of_step(step, model, optimizer, WITHOUT_DATA)


def run_step(
    strategy: WorkerStrategy,
    workload: Workload,
    config: LaunchConfig,
    loaded: LoadedStep,
    optimizer: Optimizer,
    clock: PhaseClock,
) -> None:
    """One optimizer step, as of `Trainer.step`, with losses as they are: no data could underflow."""
    scaler = torch.amp.GradScaler(enabled=False)
    forward_backward(strategy, workload, PRECISIONS[config.precision], loaded, scaler, clock)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    clock.mark("optimizer")


def inputs_of(loaded: LoadedStep, strategy: WorkerStrategy, mode: FakeTensorMode) -> LoadedStep:
    """The step without data, whose other ranks have as many valid targets as this one."""
    own = sum(micro.count for micro in loaded.micro_batches)
    micro_batches = tuple(
        replace(
            micro,
            inputs=map_tensors(mode.from_tensor, micro.inputs),
            targets=map_tensors(mode.from_tensor, micro.targets),
        )
        for micro in loaded.micro_batches
    )
    total = own * strategy.world_size if loaded.total is None else loaded.total
    return replace(loaded, micro_batches=micro_batches, total=total)


def without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the modules whose parameters and buffers have no data."""
    parts: dict[int, object] = {
        id(p): nn.Parameter(mode.from_tensor(p.detach()), p.requires_grad) for p in model.parameters()
    }
    parts |= {id(buffer): mode.from_tensor(buffer) for buffer in model.buffers()}
    return copy.deepcopy(model, parts)


class Buckets(Single):
    """A rank of DDP: its gradients are copied to buckets, or are views of them."""

    def __init__(self, model: nn.Module, config: LaunchConfig) -> None:
        super().__init__(model, torch.device(CPU.name))
        self.world_size = config.world_size
        self.shards_optimizer = STRATEGIES[config.strategy].shards_optimizer
        self.is_view = config.gradient_as_bucket_view
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buckets: dict[Tensor, Tensor] = {
            parameter: torch.empty_like(parameter.detach()) for parameter in trained
        }
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.keep)  # type: ignore[no-untyped-call]

    def keep(self, parameter: Tensor) -> None:
        """Has the parameter's bucket hold its gradient."""
        bucket, gradient = self.buckets[parameter], parameter.grad
        label(bucket, "communication")
        assert gradient is not None
        bucket.copy_(gradient)
        if self.is_view:
            parameter.grad = bucket

    def optimizer(self, whole: Optimizer) -> Optimizer:
        if not self.shards_optimizer:
            return whole
        from gpurun.launcher.worker.strategies.zero1 import ShardedOptimizer

        return ShardedOptimizer(whole)


def strategy_without_peers(model: nn.Module, config: LaunchConfig, rank: int, hints: Hints) -> WorkerStrategy:
    """The launch's strategy, which doesn't ask other ranks for anything that only they know."""
    if STRATEGIES[config.strategy].has_buckets:
        return Buckets(model, config)
    kind: Any = class_of(config.strategy)

    def mesh(self: Any) -> Any:
        """A new one for each rank that is claimed, of ranks whose numbers are known."""
        with unset_fake_temporarily():
            if not STRATEGIES[config.strategy].has_shard_groups:
                return kind.mesh(self)
            sizes = self.world_size // self.shard_size, self.shard_size
            return init_device_mesh(CPU.name, sizes, mesh_dim_names=("replicate", "shard"))

    alone: Any = type(kind.__name__, (kind,), {"check_averages": lambda _: None, "mesh": mesh})
    strategy: WorkerStrategy = alone.of(model, config, rank, hints)
    return strategy


@contextmanager
def claimed_ranks(world_size: int, rank: int) -> Iterator[None]:
    """A process group that this process alone is in, as one of `world_size` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def replicas_in_turn() -> Iterator[None]:
    """Has `dp` run its replicas one by one: tensors without data belong to one thread.

    All have their activations at the end of the forward pass either way.
    """
    threaded = dp.run_replicas
    dp.run_replicas = lambda calls: [function() for _, function in calls]  # type: ignore[assignment]
    try:
        yield
    finally:
        dp.run_replicas = threaded
