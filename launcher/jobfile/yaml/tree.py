"""YAML text as a tree that remembers where everything is.

PyYAML's own constructors are not used: its events come one at a time however deep the text nests, so that
depth, size and tags are judged before anything is built, and nothing but plain data can ever come out.

A plain scalar has its meaning by YAML 1.2's core schema. PyYAML implements YAML 1.1, where `3:1` is the
number 181, `no` is false and `1e-3` is text: all three would turn a job file into something that its author
did not write.

Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.yaml.describe import describe
from gpurun.launcher.units import format_count

MAX_DEPTH = 50
"""A job needs 4 levels; recursion over a tree this deep is safe."""
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep", "a job needs about 4 levels"

MAX_NODES = 10_000
"""Values in the file once all aliases are written out. A job has about 50; this many wrong ones are still
refused within a second."""

MAX_PROBLEMS = 30
"""Mistakes that are shown; more of them have one cause."""

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the file to a value."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TAGS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "null": (type(None),),
}

REMOVE_ONE = "remove one of them"


Scalar = str | int | float | bool | None

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
class Node:
    """A scalar, a tuple of nodes or a mapping of nodes. An alias shares its target's node."""

    value: Any
    mark: Mark
    key_marks: Mapping[str, Mark] = field(default_factory=dict)
    """Where each key of a mapping is."""

    def __post_init__(self) -> None:
        children = self.children()
        object.__setattr__(self, "size", 1 + sum(child.size for child in children))
        object.__setattr__(self, "height", 1 + max((child.height for child in children), default=0))

    size: int = field(init=False)
    """Values below and including this one, with every alias written out."""
    height: int = field(init=False)

    def children(self) -> tuple["Node", ...]:
        if isinstance(self.value, dict):
            return tuple(self.value.values())
        return self.value if isinstance(self.value, tuple) else ()

    def child(self, step: str | int) -> "Node | None":
        found: Node | None = None
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

    def mark_of_value(self, path: Path) -> Mark:
        """Where the value is; if it is missing, where the innermost mapping around it begins."""
        node = self
        for step in path:
            child = node.child(step)
            if child is None:
                break
            node = child
        return node.mark

    def mark_of_key(self, path: Path) -> Mark:
        """Where the last key of `path` is; for a list item, where the item is."""
        node = self
        for step in path[:-1]:
            child = node.child(step)
            if child is None:
                return node.mark
            node = child
        return node.key_marks.get(str(path[-1])) or self.mark_of_value(path)

    def with_child(self, step: str | int, child: "Node") -> "Node":
        """A copy in which `step` leads to `child`."""
        if isinstance(self.value, tuple):
            items = list(self.value)
            items[int(step)] = child
            return replace(self, value=tuple(items))
        value = {**self.value, step: child}
        return replace(self, value=value, key_marks={**self.key_marks, str(step): child.mark})


def compose(text: str, file: str, *, has_lines: bool = True) -> tuple[Node, list[Problem]]:
    """The tree of a document, with the mistakes that don't keep the rest from being read.

    Args:
        text: YAML without control characters.
        file: name for messages.
        has_lines: False for the value of a command-line option, where lines and columns mean nothing.

    Raises:
        SpecError: the text is not YAML, or nests or expands beyond the limits.
    """
    composer = _Composer(text, file, has_lines)
    try:
        return composer.document(), composer.problems
    except yaml.YAMLError as error:
        raise SpecError(*composer.problems[:MAX_PROBLEMS], _syntax_problem(error, text, composer)) from error


