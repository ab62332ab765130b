"""Rows of plain text as aligned columns, for the small tables that start without rich."""

import textwrap
from collections.abc import Collection, Sequence

GAP = "  "


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for the header and one per row; the columns numbered in `right` are flush right.

    Columns that are empty in every row are left out.
    """
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in used] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(used))]
    flush_right = [i in right for i in used]
    return [
        GAP.join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, flush_right, strict=True)
        ).rstrip()
        for line in lines
    ]


def fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int], width: int
) -> list[str]:
    """A grid within `width`; where names in the first column are too long, each has a line of its own."""
    lines = grid(header, rows, right)
    if max(map(len, lines)) <= width:
        return lines
    first, *figures = grid(header[1:], [row[1:] for row in rows], [column - 1 for column in right])
    pairs = ((cut(row[0], width), cut(GAP + line, width)) for row, line in zip(rows, figures, strict=True))
    return [cut(GAP + first, width), *(line for pair in pairs for line in pair)]


def cut(line: str, width: int) -> str:
    """The line, with an ellipsis where it is longer than `width`; its columns stay where they are."""
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


def wrap(text: str, width: int, indent: int = 4) -> list[str]:
    """The text in lines of at most `width`, all but the first indented; words are never torn apart."""
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )
