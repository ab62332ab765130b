"""The built-in workloads, for checking a job without importing torch."""

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
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


@cache
def _registry() -> Mapping[str, Any]:
    """`workloads.registry.BUILTINS`.

    `import workloads.registry` would run the package's `__init__`, which needs torch; the registry itself
    does not, so it is loaded from its file.
    """
    path = _PACKAGES / "workloads" / "registry.py"
    spec = importlib.util.spec_from_file_location("gpurun_workload_registry", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no workload registry at {path}")
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    builtins: Mapping[str, Any] = registry.BUILTINS
    return builtins
