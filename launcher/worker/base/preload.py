"""Imports packages for all ranks at once, if that leaves no trace by which a program could notice it.

Whether it does is seen in a process that imports the package and ends.
"""

import contextlib
import importlib
import importlib.util
import logging
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpurun.launcher.errors import MachineError
from gpurun.launcher.grouping import grouped
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.remembered import IMPORTS
from gpurun.launcher.rundir.store import cache_directory

PRELOADED: set[str] = set()
"""The packages that were imported here, and those that they have imported: ranks inherit it.

A program has them all once it imports one of them: which has imported which isn't known.
"""
IMPORTED_WITH: dict[str, str] = {}
"""Variables with which torch was imported here, and that ranks don't have until their program sets them."""
WITH_TORCH: set[str] = set()
"""First names of all modules that there were once torch had been imported; empty where that isn't known."""
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def preload_packages(modules: Sequence[str]) -> None:
    """Imports what is harmless of these modules, package by package."""
    known, before = _known(), set(sys.modules)
    by_package = grouped(modules, lambda name: name.partition(".")[0])
    for package, names in by_package.items():
        if all(name in sys.modules for name in names):
            continue
        key = _key_of(package)
        if key not in known:
            known[key] = is_harmless(names)
        if known[key]:
            import_all(names)
    PRELOADED.update(name for name in sys.modules.keys() - before if "." not in name)
    with contextlib.suppress(OSError, MachineError):
        write_json(_place(), known)


def note_what_torch_imports() -> None:
    """To be called when torch has been imported, and nothing else that it doesn't need."""
    WITH_TORCH.update(name for name in sys.modules if "." not in name)


def import_all(names: Sequence[str]) -> None:
    """Imports modules; one that fails does so in the program again, if it imports it."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def is_harmless(names: Sequence[str]) -> bool:
    """Whether a process that imports these modules is as before, but for the modules."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            before = state()
            import_all(names)
            code = 0 if state() == before else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def state() -> dict[str, Any]:
    """The state of a process that a program may notice, besides its modules."""
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "gpus": _open_gpus(),
        "env": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "random": random.getstate(),
        "numpy": repr(numpy.random.get_state()) if numpy else None,
        "torch": torch.random.get_rng_state().tolist() if torch else None,
        "types": torch.get_default_dtype() if torch else None,
        "hooks": (sys.excepthook, sys.unraisablehook, len(sys.meta_path), len(sys.path_hooks)),
        "logging": (logging.root.level, len(logging.root.handlers)),
        "path": list(sys.path),
        "directory": os.getcwd(),
    }


def _open_gpus() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(_GPUS))


def _place() -> Path:
    return cache_directory() / IMPORTS / "harmless.json"


def _known() -> dict[str, bool]:
    with contextlib.suppress(OSError, MachineError, ValueError):
        return read_json(_place(), dict[str, bool])
    return {}


def _key_of(package: str) -> str:
    """A package in one version: its file, and when that was installed."""
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return f"{spec.origin} {os.stat(spec.origin).st_mtime_ns}"
    return package
