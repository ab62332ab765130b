"""Values of a job file that are more than a number or a word: devices, programs, splits, durations, names.

Each function takes the value in the YAML and returns what a `JobSpec` holds, or raises `InvalidValue`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gpurun.launcher.jobfile.section import InvalidValue, ValueKind, expected, one_of, whole
from gpurun.launcher.jobfile.yaml.describe import (
    any_of,
    correction,
    describe,
    did_you_mean,
    flow_text,
    nearest,
    shorten,
)
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU, accelerator_of, gpu_kinds
from gpurun.launcher.machine.gpus.gpu import memory_sizes_gb
from gpurun.launcher.masking import is_secret, masked
from gpurun.launcher.splits import BALANCED
from gpurun.launcher.strategies import NCCL_ALGORITHMS
from gpurun.launcher.units import GIB, format_count
from gpurun.workloads.registry import BUILTINS

Devices = str | tuple[str, ...]
Nodes = int | str
"""A number of nodes, or the least and the most: `2..4`."""

AUTO = "auto"
"""Lets the machine choose the devices."""

MAX_DEVICES = 256
MAX_NODES = 1024
"""More than any machine has; keeps a slip such as `cpu:40000` from planning 40,000 processes."""

BECOMES_COMMAND = "gpurun.launcher.worker.program.become_command"
"""The module that a rank runs to become a command that is no Python."""
GPU_KINDS = tuple(kind.name for kind in gpu_kinds())
"""Words that mean all GPUs of a kind."""

_UUID_PREFIXES = "|".join(prefix for kind in gpu_kinds() for prefix in kind.uuid_prefixes)
_DEVICE = f"({CPU.name}|({'|'.join(ACCELERATORS)}):[0-9]+|({_UUID_PREFIXES})[0-9A-Za-z/-]+)"
DEVICE_PATTERN = f"^{_DEVICE}(@[0-9]+)?$"
"""A device of a list, for the schema."""
ONE_GPU_PATTERN = f"^(?!{CPU.name}){_DEVICE}(@[0-9]+)?$"
"""A GPU that is named alone; `cpu:2` means two devices there."""

NODES_PATTERN = r"^[0-9]{1,9}\.\.[0-9]{1,9}$"
"""The least and the most nodes, for the schema."""

_NUM_NODES = whole(1, MAX_NODES)

_UUID = re.compile(rf"({_UUID_PREFIXES})[0-9A-Za-z][0-9A-Za-z/-]{{0,99}}")
"""As `nvidia-smi -L` and CUDA_VISIBLE_DEVICES have them; may be cut short."""
_AT_NODE = re.compile(r"@[0-9]{1,6}$")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")


_ANY_DEVICES = f"use auto, cpu:2, {', '.join(GPU_KINDS)}, or a list such as [cuda:0, cuda:1]"


def parse_devices(value: Any) -> Devices:
    """`auto`, `cuda`, `cpu:N`, or a tuple of `cpu`, `cpu:i`, and `cuda:i` or UUIDs, of one kind.

    One GPU may be named without a list.
    """
    if isinstance(value, list):
        return _device_list(value)
    if value == AUTO or value in GPU_KINDS:
        return str(value)
    if isinstance(value, str) and (count := _device_number(CPU.name, value)) is not None:
        if not 1 <= count <= MAX_DEVICES:
            text = f"`cpu:N` takes 1 to {MAX_DEVICES} devices, got {count}"
            raise InvalidValue(text, None if count else "write `[cpu:0]` for that device, `cpu:2` for two")
        return CPU.device(count)
    if isinstance(value, str) and _is_device(_AT_NODE.sub("", value)):
        return _device_list([value])
    raise expected("a valid list of devices", value, _devices_hint(value))


def _devices_hint(value: Any) -> str:
    if value == CPU.name:
        return "`cpu:2` makes two devices from this machine's cores"
    if isinstance(value, str) and (named := _NAMED.fullmatch(value.lower())):
        return _one_kind(*named.groups())
    if isinstance(value, dict) and len(value) == 1:
        return "write it without the space: `cpu:2`"
    if re.fullmatch("[1-9][0-9]{0,2}", str(value)):
        return f"write `{CPU.device(int(value))}`; or `{GPU_KINDS[0]}`, and `device_count: {value}`"
    names = _names_in(value) if isinstance(value, str) else []
    if len(names) > 1 and all(map(_is_device, names)):
        return f"write [{', '.join(names)}]"
    return _ANY_DEVICES


_NAMED = re.compile(r"([a-z]+)[:= -]?([0-9]{0,3})(?:-([0-9]{1,3}))?[.,;]?")
"""`gpu:2`, `CPU:4` or `cuda:0-3`."""
_ALL_GPUS = frozenset({"gpu", "gpus", "all", "nvidia", *GPU_KINDS})


def _one_kind(word: str, number: str, last: str | None) -> str:
    """How to write devices of a kind that a word names."""
    gpus = word if word in GPU_KINDS else GPU_KINDS[0]
    if word == CPU.name:
        return f"write `{CPU.device(int(number or 2))}`"
    if word not in _ALL_GPUS:
        near = nearest(word, ACCELERATORS)
        return f"did you mean `{near}{number and f':{number}'}`?" if near else _ANY_DEVICES
    if not number:
        return f"write `{gpus}` for all GPUs"
    if last and int(number) < int(last):
        listed = (f"{gpus}:{index}" for index in range(int(number), int(last) + 1))
        return f"write [{', '.join(listed)}]"[:120]
    some = f", `{gpus}` with `device_count: {number}` for {number} of them" if int(number) > 1 else ""
    return f"write `{gpus}:{number}` for that GPU, `{gpus}` for all GPUs{some}; without GPUs, `cpu:2`"


def _names_in(text: str) -> list[str]:
    """The devices of `cuda:0, cuda:1` and `cuda:0 cuda:1`."""
    return [name for name in re.split(r"[,;\s]+", text) if name]


ONE_KIND = "use devices of one kind"


def mixed_kinds(titles: Iterable[str]) -> str:
    """The message for devices of several kinds; its hint is `ONE_KIND`."""
    return f"{' and '.join(sorted(titles))} devices can't share a batch"


def _device_list(items: list[Any]) -> tuple[str, ...]:
    if not 1 <= len(items) <= MAX_DEVICES:
        raise InvalidValue(f"expected 1 to {MAX_DEVICES} devices, got {len(items)}")
    for position, item in enumerate(items):
        if not isinstance(item, str) or not (item == CPU.name or _is_device(_AT_NODE.sub("", item))):
            raise expected("the name of a device", item, _names_hint(items), position)
    kinds = {accelerator_of(item).title for item in items}
    if len(kinds) > 1:
        raise InvalidValue(mixed_kinds(kinds), ONE_KIND)
    return tuple(_plain_number(item) for item in items)


def _names_hint(items: list[Any]) -> str:
    """How to write a list of devices with an item that is none."""
    if all(re.fullmatch("[0-9]{1,3}", str(item)) for item in items):
        return f"write [{', '.join(f'{GPU_KINDS[0]}:{item}' for item in items)}]"[:120]
    names = [name for item in items for name in _names_in(str(item))]
    if all(map(_is_device, names)):
        return f"write [{', '.join(names)}]"[:120]
    return f"for example cpu:0 or {GPU_KINDS[0]}:0"


def _plain_number(device: str) -> str:
    """The device without leading zeros, which mean something in a UUID only."""
    name, _, node = device.partition("@")
    plain = name if _UUID.fullmatch(name) else re.sub(r"\b0+(?=[0-9])", "", name)
    return f"{plain}@{int(node)}" if node else plain


def parse_nodes(value: Any) -> Nodes:
    """A number, or a range with at least two nodes."""
    match = _RANGE.fullmatch(value) if isinstance(value, str) else None
    if value in ("all", AUTO):
        raise expected("a whole number", value, "write how many nodes there are, or a range such as 2..4")
    if match is None:
        return int(_NUM_NODES.parse(value))
    least, most = int(match[1]), int(match[2])
    if not 2 <= least < most <= MAX_NODES:
        bounds = f"a range begins at 2 or more, and ends at more than that, up to {MAX_NODES}"
        raise InvalidValue(f"{value} is no range of nodes: {bounds}", "such as 2..4")
    return f"{least}..{most}"


def node_bounds(nodes: Nodes) -> tuple[int, int]:
    """The least and the most nodes that a job takes."""
    least, _, most = str(nodes).partition("..")
    return int(least), int(most or least)


def nodes_named(devices: Devices) -> list[int]:
    """The node of each device where a list names it, as `cuda:1@0` does; empty if it names none."""
    places = devices if isinstance(devices, tuple) else ()
    return [int(name.partition("@")[2]) for name in places if "@" in name]


def devices_on(devices: Devices, node: int) -> Devices:
    """The devices that the job uses on one node, in that node's own names."""
    if not nodes_named(devices):
        return devices
    return tuple(name.partition("@")[0] for name in devices if name.endswith(f"@{node}"))


