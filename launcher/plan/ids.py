"""Names of variants and groups: short, safe as file names, unique."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_CHARS = 100
"""Together with a folder's other parts this stays far below the 255 bytes of a file name."""


def variant_id(strategy: str, num_devices: int, split_name: str, varied: Mapping[str, Any]) -> str:
    """`strategy-count-split[-key-value…]`; `single`, which has no split, goes without."""
    parts = [strategy, str(num_devices)]
    if strategy != "single":
        parts.append(split_name)
    return _join(parts, varied)


def program_id(num_devices: int, varied: Mapping[str, Any]) -> str:
    """`script-count[-words…]`: the arguments and variables that vary."""
    besides = {key: value for key, value in varied.items() if key != "device_count"}
    return _join(["script", str(num_devices)], besides)


def group_id(strategy: str, num_devices: int, varied: Mapping[str, Any]) -> str:
    """`strategy-count[-key-value…]` of the variants that share processes."""
    shared = {key: varied[key] for key in varied if key not in ("global_batch", "accumulate")}
    return _join([strategy, str(num_devices)], shared)


def make_unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with `-2`, `-3`, … after those that stand twice."""
    taken: Counter[str] = Counter()
    unique: list[str] = []
    for name in names:
        candidate = name
        while taken[candidate]:
            taken[name] += 1
            candidate = f"{name}-{taken[name]}"
        taken[candidate] += 1
        unique.append(candidate)
    return tuple(unique)


def _join(parts: list[str], varied: Mapping[str, Any]) -> str:
    for key, value in varied.items():
        parts += _words(key, value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts))[:_MAX_CHARS]


def _words(key: str, value: Any) -> list[str]:
    """`width-64` of params and variables, `batch-64` of the arguments `--batch 64`."""
    if key == "args":
        return [word for argument in value if (word := str(argument).strip("-"))]
    pairs = value.items() if key in ("params", "env") else [(key, value)]
    return [f"{name}-{_word(item)}" for name, item in pairs]


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
