"""Which numbers, files and sizes of `gpt` the built-in workloads refuse.

It needs no torch: a job is checked by the same rules before anything runs.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RANGES: Mapping[str, tuple[int, int]] = {"num_workers": (0, 256)}
"""Counts that may be 0, or have a limit: more processes per device than that take minutes to start."""
CHOICES: Mapping[str, tuple[float, ...]] = {"version": (1, 1.5)}
POSITIVE = frozenset({"learning_rate"})


def refusal(name: str, value: float, is_count: bool = True) -> str | None:
    """Why the parameter can't have this value, as `must be at least 1, but it is 0`; `None` where it can.

    Args:
        is_count: whether the parameter takes whole numbers; they start at 1 unless `RANGES` says otherwise.
    """
    must_be = _must_be(name, value, is_count)
    return f"must be {must_be}, but it is {value}" if must_be else None


def _must_be(name: str, value: float, is_count: bool) -> str | None:
    if name in CHOICES:
        choices = CHOICES[name]
        return None if value in choices else " or ".join(f"{choice:g}" for choice in choices)
    if name in POSITIVE:
        return None if 0 < value < math.inf else "positive"
    least, most = RANGES.get(name, (1 if is_count else -math.inf, math.inf))
    if value < least:
        return f"at least {least}"
    return f"at most {most}" if value > most else None


def check(**values: float) -> None:
    """Raises `ValueError` for the first of the named values that is refused."""
    for name, value in values.items():
        if reason := refusal(name, value):
            raise ValueError(f"{name} {reason}")


NAMED_FILES = 5
"""The limit of skipped files that are named."""


def path_of(name: str) -> Path:
    """The path that a job means; `~` is a home directory, as in a shell."""
    return Path(os.path.expanduser(name))


def not_there(what: str, path: Path) -> str:
    """The message for a path that a job names, where nothing is."""
    where = "" if path.is_absolute() else "; relative paths are resolved from the job file's directory"
    return f"the {what} {path} does not exist{where}"


def why_no_file(path: Path) -> str | None:
    """Why there is nothing to read at a path, though a directory lists it; `None` if there is.

    Reading would end in an error that says less, or wait forever: for the writer of a pipe.
    """
    if path.is_file():
        return None
    return "not a regular file" if path.exists() else "a link to nothing" if path.is_symlink() else "gone"


def name_in(directory: Path, path: Path) -> str:
    """The name of a file of the directory, or `directory` itself where that is the file."""
    return path.name if path == directory else str(path.relative_to(directory))


def listed(named: list[str]) -> str:
    """The first of them, in words."""
    return ", ".join([*named[:NAMED_FILES], *(["…"] if len(named) > NAMED_FILES else [])])


BYTES = 256
"""Tokens are bytes whatever the vocabulary, so that no tokenizer is needed: a larger one only widens the
first and the last layer, whose work then is that of a model with as many tokens."""


@dataclass(frozen=True)
class GptShape:
    """The parameters of a model's size."""

    layers: int
    width: int
    heads: int
    context: int
    """Tokens of a sample."""
    vocabulary: int
    tied: bool
    """Whether first and last layer share their weights, as in GPT-2."""


PRESETS = {
    "tiny": GptShape(layers=4, width=256, heads=4, context=128, vocabulary=BYTES, tied=False),
    "small": GptShape(layers=6, width=384, heads=6, context=256, vocabulary=BYTES, tied=False),
    "124M": GptShape(layers=12, width=768, heads=12, context=1024, vocabulary=50257, tied=True),
}


def shape_of(preset: str, **own: int | None) -> GptShape:
    """The preset's shape, with the numbers that take the place of its own.

    Raises:
        ValueError: there is no such preset, a number is too small, or the heads don't share the width evenly.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, but it is {preset}")
    stated: dict[str, Any] = {name: number for name, number in own.items() if number is not None}
    shape = replace(PRESETS[preset], **stated)
    for name, least in (("layers", 1), ("width", 1), ("heads", 1), ("context", 1), ("vocabulary", BYTES)):
        if getattr(shape, name) < least:
            raise ValueError(f"{name} must be at least {least}, but it is {getattr(shape, name)}")
    if shape.width % shape.heads:
        raise ValueError(
            f"width must be divisible by heads, but {shape.width} is not divisible by {shape.heads}"
        )
    return shape
