"""Throughput over batch size, and the knee of it: from where on a larger batch hardly pays."""

from collections.abc import Sequence

from gpurun.launcher.compare.label import varied_texts
from gpurun.launcher.compare.model import BatchCurve, BatchPoint, VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.strategies import STRATEGIES

NEAR_BEST = 0.9
"""Of the highest throughput: what a larger batch gains beyond that it costs in memory and in steps."""
LEAST_POINTS = 3


def batch_curves(results: Sequence[VariantResult]) -> tuple[BatchCurve, ...]:
    """A curve for each way of splitting that was measured with at least three batches."""
    families: dict[str, list[VariantResult]] = {}
    for result in results:
        if "global_batch" in result.varied and is_ranked(result):
            families.setdefault(_family(result), []).append(result)
    return tuple(_curve(label, found) for label, found in families.items() if len(found) >= LEAST_POINTS)


def knee(points: Sequence[BatchPoint]) -> int | None:
    """The smallest batch within 10 % of the highest throughput; `None` if that is the largest batch."""
    best = max(point.samples_per_s for point in points)
    first = next(point for point in points if point.samples_per_s >= NEAR_BEST * best)
    return None if first is points[-1] else first.global_batch


def _curve(label: str, results: Sequence[VariantResult]) -> BatchCurve:
    points = [BatchPoint(one.id, one.global_batch or 0, one.samples_per_s or 0.0) for one in results]
    points.sort(key=lambda point: point.global_batch)
    return BatchCurve(label, tuple(points), knee(points))


def _family(result: VariantResult) -> str:
    """All that is varied but the batch: `ddp even precision=bf16`."""
    others = {key: value for key, value in result.varied.items() if key != "global_batch"}
    split = (result.split_name, f"on {len(result.devices)}") if STRATEGIES[result.strategy].has_split else ()
    return " ".join((result.strategy, *split, *varied_texts(others)))
