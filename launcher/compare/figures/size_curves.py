"""Figures over a size: of what devices cost by samples, of throughput by batch, of micro-benchmarks.

Of a micro-benchmark's records: time over size, rates, latency and bandwidth, and where curves cross.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from types import MappingProxyType
from typing import Literal

from gpurun.launcher.findings.finding import reason
from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import total_peak_flop_per_s
from gpurun.launcher.rundir.records import CostCurve, PointRecord
from gpurun.launcher.stats.estimates import median_interval
from gpurun.launcher.units import (
    Interval,
    format_count,
    format_ms,
    format_number,
    format_rate,
    listed,
    size_text,
)


@dataclass(frozen=True, kw_only=True)
class DeviceCost(CostCurve):
    """The cost of samples on one device, measured while all were busy: α + β·b milliseconds."""

    device: str

    def ms(self, samples: int) -> float:
        """The time of so many samples in ms, where the curve is straight."""
        return self.alpha_ms + self.beta_ms * samples

    def error_ms(self, samples: int) -> float | None:
        """Half of the interval of `ms`; `None` where the curve has none.

        α and β of a line are correlated: the line is known best in the middle of what was measured.
        """
        if not self.straight or self.alpha_ci is None or self.beta_ci is None:
            return None
        half_alpha, half_beta = ((ci[1] - ci[0]) / 2 for ci in (self.alpha_ci, self.beta_ci))
        middle = fmean(size for size, _ in self.points)
        return math.sqrt(max(0.0, half_alpha**2 + (samples**2 - 2 * samples * middle) * half_beta**2))

    def most_samples(self, within_ms: float, batch: int) -> int:
        """The most samples that it can have computed by then."""
        most = batch if self.max_samples is None else min(batch, self.max_samples)
        if self.beta_ms <= 0:
            return most
        return max(0, min(most, math.floor((within_ms - self.alpha_ms) / self.beta_ms + 1e-9)))


def could_be_best(devices: Sequence[DeviceCost], split: Sequence[int]) -> list[tuple[int, int]]:
    """Least and most samples of each device in splits whose predicted time is that of the best one, within
    the error of the prediction; empty where that isn't known, or no other split is as good.

    Args:
        devices: what samples cost on each.
        split: the best one by these costs.
    """
    pairs = list(zip(devices, split, strict=True))
    slowest, samples = max(pairs, key=lambda pair: pair[0].ms(pair[1]))
    errors = [device.error_ms(samples) for device, samples in pairs]
    if not all(device.straight for device in devices) or None in errors:
        return []
    batch = sum(split)
    within_ms = slowest.ms(samples) + max(error for error in errors if error is not None)
    most = [device.most_samples(within_ms, batch) for device in devices]
    ranges = [(max(0, batch - sum(most) + own), own) for own in most]
    return ranges if any(low < high for low, high in ranges) else []


@dataclass(frozen=True)
class SplitCost:
    """A split, and what its step takes by the devices' costs and the measured overhead."""

    split: tuple[int, ...]
    step_ms: float


@dataclass(frozen=True)
class Balanced:
    """How a balanced split was found, and how near to the optimum its measured step is."""

    devices: tuple[DeviceCost, ...]
    optimum_ms: float
    """T*: the slowest device's time in the best split of whole samples. By straight curves no split computes
    faster; where one isn't straight, none of those whose sizes were measured."""
    overhead_ms: float
    """The time of a step beyond that: communication, and for `dp` all that its first device does alone."""
    predicted_ms: float
    measured_ms: float | None
    optimum_over_measured: float | None
    """T*/T: 1 would be a step of computing alone, perfectly balanced."""
    even: SplitCost | None
    """`None` where it does not fit."""
    proportional: SplitCost | None
    """In proportion to speed (1/β): what one would take who thinks of speed alone."""
    same_as: tuple[str, ...]
    """Other variants of the job that came to the same samples."""
    beaten_by: tuple[str, ...] = ()
    """Other splits of the same work that were shown to be faster."""


@dataclass(frozen=True)
class CurvePoint:
    """One size; the median over rounds."""

    size: int
    time_us: float
    ci_us: Interval | None
    """95 %."""
    gb_per_s: float | None = None
    """10⁹ bytes per second: of the message, whatever crosses the links (algorithm bandwidth)."""
    bus_gb_per_s: float | None = None
    """10⁹ bytes per second over the busiest link."""
    gflop_per_s: float | None = None
    ceiling_percent: float | None = None
    """`gflop_per_s` as a share of the curve's best."""
    peak_percent: float | None = None
    """`gflop_per_s` as a share of what the GPU is sold with, where that is known."""


