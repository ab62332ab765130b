"""Throughput over batch size as bars, with the knee marked."""

from collections.abc import Sequence

from gpurun.launcher.compare.model import BatchCurve
from gpurun.launcher.report.terminal.grid import grid
from gpurun.launcher.units import format_count, format_rate

BAR_CELLS = 40
MARK = "knee: the first within 10 % of the best"


def batch_curve_lines(curves: Sequence[BatchCurve]) -> list[str]:
    """A small picture per curve."""
    return [line for curve in curves for line in _picture(curve)]


def _picture(curve: BatchCurve) -> list[str]:
    best = max(point.samples_per_s for point in curve.points)
    rows = [
        (
            format_count(point.global_batch),
            format_rate(point.samples_per_s),
            "#" * round(BAR_CELLS * point.samples_per_s / best) if best else "",
            MARK if point.global_batch == curve.knee else "",
        )
        for point in curve.points
    ]
    lines = [f"Throughput of {curve.label} over its global batch:"]
    lines += [f"  {line}" for line in grid(("batch", "samples/s", "", ""), rows, right=(0, 1))]
    if curve.knee is None:
        lines.append("  No knee: only the largest batch is within 10 % of the best.")
    return lines
