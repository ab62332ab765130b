"""Sections of a job file: frozen dataclasses whose annotations say what each key takes.

A kind of value says how it is read, and how the schema describes it.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.kinds import EVERY_KIND, WORKLOADS, JobKind
from gpurun.launcher.jobfile.yaml.describe import (
    any_of,
    correction,
    describe,
    did_you_mean,
    flow_text,
    shorten,
)
from gpurun.launcher.jobfile.yaml.tree import Path, Source
from gpurun.launcher.strategies import Strategy


class InvalidValue(Exception):
    """A mistake in a value, with a message for a person to read.

    Args:
        message: in full, but for the key's name.
        hint: what to do about it.
        at: which item of the value it is.
    """

    def __init__(self, message: str, hint: str | None = None, at: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.at = at


@dataclass(frozen=True, eq=False)
class ValueKind:
    """The rule for values of a key that holds no keys of its own."""

    parse: Callable[[Any], Any]
    """Converts the value in the YAML to that of a `JobSpec`; raises `InvalidValue`."""
    schema: Mapping[str, Any]
    """The rule as JSON Schema."""


@dataclass(frozen=True, eq=False)
class ListOf:
    """A list with at least one item, each of which is judged by itself."""

    item: ValueKind
    check: Callable[[list[Any]], None] | None = None
    """Finds what is wrong with the list as a whole; raises `InvalidValue`."""
    most: int | None = 100

    @property
    def schema(self) -> Mapping[str, Any]:
        limit = {} if self.most is None else {"maxItems": self.most}
        return {"type": "array", "items": self.item.schema, "minItems": 1, **limit}


def expected(what: str, value: Any, hint: str | None = None, at: int | None = None) -> InvalidValue:
    """The mistake of a value that is something else than expected."""
    return InvalidValue(f"expected {what}, got {describe(value)}", hint or correction(value), at)


def whole(least: int, most: int | None = None, *, below: int | None = None) -> ValueKind:
    """Whole numbers in a range; none of them is a float, a text or a truth value."""

    def parse(value: Any) -> int:
        if type(value) is not int:
            raise expected("a whole number", value, correction(value, int))
        if value < least:
            raise expected(f"a whole number of at least {least}", value)
        if most is not None and value > most:
            raise expected(f"a whole number of at most {most}", value)
        if below is not None and value >= below:
            raise expected(f"a number below {below}", value)
        return value

    limits = {"minimum": least, "maximum": most, "exclusiveMaximum": below}
    stated = {key: limit for key, limit in limits.items() if limit is not None}
    return ValueKind(parse, {"type": "integer", **stated})


def number_of(*choices: int) -> ValueKind:
    """One of these whole numbers."""

    def parse(value: Any) -> int:
        if type(value) is int and value in choices:
            return value
        raise expected(any_of([str(choice) for choice in choices]), value)

    return ValueKind(parse, {"type": "integer", "enum": list(choices)})


def by_other_names(**others: str) -> dict[str, str]:
    """The name of each of the other names: `by_other_names(fp64="float64 double")`."""
    return {other: name for name, listed in others.items() for other in listed.split()}


def one_of(
    choices: Sequence[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> ValueKind:
    """One of these words.

    Args:
        choices: the words.
        elsewhere: the word for what others call by another name.
        remedies: what to do instead, for words that look like a choice and are none.
    """

    def parse(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        hint = None
        if isinstance(value, str | int) and not isinstance(value, bool):
            word = str(value).lower()
            begun = [other for other in elsewhere if len(word) > 2 and other.startswith(word)]
            meant = elsewhere.get(word, elsewhere[begun[0]] if begun else word)
            hint = remedies.get(word) or did_you_mean(meant, choices)
        raise expected(any_of(choices), value, hint)

    return ValueKind(parse, {"type": "string", "enum": list(choices)})


def _parse_truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise expected("true or false", value, correction(value, bool))


TRUTH = ValueKind(_parse_truth, {"type": "boolean"})


def check_mapping(value: Any) -> dict[str, Any]:
    """The value itself, if it is a mapping; its keys are texts then, as those of all mappings here."""
    if isinstance(value, dict):
        return value
    raise expected("a mapping (`key: value`)", value, _as_mapping(value))


def _as_mapping(value: Any) -> str | None:
    """How to write what was meant to be a mapping."""
    if value is None:
        return "indent what belongs to it, or leave the key out"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        given = {key: [item[key] for item in value if key in item] for each in value for key in each}
        one_each = {key: values if len(values) > 1 else values[0] for key, values in given.items()}
        return f"write {shorten(flow_text(one_each))}"
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        return f"write {shorten(flow_text({value[0]: value[1]}))}"
    if isinstance(value, str) and (assigned := _ASSIGNED.fullmatch(value)):
        return f"write {{{assigned[1]}: {assigned[2]}}}"
    return None


_ASSIGNED = re.compile(r"(\w{1,40})(?: ?[=:] ?| )([\w.+-]{1,40})")
"""`layers=2`, as other tools have it, or without a colon."""


MAPPING = ValueKind(check_mapping, {"type": "object", "additionalProperties": True})


@dataclass(frozen=True)
class Key:
    """A key of the file and the field that its value becomes."""

    field: str
    """The key's name; with `_s` where the file has a duration and the spec its seconds, and `_bytes` where it
    has a size."""
    kind: "ValueKind | ListOf | type[Section]"
    may_be_empty: bool
    """Whether it may be without a value, which then is `None`."""


@dataclass(frozen=True)
class Shape:
    """How values of a shape are merged, and how they are shown."""

    merge: Callable[[Any, Any], Any]
    """A variant's value, of the job's own and the one under `compare`."""
    id_words: Callable[[str, Any], list[str]]
    """The part of an id for a value: `["seed-1"]`."""
    matches: Callable[[Any, Any, Any], bool] = lambda value, varied, wanted: bool(value == wanted)
    """Whether a variant's value, of which `varied` is the part under `compare`, is the one of `baseline`."""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _has_items(value: Mapping[str, Any], varied: Any, wanted: Mapping[str, Any]) -> bool:
    return all(key in value and value[key] == item for key, item in wanted.items())


