"""Curves as tables: micro-benchmarks by size, throughput by batch, what devices cost in balanced splits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from gpurun.launcher.compare.figures.size_curves import (
    Balanced,
    BatchCurve,
    Curve,
    CurvePoint,
    DeviceCost,
    could_be_best,
)
from gpurun.launcher.compare.label import split_text, variant_label, varied_texts
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.report.metrics import with_interval
from gpurun.launcher.report.terminal.grid import grid
from gpurun.launcher.report.terminal.layout import Column, header_line, row_line
from gpurun.launcher.report.terminal.plan import devices_text
from gpurun.launcher.rundir.records import MEASURED
from gpurun.launcher.splits import split_even, split_proportional
from gpurun.launcher.units import (
    Interval,
    format_count,
    format_ms,
    format_number,
    format_rate,
    least_decimals,
    size_text,
)

FIGURES: tuple[tuple[str, Callable[[CurvePoint], float | None], int], ...] = (
    ("GB/s", lambda point: point.gb_per_s, 2),
    ("bus GB/s", lambda point: point.bus_gb_per_s, 2),
    ("GFLOP/s", lambda point: point.gflop_per_s, 1),
    ("% of best", lambda point: point.ceiling_percent, 0),
    ("% of peak", lambda point: point.peak_percent, 1),
)
"""Header, value and decimals of the columns after the time; those without a value are left out."""


@dataclass(frozen=True)
class CurveTable:
    """A curve of a micro-benchmark as every report shows it."""

    name: str
    """`all-reduce`; of several variants `2 devices, all-reduce`."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A size each, in the order of the curve's points."""


def curve_tables(variant: VariantResult, is_alone: bool) -> list[CurveTable]:
    """All curves of a variant; none where it isn't a micro-benchmark.

    Args:
        variant: of a comparison.
        is_alone: whether it is the only one, so that its devices need no name.
    """
    place = "" if is_alone else f"{variant_label(variant)}, "
    return [_table(curve, place) for curve in (variant.probe.curves if variant.probe else ())]


def _table(curve: Curve, place: str) -> CurveTable:
    columns = [(curve.series, [size_text(point.size, curve.unit) for point in curve.points])]
    columns.append(("time", [_time_text(point) for point in curve.points]))
    for header, value, decimals in FIGURES:
        values = [value(point) for point in curve.points]
        cells = ["" if v is None else format_number(v, least_decimals(v, decimals)) for v in values]
        columns += [(header, cells)] if any(cells) else []
    headers, cells_of = zip(*columns, strict=True)
    return CurveTable(f"{place}{curve.series}", headers, tuple(zip(*cells_of, strict=True)))


def is_of_curves(comparison: Comparison) -> bool:
    """Whether it is of a micro-benchmark, whose variants aren't ranked."""
    return any(variant.probe for variant in comparison.variants)


def curve_lines(comparison: Comparison) -> list[Text]:
    """Every curve of every variant; a variant without curves says why."""
    lines: list[Text] = []
    for variant in comparison.variants:
        lines += [Text()] if lines else []
        lines.append(Text(_title(variant), "bold"))
        for table in curve_tables(variant, is_alone=True):
            lines += _table_lines(table)
        if variant.status not in MEASURED:
            lines.append(Text(f"{variant.status}: {variant.reason or 'no figures'}"))
    return lines


def _title(variant: VariantResult) -> str:
    devices = devices_text(variant.devices)
    varied = {key: value for key, value in variant.varied.items() if key not in ("precision", "workload")}
    return " ".join((f"{variant.workload} on {devices}, {variant.precision}", *varied_texts(varied)))


def _table_lines(table: CurveTable) -> list[Text]:
    cells = zip(*table.rows, strict=True)
    columns = [
        Column(header, tuple(map(Text, texts)), right=True)
        for header, texts in zip(table.header, cells, strict=True)
    ]
    return [header_line(columns), *(row_line(columns, row) for row in range(len(table.rows)))]


def _time_text(point: CurvePoint) -> str:
    """The median with its interval, in µs or ms."""
    scale, unit = (1e3, "ms") if point.time_us >= 1e4 else (1.0, "µs")
    decimals = 1 if point.time_us / scale < 1e3 else 0
    interval = point.ci_us and (point.ci_us[0] / scale, point.ci_us[1] / scale)
    return f"{with_interval(point.time_us / scale, interval, decimals)} {unit}"


NO_LINE = "–"
"""In place of α and β where the curve isn't α + β·b."""


def balanced_lines(variants: Sequence[VariantResult]) -> list[str]:
    """A paragraph per balanced variant, and what their symbols are."""
    lines = [line for variant in variants if variant.balanced for line in _lines(variant, variants)]
    found = [variant.balanced for variant in variants if variant.balanced]
    legend = "T*: compute time of the slowest device by these costs."
    if any(balanced.optimum_over_measured is not None for balanced in found):
        legend += " T: the measured step."
    if any(device.straight and device.alpha_ci for balanced in found for device in balanced.devices):
        legend += " Ranges are 95 % intervals over rounds."
    return [*lines, f"  {legend}"] if lines else []


