"""Every figure of the reports, defined once: its key, titles, unit, format and where it comes from.

The terminal, Markdown, HParams, scalars, the tab, the HTML file and JSON all read these rows. A new figure is
a row here, and a field of `Rates` (`compare/figures/recorded.py`) where `VariantResult` lacks its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import floor, isfinite, log10
from typing import Any, Literal

from gpurun.launcher.compare.figures.ranks import RankFigures, slowest_rank
from gpurun.launcher.compare.figures.searched import LEAST_GIB
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.rundir.records import MemoryPart
from gpurun.launcher.units import (
    Interval,
    format_number,
    format_rate,
    half_width,
    is_lopsided,
    least_decimals,
    readable_unit,
    round_up,
    scaled,
)

LEAST_DIFFERENCE = 0.05
"""Share of the highest peak by which a part of the memory must differ between variants to get a column."""
Results = Sequence[VariantResult]


@dataclass(frozen=True)
class Metric:
    """A figure of a variant."""

    key: str
    """Tag of its scalar, and its name in answers and JSON."""
    title: str
    """Whole words, without the unit."""
    short: str
    """Header of its column."""
    unit: str
    value: Callable[[VariantResult], float | None]
    """In `unit`; `None` where it doesn't apply."""
    text: Callable[[float], str]
    """Formats a value, without the unit."""
    better: Literal["higher", "lower"]
    drop: int
    """Narrow pages drop the column with the highest number first; 0 is never dropped."""
    interval: Callable[[VariantResult], Interval | None] | None = None
    """95 % confidence, in `unit`; of metrics that have one, a column's decimals follow its shortest value."""
    applies: Callable[[Results], bool] = lambda results: True
    """Whether the figure says something about these variants."""
    legend: str = ""
    """The explanation that the column's header leaves open."""

    @property
    def label(self) -> str:
        """`peak memory (GiB)`."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def in_unit(self, unit: str) -> Metric:
        """The metric as people read it, with three digits of a smaller unit than its key says."""
        return replace(self, unit=unit, short=self.short.replace(self.unit, unit), text=format_rate)


@dataclass(frozen=True)
class Figure:
    """A metric of one variant, as every report shows it.

    It has the text beside the number of a `VariantResult`, so that all reports round alike.
    """

    value: float
    """In the unit that the metric's key says."""
    text: str
    uncertainty: str = ""
    """`± 0.2`, or `(41.9 to 43.0)`."""

    def __str__(self) -> str:
        return f"{self.text} {self.uncertainty}".rstrip()


def figures_of(results: Results) -> dict[Metric, list[Figure | None]]:
    """A column per metric that has a value here, in a readable unit, with one entry per variant."""
    found = {m: [_finite(m.value(result)) for result in results] for m in METRICS if m.applies(results)}
    values = {metric: column for metric, column in found.items() if set(column) - {None}}
    columns = {}
    for metric, column in values.items():
        alike = (each or 0.0 for other in values if other.unit == metric.unit for each in values[other])
        unit, factor = readable_unit(max(alike), metric.unit)
        shown = metric if unit == metric.unit else metric.in_unit(unit)
        columns[shown] = _column(shown, column, results, factor)
    return columns


def measured_metrics(results: Results) -> list[Metric]:
    """The metrics that have a value here, in the units that their keys say."""
    keys = {metric.key for metric in figures_of(results)}
    return [metric for metric in METRICS if metric.key in keys]


def values_of(results: Results) -> dict[str, dict[str, float]]:
    """The values that every report shows, by variant and metric."""
    return {
        variant: {key: figure["value"] for key, figure in figures.items()}
        for variant, figures in answer_figures(results).items()
    }


def described(metrics: Iterable[Metric]) -> list[dict[str, Any]]:
    """Metrics as data: `measured_metrics` for programs, those of `figures_of` for people."""
    data = ("key", "title", "short", "unit", "better", "drop")
    return [{name: getattr(metric, name) for name in data} for metric in metrics]


def answer_figures(results: Results) -> dict[str, dict[str, Any]]:
    """Value, text and uncertainty as data, by variant and metric."""
    columns = figures_of(results)
    rows: dict[str, dict[str, Any]] = {result.id: {} for result in results}
    for metric, column in columns.items():
        for row, figure in zip(rows.values(), column, strict=True):
            row |= {metric.key: asdict(figure)} if figure else {}
    return rows


