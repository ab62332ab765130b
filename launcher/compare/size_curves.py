"""Figures over a size: of what devices cost by samples, of micro-benchmarks, of throughput by batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from gpurun.launcher.units import Interval


@dataclass(frozen=True)
class DeviceCost:
    """The cost of samples on one device, measured while all were busy: α + β·b milliseconds."""

    device: str
    alpha_ms: float
    alpha_ci: Interval | None
    beta_ms: float
    beta_ci: Interval | None
    straight: bool
    """Whether the measured points lie on that line; else the points themselves were used."""
    points: tuple[tuple[int, float], ...]
    """Samples and milliseconds."""
    max_samples: int | None
    """The most that the device's memory holds, where the batch has more."""

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
