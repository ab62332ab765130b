"""Values of a job file that are more than a number or a word: splits, durations, sizes, names.

Each function takes the value in the YAML and returns what a `JobSpec` holds, or raises `InvalidValue`.
"""

import re
from typing import Any

from gpurun.launcher.jobfile.device_values import MAX_DEVICES
from gpurun.launcher.jobfile.field_types import InvalidValue, ValueKind, expected, one_of, whole
from gpurun.launcher.jobfile.yaml.describe import correction, shorten
from gpurun.launcher.machine.accelerators import sold_memory_gb
from gpurun.launcher.splits import BALANCED
from gpurun.launcher.strategies import NCCL_ALGORITHMS
from gpurun.launcher.units import GIB

Split = str | tuple[int, ...]
MAX_COUNT = 2**31 - 1
"""Largest number of samples, steps or rounds: what fits into a 32-bit integer."""

MAX_THREADS = 1024
"""More than any machine has cores."""

MAX_TIMEOUT_S = 30 * 24 * 3600.0
MIN_SILENCE_S = 3.0
"""Nodes send a heartbeat every second, and one may be late."""

RATIO_PATTERN = "^0*[1-9][0-9]*(:0*[1-9][0-9]*)+$"
"""A ratio for the schema; a device whose part is zero is none."""

COUNT = whole(1, MAX_COUNT)

_RATIO = re.compile(r"[0-9]{1,9}(:[0-9]{1,9})+")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|m|h)")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(MiB|GiB)")
_UNIT_BYTES = {"MiB": 1 << 20, "GiB": GIB}
MAX_NAME = 100
_NAME = re.compile(rf"\w[\w.+-]{{0,{MAX_NAME - 1}}}")


def parse_name(value: Any) -> str:
    """A name that is safe as a directory: letters, digits, `_`, `.`, `+`, `-`, at most 100."""
    if not isinstance(value, str):
        raise expected("a name", value, correction(value, str))
    if not _NAME.fullmatch(value):
        raise expected("a name that can be a directory", value, _safe_name_hint(value))
    return value


def _safe_name_hint(value: str) -> str:
    if len(value) > MAX_NAME:
        return f"it has {len(value)} characters; a name has at most {MAX_NAME}"
    return f"did you mean `{safe_name(value)}`?" if re.search(r"\w", value) else "such as `my-job`"


