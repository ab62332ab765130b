"""A job file as text and as a tree that remembers where everything is, with all that is wrong with it.

PyYAML's own constructors are not used: its events come one at a time however deep the text nests, so that
depth, size and tags are judged before anything is built, and nothing but plain data can ever come out.

PyYAML implements YAML 1.1, where `3:1` is the number 181, `no` is false and `1e-3` is text: all three would
turn a job file into something that its author did not write. Plain scalars follow YAML 1.2's core schema.

libyaml stops at the first mistake. A slip is one whose line can be written right, so that the mistakes after
it are reported as well.

Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

import gpurun
from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.yaml.describe import describe, shorten
from gpurun.launcher.units import first_of, format_count

Scalar = str | int | float | bool | None

SCALAR_TAGS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "null": (type(None),),
}
"""The values that may have a tag, such as `!!int`."""

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BASES = {"0o": 8, "0x": 16}

_MAX_DIGITS = 40
"""More digits are far outside the range below; Python refuses to convert more than 4,300."""

_INTEGERS = range(-(2**63), 2**64)
"""The integers that the JSON files of a run can hold."""


def _resolve_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar.

    Raises:
        ValueError: a number that is not finite, or too large for the files of a run.
    """
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"`{text}` is not a number that a job can use")
    return text


def _integer(text: str) -> int:
    number = int(text, _BASES.get(text[:2], 10)) if len(text) <= _MAX_DIGITS else None
    if number is None or number not in _INTEGERS:
        raise ValueError(f"the number {text[:20]}… is too large")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


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
class _Slip:
    """A mistake in one line, and the lines as they were meant. Lines and columns count from 0."""

    line: int
    column: int
    message: str
    hint: str
    lines: Mapping[int, str]


def _slips_in(error: yaml.YAMLError, text: str) -> list[_Slip]:
    """The slips that keep libyaml from reading on; none where it isn't plain what was meant."""
    lines, mark = text.splitlines(), getattr(error, "problem_mark", None)
    if mark is None or mark.line > len(lines):
        return []
    here, problem = lines[mark.line] if mark.line < len(lines) else "", str(getattr(error, "problem", ""))
    if (indent := _TABS.match(here)) and indent.end() >= mark.column:
        return [_tabs(lines, mark.line)]
    if "expected ':'" in problem and getattr(error, "context_mark", None):
        return _lines_without_colon(lines, range(error.context_mark.line, mark.line))  # type: ignore[attr-defined]
    return _two_colons(lines, mark) if "mapping values" in problem else []


def _lines_without_colon(lines: Sequence[str], where: Sequence[int]) -> list[_Slip]:
    """A slip for each of these lines that has text; none if one of them isn't a key and a value."""
    found = []
    for at in (at for at in where if _has_text(lines[at])):
        meant = _ASSIGNED.fullmatch(lines[at])
        if meant is None:
            return []
        indent, key, value, comment = meant.groups()
        right = f"{indent}{key}: {value}{f'  {comment}' if comment else ''}"
        found.append(_Slip(at, len(indent), *_no_colon(key, value), {at: right}))
    return found


def _no_colon(key: str, value: str) -> tuple[str, str]:
    """The message and the advice for a key and a value without `: ` between them."""
    return f"no colon and space between `{key}` and its value", f"write `{key}: {value}`"


