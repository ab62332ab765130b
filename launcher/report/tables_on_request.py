"""The tables of `gpurun trace --show`: columns, figures and sentences, the same in every report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from gpurun.launcher.findings.trace_cases import (
    ALL_OF_CPU,
    BY_SHARES,
    EVENLY,
    ISSUING,
    NO_PATH,
    ONCE_FIRST,
    PATH_OF_ALL,
    UNCERTAIN_PATH,
)
from gpurun.launcher.trace.causes import PARTS
from gpurun.launcher.trace.explain import group_sizes, has_launches, lacks_rank, outlying_steps
from gpurun.launcher.trace.model import (
    CollectiveTotal,
    CopyTotal,
    CriticalPath,
    KernelTotal,
    LaunchTotals,
    NameTotal,
    OperatorTotal,
    PathPart,
    ShapeTotal,
    Table,
    TraceReport,
)
from gpurun.launcher.units import (
    format_count,
    format_number,
    format_percent,
    format_rate,
    numbers_text,
    plural,
    us_in_ms,
    whole_parts,
)

R = TypeVar("R")

TITLES: Mapping[Table, str] = {
    "kernels": "Kernels",
    "shapes": "Shapes",
    "operators": "Operators",
    "collectives": "Collectives",
    "copies": "Copies",
    "launches": "Launches",
    "critical-path": "Critical path",
}
_WORDS = {
    "compute": "compute",
    "transfer": "transfer",
    "copies": "copies",
    "input": "waiting for input",
    "one-off": "what the CPU does once",
    "host": "the CPU: Python, operators, launches",
    "latency": "from the end of what was waited for to the start",
    "before": "until this rank's trace begins",
}
_WITHOUT = _WORDS | {
    "transfer": "the transfer of collectives",
    "copies": "the copies",
    "latency": f"the time {_WORDS['latency']}",
    "before": "the later begin of a rank's trace",
}


@dataclass(frozen=True)
class FigureColumn(Generic[R]):
    """A column of numbers."""

    title: str
    of: Callable[[R], float | None]
    """The figure that it is sorted by."""
    text: Callable[[float], str]

    def cell(self, row: R) -> Cell:
        value = self.of(row)
        return Cell("-" if value is None else self.text(value), value)


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown, and as a number."""

    text: str
    value: float | None


@dataclass(frozen=True)
class ShownRow:
    """A line of a table."""

    cells: tuple[Cell, ...]
    name: str = ""
    depth: int = 0
    """In a tree."""
    curve: tuple[int, ...] = ()
    """The GPU's queue over time."""
    is_total: bool = False


@dataclass(frozen=True)
class ShownTable:
    """Rows with their figures and a name."""

    titles: tuple[str, ...]
    """The titles of the figures."""
    name_title: str
    """The title of the names; empty without any."""
    rows: tuple[ShownRow, ...]
    curve_title: str = ""


@dataclass(frozen=True)
class TableContent:
    """The content of one of the tables on request."""

    tables: tuple[ShownTable, ...]
    notes: tuple[str, ...]
    """Why there is no table; else what the columns mean, and what follows from them."""


def shown_table(report: TraceReport, name: Table) -> TableContent:
    """A table that the report was made with."""
    return _TABLES[name](report)


def _table(
    figures: Sequence[FigureColumn[R]],
    name_title: str,
    rows: Iterable[R],
    name: Callable[[R], str] = lambda _: "",
    depth: Callable[[R], int] = lambda _: 0,
) -> ShownTable:
    return ShownTable(
        tuple(figure.title for figure in figures),
        name_title,
        tuple(ShownRow(tuple(figure.cell(row) for figure in figures), name(row), depth(row)) for row in rows),
    )


@dataclass(frozen=True)
class PlainTable(Generic[R]):
    """A table that shows the rows of a report as they are."""

    rows: Callable[[TraceReport], Sequence[R] | None]
    figures: tuple[FigureColumn[R], ...]
    name_title: str
    name: Callable[[R], str]
    nothing: str
    """Why there is no table, where there are no rows."""
    notes: tuple[str, ...] = ()
    depth: Callable[[R], int] = lambda _: 0

    def __call__(self, report: TraceReport) -> TableContent:
        rows = self.rows(report)
        if not rows:
            return TableContent((), (self.nothing,))
        return TableContent((_table(self.figures, self.name_title, rows, self.name, self.depth),), self.notes)


