"""The data of a job file in, a `JobSpec` out, with everything that is wrong with the data."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.kinds import KIND_KEYS, PROGRAM, PROGRAM_KEYS
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec, key_settings
from gpurun.launcher.jobfile.section import (
    MAPPING,
    InvalidValue,
    Key,
    ListOf,
    Section,
    ValueKind,
    by_other_names,
    check_mapping,
    expected,
)
from gpurun.launcher.jobfile.values import for_message
from gpurun.launcher.jobfile.yaml.describe import flow_text, nearest, shorten, truth_in
from gpurun.launcher.jobfile.yaml.tree import Path, Source, Unreadable
from gpurun.launcher.units import format_count

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
                advised = _advised(model, name, given, wrong)
                mistakes.append(_wrong_value((*path, name), advised))
    mistakes += [UnknownKey((*path, name)) for name in given if name not in keys]
    stated = frozenset(name for name, key in keys.items() if key.field in values)
    return model(stated=stated, **values)


def _advised(model: type[Section], name: str, given: dict[str, Any], wrong: InvalidValue) -> InvalidValue:
    """The mistake, with advice where it is known what was meant."""
    value = given[name]
    kind, values = _compared_as(model, name), _separate(value)
    if kind is not None and _lists_several(kind, values, wrong if values is value else None):
        return InvalidValue(
            "expected one value, got several", f"to compare them, write `{_listed(name, values)}`"
        )
    own = model.keys[name].kind
    if isinstance(own, type):
        is_program = not given.keys().isdisjoint(PROGRAM_KEYS)
        advice = (_instead_of_size(own) if is_program else None) or _in_full(own, name, value)
        return InvalidValue(wrong.message, advice or wrong.hint, wrong.at)
    if isinstance(value, list) and len(value) == 1 and isinstance(own, ValueKind) and _fits(own, value[0]):
        alone = flow_text(for_message(name, value[0]))
        return InvalidValue("expected one value, got a list", f"write `{name}: {alone}`")
    return wrong


def _fits(kind: ValueKind, value: Any) -> bool:
    with suppress(InvalidValue):
        kind.parse(value)
        return True
    return False


def _compared_as(model: type[Section], name: str) -> ListOf | None:
    """The rule of `compare` for a key at the top; `None` if it takes nothing, or the key isn't at the top."""
    key = SECTIONS["compare"].keys.get(name) if model is JobSpec else None
    return key.kind if key is not None and isinstance(key.kind, ListOf) else None


