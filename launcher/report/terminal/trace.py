"""`gpurun trace` as tables for a person; those of `--show` too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from gpurun.launcher.findings.finding import Finding, of_files, of_level, screen_of
from gpurun.launcher.grouping import grouped
from gpurun.launcher.report.tables_on_request import ShownRow, ShownTable, TableContent, shown_table
from gpurun.launcher.report.terminal.layout import (
    GAP,
    Column,
    clean,
    detail_lines,
    fit,
    header_line,
    plain,
    row_line,
    screen_lines,
    table_of,
    text_of,
)
from gpurun.launcher.trace.explain import (
    capture_text,
    explained_stretches,
    group_sizes,
    is_some_waiting_unknown,
    lacks_rank,
    mean_stretch,
    steps_add_detail,
    whole_ranks,
)
from gpurun.launcher.trace.model import (
    Breakdown,
    CollectiveReport,
    DeviceTrace,
    NameTotal,
    PipelineStage,
    RankTrace,
    Table,
    TraceReport,
    overall_gb_per_s,
)
from gpurun.launcher.units import (
    format_count,
    format_number,
    format_percent,
    numbers_text,
    us_in_ms,
    whole_parts,
)

MAX_STEPS = 20
MAX_NAMES = 10
BAR_WIDTH = 20
_BAR: tuple[tuple[str, Callable[[Breakdown], float]], ...] = (
    ("▇", lambda each: each.compute_us),
    ("▒", lambda each: each.exposed_transfer_us),
    ("░", lambda each: each.exposed_wait_us),
    ("≡", lambda each: each.exposed_memcpy_us),
    ("▫", lambda each: each.other_steps_us),
    ("·", lambda each: each.idle_us),
)


@dataclass(frozen=True)
class _Figure:
    """A column of the tables of ranks and steps. The parts of the span, `drop` 0, are in every one.

    A part that is zero in all rows has none; which others fit is up to the terminal's width.
    """

    name: str
    of: Callable[[Breakdown], float]
    drop: int = 0
    """The order in which narrow pages drop columns; see `Column`."""
    text: Callable[[float], str] = us_in_ms
    is_optional: bool = False
    """Left out if no row has any."""


_COLUMNS = (
    _Figure("span", lambda each: each.span_us),
    _Figure("compute", lambda each: each.compute_us),
    _Figure("comm", lambda each: each.comm_us, drop=3),
    _Figure("exposed", lambda each: each.exposed_comm_us),
    _Figure("wait", lambda each: each.exposed_wait_us, drop=1),
    _Figure("copies", lambda each: each.exposed_memcpy_us, is_optional=True),
    _Figure("other", lambda each: each.other_steps_us, is_optional=True),
    _Figure("idle", lambda each: each.idle_us),
    _Figure("host", lambda each: each.idle_by_cause_us.of_launches, drop=4),
    _Figure("one-off", lambda each: each.idle_by_cause_us.one_off, drop=4, is_optional=True),
    _Figure("input", lambda each: each.idle_by_cause_us.data, drop=5),
    _Figure("kernels", lambda each: each.num_kernels, drop=6, text=lambda n: format_count(n) if n else "-"),
)
_DROP_BAR = 2
_LEGEND = "compute ▇  transfer{} ▒  wait ░  copies ≡  {}idle ·"
_OR_WAIT = " or unknown"
"""In the legend, where of some collective it isn't known."""
_OTHER_STEPS = "other steps ▫  "
"""In the legend, where a step's time holds any."""
MESSAGE_WIDTH = 9
"""The width of a column, with the space before it."""
LABEL_WIDTH = 20