def _is_device(text: str) -> bool:
    return bool(_UUID.fullmatch(text)) or any(_device_number(kind, text) is not None for kind in ACCELERATORS)


def _device_number(kind: str, text: str) -> int | None:
    match = re.fullmatch(rf"{kind}:([0-9]{{1,9}})", text)
    return int(match[1]) if match else None


NODES = ValueKind(
    parse_nodes,
    {"anyOf": [dict(_NUM_NODES.schema), {"type": "string", "pattern": NODES_PATTERN}]},
)


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
    sizes = memory_sizes_gb(value)
    if not sizes:
        raise expected("a size or a GPU", value, "use 20 GiB, or the name of a GPU such as H100 80GB")
    if len(sizes) > 1:
        listed = " or ".join(f"`{value} {size}GB`" for size in sizes)
        raise InvalidValue(f"there are {value} GPUs with different amounts of memory", f"write {listed}")
    return sizes[0] * 10**9


MAX_TFLOPS = 1e6


def parse_peaks(value: Any, precisions: Sequence[str]) -> dict[str, float]:
    """TFLOP/s by precision: `{bf16: 989}`."""
    if not isinstance(value, Mapping) or not value or not value.keys() <= {*precisions}:
        raise expected("TFLOP/s by precision", value, "use {bf16: 989}")
    for rate in value.values():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= MAX_TFLOPS:
            raise expected("a positive number of TFLOP/s", rate)
    return {precision: float(rate) for precision, rate in value.items()}


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
    return str(value) if value == "max" else int(COUNT.parse(value))