_one_decimal = partial(format_number, decimals=1)
_two_decimals = partial(format_number, decimals=2)


def _megabytes(value: float) -> str:
    """`409.14`; below 0.1 in three significant digits."""
    return format_rate(value) if value < 0.1 else _two_decimals(value)


def _launched_by(row: KernelTotal) -> str:
    source = " ".join(text for text in ("CUDA graph" if row.graph else "", row.op, row.shapes) if text)
    return f"{source}: {row.name}" if source else row.name


_KERNELS: tuple[FigureColumn[KernelTotal], ...] = (
    FigureColumn("ms", lambda row: row.device_us, us_in_ms),
    FigureColumn("count", lambda row: row.count, format_count),
    FigureColumn("µs each", lambda row: row.device_us / row.count, _one_decimal),
    FigureColumn("least", lambda row: row.min_us, _one_decimal),
    FigureColumn("most", lambda row: row.max_us, _one_decimal),
)


_SHAPES: tuple[FigureColumn[ShapeTotal], ...] = (
    FigureColumn("ms", lambda row: row.device_us, us_in_ms),
    FigureColumn("count", lambda row: row.count, format_count),
    FigureColumn("µs each", lambda row: row.device_us / row.count, _one_decimal),
    FigureColumn("TFLOP/s", lambda row: row.tflop_per_s, format_rate),
    FigureColumn("GB/s", lambda row: row.gb_per_s, _one_decimal),
)


def _shapes(report: TraceReport) -> TableContent:
    rows = report.shapes
    if not rows:
        text = "the traces have no shapes: record_shapes=True (profile: {shapes: true}) records them"
        return TableContent((), (text,))
    table = ShownTable(
        (*(figure.title for figure in _SHAPES), "roofline"),
        "operator, shapes, types",
        tuple(
            ShownRow(
                (*(figure.cell(row) for figure in _SHAPES), _roofline(row)),
                f"{row.name} {row.shapes} {', '.join(dict.fromkeys(row.types.split(', ')))}",
            )
            for row in rows
        ),
    )
    return TableContent(
        (table,),
        ("FLOPs and bytes of matrix products, attention and convolutions, as far as arguments are recorded",),
    )


def _roofline(row: ShapeTotal) -> Cell:
    percent = row.roofline_percent
    return Cell("-" if percent is None else f"{percent:.0f} % {row.bound}", percent)


_OPERATORS: tuple[FigureColumn[OperatorTotal], ...] = (
    FigureColumn("ms", lambda row: row.total_us, us_in_ms),
    FigureColumn("self ms", lambda row: row.self_us, us_in_ms),
    FigureColumn("count", lambda row: row.count, format_count),
)


_COLLECTIVES: tuple[FigureColumn[CollectiveTotal], ...] = (
    FigureColumn("bytes", lambda row: row.bytes, format_count),
    FigureColumn("count", lambda row: row.count, format_count),
    FigureColumn("µs", lambda row: row.transfer_us, _one_decimal),
    FigureColumn("GB/s", lambda row: row.algorithm_gb_per_s, _two_decimals),
    FigureColumn("bus GB/s", lambda row: row.bus_gb_per_s, _two_decimals),
    FigureColumn("spread µs", lambda row: row.arrival_spread_us, _one_decimal),
    FigureColumn("wait ms", lambda row: row.wait_us, us_in_ms),
)


_COLLECTIVES_TABLE = PlainTable(
    lambda report: report.collective_totals,
    _COLLECTIVES,
    "collective, group",
    lambda row: f"{' '.join(filter(None, (row.kind, row.dtype)))}, {row.group}",
    "no collectives",
    ("spread: from the first rank's arrival to the last one's, mean",),
)


def _collectives(report: TraceReport) -> TableContent:
    sizes = group_sizes(report)
    content = _COLLECTIVES_TABLE(report)
    if not any(lacks_rank(each, sizes) for each in report.collectives):
        return content
    note = "collectives lack ranks that others may have waited for: µs are at most those shown, GB/s at least"
    return replace(content, notes=(*content.notes, note))


