"""Imports packages for all ranks at once, if that leaves no trace by which a program could notice it.

Whether it does is seen in a process that imports the package and ends. What can be undone here, and
done again in a rank when its program imports the package, is no trace: added warning filters and finders, and
variables that torch sets for itself. OpenBLAS starts no threads here: `OPENBLAS_NUM_THREADS` is 1.
"""

import builtins
import contextlib
import importlib
import importlib.util
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

from gpurun.launcher.errors import MachineError
from gpurun.launcher.grouping import grouped
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.remembered import IMPORTS, SET_BY_TORCH
from gpurun.launcher.rundir.store import cache_directory

PRELOADED: set[str] = set()
"""The packages that were imported here, and those that they have imported: ranks inherit it."""
IMPORTED_WITH: dict[str, str] = {}
"""Variables with which torch was imported here, and that ranks don't have until their program sets them."""
WITH_TORCH: set[str] = set()
"""First names of all modules that there were once torch had been imported; empty where that isn't known."""
LISTS: dict[str, Callable[[], list[Any]]] = {
    "filters": lambda: cast("list[Any]", warnings.filters),
    "finders": lambda: sys.meta_path,
}
"""Lists to which imports add, and from which that can be removed again."""
LOOK_EVERY_S = 0.05
"""How often a process that imports packages looks whether it is as before: a look takes milliseconds."""
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


@dataclass(frozen=True)
class Left:
    """What the import of a module has added to a list, or the variable that it has set."""

    module: str
    place: str
    """The name of the list or of the variable."""
    value: Any
    is_last: bool = False
    """Whether it was added at the end."""

    def add(self) -> None:
        """Adds it as the import does, wherever that stood alone.  Source: Lib/warnings.py, `_add_filter`"""
        if self.place not in LISTS:
            os.environ.setdefault(self.place, self.value)
            return
        values = LISTS[self.place]()
        if self.place == "filters" and self.value in values:
            if self.is_last:
                return
            values.remove(self.value)
        values.insert(len(values) if self.is_last else 0, self.value)
        if self.place == "filters":
            let_warnings_look_again()


@dataclass
class Imports:
    """Which module imports which, and what each leaves behind."""

    needs: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    left: list[Left] = field(default_factory=list)
    """In the order in which it was added."""
    _seen: dict[str, list[Any]] = field(default_factory=dict)
    _lengths: tuple[int, int, int] = (0, 0, 0)
    _new: list[tuple[str, Any, str]] = field(default_factory=list)
    """What was added, for a moment or to stay: where, what, and the module that did it."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within it, imports leave what they do, and are recorded; after it, that is undone."""
        before, original = _addable(), builtins.__import__
        for each in self.left:
            each.add()
        self._seen, self._lengths = _addable(), _lengths()
        builtins.__import__ = self._recording(original)
        try:
            yield
        finally:
            builtins.__import__ = original
            self.left = [*self._net(before)]
            for name, values in LISTS.items():
                values()[:] = before[name]
            for name in os.environ.keys() - before["variables"]:
                del os.environ[name]
            let_warnings_look_again()

    def _recording(self, original: Any) -> Any:
        """The function that an `import` statement calls."""

        def record(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            importer = _module_that_runs()
            if _lengths() != self._lengths:
                self.note(importer)
            found = [importer]
            try:
                result = original(name, globals, locals, fromlist, level)
                if level:
                    package = (globals["__package__"] or importer).rsplit(".", level - 1)[0]
                    name = f"{package}.{name}" if name else package
                found = [name]
                if fromlist and hasattr(result, "__path__"):
                    found += [part for item in fromlist if (part := f"{name}.{item}") in sys.modules]
                self.needs[importer].update(found)
                return result
            finally:
                if _lengths() != self._lengths:
                    self.note(found[-1])

        return record

    def note(self, module: str) -> None:
        """Notes what has been added since the last time: this module has done it."""
        seen, self._seen, self._lengths = self._seen, _addable(), _lengths()
        for name, values in self._seen.items():
            self._new += [(name, value, module) for value in values if value not in seen[name]]

    def _net(self, before: dict[str, list[Any]]) -> Iterator[Left]:
        """What there is more than before."""
        for name, values in _addable().items():
            front, end = added(before[name], values) or ((), ())
            for value in (*reversed(front), *end):
                noted = (by for where, what, by in reversed(self._new) if (where, what) == (name, value))
                module = next(noted, "")
                if name in LISTS:
                    yield Left(module, name, value, is_last=value in end)
                else:
                    yield Left(module, value, os.environ[value])

    def needed_by(self, modules: Iterable[str]) -> set[str]:
        """These modules and all that they have imported; packages that were preloaded, as a whole."""
        found, queue = set[str](), [*modules]
        while queue:
            if (module := queue.pop()) not in found:
                found.add(module)
                queue += self.needs.get(module, ())
                queue += filter(None, [module.rpartition(".")[0]])
        return found

    def needed_by_torch(self, modules: Iterable[str]) -> set[str]:
        """The modules of torch among these, and all that they have imported."""
        return self.needed_by(name for name in modules if name.partition(".")[0] == "torch")

    def leave_again(self, modules: Collection[str]) -> dict[str, str]:
        """Leaves what these have left, once; returns the variables."""
        again = [each for each in self.left if each.module in modules]
        self.left = [each for each in self.left if each not in again]
        for each in again:
            each.add()
        return {each.place: os.environ[each.place] for each in again if each.place not in LISTS}


IMPORTS_HERE = Imports()


def _addable() -> dict[str, list[Any]]:
    """The lists of this moment, and the names of the variables."""
    return {**{name: [*values()] for name, values in LISTS.items()}, "variables": [*os.environ]}


def _lengths() -> tuple[int, int, int]:
    """They tell, in no time, whether something has been added."""
    return len(warnings.filters), len(sys.meta_path), len(os.environ)


def added(before: Sequence[Any], now: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]] | None:
    """What was added in front and at the end; `None` if the list has changed otherwise."""
    for first in range(len(now) - len(before) + 1):
        last = first + len(before)
        if now[first:last] == before:
            return now[:first], now[last:]
    return None


