"""The built-in workloads, for checking a job without importing torch."""

from collections.abc import Mapping
from pathlib import Path

import gpurun
from gpurun.launcher.jobfile.kinds import workload_kind
from gpurun.launcher.jobfile.yaml.describe import did_you_mean, shorten
from gpurun.workloads.registry import BUILTINS, Builtin

_PACKAGES = Path(gpurun.__file__).parents[1]


def builtin_workloads() -> Mapping[str, str]:
    """Name and summary of every built-in workload."""
    return {name: builtin.summary for name, builtin in BUILTINS.items()}


def no_such_builtin(name: str) -> tuple[str, str]:
    """The message and the hint for a name that no built-in workload has."""
    hint = did_you_mean(name, BUILTINS) or f"built-in workloads: {', '.join(BUILTINS)}"
    return f"there is no built-in workload `{shorten(name)}`", hint


def builtin_file(name: str) -> Path:
    """The source file of a built-in workload."""
    return _PACKAGES.joinpath(*BUILTINS[name].module.split(".")).with_suffix(".py")


def builtin_function(name: str) -> str:
    """The function in that file that builds it."""
    return BUILTINS[name].function


def is_workload(name: str) -> bool:
    """Whether it may be one: a built-in, or a function of the user's, wherever that is."""
    return ":" in name or name in BUILTINS


def builtin_named(name: str | None) -> Builtin | None:
    """The built-in workload of that name; `None` for a program and for functions of the user's."""
    return BUILTINS.get(name or "")


def default_batch(name: str | None) -> int | None:
    """The global batch that a workload has where the job gives none; most have none."""
    builtin = builtin_named(name)
    batch: int | None = builtin.defaults.get("global_batch") if builtin else None
    return batch if workload_kind(name).has_batch else 1


def default_strategy(name: str) -> str | None:
    """The strategy of a micro-benchmark where the job names none."""
    builtin = builtin_named(name)
    strategy: str | None = builtin.defaults.get("strategy") if builtin else None
    return strategy
