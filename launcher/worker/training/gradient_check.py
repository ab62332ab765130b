"""Whether every variant computes the gradient that one device would: the run's check of its own premise."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import plural
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import if_it_fits
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.launcher.worker.training.try_out import has_batch_norm, preserved

CHECK_STEP = 0
"""The step whose batch is used, for all variants alike."""
ONE_DEVICE = "one device"
NUM_STEPS = 5
"""Steps after which weights are compared, where the ranks share the optimizer's work."""
BATCH_NORM = (
    "the model has BatchNorm, whose statistics are those of each device's own samples: "
    "its gradient depends on the split; on GPUs with ddp, `nn.SyncBatchNorm.convert_sync_batchnorm` of the "
    "model makes them those of the whole batch"
)
OF_BATCH_NORM, OF_RANDOM_NUMBERS = "BatchNorm", "dropout or another layer that draws random numbers"
"""Reasons why no two ways to run the model have one gradient, an even split and one device included."""

DROPOUT = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Layers whose `training` decides about nothing but dropout."""

Gradient = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """The reference that the variants' gradients are compared with."""

    name: str | None
    """`one device`, or the id of a variant; `None` where nothing could be compared."""
    gradient: Gradient | None
    """The reference gradient, on rank 0 only."""
    draws_random: bool
    """Whether the model draws random numbers, so that no two passes are alike."""


def check_gradients(
    trainer: Trainer,
    config: LaunchConfig,
    rank: int,
    enter: Callable[[str], None] = lambda variant_id: None,
) -> dict[str, dict[str, Any]]:
    """The fields of `VariantFacts` that the check finds, by variant id.

    All ranks call it, and get the same. Weights, buffers and random state are as before afterwards.

    Args:
        trainer: of this rank.
        config: whose variants are checked.
        rank: of this process.
        enter: called with the id of each variant before anything of it is computed.
    """
    # Where one of the variants must serve as the reference, it is the baseline.
    variants = sorted(config.variants, key=lambda variant: variant.id != config.baseline)
    by_batch = grouped(variants, lambda variant: sum(variant.split))
    found: dict[str, dict[str, Any]] = {}
    with preserved(trainer.model, trainer.device), without_dropout(trainer.model):
        for global_batch, members in by_batch.items():
            found |= check_batch(trainer, global_batch, members, rank, enter)
            if STRATEGIES[config.strategy].shards_optimizer:
                for variant_id, error in weight_errors(trainer, global_batch, members, rank).items():
                    found[variant_id] |= weight_facts(trainer, error, found[variant_id])
    return found


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout layers change nothing within it: with them, no two passes would have one gradient.

    A compiled model stays as it is: it would be compiled once more. Nor can functional dropout be left out.
    """
    layers = [m for m in model.modules() if isinstance(m, DROPOUT) and m.training]
    layers = [] if model._compiled_call_impl is not None else layers
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def check_batch(
    trainer: Trainer,
    global_batch: int,
    variants: Sequence[VariantConfig],
    rank: int,
    enter: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """`check_gradients` for variants of one global batch, which share a reference."""
    enter(variants[0].id)  # of whom the reference's batch is: a dataset may have too few samples for it
    reference = one_device_reference(trainer, global_batch, rank)
    errors: dict[str, float | None] = {}
    for variant in variants:
        enter(variant.id)
        gradient = trainer.gradient(variant, CHECK_STEP, is_kept=rank == 0)
        if reference.name is None:
            reference = Reference(variant.id, gradient if rank == 0 else None, reference.draws_random)
            errors[variant.id] = None
        else:
            errors[variant.id] = shared_error(trainer, gradient, reference.gradient)
    return {variant_id: facts(trainer, error, reference, variant_id) for variant_id, error in errors.items()}


def one_device_reference(trainer: Trainer, global_batch: int, rank: int) -> Reference:
    """The gradient of the whole batch on rank 0's device, if that device can hold it."""
    gradient, draws_random = None, False
    model = trainer.strategy.unwrapped()
    if rank == 0 and model is not None:
        runtime = runtime_of(trainer.device)
        before = runtime.random_state(trainer.device)
        gradient = on_one_device(
            trainer, partial(trainer.one_device_gradient, model, global_batch, CHECK_STEP)
        )
        draws_random = not torch.equal(before, runtime.random_state(trainer.device))
    fits, random = trainer.strategy.share([float(gradient is not None), float(draws_random)])
    return Reference(ONE_DEVICE if fits else None, gradient, bool(random))