def with_figures(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON has it: each variant with its figures by key, and what they are."""
    import msgspec

    data: dict[str, Any] = msgspec.to_builtins(comparison)
    values = values_of(comparison.variants)
    for entry in data["variants"]:
        entry["figures"] = values[entry["id"]]
    return data | {"metrics": described(measured_metrics(comparison.variants))}


def _column(
    metric: Metric, values: Sequence[float | None], results: Results, factor: float
) -> list[Figure | None]:
    if metric.interval is None:
        return [None if value is None else Figure(value, metric.text(factor * value)) for value in values]
    decimals = _common_decimals(
        [v for v, result in zip(values, results, strict=True) if v and is_ranked(result)]
    )
    return [
        None if value is None else with_interval(value, metric.interval(result), decimals)
        for value, result in zip(values, results, strict=True)
    ]


def with_interval(value: float, interval: Interval | None, decimals: int) -> Figure:
    """A value with its interval, as ± where that doesn't mislead."""
    text = format_number(value, decimals)
    if interval is None:
        return Figure(value, text)
    if is_lopsided(value, interval):
        low, high = (format_number(end, decimals) for end in interval)
        return Figure(value, text, f"({low} to {high})")
    half = round_up(half_width(value, interval), decimals)
    return Figure(value, text, f"± {format_number(half, decimals)}")


def _common_decimals(values: Sequence[float]) -> int:
    """One count for a column: three significant digits of the shortest value, at least one decimal."""
    shortest = min((value for value in values if value > 0), default=1.0)
    return min(max(2 - floor(log10(shortest)), 1), 4)


def _fixed(decimals: int) -> Callable[[float], str]:
    return partial(format_number, decimals=decimals)


def _at_least(decimals: int) -> Callable[[float], str]:
    """More where a tiny model would be shown as 0."""
    return lambda value: format_number(value, least_decimals(value, decimals))


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _fullest_gib(result: VariantResult, part: MemoryPart) -> float | None:
    """A part of the memory of the rank whose peak is highest."""
    known = [rank for rank in result.ranks if rank.memory_gib]
    return max(known, key=lambda rank: rank.peak_gib or 0.0).memory_gib[part] if known else None


def _memory_metric(part: MemoryPart, short: str, drop: int) -> Metric:
    """A column where it differs enough: sharding saves other parts than a smaller batch does."""
    value = partial(_fullest_gib, part=part)
    return Metric(
        key=f"{part}_gib",
        title=f"peak memory, {part}",
        short=f"{short} GiB",
        unit="GiB",
        value=value,
        text=_at_least(2),
        better="lower",
        drop=drop,
        applies=lambda results: _matters([value(result) for result in results], results),
    )


def _matters(values: Sequence[float | None], results: Results) -> bool:
    """Whether a part of the memory makes the peaks of variants differ."""
    known = [value for value in values if value is not None]
    apart = max(known, default=0.0) - min(known, default=0.0)
    if apart <= LEAST_GIB:
        return False
    return apart > LEAST_DIFFERENCE * max(
        (peak for result in results if (peak := result.peak_gib)), default=0.0
    )


def _slowest_clock_mhz(result: VariantResult) -> float | None:
    return min((rank.sm_clock_mhz for rank in result.ranks if rank.sm_clock_mhz is not None), default=None)


def _power_w(result: VariantResult) -> float | None:
    """The power of all GPUs, each once; `None` unless all are known."""
    by_device = {rank.device: rank.power_w for rank in result.ranks}
    known = [watts for watts in by_device.values() if watts is not None]
    return sum(known) if known and len(known) == len(by_device) else None


def _exposed_percent(result: VariantResult) -> float | None:
    """Exposed communication in percent of the traced step; without a trace, by the ablation."""
    slowest = slowest_rank(result.ranks)
    if slowest and slowest.span_ms and slowest.exposed_comm_ms.trace is not None:
        return 100 * slowest.exposed_comm_ms.trace / slowest.span_ms
    return result.exposed_comm_ms.ablation_percent(result.step_ms.estimate) if result.step_ms else None


def _any_parallel(results: Results) -> bool:
    """One device has the efficiency 1 by definition."""
    return any(len(result.devices) > 1 and result.scaling_efficiency is not None for result in results)


METRICS: tuple[Metric, ...] = (
    Metric(
        key="step_ms",
        title="step",
        short="step ms",
        unit="ms",
        value=lambda result: result.step_ms.estimate if result.step_ms else None,
        text=_fixed(1),
        better="lower",
        drop=0,
        interval=lambda result: result.step_ms.ci if result.step_ms else None,
    ),
    Metric(
        key="samples_per_s",
        title="throughput",
        short="samples/s",
        unit="samples/s",
        value=lambda result: result.samples_per_s,
        text=format_rate,
        better="higher",
        drop=2,
    ),
    Metric(
        key="gflop_per_s",
        title="compute rate",
        short="GFLOP/s",
        unit="GFLOP/s",
        value=lambda result: scaled(result.flop_per_s, 1e-9),
        text=format_rate,
        better="higher",
        drop=5,
    ),
    Metric(
        key="mfu_percent",
        title="model FLOP utilisation",
        short="MFU %",
        unit="%",
        value=lambda result: scaled(result.mfu, 100),
        text=_at_least(1),
        better="higher",
        drop=6,
    ),
    Metric(
        key="joules_per_sample",
        title="energy",
        short="J/sample",
        unit="J/sample",
        value=lambda result: result.joules_per_sample,
        text=_at_least(3),
        better="lower",
        drop=7,
    ),
    Metric(
        key="run_s",
        title="run",
        short="run s",
        unit="s",
        value=lambda result: result.wall_s,
        text=_fixed(1),
        better="lower",
        drop=2,
    ),
    Metric(
        key="efficiency",
        title="scaling efficiency",
        short="eff.",
        unit="",
        value=lambda result: result.scaling_efficiency,
        text=_fixed(2),
        better="higher",
        drop=3,
        applies=_any_parallel,
        legend="speed over that of one device, per device.",
    ),
    Metric(
        key="peak_gib",
        title="peak memory",
        short="peak GiB",
        unit="GiB",
        value=lambda result: result.peak_gib,
        text=_at_least(2),
        better="lower",
        drop=4,
    ),
    _memory_metric("parameters", "params", 12),
    _memory_metric("optimizer", "optim.", 13),
    _memory_metric("gradients", "grads", 14),
    _memory_metric("communication", "comm.", 15),
    _memory_metric("activations", "activ.", 16),
    Metric(
        key="gradient_error",
        title="relative error of compressed gradients",
        short="grad. err.",
        unit="",
        value=lambda result: result.gradient_error if result.compression else None,
        text=lambda value: f"{value:.2g}",
        better="lower",
        drop=0,
    ),
    Metric(
        key="sm_clock_mhz",
        title="clock of the slowest GPU",
        short="SM MHz",
        unit="MHz",
        value=_slowest_clock_mhz,
        text=_fixed(0),
        better="higher",
        drop=11,
    ),
    Metric(
        key="power_w",
        title="power of all GPUs",
        short="W",
        unit="W",
        value=_power_w,
        text=_fixed(0),
        better="lower",
        drop=10,
    ),
    Metric(
        key="exposed_comm_percent",
        title="exposed communication, of the step",
        short="exposed %",
        unit="%",
        value=_exposed_percent,
        text=_fixed(1),
        better="lower",
        drop=9,
    ),
)


OTHER_STEPS = "only work of other steps"
PARTS: Mapping[str, tuple[str, Callable[[RankFigures], float | None]]] = {
    "compute": ("the device computes", lambda rank: rank.compute_ms),
    "transfer": ("communication that no compute hides", lambda rank: rank.exposed_transfer_ms),
    "wait": ("waiting for another rank, with nothing to compute", lambda rank: rank.exposed_wait_ms),
    "copy": ("copies that nothing hides", lambda rank: rank.exposed_memcpy_ms),
    "input": ("waiting for data", lambda rank: rank.input_ms),
    "other_steps": (OTHER_STEPS, lambda rank: rank.other_steps_ms),
    "idle": (
        "nothing to do",
        lambda rank: None if rank.idle_ms is None else rank.idle_ms - (rank.input_ms or 0.0),
    ),
}
"""Meaning and ms of each part of a rank's step, as the trace shows it; together they are its span."""


def parts_ms(rank: RankFigures) -> Mapping[str, float]:
    """The parts of a rank's traced step in ms, the same in terminal and tab."""
    return {name: value(rank) or 0.0 for name, (_, value) in PARTS.items()}


PHASES = {
    "input": "waiting for data",
    "h2d": "copying the batch to the device",
    "forward": "the forward pass, with what it communicates and waits for",
    "backward": "the backward pass, with what it communicates and waits for",
    "optimizer": "the update of the weights",
    "between_phases": "outside of all phases",
}
"""The meaning of each phase by its name, in the order in which they happen."""
REST = "between_phases"
RECORDED = {"input": "data"}
"""Phases that have another name in the records of steps."""
MOST_OF_STEP = 0.9
"""Share of a step from which on its phases are all of it."""


def timed_parts(rank: RankFigures, step_ms: float | None) -> Mapping[str, float]:
    """The phases of the rank in ms, as long together as the variant's step; empty where none was measured.

    Medians of phases don't add up to that of the step: they are scaled to it, unless they are a smaller part
    of it than that explains.

    Args:
        rank: of which the phases are.
        step_ms: the variant's step; `None`: as long as the phases.
    """
    times_ms = {name: rank.phases_ms.get(RECORDED.get(name, name), 0.0) for name in PHASES if name != REST}
    phases_ms = sum(times_ms.values())
    if not phases_ms:
        return {}
    if step_ms is None:
        step_ms = phases_ms
    scale = step_ms / phases_ms if phases_ms > MOST_OF_STEP * step_ms else 1.0
    parts = {name: scale * ms for name, ms in times_ms.items()}
    rest_ms = step_ms - sum(parts.values())
    return {**parts, REST: rest_ms if rest_ms > 1e-6 * step_ms else 0.0}
