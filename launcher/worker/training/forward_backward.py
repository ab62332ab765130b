"""Forward and backward of one micro-batch, with the loss weighted so that any split adds up exactly.

DDP averages over ranks: it gives (1/W)·Σᵢ gᵢ. The gradient of the loss over all N samples is
Σᵢ (nᵢ/N)·gᵢ. So a mean loss of nᵢⱼ samples (micro-batch j of rank i) is multiplied by W·nᵢⱼ/N, and a sum by
W. One process that owns all devices has nothing averaged over ranks: W is 1 there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.worker.base.nested import Tree, map_tensors, tensors_of
from gpurun.launcher.worker.base.precision import Precision
from gpurun.launcher.worker.strategies.base import WorkerStrategy
from gpurun.launcher.worker.training.batches import LoadedStep, MicroBatch
from gpurun.workloads.base import Workload


class PhaseClock(Protocol):
    """Records when a phase of a step ends."""

    def mark(self, phase: str) -> None:
        """`data`, `h2d`, `forward`, `backward` or `optimizer` ends now; it began at the mark before."""


class NoClock:
    """A clock for steps that aren't timed."""

    def mark(self, phase: str) -> None:
        return


def loss_weight(reduction: str, count: int, total: int | Tensor, world_size: int) -> float | Tensor:
    """The factor on the loss of a micro-batch with `count` of all `total` samples (or valid targets)."""
    if reduction == "sum":
        return float(world_size)
    return 0.0 if count == 0 or (isinstance(total, int) and total == 0) else world_size * count / total


def weighted_loss(
    workload: Workload, outputs: Tree, targets: Tree, counts: Sequence[int], weight: float | Tensor
) -> Tensor:
    """The micro-batch's share of the step's loss; `counts` are those of its chunks.

    With weight 0 (no valid target) a mean is 0/0: then it is a zero that still reaches every parameter, since
    DDP waits for a gradient of each. A weight on a GPU is not looked at: the host would wait for it.
    """
    if not isinstance(weight, Tensor) and weight == 0:
        zeros = [(tensor * 0).sum() for tensor in tensors_of(outputs) if tensor.requires_grad]
        return sum(zeros[1:], start=zeros[0])
    loss: Tensor = loss_of(workload, outputs, targets, counts)
    if isinstance(weight, Tensor):
        return loss * weight.to(loss.dtype)
    return loss if weight == 1 else loss * weight


def loss_of(workload: Workload, outputs: Tree, targets: Tree, counts: Sequence[int]) -> Any:
    """The result of the workload's loss function; without one, the loss that the model returns.

    Of a model that computes its loss, `dp` gathers one per device that has samples: a vector, whose mean is
    weighted by the `counts` of these devices. Those with samples but no valid target are left out.
    """
    if workload.loss is not None:
        return workload.loss(outputs, targets)
    losses = returned_loss(outputs)
    if not isinstance(losses, Tensor) or losses.shape != (len(counts),):
        return losses  # a scalar, else a mistake that is reported when the workload is tried out
    if workload.reduction == "sum":
        return losses.sum()
    # One by one: a list of indices, or of weights, is a copy to a GPU that the host waits for.
    shares = [losses[index] * (count / sum(counts)) for index, count in enumerate(counts) if count]
    return sum(shares, start=losses.new_zeros(()))


def returned_loss(outputs: Tree) -> Any:
    """The loss among a model's outputs: its only output, `outputs["loss"]` or `outputs.loss`."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", outputs)


def forward_backward(
    strategy: WorkerStrategy,
    workload: Workload,
    precision: Precision,
    step: LoadedStep,
    scaler: torch.amp.GradScaler,
    clock: PhaseClock,
    sync: bool = True,
) -> None:
    """Adds the gradient of this rank's part of the step to the parameters' `grad`.

    Ranks average gradients in the backward pass of the last micro-batch, once however many each has, and of
    those before it that `sync_every` names, of which all have as many. A rank without samples contributes a
    zero. `sync` is false within the strategy's `alone`.
    """
    total = total_count(strategy, step, sync)
    if not step.micro_batches:
        scaler.scale(strategy.skip()).backward()  # type: ignore[no-untyped-call]
        clock.mark("backward")
    for number, micro in enumerate(step.micro_batches, start=1):
        weight = loss_weight(workload.reduction, micro.count, total, strategy.world_size)
        inputs, targets = to_device(micro, strategy.device, clock)
        with strategy.accumulating(sync and not is_averaged_after(step, number)):
            with precision.autocast(strategy.device):
                outputs = strategy.forward(inputs, micro.chunks)
                counts = [n for n, size in zip(micro.counts, micro.chunks, strict=True) if size]
                loss = weighted_loss(workload, outputs, targets, counts, weight)
            clock.mark("forward")
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            clock.mark("backward")


def is_averaged_after(step: LoadedStep, number: int) -> bool:
    """Whether ranks average gradients in the backward pass of that micro-batch, counted from 1."""
    is_last = number == len(step.micro_batches)
    return is_last or (step.sync_every is not None and number % step.sync_every == 0)


def total_count(strategy: WorkerStrategy, step: LoadedStep, sync: bool) -> int | Tensor:
    """Samples, or valid targets, that the step's loss is averaged over.

    Without `sync`, all ranks are taken to have as many as this rank.
    """
    if step.total is not None:
        return step.total
    own = sum(micro.count for micro in step.micro_batches)
    return strategy.total(own) if sync else strategy.world_size * own


def to_device(micro: MicroBatch, device: torch.device, clock: PhaseClock) -> tuple[Tree, Tree]:
    """The micro-batch's inputs and targets on the device; on the CPU they are there without a phase."""
    if accelerator_of(device.type).is_host:
        return micro.inputs, micro.targets
    inputs, targets = (
        map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)
        for tree in (micro.inputs, micro.targets)
    )
    clock.mark("h2d")
    return inputs, targets
