"""The curves of micro-benchmarks as tables: a line per size."""

from collections.abc import Callable

from rich.text import Text

from gpurun.launcher.compare.label import varied_texts
from gpurun.launcher.compare.model import Comparison, Curve, CurvePoint, VariantResult
from gpurun.launcher.report.terminal.columns import Column, header_line, row_line
from gpurun.launcher.report.terminal.plan import devices_text
from gpurun.launcher.units import format_number, least_decimals, size_text

FIGURES: tuple[tuple[str, Callable[[CurvePoint], float | None], int], ...] = (
    ("GB/s", lambda point: point.gb_per_s, 2),
    ("bus GB/s", lambda point: point.bus_gb_per_s, 2),
    ("GFLOP/s", lambda point: point.gflop_per_s, 1),
    ("% of best", lambda point: point.ceiling_percent, 0),
    ("% of peak", lambda point: point.peak_percent, 1),
)
"""Header, value and decimals of the columns after the time; those without a value are left out."""


def curve_lines(comparison: Comparison) -> list[Text]:
    """Every curve of every variant; a variant without curves says why."""
    lines: list[Text] = []
    for variant in comparison.variants:
        lines += [Text()] if lines else []
        lines.append(Text(_title(variant), "bold"))
        for curve in variant.probe.curves if variant.probe else ():
            lines += _table(curve)
        if variant.status not in ("ok", "unsteady"):
            lines.append(Text(f"{variant.status}: {variant.reason or 'no figures'}"))
    return lines


def _title(variant: VariantResult) -> str:
    devices = devices_text(variant.devices)
    varied = {key: value for key, value in variant.varied.items() if key not in ("precision", "workload")}
    return " ".join((f"{variant.workload} on {devices}, {variant.precision}", *varied_texts(varied)))


def _table(curve: Curve) -> list[Text]:
    sizes = tuple(Text(size_text(point.size, curve.unit)) for point in curve.points)
    columns = [
        Column(curve.series, sizes, right=True),
        Column("time", tuple(Text(_time_text(point)) for point in curve.points), right=True),
    ]
    for header, value, decimals in FIGURES:
        values = [value(point) for point in curve.points]
        cells = tuple(
            Text("" if v is None else format_number(v, least_decimals(v, decimals))) for v in values
        )
        columns += [Column(header, cells, right=True)] if any(v is not None for v in values) else []
    return [header_line(columns), *(row_line(columns, row) for row in range(len(curve.points)))]


def _time_text(point: CurvePoint) -> str:
    """The median with its interval's larger half, in µs or ms."""
    scale, unit = (1e3, "ms") if point.time_us >= 1e4 else (1.0, "µs")
    decimals = 1 if point.time_us / scale < 1e3 else 0
    text = format_number(point.time_us / scale, decimals)
    if point.ci_us is not None:
        half = max(point.time_us - point.ci_us[0], point.ci_us[1] - point.time_us) / scale
        text += f" ± {format_number(half, decimals)}"
    return f"{text} {unit}"
