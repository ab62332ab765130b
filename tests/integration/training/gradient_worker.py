"""One of four processes that compute gradients of every strategy and split; run by `test_gradients.py`.

Results go to DIRECTORY/RANK.json: case → relative error, and findings.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gpurun import Workload
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import (
    VariantConfig,
)
from gpurun.launcher.strategies import IN_JOBS, STRATEGIES
from gpurun.launcher.worker.training import forward_backward
from gpurun.launcher.worker.training.batches import step_generator
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.gradient_check import check_gradients, relative_error
from gpurun.launcher.worker.training.trainer import Trainer, own_part
from tests.integration.ranks import in_group
from tests.launches import launch_config
from tests.whole import IS_WHOLE

SEED = 5
LIMIT = timedelta(minutes=7)
"""Of a collective, which is no default of torch's."""
SMALLER = {"fp32": 1e-5, "bf16": 1e-1}
"""Precisions, and how far rounding may bring a gradient from that in fp64."""
NUM_STEPS = 5
IN_PROCESSES = tuple(name for name in IN_JOBS if STRATEGIES[name].has_backend)
GLOBAL_BATCH = 24
ALL_SPLITS: dict[int, list[tuple[int, ...]]] = {
    1: [(24,)],
    2: [(18, 6), (12, 12), (1, 23), (23, 1)],
    3: [(13, 10, 1), (8, 8, 8), (1, 22, 1)],
    4: [(10, 2, 11, 1), (6, 6, 6, 6), (1, 1, 1, 21)],
}
WORLDS = (2, 3, 4) if IS_WHOLE else (2, 4)
SPLITS = ALL_SPLITS if IS_WHOLE else {world: splits[:1] for world, splits in ALL_SPLITS.items()}


class Net(nn.Module):
    """Nested inputs to four scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        scores: Tensor = self.second(torch.tanh(self.first(inputs["x"]))) * inputs["more"][0]
        return scores


class TwoInputs(Net):
    """Takes the parts of a tuple as arguments."""

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward({"x": x, "more": [factor]})


class OwnLoss(Net):
    """Takes a dict as keyword arguments and returns its loss, as models of Hugging Face do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor, factor: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        scores = super().forward({"x": x, "more": [factor]})
        assert labels is not None
        return {"loss": F.cross_entropy(scores, labels, reduction=self.reduction), "logits": scores}