def safe_name(text: str) -> str:
    """`text` with everything replaced that has no place in the name of a directory."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.+")[:MAX_NAME] or "job"


def parse_split(value: Any) -> Split:
    """`even`, `balanced`, a ratio such as `3:1`, or a tuple of samples per device."""
    if isinstance(value, list):
        return _sample_list(value)
    if isinstance(value, str) and _RATIO.fullmatch(value):
        return _ratio(value)
    if value in ("even", BALANCED):
        return str(value)
    raise expected("a valid split", value, _split_hint(value))


def _ratio(text: str) -> str:
    if any(int(part) == 0 for part in text.split(":")):
        hint = "remove that device; `device_count` sets how many are used"
        raise InvalidValue(f"the ratio {shorten(text)} gives a device no samples", hint)
    return text


_WHOLE_RATIO = 'write a ratio of whole numbers, such as "3:1"'


def _sample_text(samples: list[int]) -> str:
    return f"write samples per device as a list: {samples}"


def _split_hint(value: Any) -> str:
    if isinstance(value, dict) and value and all(type(item) is int for item in value.values()):
        return _sample_text(list(value.values()))
    text = value.strip(" ,;") if isinstance(value, str) else ""
    numbers = [int(number) for number in re.findall(r"[0-9]{1,9}", text)]
    if len(numbers) > 1 and "/" in text:
        return f'write samples per device as a list, {numbers}, or a ratio, "{":".join(map(str, numbers))}"'
    if re.fullmatch("[0-9]{1,9}( ?[:-] ?[0-9]{1,9})+", text):
        return f'write "{":".join(map(str, numbers))}"'
    if len(numbers) > 1 and "," in text:
        return _sample_text(numbers)
    if (len(numbers) > 1 and ":" in text) or "%" in text:
        return _WHOLE_RATIO
    return 'use even, balanced, a ratio such as "3:1", or samples per device such as [48, 16]'


def _sample_list(items: list[Any]) -> tuple[int, ...]:
    if not 1 <= len(items) <= MAX_DEVICES:
        raise InvalidValue(f"expected the samples of 1 to {MAX_DEVICES} devices, got {len(items)}")
    for position, item in enumerate(items):
        if type(item) is not int or not 1 <= item <= MAX_COUNT:
            hint = _WHOLE_RATIO if type(item) is float and 0 < item < 1 else correction(item, int)
            hint = "to leave a device out, lower `device_count`" if item == 0 else hint
            raise expected("a number of samples (at least 1)", item, hint, position)
    return tuple(items)


def check_split_list(items: list[Any]) -> None:
    """Refuses the value of `compare: split` if it is one split, not several: a list of bare numbers."""
    if items and all(type(item) is int for item in items):
        raise InvalidValue(
            "a number alone is not a split", f"for one split into {len(items)}, write [{items}]"[:120]
        )


def parse_duration(value: Any) -> float:
    """Seconds, from `90s`, `10m`, `1h` or a plain number of seconds."""
    if type(value) in (int, float):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        seconds = float(match[1]) * _UNIT_SECONDS[match[2]]
    else:
        raise expected("a duration", value, _duration_hint(value))
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise expected("a duration above 0 and up to 30 days", value)
    return seconds


_LONG_UNIT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|m|h)(?:ec|econd|in|inute|r|our)s?")


def _duration_hint(value: Any) -> str:
    meant = _LONG_UNIT.fullmatch(value.lower()) if isinstance(value, str) else None
    return f"write {meant[1]}{meant[2]}" if meant else "use 90s, 10m, 1h, or a number of seconds"


def parse_silence(value: Any) -> float:
    """A duration in which several heartbeats fit."""
    if (seconds := parse_duration(value)) < MIN_SILENCE_S:
        raise expected(f"a duration of at least {MIN_SILENCE_S:g} s", value)
    return seconds


def parse_size(value: Any) -> int:
    """Bytes, from `500 MiB`, `1.5 GiB` or a whole number of bytes."""
    if type(value) is int:
        size_bytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        size_bytes = round(float(match[1]) * _UNIT_BYTES[match[2]])
    else:
        raise expected("a size", value, "use 500 MiB, 1 GiB, or a number of bytes")
    if size_bytes < _UNIT_BYTES["MiB"]:
        meant = f"a number alone is bytes; write `{value} {'GiB' if size_bytes < 1000 else 'MiB'}`"
        raise expected("a size of at least 1 MiB", value, meant if value == size_bytes > 0 else None)
    return size_bytes


def parse_memory(value: Any) -> int:
    """Bytes, from a size or the name of a GPU: `20 GiB`, `H100 80GB`."""
    if not isinstance(value, str) or _SIZE.fullmatch(value):
        return parse_size(value)
    sizes = sold_memory_gb(value)
    if not sizes:
        raise expected("a size or a GPU", value, "use 20 GiB, or the name of a GPU such as H100 80GB")
    if len(sizes) > 1:
        listed = " or ".join(f"`{value} {size}GB`" for size in sizes)
        raise InvalidValue(f"there are {value} GPUs with different amounts of memory", f"write {listed}")
    return sizes[0] * 10**9


def parse_threads(value: Any) -> int | str:
    """`auto`, or a number of threads."""
    if value == "auto":
        return str(value)
    if type(value) is not int or not 1 <= value <= MAX_THREADS:
        raise expected(f"`auto` or 1 to {MAX_THREADS} threads", value, correction(value, int))
    return value


MAX_EVERY = 1000


def parse_checkpointing(value: Any) -> int | str:
    """`none`, `full`, or a number n for every n-th layer."""
    if value in ("none", "full"):
        return str(value)
    if type(value) is not int or not 2 <= value <= MAX_EVERY:
        hint = f"write {'full' if value else 'none'}" if isinstance(value, bool) else None
        raise expected(f"`none`, `full` or 2 to {MAX_EVERY}, for every second layer and so on", value, hint)
    return value


def parse_global_batch(value: Any) -> int | str:
    """A number of samples, or `max`."""
    return str(value) if value == "max" else _samples(value)


def parse_one_global_batch(value: Any) -> int:
    """One of several numbers of samples; with `max` there is nothing to compare."""
    if value == "max":
        raise InvalidValue(
            "`max` can't be compared with other batches", "set `global_batch: max` at the top instead"
        )
    return _samples(value)


def _samples(value: Any) -> int:
    samples: int = COUNT.parse(value)
    return samples


_OF_NCCL = {
    "algorithm": one_of(tuple(NCCL_ALGORITHMS)),
    "protocol": one_of(("simple", "ll", "ll128")),
    "channels": whole(1, 64),
}
"""NCCL's settings that a job can choose. Source: NCCL's user guide, "Environment Variables"."""


def parse_nccl(value: Any) -> dict[str, Any]:
    """Settings of NCCL by name."""
    if not isinstance(value, dict):
        raise expected("settings by name", value, "such as {algorithm: ring}")
    for name in value:
        if name not in _OF_NCCL:
            raise InvalidValue(f"NCCL has no `{shorten(str(name))}` here", f"it has {', '.join(_OF_NCCL)}")
    return {name: _of_nccl(name, item) for name, item in value.items()}


def _of_nccl(name: str, item: Any) -> Any:
    try:
        return _OF_NCCL[name].parse(item)
    except InvalidValue as error:
        raise InvalidValue(f"{name}: {error.message}", error.hint) from error


SPLIT = ValueKind(
    parse_split,
    {
        "anyOf": [
            {"enum": ["even", "balanced"]},
            {"type": "string", "pattern": RATIO_PATTERN},
            {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
        ]
    },
)
ONE_BATCH = ValueKind(parse_one_global_batch, COUNT.schema)
BATCH = ValueKind(parse_global_batch, {"anyOf": [{"const": "max"}, COUNT.schema]})
THREADS = ValueKind(
    parse_threads,
    {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MAX_THREADS}]},
)
CHECKPOINTING = ValueKind(
    parse_checkpointing,
    {"anyOf": [{"enum": ["none", "full"]}, {"type": "integer", "minimum": 2, "maximum": MAX_EVERY}]},
)
NCCL = ValueKind(
    parse_nccl,
    {
        "type": "object",
        "properties": {name: dict(kind.schema) for name, kind in _OF_NCCL.items()},
        "additionalProperties": False,
    },
)
