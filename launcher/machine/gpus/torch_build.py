"""Which GPUs the installed torch was built for, and whether their driver is new enough. Imports no torch."""

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpurun.launcher.machine.gpus.gpu import Gpus

INDEX = "https://download.pytorch.org/whl"
BUILDS = ((13, "cu130"), (12, "cu126"))
"""Major versions of CUDA, and the directory of the index with torch's build for it.

Source: the index, which has both for torch 2.11 to 2.13.
"""


@dataclass(frozen=True)
class TorchBuild:
    """What `torch/version.py` says."""

    version: str
    built_for: Mapping[str, str]
    """Version of the libraries by torch's name for their devices: `13.0` of CUDA, `hip` for AMD's."""


@cache
def installed_torch() -> TorchBuild | None:
    """`None` where there is no torch, or it doesn't say how it was built."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        return read_build(Path(found.origin).with_name("version.py").read_text())
    except OSError:
        return None


def read_build(text: str) -> TorchBuild | None:
    """The build by the text of `torch/version.py`; `None` without a version."""
    values: dict[str, Any] = {}
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            values[target.id] = value.value
    version = values.pop("__version__", None)
    built_for = {name: value for name, value in values.items() if isinstance(value, str)}
    return TorchBuild(version, built_for) if version else None


def nvidia_problem(build: TorchBuild | None, found: Gpus, name: str) -> str | None:
    """Why this torch can't use NVIDIA GPUs, which it calls `name`, and what to do; `None` where it can.

    Any driver that knows a major version of CUDA runs what was built for it. The driver's own answer
    includes a forward-compatibility package. Source: CUDA Compatibility, minor version compatibility.
    """
    if build is None or not found.gpus:
        return None
    newest, built = found.cuda_driver_version, build.built_for.get(name)
    if built is None:
        return f"torch {build.version} was built without CUDA\n    {_install(newest)}"
    if newest is None or _major(built) <= _major(newest):
        return None
    why = f"torch {build.version} was built for CUDA {built}, but driver {found.driver} has CUDA {newest}"
    return f"{why}\n    update the driver, or: {_install(newest)}"


def _install(newest: str | None) -> str:
    """How to get a build of torch for a driver that supports CUDA up to `newest`."""
    known = (name for major, name in BUILDS if newest is None or major <= _major(newest))
    name = next(known, None)
    return f"pip install --force-reinstall torch --index-url {INDEX}/{name}" if name else "update the driver"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