def parse_one_global_batch(value: Any) -> int:
    """One of several numbers of samples; with `max` there is nothing to compare."""
    if value == "max":
        raise InvalidValue(
            "`max` can't be compared with other batches", "set `global_batch: max` at the top instead"
        )
    return int(COUNT.parse(value))


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


END_OF_OPTIONS = "--"
"""The argument after which nothing is an option."""
ON, OFF = "on", "off"
"""Values of an option that is a flag."""

_OPTION_LIKE = re.compile(r"-[^\d.]")
"""The beginning of an option; a negative number is a value."""


def with_options(args: Sequence[str], options: Mapping[str, str]) -> tuple[str, ...]:
    """The arguments with these options, each in the form that it has there; all others stay as they are.

    `workers` is `--workers 2` or `--workers=2`, with one dash or two, and with `-` or `_` in a longer name;
    `+model.width` is Hydra's `model.width=64`, also after `+` or `++`. Of several equal options the last one
    counts, as it does for programs. An option that isn't there is added.
    """
    end = args.index(END_OF_OPTIONS) if END_OF_OPTIONS in args else len(args)
    line = list(args[:end])
    for name, value in options.items():
        _set(line, name, value)
    return (*line, *args[end:])


def _set(line: list[str], name: str, value: str) -> None:
    key = name.removeprefix("+")
    spelled = "[-_]".join(map(re.escape, re.split("[-_]", key)))
    options = _places(line, rf"--?{spelled}(=|\Z)") if key == name else []
    if not options and (overrides := _places(line, rf"\+{{0,2}}{re.escape(key)}=")):
        line[overrides[-1]] = _assigned(line[overrides[-1]], value)
    elif options and not (value in (ON, OFF) and _is_flag(line, options[-1])):
        _replace(line, options[-1], value)
    elif value == OFF and key == name:
        for at in reversed(options):
            del line[at]
    elif not options:
        line += _added(name, value)