_COPIES: tuple[FigureColumn[CopyTotal], ...] = (
    FigureColumn("ms", lambda row: row.device_us, us_in_ms),
    FigureColumn("exposed", lambda row: row.exposed_us, us_in_ms),
    FigureColumn("count", lambda row: row.count, format_count),
    FigureColumn("MB", lambda row: None if row.bytes is None else row.bytes / 1e6, _megabytes),
    FigureColumn("GB/s", lambda row: row.gb_per_s, _two_decimals),
)


_LAUNCHES: tuple[FigureColumn[LaunchTotals], ...] = (
    FigureColumn("rank", lambda row: row.rank, format_count),
    FigureColumn("50 %", lambda row: row.delay_percentiles_us[0], format_rate),
    FigureColumn("90 %", lambda row: row.delay_percentiles_us[1], format_rate),
    FigureColumn("99 %", lambda row: row.delay_percentiles_us[2], format_rate),
    FigureColumn("most", lambda row: row.delay_percentiles_us[3], format_rate),
    FigureColumn("queue", lambda row: row.queue_mean, _one_decimal),
    FigureColumn("most", lambda row: row.queue_max, format_count),
    FigureColumn("empty", lambda row: row.queue_empty_percent, format_percent),
    FigureColumn("short", lambda row: row.short_kernels, format_count),
    FigureColumn("ms", lambda row: row.short_us, us_in_ms),
    FigureColumn("slow", lambda row: row.slow_launches, format_count),
)


_ONE_OFF: tuple[FigureColumn[tuple[int, NameTotal]], ...] = (
    FigureColumn("rank", lambda row: row[0], format_count),
    FigureColumn("ms", lambda row: row[1].host_us, us_in_ms),
    FigureColumn("count", lambda row: row[1].count, format_count),
)


def _launches(report: TraceReport) -> TableContent:
    once = [(rank.rank, row) for rank in report.ranks for row in rank.one_off]
    title = "done once, whatever the device did meanwhile"
    more = (_table(_ONE_OFF, title, once, lambda row: row[1].name),) if once else ()
    if not report.launches:
        return TableContent(more, ("the traces have no launches",))
    rows = tuple(
        ShownRow(
            tuple(figure.cell(row) for figure in _LAUNCHES),
            curve=tuple(length for _, length in row.queue),
        )
        for row in report.launches
    )
    note = (
        "delays from the end of a launching call to the start, in µs; queue: pieces of work launched and not "
        "done, over time; short: kernels below 10 µs; slow: kernels that took less time than launching them"
    )
    titles = tuple(figure.title for figure in _LAUNCHES)
    launches = ShownTable(titles, "", rows, "queue over time, by rank")
    return TableContent((launches, *more), (note,))


_NOTHING_US = 0.5
_GAIN = FigureColumn[PathPart]("gain ms", lambda row: row.gain_us, us_in_ms)


def _critical_path(report: TraceReport) -> TableContent:
    path = report.critical_path
    if path is None or not path.length_us:
        is_thinned = any(rank.is_thinned for rank in report.ranks)
        why = "left-out" if is_thinned else "times" if report.unreplayed == "times" else "launches"
        return TableContent((), (NO_PATH[why],))
    share = FigureColumn[PathPart]("% of path", lambda row: 100 * row.path_us / path.length_us, _one_decimal)
    times = (FigureColumn[PathPart]("ms", lambda row: row.path_us, us_in_ms), share)
    words = _WORDS if has_launches(report) else _WORDS | {"host": ISSUING}
    tables = [_parts(path, times[0], words)]
    if path.names:
        title = "kernels and collectives on it"
        tables.append(_table((*times, _GAIN), title, path.names, lambda row: row.name or ""))
    if len(report.ranks) > 1:
        rank = FigureColumn[PathPart]("rank", lambda row: row.rank, format_count)
        tables.append(_table((*times, rank), "where it runs", path.ranks, lambda row: words[row.part]))
    return TableContent(tuple(tables), (*_doubt(report, path), *_sentences(path, has_launches(report))))


