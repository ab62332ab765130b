"""The built-in workloads, for checking a job without importing torch."""

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_REGISTRY = Path(__file__).resolve().parents[2] / "workloads" / "registry.py"
"""The two packages are installed side by side; a folder of that name in a job's own folder is not meant."""


@cache
def builtin_workloads() -> Mapping[str, str]:
    """Name and summary of every built-in workload.

    `import workloads.registry` would run the package's `__init__`, which needs torch; the registry itself
    does not, so it is loaded from its file.
    """
    spec = importlib.util.spec_from_file_location("gpurun_workload_registry", _REGISTRY)
    if spec is None or spec.loader is None:
        raise ImportError(f"no workload registry at {_REGISTRY}")
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    return {name: builtin.summary for name, builtin in registry.BUILTINS.items()}