def render_trace(report: TraceReport, width: int, details: bool = True) -> str:
    """The report as text, `width` columns wide: ranks, steps, collectives, kernels, and what it means.

    Args:
        report: of the traces.
        width: in columns.
        details: show all that was found, not only how much.
    """
    screen = screen_of(report.findings)
    parts: list[RenderableType] = [
        *screen_lines(screen, width),
        "",
        "Ranks, ms: from the first to the last work in the trace, or of --steps alone.",
        "Steps, ms: their own work, from their start. Exposed, wait: no compute hides it.",
        *_ranks(report, width),
    ]
    parts += _steps(report, width)
    parts += parallelism_tables(report, width)
    parts += _collectives(report)
    parts += _names(
        "kernels", [rank.kernels for rank in whole_ranks(report.ranks)], lambda row: row.device_us
    )
    on_gpu = any(row.device_us for rank in report.ranks for row in rank.ops)
    time_us = attrgetter("device_us" if on_gpu else "host_us")
    has_kernels = any(rank.total.num_kernels for rank in report.ranks)
    title = "CPU operators" if has_kernels and not on_gpu else "operators"
    parts += _names(title, [rank.ops for rank in whole_ranks(report.ranks)], time_us)
    parts += _names("modules", [rank.modules for rank in whole_ranks(report.ranks)], time_us)
    more = replace(report, findings=screen.details).sentences
    parts += detail_lines([*more, *notes_in(report.findings)], details)
    return text_of(Group(*map(plain, parts)), width)


def _ranks(report: TraceReport, width: int) -> list[RenderableType]:
    rows = [((name,), row.total) for name, row in _rows(report)]
    return [*_table(("rank",), rows, width), _legend(report)]


def _table(
    labels: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], Breakdown]], width: int
) -> list[RenderableType]:
    """The rows with as many figures as there is room for, those that add up to the span in any case."""
    stretches = [_in_whole_us(each) for _, each in rows]
    columns = [
        Column(label, tuple(Text(names[i]) for names, _ in rows), right=True)
        for i, label in enumerate(labels)
    ]
    columns += [
        Column(figure.name, tuple(map(Text, map(figure.text, values))), True, figure.drop)
        for figure in _COLUMNS
        for values in [[figure.of(each) for each in stretches]]
        if any(values) or not figure.is_optional
    ]
    columns.append(Column("", tuple(Text(_bar(each)) for each in stretches), drop=_DROP_BAR))
    shown = fit(columns, width + GAP)
    return [header_line(shown), *(row_line(shown, i) for i in range(len(rows)))]


def _in_whole_us(each: Breakdown) -> Breakdown:
    """As it is shown: the parts add up to the span in the last digit, too, and none is less than its own."""
    parts = (each.compute_us, each.exposed_comm_us, each.exposed_memcpy_us, each.other_steps_us, each.idle_us)
    span = round(each.span_us)
    compute, exposed, copies, other, idle = whole_parts(parts, span)
    causes = each.idle_by_cause_us
    known = (causes.of_launches, causes.one_off, causes.data)
    of_launches, one_off, data, _ = whole_parts((*known, each.idle_us - sum(known)), idle)
    return replace(
        each,
        span_us=span,
        compute_us=compute,
        comm_us=max(each.comm_us, exposed),
        exposed_comm_us=exposed,
        exposed_memcpy_us=copies,
        other_steps_us=other,
        idle_us=idle,
        idle_by_cause_us=replace(
            causes, host=of_launches, unrecorded=0, launching=0, latency=0, one_off=one_off, data=data
        ),
        exposed_wait_us=min(each.exposed_wait_us, exposed),
    )


def _rows(report: TraceReport) -> list[tuple[str, RankTrace | DeviceTrace]]:
    """`0` is a rank; `0:1` the second GPU of one that has several."""
    return [
        (f"{rank.rank}:{clean(row.device)}" if rank.devices else str(rank.rank), row)
        for rank in report.ranks
        for row in sorted(rank.devices, key=lambda each: each.device) or (rank,)
    ]


def _steps(report: TraceReport, width: int) -> list[RenderableType]:
    rows = [(place, name, step) for place, (name, row) in enumerate(_rows(report)) for step in row.steps]
    if not steps_add_detail(report):
        return []
    first = sorted(rows, key=lambda row: (row[2].step, row[0]))[:MAX_STEPS]
    shown: list[tuple[tuple[str, ...], Breakdown]] = [
        ((str(step.step), name), step) for _, name, step in first
    ]
    shown.append((("mean", ""), mean_stretch(explained_stretches(report))))
    more = len(rows) - MAX_STEPS
    return [
        "",
        *_table(("step", "rank"), shown, width),
        *([f"… and {more} more; --json has all"] if more > 0 else []),
    ]


def _legend(report: TraceReport) -> str:
    stretches = (each for _, row in _rows(report) for each in (row.total, *row.steps))
    return _LEGEND.format(
        _OR_WAIT if is_some_waiting_unknown(report) else "",
        _OTHER_STEPS if any(each.other_steps_us for each in stretches) else "",
    )


