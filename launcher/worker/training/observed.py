"""What a workload is trained with, and its first losses: whether two launches train the same."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import WORKLOAD, CallSite, Observed, VariantConfig
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.losses import Losses
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.base.seeding import own_numbers, seed
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.launcher.worker.training.try_out import preserved

NUM_LOSSES = 6
"""Steps whose losses are compared; the weights that they change are restored."""
TORCHS_PREFETCH = 2
"""Batches that a worker of a DataLoader reads ahead by default.
Source: https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader
"""


def observe(trainer: Trainer, config: LaunchConfig, journal: Journal, peers: Peers) -> None:
    """Writes down what each variant is trained with, and its first losses; all ranks call it.

    Weights, buffers and random state are as before afterwards. Without room for a copy of the weights,
    there are no losses.
    """
    site = CallSite(WORKLOAD, "", 0, is_users=True, given=dict(given_to(trainer, config, journal.run)))
    lacks_room = bool(max(peers.gather(float(trainer.lacks_room()))))
    for variant in config.variants:
        journal.enter("check", variant.id)
        losses, dtype = ((), "") if lacks_room else first_losses(trainer, variant, peers)
        journal.add_facts(variant.id, observed=Observed((site,), losses, dtype))


def first_losses(
    trainer: Trainer, variant: VariantConfig, peers: Peers
) -> tuple[tuple[float | None, ...], str]:
    """The losses of the global batch in the first steps, and their type, from weights as they are now."""
    totals, dtype = [], ""
    state = trainer.save_state()
    with preserved(trainer.model, trainer.device), own_numbers("losses"):
        for step in range(NUM_LOSSES):
            seed(step * trainer.strategy.world_size + variant_rank(trainer))
            losses = Losses()
            with losses.watch():
                trainer.step(trainer.prepare(variant, step), NoClock())
            runtime_of(trainer.device).synchronize(trainer.device)
            own = [float("nan") if value is None else value for value in losses.values]
            totals.append(sum(peers.gather(sum(own))) / trainer.strategy.world_size)
            dtype = losses.dtype or dtype
    trainer.restore_state(state)
    return tuple(total if abs(total) < float("inf") else None for total in totals), dtype


def variant_rank(trainer: Trainer) -> int:
    """The rank of this process among those that average gradients."""
    return torch.distributed.get_rank() if trainer.strategy.world_size > 1 else 0


def given_to(trainer: Trainer, config: LaunchConfig, run: RunDir) -> Iterator[tuple[str, str]]:
    """The keys of the job that have an effect on this workload, with their values as Python writes them."""
    workload, model = trainer.workload, trainer.model
    found: dict[str, Any] = {name: getattr(config, name) for name in ("compile", "threads", "precision")}
    if config.variants[0].accumulate > 1 and trainer.strategy.world_size > 1:
        found["sync_every"] = config.variants[0].sync_every or config.variants[0].accumulate
        found["accumulate"] = config.variants[0].accumulate
    if config.has("split") and len(config.devices) > 1:
        is_balanced = any(run.balance(variant.id).exists() for variant in config.variants)
        found["split"] = "balanced" if is_balanced else "stated"
    if trainer.strategy.world_size > 1:
        found |= config.strategy_options
    if workload.dataset is not None:
        found["workers"] = workload.num_workers
        if workload.num_workers:
            found["prefetch"] = config.prefetch or TORCHS_PREFETCH
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        found |= {"channels_last": config.channels_last, "cudnn_benchmark": config.cudnn_benchmark}
    if trainer.has_blocks:
        found["checkpointing"] = config.checkpointing
    found |= optimizer_options(trainer.optimizer, config.optimizer)
    return ((name, repr(value)) for name, value in found.items() if name in (*SETTINGS, "foreach", "fused"))


def optimizer_options(optimizer: torch.optim.Optimizer, chosen: str) -> dict[str, Any]:
    """The implementation that is chosen, and which options an optimizer of torch's own has for it."""
    local: Any = getattr(optimizer, "optim", optimizer)  # of `ZeroRedundancyOptimizer`
    options = inspect.signature(type(local)).parameters.keys() & {"foreach", "fused"}
    if not options or not type(local).__module__.startswith("torch.optim"):
        return {}
    return {"optimizer": chosen, **{name: local.param_groups[0].get(name) for name in sorted(options)}}