def _has_text(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _tabs(lines: Sequence[str], at: int) -> _Slip:
    right = {
        number: " " * len(indent[0].expandtabs(2)) + line[indent.end() :]
        for number, line in enumerate(lines)
        if (indent := _TABS.match(line))
    }
    return _Slip(at, 0, "a tab in the indentation", _SPACES, right)


def _two_colons(lines: Sequence[str], mark: Any) -> list[_Slip]:
    """Explains a colon after a value: quotes are missing, a colon before it, or less indentation."""
    here = lines[mark.line]
    if (key := _KEY.match(here)) and key.end() <= mark.column:
        return _quotes(mark.line, here, key.end())
    above = [at for at in range(mark.line) if _has_text(lines[at])]
    if above and (before := _KEY.match(lines[above[-1]])):
        return _indented(lines, above[-1], mark.line, before)
    start = next((index + 1 for index in range(len(above) - 1, -1, -1) if _KEY.match(lines[above[index]])), 0)
    return _lines_without_colon(lines, above[start:])


def _quotes(line: int, text: str, end: int) -> list[_Slip]:
    """The line with its value in quotes."""
    begin = end + len(text[end:]) - len(text[end:].lstrip())
    if not (value := _NEEDS_QUOTES.fullmatch(text[begin:])):
        return []
    value_text = re.sub("(?<=[0-9]) *: *(?=[0-9])", ":", value[1])
    right = f"{text[:begin]}{json.dumps(value_text, ensure_ascii=False)}"
    return [
        _Slip(
            line, begin, "a `: ` within a value that has no quotes", f"write `{right.strip()}`", {line: right}
        )
    ]


def _indented(lines: Sequence[str], above: int, line: int, before: re.Match[str]) -> list[_Slip]:
    column = len(before[0]) - len(before[0].lstrip(" -"))
    text = lines[line].lstrip()
    found = len(lines[line]) - len(text)
    if found <= column:
        return []
    message = f"indented below `{before[0].strip(' -:')}` of line {above + 1}, which has a value"
    return [_Slip(line, found, message, _spaces(column, above), {line: " " * column + text})]


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


MAX_NODES = 10_000
"""Values in the file once all aliases are written out. A job has about 50; this many wrong ones are still
refused within a second."""

MAX_PROBLEMS = 30
"""Mistakes that are shown; more of them have one cause."""

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the file to a value."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG_PREFIX = "tag:yaml.org,2002:"

REMOVE_ONE = "remove one of them"

_ONE_ASSIGNED = re.compile(r"(\w{1,40}) *= *(\S{1,40})")
"""A key of `{width=128}`."""


@dataclass(frozen=True)
class Unreadable:
    """Replaces a value whose mistake was reported already; fits nothing that a job expects."""


@dataclass(frozen=True)
class Mark:
    """A place in a file; line and column count from 1. A command-line option has neither."""

    file: str
    line: int | None = None
    column: int | None = None

    def problem(self, message: str, hint: str | None = None) -> Problem:
        return Problem(message, hint, self.file, self.line, self.column)


@dataclass(frozen=True)
class YamlNode:
    """A scalar, a tuple of nodes or a mapping of nodes. An alias shares its target's node."""

    value: Any
    mark: Mark
    key_marks: Mapping[str, Mark] = field(default_factory=dict)
    """The place of each key of a mapping."""

    def __post_init__(self) -> None:
        children = self.children()
        object.__setattr__(self, "size", 1 + sum(child.size for child in children))
        object.__setattr__(self, "height", 1 + max((child.height for child in children), default=0))

    size: int = field(init=False)
    """Values below and including this one, with every alias written out."""
    height: int = field(init=False)

    def children(self) -> tuple["YamlNode", ...]:
        if isinstance(self.value, dict):
            return tuple(self.value.values())
        return self.value if isinstance(self.value, tuple) else ()

    def child(self, step: str | int) -> "YamlNode | None":
        found: YamlNode | None = None
        if isinstance(self.value, dict):
            found = self.value.get(step)
        elif isinstance(self.value, tuple) and isinstance(step, int) and 0 <= step < len(self.value):
            found = self.value[step]
        return found

    def plain(self) -> Any:
        """The data itself: dict, list and scalars, nothing of it shared."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, tuple):
            return [child.plain() for child in self.value]
        return self.value

    def unreadable(self) -> list[Path]:
        """The places of values whose mistakes were reported already."""
        found = self.value
        steps = (
            found.items() if isinstance(found, dict) else enumerate(found if isinstance(found, tuple) else ())
        )
        below = [(step, *path) for step, child in steps for path in child.unreadable()]
        return [()] if isinstance(found, Unreadable) else below

    def mark_of_value(self, path: Path) -> Mark:
        """The place of the value; if it is missing, the beginning of the innermost mapping around it."""
        node = self
        for step in path:
            child = node.child(step)
            if child is None:
                break
            node = child
        return node.mark

    def mark_of_key(self, path: Path) -> Mark:
        """The place of the last key of `path`; for a list item, the place of the item."""
        node = self
        for step in path[:-1]:
            child = node.child(step)
            if child is None:
                return node.mark
            node = child
        return node.key_marks.get(str(path[-1])) or self.mark_of_value(path)

    def without(self, path: Path) -> "YamlNode":
        """A copy without the key at the end of `path`; the same where a step of it is missing, or no key."""
        child = self.child(path[0])
        if child is None or not isinstance(self.value, dict):
            return self
        if len(path) > 1:
            rest = child.without(path[1:])
            return self if rest is child else self.with_child(path[0], rest)
        return replace(self, value={key: node for key, node in self.value.items() if key != path[0]})

    def with_child(self, step: str | int, child: "YamlNode") -> "YamlNode":
        """A copy in which `step` leads to `child`."""
        if isinstance(self.value, tuple):
            items = list(self.value)
            items[int(step)] = child
            return replace(self, value=tuple(items))
        value = {**self.value, step: child}
        return replace(self, value=value, key_marks={**self.key_marks, str(step): child.mark})


def compose(text: str, file: str, *, has_lines: bool = True) -> tuple[YamlNode, list[Problem]]:
    """The tree of a document, with the mistakes that don't keep the rest from being read.

    Args:
        text: YAML without control characters.
        file: name for messages.
        has_lines: False for the value of a command-line option, where lines and columns mean nothing.

    Raises:
        SpecError: the text is not YAML, or nests or expands beyond the limits.
    """
    found: list[Problem] = []
    repaired = text
    for _ in range(MAX_PROBLEMS):
        composer = _Composer(repaired, file, has_lines, text)
        try:
            root = composer.document()
            slips = _slips_of_text(root, repaired) if has_lines else []
            if not slips:
                return root, [*found, *composer.problems]
        except yaml.YAMLError as error:
            slips = _slips_in(error, repaired) if has_lines else []
            if not slips:
                raise SpecError(*found, *composer.unreadable(error)) from error
        except SpecError as error:
            raise SpecError(*found, *error.problems) from error
        found += [composer.slip(each) for each in slips]
        repaired = _with_lines(repaired, {at: line for each in slips for at, line in each.lines.items()})
    raise SpecError(*found)


def _slips_of_text(root: YamlNode, text: str) -> list[_Slip]:
    """The lines of a document in which no key has a colon."""
    lines = text.splitlines()
    return _lines_without_colon(lines, range(len(lines))) if isinstance(root.value, str) else []


def _with_lines(text: str, instead: Mapping[int, str]) -> str:
    lines = text.splitlines()
    return "\n".join(instead.get(at, line) for at, line in enumerate(lines)) + "\n"


class _Composer:
    """Reads one stream of events; mistakes that allow to go on are collected in `problems`."""

    def __init__(self, text: str, file: str, has_lines: bool, given: str) -> None:
        """Args:
        given: the text before slips in it were repaired, line by line.
        """
        self._events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
        self._text, self._lines = text, text.splitlines()
        self._given = () if given is text else list(zip(given.splitlines(), self._lines, strict=True))
        self._file = file
        self._has_lines = has_lines
        self._anchors: dict[str, YamlNode | None] = {}
        self.problems: list[Problem] = []

    def mark(self, mark: Any) -> Mark:
        if not self._has_lines or mark is None:
            return Mark(self._file)
        return Mark(self._file, mark.line + 1, self._column(mark.line, mark.column) + 1)

    def _column(self, line: int, column: int) -> int:
        """The position of a column in the line before it was repaired."""
        given, read = self._given[line] if line < len(self._given) else ("", "")
        return column if given[:column] == read[:column] else max(0, column + len(given) - len(read))

    def slip(self, slip: _Slip) -> Problem:
        mark = Mark(self._file, slip.line + 1, self._column(slip.line, slip.column) + 1)
        return mark.problem(slip.message, slip.hint)

    def unreadable(self, error: yaml.YAMLError) -> list[Problem]:
        """The problem that ends the reading, after those before it."""
        mark, message, hint = explained(error, self._text, lambda begun: self.mark(begun).line)
        return [*self.problems[:MAX_PROBLEMS], self.mark(mark).problem(message, hint)]

    def document(self) -> YamlNode:
        root = YamlNode(None, self.mark(None))
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    hint = "a job file holds one job: delete `---`"
                    self._stop(event, "a second document begins here", hint)
                root = self._node(next(self._events), depth=1)
        return root

    def _node(self, event: Any, depth: int) -> YamlNode:
        if depth > MAX_DEPTH:
            self._stop(event, *TOO_DEEP)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # until it is complete: it can't contain itself
        node = self._build(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _build(self, event: Any, depth: int) -> YamlNode:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", _TAG_PREFIX + ("map" if is_mapping else "seq")):
            self._reject_tag(event)
        node = self._mapping(event, depth) if is_mapping else self._sequence(event, depth)
        if node.height > MAX_DEPTH:
            self._stop(event, f"aliases nest more than {MAX_DEPTH} levels deep")
        return node

    def _alias(self, event: Any) -> YamlNode:
        target = self._anchors.get(event.anchor)
        if target is not None:
            return target
        reason = "refers to itself" if event.anchor in self._anchors else "has no anchor above it"
        self.problems.append(self.mark(event.start_mark).problem(f"the alias `*{event.anchor}` {reason}"))
        return YamlNode(Unreadable(), self.mark(event.start_mark))

    def _sequence(self, start: Any, depth: int) -> YamlNode:
        items: list[YamlNode] = []
        size = 0
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, depth + 1))
            size = self._grow(start, size, items[-1])
        return YamlNode(tuple(items), self.mark(start.start_mark))

    def _mapping(self, start: Any, depth: int) -> YamlNode:
        values: dict[str, YamlNode] = {}
        marks: dict[str, Mark] = {}
        bare: list[YamlNode] = []
        size = num_pairs = 0
        before = len(self.problems)
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            num_pairs += 1
            key_mark = self.mark(event.start_mark)
            key_node = self._node(event, depth + 1)
            value_event = next(self._events)
            value = self._node(value_event, depth + 1)
            size = self._grow(start, size, value)
            if start.flow_style and self._is_bare(event, value_event):
                bare.append(key_node)
                key, value = self._bare(values, key_node)
            else:
                key = self._key(key_node, key_mark)
            if key in marks:
                self._duplicate(key, key_mark, marks[key])
            elif key is not None:
                values[key], marks[key] = value, key_mark
        mark = self.mark(start.start_mark)
        are_items = all(isinstance(item.value, Scalar) and "=" not in str(item.value) for item in bare)
        if 1 < len(bare) == num_pairs and are_items:
            return self._list_in_braces(mark, bare, before)
        return YamlNode(values, mark, marks)

    def _is_bare(self, key: Any, value: Any) -> bool:
        """Whether a key has neither a value nor a colon, as `dp` has in `{ddp, dp}`."""
        is_empty = isinstance(value, yaml.ScalarEvent) and not value.value and not value.style
        if not is_empty or key.end_mark.line != value.start_mark.line:
            return False
        return ":" not in self._lines[value.start_mark.line][key.end_mark.column : value.start_mark.column]

    def _bare(self, values: dict[str, YamlNode], item: YamlNode) -> tuple[str | None, YamlNode]:
        """The key and the value that are meant; no key where it is one more value of the key before it."""
        if assigned := _ONE_ASSIGNED.fullmatch(str(item.value)):
            key, value = assigned.groups()
            self.problems.append(item.mark.problem(*_no_colon(key, value)))
            return key, YamlNode(_resolve_scalar(value), item.mark)
        before = next(reversed(values.values())).value if values else None
        if before is not None and not isinstance(before, dict) and isinstance(item.value, Scalar):
            self._forgotten_brackets(values, item)
            return None, item
        return self._key(item, item.mark), YamlNode(None, item.mark)

    def _list_in_braces(self, mark: Mark, items: list[YamlNode], before: int) -> YamlNode:
        """Args:
        before: how many problems there were before the list.
        """
        del self.problems[before:]
        listed = ", ".join(str(item.value) for item in items)
        self.problems.append(mark.problem("a list in braces", f"put it in brackets: [{shorten(listed)}]"))
        return YamlNode(tuple(items), mark)

    def _key(self, node: YamlNode, mark: Mark) -> str | None:
        if isinstance(node.value, str):
            return node.value
        if not isinstance(node.value, Unreadable):
            hint = None if isinstance(node.value, dict | tuple) else "put it in quotes if you mean text"
            self.problems.append(mark.problem(f"a key must be text, not {describe(node.value)}", hint))
        return None

    def _forgotten_brackets(self, values: dict[str, YamlNode], item: YamlNode) -> None:
        """Explains the key that is none in `{global_batch: 32, 64}`: the next value of the key before it."""
        key, first = next(reversed(values.items()))
        begin = f"put several values in brackets: {key}: "
        if isinstance(first.value, Unreadable) and begin in (before := self.problems[-1].hint or ""):
            self.problems[-1] = replace(self.problems[-1], hint=f"{before[:-1]}, {item.value}]")
        else:
            advice = f"write `{item.value}: …`, or " if isinstance(item.value, str) else ""
            found = item.mark.problem(f"`{shorten(str(item.value))}` has no value")
            self.problems.append(replace(found, hint=f"{advice}{begin}[{first.plain()}, {item.value}]"))
        values[key] = YamlNode(Unreadable(), first.mark)

    def _duplicate(self, key: str, mark: Mark, first: Mark) -> None:
        before = f" (first on line {first.line})" if first.line else ""
        found = mark.problem(f"duplicate key `{key}`{before}", REMOVE_ONE)
        self.problems.append(replace(found, path=(key,)))

    def _grow(self, start: Any, size: int, child: YamlNode) -> int:
        if size + child.size > MAX_NODES:
            hint = "every use of an alias counts"
            self._stop(start, f"contains more than {format_count(MAX_NODES)} values", hint)
        return size + child.size

    def _scalar(self, event: Any) -> YamlNode:
        mark = self.mark(event.start_mark)
        name = event.tag.removeprefix(_TAG_PREFIX) if event.tag else ""
        is_text = name in ("!", "str") or (not event.tag and not event.implicit[0])
        if is_text:
            return YamlNode(event.value, mark)
        if event.tag and name not in SCALAR_TAGS:
            self._reject_tag(event)
            return YamlNode(Unreadable(), mark)
        try:
            value = _resolve_scalar(event.value)
        except ValueError as error:
            self.problems.append(mark.problem(str(error), "write a finite number, or put it in quotes"))
            return YamlNode(Unreadable(), mark)
        if event.tag and type(value) not in SCALAR_TAGS[name]:
            self.problems.append(
                mark.problem(f"`{event.value[:40]}` is not a valid `!!{name}`", "remove the tag")
            )
        return YamlNode(value, mark)

    def _reject_tag(self, event: Any) -> None:
        tag = event.tag.replace(_TAG_PREFIX, "!!")[:60]
        hint = "a job file holds plain data only: remove the tag"
        self.problems.append(self.mark(event.start_mark).problem(f"the tag `{tag}` is not allowed", hint))

    def _stop(self, event: Any, message: str, hint: str | None = None) -> None:
        raise SpecError(*self.problems[:MAX_PROBLEMS], self.mark(event.start_mark).problem(message, hint))


MAX_BYTES = 1_000_000
"""A job file has about a thousand bytes."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that YAML does not allow.  Source: https://yaml.org/spec/1.2.2/#51-character-set"""

MOST_FILES = 5
"""The most files of a directory that a message names."""
_WRITE_ONE = "`gpurun init` writes a job file to start from"


@dataclass(frozen=True)
class Source:
    """A job file and the mistakes found so far; knows where every key and value is."""

    file: str
    text: str
    """As it is in the file."""
    root: YamlNode = field(compare=False, repr=False)
    problems: tuple[Problem, ...] = ()

    def problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the value at `path`."""
        return replace(self.root.mark_of_value(path).problem(message, hint), path=path)

    def key_problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the key at the end of `path`."""
        return replace(self.root.mark_of_key(path).problem(message, hint), path=path)


def read_source(path: pathlib.Path) -> Source:
    """The file's tree.

    Raises:
        SpecError: it can't be read, or is no YAML document.
    """
    return parse_source(_read_bytes(path), str(path))


def parse_source(content: bytes, file: str) -> Source:
    """Like `read_source`, for bytes."""
    if len(content) > MAX_BYTES:
        raise SpecError(
            Problem(f"larger than {format_count(MAX_BYTES)} bytes: this can't be a job file", file=file)
        )
    text = _decode(content, file)
    root, problems = compose(text, file)
    if root.value is None and not problems:
        hint = _WRITE_ONE
        raise SpecError(Problem("the file is empty", hint, file))
    return Source(file, content.decode(), root, tuple(problems))


def override_source(source: Source, overrides: tuple[str, ...]) -> Source:
    """The source with every `key.path=value` put in its place; null removes the key.

    An override that has no `=`, is no YAML, or leads through something that is no mapping becomes one of the
    source's problems.
    """
    for override in overrides:
        try:
            source = _override(source, override)
        except SpecError as error:
            source = replace(source, problems=(*source.problems, *error.problems))
    return source


def _override(source: Source, override: str) -> Source:
    key, equals, text = override.partition("=")
    key = key.strip()
    option = Mark(f"--set {key}")
    if not equals or not all(key.split(".")):
        raise SpecError(
            Problem("expected key.path=value", "for example --set steps.rounds=7", f"--set {override}")
        )
    value, problems = _override_value(text, option)
    path = tuple(key.split("."))
    is_null = value.value is None and "params" not in path[:-1]  # an argument may be null
    if is_null and (root := source.root.without(path)) is not source.root and not problems:
        return replace(source, root=root)
    root = _put(source.root, path, value, option)
    if root.size > MAX_NODES:
        raise SpecError(option.problem(f"the job now contains more than {format_count(MAX_NODES)} values"))
    return Source(source.file, source.text, root, (*source.problems, *problems))


def _override_value(text: str, option: Mark) -> tuple[YamlNode, Sequence[Problem]]:
    try:
        _check_characters(text, option.file)
        return compose(text, option.file, has_lines=False)
    except SpecError as error:
        return YamlNode(Unreadable(), option), error.problems


def _put(node: YamlNode, steps: tuple[str, ...], value: YamlNode, option: Mark) -> YamlNode:
    if not steps:
        return value
    step = _step(node, steps[0], option)
    child = node.child(step) or YamlNode({}, option)
    return node.with_child(step, _put(child, steps[1:], value, option))


def _step(node: YamlNode, text: str, option: Mark) -> str | int:
    if isinstance(node.value, dict):
        return text
    if not isinstance(node.value, tuple):
        raise SpecError(option.problem(f"can't set `{text}`: the value that contains it is not a mapping"))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < len(node.value)):
        raise SpecError(
            option.problem(
                f"`{text}` is not an index into a list of length {len(node.value)} (indices start at 0)"
            )
        )
    return int(text)