def _bar(each: Breakdown) -> str:
    """The span's parts, as shares of `BAR_WIDTH` characters; rounding never makes it longer or shorter."""
    if each.span_us <= 0:
        return ""
    bar, reached_us = "", 0.0
    for character, part_us in _BAR:
        reached_us += part_us(each)
        bar += character * (round(BAR_WIDTH * reached_us / each.span_us) - len(bar))
    return bar


def _collectives(report: TraceReport) -> list[RenderableType]:
    if not report.collectives:
        return []
    table = table_of(("group", "collective", "count", "MB", "GB/s", "bus GB/s", "all waits, hidden or not"))
    sorts = grouped(report.collectives, lambda each: (each.group, each.kind))
    sizes = group_sizes(report)
    for (group, kind), same in sorted(sorts.items()):
        is_partial = any(lacks_rank(each, sizes) for each in same)
        is_loose = len(report.ranks) > 1 and sum(each.ranks[0].wait_us is None for each in same) > 1
        table.add_row(clean(group), kind, *_collective_cells(same, is_partial, is_loose))
    parts: list[RenderableType] = ["", table]
    if report.stragglers:
        lacks = any(lacks_rank(each, sizes) for each in report.collectives)
        late = table_of(("rank", f"came last{' of present' if lacks else ''}", "others waited"))
        for row in report.stragglers:
            late.add_row(str(row.rank), str(row.last_arrivals), us_in_ms(row.wait_caused_us))
        parts += ["", late]
    return parts


def _collective_cells(same: Sequence[CollectiveReport], is_partial: bool, is_loose: bool) -> tuple[str, ...]:
    """The figures of a row, some of which are bounds.

    Args:
        same: collectives of a group and kind.
        is_partial: a rank is missing that others may have waited for.
        is_loose: several aren't matched over ranks, and may be one.
    """
    most = "≤" if is_loose else ""
    sizes = [each.bytes for each in same if each.bytes is not None]
    waits = [part.wait_us for each in same for part in each.ranks if part.wait_us is not None]
    return (
        f"{most}{len(same)}",
        f"{most}{format_number(sum(sizes) / 1e6, 1)}" if sizes else "-",
        _rate(overall_gb_per_s(same, lambda each: each.algorithm_gb_per_s), is_partial),
        _rate(overall_gb_per_s(same, lambda each: each.bus_gb_per_s), is_partial),
        us_in_ms(sum(waits)) if waits else "-",
    )


def _rate(gb_per_s: float | None, is_partial: bool) -> str:
    return "-" if gb_per_s is None else f"{'≥' if is_partial else ''}{format_number(gb_per_s, 2)}"


