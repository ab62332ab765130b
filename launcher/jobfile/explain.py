"""Mistakes in plain English, at the place in the file where they belong."""

from collections.abc import Sequence

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.model import SECTIONS, JobSpec
from gpurun.launcher.jobfile.read import Mistake, UnknownKey
from gpurun.launcher.jobfile.section import Section
from gpurun.launcher.jobfile.yaml.describe import did_you_mean, shorten
from gpurun.launcher.jobfile.yaml.source import Source
from gpurun.launcher.jobfile.yaml.tree import Path


def explain(mistakes: Sequence[Mistake], source: Source, most: int) -> tuple[list[Problem], int]:
    """What is to be said of the mistakes, `most` of them at the most, and how many more there are.

    Those that `source` has reported already are left out. Explaining takes a while (near misses are looked
    for), so that a file of thousands of wrong keys must not be explained in full.
    """
    untold = [mistake for mistake in mistakes if isinstance(mistake, UnknownKey) or mistake.message]
    return [_explain(mistake, source) for mistake in untold[:most]], max(0, len(untold) - most)


def _explain(mistake: Mistake, source: Source) -> Problem:
    if isinstance(mistake, UnknownKey):
        return source.key_problem(mistake.path, *_unknown_key(mistake.path))
    key = ".".join(step for step in mistake.path if isinstance(step, str))
    return source.problem(mistake.path, f"`{key}`: {mistake.message}", mistake.hint)


def _unknown_key(path: Path) -> tuple[str, str | None]:
    key = str(path[-1])
    known = (SECTIONS[str(path[0])] if len(path) > 1 else JobSpec).keys
    hint = did_you_mean(key, known) or _elsewhere(key) or f"the keys here are {', '.join(known)}"
    inside = f" under `{path[0]}`" if len(path) > 1 else ""
    return f"unknown key `{shorten(key)}`{inside}", hint


def _elsewhere(key: str) -> str | None:
    homes: list[tuple[str, type[Section]]] = [("at the top", JobSpec)]
    homes += [(f"under `{name}`", SECTIONS[name]) for name in ("steps", "profile")]
    home = next((place for place, model in homes if key in model.keys), None)
    return f"`{key}` belongs {home}" if home else None