VALUE = Shape(lambda own, varied: varied, lambda key, value: [f"{key}-{_word(value)}"])
"""A value under `compare` replaces that at the top."""
ITEMS = Shape(
    lambda own, varied: {**own, **varied},
    lambda key, value: [f"{name.lstrip('+')}-{_word(item)}" for name, item in value.items()],
    matches=_has_items,
)
"""A mapping under `compare` is merged into that at the top. Ids have its items: `width-64`."""
NESTED = Shape(
    lambda own, varied: {**own, **{name: {**own.get(name, {}), **items} for name, items in varied.items()}},
    lambda key, value: [
        word for name, items in value.items() for word in (name, *ITEMS.id_words(name, items))
    ],
    matches=lambda value, varied, wanted: all(
        name in value and _has_items(value[name], varied, items) for name, items in wanted.items()
    ),
)
"""Mappings by name: each of them is merged like `ITEMS`. Ids have names and items:
`DataLoader-num_workers-2`."""
WORDS = Shape(
    lambda own, varied: (*own, *varied),
    lambda key, value: [word for argument in value if (word := str(argument).strip("-"))],
    matches=lambda value, varied, wanted: wanted in (varied, value),
)
"""A list under `compare` is appended to that at the top. Ids have its words: `batch-64` of `--batch 64`."""


