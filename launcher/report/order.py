"""The order in which reports list variants, and what their tables call a split."""

from gpurun.launcher.compare.label import split_text
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import fastest_first, is_ranked
from gpurun.launcher.plan.model import PROGRAM, Variant


def split_label(variant: Variant | VariantResult) -> str:
    """The samples per device, with the job's word where they don't say it; empty for `single`, programs."""
    if variant.strategy in ("single", PROGRAM):
        return ""
    if not variant.split:
        return variant.split_name  # balanced, before its devices are measured
    samples = split_text(variant.split)
    literal = "/".join(str(part) for part in variant.split)
    return samples if variant.split_name in ("even", "-", literal) else f"{samples} ({variant.split_name})"


def by_rank(comparison: Comparison) -> tuple[list[VariantResult], list[VariantResult]]:
    """Variants with figures that count, the leader first, then the others fastest first; and the rest.

    Where splits can't be ranked, they keep the job's order, which claims nothing.
    """
    if comparison.disturbed:
        ranked = [one for one in comparison.variants if is_ranked(one)]
    else:
        ranked = sorted(fastest_first(comparison.variants), key=lambda one: one.id != comparison.fastest)
    return ranked, [one for one in comparison.variants if not is_ranked(one)]
