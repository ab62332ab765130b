"""Coloured text for a page: cells, and columns that fit its width by dropping some, never by wrapping."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gpurun.launcher.findings.finding import Screen
from gpurun.launcher.units import plural

GAP = 2
"""Spaces between columns: `awk -F '  +'` can split a piped table."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Column:
    """Cells from top to bottom. The column with the highest `drop` goes first when room is short."""

    header: str
    cells: tuple[Text, ...]
    right: bool = False
    drop: int = 0
    """0: never dropped."""
    legend: str = ""
    """The explanation that the header leaves open."""

    @cached_property
    def width(self) -> int:
        return max(map(cell_len, (self.header, *(cell.plain for cell in self.cells))))

    @property
    def is_empty(self) -> bool:
        return not any(cell.plain for cell in self.cells)


def total_width(columns: Sequence[Column]) -> int:
    """Terminal columns that these take, the gap after the last one included."""
    return sum(column.width + GAP for column in columns)


def fit(columns: list[Column], width: int, least_drop: int = 1) -> list[Column]:
    """The columns that fit into `width`, as far as columns may be dropped (`drop` >= `least_drop` > 0)."""
    while total_width(columns) > width:
        last = max(columns, key=lambda column: column.drop, default=None)
        if last is None or last.drop < least_drop:
            break
        columns = [column for column in columns if column is not last]
    return columns


def header_line(columns: Sequence[Column]) -> Text:
    """The names of the columns, each above its cells."""
    return aligned([Text(column.header, "dim") for column in columns], columns)


def row_line(columns: Sequence[Column], row: int) -> Text:
    """One row from the top of every column."""
    return aligned([column.cells[row] for column in columns], columns)


def aligned(cells: Sequence[Text], columns: Sequence[Column]) -> Text:
    """The cells at the places of their columns; no spaces at the end."""
    line = Text()
    for cell, column in zip(cells, columns, strict=True):
        padding = " " * (column.width - cell_len(cell.plain))
        line.append(padding if column.right else "").append_text(cell)
        line.append(("" if column.right else padding) + " " * GAP)
    line.rstrip()
    return line


NEVER_WRAPPED = 1_000_000
"""Columns of a file or a pipe."""
MIN_TEXT = 20
"""Columns for a text, however narrow the terminal is."""


def screen_lines(screen: Screen, width: int | None) -> list[Text]:
    """The first screen: a title and its sentence in each line, then dangers.

    Args:
        screen: of a report.
        width: of the terminal; `None`: nothing is wrapped.
    """
    indent = max([len("Fastest"), *(len(title) for title, _ in screen.lines)]) + GAP
    lines = []
    for number, (title, text) in enumerate(screen.lines):
        style = "bold" if number == 0 else ""
        first, *more = _wrapped(text, indent, width)
        lines.append(Text.assemble((title.ljust(indent), "dim"), (first, style)))
        lines += [Text(f"{'':{indent}}{line}", style) for line in more]
    room = NEVER_WRAPPED if width is None else max(width - GAP, MIN_TEXT)
    most = 2 if len(screen.dangers) == 1 else 1
    for text in screen.dangers:
        first, *more = textwrap.wrap(text, room, max_lines=most, placeholder=" …", break_on_hyphens=False)
        lines += [Text.assemble(("! ", "red"), first), *(Text(f"{'':{GAP}}{line}") for line in more)]
    return lines


def _wrapped(text: str, indent: int, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width - indent, MIN_TEXT), break_on_hyphens=False) or [""]


@dataclass(frozen=True)
class Page:
    """The page that a renderer of a terminal report writes to."""

    width: int
    plain: bool
    """Goes into a pipe: no colour, no wrapping."""
    run: str | None = None
    """The run directory as a person would type it."""
    has_colour: bool = True
    """Whether the terminal shows colours; one that doesn't may show no escape at all."""
    above: tuple[str, ...] = ()
    """Messages about failures that the same reader has just read."""

    @property
    def line_width(self) -> int:
        return NEVER_WRAPPED if self.plain else self.width

    def in_run(self, path: str) -> str:
        """A path of the run directory as a person would type it."""
        return path if self.run is None else f"{self.run}/{path}"


_SPACE_AT_END = re.compile(r"\s+((?:\x1b\[[0-9;]*m)*)$")
"""The space at which a line was wrapped; what follows ends its colour."""


def to_string(lines: Iterable[Text], page: Page) -> str:
    """ANSI text; without any escape where `page` is plain or has no colour. Long sentences wrap at words."""
    console = Console(
        width=page.line_width,
        color_system="standard" if page.has_colour and not page.plain else None,
        force_terminal=not page.plain,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=page.plain)
    return "\n".join(_SPACE_AT_END.sub(r"\1", text) for text in capture.get().splitlines())


def table_of(columns: Iterable[str], expand: bool = False) -> Table:
    """A table of numbers; a column of text may be added."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=expand)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def clean(text: str) -> str:
    """Names come from files: no control characters reach the terminal."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def plain(part: RenderableType) -> RenderableType:
    return Text(part) if isinstance(part, str) else part


def detail_lines(details: Sequence[str], are_shown: bool) -> list[str]:
    """The other findings, after an empty line; or only their number, and how to show them."""
    if not details:
        return []
    return ["", *(details if are_shown else [f"{plural(len(details), 'detail')}: add --details"])]


def text_of(what: RenderableType, width: int) -> str:
    file = StringIO()
    console = Console(file=file, width=width, color_system=None, markup=False, highlight=False, emoji=False)
    console.print(what)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
