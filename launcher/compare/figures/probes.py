"""A micro-benchmark's records as curves: time over size, rates, latency and bandwidth, where they cross."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from gpurun.launcher.compare.size_curves import Curve, CurvePoint, ProbeResult
from gpurun.launcher.findings.finding import reason
from gpurun.launcher.machine.accelerators import total_peak_flop_per_s
from gpurun.launcher.rundir.records import PointRecord
from gpurun.launcher.stats.estimates import median_interval
from gpurun.launcher.units import format_ms, format_number, format_rate, size_text

MIN_FIT_POINTS = 3
FITS_WITHIN = 1.25
"""A line may miss a point by this factor and still describe all of them: caches and protocols that change
with the size bend curves by more."""


def probe_result(
    records: Sequence[PointRecord], workload: str, gpu_name: str | None, precision: str
) -> ProbeResult | None:
    """The curves of a variant; `None` where there are no records: it trains, or has not been measured.

    Args:
        records: of all rounds.
        workload: what was measured; only `crossover` compares its curves.
        gpu_name: of the device, as the driver calls it; `None` for a CPU.
        precision: what operations are computed in.
    """
    if not records:
        return None
    peak = total_peak_flop_per_s([gpu_name], precision)
    by_series: dict[str, list[PointRecord]] = {}
    for record in records:
        by_series.setdefault(record.series, []).append(record)
    curves = tuple(curve(series, found, peak) for series, found in sorted(by_series.items()))
    crossing = crossover(*curves) if workload == "crossover" and len(curves) == 2 else None
    return ProbeResult(curves, crossing)


def curve(series: str, records: Sequence[PointRecord], peak_flop_per_s: float | None) -> Curve:
    """One series: points in the order of their sizes."""
    by_size: dict[int, list[PointRecord]] = {}
    for record in records:
        by_size.setdefault(record.size, []).append(record)
    points = [point(by_size[size]) for size in sorted(by_size)]
    best = max((p.gflop_per_s for p in points if p.gflop_per_s), default=None)
    shared = tuple(with_shares(p, best, peak_flop_per_s) for p in points)
    latency_us, gb_per_s = fit(shared) if records[0].nbytes else (None, None)
    return Curve(series, records[0].unit, shared, latency_us, gb_per_s, off_by(shared, latency_us, gb_per_s))


def point(records: Sequence[PointRecord]) -> CurvePoint:
    """The rounds of one size."""
    times_us = [record.time_ns / 1e3 for record in records]
    time_us, first = median(times_us), records[0]
    gb_per_s = per_second(first.nbytes, time_us, 1e9)
    return CurvePoint(
        size=first.size,
        time_us=time_us,
        ci_us=median_interval(times_us),
        gb_per_s=gb_per_s,
        bus_gb_per_s=gb_per_s * first.bus_factor if gb_per_s and first.bus_factor else None,
        gflop_per_s=per_second(first.flops, time_us, 1e9),
    )


def per_second(count: int | None, time_us: float, unit: float) -> float | None:
    """`count` per second in multiples of `unit`."""
    return count / time_us * 1e6 / unit if count is not None and time_us > 0 else None


def with_shares(found: CurvePoint, best: float | None, peak_flop_per_s: float | None) -> CurvePoint:
    """The point with its rate as a share of the best one, and of the GPU's peak."""
    rate = found.gflop_per_s
    if rate is None or not best:
        return found
    peak_percent = 100 * rate * 1e9 / peak_flop_per_s if peak_flop_per_s else None
    return replace(found, ceiling_percent=100 * rate / best, peak_percent=peak_percent)


def fit(points: Sequence[CurvePoint]) -> tuple[float | None, float | None]:
    """Latency in µs and bandwidth in GB/s of t = latency + size / bandwidth.

    By least squares on relative errors (weights 1/t²), so that small messages, which determine the latency,
    count as much as large ones, which determine the bandwidth. `None` where the points don't determine it.
    """
    if len(points) < MIN_FIT_POINTS:
        return None, None
    weights = [1 / p.time_us**2 for p in points]
    total = sum(weights)
    mean_size = sum(w * p.size for w, p in zip(weights, points, strict=True)) / total
    mean_us = sum(w * p.time_us for w, p in zip(weights, points, strict=True)) / total
    spread = sum(w * (p.size - mean_size) ** 2 for w, p in zip(weights, points, strict=True))
    joint = sum(
        w * (p.size - mean_size) * (p.time_us - mean_us) for w, p in zip(weights, points, strict=True)
    )
    us_per_byte = joint / spread if spread else 0.0
    latency_us = mean_us - us_per_byte * mean_size
    return max(latency_us, 0.0), 1e-3 / us_per_byte if us_per_byte > 0 else None


def off_by(points: Sequence[CurvePoint], latency_us: float | None, gb_per_s: float | None) -> float | None:
    """The largest factor between a point and the fitted line, either way; `None` without a line."""
    if latency_us is None or gb_per_s is None:
        return None
    ratios = [(latency_us + p.size / gb_per_s / 1e3) / p.time_us for p in points]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def crossover(first: Curve, second: Curve) -> int | None:
    """The smallest common size from which on `second` is faster at every size."""
    first_us = {p.size: p.time_us for p in first.points}
    common = [(p.size, p.time_us < first_us[p.size]) for p in second.points if p.size in first_us]
    crossing = None
    for size, is_faster in reversed(common):
        if not is_faster:
            break
        crossing = size
    return crossing


def probe_summary(workload: str, results: Mapping[str, ProbeResult | None]) -> str:
    """The sentence under the curves of a micro-benchmark, by the names of its variants."""
    sentences = [
        f"{place}, {sentence}" if len(results) > 1 else sentence
        for place, result in results.items()
        if result
        for sentence in _sentences(workload, result)
    ]
    return "; ".join(sentences) + "." if sentences else reason("probe-nothing", workload=workload)


def _sentences(workload: str, result: ProbeResult) -> list[str]:
    if workload == "crossover" and len(result.curves) == 2:
        first = result.crossover_size
        num_rows = result.curves[0].points[-1].size if first is None else first
        return [reason("gpu-slower" if first is None else "gpu-faster", num_rows=num_rows)]
    return [_curve_sentence(curve_) for curve_ in result.curves]


def _curve_sentence(found: Curve) -> str:
    best = max((p.gflop_per_s for p in found.points if p.gflop_per_s), default=None)
    if best is not None:
        return reason("probe-rate", series=found.series, rate=format_rate(best))
    first, last = (_point_text(found, found.points[at]) for at in (0, -1))
    if found.latency_us is None or found.fitted_gb_per_s is None:
        return reason("probe-point", series=found.series, last=last)
    off = found.fit_off_by or 1.0
    if off > FITS_WITHIN:
        ratio = format_number(off, 1)
        return reason("probe-bent", series=found.series, first=first, last=last, ratio=ratio)
    latency, rate = _time_text(found.latency_us), format_rate(found.fitted_gb_per_s)
    return reason("probe-line", series=found.series, latency=latency, rate=rate)


def _point_text(found: Curve, point_: CurvePoint) -> str:
    """`9.2 ms for 1 MiB (0.12 GB/s)`."""
    rate = f" ({format_rate(point_.gb_per_s)} GB/s)" if point_.gb_per_s else ""
    return f"{_time_text(point_.time_us)} for {size_text(point_.size, found.unit)}{rate}"


def _time_text(time_us: float) -> str:
    return f"{time_us:.3g} µs" if time_us < 999.5 else f"{format_ms(time_us / 1e3)} ms"