def let_warnings_look_again() -> None:
    """Makes them forget which have been shown, as each change of their filters does."""
    with warnings.catch_warnings():
        pass


def _module_that_runs() -> str:
    """The innermost module whose import is in progress."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame else ""


def preload_packages(modules: Sequence[str]) -> None:
    """Imports what is harmless of these modules, package by package."""
    known, before = _known(), set(sys.modules)
    by_package = grouped(modules, lambda name: name.partition(".")[0])
    with IMPORTS_HERE.recorded():
        for package, names in by_package.items():
            if all(name in sys.modules for name in names):
                continue
            key, there = _key_of(package), set(sys.modules)
            harmless = harmless_ones(names) if key not in known else names if known[key] else ()
            imported = list[str]()
            for name in harmless:
                import_one(name)
                IMPORTS_HERE.note(name)
                imported.append(name)
            known[key] = imported == names
            IMPORTS_HERE.needs[package].update(sys.modules.keys() - there)
    PRELOADED.update(name for name in sys.modules.keys() - before if "." not in name)
    for top, names in grouped(sys.modules, lambda name: name.partition(".")[0]).items():
        if top in PRELOADED:
            IMPORTS_HERE.needs[top].update(names)
    with contextlib.suppress(OSError, MachineError):
        write_json(_place(), known)


def note_what_torch_imports() -> None:
    """To be called when torch has been imported, and nothing else that it doesn't need."""
    WITH_TORCH.update(name for name in sys.modules if "." not in name)


def import_one(name: str) -> None:
    """Imports a module; if that fails, it does so in the program again, if that imports it."""
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def harmless_ones(names: Sequence[str]) -> Iterator[str]:
    """These modules one by one, until a process that imports them is no longer as before, but for the modules
    and what can be done again.

    It is always ahead: importing what has come takes hardly longer than waiting for it.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before, num_unknown, looked_s = state(), 0, time.monotonic()
            for name in names:
                import_one(name)
                num_unknown += 1
                if name == names[-1] or time.monotonic() > looked_s + LOOK_EVERY_S:
                    if not can_be_done_again(before, state()):
                        break
                    os.write(write_end, b"." * num_unknown)
                    num_unknown, looked_s = 0, time.monotonic()
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            yield from (name for name in names if pipe.read(1))
    finally:
        os.waitpid(pid, 0)


def can_be_done_again(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether nothing has changed but what a rank can do again."""
    variables = {name: value for name, value in now["env"].items() if name not in SET_BY_TORCH}
    kept = {name: value for name, value in before["env"].items() if name not in SET_BY_TORCH}
    is_same = before["env"].items() <= now["env"].items() and variables == kept
    others = before.keys() - {"env", *LISTS}
    return (
        is_same
        and all(added(before[name], now[name]) is not None for name in LISTS)
        and all(before[name] == now[name] for name in others)
    )


def state() -> dict[str, Any]:
    """The state of a process that a program may notice, besides its modules."""
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "gpus": _open_gpus(),
        "env": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        **{name: [*values()] for name, values in LISTS.items()},
        "start method": multiprocessing.get_start_method(allow_none=True),
        "random": random.getstate(),
        "numpy": repr(numpy.random.get_state()) if numpy else None,
        "torch": torch.random.get_rng_state().tolist() if torch else None,
        "types": torch.get_default_dtype() if torch else None,
        "hooks": (sys.excepthook, sys.unraisablehook, len(sys.path_hooks)),
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
    return cache_directory() / IMPORTS / "leave-no-trace.json"


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