class PartlyUsed(Net):
    """Has a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


def draw(size: int, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """Inputs of unequal scale, so that a wrong weight shows; targets of which the first third is masked."""
    x = torch.randn(size, 6, generator=generator) * torch.linspace(1, 4, size).unsqueeze(1)
    targets = torch.randint(4, (size,), generator=generator)
    return {"x": x, "more": [torch.rand(size, 1, generator=generator) + 0.5]}, targets


def draw_masked(size: int, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    inputs, targets = draw(size, generator)
    targets[: size // 3] = -100
    targets[-1] = -100
    return inputs, targets


def draw_tuple(size: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    inputs, targets = draw(size, generator)
    return (inputs["x"], inputs["more"][0]), targets


def draw_dict(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    inputs, labels = draw_masked(size, generator)
    return {"x": inputs["x"], "factor": inputs["more"][0], "labels": labels}


def count_valid(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


def sum_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, reduction="sum")


class Samples(torch.utils.data.Dataset[Any]):
    """As many samples as one global batch, so that every order has the same gradient."""

    def __init__(self, masked: bool) -> None:
        draws = draw_masked if masked else draw
        self.inputs, self.targets = draws(GLOBAL_BATCH, torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return GLOBAL_BATCH

    def __getitem__(self, index: int) -> Any:
        more = [self.inputs["more"][0][index]]
        return {"x": self.inputs["x"][index], "more": more}, self.targets[index]


def workload(kind: str, num_workers: int = 0) -> Workload:
    """A fresh workload with the same weights every time."""
    torch.manual_seed(0)
    made = WORKLOADS[kind]()
    return replace(made, num_workers=num_workers) if kind == "dataset" else made


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mean": lambda: Workload(Net(), draw, F.cross_entropy),
    "sum": lambda: Workload(Net(), draw, sum_loss, reduction="sum"),
    "masked": lambda: Workload(Net(), draw_masked, F.cross_entropy, count=count_valid),
    "masked-sum": lambda: Workload(Net(), draw_masked, sum_loss, reduction="sum"),
    "two-inputs": lambda: Workload(TwoInputs(), draw_tuple, F.cross_entropy),
    "own-loss": lambda: Workload(
        OwnLoss("mean"), draw_dict, count=lambda batch: count_valid(batch["labels"])
    ),
    "own-sum": lambda: Workload(OwnLoss("sum"), draw_dict, reduction="sum"),
    "unused": lambda: Workload(PartlyUsed(), draw, F.cross_entropy),
    "dataset": lambda: Workload(Net(), None, F.cross_entropy, dataset=Samples(False)),
    "masked-dataset": lambda: Workload(
        Net(), None, F.cross_entropy, dataset=Samples(True), count=count_valid
    ),
}


SAME = {"two-inputs": "mean", "own-loss": "masked", "own-sum": "masked-sum"}
"""Kinds that compute what another does."""
KINDS = ("mean", "sum", "masked", "unused", "dataset", "masked-dataset", *SAME)


def kinds_of(strategy: str, world: int) -> tuple[str, ...]:
    """Where samples come from, and how a loss is found in outputs, doesn't depend on what is sharded."""
    if world > 2 and not IS_WHOLE:
        return ("masked",)
    if STRATEGIES[strategy].has_shard_groups:
        return "mean", "unused"
    return ("mean", "sum", "masked", "unused") if STRATEGIES[strategy].shards_optimizer else KINDS


def config(
    strategy: str, world: int, variants: tuple[VariantConfig, ...], precision: str = "fp64"
) -> LaunchConfig:
    return launch_config(
        *variants,
        strategy=strategy,
        devices=("cpu",) * world,
        backend="gloo" if STRATEGIES[strategy].has_backend else None,
        precision=precision,
        seed=SEED,
        baseline=variants[0].id,
        shard_size=3 if world == 3 else 2,
    )


def variants_of(world: int, strategy: str, kind: str = "mean") -> tuple[VariantConfig, ...]:
    found = (
        VariantConfig(name_of(split, accumulate), split, accumulate)
        for split in SPLITS[world]
        for accumulate in (1, 3)
        # Where all ranks are needed for a micro-batch, each has as many; a plan refuses others anyway.
        if min(split) >= accumulate or not STRATEGIES[strategy].shards_parameters
    )
    often = STRATEGIES[strategy].has_backend and kind == "mean"
    several = few_of(world)
    return (*found, *(replace(several, id=f"{several.id}-every{n}", sync_every=n) for n in (1, 2) if often))


def name_of(split: tuple[int, ...], accumulate: int) -> str:
    return "-".join(map(str, split)) + f"-acc{accumulate}"


def few_of(world: int) -> VariantConfig:
    """An uneven split in three micro-batches, for settings that don't depend on it."""
    split = {1: (24,), 2: (18, 6), 3: (12, 8, 4), 4: (6, 9, 3, 6)}[world]
    return VariantConfig(name_of(split, 3), split, 3)


def expected_gradient(kind: str) -> dict[str, Tensor]:
    """By plain autograd on the whole batch, without anything of ours but how step 0 is seeded."""
    w = workload(SAME.get(kind, kind))
    w.model.double()
    if w.dataset is not None:
        inputs, targets = w.dataset.inputs, w.dataset.targets
    else:
        assert w.batch is not None
        inputs, targets = w.batch(GLOBAL_BATCH, step_generator(SEED, 0))
    inputs = {"x": inputs["x"].double(), "more": [inputs["more"][0].double()]}
    assert w.loss is not None
    w.loss(w.model(inputs), targets).backward()
    return {name: p.grad for name, p in w.model.named_parameters() if p.grad is not None}


