"""Coloured text for a page: columns that fit its width by dropping some, never by wrapping."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP = 2
"""Spaces between columns: `awk -F '  +'` can split a piped table."""


@dataclass(frozen=True)
class Column:
    """Cells from top to bottom. The column with the highest `drop` goes first when room is short."""

    header: str
    cells: tuple[Text, ...]
    right: bool = False
    drop: int = 0
    """0: never dropped."""
    legend: str = ""
    """What the header leaves open."""

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
    """What fits into `width`, as far as columns may be dropped (`drop` >= `least_drop` > 0)."""
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


@dataclass(frozen=True)
class Page:
    """What the renderers of a terminal report must know about where it goes."""

    width: int
    plain: bool
    """Goes into a pipe: no colour, no wrapping."""
    run: str | None = None
    """The run directory as a person would type it."""

    def in_run(self, path: str) -> str:
        """A path of the run directory as a person would type it."""
        return path if self.run is None else f"{self.run}/{path}"


def to_string(lines: Iterable[Text], page: Page) -> str:
    """ANSI text, or without any escape where `page` is plain; long sentences wrap at words."""
    console = Console(
        width=NEVER_WRAPPED if page.plain else page.width,
        color_system=None if page.plain else "standard",
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
    return "\n".join(text.rstrip() for text in capture.get().splitlines())
