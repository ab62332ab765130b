"""Environment variables that a program sets before it imports torch: the rank has imported it already.

torch, and the libraries that it loads, read many variables when they are imported: OMP_NUM_THREADS (libgomp),
TORCH_LOGS (torch/_logging/_internal.py), TORCH_DISTRIBUTED_DEBUG (torch/distributed/__init__.py),
PYTORCH_JIT (torch/jit/_state.py), TORCHDYNAMO_* and TORCHINDUCTOR_* (torch/_dynamo/config.py,
torch/_inductor/config.py). So a rank begins anew, once, if one of them has changed until the program imports
torch: a new interpreter imports it with these variables, and then runs the program from its beginning. Where
the script's text says what they are set to, torch is imported with that before the program runs: by the
server for all ranks, or by each for itself (`OF_ONE_PROCESS`). Where the text says only that it may set some,
or an earlier run has set some, each rank runs the program without torch until the program imports it. Else
what it did before is done twice.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, cast

import gpurun
from gpurun.launcher.processes.guard import WITH_OUR_CODE
from gpurun.launcher.processes.import_variables import changed
from gpurun.launcher.rundir.control import STACKS_SIGNAL
from gpurun.launcher.rundir.remembered import remember_that_it_sets_variables

ANEW = "gpurun.launcher.worker.entry.anew"
"""The module with which a rank goes on."""
TORCH = "torch"


@dataclass(eq=False)
class HiddenPackages(MetaPathFinder, Loader):
    """Packages as they are before their import, until the program imports one or one that needs them."""

    packages: Collection[str]
    on_import: Callable[[str], object] = lambda package: None
    """Called then, before the program has it."""
    needed_by: Callable[[str], Collection[str]] | None = None
    """What is shown with a package; `None`: all."""
    are_valid: Callable[[], bool] = lambda: True
    """Whether the program is to have what is hidden, and not to import it itself."""
    held: Collection[str] = ()
    """Packages that can't be imported again, since what is shown before them has them."""
    on_show: Callable[[Collection[str]], object] = lambda modules: None
    """Called once these modules are no longer hidden."""
    on_forget: Callable[[str, Collection[str]], object] = lambda package, modules: None
    """Called when the program is to import a package itself, and all of these modules."""
    _hidden: dict[str, ModuleType] = field(default_factory=dict)
    """The modules, by their names."""
    _specs: dict[str, ModuleSpec | None] = field(default_factory=dict)

    def hide(self) -> None:
        """Hides the packages and all of their modules."""
        for name, module in list(sys.modules.items()):
            if top_of(name) in self.packages:
                self._hidden[name] = sys.modules.pop(name, module)
        sys.meta_path.insert(0, self)

    def show(self, packages: Collection[str] | None = None) -> None:
        """Undoes that, for all or for some of them; does nothing the second time."""
        shown = [name for name in self._hidden if packages is None or top_of(name) in packages]
        sys.modules.update({name: self._hidden.pop(name) for name in shown})
        self._end_if_empty()
        self.on_show(shown)

    def forget(self, package: str) -> None:
        """Leaves it to the program, which imports this package, to import them, as far as it can."""
        kept = {name: module for name, module in self._hidden.items() if top_of(name) in self.held}
        forgotten, self._hidden = self._hidden.keys() - kept.keys(), kept
        self._end_if_empty()
        self.on_forget(package, forgotten)

    def _end_if_empty(self) -> None:
        if not self._hidden and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a package; not every caller imports it, some only ask whether there is one."""
        if name in self.packages and not self.are_valid():
            self.forget(name)
        hidden = self._hidden.get(name) if name in self.packages else None
        if hidden is None or (found := hidden.__spec__) is None:
            return None
        spec = ModuleSpec(name, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        spec.has_location = found.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The package as it is."""
        self.on_import(spec.name)
        module = self._hidden[spec.name]
        self._specs[spec.name] = module.__spec__  # importlib replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do but what importlib expects."""
        module.__spec__ = self._specs.pop(module.__name__)
        self.show(self.needed_by(module.__name__) if self.needed_by else None)


OWN_MODULES = frozenset(
    {
        *("_decimal", "_statistics", "decimal", "faulthandler"),
        *("fractions", "hmac", "msgspec", "resource", "secrets", "shlex", "statistics", "sysconfig", "yaml"),
    }
)
"""Modules that gpurun needs, and neither Python nor torch: a program may have others by these names."""


class OwnModules(HiddenPackages):
    """Modules of gpurun's that the program gets, each alone, if it would have imported the same file."""

    def hide(self) -> None:
        """Hides them, which remain what gpurun's own modules have imported."""
        super().hide()
        self._own, self._path = dict(self._hidden), sys.path[:]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds one that the other finders would find in the same file."""
        if name not in self.packages or name not in self._hidden:
            return None
        known, found = self._hidden[name].__spec__, found_by_others(self, name, path, target)
        if found is None or known is None or found.origin != known.origin:
            return None
        return super().find_spec(name, path, target)

    def exec_module(self, module: ModuleType) -> None:
        """Shows this one with all that is in it."""
        module.__spec__ = self._specs.pop(module.__name__)
        for name in [name for name in self._hidden if top_of(name) == module.__name__]:
            sys.modules[name] = self._hidden.pop(name)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within it, gpurun's own modules import these, and not what the program has by their names."""
        programs, path = self._take(), sys.path[:]
        sys.modules.update(self._own)
        sys.path[:] = self._path
        try:
            yield
        finally:
            sys.path[:] = path
            self._own.update(self._take())
            self._hidden = {name: module for name, module in self._own.items() if name not in programs}
            sys.modules.update(programs)

    def _take(self) -> dict[str, ModuleType]:
        """The modules by these names, which are no longer there."""
        names = [name for name in sys.modules if top_of(name) in self.packages]
        return {name: sys.modules.pop(name) for name in names}


