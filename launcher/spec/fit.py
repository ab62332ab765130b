"""Mistakes that show once the devices are known: from the job itself, or from the machine."""

from collections.abc import Iterator, Sequence

from launcher.errors import Problem
from launcher.spec.draft import Draft
from launcher.spec.tree import Path
from launcher.spec.values import Devices
from launcher.splits import parts_of
from launcher.units import plural


def named_devices(devices: Devices) -> tuple[str, ...] | None:
    """The devices where the job names them; `None` if only the machine tells."""
    if isinstance(devices, tuple):
        return devices
    kind, _, count = devices.partition(":")
    return (kind,) * int(count) if count else None


def find_misfits(draft: Draft, devices: Sequence[str]) -> list[Problem]:
    """What can't be on these devices, whatever it is combined with."""
    return [
        *_too_many(draft, len(devices)),
        *_tf32_on_cpu(draft, devices),
        *_foreign_splits(draft, len(devices)),
    ]


def _too_many(draft: Draft, num_devices: int) -> Iterator[Problem]:
    counts = draft.values("device_count")
    if counts is None or None in counts or min(counts) <= num_devices:
        return
    message = f"the job asks for {min(counts)} devices and names {plural(num_devices, 'device')}"
    yield draft.spec.problem(_place(draft, "device_count"), message, "name more under `devices`")


def _tf32_on_cpu(draft: Draft, devices: Sequence[str]) -> Iterator[Problem]:
    precisions = draft.values("precision")
    if precisions is not None and set(precisions) == {"tf32"} and devices[0].startswith("cpu"):
        hint = "use fp32 on CPU devices"
        yield draft.spec.problem(_place(draft, "precision"), "tf32 is a mode of NVIDIA GPUs", hint)


def _foreign_splits(draft: Draft, num_devices: int) -> Iterator[Problem]:
    """Splits for a number of devices that no variant has. `single` uses none, so it rejects none."""
    strategies, stated = draft.values("strategy"), draft.values("device_count")
    if strategies is None or stated is None or set(strategies) == {"single"}:
        return
    counts = [num_devices if count is None else count for count in stated]
    for path, split in draft.placed("split"):
        parts = parts_of(split)
        if parts is not None and parts not in counts:
            text = split if isinstance(split, str) else str(list(split))[:80]
            used = " or ".join(str(count) for count in dict.fromkeys(counts))
            message = f"the split {text} is for {plural(parts, 'device')}, but the job uses {used}"
            yield draft.spec.problem(path, message, "a split has one number for each device")


def _place(draft: Draft, key: str) -> Path:
    return ("compare", key) if getattr(draft.spec.compare, key) else (key,)
