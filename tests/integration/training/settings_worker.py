"""What settings of strategies do, in the first two processes of `gradient_worker.py`."""

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gpurun import Workload
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.worker.strategies.ddp import Ddp
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.gradient_check import check_gradients
from gpurun.launcher.worker.training.trainer import Trainer
from tests.integration.training.gradient_worker import IN_PROCESSES, config, few_of, workload

DDP_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bucket_mb": 2},
    {"bucket_mb": 4, "first_bucket_mb": 2},
    {"bucket_mb": 25, "first_bucket_mb": 25},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"comm_hook": "fp16"},
    {"comm_hook": "bf16"},
    {"comm_hook": "powersgd", "bucket_mb": 100},  # of several buckets, gloo's threads wait for each other
)


def collectives(rank: int) -> dict[str, int]:
    """How often ranks communicate in one step of each strategy, with some settings."""
    group: Any = dist.group.WORLD
    found = {}
    variant = few_of(2)
    cases: list[tuple[str, dict[str, Any], int | None]] = [
        *((strategy, {}, sync_every) for strategy in IN_PROCESSES for sync_every in (1, 2, None)),
        ("fsdp", {"reshard": False}, None),
    ]
    for strategy, options, sync_every in cases:
        mine = replace(variant, sync_every=sync_every)
        trainer = Trainer(workload("mean"), replace(config(strategy, 2, (mine,)), options=options), rank)
        for number in range(3):  # DDP makes its buckets anew after its first step
            before = group._get_sequence_number_for_group()
            trainer.step(trainer.prepare(mine, number), NoClock())
            num = group._get_sequence_number_for_group() - before
        found[f"{strategy} {options or sync_every}"] = num
        trainer.close()
    return found


def ddp_settings(rank: int) -> dict[str, dict[str, Any]]:
    """What DDP logs of itself with some options, and what the run's check finds; of 8 MiB in eight layers."""
    found = {}
    variant = VariantConfig("even", (4, 4), 2)
    for options in DDP_OPTIONS:
        launch = replace(config("ddp", 2, (variant,), "fp32"), options=options)
        trainer = Trainer(wide(), launch, rank)
        assert isinstance(trainer.strategy, Ddp)
        (facts,) = check_gradients(trainer, launch, rank).values()
        for number in range(11):  # it logs its tenth step; it makes its buckets in the second
            trainer.step(trainer.prepare(variant, number), NoClock())
        logged = trainer.strategy.model._get_ddp_logging_data()
        sizes = [int(size) / 2**20 for size in logged["rebuilt_bucket_sizes"].split(",")]
        keys = ("static_graph", "comm_hook", "gradient_as_bucket_view")
        found[json.dumps(options)] = facts | {key: logged.get(key) for key in keys} | {"sizes": sizes}
        trainer.close()
    return found


def wide() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    return Workload(
        model, lambda size, generator: (torch.randn(size, 512, generator=generator),) * 2, F.mse_loss
    )
