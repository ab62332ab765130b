"""Settings as the files of a run have them: a variant's value, and names that no table has."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.field_types import Kind
from gpurun.launcher.jobfile.kinds import is_workload, no_such_builtin
from gpurun.launcher.jobfile.section import key_of
from gpurun.launcher.jobfile.settings import SETTINGS, Settings
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.strategies import strategy_named

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        one.name: tuple(kind.schema["enum"])
        for one in fields(Settings)
        if isinstance(kind := key_of(one.name, one.type).kind, Kind) and "enum" in kind.schema
    }
)
"""Of settings whose value is a name, the names."""
NAMES = (*_CHOICES, "workload", "devices")
"""What `refuse_unknown_names` checks."""


def refuse_unknown_names(given: Mapping[str, Any]) -> None:
    """Checks the names among these values of settings, and the devices: what a file of a run has.

    Raises:
        ValueError: no table has a strategy, a built-in workload, a precision or another choice of that
            name, or a device of that kind.
    """
    for key, choices in _CHOICES.items():
        value = given.get(key)
        if key == "strategy" and value is not None:
            strategy_named(str(value))
        elif value is not None and value != SETTINGS[key].absent and value not in choices:
            raise ValueError(f"there is no {key} `{value}`; known ones: {', '.join(choices)}")
    if (workload := given.get("workload")) and not is_workload(str(workload)):
        raise ValueError(f"there is no workload `{workload}` ({no_such_builtin(str(workload))[1]})")
    named = given.get("devices") or ()
    for device in named if isinstance(named, list | tuple) else (named,):
        if device != values.AUTO:
            _refuse_unknown_kind(str(device))


def _refuse_unknown_kind(device: str) -> None:
    try:
        accelerator_of(device)
    except SpecError as error:
        raise ValueError(str(error)) from error


def refuse_unknown_names_in_job(job: Mapping[str, Any]) -> None:
    """Checks a recorded job, what it compares and its baseline; as `refuse_unknown_names`."""
    compare, baseline = (_mapping_in(job, key) for key in ("compare", "baseline"))
    lists = {key: items for key, items in compare.items() if isinstance(items, list | tuple)}
    for given in (job, baseline, *({key: item} for key in lists for item in lists[key])):
        refuse_unknown_names(given)


def _mapping_in(job: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = job.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"`{key}` is no mapping")
    return value


def resolved_setting(name: str, job: Mapping[str, Any], varied: Mapping[str, Any]) -> Any:
    """A variant's value of a setting: what varied, merged into the job's own value or the default.

    Args:
        name: of the setting.
        job: the run's job as plain data.
        varied: the variant's values of what varied.
    """
    own = job.get(name, getattr(Settings(), name))
    value = SETTINGS[name].shape.merge(own, varied[name]) if name in varied else own
    return tuple(value) if isinstance(value, list) else value