def gradient_errors(strategy: str, world: int, rank: int) -> dict[str, float]:
    errors = {}
    for kind in kinds_of(strategy, world):
        variants = variants_of(world, strategy, kind)
        job = workload(kind, num_workers=int(world == 2))
        trainer = Trainer(job, config(strategy, world, variants), rank)
        for variant in variants:
            found = trainer.gradient(variant, 0)
            errors[f"{strategy} {kind} {variant.id}"] = relative_error(found, expected_gradient(kind))
        trainer.close()
    return errors


def errors_in(precision: str, strategy: str, world: int, rank: int) -> dict[str, float]:
    """Relative errors of gradients in a smaller precision, in which torch averages by another way."""
    variants = variants_of(world, strategy)
    trainer = Trainer(workload("mean"), config(strategy, world, variants, precision), rank)
    found = {variant.id: trainer.gradient(variant, 0) for variant in variants}
    trainer.close()
    return {
        f"{strategy} {precision} {name}": relative_error(gradient, expected_gradient("mean"))
        for name, gradient in found.items()
    }


def adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW in two groups with options of their own."""
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        by_kind[parameter.dim() > 1].append(parameter)
    groups = [{"params": by_kind[True], "weight_decay": 0.1}, {"params": by_kind[False], "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def weights_after_steps(strategy: str, world: int, rank: int) -> dict[str, float]:
    """Relative differences of the weights after some steps of AdamW to those of a bare loop."""
    several = variants_of(world, strategy)
    accumulating = [variant for variant in several if variant.accumulate > 1]
    chosen = {variant.id: variant for variant in (accumulating[-1], several[-1])[not IS_WHOLE :]}
    errors = {name: weight_error(strategy, world, rank, variant) for name, variant in chosen.items()}
    return {f"{strategy} weights {name}": error for name, error in errors.items()}


def weight_error(strategy: str, world: int, rank: int, variant: VariantConfig) -> float:
    """Between the steps, others are made, alone too, and undone."""
    trainer = Trainer(replace(workload("mean"), optimizer=adam), config(strategy, world, (variant,)), rank)
    bare = workload("mean")
    bare.model.double()
    assert bare.batch is not None
    assert bare.loss is not None
    optimizer = adam(bare.model.parameters())
    for number in range(NUM_STEPS):
        if number == 2:
            saved = trainer.save_state()
            for sync in (True, False):
                trainer.step(trainer.prepare(variant, number), NoClock(), sync)
            trainer.restore_state(saved)
        trainer.step(trainer.prepare(variant, number), NoClock())
        inputs, targets = bare.batch(GLOBAL_BATCH, step_generator(SEED, number))
        inputs = {"x": inputs["x"].double(), "more": [inputs["more"][0].double()]}
        optimizer.zero_grad()
        bare.loss(bare.model(inputs), targets).backward()
        optimizer.step()
    found = {name: trainer.strategy.full(p).detach() for name, p in trainer.model.named_parameters()}
    error = relative_error(found, {name: p.detach() for name, p in bare.model.named_parameters()})
    trainer.close()
    return error


def checks(rank: int) -> dict[str, Any]:
    """What the run's own check says: as it is, with plain DDP's weights, and without enough memory."""
    variants = (VariantConfig("even", (32, 32), 1), VariantConfig("uneven", (48, 16), 1))
    found: dict[str, Any] = {}
    trainer = Trainer(workload("mean"), config("ddp", 2, variants), rank)
    launch = config("ddp", 2, variants)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    state = torch.get_rng_state()
    found["right"] = check_gradients(trainer, launch, rank)
    with mock.patch.object(forward_backward, "loss_weight", return_value=1.0):
        found["plain"] = check_gradients(trainer, launch, rank)
    with mock.patch.object(trainer, "one_device_gradient", side_effect=MemoryError):
        found["small"] = check_gradients(trainer, launch, rank)
    after = trainer.model.state_dict()
    found["untouched"] = all(torch.equal(before[name], after[name]) for name in before)
    found["untouched"] &= torch.equal(state, torch.get_rng_state())
    trainer.close()
    return found


def weight_checks(rank: int) -> dict[str, Any]:
    """What the run's own check says of strategies whose ranks share the optimizer's work."""
    variants = (VariantConfig("even", (32, 32), 1), VariantConfig("uneven", (48, 16), 3))
    found: dict[str, Any] = {}
    for strategy in (name for name in IN_PROCESSES if STRATEGIES[name].shards_optimizer):
        launch = config(strategy, 2, variants)
        trainer = Trainer(replace(workload("mean"), optimizer=adam), launch, rank)
        found[strategy] = check_gradients(trainer, launch, rank)
        with mock.patch.object(trainer.optimizer, "step"):
            found[f"{strategy} without steps"] = check_gradients(trainer, launch, rank)
        trainer.close()
    return found


def ablation(strategy: str, world: int, rank: int) -> dict[str, Any]:
    """Rank 0 makes a step without communication while the others do nothing; the saved state undoes it."""
    variants = (few_of(world),)
    trainer = Trainer(workload("mean"), config(strategy, world, variants), rank)

    def own_weights() -> Tensor:
        return torch.cat([own_part(p).detach().flatten() for p in trainer.model.parameters()])

    trainer.step(trainer.prepare(variants[0], 0), NoClock())
    saved, before, apart = trainer.save_state(), own_weights(), 0.0
    if rank == 0:
        trainer.step(trainer.prepare(variants[0], 1), NoClock(), sync=False)
        apart = float((own_weights() - before).abs().max())
    trainer.restore_state(saved)
    restored = float((own_weights() - before).abs().max())
    trainer.step(trainer.prepare(variants[0], 1), NoClock())  # as before, with all ranks
    trainer.close()
    return {"apart": apart, "restored": restored}


def limits_of_groups() -> list[float]:
    """How long a collective may take, in s, in each of this rank's process groups."""
    backends = (group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map)
    return [backend.options._timeout.total_seconds() for backend in backends]