def weight_errors(
    trainer: Trainer, global_batch: int, variants: Sequence[VariantConfig], rank: int
) -> dict[str, float | None]:
    """How much the weights after some steps differ from those of one device, relatively; `None`: not known.

    Where ranks update parts of the weights, the gradient doesn't show whether these parts are put together.
    """
    alone = None
    model = trainer.strategy.unwrapped()
    # Besides, the weights of rank 0, and those of one device.
    lacks_room = int(trainer.strategy.total(trainer.lacks_room(num_whole=2))) > 0
    if rank == 0 and model is not None and not lacks_room:
        steps = partial(trainer.one_device_weights_after, model, global_batch, NUM_STEPS)
        alone = on_one_device(trainer, steps)
    (fits,) = trainer.strategy.share([float(alone is not None)])
    errors: dict[str, float | None] = {}
    for variant in variants:
        weights = trainer.weights_after(variant, NUM_STEPS, is_kept=rank == 0) if fits else {}
        errors[variant.id] = shared_error(trainer, weights, alone) if fits else None
    return errors


def weight_facts(trainer: Trainer, error: float | None, gradient: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about a variant from `weight_errors`; where its gradient differs too, that says why."""
    limit = trainer.precision.max_gradient_error
    gradient_error = gradient["gradient_error"]
    found = {"parameter_error": error if error is not None and math.isfinite(error) else None}
    is_explained = gradient_error is None or gradient_error > limit or trainer.strategy.compression
    if error is None or error <= limit or is_explained:
        return found
    text = f"weights after {NUM_STEPS} steps differ from those of one device by {error:.2g} (relative)"
    return found | {"gradient_warning": f"{text}, more than {trainer.precision.name} explains ({limit:.2g})"}


def on_one_device(trainer: Trainer, compute: Callable[[], Gradient]) -> Gradient | None:
    """The result of `compute`, or `None` when memory runs out on the way, which is freed then."""
    found = if_it_fits(compute)
    if found is None:
        trainer.model.zero_grad(set_to_none=True)
        runtime_of(trainer.device).release_memory()
    return found


def shared_error(trainer: Trainer, gradient: Gradient, reference: Gradient | None) -> float:
    """The relative error that rank 0 finds, on all ranks."""
    error = 0.0 if reference is None else relative_error(gradient, reference)
    return trainer.strategy.share([error])[0]


def relative_error(gradient: Gradient, reference: Gradient) -> float:
    """‖g − g_ref‖ / ‖g_ref‖ over all parameters in float64; a parameter that is missing counts as zero."""
    difference = squares = 0.0
    for name in sorted({*gradient, *reference}):
        expected = reference.get(name, torch.zeros(())).double()
        found = gradient.get(name, torch.zeros(())).double()
        difference += float((found - expected).square().sum())
        squares += float(expected.square().sum())
    if squares == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / squares)


def facts(trainer: Trainer, error: float | None, reference: Reference, variant_id: str) -> dict[str, Any]:
    """The facts of the check about one variant; an error that is no number is in the warning only."""
    is_reference = reference.name == variant_id
    return {
        "gradient_error": error if error is not None and math.isfinite(error) else None,
        "gradient_reference": None if is_reference else reference.name,
        **warnings(trainer, error, reference),
    }


def warnings(trainer: Trainer, error: float | None, reference: Reference) -> dict[str, Any]:
    """The warnings to read before believing that the variants train alike: `gradient_warning` where
    they don't, `inexact` where that is how the model is, split or not; `warnings` say so of BatchNorm."""
    found = model_warnings(trainer)
    if reference.name != ONE_DEVICE:
        found.append("one device can't hold the whole batch: gradients are compared between variants only")
    limit = trainer.precision.max_gradient_error
    is_compressed = trainer.strategy.compression and error is not None and math.isfinite(error)
    if error is None or error <= limit or is_compressed:  # NaN is not ≤ anything
        return {"gradient_warning": None, "inexact": None, "warnings": tuple(found)}
    reason = likely_reason(trainer, error, reference)
    differs = f" by {error:.2g} (relative), more than {trainer.precision.name} explains ({limit:.2g})"
    by = differs if math.isfinite(error) else ": it isn't finite (NaN or infinity)"
    text = f"the gradient differs from that of {reference.name}{by}; likely reason: {reason}"
    is_wrong = reason not in (OF_BATCH_NORM, OF_RANDOM_NUMBERS)
    return {
        "gradient_warning": text if is_wrong else None,
        "inexact": text if reason == OF_RANDOM_NUMBERS else None,
        "warnings": tuple(found),
    }


def model_warnings(trainer: Trainer) -> list[str]:
    """The warnings from model and batch alone, whether or not gradients are checked."""
    found = [*trainer.workload.notes, *([BATCH_NORM] if has_batch_norm(trainer.model) else [])]
    found += [*without_effect(trainer), *unused_notes(trainer)]
    return found + ([trainer.batch_warning] if trainer.batch_warning else [])


def without_effect(trainer: Trainer) -> Iterator[str]:
    """The notes on settings that change nothing."""
    config = trainer.config
    if config.channels_last and all(p.dim() != 4 for p in trainer.model.parameters()):
        yield "channels_last changes nothing: the model has no two-dimensional convolution"
    if config.cudnn_benchmark and accelerator_of(trainer.device.type).is_host:
        yield "cudnn_benchmark changes nothing: a CPU has no cuDNN"
    if config.checkpointing != "none" and not trainer.has_blocks:
        yield (
            "checkpointing changes nothing: no layers of the model repeat; the workload can name its `blocks`"
        )
    stated = [name for name in ("workers", "prefetch") if getattr(config, name) is not None]
    if trainer.workload.dataset is None:
        yield from (f"{name} changes nothing: the workload has no dataset" for name in stated)
    elif not trainer.workload.num_workers and "prefetch" in stated:
        yield "prefetch changes nothing: no other process reads the dataset"


def unused_notes(trainer: Trainer) -> list[str]:
    """The note where DDP has an option without which the user's own loop fails in its second step."""
    model, unused = getattr(trainer.strategy, "model", None), trainer.trial.unused
    if not (isinstance(model, nn.parallel.DistributedDataParallel) and model.find_unused_parameters):
        return []
    return [
        f"{plural(len(unused), 'parameter')} of the model {'get' if len(unused) > 1 else 'gets'} no gradient "
        f"({unused[0]}{', …' if unused[1:] else ''}), so gpurun sets `find_unused_parameters=True` of "
        "DistributedDataParallel, and so must a loop of your own; if the same ones are unused in every step, "
        "`static_graph=True`, here `static_graph: true`, may be faster"
    ]


def likely_reason(trainer: Trainer, error: float, reference: Reference) -> str:
    """The first cause that fits."""
    if not math.isfinite(error):
        return "values that are infinite or not a number"
    if trainer.batch_warning:
        return "a `batch` that doesn't draw from its generator alone"
    if has_batch_norm(trainer.model):
        return OF_BATCH_NORM
    if reference.draws_random:
        return OF_RANDOM_NUMBERS
    return (
        f"a loss that isn't a {trainer.workload.reduction} over samples (set `reduction`, "
        "or `count` for masked targets), or a layer that mixes samples"
    )
