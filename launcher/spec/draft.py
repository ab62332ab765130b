"""A job of which some values are wrong, so that the mistakes between the others can be reported with them."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from launcher.spec.describe import nearest
from launcher.spec.model import SECTIONS, JobSpec, keys_of
from launcher.spec.source import Source
from launcher.spec.tree import Path

_STAND_INS: dict[str, Any] = {
    "workload": "gpt",
    "global_batch": 1,
    "strategy": "ddp",
    "device_count": 1,
    "split": "even",
    "precision": "fp32",
    "compile": False,
    "channels_last": False,
    "threads": "auto",
    "accumulate": 1,
    "params": {},
    "args": [],
    "env": {},
    "seed": 0,
}
"""Right values for items of lists, whose positions must stay. No rule sees them."""


@dataclass(frozen=True)
class Draft:
    """A job with the places at which it can't be relied on."""

    spec: JobSpec
    unknown: frozenset[Path] = frozenset()
    """Places of wrong values; there `spec` holds stand-ins or defaults."""

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


def salvage(source: Source, error: ValidationError) -> Draft | None:
    """What is right in a job that `error` refused; `None` if it can't be told apart from what is wrong."""
    details = error.errors(include_url=False)
    job = source.root.plain()
    wrong = {_unit(detail["loc"]) for detail in details}
    # A list that is too short only because its items are wrong is mended with them.
    for path in wrong - {path[:-1] for path in wrong}:
        _mend(job, path)
    try:
        spec = JobSpec.model_validate(job, context=source)
    except ValidationError:
        return None
    return Draft(spec, frozenset(wrong).union(*(_meant(detail) for detail in details)))


def _unit(path: Path) -> Path:
    """The least that can be replaced: a key, a section's key, or an item of a list under `compare`."""
    if path[0] not in SECTIONS:
        return path[:1]
    return path[:3] if path[0] == "compare" else path[:2]


def _mend(job: Any, path: Path) -> None:
    for step in path[:-1]:
        job = job[step]
    if isinstance(job, list):
        job[int(path[-1])] = _STAND_INS[str(path[-2])]
    else:
        job.pop(path[-1], None)


def _meant(detail: ErrorDetails) -> set[Path]:
    """The key that a misspelt one stands for: its value isn't the default, though it isn't there."""
    path = detail["loc"]
    if detail["type"] != "extra_forbidden":
        return set()
    model = SECTIONS.get(str(path[0]), JobSpec) if len(path) > 1 else JobSpec
    near = nearest(str(path[-1]), keys_of(model))
    return {(*path[:-1], near)} if near else set()