def _names(
    title: str, ranks: Sequence[Sequence[NameTotal]], time_us: Callable[[NameTotal], float]
) -> list[RenderableType]:
    """The names that took most time, as the mean over ranks."""
    sums: dict[str, tuple[int, float]] = {}
    for row in (row for rows in ranks for row in rows):
        count, total_us = sums.get(row.name, (0, 0.0))
        sums[row.name] = (count + row.count, total_us + time_us(row))
    longest = sorted(sums.items(), key=lambda item: -item[1][1])[:MAX_NAMES]
    if not longest:
        return []
    table = table_of(("ms", "count"), expand=True)
    table.add_column(f"{title}, per rank", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, (count, total_us) in longest:
        table.add_row(us_in_ms(total_us / len(ranks)), format_count(count / len(ranks)), clean(name))
    return ["", table]


def notes_in(findings: Sequence[Finding]) -> list[str]:
    """The notes on traces."""
    return [f"note: {clean(each.text)}" for each in of_files(of_level(findings, "detail"))]


def parallelism_tables(report: TraceReport, width: int) -> list[RenderableType]:
    """The tables; none for a single kind of parallelism, whose figures the ranks' table has already."""
    if len(report.parallelism) < 2 and not report.pipeline:
        return []
    table = table_of(())
    table.add_column("parallelism")
    for name in ("groups", "comm", "exposed", "wait"):
        table.add_column(name, justify="right")
    for each in report.parallelism:
        comm, exposed, wait = each.mean_us(len(whole_ranks(report.ranks)))
        waited = "-" if wait is None else us_in_ms(wait)
        table.add_row(each.kind, str(len(each.groups)), us_in_ms(comm), us_in_ms(exposed), waited)
    return ["", table, *_pipeline(report.pipeline, width)]


def _pipeline(stages: Sequence[PipelineStage], width: int) -> list[RenderableType]:
    if not stages:
        return []
    table = table_of(("stage", "ranks", "span", "bubble", "share"))
    table.add_column("waits for")
    for each in stages:
        share = format_percent(100 * each.bubble_us / each.span_us) if each.span_us else "-"
        awaited = ", ".join(f"stage {other}: {us_in_ms(us)}" for other, us in each.waits_us.items() if us)
        table.add_row(
            str(each.stage),
            numbers_text(sorted(each.ranks)),
            us_in_ms(each.span_us),
            us_in_ms(each.bubble_us),
            share,
            awaited,
        )
    return ["", table, *_messages(stages, width)]


def _messages(stages: Sequence[PipelineStage], width: int) -> list[RenderableType]:
    """The bubble by message: what stages receive, and what they send if they wait there."""
    rows = [
        (each.stage, message)
        for each in stages
        for message in each.messages
        if message.way == "from" or any(message.wait_us)
    ]
    longest = max((len(message.wait_us) for _, message in rows), default=0)
    shown = min(longest, (width - LABEL_WIDTH) // MESSAGE_WIDTH)
    if not shown:
        return []
    table = table_of(())
    table.add_column("bubble by message")
    for number in range(1, shown + 1):
        table.add_column(str(number), justify="right")
    for stage, message in rows:
        waits = [us_in_ms(us) for us in message.wait_us[:shown]]
        label = f"stage {stage} {message.way} {message.stage}"
        table.add_row(label, *waits, *[""] * (shown - len(waits)))
    return ["", table, *([f"… and {longest - shown} more; --json has all"] if longest > shown else [])]


MAX_ROWS = 30
_BARS = " ▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60


INDENT = "  "


def render_tables(report: TraceReport, show: Sequence[Table], width: int, details: bool = True) -> str:
    """The tables in `show`, in that order, `width` columns wide."""
    parts: list[RenderableType] = [f"{capture_text(report)}; times in ms"]
    for name in show:
        parts += _parts(shown_table(report, name))
    parts += detail_lines(notes_in(report.findings), details)
    return text_of(Group(*map(plain, parts)), width)


def _parts(shown: TableContent) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for table in shown.tables:
        parts += ["", *_lines(table, MAX_NAMES if parts else MAX_ROWS)]
    parts += [*([] if len(shown.tables) == 1 else [""]), *shown.notes]
    return parts + [line for table in shown.tables if table.curve_title for line in _curves(table)]


def _lines(shown: ShownTable, most: int) -> list[RenderableType]:
    table = table_of(shown.titles, expand=bool(shown.name_title))
    if shown.name_title:
        table.add_column(shown.name_title, no_wrap=True, overflow="ellipsis", ratio=1)
    rows = longest(shown.rows, most)
    for row in rows:
        name = [INDENT * row.depth + clean(row.name)] if shown.name_title else []
        table.add_row(*(cell.text for cell in row.cells), *name)
    more = len(shown.rows) - len(rows)
    return [table, *([f"… and {more} more; --json has all"] if more > 0 else [])]


def longest(rows: Sequence[ShownRow], most: int) -> list[ShownRow]:
    """The first rows; of a tree those with most time, none without what is around it. Totals always."""
    if any(row.depth for row in rows):
        order = sorted(range(len(rows)), key=lambda i: (-(rows[i].cells[0].value or 0.0), i))
    else:
        order = list(range(len(rows)))
    kept = {*order[:most], *(i for i in order if rows[i].is_total)}
    return [row for i, row in enumerate(rows) if i in kept]


def _curves(table: ShownTable) -> list[str]:
    rows = table.rows[:MAX_NAMES]
    return ["", table.curve_title, *(f"{row.cells[0].text:>4}  {_curve(row.curve)}" for row in rows)]


def _curve(lengths: Sequence[int]) -> str:
    """The queue's length over time, as bars."""
    width = min(CURVE_WIDTH, len(lengths))
    cuts = [len(lengths) * i // width for i in range(width + 1)]
    tallest = max(*lengths, 1)
    parts = [max(lengths[a:b]) for a, b in pairwise(cuts)]
    return "".join(_BARS[-(-part * (len(_BARS) - 1) // tallest)] for part in parts)