def _separate(value: Any) -> Any:
    """The values of `ddp, dp` as a list; any other value as it is."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) and "," in value else value


def _lists_several(kind: ListOf, value: Any, wrong: InvalidValue | None) -> bool:
    """Whether a value is a list for `compare`.

    Args:
        wrong: what is wrong with it, if it is a list in the file. If it is none, or if the key itself takes
            lists, every item must fit, otherwise at least one.
    """
    if not isinstance(value, list) or len(value) < 2 or _is_one_mapping(value):
        return False
    mistakes: list[Mistake] = []
    with suppress(InvalidValue):
        _several(kind, value, (), mistakes)
        return not mistakes or (wrong is not None and wrong.at is None and len(mistakes) < len(value))
    return False


def _is_one_mapping(items: list[Any]) -> bool:
    """Whether a list has the items of one mapping: `[{layers: 2}, {width: 64}]`."""
    if not all(isinstance(item, dict) for item in items):
        return False
    return len({key for item in items for key in item}) == sum(map(len, items))


def _listed(name: str, values: list[Any]) -> str:
    """The text that compares the values; `workload` shows the kind of job, and is needed next to it."""
    compared = f"compare: {{{name}: {flow_text([for_message(name, each) for each in values])}}}"
    return f"{name}: {values[0]}` and `{compared}" if name == "workload" else compared


def _instead_of_size(section: type[Section]) -> str | None:
    """The key that a program has instead of the one that `steps: 100` means."""
    meant = key_settings(section).get(section.shorthand[0]) if section.shorthand else None
    return meant.instead if meant is not None and PROGRAM not in meant.kinds else None


def _in_full(section: type[Section], name: str, value: Any) -> str | None:
    """How to write `steps: 100`, `profile: true` or `baseline: ddp`: the value belongs to one of its keys."""
    if isinstance(value, str) and value in section.keys:
        return f"write `{name}: {{{value}: …}}`"
    for meant in section.shorthand:
        key = section.keys[meant]
        if isinstance(key.kind, ListOf):
            if values := _all_fit(key.kind.item, value):
                return f"write `{name}: {{{meant}: {flow_text(values)}}}`"
            continue
        if isinstance(value, str) and value[:1].isalpha() and truth_in(value):
            value = truth_in(value) == "true"
        if isinstance(value, bool):
            value = getattr(section, key.field) if value else 0
        if isinstance(key.kind, ValueKind) and _fits(key.kind, value):
            return f"write `{name}: {{{meant}: {value}}}`"
    return None


def _all_fit(kind: ValueKind, value: Any) -> list[Any]:
    """The values of `[ddp, dp]`, `ddp, dp` or `ddp vs dp`, if all of them fit."""
    values = re.split(r",\s*|\s+(?:vs\.?\s+)?", value) if isinstance(value, str) else value
    are_right = isinstance(values, list) and all(_fits(kind, item) for item in values)
    return values if are_right else []


def _value(key: Key, value: Any, path: Path, mistakes: list[Mistake]) -> Any:
    if value is None and key.may_be_empty:
        return None
    _refuse_unreadable(value)
    if isinstance(key.kind, ValueKind):
        if key.kind is not MAPPING:  # params are judged one by one
            for item in _items(value):
                _refuse_unreadable(item)
        return key.kind.parse(value)
    if isinstance(key.kind, ListOf):
        return _several(key.kind, value, path, mistakes)
    return read_section(key.kind, check_mapping(value), path, mistakes)


def _several(kind: ListOf, value: Any, path: Path, mistakes: list[Mistake]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise expected("a list", value, _in_brackets(kind, value))
    if kind.check is not None:
        kind.check(value)
    if not value:
        raise InvalidValue("expected at least one value, got an empty list")
    if kind.most is not None and len(value) > kind.most:
        raise InvalidValue(f"expected at most {kind.most} values, got {format_count(len(value))}")
    return tuple(_item(kind.item, item, (*path, at), mistakes) for at, item in enumerate(value))


def _in_brackets(kind: ListOf, value: Any) -> str | None:
    """How to write a list that lacks its brackets; an example only where every item would be right."""
    if value is None:
        return None
    values = _separate(value)
    if isinstance(value, dict) and len(value) == 1:
        ((name, several),) = value.items()
        values = [{name: item} for item in several] if isinstance(several, list) else value
    items = values if isinstance(values, list) else [values]
    if all(isinstance(item, dict) for item in items):  # {"--width": [64, 128]}: arguments
        words = [[word for pair in item.items() for word in pair] for item in items]
        items = words if all(_fits(kind.item, item) for item in words) else items
    are_right = all(_fits(kind.item, item) for item in items)
    return "put what varies in brackets" + (f": {shorten(flow_text(items))}" if are_right else "")


def _item(kind: ValueKind, item: Any, path: Path, mistakes: list[Mistake]) -> Any:
    try:
        _refuse_unreadable(item)
        return kind.parse(item)
    except InvalidValue as wrong:
        mistakes.append(_wrong_value(path, wrong))
        return None


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


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

    @property
    def is_plannable(self) -> bool:
        """Whether it is known what kind of job it is, and what it compares."""
        num_kinds = sum(key in self.spec.stated for key in KIND_KEYS)
        return num_kinds < 2 and self.unknown.isdisjoint((key,) for key in (*PROGRAM_KEYS, "compare"))

    def without(self, problems: Iterable[Problem]) -> "Draft":
        """The draft without what these mistakes are about; a duplicate key may be one of `compare`."""
        wrong = [found.path for found in problems if found.path]
        wrong += self.spec.source.root.unreadable() if self.spec.source else ()
        inside = [("compare", *path) for path in wrong if path[0] in SECTIONS["compare"].keys]
        return replace(self, unknown=self.unknown.union(wrong, inside))

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
    """The draft of what `read_spec` has found."""
    wrong = {mistake.path for mistake in mistakes}
    return Draft(spec, frozenset(wrong).union(*(_meant(mistake) for mistake in mistakes)))


def _meant(mistake: Mistake) -> set[Path]:
    """The key that a misspelt one is meant to be: its value isn't the default, though it isn't there."""
    if not isinstance(mistake, UnknownKey):
        return set()
    *section, key = mistake.path
    near = key_meant(str(key), (SECTIONS[str(section[0])] if section else JobSpec).keys)
    return {(*section, near)} if near else set()


_ELSEWHERE = by_other_names(
    accumulate="gradient_accumulation_steps accumulate_grad_batches",
    checkpointing="gradient_checkpointing activation_checkpointing",
    compare="variants sweep grid matrix",
    device_count="gpus num_gpus num_devices world_size nproc nproc_per_node",
    global_batch="batch batch_size train_batch_size",
    precision="dtype amp",
    script="program command",
    split="ratio",
    workload="model",
)
"""Keys by the names that other tools give them."""


def key_meant(key: str, known: Iterable[str]) -> str | None:
    """The one of the known keys that an unknown one is meant to be, as far as its name shows."""
    names = list(known)
    return key_elsewhere(key, names) or nearest(key, names)


def key_elsewhere(key: str, known: Iterable[str]) -> str | None:
    """The one of the known keys that other tools call `key`."""
    meant = _ELSEWHERE.get(key.lower().replace("-", "_"))
    return meant if meant is not None and meant in known else None
