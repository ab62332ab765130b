"""One of two processes that show what settings of strategies do; run by `test_gradients.py`.

Results go to DIRECTORY/RANK.json.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpurun import Workload
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.base.process_group import GroupPeers
from gpurun.launcher.worker.strategies.ddp import Ddp
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.gradient_check import check_gradients
from gpurun.launcher.worker.training.observed import first_losses
from gpurun.launcher.worker.training.trainer import Trainer
from tests.integration.ranks import in_group
from tests.integration.training.gradient_worker import IN_PROCESSES, adam, config, few_of, workload
from tests.whole import IS_WHOLE

LAYERED = IN_PROCESSES if IS_WHOLE else ("ddp", "fsdp")
"""Strategies whose layers and optimizers are looked at."""
IN_WORLD = [name for name in IN_PROCESSES if not STRATEGIES[name].has_shard_groups]
"""Strategies that communicate in the group of all ranks, which counts how often."""
DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_mb": 4, "first_bucket_mb": 2},
    {"static_graph": True},
    {"comm_hook": "fp16"},
    {"comm_hook": "powersgd", "bucket_mb": 100},  # of several buckets, gloo's threads wait for each other
]
if IS_WHOLE:
    DDP_OPTIONS += [
        {"bucket_mb": 2},
        {"bucket_mb": 25, "first_bucket_mb": 25},
        {"gradient_as_bucket_view": True},
        {"comm_hook": "bf16"},
    ]


CHANGES: tuple[dict[str, Any], ...] = (
    {"checkpointing": "none", "optimizer": "default"},
    {"checkpointing": 2, "optimizer": "foreach"},
    {"checkpointing": "full", "optimizer": "fused"},
)
UNEVEN = VariantConfig("uneven", (192, 64), 1)


def collectives(rank: int) -> dict[str, int]:
    """How often ranks communicate in one step of each strategy, with some settings."""
    group: Any = dist.group.WORLD
    found = {}
    variant = few_of(2)
    cases: list[tuple[str, dict[str, Any], int | None]] = [
        *((strategy, {}, sync_every) for strategy in IN_WORLD for sync_every in (1, 2, None)),
        ("fsdp", {"reshard": False}, None),
    ]
    for strategy, options, sync_every in cases:
        mine = replace(variant, sync_every=sync_every)
        trainer = Trainer(workload("mean"), replace(config(strategy, 2, (mine,)), **options), rank)
        for number in range(3):  # DDP makes its buckets again after its first step
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
        launch = replace(config("ddp", 2, (variant,), "fp32"), **options)
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


class Block(nn.Module):
    """Two layers, between which activations are kept unless they are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.other(torch.tanh(self.one(x)))
        return y


def blocks() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    return Workload(
        model, lambda size, generator: (torch.randn(size, 32, generator=generator),) * 2, F.mse_loss, adam
    )


def layers_and_optimizers(rank: int) -> dict[str, dict[str, Any]]:
    """What the check finds, what memory holds, and which operators update the weights."""
    found = {}
    for strategy, change in itertools.product(LAYERED, CHANGES):
        launch = replace(config(strategy, 2, (UNEVEN,)), **change)
        trainer = Trainer(blocks(), launch, rank)
        (facts,) = check_gradients(trainer, launch, rank).values()
        trainer.step(trainer.prepare(UNEVEN, 0), NoClock())  # which makes the optimizer's state
        memory = trainer.memory_peak(UNEVEN).parts
        names = Names()
        with names:
            trainer.step(trainer.prepare(UNEVEN, 1), NoClock())
        found[f"{strategy} {change}"] = facts | {"memory": memory, "names": sorted(names.seen)}
        trainer.close()
    return found


def losses(rank: int) -> dict[str, list[Any]]:
    """The first losses of each strategy, with splits and settings that train alike, and those again."""
    found: dict[str, list[Any]] = {}
    even = VariantConfig("even", (128, 128), 2)
    for strategy, change in itertools.product(IN_PROCESSES, CHANGES[-1:]):
        trainer = Trainer(blocks(), replace(config(strategy, 2, (even, UNEVEN)), **change), rank)
        for variant in (even, UNEVEN, even):
            values, dtype = first_losses(trainer, variant, GroupPeers())
            found.setdefault(strategy, []).append([*values, dtype])
        trainer.close()
    return found


class Names(TorchDispatchMode):
    """Names of the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def main(rank: int, directory: Path) -> None:
    with in_group(rank, 2, directory):
        results = {
            "collectives": collectives(rank),
            "ddp": ddp_settings(rank),
            "layers": layers_and_optimizers(rank),
            "losses": losses(rank),
        }
    (directory / f"{rank}.json").write_text(json.dumps(results))