def _places(line: Sequence[str], pattern: str) -> list[int]:
    return [at for at, word in enumerate(line) if re.match(pattern, word)]


def _assigned(word: str, value: str) -> str:
    return f"{word.partition('=')[0]}={value}"


def _is_flag(line: Sequence[str], at: int) -> bool:
    """Whether an option has no value; what follows it is one only if it is `on` or `off`."""
    return "=" not in line[at] and line[at + 1 : at + 2] not in ([ON], [OFF])


def _replace(line: list[str], at: int, value: str) -> None:
    if "=" in line[at]:
        line[at] = _assigned(line[at], value)
    else:
        has_value = at + 1 < len(line) and not _OPTION_LIKE.match(line[at + 1])
        line[at + 1 : at + 1 + has_value] = [value]


def _added(name: str, value: str) -> list[str]:
    if name.startswith("+"):
        return [f"{name[1:]}={value}"]
    option = f"-{name}" if len(name) == 1 else f"--{name}"
    return [option] if value == ON else [option, value]


SCRIPT_PATH = "the path of a Python file"
MODULE_NAME = "the name of a module"
MAX_ARGS = 1000
"""Linux takes more, a person writes fewer."""

CALLS = (
    *("DataLoader", "DistributedDataParallel", "Optimizer", "compile"),
    *("autocast", "comm_hook", "cudnn", "matmul"),
)
"""What of torch a job may change in a program: constructors, what is given to DDP, and flags."""
FIXED_CALLS: Mapping[str, Mapping[str, tuple[bool | str, ...]]] = MappingProxyType(
    {
        "autocast": {"dtype": ("bfloat16", "float16")},
        "comm_hook": {"compress": ("bf16", "fp16")},
        "cudnn": {"benchmark": (True, False), "deterministic": (True, False)},
        "matmul": {"precision": ("highest", "high", "medium")},
    }
)
"""Calls that take only these keywords, each with its values."""

OWN_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GPURUN_LAUNCH_DIR"),
        *(kind.visible_variable for kind in gpu_kinds() if kind.visible_variable is not None),
    }
)
"""Variables that a launcher gives its ranks, and that a job therefore can't."""

OPTION_NAME = re.compile(r"[^\W\d_][\w.-]*|\+[^\s=+][^\s=]*")
"""A name such as `workers`, or with `+` a key of Hydra's."""
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def parse_script(value: Any) -> str:
    """The path of a Python file, relative to the job file's directory or absolute."""
    if isinstance(value, str) and value.strip() and "\x00" not in value:
        return value
    raise expected(SCRIPT_PATH, value, "such as train.py")


def parse_module(value: Any) -> str:
    """A module's full name, as `python -m` takes it."""
    if isinstance(value, str) and _MODULE.fullmatch(value) and not value.endswith(".py"):
        return value
    hint = "such as package.train"
    if isinstance(value, str) and (value.endswith(".py") or "/" in value):
        hint = f"`script: {shorten(value)}` runs a file"
    raise expected(MODULE_NAME, value, hint)


def parse_args(value: Any) -> tuple[str, ...]:
    """Arguments as a program gets them; numbers need no quotes."""
    if isinstance(value, str):
        items = ", ".join(value.split())
        raise expected("a list of arguments", value, f"write [{items}]"[:120])
    if isinstance(value, dict):
        words = flow_text([word for pair in value.items() for word in pair if word is not None])
        raise expected("a list of arguments", value, f"write {words}"[:120])
    if not isinstance(value, list):
        raise expected("a list of arguments", value, 'such as [--epochs, "1"]')
    if len(value) > MAX_ARGS:
        raise InvalidValue(
            f"expected at most {format_count(MAX_ARGS)} arguments, got {format_count(len(value))}"
        )
    return tuple(_argument(item, position) for position, item in enumerate(value))


