"""The built-in workloads, for checking a job without importing torch."""

from collections.abc import Mapping
from pathlib import Path

import gpurun
from gpurun.workloads.registry import BUILTINS

_PACKAGES = Path(gpurun.__file__).parents[1]


def builtin_workloads() -> Mapping[str, str]:
    """Name and summary of every built-in workload."""
    return {name: builtin.summary for name, builtin in BUILTINS.items()}


def builtin_file(name: str) -> Path:
    """The source file of a built-in workload."""
    return _PACKAGES.joinpath(*BUILTINS[name].module.split(".")).with_suffix(".py")


def builtin_function(name: str) -> str:
    """The function in that file that builds it."""
    return BUILTINS[name].function


def is_workload(name: str) -> bool:
    """Whether it may be one: a built-in, or a function of the user's, wherever that is."""
    return ":" in name or name in BUILTINS


def default_batch(name: str | None) -> int | None:
    """The global batch that a workload has where the job gives none; most have none."""
    if is_probe(name):
        return 1
    builtin = BUILTINS.get(name or "")
    batch: int | None = builtin.defaults.get("global_batch") if builtin else None
    return batch


def is_probe(name: str | None) -> bool:
    """Whether it is a micro-benchmark: no training steps, no batch; `None` stands for a program's job."""
    builtin = BUILTINS.get(name or "")
    return builtin is not None and builtin.kind == "micro-benchmark"


def default_strategy(name: str | None) -> str | None:
    """The strategy of a micro-benchmark where the job names none."""
    builtin = BUILTINS.get(name or "")
    strategy: str | None = builtin.defaults.get("strategy") if builtin else None
    return strategy