class _Composer:
    """Reads one stream of events; mistakes that allow to go on are collected in `problems`."""

    def __init__(self, text: str, file: str, has_lines: bool) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=_LOADER)
        self._file = file
        self._has_lines = has_lines
        self._anchors: dict[str, Node | None] = {}
        self.problems: list[Problem] = []

    def mark(self, mark: Any) -> Mark:
        if not self._has_lines or mark is None:
            return Mark(self._file)
        return Mark(self._file, mark.line + 1, mark.column + 1)

    def document(self) -> Node:
        root = Node(None, self.mark(None))
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    hint = "a job file holds one job: delete `---`"
                    self._stop(event, "a second document begins here", hint)
                root = self._node(next(self._events), depth=1)
        return root

    def _node(self, event: Any, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._stop(event, *_TOO_DEEP)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # until it is complete: it can't contain itself
        node = self._build(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _build(self, event: Any, depth: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", _TAG_PREFIX + ("map" if is_mapping else "seq")):
            self._reject_tag(event)
        node = self._mapping(event, depth) if is_mapping else self._sequence(event, depth)
        if node.height > MAX_DEPTH:
            self._stop(event, f"aliases nest more than {MAX_DEPTH} levels deep")
        return node

    def _alias(self, event: Any) -> Node:
        target = self._anchors.get(event.anchor)
        if target is not None:
            return target
        reason = "refers to itself" if event.anchor in self._anchors else "has no anchor above it"
        self.problems.append(self.mark(event.start_mark).problem(f"the alias `*{event.anchor}` {reason}"))
        return Node(Unreadable(), self.mark(event.start_mark))

    def _sequence(self, start: Any, depth: int) -> Node:
        items: list[Node] = []
        size = 0
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, depth + 1))
            size = self._grow(start, size, items[-1])
        return Node(tuple(items), self.mark(start.start_mark))

    def _mapping(self, start: Any, depth: int) -> Node:
        values: dict[str, Node] = {}
        marks: dict[str, Mark] = {}
        size = 0
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key_mark = self.mark(event.start_mark)
            key_node = self._node(event, depth + 1)
            key = self._key(key_node, key_mark)
            value = self._node(next(self._events), depth + 1)
            size = self._grow(start, size, value)
            if key is None and value.value is None and values:
                self._forgotten_brackets(values, key_node)
            if key in marks:
                self._duplicate(key, key_mark, marks[key])
            elif key is not None:
                values[key], marks[key] = value, key_mark
        return Node(values, self.mark(start.start_mark), marks)

    def _key(self, node: Node, mark: Mark) -> str | None:
        if isinstance(node.value, str):
            return node.value
        if not isinstance(node.value, Unreadable):
            hint = None if isinstance(node.value, dict | tuple) else "put it in quotes if you mean text"
            self.problems.append(mark.problem(f"a key must be text, not {describe(node.value)}", hint))
        return None

    def _forgotten_brackets(self, values: dict[str, Node], item: Node) -> None:
        """Explains the key that is none in `{global_batch: 32, 64}`: the next value of the key before it."""
        key, first = list(values.items())[-1]
        if not isinstance(item.value, int | float) or isinstance(first.value, dict):
            return
        found, begin = self.problems.pop(), f"put several values in brackets: {key}: "
        if isinstance(first.value, Unreadable) and (before := self.problems[-1].hint or "").startswith(begin):
            self.problems[-1] = replace(self.problems[-1], hint=f"{before[:-1]}, {item.value}]")
        else:
            self.problems.append(replace(found, hint=f"{begin}[{first.plain()}, {item.value}]"))
        values[key] = Node(Unreadable(), first.mark)

    def _duplicate(self, key: str, mark: Mark, first: Mark) -> None:
        before = f" (first on line {first.line})" if first.line else ""
        found = mark.problem(f"duplicate key `{key}`{before}", REMOVE_ONE)
        self.problems.append(replace(found, path=(key,)))

    def _grow(self, start: Any, size: int, child: Node) -> int:
        if size + child.size > MAX_NODES:
            hint = "every use of an alias counts"
            self._stop(start, f"contains more than {format_count(MAX_NODES)} values", hint)
        return size + child.size

    def _scalar(self, event: Any) -> Node:
        mark = self.mark(event.start_mark)
        name = event.tag.removeprefix(_TAG_PREFIX) if event.tag else ""
        is_text = name in ("!", "str") or (not event.tag and not event.implicit[0])
        if is_text:
            return Node(event.value, mark)
        if event.tag and name not in _SCALAR_TAGS:
            self._reject_tag(event)
            return Node(Unreadable(), mark)
        try:
            value = resolve_scalar(event.value)
        except ValueError as error:
            self.problems.append(mark.problem(str(error), "write a finite number, or put it in quotes"))
            return Node(Unreadable(), mark)
        if event.tag and type(value) not in _SCALAR_TAGS[name]:
            self.problems.append(
                mark.problem(f"`{event.value[:40]}` is not a valid `!!{name}`", "remove the tag")
            )
        return Node(value, mark)

    def _reject_tag(self, event: Any) -> None:
        tag = event.tag.replace(_TAG_PREFIX, "!!")[:60]
        hint = "a job file holds plain data only: remove the tag"
        self.problems.append(self.mark(event.start_mark).problem(f"the tag `{tag}` is not allowed", hint))

    def _stop(self, event: Any, message: str, hint: str | None = None) -> None:
        raise SpecError(*self.problems[:MAX_PROBLEMS], self.mark(event.start_mark).problem(message, hint))


def _syntax_problem(error: yaml.YAMLError, text: str, composer: _Composer) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError):
        return composer.mark(None).problem(f"invalid YAML: {error}")
    mark = error.problem_mark or error.context_mark
    if "nesting depth" in str(error.problem):  # libyaml's own limit of 1,000: it reads ahead of its events
        return composer.mark(mark).problem(*_TOO_DEEP)
    context = f" ({error.context})" if error.context and error.problem else ""
    message = f"invalid YAML: {error.problem or error.context}{context}"
    begun = composer.mark(error.context_mark).line
    return composer.mark(mark).problem(message, _syntax_hint(str(error.problem), mark, text, begun))


_SYNTAX_HINTS = {
    "',' or ']'": "close the `[`{begun}",
    "',' or '}'": "close the `{{`{begun}",
    "unexpected end of stream": "close the quote{begun}",
    "node content": "check the brackets and commas",
    "cannot start any token": "put the value in quotes",
    "expected key": "check the indentation and the quotes",
    "'-' indicator": "check the indentation",
    "expected ':'": "write `key: value`",
    "mapping values": "check indentation and the `: ` after each key; a value with `: ` in it needs quotes",
}
"""The advice, by a part of libyaml's message."""


def _syntax_hint(problem: str, mark: Any, text: str, begun: int | None) -> str | None:
    """The advice about a mistake at `mark`; what it's in began in line `begun`."""
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1 if mark else 0]:
        return "indent YAML with spaces, not tabs"
    hint = next((hint for part, hint in _SYNTAX_HINTS.items() if part in problem), None)
    return hint and hint.format(begun=f" of line {begun}" if begun else "")


def resolve_scalar(text: str) -> Scalar:
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