def _argument(item: Any, position: int) -> str:
    text = _text(item)
    if text is None:
        raise expected("an argument", item, correction(item, str), position)
    return text


def check_args_list(items: list[Any]) -> None:
    """Refuses the value of `compare: args` if it is one list of arguments, not several."""
    if items and not any(isinstance(item, list | dict) for item in items):
        lists = [", ".join(str(item).split()) for item in items]
        are_lists = len(items) > 1 and all("," in text for text in lists)
        hint = "write " if are_lists else "for one list, write "
        hint += f"[[{'], ['.join(lists)}]]" if are_lists else f"[[{', '.join(lists)}]]"
        if len(items) > 1 and not are_lists and not lists[0].startswith("-"):
            hint += f"; to compare them, [[{'], ['.join(lists)}]]"
        raise InvalidValue("an argument alone is not a list of arguments", hint[:120])


def parse_options(value: Any) -> dict[str, str]:
    """Options by name; numbers need no quotes, and a flag may be a truth value."""
    if not isinstance(value, dict):
        raise expected("options by name", value, "such as {workers: 2}")
    return {name: _option(name, item) for name, item in value.items()}


def _option(name: str, item: Any) -> str:
    if not OPTION_NAME.fullmatch(name):
        bare = name.lstrip("-")
        hint = f"write {bare}" if OPTION_NAME.fullmatch(bare) else "such as workers, or Hydra's +model.width"
        raise InvalidValue(f"expected the name of an option, got {describe(name)}", hint)
    text = (ON if item else OFF) if isinstance(item, bool) else _text(item)
    if text is None:
        raise expected(f"a text or a number for the option {shorten(name)}", item)
    return text


def parse_calls(value: Any) -> dict[str, dict[str, bool | int | float | str]]:
    """Keyword arguments by the name of what is called."""
    example = "such as {DataLoader: {num_workers: 2}}"
    if not isinstance(value, dict):
        raise expected("keyword arguments by call", value, example)
    for name, given in value.items():
        if name not in CALLS:
            hint = did_you_mean(name, CALLS) or f"use {any_of(CALLS)}"
            raise InvalidValue(f"no call `{shorten(name)}` can be changed", hint)
        if not isinstance(given, dict):
            hint = f"write {{{name}: {{}}}}" if name == "compile" else example
            raise expected(f"keyword arguments of {name}", given, hint)
        for keyword, item in given.items():
            _check_keyword(name, keyword, item)
    return value


def _check_keyword(name: str, keyword: str, item: Any) -> None:
    if (known := FIXED_CALLS.get(name)) is not None:
        if keyword not in known:
            hint = did_you_mean(keyword, known) or f"use {any_of([*known])}"
            raise InvalidValue(f"{name} has no `{shorten(keyword)}` here", hint)
        values = known[keyword]
        if type(item) is not type(values[0]) or item not in values:
            named = any_of([str(each).lower() if isinstance(each, bool) else each for each in values])
            raise expected(f"{named} for {keyword} of {name}", item, correction(item, type(values[0])))
    elif not keyword.isidentifier():
        raise expected(f"the name of a keyword argument of {name}", keyword, "such as num_workers")
    elif not isinstance(item, bool | int | float | str):
        raise expected(f"true, false, a number or a text for {keyword} of {name}", item)


def parse_env(value: Any) -> dict[str, str]:
    """Environment variables by name, those with secrets masked; numbers need no quotes."""
    if isinstance(value, str):  # not shown: it may hold a secret
        raise InvalidValue("expected variables by name, got a text", "such as {NCCL_DEBUG: INFO}")
    if not isinstance(value, dict):
        raise expected("variables by name", value, "such as {NCCL_DEBUG: INFO}")
    return {name: _variable(name, item) for name, item in value.items()}


