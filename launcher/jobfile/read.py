"""The data of a job file in, a `JobSpec` out, with everything that is wrong with the data."""

from dataclasses import dataclass
from typing import Any, TypeVar

from gpurun.launcher.jobfile.field_types import Kind, Several, Wrong, check_mapping, expected
from gpurun.launcher.jobfile.section import Key, Section
from gpurun.launcher.jobfile.yaml.describe import shorten
from gpurun.launcher.jobfile.yaml.tree import Path, Unreadable

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class WrongValue:
    """A value that its key doesn't take."""

    path: Path
    message: str
    """Empty where the text's own mistake was told already."""
    hint: str | None = None


@dataclass(frozen=True)
class UnknownKey:
    """A key that isn't one."""

    path: Path


Mistake = WrongValue | UnknownKey


def read_section(model: type[S], given: dict[str, Any], path: Path, mistakes: list[Mistake]) -> S:
    """The section that stands at `path`; what is wrong with it joins `mistakes`, in the order of the fields.

    A wrong value counts as if it were not there; an item of a list leaves a `None` in its place.
    """
    keys = model.keys
    values: dict[str, Any] = {}
    for name, key in keys.items():
        if name in given:
            try:
                values[key.field] = _value(key, given[name], (*path, name), mistakes)
            except Wrong as wrong:
                mistakes.append(_wrong_value((*path, name), wrong))
    mistakes += [UnknownKey((*path, name)) for name in given if name not in keys]
    stated = frozenset(name for name, key in keys.items() if key.field in values)
    return model(stated=stated, **values)


def _value(key: Key, value: Any, path: Path, mistakes: list[Mistake]) -> Any:
    if value is None and key.may_be_empty:
        return None
    _refuse_unreadable(value)
    if isinstance(key.kind, Kind):
        return key.kind.parse(value)
    if isinstance(key.kind, Several):
        return _several(key.kind, value, path, mistakes)
    return read_section(key.kind, check_mapping(value), path, mistakes)


def _several(kind: Several, value: Any, path: Path, mistakes: list[Mistake]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        is_one = value is not None and not isinstance(value, dict)
        hint = f"put what varies in brackets: [{shorten(str(value))}]" if is_one else None
        raise expected("a list", value, hint)
    if kind.check is not None:
        kind.check(value)
    if not value:
        raise expected("at least one value", value)
    if kind.most is not None and len(value) > kind.most:
        raise expected(f"at most {kind.most} values", value)
    return tuple(_item(kind.item, item, (*path, at), mistakes) for at, item in enumerate(value))


def _item(kind: Kind, item: Any, path: Path, mistakes: list[Mistake]) -> Any:
    try:
        _refuse_unreadable(item)
        return kind.parse(item)
    except Wrong as wrong:
        mistakes.append(_wrong_value(path, wrong))
        return None


def _refuse_unreadable(value: Any) -> None:
    if isinstance(value, Unreadable):
        raise Wrong("")


def _wrong_value(path: Path, wrong: Wrong) -> WrongValue:
    return WrongValue(path if wrong.at is None else (*path, wrong.at), wrong.message, wrong.hint)
