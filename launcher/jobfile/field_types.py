"""Kinds of values: each says how a value is read, and how the schema describes it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gpurun.launcher.jobfile.yaml.describe import (
    any_of,
    correction,
    describe,
    did_you_mean,
    flow_text,
    shorten,
)


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
