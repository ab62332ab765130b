"""Sections of a job file: frozen dataclasses whose annotations say what each key takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.field_types import TRUTH, Kind, Several, words
from gpurun.launcher.jobfile.yaml.source import Source
from gpurun.launcher.jobfile.yaml.tree import Path


@dataclass(frozen=True)
class Key:
    """A key of the file and the field that its value becomes."""

    field: str
    """The key's name; with `_s` where the file has a duration and the spec its seconds."""
    kind: "Kind | Several | type[Section]"
    may_be_empty: bool
    """Whether it may stand without a value, which then is `None`."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The whole job, or a key of it that holds keys of its own. Every field of a subclass is a key."""

    keys: ClassVar[Mapping[str, Key]]
    """By their names in the file, in the order of the fields."""
    stated: frozenset[str] = frozenset()
    """Keys that the job states; the fields of the others have their defaults."""
    source: Source | None = field(default=None, compare=False, repr=False)
    """The job file that the whole job comes from; knows where everything stands."""

    def __init_subclass__(cls) -> None:
        cls.keys = {name.removesuffix("_s"): _key(name, kind) for name, kind in cls.__annotations__.items()}

    def problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the value at `path`, with its place in the file."""
        return self.source.problem(path, message, hint) if self.source else Problem(message, hint)

    def key_problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the key at the end of `path`, with its place in the file."""
        return self.source.key_problem(path, message, hint) if self.source else Problem(message, hint)


def _key(name: str, annotation: Any) -> Key:
    choices = get_args(annotation)
    may_be_empty = type(None) in choices
    return Key(name, _kind(choices[0] if may_be_empty else annotation), may_be_empty)


def _kind(annotation: Any) -> "Kind | Several | type[Section]":
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind: Kind | Several = parts[1]
        return kind
    if origin is Literal:
        return words(parts)
    if origin is tuple:
        item = _kind(parts[0])
        assert isinstance(item, Kind), "lists hold no sections"
        return Several(item)
    if annotation is bool:
        return TRUTH
    section: type[Section] = annotation
    return section


def plain(section: Section, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The section with its defaults as plain data, as it could stand in a file.

    Args:
        without: keys that are left out, as are all that have no value.
    """
    values = {name: getattr(section, key.field) for name, key in section.keys.items()}
    return {
        name: _plain(value) for name, value in values.items() if value is not None and name not in without
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return plain(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