def _doubt(report: TraceReport, path: CriticalPath) -> Iterator[str]:
    """Why the path may not be that of the job, or not what causes are about."""
    if report.unreplayed not in ("", "long"):
        yield UNCERTAIN_PATH.format(BY_SHARES[report.unreplayed])
    if outlying := [each.step for each in outlying_steps(report.ranks)]:
        yield PATH_OF_ALL.format(f"{'step' if len(outlying) == 1 else 'steps'} {numbers_text(outlying)}")
    causes = (each.code for each in report.findings if each.level == "cause")
    if next(causes, "") == PARTS["one_off"] and _best(path).part != "one-off":
        yield ONCE_FIRST


def _parts(path: CriticalPath, time: FigureColumn[PathPart], words: Mapping[str, str]) -> ShownTable:
    title, length_us = "critical path over all ranks", round(path.length_us)
    shown = whole_parts([each.path_us for each in path.parts], length_us)
    parts = [replace(each, path_us=us) for each, us in zip(path.parts, shown, strict=True)]
    tenths = whole_parts([1000 * each.path_us / path.length_us for each in path.parts])
    percents = {each.part: tenth / 10 for each, tenth in zip(path.parts, tenths, strict=True)}
    share = FigureColumn[PathPart]("% of path", lambda row: percents[row.part], _one_decimal)
    some = [each for each in parts if max(each.path_us, each.gain_us or 0.0) >= _NOTHING_US]
    table = _table((time, share, _GAIN), title, some, lambda row: words[row.part])
    whole = (Cell(us_in_ms(length_us), length_us), Cell("100", 100.0), Cell("", None))
    total = ShownRow(whole, _whole(path), is_total=True)
    return ShownTable(table.titles, table.name_title, (*table.rows, total))


def _whole(path: CriticalPath) -> str:
    if path.step_us is None:
        return "all"
    return f"all, {plural(path.num_steps, 'step')}: {us_in_ms(path.step_us)} ms each"


def _sentences(path: CriticalPath, has_launches: bool) -> list[str]:
    """The changes by which most would be gained, and how sure that is."""
    gain = _gain_sentence(path, has_launches)
    found = [f"{gain} Gains don't add up: with one part gone, another one becomes critical."]
    if path.even_gain_us is not None and path.even_gain_us > -_NOTHING_US:
        found.append(EVENLY[path.num_steps > 1].format(_of(path, path.even_gain_us)))
    if path.guessed_waits:
        found.append(
            f"{plural(path.guessed_waits, 'wait')} of one stream for another follow from times alone: "
            "the traces don't record them as cuda_sync events."
        )
    if path.contradictions:
        found.append(
            "Left out, since they contradict others or the recorded times: "
            f"{plural(path.contradictions, 'wait')}."
        )
    return found


def _best(path: CriticalPath) -> PathPart:
    """The part, other than compute if there is any, without which most would be gained."""
    return max(
        path.parts, key=lambda row: (row.gain_us is not None, row.part != "compute", row.gain_us or 0.0)
    )


def _gain_sentence(path: CriticalPath, has_launches: bool) -> str:
    best = _best(path)
    gain_us = best.gain_us or 0.0
    most = "" if best.part == "compute" or gain_us < _NOTHING_US else ", the most of all that isn't compute"
    what = ALL_OF_CPU[has_launches] if best.part == "host" else _WITHOUT[best.part]
    return f"Without {what} the job would be {_of(path, gain_us)} shorter{most}."


def _of(path: CriticalPath, us: float) -> str:
    return f"{us_in_ms(us) if us >= _NOTHING_US else '0'} of {us_in_ms(path.length_us)} ms"


_TABLES: Mapping[Table, Callable[[TraceReport], TableContent]] = {
    "kernels": PlainTable(
        lambda report: report.kernels_by_shape,
        _KERNELS,
        "operator, shapes: kernel",
        _launched_by,
        "no work of a GPU",
    ),
    "shapes": _shapes,
    "operators": PlainTable(
        lambda report: report.operators,
        _OPERATORS,
        "modules and operators by caller, and their own time by shape",
        lambda row: row.name,
        "no operator or module takes any time",
        ("ms: with all that it calls; self ms: what it launches, or computes, itself",),
        lambda row: row.depth,
    ),
    "collectives": _collectives,
    "copies": PlainTable(
        lambda report: report.copies, _COPIES, "direction", lambda row: row.direction, "no copies"
    ),
    "launches": _launches,
    "critical-path": _critical_path,
}
