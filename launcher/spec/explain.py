"""pydantic's errors in plain English, at the place in the file where they belong."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.errors import Problem
from launcher.spec.describe import describe, did_you_mean, shorten
from launcher.spec.model import SECTIONS, JobSpec, keys_of
from launcher.spec.source import Source
from launcher.spec.tree import Unreadable

_EXPECTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "bool_type": lambda _: "true or false",
    "string_type": lambda _: "text",
    "literal_error": lambda ctx: str(ctx["expected"]).replace("'", "`"),
    "greater_than_equal": lambda ctx: f"a number that is {ctx['ge']} or more",
    "less_than_equal": lambda ctx: f"a number that is {ctx['le']} or less",
    "less_than": lambda ctx: f"a number below {ctx['lt']}",
    "tuple_type": lambda _: "a list",
    "dict_type": lambda _: "a mapping (`key: value`)",
    "model_type": lambda _: "a mapping (`key: value`)",
    "too_long": lambda ctx: f"at most {ctx['max_length']} values",
    "too_short": lambda _: "at least one value",
}
"""What was expected, by pydantic's name of the error."""


def explain(error: ValidationError, source: Source, most: int) -> tuple[list[Problem], int]:
    """The mistakes that `error` holds, `most` at the most, and how many more there are.

    Those that `source` has reported already are left out. Explaining takes a while (near misses are looked
    for), so that a file of thousands of wrong keys must not be explained in full.
    """
    details = [item for item in error.errors(include_url=False) if not _is_noise(item, source)]
    return [_explain(detail, source) for detail in details[:most]], max(0, len(details) - most)


def _is_noise(detail: ErrorDetails, source: Source) -> bool:
    value = detail["input"]
    if isinstance(value, Unreadable):
        return detail["type"] != "extra_forbidden"  # the key is wrong as well
    return detail["type"] == "too_short" and bool(value)  # the items are wrong, and are reported themselves


def _explain(detail: ErrorDetails, source: Source) -> Problem:
    path = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return source.key_problem(path, *_unknown_key(path))
    context = detail.get("ctx", {})
    if detail["type"] == "job":
        inner = path if context["at"] is None else (*path, context["at"])
        return source.problem(inner, f"`{_dotted(path)}`: {context['message']}", context["hint"])
    expected = _EXPECTED[detail["type"]](context) if detail["type"] in _EXPECTED else detail["msg"]
    message = f"`{_dotted(path)}`: expected {expected}, got {describe(detail['input'])}"
    return source.problem(path, message, _hint(detail))


def _dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(step) for step in path if isinstance(step, str))


def _unknown_key(path: tuple[str | int, ...]) -> tuple[str, str | None]:
    key = str(path[-1])
    known = keys_of(SECTIONS.get(str(path[0]), JobSpec) if len(path) > 1 else JobSpec)
    hint = did_you_mean(key, known) or _elsewhere(key) or f"the keys here are {', '.join(known)}"
    inside = f" under `{path[0]}`" if len(path) > 1 else ""
    return f"unknown key `{shorten(key)}`{inside}", hint


def _elsewhere(key: str) -> str | None:
    homes: list[tuple[str, type[BaseModel]]] = [("at the top", JobSpec)]
    homes += [(f"under `{name}`", SECTIONS[name]) for name in ("steps", "profile")]
    home = next((place for place, model in homes if key in keys_of(model)), None)
    return f"`{key}` belongs {home}" if home else None


def _hint(detail: ErrorDetails) -> str | None:
    value, kind = detail["input"], detail["type"]
    if kind == "tuple_type" and not isinstance(value, dict):
        return f"put what varies in brackets: [{shorten(str(value))}]" if value is not None else None
    if kind in ("dict_type", "model_type") and value is None:
        return "leave the key out, or write {}"
    if kind == "int_type" and isinstance(value, str) and value.lstrip("+-").isdecimal():
        return "write it without quotes"
    if kind == "literal_error" and isinstance(value, str):
        words = [word.strip("' ") for word in detail["ctx"]["expected"].replace(" or ", ",").split(",")]
        return did_you_mean(value, words)
    return None