def found_in_group(world: int, rank: int) -> dict[str, Any]:
    """What a rank finds in a group of so many."""
    found: dict[str, Any] = {}
    for strategy in IN_PROCESSES:
        found |= gradient_errors(strategy, world, rank) | weights_after_steps(strategy, world, rank)
        for precision in SMALLER if IS_WHOLE or world == 2 else ():
            found |= errors_in(precision, strategy, world, rank)
    if world == 2:
        found |= {"checks": checks(rank), "weights": weight_checks(rank)}
    # Only four ranks make groups of which one has replicas.
    for strategy in (name for name in IN_PROCESSES if world == 2 or STRATEGIES[name].has_shard_groups):
        found[f"ablation of {strategy} on {world}"] = ablation(strategy, world, rank)
    return found | {f"limits on {world}": limits_of_groups()}


@mock.patch.object(DTensor, "full_tensor", None)  # it crashes over gloo on GPUs
def main(rank: int, directory: Path) -> None:
    results: dict[str, Any] = {}
    if rank == 3:  # it has least to do among the groups
        results |= gradient_errors("single", 1, 0)
        for world in WORLDS:
            results |= gradient_errors("dp", world, 0) | weights_after_steps("dp", world, 0)
    for world in WORLDS:
        if rank < world:
            with in_group(rank, world, directory, timeout=LIMIT):
                results |= found_in_group(world, rank)
    (directory / f"{rank}.json").write_text(json.dumps(results))
