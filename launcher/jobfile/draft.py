"""A job of which some values are wrong, so that the mistakes between the others can be reported with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.read import Mistake, UnknownKey, read_section
from gpurun.launcher.jobfile.yaml.describe import nearest
from gpurun.launcher.jobfile.yaml.source import Source
from gpurun.launcher.jobfile.yaml.tree import Path


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
    """The key that a misspelt one stands for: its value isn't the default, though it isn't there."""
    if not isinstance(mistake, UnknownKey):
        return set()
    *section, key = mistake.path
    near = nearest(str(key), (SECTIONS[str(section[0])] if section else JobSpec).keys)
    return {(*section, near)} if near else set()
