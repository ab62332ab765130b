"""The lines that bring the fastest uneven split into your own training loop, with its other settings.

What a variant has besides the defaults is in the lines, or is named as what they leave out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.jobfile.settings import SETTINGS, Settings, settings_for
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.model import resolved_setting
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import listed

NOT_OF_LOOP = ("workload", "strategy", "device_count", "split", "global_batch", "params", "seed")
"""Settings that the first sentence names, or that come with what you provide."""
_DDP_OPTIONS = {
    "bucket_mb": "bucket_cap_mb",
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
}
"""Settings that are options of DistributedDataParallel."""

_MAP_STYLE = """\
{imports}
from gpurun.uneven import {names}

{made}batches = UnevenBatches(dataset, split={split}, rank=torch.distributed.get_rank(){reduction})
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
_IN_PARTS = """\
optimizer.zero_grad()
count = min({accumulate}, len(inputs))  # micro-batches; the last batch may have fewer samples
parts = list(zip(inputs.tensor_split(count), targets.tensor_split(count)))
for number, (part, part_targets) in enumerate(parts, 1):
    with model.no_sync() if number < count else nullcontext():
        loss = weight{share} * loss_function(model(part), part_targets)  # {loss}
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
    own = settings_of_loop(uneven, comparison.job)
    return "\n\n".join(
        [
            _head(uneven, devices, comparison),
            _indented(map_style(uneven, own)),
            *_left_out(uneven, own),
            _yours(uneven, own),
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
        variant.id == own or (variant.id in first and variant.strategy == uneven.strategy)
        for variant in comparison.variants
        if len(set(variant.split)) == 1
    )


def settings_of_loop(variant: VariantResult, job: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a variant that differ from the defaults, of all that make its steps."""
    values = {
        name: getattr(variant, name) if setting.is_resolved else resolved_setting(name, job, variant.varied)
        for name, setting in SETTINGS.items()
        if name not in NOT_OF_LOOP and name in settings_for(variant.kind, variant.strategy)
    }
    return {name: value for name, value in values.items() if value not in (None, getattr(Settings(), name))}


def in_lines(variant: VariantResult, own: Mapping[str, Any]) -> set[str]:
    """The settings that the lines have."""
    if not STRATEGIES[variant.strategy].has_buckets:
        return set()
    found = own.keys() & {"accumulate", *_DDP_OPTIONS}
    if variant.loss == "counted" or "sync_every" in own:
        found -= {"accumulate"}
    # The pass that finds out about a static graph has to be synchronized.
    return found - {"static_graph"} if "accumulate" in own else found


def map_style(variant: VariantResult, own: Mapping[str, Any]) -> str:
    """The whole loop, of a dataset with a length.

    Args:
        variant: with the split.
        own: its other settings, as `settings_of_loop` finds them.
    """
    coded = in_lines(variant, own)
    update = _loss_lines(variant) + _UPDATE
    if "accumulate" in coded:
        share = "" if variant.loss == "sum" else " * len(part) / len(inputs)"
        update = _IN_PARTS.format(accumulate=own["accumulate"], share=share, loss=_WORDS[variant.loss])
    made = {**_ddp_line(coded, own), **_zero_line(variant)}
    imports = ["import torch", "from torch.utils.data import DataLoader", *made]
    if "accumulate" in coded:
        imports.insert(0, "from contextlib import nullcontext")
    head = _MAP_STYLE.format(
        imports="\n".join(imports), made="".join(f"{line}\n" for line in made.values()), **_values(variant)
    )
    return head + _indented(_to_device(variant) + update, 8)


def _ddp_line(coded: set[str], own: Mapping[str, Any]) -> dict[str, str]:
    """The line with DDP by the import that it needs; empty where torch's defaults are right."""
    options = [f"{option}={own[name]}" for name, option in _DDP_OPTIONS.items() if name in coded]
    line = f"model = DistributedDataParallel({', '.join(('network', *options))})"
    return {"from torch.nn.parallel import DistributedDataParallel": line} if options else {}


def _zero_line(variant: VariantResult) -> dict[str, str]:
    """The line with an optimizer that is divided among the ranks, by its import; empty where none is."""
    if not _divides_optimizer(variant):
        return {}
    line = "optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **optimizer_options)"
    return {"from torch.distributed.optim import ZeroRedundancyOptimizer": line}


def _divides_optimizer(variant: VariantResult) -> bool:
    strategy = STRATEGIES[variant.strategy]
    return strategy.shards_optimizer and not strategy.shards_parameters


def _left_out(variant: VariantResult, own: Mapping[str, Any]) -> list[str]:
    """The settings that the loop needs besides the lines, so that it trains as the variant does."""
    coded = in_lines(variant, own)
    others = [f"`{name}: {flow_text(value)}`" for name, value in own.items() if name not in coded]
    return [f"No lines can be given for {listed(others)}: set that up in your program."] if others else []


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


def _yours(uneven: VariantResult, own: Mapping[str, Any]) -> str:
    is_wrapped = in_lines(uneven, own) & _DDP_OPTIONS.keys()
    names = ["dataset", "network (the model, on its device)" if is_wrapped else "model", "loss_function"]
    names += ["count_targets (the workload's `count`)"] if uneven.loss == "counted" else []
    is_divided = _divides_optimizer(uneven)
    names += ["optimizer_class", "optimizer_options (such as lr)"] if is_divided else ["optimizer"]
    return f"You provide {listed([*names, 'epochs'])}."


def _whose(uneven: VariantResult, comparison: Comparison) -> str:
    """The words that introduce the split, by what is known of it."""
    is_alone = len(by_rank(comparison)[0]) == 1
    if comparison.fastest is None and not is_alone:
        return "No split was shown to be the fastest. To train with"
    if uneven.id == comparison.leader or is_alone:
        return "To train with"
    other = first_uneven(comparison, has_snippet=False)
    leads = other is not None and other.id == comparison.leader
    which = f"the fastest uneven split{f' of {uneven.strategy}' if leads else ''}"
    faster = next(variant for variant in comparison.variants if variant.id == comparison.fastest)
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
    uneven = (variant for variant in ranked if len(set(variant.split)) > 1)
    return next((v for v in uneven if bool(STRATEGIES[v.strategy].snippet_refusal) != has_snippet), None)
