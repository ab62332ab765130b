"""The tables of `gpurun trace --show`, for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType

from gpurun.launcher.report.terminal.layout import clean, ms_text, plain, table_of, text_of
from gpurun.launcher.report.terminal.trace import MAX_NAMES, headline, warning_lines
from gpurun.launcher.trace.model import TraceReport
from gpurun.launcher.trace.requested_tables import (
    CollectiveTotal,
    CriticalPath,
    LaunchTotals,
    PathPart,
    Table,
)
from gpurun.launcher.units import format_count, format_number, format_percent, format_rate, plural

MAX_ROWS = 30
_BARS = " ▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
_WORDS = {
    "compute": "compute",
    "transfer": "transfer",
    "copies": "copies",
    "input": "waiting for input",
    "host": "the CPU: Python, operators, launches",
    "latency": "from a launch, or the end of what was waited for, to the start",
    "before": "until this rank's trace begins",
}
_WITHOUT = {
    "compute": "compute",
    "transfer": "the transfer of collectives",
    "copies": "the copies",
    "input": "waiting for input",
    "host": "the CPU's time",
    "latency": "the time until launched work starts",
    "before": "the later begin of a rank's trace",
}


def render_tables(report: TraceReport, show: Sequence[Table], width: int) -> str:
    """The tables in `show`, in that order, `width` columns wide."""
    parts: list[RenderableType] = [headline(report)]
    for name in show:
        parts += ["", *_TABLES[name](report)]
    parts += warning_lines(report.warnings)
    return text_of(Group(*map(plain, parts)), width)


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else format_number(value, decimals)


def _more(rows: Sequence[object]) -> list[RenderableType]:
    more = len(rows) - MAX_ROWS
    return [f"… and {more} more; --json has all"] if more > 0 else []


def _kernels(report: TraceReport) -> list[RenderableType]:
    rows = report.kernels_by_shape or ()
    table = table_of(("ms", "count", "µs each", "least", "most"), expand=True)
    table.add_column("operator, shapes: kernel", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows[:MAX_ROWS]:
        source = " ".join(text for text in ("CUDA graph" if row.graph else "", row.op, row.shapes) if text)
        table.add_row(
            ms_text(row.device_us),
            format_count(row.count),
            *(format_number(us, 1) for us in (row.device_us / row.count, row.min_us, row.max_us)),
            clean(f"{source}: {row.name}" if source else row.name),
        )
    return [table, *_more(rows)] if rows else ["no work of a GPU"]


def _shapes(report: TraceReport) -> list[RenderableType]:
    rows = report.shapes or ()
    table = table_of(("ms", "count", "µs each", "TFLOP/s", "GB/s", "roofline"), expand=True)
    table.add_column("operator, shapes, types", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows[:MAX_ROWS]:
        share = "-" if row.roofline_percent is None else f"{row.roofline_percent:.0f} % {row.bound}"
        table.add_row(
            ms_text(row.device_us),
            format_count(row.count),
            format_number(row.device_us / row.count, 1),
            "-" if row.tflop_per_s is None else format_rate(row.tflop_per_s),
            _number(row.gb_per_s, 1),
            share,
            clean(f"{row.name} {row.shapes} {_types(row.types)}"),
        )
    if not rows:
        return ["the traces have no shapes: record_shapes=True (profile: {shapes: true}) records them"]
    return [table, *_more(rows), "FLOPs and bytes of matrix products, convolutions and attention only"]


def _types(types: str) -> str:
    """One word where all tensors have the same type."""
    return ", ".join(dict.fromkeys(types.split(", ")))


def _collectives(report: TraceReport) -> list[RenderableType]:
    rows = report.collective_totals or ()
    if not rows:
        return ["no collectives"]
    header = ("bytes", "count", "µs", "GB/s", "bus GB/s", "spread µs", "wait ms")
    table = table_of(header, expand=True)
    table.add_column("collective, group", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows[:MAX_ROWS]:
        name = f"{row.kind} {row.dtype or ''}".strip()
        table.add_row(*_collective(row), clean(f"{name}, {row.group}"))
    return [table, *_more(rows), "spread: from the first rank's arrival to the last one's, mean"]


def _collective(row: CollectiveTotal) -> tuple[str, ...]:
    return (
        "-" if row.bytes is None else format_count(row.bytes),
        str(row.count),
        _number(row.transfer_us, 1),
        _number(row.algorithm_gb_per_s, 2),
        _number(row.bus_gb_per_s, 2),
        _number(row.arrival_spread_us, 1),
        "-" if row.wait_us is None else ms_text(row.wait_us),
    )


def _copies(report: TraceReport) -> list[RenderableType]:
    rows = report.copies or ()
    if not rows:
        return ["no copies"]
    table = table_of(("ms", "exposed", "count", "MB", "GB/s"), expand=True)
    table.add_column("direction", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(
            ms_text(row.device_us),
            ms_text(row.exposed_us),
            format_count(row.count),
            "-" if row.bytes is None else format_number(row.bytes / 1e6, 2),
            _number(row.gb_per_s, 2),
            clean(row.direction),
        )
    return [table]


def _launches(report: TraceReport) -> list[RenderableType]:
    rows = report.launches or ()
    if not rows:
        return ["the traces have no launches"]
    table = table_of(
        ("rank", "50 %", "90 %", "99 %", "most", "queue", "most", "empty", "short", "ms", "slow")
    )
    for row in rows[:MAX_ROWS]:
        table.add_row(
            str(row.rank),
            *(format_rate(us) for us in row.delay_percentiles_us),
            format_number(row.queue_mean, 1),
            format_count(row.queue_max),
            format_percent(row.queue_empty_percent),
            format_count(row.short_kernels),
            ms_text(row.short_us),
            format_count(row.slow_launches),
        )
    curves = [f"{row.rank:>4}  {_curve(row)}" for row in rows[:MAX_NAMES]]
    return [
        table,
        *_more(rows),
        "delays from launch to start in µs; queue: pieces of work launched and not done, over time; "
        "short: kernels below 10 µs; slow: kernels that took less time than launching them",
        "",
        "queue over time, by rank",
        *curves,
    ]


def _curve(row: LaunchTotals) -> str:
    """The queue's length over time, as bars."""
    lengths = [length for _, length in row.queue]
    width = min(CURVE_WIDTH, len(lengths))
    cuts = [len(lengths) * i // width for i in range(width + 1)]
    tallest = max(*lengths, 1)
    parts = [max(lengths[a:b]) for a, b in pairwise(cuts)]
    return "".join(_BARS[-(-part * (len(_BARS) - 1) // tallest)] for part in parts)


def _critical_path(report: TraceReport) -> list[RenderableType]:
    path = report.critical_path
    if path is None or not path.length_us:
        return ["no critical path: the traces have no work"]
    table = table_of(("ms", "% of path", "without it: ms less"), expand=True)
    table.add_column("critical path over all ranks", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in path.parts:
        table.add_row(*_cells(path, row), _WORDS[row.part])
    table.add_row(ms_text(path.length_us), "100", "", _whole(path))
    shown: list[RenderableType] = [table]
    if path.names:
        shown += ["", _named(path)]
    if len(report.ranks) > 1:
        shown += ["", _by_rank(path)]
    return [*shown, "", *_sentences(path)]


def _cells(path: CriticalPath, row: PathPart) -> tuple[str, str, str]:
    percent = format_number(100 * row.path_us / path.length_us, 1)
    return ms_text(row.path_us), percent, "" if row.gain_us is None else ms_text(row.gain_us)


def _whole(path: CriticalPath) -> str:
    if path.num_steps < 2:
        return "all"
    return f"all, {plural(path.num_steps, 'step')}: {ms_text(path.length_us / path.num_steps)} ms each"


def _named(path: CriticalPath) -> RenderableType:
    table = table_of(("ms", "% of path", "gain ms"), expand=True)
    table.add_column("kernels and collectives on it", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in path.names[:MAX_NAMES]:
        table.add_row(*_cells(path, row), clean(row.name or ""))
    return table


def _by_rank(path: CriticalPath) -> RenderableType:
    table = table_of(("ms", "% of path", "rank"), expand=True)
    table.add_column("where it runs", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in path.ranks[:MAX_NAMES]:
        table.add_row(*_cells(path, row)[:2], str(row.rank), _WORDS[row.part])
    return table


def _sentences(path: CriticalPath) -> list[str]:
    """What would be gained most by, and how sure that is."""
    found = [f"{_gain_sentence(path)} Gains don't add up: with one part gone, another one becomes critical."]
    if path.even_gain_us is not None:
        found.append(
            "If all ranks computed and copied equally long, "
            f"the job would be {_of(path, path.even_gain_us)} shorter."
        )
    if path.guessed_waits:
        found.append(
            f"{plural(path.guessed_waits, 'wait')} of one stream for another follow from times alone: "
            "the traces don't record them as cuda_sync events."
        )
    if path.contradictions:
        found.append(f"{plural(path.contradictions, 'wait')} contradict others, and were left out.")
    return found


def _gain_sentence(path: CriticalPath) -> str:
    best = max(path.parts, key=lambda row: (row.part != "compute", row.gain_us or 0.0))
    return f"Without {_WITHOUT[best.part]} the job would be {_of(path, best.gain_us or 0.0)} shorter."


def _of(path: CriticalPath, us: float) -> str:
    return f"{ms_text(us) if us >= 0.5 else '0'} of {ms_text(path.length_us)} ms"


_TABLES: Mapping[Table, Callable[[TraceReport], list[RenderableType]]] = {
    "kernels": _kernels,
    "shapes": _shapes,
    "collectives": _collectives,
    "copies": _copies,
    "launches": _launches,
    "critical-path": _critical_path,
}
