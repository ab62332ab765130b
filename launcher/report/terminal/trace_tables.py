"""The tables of `gpurun trace --show`, for a person."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType

from gpurun.launcher.report.tables_on_request import Shown, ShownRow, ShownTable, shown_table
from gpurun.launcher.report.terminal.layout import clean, plain, table_of, text_of
from gpurun.launcher.report.terminal.trace import MAX_NAMES, headline, warning_lines
from gpurun.launcher.trace.model import TraceReport
from gpurun.launcher.trace.requested_tables import Table

MAX_ROWS = 30
_BARS = " ▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60


INDENT = "  "


def render_tables(report: TraceReport, show: Sequence[Table], width: int) -> str:
    """The tables in `show`, in that order, `width` columns wide."""
    parts: list[RenderableType] = [headline(report)]
    for name in show:
        parts += _parts(shown_table(report, name))
    parts += warning_lines(report.warnings)
    return text_of(Group(*map(plain, parts)), width)


def _parts(shown: Shown) -> list[RenderableType]:
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
