"""Names of variants and groups: short, safe as file names, unique."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.strategies import STRATEGIES

_MAX_CHARS = 100
"""Together with a path's other parts this stays far below the 255 bytes of a file name."""


def variant_id(strategy: str, num_devices: int, split_name: str, varied: Mapping[str, Any]) -> str:
    """`strategy-count[-split][-key-value…]`: the split where the strategy has one, then what varies."""
    split = [split_name] if STRATEGIES[strategy].has_split else []
    return _join([strategy, str(num_devices), *split], varied)


def group_id(strategy: str, num_devices: int, varied: Mapping[str, Any]) -> str:
    """`strategy-count[-key-value…]` of the variants that share processes."""
    shared = {key: varied[key] for key in varied if not SETTINGS[key].shares_processes}
    return _join([strategy, str(num_devices)], shared)


def make_unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with `-2`, `-3`, … after those that occur twice."""
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
        setting = SETTINGS[key]
        parts += [] if setting.names_variant else setting.shape.id_words(key, value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", "-".join(parts))[:_MAX_CHARS]
