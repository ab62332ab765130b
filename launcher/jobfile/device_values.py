"""Values of a job file that name devices and nodes.

Each function takes the value in the YAML and returns what a `JobSpec` holds, or raises `InvalidValue`.
"""

import re
from collections.abc import Iterable
from typing import Any

from gpurun.launcher.jobfile.field_types import InvalidValue, ValueKind, expected, whole
from gpurun.launcher.jobfile.yaml.describe import nearest
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU, accelerator_of, gpu_kinds

Devices = str | tuple[str, ...]
Nodes = int | str
"""A number of nodes, or the least and the most: `2..4`."""

AUTO = "auto"
"""Lets the machine choose the devices."""

MAX_DEVICES = 256
MAX_NODES = 1024
"""More than any machine has; keeps a slip such as `cpu:40000` from planning 40,000 processes."""

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
