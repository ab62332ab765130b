"""The lines that bring the fastest uneven split into your own training loop."""

from collections.abc import Sequence

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.strategies import STRATEGIES

_MAP_STYLE = """\
import torch
from torch.utils.data import DataLoader
from gpurun.uneven import {names}

batches = UnevenBatches(dataset, split={split}, rank=torch.distributed.get_rank(){reduction})
loader = DataLoader(dataset, batch_sampler=batches)
for epoch in range(epochs):
    batches.set_epoch(epoch)
    for (inputs, targets), weight in zip(loader, batches.weights()):
"""
_ITERABLE = """\
stream = UnevenStream(dataset, split={split}, rank=torch.distributed.get_rank(){reduction})
for epoch in range(epochs):
    for (inputs, targets), weight in DataLoader(stream, batch_size=None):
        ...  # the same
"""
_TO_GPU = """\
inputs, targets = inputs.to("{kind}"), targets.to("{kind}")
"""
_LOSS = """\
loss = weight * loss_function(model(inputs), targets)  # {loss}
"""
_COUNTED_LOSS = """\
outputs = model(inputs)
count = torch.as_tensor(count_targets(targets) if weight else 0, device=outputs.device)
total = count.clone()
torch.distributed.all_reduce(total)  # valid targets of all ranks
weight = loss_weight(int(count), int(total), torch.distributed.get_world_size())
loss = weight * loss_function(outputs, targets) if count else 0 * outputs.sum()
"""
_UPDATE = """\
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
_WORDS = {None: "must be a mean over samples", "mean": "a mean over samples", "sum": "a sum over samples"}


def lines_to_paste(comparison: Comparison) -> str | None:
    """Returns the code for your own DDP loop with the fastest uneven split; `None` if there is none.

    An uneven split that is not surely the fastest gets lines too, and they say so, but none where an even
    split is ahead: that one needs no lines. Where no lines can be given, the text says why. A gate, which
    compares no splits, has none.
    """
    if comparison.gate is not None:
        return None
    uneven = first_uneven(comparison, has_snippet=True)
    if uneven is not None and is_slower_than_even(uneven, comparison):
        return None
    if uneven is None:
        other = first_uneven(comparison, has_snippet=False)
        return None if other is None else _no_lines(other)
    devices = [device for device, samples in zip(uneven.devices, uneven.split, strict=True) if samples]
    if len(devices) == 1:
        return f"To train with {variant_label(uneven)}, use {devices[0]} alone: the others get no samples."
    return "\n\n".join(
        [
            _head(uneven, devices, comparison),
            _indented(map_style(uneven)),
            _yours(uneven),
            "For an iterable dataset, import UnevenStream from gpurun.uneven too:",
            _indented(iterable(uneven)),
        ]
    )


def is_slower_than_even(uneven: VariantResult, comparison: Comparison) -> bool:
    """Whether an even split of the same work is the fastest so far, or ahead as the baseline.

    A baseline of any strategy: a split that is slower than the job's own setting is of no use, and one that
    only seems to be is no advice.
    """
    found = uneven.vs_baseline
    # Without a leader estimates say nothing, as of hot GPUs.
    is_behind = comparison.leader is not None and found is not None and (found.percent or 0) > 0
    is_slower = found is not None and found.verdict == "slower"
    own = comparison.baseline if is_slower or is_behind else None
    first = {comparison.fastest, comparison.leader}
    return any(
        one.id == own or (one.id in first and one.strategy == uneven.strategy)
        for one in comparison.variants
        if len(set(one.split)) == 1
    )


def map_style(variant: VariantResult) -> str:
    """The whole loop, of a dataset with a length."""
    body = _to_device(variant) + _loss_lines(variant) + _UPDATE
    return _MAP_STYLE.format(**_values(variant)) + _indented(body, 8)


def iterable(variant: VariantResult) -> str:
    """The lines that differ from `map_style` where the dataset has no length."""
    return _ITERABLE.format(**_values(variant))


def _values(variant: VariantResult) -> dict[str, object]:
    return {
        "names": "UnevenBatches, loss_weight" if variant.loss == "counted" else "UnevenBatches",
        "split": tuple(samples for samples in variant.split if samples),
        "reduction": ', reduction="sum"' if variant.loss == "sum" else "",
    }


def _loss_lines(variant: VariantResult) -> str:
    return _COUNTED_LOSS if variant.loss == "counted" else _LOSS.format(loss=_WORDS[variant.loss])


def _to_device(variant: VariantResult) -> str:
    kind = accelerator_of(variant.devices[0])
    return "" if kind.is_host else _TO_GPU.format(kind=kind.name)


def _head(uneven: VariantResult, devices: Sequence[str], comparison: Comparison) -> str:
    head = (
        f"{_whose(uneven, comparison)} {variant_label(uneven)}, "
        f"in a {STRATEGIES[uneven.strategy].loop} loop of your own"
    )
    if len(devices) == len(uneven.devices):
        return f"{head}:"
    return f"{head} with {len(devices)} ranks, on {' '.join(devices)} (the others get no samples):"


def _yours(uneven: VariantResult) -> str:
    counted = ", count_targets (the workload's `count`)" if uneven.loss == "counted" else ""
    return f"You provide dataset, model, loss_function{counted}, optimizer and epochs."


def _whose(uneven: VariantResult, comparison: Comparison) -> str:
    """The words that introduce the split, by what is known of it."""
    is_alone = len(by_rank(comparison)[0]) == 1
    if comparison.fastest is None and not is_alone:
        return "No split was shown to be the fastest. To train with"
    if uneven.id == comparison.first or is_alone:
        return "To train with"
    other = first_uneven(comparison, has_snippet=False)
    leads = other is not None and other.id == comparison.first
    which = f"the fastest uneven split{f' of {uneven.strategy}' if leads else ''}"
    faster = next(one for one in comparison.variants if one.id == comparison.fastest)
    return f"{variant_label(faster)} was shown to be faster. To train with {which} all the same,"


def _no_lines(variant: VariantResult) -> str:
    return (
        f"No training code can be printed for {variant_label(variant)}:"
        f" {STRATEGIES[variant.strategy].snippet_refusal}."
        " With `strategy: ddp`, gpurun finds a split for DistributedDataParallel and prints the code for it."
    )


def _indented(text: str, by: int = 4) -> str:
    return "\n".join(f"{' ' * by}{line}".rstrip() for line in text.splitlines())


def first_uneven(comparison: Comparison, has_snippet: bool) -> VariantResult | None:
    """The first of the ranking that has unequal parts, under a strategy with or without lines to paste."""
    ranked, _ = by_rank(comparison)
    uneven = (one for one in ranked if len(set(one.split)) > 1)
    return next((v for v in uneven if bool(STRATEGIES[v.strategy].snippet_refusal) != has_snippet), None)
