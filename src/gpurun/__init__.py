"""gpurun: launch, measure and compare every way of splitting a training batch over your devices.

What training code imports: `Workload` to describe a model, `step` to mark the steps of a program, and
`gpurun.uneven` to train with an uneven split. torch is imported only with what needs it.
"""

from gpurun.launcher import __version__ as __version__

TYPE_CHECKING = False  # `typing` takes milliseconds, in which the command line can't answer Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from gpurun import uneven
    from gpurun.launcher.stepping import step
    from gpurun.workloads.base import Workload, device_index, on_device

__all__ = ["Workload", "device_index", "on_device", "step", "uneven"]


def __getattr__(name: str) -> "Any":
    """Imports what needs torch, and what the command line doesn't, at its first use."""
    if name == "uneven":
        from importlib import import_module

        return import_module("gpurun.uneven")
    if name == "step":
        from gpurun.launcher.stepping import step

        return step
    if name in __all__:
        from gpurun.workloads import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