@dataclass(frozen=True)
class Setting:
    """The properties of one setting."""

    about: str = ""
    """The description at the top of a job, where the docstring beneath the field is not all of it."""
    compare: str = ""
    """The description under `compare`; empty where the setting can't vary."""
    baseline: str = ""
    """Its description under `baseline`, where that says more than its name does. In `SETTINGS` all that can
    name a baseline have one: those that may vary, but for tasks."""
    kinds: frozenset[JobKind] = WORKLOADS
    """Kinds of job that have it."""
    varies_for: frozenset[JobKind] = EVERY_KIND
    """Kinds of job that may compare values of it, of those that have it."""
    instead: str = "a program sets this itself: vary `args`, `env` or `device_count`"
    """The advice in a job of a kind that doesn't have it."""
    optional_for: frozenset[JobKind] = frozenset()
    """Kinds of job that have it only where the job gives it a value."""
    for_training: bool = False
    """Whether it says how training steps are made, so that a micro-benchmark refuses it."""
    strategies: Callable[[Strategy], bool] = lambda strategy: True
    """Which strategies have it."""
    matters: Callable[[Any], bool] | None = None
    """Whether it means anything next to the values that a combination or a variant has for other settings;
    `None`: it always does."""
    needs: str = ""
    """The other settings that it needs to have a meaning, in a few words."""
    absent: Any = None
    """A variant's value where it means nothing to its kind of job, its strategy or next to other settings."""
    shares_processes: bool = False
    """Whether variants that differ in it can run in the same processes, where their rounds are paired."""
    takes_turns: bool = False
    """Whether variants that differ in it can take turns in the same processes, each with its own model."""
    needs_processes: bool = False
    """Whether ranks have it from their start, so that those which run can't try another value of it."""
    builds_model: bool = False
    """Whether a workload's `build`, or what follows until the strategy wraps the model, may depend on it."""
    same_work: bool = False
    """Whether steps that differ in it do the same work, so that `gpurun diff` may compare them."""
    is_task: bool = False
    """Whether variants that differ in it do different tasks, so that none is called faster than the other."""
    is_resolved: bool = False
    """Whether a variant's result knows it better than the job: the samples of a split, a default batch."""
    decides: bool = True
    """Whether it can decide that a combination is impossible."""
    names_variant: bool = False
    """Whether every id and label begins with it, so that it isn't repeated there where it varies."""
    has_column: bool = False
    """Whether it has a column in TensorBoard's table of hyperparameters even where it doesn't vary."""
    option: bool = False
    """Whether the worker's strategy takes it, as a keyword argument of this name."""
    shape: Shape = VALUE
    rule: Any = None
    """The `ValueKind` of one value, which `SETTINGS` has from the annotation of the field."""
    compared: ValueKind | None = None
    """The rule for one item under `compare`, where that is not the same as at the top."""
    check_list: Callable[[list[Any]], None] | None = None
    """Finds what is wrong with a list under `compare` as a whole; raises `InvalidValue`."""
    named: ValueKind | None = None
    """The rule of `baseline`, where that is not the same as at the top."""


def setting(default: Any, **says: Any) -> Any:
    """A field of `Settings`: the value where the job gives none, and the fields of its `Setting`."""
    metadata = {"setting": Setting(**says)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """The whole job, or a key of it that holds keys of its own. Every field of a subclass is a key."""

    keys: ClassVar[Mapping[str, Key]]
    """The settings by their names in the file, in the order of the fields."""
    shorthand: ClassVar[tuple[str, ...]] = ()
    """The keys of which one is meant where the file has a value in place of the section."""
    stated: frozenset[str] = frozenset()
    """Keys that the job states; the fields of the others have their defaults."""
    source: Source | None = field(default=None, compare=False, repr=False)
    """The job file that the whole job comes from; knows where everything is."""

    def __init_subclass__(cls, derived: Mapping[str, tuple[Any, Any]] = MappingProxyType({})) -> None:
        """Finds the keys of the class, of its bases and `derived`, before `dataclass` reads its fields.

        `derived`: annotations and defaults of keys of which another class already says what they take.
        """
        for name, (_, default) in derived.items():
            setattr(cls, name, default)
        cls.__annotations__ |= {name: annotation for name, (annotation, _) in derived.items()}
        cls.keys = keys_of(cls)

    def problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the value at `path`, with its place in the file."""
        return self.source.problem(path, message, hint) if self.source else Problem(message, hint)

    def key_problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the key at the end of `path`, with its place in the file."""
        return self.source.key_problem(path, message, hint) if self.source else Problem(message, hint)


def keys_of(cls: type) -> dict[str, Key]:
    """The keys that the fields of a class and of its bases are, by their names in the file."""
    annotations = {
        name: annotation
        for part in reversed(cls.__mro__)
        if part not in (Section, object)
        for name, annotation in inspect.get_annotations(part).items()
    }
    return {
        name.removesuffix("_s").removesuffix("_bytes"): key_of(name, kind)
        for name, kind in annotations.items()
    }


def key_of(name: str, annotation: Any) -> Key:
    """The key that a field with this annotation is."""
    choices = get_args(annotation)
    may_be_empty = type(None) in choices
    return Key(name, _kind(choices[0] if may_be_empty else annotation), may_be_empty)


def _kind(annotation: Any) -> "ValueKind | ListOf | type[Section]":
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind: ValueKind | ListOf = parts[1]
        return kind
    if origin is Literal:
        return one_of(parts)
    if origin is tuple:
        item = _kind(parts[0])
        assert isinstance(item, ValueKind), "lists hold no sections"
        return ListOf(item)
    if annotation is bool:
        return TRUTH
    section: type[Section] = annotation
    return section


def plain(section: Section, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The section with its defaults as plain data, as it could be in a file.

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
