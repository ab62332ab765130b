"""The data of a job file in, a `JobSpec` out, with everything that is wrong with the data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gpurun.launcher.jobfile.field_types import InvalidValue, Kind, ListOf, check_mapping, expected
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.section import Key, Section
from gpurun.launcher.jobfile.yaml.describe import nearest, shorten
from gpurun.launcher.jobfile.yaml.source import Source
from gpurun.launcher.jobfile.yaml.tree import Path, Unreadable

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class WrongValue:
    """A value that its key doesn't take."""

    path: Path
    message: str
    """Empty where the text's own mistake was reported already."""
    hint: str | None = None


@dataclass(frozen=True)
class UnknownKey:
    """A key that isn't one."""

    path: Path


Mistake = WrongValue | UnknownKey


def read_section(model: type[S], given: dict[str, Any], path: Path, mistakes: list[Mistake]) -> S:
    """The section at `path`; what is wrong with it joins `mistakes`, in the order of the fields.

    A wrong value counts as if it were not there; an item of a list leaves a `None` in its place.
    """
    keys = model.keys
    values: dict[str, Any] = {}
    for name, key in keys.items():
        if name in given:
            try:
                values[key.field] = _value(key, given[name], (*path, name), mistakes)
            except InvalidValue as wrong:
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
    if isinstance(key.kind, ListOf):
        return _several(key.kind, value, path, mistakes)
    return read_section(key.kind, check_mapping(value), path, mistakes)


def _several(kind: ListOf, value: Any, path: Path, mistakes: list[Mistake]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        is_one = value is not None and not isinstance(value, dict)
        hint = f"put what varies in brackets: [{shorten(str(value))}]" if is_one else None
        raise expected("a list", value, hint)
    if kind.check is not None:
        kind.check(value)
    if not value:
        raise InvalidValue("expected at least one value, got an empty list")
    if kind.most is not None and len(value) > kind.most:
        raise InvalidValue(f"expected at most {kind.most} values, got {len(value):,}")
    return tuple(_item(kind.item, item, (*path, at), mistakes) for at, item in enumerate(value))


def _item(kind: Kind, item: Any, path: Path, mistakes: list[Mistake]) -> Any:
    try:
        _refuse_unreadable(item)
        return kind.parse(item)
    except InvalidValue as wrong:
        mistakes.append(_wrong_value(path, wrong))
        return None


def _refuse_unreadable(value: Any) -> None:
    if isinstance(value, Unreadable):
        raise InvalidValue("")


def _wrong_value(path: Path, wrong: InvalidValue) -> WrongValue:
    return WrongValue(path if wrong.at is None else (*path, wrong.at), wrong.message, wrong.hint)


@dataclass(frozen=True)
class Draft:
    """A job with the places at which it can't be relied on."""

    spec: JobSpec
    unknown: frozenset[Path] = frozenset()
    """Places of wrong values; there `spec` holds defaults, and a list `None`."""

    def knows(self, path: Path) -> bool:
        """Whether nothing at, within or around `path` is wrong."""
        return not any(wrong[: len(path)] == path[: len(wrong)] for wrong in self.unknown)

    def placed(self, key: str) -> list[tuple[Path, Any]]:
        """The right ones of the values that `key` takes, with their places."""
        several = getattr(self.spec.compare, key)
        if several:
            found = [(("compare", key, position), value) for position, value in enumerate(several)]
            return [(path, value) for path, value in found if self.knows(path)]
        is_known = self.knows(("compare", key)) and self.knows((key,))
        return [((key,), getattr(self.spec, key))] if is_known else []

    def values(self, key: str) -> tuple[Any, ...] | None:
        """All values that `key` takes, `None` if one of them is wrong."""
        several: tuple[Any, ...] = getattr(self.spec.compare, key)
        is_known = self.knows(("compare", key)) and (several or self.knows((key,)))
        return (several or (getattr(self.spec, key),)) if is_known else None


def read_spec(source: Source) -> tuple[JobSpec, list[Mistake]]:
    """The job that a source holds, as far as it is right, and all that is wrong with single keys."""
    mistakes: list[Mistake] = []
    spec = read_section(JobSpec, source.root.plain(), (), mistakes)
    return replace(spec, source=source), mistakes


def draft_of(spec: JobSpec, mistakes: Sequence[Mistake]) -> Draft:
    """What `read_spec` has found, as a draft."""
    wrong = {mistake.path for mistake in mistakes}
    return Draft(spec, frozenset(wrong).union(*(_meant(mistake) for mistake in mistakes)))


def _meant(mistake: Mistake) -> set[Path]:
    """The key that a misspelt one is meant to be: its value isn't the default, though it isn't there."""
    if not isinstance(mistake, UnknownKey):
        return set()
    *section, key = mistake.path
    near = nearest(str(key), (SECTIONS[str(section[0])] if section else JobSpec).keys)
    return {(*section, near)} if near else set()