def _read_bytes(path: pathlib.Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError(Problem("there is no such file", _near_files(path), str(path))) from error
    except IsADirectoryError as error:
        raise SpecError(Problem("this is a directory, not a job file", _files_in(path), str(path))) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(Problem(f"can't be read: {reason}", file=ascii(str(path))[1:-1])) from error


def _near_files(path: pathlib.Path) -> str:
    import difflib

    files = {name.lower(): name for name in _job_files(path.parent)}
    near = difflib.get_close_matches(path.name.lower(), files, n=1, cutoff=0.75)
    if near:
        return f"did you mean {path.with_name(files[near[0]])}?"
    if (pathlib.Path(gpurun.__file__).parent / "examples" / path.name).is_file():
        return f"to copy gpurun's own: gpurun examples {path.name} --copy {path.parent}"
    return _WRITE_ONE


def _files_in(directory: pathlib.Path) -> str:
    files = _job_files(directory)
    return f"it holds {first_of(files, MOST_FILES)}" if files else _WRITE_ONE


def _job_files(directory: pathlib.Path) -> list[str]:
    try:
        return sorted(file.name for file in directory.iterdir() if file.suffix in {".yaml", ".yml"})
    except OSError:
        return []


def _decode(content: bytes, file: str) -> str:
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8")
        message = f"not UTF-8: a stray byte 0x{content[error.start]:02x}"
        raise SpecError(_at_end_of(before, file).problem(message, "save the file as UTF-8")) from error
    _check_characters(text, file)
    return text


def _check_characters(text: str, file: str) -> None:
    found = _CONTROL.search(text)
    if found:
        message = f"the control character U+{ord(found[0]):04X} is not allowed in YAML"
        raise SpecError(_at_end_of(text[: found.start()], file).problem(message, "delete it"))


def _at_end_of(text: str, file: str) -> Mark:
    return Mark(file, text.count("\n") + 1, len(text) - text.rfind("\n"))