def for_message(name: str, value: Any) -> Any:
    """A value as advice may show it: of `env`, with masks in place of secrets."""
    return parse_env(value) if name == "env" else value


def _variable(name: str, item: Any) -> str:
    if not name or "=" in name or "\x00" in name:
        variable, equals, _ = name.partition("=")  # the value may be a secret
        hint = f"write its name and its value apart: {shorten(variable)}: …" if variable and equals else None
        shown = describe(f"{variable}=…" if equals else name)
        raise InvalidValue(f"expected the name of an environment variable, got {shown}", hint)
    if name in OWN_VARIABLES:
        raise InvalidValue(
            f"{name} can't be set: gpurun sets it for every rank", "remove it; `devices` chooses the devices"
        )
    text = _text(item)
    if text is None and is_secret(name):
        raise InvalidValue(f"expected text for the variable {shorten(name)}")
    if text is None:
        quoted = "" if item is None else str(item).lower()
        hint = f'write it as text: {name}: "{quoted}"' if item is None or isinstance(item, bool) else None
        raise expected(f"text for the variable {shorten(name)}", item, hint)
    return masked(name, text)


def _text(item: Any) -> str | None:
    """Text or a number as text; a truth value has more than one spelling, so that none is guessed."""
    if isinstance(item, str):
        return None if "\x00" in item else item
    return str(item) if isinstance(item, int | float) and not isinstance(item, bool) else None


SCRIPT, MODULE = ValueKind(parse_script, {"type": "string"}), ValueKind(parse_module, {"type": "string"})
ARGS = ValueKind(parse_args, {"type": "array", "items": {"type": ["string", "number"]}})
OPTIONS = ValueKind(
    parse_options,
    {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}},
)
CHANGED_CALLS = ValueKind(
    parse_calls,
    {
        "type": "object",
        "properties": {
            name: {
                "type": "object",
                "additionalProperties": {"type": ["boolean", "number", "string"]},
            }
            for name in CALLS
        },
        "additionalProperties": False,
    },
)
ENV = ValueKind(parse_env, {"type": "object", "additionalProperties": {"type": ["string", "number"]}})


WORKLOAD_NAME = "the name of a workload"
_WORKLOAD = re.compile(r"[A-Za-z_]\w*|[^:\x00]+\.py:[^\W\d]\w*|[^\W\d][\w.]*:[^\W\d]\w*")
_NEARLY = re.compile(r"(?P<source>[\w./-]+):(?P<owner>(?:\w+\.)+)?(?P<name>[^\W\d]\w*)(?P<args>\(.+\))?")
"""A text that is no workload yet, but shows which is meant."""


def parse_workload(value: Any) -> str:
    """`gpt`, `train.py:build` or `package.module:build`."""
    if isinstance(value, str) and _WORKLOAD.fullmatch(value):
        return value
    if isinstance(value, str) and _WORKLOAD.fullmatch(plain := _called(value)):
        hint = f"write {plain}"
    elif isinstance(value, str) and value.endswith(".py"):
        hint = f"name the function that builds it, such as {value}:build"
    elif isinstance(value, str) and (found := _NEARLY.fullmatch(value)):
        hint = _function_meant(**found.groupdict())
    else:
        hint = "use a built-in such as gpt, a file train.py:build, or a module package.module:build"
        if isinstance(value, str):
            hint = did_you_mean(value, BUILTINS) or hint
    raise expected(WORKLOAD_NAME, value, hint)


def _called(text: str) -> str:
    """`train.py:build` for `train.py::build` and `train.py:build()`."""
    return text.removesuffix("()").replace("::", ":")


def _function_meant(source: str, owner: str | None, name: str, args: str | None) -> str:
    """How to name the function of `train.py:Net.build`, `train.py:build(256)` or `pkg/train:build`."""
    if owner:
        return f"a method can't be named: write {source}:{name}, a function there that calls {owner}{name}"
    if args:
        return f"write {source}:{name}; arguments go into `params`, by name"
    return f"write {source}.py:{name} for a file, {source.strip('./').replace('/', '.')}:{name} for a module"
