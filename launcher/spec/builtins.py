"""The built-in workloads, for checking a job without importing torch."""

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = Path(__file__).resolve().parents[2]
"""The two packages are installed side by side; a folder `workloads` in a job's own folder is not meant."""


def builtin_workloads() -> Mapping[str, str]:
    """Name and summary of every built-in workload."""
    return {name: builtin.summary for name, builtin in _registry().items()}


def builtin_file(name: str) -> Path:
    """The source file of a built-in workload."""
    module: str = _registry()[name].module
    return _PACKAGES.joinpath(*module.split(".")).with_suffix(".py")


def builtin_function(name: str) -> str:
    """The function in that file that builds it."""
    function: str = _registry()[name].function
    return function


def is_workload(name: str) -> bool:
    """Whether it may be one: a built-in, or a function of the user's, wherever that is."""
    return ":" in name or name in _registry()


def default_batch(name: str | None) -> int | None:
    """The global batch that a workload has where the job gives none; most have none."""
    if is_probe(name):
        return 1
    builtin = _registry().get(name or "")
    batch: int | None = builtin.defaults.get("global_batch") if builtin else None
    return batch


def is_probe(name: str | None) -> bool:
    """Whether it is a micro-benchmark: no training steps, no batch; `None` stands for a program's job."""
    builtin = _registry().get(name or "")
    return builtin is not None and builtin.kind == "micro-benchmark"


def default_strategy(name: str | None) -> str | None:
    """The strategy of a micro-benchmark where the job names none."""
    builtin = _registry().get(name or "")
    strategy: str | None = builtin.defaults.get("strategy") if builtin else None
    return strategy


def registry() -> Mapping[str, Any]:
    """Every built-in workload (`workloads.registry.Builtin`) by name."""
    return _registry()


@cache
def _registry() -> Mapping[str, Any]:
    """`workloads.registry.BUILTINS`.

    `import workloads.registry` would run the package's `__init__`, which needs torch; the registry itself
    does not, so it is loaded from its file.
    """
    builtins: Mapping[str, Any] = _from_file("registry").BUILTINS
    return builtins


@cache
def torch_free(module: str) -> ModuleType:
    """A module of `workloads` that needs no torch, such as `limits`; loaded as the registry is."""
    return _from_file(module)


def _from_file(module: str) -> ModuleType:
    path, name = _PACKAGES / "workloads" / f"{module}.py", f"gpurun_workload_{module}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no {path}")
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(loaded)
    return loaded