class HiddenLoggers(dict[str, Any]):
    """The loggers of this process, without those that exist since packages are imported early.

    Who asks for one by its name gets it. `logging.config` disables all loggers that it lists.
    """

    def __init__(self) -> None:
        manager = logging.root.manager
        super().__init__(manager.loggerDict)
        self._hidden = set(manager.loggerDict)
        manager.loggerDict = self

    def reveal(self, is_meant: Callable[[str], bool]) -> None:
        """Lists these loggers from now on."""
        self._hidden = {name for name in self._hidden if not is_meant(name)}
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]

    def drop(self, is_meant: Callable[[str], bool]) -> None:
        """Forgets these loggers, whose handlers the program's own import adds again."""
        for name in [name for name in self._hidden if is_meant(name)]:
            self._hidden.remove(name)
            del self[name]

    def __contains__(self, name: object) -> bool:
        if name in self._hidden:
            self.reveal(lambda other: other == name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in self._hidden)

    def __len__(self) -> int:
        return super().__len__() - len(self._hidden)

    def keys(self) -> Any:
        """The names."""
        return dict.fromkeys(self).keys()

    def items(self) -> Any:
        """The names with their loggers."""
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        """The loggers."""
        return {name: self[name] for name in self}.values()


def found_by_others(asking: MetaPathFinder, name: str, path: Any, target: Any) -> ModuleSpec | None:
    """What the other finders find by that name."""
    found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not asking)
    return next((spec for spec in found if spec is not None), None)


def top_of(module: str) -> str:
    """The package that a module belongs to."""
    return module.partition(".")[0]


@dataclass(eq=False)
class AfterImport(MetaPathFinder, Loader):
    """Calls a function as soon as a package has been imported, before its importer has it."""

    package: str
    then: Callable[[], object]
    _loader: Any = None
    """The package's own."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds the package; not every caller imports it, some only ask whether there is one."""
        if name != self.package:
            return None
        spec = found_by_others(self, name, path, target)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def __getattr__(self, name: str) -> Any:
        """What else the package's own loader has."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the package's own loader makes it."""
        return cast("ModuleType | None", self._loader.create_module(spec))

    def exec_module(self, module: ModuleType) -> None:
        """Imports the package, and calls the function."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.then()


def position_of(fd: int) -> int:
    """The position in a file; 0 of a pipe."""
    with suppress(OSError):
        return os.lseek(fd, 0, os.SEEK_CUR)
    return 0


@dataclass(frozen=True)
class Beginning:
    """The rank before its program began."""

    argv: tuple[str, ...]
    """The arguments of the rank's entry."""
    control: str
    """The directory with the control blocks."""
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    imported_with: dict[str, str] | None = None
    """The environment in which torch was imported; `None`: that of this moment."""
    pid: int = field(default_factory=os.getpid)
    program: str = ""
    """What it is remembered by, in that directory."""
    stdin_at: int = field(default_factory=lambda: position_of(0))

    def is_unchanged(self, but_for: Mapping[str, str]) -> bool:
        """Whether the environment is as it was, with these variables."""
        return dict(os.environ) == {**self.env, **but_for}

    @property
    def remembered_by(self) -> str:
        """The program, wherever the process is by now."""
        return os.path.join(self.directory, self.program)

    def begin_anew_if_changed(self, torch_file: str) -> None:
        """Replaces the rank by a new one, which imports torch in the environment of this moment.

        If the program has put another torch than this file's first in `sys.path`, it imports that itself.
        """
        names = changed(self.imported_with or self.env, os.environ)
        found = PathFinder.find_spec(TORCH)
        is_other = bool(found and found.submodule_search_locations and found.origin != torch_file)
        if (names or is_other) and os.getpid() == self.pid:
            remember_that_it_sets_variables(self.remembered_by)
            self._begin_anew(() if is_other else names, None)

    def begin_anew(self, values: Mapping[str, str]) -> None:
        """Replaces the rank by a new one, which imports torch with these variables, and runs the program."""
        os.environ.update(values)
        self._begin_anew(tuple(sorted(values)), dict(os.environ))

    def begin_without_torch(self) -> None:
        """Replaces the rank by a new one, in which nothing imports torch before the program does."""
        self._begin_anew((), None)

    def _begin_anew(self, names: Sequence[str], imported_with: dict[str, str] | None) -> None:
        state = os.memfd_create("gpurun-anew", 0)  # 0: it stays open in the new interpreter
        os.write(state, json.dumps({**asdict(self), "names": names, "imported_with": imported_with}).encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with suppress(OSError):  # a pipe
            os.lseek(0, self.stdin_at, os.SEEK_SET)
        os.chdir(self.directory)
        signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})  # until it has a handler again
        argv = [sys.executable, "-P", "-c", WITH_OUR_CODE, str(gpurun.__file__), ANEW, str(state)]
        os.execv(sys.executable, argv)
