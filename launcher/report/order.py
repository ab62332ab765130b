"""In which order reports list the variants."""

from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import fastest_first, is_ranked


def by_rank(comparison: Comparison) -> tuple[list[VariantResult], list[VariantResult]]:
    """Variants with figures that count, the leader first, then the others fastest first; and the rest.

    Where splits can't be ranked they stand as the job names them: the order must not rank them after all.
    """
    if comparison.disturbed:
        ranked = [one for one in comparison.variants if is_ranked(one)]
    else:
        ranked = sorted(fastest_first(comparison.variants), key=lambda one: one.id != comparison.fastest)
    return ranked, [one for one in comparison.variants if not is_ranked(one)]
