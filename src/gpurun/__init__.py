"""gpurun: launch, measure and compare every way of splitting a training batch over your devices.

What training code imports: `Workload` to describe a model, `step` to mark the steps of a program, and
`gpurun.uneven` to train with an uneven split. torch is imported only with what needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpurun.launcher import __version__ as __version__
from gpurun.launcher.stepping import step

if TYPE_CHECKING:
    from gpurun import uneven
    from gpurun.workloads.base import Workload, device_index, on_device

__all__ = ["Workload", "device_index", "on_device", "step", "uneven"]


def __getattr__(name: str) -> Any:
    """Imports what needs torch at its first use."""
    if name == "uneven":
        return import_module("gpurun.uneven")
    if name in __all__:
        from gpurun.workloads import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
