"""What a table calls a split."""

from typing import TYPE_CHECKING

from gpurun.launcher.compare.label import split_text
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.strategies import STRATEGIES

if TYPE_CHECKING:
    from gpurun.launcher.compare.model import VariantResult


def split_label(variant: "Variant | VariantResult") -> str:
    """The samples per device, with the job's word where they don't say it; empty without a split."""
    if not STRATEGIES[variant.strategy].has_split:
        return ""
    if not variant.split:
        return variant.split_name  # balanced, before its devices are measured
    samples = split_text(variant.split)
    literal = "/".join(str(part) for part in variant.split)
    return samples if variant.split_name in ("even", "-", literal) else f"{samples} ({variant.split_name})"
