"""YAML text as a tree that remembers where everything is.

PyYAML's own constructors are not used: its events come one at a time however deep the text nests, so that
depth, size and tags are judged before anything is built, and nothing but plain data can ever come out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.yaml.describe import describe, shorten
from gpurun.launcher.jobfile.yaml.scalars import SCALAR_TAGS, Scalar, resolve_scalar
from gpurun.launcher.jobfile.yaml.slips import (
    MAX_DEPTH,
    TOO_DEEP,
    Slip,
    explained,
    lines_without_colon,
    no_colon,
    slips_in,
)
from gpurun.launcher.units import format_count

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

_ASSIGNED = re.compile(r"(\w{1,40}) *= *(\S{1,40})")
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
            slips = slips_in(error, repaired) if has_lines else []
            if not slips:
                raise SpecError(*found, *composer.unreadable(error)) from error
        except SpecError as error:
            raise SpecError(*found, *error.problems) from error
        found += [composer.slip(each) for each in slips]
        repaired = _with_lines(repaired, {at: line for each in slips for at, line in each.lines.items()})
    raise SpecError(*found)


def _slips_of_text(root: YamlNode, text: str) -> list[Slip]:
    """The lines of a document in which no key has a colon."""
    lines = text.splitlines()
    return lines_without_colon(lines, range(len(lines))) if isinstance(root.value, str) else []


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

    def slip(self, slip: Slip) -> Problem:
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
        if assigned := _ASSIGNED.fullmatch(str(item.value)):
            key, value = assigned.groups()
            self.problems.append(item.mark.problem(*no_colon(key, value)))
            return key, YamlNode(resolve_scalar(value), item.mark)
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
            value = resolve_scalar(event.value)
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
