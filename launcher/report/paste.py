"""The lines that bring the fastest uneven split into a training loop of one's own."""

from launcher.compare.label import variant_label
from launcher.compare.model import Comparison, VariantResult
from launcher.report.order import by_rank

_LINES = """\
from launcher.uneven import UnevenBatches

batches = UnevenBatches(dataset, split={split}, rank=torch.distributed.get_rank())
loader = DataLoader(dataset, batch_sampler=batches)
for epoch in range(epochs):
    batches.set_epoch(epoch)
    for (inputs, targets), weight in zip(loader, batches.weights()):
        loss = weight * loss_function(model(inputs), targets)  # a mean over samples
"""


def lines_to_paste(comparison: Comparison) -> str | None:
    """What to write into one's own DDP loop for the fastest uneven split; `None` if there is none.

    An uneven split that is not ahead is told of too, but as what it is.
    """
    uneven = first_uneven(comparison)
    if uneven is None:
        return None
    whose = _whose(uneven, comparison)
    head = f"{whose} {variant_label(uneven)}, in a DistributedDataParallel loop of your own:"
    body = "\n".join(f"    {line}".rstrip() for line in _LINES.format(split=uneven.split).splitlines())
    return f"{head}\n\n{body}\n\nFor an iterable dataset: launcher.uneven.UnevenStream."


def _whose(uneven: VariantResult, comparison: Comparison) -> str:
    """What is known of the split."""
    if comparison.disturbed:
        return "No split could be found fastest. To train with"
    return "To train with" if uneven.id == comparison.fastest else "To train with the fastest uneven split,"


def first_uneven(comparison: Comparison) -> VariantResult | None:
    """The first of the ranking that is `ddp` with unequal parts."""
    ranked, _ = by_rank(comparison)
    uneven = (v for v in ranked if v.strategy == "ddp" and len(set(v.split)) > 1 and min(v.split) > 0)
    return next(uneven, None)
