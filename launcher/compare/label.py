"""Names of variants in sentences: by samples, which are more exact than the job's word for the split."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gpurun.launcher.grouping import grouped
from gpurun.launcher.splits import BALANCED
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import plural

if TYPE_CHECKING:
    from gpurun.launcher.plan.model import Identity, SkippedCombination

OF_A_PROGRAM = frozenset({"args", "options", "calls", "env"})
"""Settings whose values say what they are, without the setting's name."""
LONGEST_SPLIT = 16
"""Characters; a longer list of samples is written as runs."""


def variant_label(variant: "Identity") -> str:
    """`ddp 48/16`, with what else varies: `ddp 48/16 precision=bf16`; of a program all that varies.

    Where nothing varies, `script on 2 devices`. A micro-benchmark has no split: `2 devices`.
    """
    if not variant.kind.is_ranked:
        return " ".join((plural(len(variant.devices), "device"), *varied_texts(variant.varied)))
    if not STRATEGIES[variant.strategy].in_jobs:
        return (
            " ".join(varied_texts(variant.varied))
            or f"{variant.strategy} on {plural(len(variant.devices), 'device')}"
        )
    return " ".join((variant.strategy, *_split_words(variant), *varied_texts(variant.varied)))


def _split_words(variant: "Identity") -> tuple[str, ...]:
    """`48/16`; `balanced 46/18`, which may be the samples of another split too; nothing without a split."""
    if not STRATEGIES[variant.strategy].has_split:
        return ()
    word = (BALANCED,) if variant.split_name == BALANCED else ()
    return (*word, split_text(variant.split)) if variant.split else word


def split_label(variant: "Identity") -> str:
    """The samples per device, with the job's word where they don't say it; empty without a split."""
    if not STRATEGIES[variant.strategy].has_split:
        return ""
    if not variant.split:
        return variant.split_name  # balanced, before its devices are measured
    samples = split_text(variant.split)
    literal = "/".join(str(part) for part in variant.split)
    return samples if variant.split_name in ("even", "-", literal) else f"{samples} ({variant.split_name})"


def split_text(split: Sequence[int]) -> str:
    """`48/16`; for many devices `8×9/6`: eight with 9 samples, one with 6."""
    text = "/".join(str(samples) for samples in split)
    if len(text) <= LONGEST_SPLIT:
        return text
    runs = ((len(list(run)), samples) for samples, run in groupby(split))
    return "/".join(f"{length}×{samples}" if length > 1 else str(samples) for length, samples in runs)


def varied_texts(varied: Mapping[str, Any]) -> list[str]:
    """`key=value` for every varied key, each on one line; of a program `--lr 1`, `lr=1`, but `args=20`."""
    texts = {key: varied_text(key, value) for key, value in varied.items()}
    return [
        text if key in OF_A_PROGRAM and not text[0].isdigit() else f"{key}={text}"
        for key, text in texts.items()
    ]


def left_out_texts(left_out: Iterable["SkippedCombination"]) -> list[tuple[str, str]]:
    """Combinations and the reason why they can't be; one text for all combinations of some values."""
    alike = grouped(left_out, lambda skipped: (skipped.reason, tuple(skipped.combination)))
    combinations = {key: [each.combination for each in found] for key, found in alike.items()}
    return [(text, reason) for (reason, _), found in combinations.items() for text in _combined(found)]


def _combined(combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """`strategy=ddp or zero1, bucket_mb=1, 5 or 25`, where every combination of these is there; else each."""
    texts = {
        key: list(dict.fromkeys(varied_text(key, combination[key]) for combination in combinations))
        for key in combinations[0]
    }
    if len(combinations) == 1 or math.prod(map(len, texts.values())) != len(combinations):
        return [" ".join(varied_texts(combination)) for combination in combinations]
    named = {
        key: " or ".join(filter(None, (", ".join(found[:-1]), found[-1]))) for key, found in texts.items()
    }
    return [", ".join(text if key in OF_A_PROGRAM else f"{key}={text}" for key, text in named.items())]


def varied_text(key: str, value: Any) -> str:
    """A varied key's value; a program's arguments as a shell takes them, its options as `lr=0.1 amp=on`."""
    if key not in OF_A_PROGRAM:
        return value_text(value) or "none"
    if key == "args":
        return shlex.join(value) or "no args"
    if key == "calls":
        called = (
            f"{name}({', '.join(f'{keyword}={item!r}' for keyword, item in given.items())})"
            for name, given in value.items()
        )
        return " ".join(called) or "no calls changed"
    items = (f"{name.removeprefix('+')}={value_text(item)}" for name, item in value.items())
    return " ".join(items) or f"no {key}"


def value_text(value: Any) -> str:
    """A job's value as a person would write it on one line; `none` where there is none."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value_text(item) or 'none'}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(part) for part in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
