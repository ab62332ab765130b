"""Explains what libyaml can't read, and reads on where it is plain what was meant.

libyaml stops at the first mistake. A slip is one whose line can be written right, so that the mistakes after
it are reported as well.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

MAX_DEPTH = 50
"""A job needs 4 levels; recursion over a tree this deep is safe."""
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep", "a job needs about 4 levels"
_KEY = re.compile(r"\s*(?:- +)*[\w.-]+ *:(?=\s|$)")
_ASSIGNED = re.compile(r"(\s*)([A-Za-z_][\w.]*)(?: *(?:=|:) *| +)([^\s:=#][^#]*?)\s*(#.*)?")
"""A key and a value with something else than `: ` between them."""
_SPACES = "indent YAML with spaces, not tabs"
_TABS = re.compile(r" *\t[ \t]*")
_NEEDS_QUOTES = re.compile(r'([^"\'#]*[^"\'#\s])\s*')


@dataclass(frozen=True)
class Slip:
    """A mistake in one line, and the lines as they were meant. Lines and columns count from 0."""

    line: int
    column: int
    message: str
    hint: str
    lines: Mapping[int, str]


def slips_in(error: yaml.YAMLError, text: str) -> list[Slip]:
    """The slips that keep libyaml from reading on; none where it isn't plain what was meant."""
    lines, mark = text.splitlines(), getattr(error, "problem_mark", None)
    if mark is None or mark.line > len(lines):
        return []
    here, problem = lines[mark.line] if mark.line < len(lines) else "", str(getattr(error, "problem", ""))
    if (indent := _TABS.match(here)) and indent.end() >= mark.column:
        return [_tabs(lines, mark.line)]
    if "expected ':'" in problem and getattr(error, "context_mark", None):
        return lines_without_colon(lines, range(error.context_mark.line, mark.line))  # type: ignore[attr-defined]
    return _two_colons(lines, mark) if "mapping values" in problem else []


def lines_without_colon(lines: Sequence[str], where: Sequence[int]) -> list[Slip]:
    """A slip for each of these lines that has text; none if one of them isn't a key and a value."""
    found = []
    for at in (at for at in where if _has_text(lines[at])):
        meant = _ASSIGNED.fullmatch(lines[at])
        if meant is None:
            return []
        indent, key, value, comment = meant.groups()
        right = f"{indent}{key}: {value}{f'  {comment}' if comment else ''}"
        found.append(Slip(at, len(indent), *no_colon(key, value), {at: right}))
    return found


def no_colon(key: str, value: str) -> tuple[str, str]:
    """The message and the advice for a key and a value without `: ` between them."""
    return f"no colon and space between `{key}` and its value", f"write `{key}: {value}`"


def _has_text(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _tabs(lines: Sequence[str], at: int) -> Slip:
    right = {
        number: " " * len(indent[0].expandtabs(2)) + line[indent.end() :]
        for number, line in enumerate(lines)
        if (indent := _TABS.match(line))
    }
    return Slip(at, 0, "a tab in the indentation", _SPACES, right)


def _two_colons(lines: Sequence[str], mark: Any) -> list[Slip]:
    """Explains a colon after a value: quotes are missing, a colon before it, or less indentation."""
    here = lines[mark.line]
    if (key := _KEY.match(here)) and key.end() <= mark.column:
        return _quotes(mark.line, here, key.end())
    above = [at for at in range(mark.line) if _has_text(lines[at])]
    if above and (before := _KEY.match(lines[above[-1]])):
        return _indented(lines, above[-1], mark.line, before)
    start = next((index + 1 for index in range(len(above) - 1, -1, -1) if _KEY.match(lines[above[index]])), 0)
    return lines_without_colon(lines, above[start:])


def _quotes(line: int, text: str, end: int) -> list[Slip]:
    """The line with its value in quotes."""
    begin = end + len(text[end:]) - len(text[end:].lstrip())
    if not (value := _NEEDS_QUOTES.fullmatch(text[begin:])):
        return []
    value_text = re.sub("(?<=[0-9]) *: *(?=[0-9])", ":", value[1])
    right = f"{text[:begin]}{json.dumps(value_text, ensure_ascii=False)}"
    return [
        Slip(
            line, begin, "a `: ` within a value that has no quotes", f"write `{right.strip()}`", {line: right}
        )
    ]


def _indented(lines: Sequence[str], above: int, line: int, before: re.Match[str]) -> list[Slip]:
    column = len(before[0]) - len(before[0].lstrip(" -"))
    text = lines[line].lstrip()
    found = len(lines[line]) - len(text)
    if found <= column:
        return []
    message = f"indented below `{before[0].strip(' -:')}` of line {above + 1}, which has a value"
    return [Slip(line, found, message, _spaces(column, above), {line: " " * column + text})]


def _spaces(column: int, above: int) -> str:
    """The advice to begin a line where another one begins."""
    return f"begin it with {column} spaces, as line {above + 1}" if column else "begin it without spaces"


_HINTS = {
    "',' or ']'": "close the `[`{begun}",
    "',' or '}'": "close the `{{`{begun}",
    "unexpected end of stream": "close the quote{begun}",
    "node content": "check the brackets and commas",
    "cannot start any token": "put the value in quotes",
    "expected key": "check the indentation and the quotes",
    "'-' indicator": "check the indentation",
    "expected ':'": "write `key: value`",
    "mapping values": "check indentation and the `: ` after each key; quote a value that has `: ` in it",
}
"""The advice, by a part of libyaml's message."""


def explained(
    error: yaml.YAMLError, text: str, line_of: Callable[[Any], int | None]
) -> tuple[Any, str, str | None]:
    """The place that libyaml names, its message and the advice.

    Args:
        line_of: the number of a mark's line, from 1.
    """
    if not isinstance(error, yaml.MarkedYAMLError):
        return None, f"invalid YAML: {error}", None
    mark = error.problem_mark or error.context_mark
    problem, lines = str(error.problem), text.splitlines()
    if "nesting depth" in problem:  # libyaml's own limit of 1,000: it reads ahead of its events
        return mark, *TOO_DEEP
    if "expected ':'" in problem and error.context_mark:
        mark = error.context_mark
    context = f" ({error.context})" if error.context and error.problem else ""
    message = f"invalid YAML: {error.problem or error.context}{context}"
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1 if mark else 0]:
        return mark, message, _SPACES
    if "expected key" in problem and (advice := _no_such_column(lines, mark)):
        return mark, "the indentation of this line is that of none above it", advice
    begun = line_of(error.context_mark)
    hint = next((hint for part, hint in _HINTS.items() if part in problem), None)
    return mark, message, hint and hint.format(begun=f" of line {begun}" if begun else "")


def _no_such_column(lines: Sequence[str], mark: Any) -> str | None:
    """The advice for a line that begins where none above it does."""
    column = len(lines[mark.line]) - len(lines[mark.line].lstrip()) if mark.line < len(lines) else 0
    begins = dict(_begins(lines[: mark.line]))
    if mark.column != column or column in begins:
        return None
    near = sorted(begins, key=lambda each: abs(each - column))[:2]
    return ", or ".join(_spaces(each, begins[each]) for each in sorted(near)) or None


def _begins(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Columns in which lines begin, with the number of the line."""
    for number, line in enumerate(lines):
        if _has_text(line):
            yield len(line) - len(line.lstrip()), number
