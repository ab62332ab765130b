"""What a table calls a split, and in which order it lists the variants."""

from launcher.compare.label import split_text
from launcher.compare.model import Comparison, VariantResult
from launcher.compare.standings import fastest_first, is_ranked
from launcher.plan.model import Variant


def split_label(variant: Variant | VariantResult) -> str:
    """The samples per device, with the job's word where the samples don't say it; empty for `single`."""
    if variant.strategy == "single":
        return ""
    samples = split_text(variant.split)
    literal = "/".join(str(part) for part in variant.split)
    return samples if variant.split_name in ("even", "-", literal) else f"{samples} ({variant.split_name})"


def by_rank(comparison: Comparison) -> tuple[list[VariantResult], list[VariantResult]]:
    """Variants with figures that count, the leader first, then the others fastest first; and the rest."""
    ranked = sorted(fastest_first(comparison.variants), key=lambda one: one.id != comparison.fastest)
    return ranked, [one for one in comparison.variants if not is_ranked(one)]
