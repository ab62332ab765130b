"""What the fastest variant still loses: a cause that all variants share makes none of them slower."""

from gpurun.launcher.compare.explain import Kind, Loss, losses, on_cpu, told
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import RankFigures, VariantResult

LARGE_FROM = 0.20
"""Share of the step from which on it is told without anybody having asked."""

_ADVICE: dict[Kind, str] = {
    "input": "raise num_workers, or do less work per sample",
    "copies": "pin the memory and copy with non_blocking=True",
    "host": "try larger batches, torch.compile or CUDA graphs",
    "transfer": "try larger batches, or accumulate gradients, so that it is needed less often",
    "split": "try split: balanced",
    "straggler": "find out what slows that rank, or try split: balanced",
}
_ADVICE_IF_BALANCED: dict[Kind, str] = {
    "split": "find out why the ranks take other times than when this split was found",
    "straggler": "find out what slows that rank",
}
_ADVICE_ON_CPU = _ADVICE | {"host": "try larger batches, fewer operators, or torch.compile"}


def remaining_loss(fastest: VariantResult, alone: bool = False) -> str | None:
    """`Even in ddp 32/32 every rank waits 24.1 of 60.2 ms for its data: …`; `None` where no cause is large.

    Args:
        fastest: the variant that leads.
        alone: whether there is no other.
    """
    found = largest_loss(fastest.ranks)
    if found is None or found.ms < LARGE_FROM * found.span_ms:
        return None
    where = "In" if alone else "Even in"
    return f"{where} {variant_label(fastest)} {told(found, fastest)}: {advice(found.kind, fastest)}."


def advice(kind: Kind, variant: VariantResult) -> str:
    """What to do about a loss; nobody is told to try what the variant does already."""
    if kind in ("split", "straggler") and variant.split_name == "balanced":
        return _ADVICE_IF_BALANCED[kind]
    return (_ADVICE_ON_CPU if on_cpu(variant.ranks) else _ADVICE)[kind]


def largest_loss(ranks: tuple[RankFigures, ...]) -> Loss | None:
    """What takes most of the step that isn't compute; `None` where no trace tells."""
    return max(losses(ranks), key=lambda loss: loss.ms, default=None)
