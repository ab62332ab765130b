"""Which GPUs the installed torch has kernels for, and whether the driver is new enough. Imports no torch."""

import ast
import importlib.util
import platform
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpurun.launcher.machine.gpus.gpu import Gpu, Gpus

INDEX = "https://download.pytorch.org/whl"
CAPABILITIES: Mapping[str, Mapping[str, Set[int]]] = {
    "13.0": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}},
    "12.6": {"x86_64": {50, 60, 70, 75, 80, 86, 90}, "aarch64": {80, 90}},
    "12.9": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 120}},
    "13.2": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}},
}
"""CUDA version of a build in the index → machine → compute capabilities that it has kernels for, 90 for 9.0.

The first that fits is recommended: torch's default build, then the one for the oldest drivers and GPUs.
Source: torch/cuda/__init__.py of torch 2.13, `PYTORCH_RELEASES_CODE_CC`.
"""
DEFAULT = "cu130"
"""The index's name of the build that PyPI has."""
INTEGRATED = {53, 62, 72, 87, 101}
"""GPUs of a system on a chip run kernels of their own capability alone, which no build of the index has.

Source: there, `DEVICE_REQUIREMENT`.
"""
NEWEST = (12, 1)
"""Compute capability of the newest GPU that torch 2.13 knows; a later torch may know newer ones."""
UPDATE = "update the driver"


@dataclass(frozen=True)
class TorchBuild:
    """The content of `torch/version.py`."""

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


def nvidia_problem(
    build: TorchBuild | None, found: Gpus, gpu: Gpu, name: str, machine: str = platform.machine()
) -> str | None:
    """Why this torch can't use one of the NVIDIA GPUs, and what to do; `None` where nothing says so.

    Any driver that knows a major version of CUDA runs what was built for it. The driver's own answer
    includes a forward-compatibility package. Source: CUDA Compatibility, minor version compatibility.

    Args:
        build: the installed torch.
        found: all GPUs that a process may see, and their driver.
        gpu: one of them.
        name: torch's word for its device.
        machine: `x86_64`; by default this one's.
    """
    if build is None:
        return None
    newest, built = found.cuda_driver_version, build.built_for.get(name)
    remedy = _remedy(found, gpu, machine)
    if built is None:
        return f"torch {build.version} was built without CUDA\n    {remedy}"
    # Another build, from source or of a container, has kernels of its own choice.
    if build.version.endswith(f"+{_tag(built)}") and not _has_kernels(built, machine, gpu):
        capability = ".".join(map(str, gpu.capability or ()))
        return f"torch {build.version} has no kernels for compute capability {capability}\n    {remedy}"
    if newest is None or _major(built) <= _major(newest):
        return None
    why = f"torch {build.version} was built for CUDA {built}, but driver {found.driver} has CUDA {newest}"
    return f"{why}\n    {remedy if remedy == UPDATE else f'{UPDATE}, or: {remedy}'}"


def runs_on(code: int, capability: tuple[int, int]) -> bool:
    """Whether a GPU of `capability` runs kernels that an index's build has for `code`."""
    major, minor = capability
    own = 10 * major + minor
    return own not in INTEGRATED and code // 10 == major and code <= own


def _has_kernels(cuda: str, machine: str, gpu: Gpu) -> bool:
    """Whether the index's build for a version of CUDA serves a GPU; what isn't in the table may."""
    codes = CAPABILITIES.get(cuda, {}).get(machine)
    if codes is None or gpu.capability is None or gpu.capability > NEWEST:
        return True
    return any(runs_on(code, gpu.capability) for code in codes)


def build_for(found: Gpus, machine: str = platform.machine()) -> str | None:
    """The index's build, `cu126`, for all these GPUs, or else for the first; `None` where there is none."""
    best = (_best(found, gpu, machine) for gpu in found.gpus)
    return next((_tag(cuda) for cuda in best if cuda), None)


def _remedy(found: Gpus, gpu: Gpu, machine: str) -> str:
    """How to get a build of torch that this driver runs and that serves all GPUs, or else this one."""
    if not _serving(gpu, machine):
        return "no build of torch 2.13 has kernels for it: leave it out of `devices`"
    best = _best(found, gpu, machine)
    return f"pip install --force-reinstall torch --index-url {INDEX}/{_tag(best)}" if best else UPDATE


def _best(found: Gpus, gpu: Gpu, machine: str) -> str | None:
    """CUDA version of the build that this driver runs and that serves all GPUs, or else this one."""
    newest = found.cuda_driver_version
    runnable = [cuda for cuda in _serving(gpu, machine) if newest is None or _major(cuda) <= _major(newest)]
    for_all = [cuda for cuda in runnable if all(_has_kernels(cuda, machine, each) for each in found.gpus)]
    return next(iter(for_all or runnable), None)


def _serving(gpu: Gpu, machine: str) -> list[str]:
    """CUDA versions of the builds that have kernels for it."""
    return [cuda for cuda in CAPABILITIES if _has_kernels(cuda, machine, gpu)]


def _tag(cuda: str) -> str:
    """`cu130` for 13.0: the directory of the index, and the end of such a build's version."""
    return f"cu{cuda.replace('.', '')}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])