def _lines(variant: VariantResult, variants: Sequence[VariantResult]) -> list[str]:
    found = variant.balanced
    assert found is not None
    rows = [
        _device_row(device, samples) for device, samples in zip(found.devices, variant.split, strict=True)
    ]
    faster = [other for other in variants if other.id in found.beaten_by]
    header = ("device", "per step, ms", "per sample, ms", "curve", "samples")
    lines = [f"{variant_label(variant)}: cost per device, and the best split by these costs"]
    lines += [f"  {line}" for line in grid(header, rows, right=(4,))]
    lines += [f"  {_prediction(found, bool(faster))}"]
    also = [] if faster else _also_best(found, variant)
    lines += [f"  {line}" for line in (*also, *_others(found, sum(variant.split)))]
    if faster:
        quicker = ", ".join(
            f"{variant_label(other)} {format_ms(other.step_ms.estimate)} ms"
            for other in faster
            if other.step_ms
        )
        lines.append(f"  Measured faster than that: {quicker}.")
    if found.same_as:
        names = {other.id: variant_label(other) for other in variants}
        same = ", ".join(names.get(name, name) for name in found.same_as)
        lines.append(f"  These are the samples of {same} too: both were measured.")
    return lines


def _device_row(device: DeviceCost, samples: int) -> tuple[str, ...]:
    curve = "straight" if device.straight else "interpolated"
    if device.max_samples is not None:
        curve += f", memory for {device.max_samples}"
    alpha = f"{_figure(device.alpha_ms)}{_interval(device.alpha_ci)}"
    beta = f"{_figure(device.beta_ms)}{_interval(device.beta_ci)}"
    costs = (alpha, beta) if device.straight else (NO_LINE, NO_LINE)
    return (device.device, *costs, curve, str(samples))


def _prediction(found: Balanced, was_beaten: bool) -> str:
    """`Predicted step: 57.1 ms (T* = 55.8 ms + 1.30 ms overhead). Measured: 57.5 ms; T*/T = 0.97.`"""
    text = (
        f"Predicted step: {format_ms(found.predicted_ms)} ms (T* = {format_ms(found.optimum_ms)} ms"
        f"{_claim(found, was_beaten)} + {format_ms(found.overhead_ms)} ms overhead)."
    )
    if found.measured_ms is None or found.optimum_over_measured is None:
        return f"{text} Not measured."
    return f"{text} Measured: {format_ms(found.measured_ms)} ms; T*/T = {found.optimum_over_measured:.2f}."


def _claim(found: Balanced, was_beaten: bool) -> str:
    """The claim about T*, as far as the curves show it."""
    if was_beaten:
        return ""
    if all(device.straight for device in found.devices):
        return ", the minimum over all splits,"
    return ", the minimum by interpolation,"


def _also_best(found: Balanced, variant: VariantResult) -> list[str]:
    """Splits that these costs don't separate from the best one."""
    ranges = could_be_best(found.devices, variant.split)
    parts = [
        f"{low} to {high} samples to {device.device}"
        for device, (low, high) in zip(found.devices, ranges, strict=False)
        if low < high
    ]
    given = ", ".join(parts)
    return [f"Within the error of these costs, the best split may also give {given}."] if given else []


def _others(found: Balanced, batch: int) -> list[str]:
    """The results that one would have got without measuring."""
    even, proportional = ("even", found.even), ("in proportion to speed", found.proportional)
    parts = [
        (f"{name} ({split_text(cost.split)})", f"{format_ms(cost.step_ms)} ms")
        for name, cost in (even, proportional)
        if cost is not None
    ]
    said = [" would take ".join(parts[0]), *map(", ".join, parts[1:])] if parts else []
    flat = [device.device for device in found.devices if device.straight and device.beta_ms == 0]
    lines = [f"By the same costs, {'; '.join(said)}."] if said else []
    lines += filter(None, (_misfit(name, found, batch) for name, cost in (even, proportional) if not cost))
    if flat:
        lines.append(f"There is no split in proportion to speed: samples take no time on {', '.join(flat)}.")
    return lines


def _misfit(name: str, found: Balanced, batch: int) -> str:
    """`Even (62/61) does not fit cpu:1.`; empty where nothing is too large."""
    split = _split_of(name, found, batch)
    full = [
        device.device
        for device, samples in zip(found.devices, split, strict=False)  # even may have fewer chunks
        if device.max_samples is not None and samples > device.max_samples
    ]
    return f"{name.capitalize()} ({split_text(split)}) does not fit {', '.join(full)}." if full else ""


def _split_of(name: str, found: Balanced, batch: int) -> tuple[int, ...]:
    if name == "even":
        return split_even(batch, len(found.devices))
    betas = [device.beta_ms if device.straight else 0.0 for device in found.devices]
    return split_proportional(batch, [1 / beta for beta in betas]) if min(betas) > 0 else ()


def _figure(ms: float) -> str:
    """Three significant digits; a sample may take microseconds."""
    return format_number(ms, 4) if 0 < abs(ms) < 0.1 else format_number(ms, 3 if abs(ms) < 1 else 2)


def _interval(ci: Interval | None) -> str:
    return f" ({_figure(ci[0])} to {_figure(ci[1])})" if ci else ""


BAR_CELLS = 40
KNEE = "Knee: the smallest batch within 10 % of the highest throughput."
NO_KNEE = "No knee: only the largest batch is within 10 % of the best."


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
            "knee" if point.global_batch == curve.knee else "",
        )
        for point in curve.points
    ]
    lines = [f"Throughput of {curve.label} over its global batch:"]
    lines += [f"  {line}" for line in grid(("batch", "samples/s", "", ""), rows, right=(0, 1))]
    return [*lines, f"  {NO_KNEE if curve.knee is None else KNEE}"]