@dataclass(frozen=True)
class Curve:
    """All sizes of one series."""

    series: str
    unit: Literal["bytes", "rows"]
    points: tuple[CurvePoint, ...]
    latency_us: float | None = None
    """The time of a copy or a collective, however small it is."""
    fitted_gb_per_s: float | None = None
    """The rate of every further byte."""
    fit_off_by: float | None = None
    """The largest factor between a point and that line: much above 1, latency and bandwidth are no
    description of the curve."""


@dataclass(frozen=True)
class ProbeResult:
    """The results of a micro-benchmark."""

    curves: tuple[Curve, ...]
    crossover_size: int | None = None
    """The smallest size from which on the second curve is faster at every size; `None`: it never is."""


@dataclass(frozen=True)
class BatchPoint:
    """One global batch of a curve."""

    variant: str
    global_batch: int
    samples_per_s: float


@dataclass(frozen=True)
class BatchCurve:
    """Throughput over batch size, all else being equal."""

    label: str
    """The settings that the variants have in common: `ddp even`."""
    points: tuple[BatchPoint, ...]
    """The points by rising batch."""
    knee: int | None
    """The smallest batch within 10 % of the highest throughput; `None` if it still grows at the end."""


MIN_FIT_POINTS = 3
FITS_WITHIN = 1.25
"""A line may miss a point by this factor and still describe all of them: caches and protocols that change
with the size bend curves by more."""


def probe_result(
    records: Sequence[PointRecord],
    workload: str,
    gpu_name: str | None,
    precision: str,
    peaks: Mapping[str, float] = MappingProxyType({}),
) -> ProbeResult | None:
    """The curves of a variant; `None` where there are no records: it trains, or has not been measured.

    Args:
        records: of all rounds.
        workload: what was measured; only `crossover` compares its curves.
        gpu_name: of the device, as the driver calls it; `None` for a CPU.
        precision: what operations are computed in.
        peaks: TFLOP/s of a device by precision, that the job states.
    """
    if not records:
        return None
    peak = total_peak_flop_per_s([gpu_name], precision, peaks)
    by_series = grouped(records, lambda record: record.series)
    curves = tuple(curve(series, found, peak) for series, found in sorted(by_series.items()))
    crossing = crossover(*curves) if workload == "crossover" and len(curves) == 2 else None
    return ProbeResult(curves, crossing)


def curve(series: str, records: Sequence[PointRecord], peak_flop_per_s: float | None) -> Curve:
    """One series: points in the order of their sizes."""
    by_size = grouped(records, lambda record: record.size)
    points = [point(by_size[size]) for size in sorted(by_size)]
    best = max((p.gflop_per_s for p in points if p.gflop_per_s), default=None)
    shared = tuple(with_shares(p, best, peak_flop_per_s) for p in points)
    latency_us, gb_per_s = fit(shared) if records[0].nbytes else (None, None)
    return Curve(series, records[0].unit, shared, latency_us, gb_per_s, off_by(shared, latency_us, gb_per_s))


def point(records: Sequence[PointRecord]) -> CurvePoint:
    """The rounds of one size."""
    times_us = [record.time_ns / 1e3 for record in records]
    time_us, first = median(times_us), records[0]
    gb_per_s = giga_per_s(first.nbytes, time_us)
    return CurvePoint(
        size=first.size,
        time_us=time_us,
        ci_us=median_interval(times_us),
        gb_per_s=gb_per_s,
        bus_gb_per_s=gb_per_s * first.bus_factor if gb_per_s and first.bus_factor else None,
        gflop_per_s=giga_per_s(first.flops, time_us),
    )


def giga_per_s(count: int | None, time_us: float) -> float | None:
    """`count` per second, in units of 10⁹; `None` where it isn't known."""
    return count / time_us * 1e6 / 1e9 if count is not None and time_us > 0 else None


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


def sizes_compared(first: Curve, second: Curve) -> dict[int, bool]:
    """Whether `second` is faster, by the sizes that both have."""
    first_us = {p.size: p.time_us for p in first.points}
    return {p.size: p.time_us < first_us[p.size] for p in second.points if p.size in first_us}


def crossover(first: Curve, second: Curve) -> int | None:
    """The smallest common size from which on `second` is faster at every size."""
    crossing = None
    for size, is_faster in reversed(sizes_compared(first, second).items()):
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
    is_pair = workload == "crossover" and len(result.curves) == 2
    is_faster = sizes_compared(*result.curves) if is_pair else {}
    if not is_faster:
        return [_curve_sentence(curve_) for curve_ in result.curves]
    if result.crossover_size is not None:
        return [reason("gpu-faster", num_rows=result.crossover_size)]
    sizes = [format_count(size) for size in is_faster if is_faster[size]]
    case = "gpu-faster-at" if sizes else "gpu-slower"
    return [reason(case, sizes=listed(sizes), num_rows=max(is_faster))]


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
