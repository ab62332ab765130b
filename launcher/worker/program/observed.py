"""What a program does with torch and with files, seen from outside: its calls, losses, waits and files."""

import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpurun.launcher.machine.accelerators import gpu_kinds
from gpurun.launcher.machine.landlock import can_restrict_writes
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.launch_writes import (
    DEVICES,
    SHARED_MEMORY,
    cache_places,
    is_below,
    temporary_places,
)
from gpurun.launcher.rundir.records import FIRST_STEPS, Observed, Place, PlaceKind, ProgramConfig
from gpurun.launcher.worker.base.losses import Losses
from gpurun.launcher.worker.base.seeding import StepSeeds, replaced
from gpurun.launcher.worker.program.calls import AskingWorkers, ProgramCalls, is_own_code

MAX_WRITES = 50
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {
    "os.rename": ((0, 2), (1, 3)), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),),
    "os.truncate": ((0, None),), "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),),
    "shutil.rmtree": ((0, 1),), "sqlite3.connect": ((0, None),), "os.chmod": ((0, 2),), "os.chown": ((0, 3),),
    "os.utime": ((0, 3),), "os.setxattr": ((0, None),), "os.removexattr": ((0, None),),
}  # fmt: skip
"""Audit events that change files: by which arguments, each with that of the directory it is relative to.
Source: CPython, "Audit events table".
"""
_WRITTEN_IN_C = (
    "_C.PyTorchFileWriter.__init__", "jit._script.RecursiveScriptModule.save",
    "jit._script.RecursiveScriptModule._save_for_lite_interpreter", "_C.ScriptFunction.save",
    "_C._autograd._ProfilerResult.save",
)  # fmt: skip
"""What in torch writes the file that its first argument names in C++, which no audit event shows."""
_OF_OPEN_FILES = ("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr")
"""Events whose file may be named by a descriptor, also of a file that is open for reading."""
_MUST_EXIST = ("os.remove", "os.rmdir", "shutil.rmtree", *_OF_OPEN_FILES)
_MADE_AGAIN = ("/__pycache__/", "/torchinductor_", "/.triton/", "/.cache/")
"""Parts of the paths of files and directories that are made again where they are missing."""
_READ_ONLY = re.compile(r"^file::memory:|[?&](?:mode=(?:ro|memory)|immutable=1)(?:&|$)")
"""URIs of SQLite databases that are in memory, or only read."""
READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")
"""Methods of a tensor that return what it holds, once its device has computed it."""
_OWN = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"
_GPUS = tuple(row.name for row in gpu_kinds())
COPIES = ("to", *_GPUS)
MAX_PLACES = 100


@dataclass
class Writes:
    """The files that the process changes, outside of the run, of temporary files and of caches."""

    job_dir: str
    run_dir: str
    told: str = ""
    """The file by which forked processes tell what they were kept from writing."""
    began_s: float = 0.0
    """When the launch began, in unix time."""
    found: set[str] = field(default_factory=set)
    _is_active: bool = True
    _pid: int = field(default_factory=os.getpid)
    _passed: set[str] = field(default_factory=set)
    """Paths that were judged already, as the program names them."""

    def watch(self) -> ExitStack:
        """Notes them from now on; closing the returned stack ends it. An audit hook can't be removed."""
        self.job_dir, self.run_dir = map(os.path.realpath, (self.job_dir, self.run_dir))
        self._temporary, self._caches = temporary_places(self.job_dir), cache_places(self.job_dir)
        sys.addaudithook(self._audit)
        hooks = ExitStack()
        for path in _WRITTEN_IN_C:
            owner, _, name = path.rpartition(".")
            with suppress(AttributeError):  # of a torch that hasn't that
                hooks.callback(replaced(attrgetter(owner)(torch), name, self._write_in_c))
        hooks.callback(setattr, self, "_is_active", False)
        return hooks

    def _write_in_c(
        self, original: Callable[..., Any], owner: Any, name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.add(name)
        return original(owner, name, *args, **kwargs)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITES:
                self.add(args[0])
        elif event in _CHANGES:
            for number, base in _CHANGES[event]:
                directory = args[base] if base is not None and base < len(args) else None
                name = _open_file(args[number]) if event in _OF_OPEN_FILES else args[number]
                if event == "sqlite3.connect" and self._is_only_read(name):
                    continue
                self.add(name, directory, must_exist=event in _MUST_EXIST, is_new=event == "os.mkdir")

    def add(
        self, name: Any, directory: int | None = None, must_exist: bool = False, is_new: bool = False
    ) -> None:
        """Notes a file unless it is one that any program may write.

        Raises:
            PermissionError: it isn't; nothing is written.
        """
        real = ""
        with suppress(Exception):
            if not self._is_active or isinstance(name, int):
                return
            is_open = directory is not None and directory >= 0
            place = os.readlink(f"/proc/self/fd/{directory}") if is_open else ""
            path = os.path.abspath(os.path.join(place, os.fsdecode(name)))
            if path in self._passed or ((must_exist or is_new) and os.path.lexists(path) is is_new):
                return
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if self._may_always(real):
                if len(self._passed) < 1000 * MAX_WRITES:
                    self._passed.add(path)
                return
            if len(self.found) < MAX_WRITES:
                self.found.add(real)
                if os.getpid() != self._pid:  # forked, so that the rank doesn't know of it
                    self._tell(real)
        if real:
            # Before anything is written: launches would overwrite what the user has.
            raise PermissionError(f"gpurun lets no launch of a search write to {real}")

    def _tell(self, path: str) -> None:
        """Has the rank know what a process that it has forked was kept from writing."""
        descriptor = os.open(self.told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, os.fsencode(path) + b"\0")
        finally:
            os.close(descriptor)

    @property
    def all(self) -> set[str]:
        """What was found in this process, and in those that it has forked."""
        try:
            told = Path(self.told).read_bytes().split(b"\0")
        except OSError:
            return self.found
        return self.found | {os.fsdecode(path) for path in told if path}

    def _may_always(self, path: str) -> bool:
        if is_below(path, DEVICES) and not is_below(path, (SHARED_MEMORY,)):
            return True
        is_own = path.startswith(f"{self.job_dir}{os.sep}")
        below = path.removeprefix(self.job_dir) if is_own else path
        if is_below(path, (self.run_dir, *self._caches)) or any(part in f"{below}/" for part in _MADE_AGAIN):
            return True
        return not is_own and is_below(path, self._temporary) and self._is_of_launch(path)

    def _is_only_read(self, database: Any) -> bool:
        """Whether a database lies in memory, or connecting to it changes no file.

        One that exists may be meant to be read only: where the kernel refuses to write it, that is enough.
        """
        name = os.fsdecode(database)
        if name in ("", ":memory:") or (name.startswith("file:") and _READ_ONLY.search(name)):
            return True
        is_kept = can_restrict_writes() and not is_below(os.path.realpath(name), self._temporary)
        return is_kept and os.path.lexists(name)

    def _is_of_launch(self, path: str) -> bool:
        """Whether it is new or made by this launch; a temporary file without a name opens its directory."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return True
        return path in self._temporary or found.st_ctime >= self.began_s


def _open_file(name: Any) -> Any:
    """The path of an open file in place of its descriptor, if it has one."""
    with suppress(OSError):
        if isinstance(name, int) and os.path.lexists(path := os.readlink(f"/proc/self/fd/{name}")):
            return path
    return name


@dataclass
class CostlyCalls:
    """Counts such calls by place."""

    models: Callable[[], Iterable[DistributedDataParallel]]
    """The program's models that average gradients."""
    counts: Counter[tuple[PlaceKind, str, str, int]] = field(default_factory=Counter)

    def watch(self) -> ExitStack:
        """Counts from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        for name in READS:
            hooks.callback(replaced(torch.Tensor, name, self._reading(name)))
        for name in COPIES:
            hooks.callback(replaced(torch.Tensor, name, self._copying(name)))
        hooks.callback(replaced(torch.Tensor, "backward", self._backward))
        return hooks

    @property
    def found(self) -> tuple[Place, ...]:
        return tuple(Place(*place, count) for place, count in self.counts.items())

    def _reading(self, name: str) -> Callable[..., Any]:
        def read(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and is_on_gpu(tensor):
                self._add("wait", name)
            return original(tensor, *args, **kwargs)

        return read

    def _copying(self, name: str) -> Callable[..., Any]:
        def copy(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(tensor, *args, **kwargs)
            is_upload = not torch.compiler.is_compiling() and is_on_gpu(made) and not is_on_gpu(tensor)
            if is_upload and not (kwargs.get("non_blocking") and tensor.is_pinned()):
                self._add("copy", name)
            return made

        return copy

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(model.require_backward_grad_sync for model in self.models()):
            self._add("gradients", "backward")
        return original(*args, **kwargs)

    def _add(self, kind: PlaceKind, name: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        if frame is None or not is_own_code(frame):
            return
        place = (kind, name, _real_path(frame.f_code.co_filename), frame.f_lineno)
        if place in self.counts or len(self.counts) < MAX_PLACES:
            self.counts[place] += 1


_real_path = functools.cache(os.path.realpath)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type in _GPUS


def trainer_options() -> tuple[str, ...]:
    """The options of the `TrainingArguments` of the installed transformers; empty: they aren't imported."""
    arguments = getattr(sys.modules.get("transformers.training_args"), "TrainingArguments", None)
    return tuple(getattr(arguments, "__dataclass_fields__", ()))


@dataclass
class Observer:
    """Changes a rank's calls as the job says; where asked to, seeds its steps and notes what it does."""

    config: ProgramConfig
    rank: int
    run: RunDir
    calls: ProgramCalls = field(init=False)
    losses: Losses = field(default_factory=Losses)
    writes: Writes = field(init=False)
    workers: AskingWorkers = field(init=False)
    places: CostlyCalls = field(init=False)
    _num_steps: int = 0
    _written: Observed | None = None

    def __post_init__(self) -> None:
        self.calls = ProgramCalls(self.config.calls, notes=self.config.observe)
        path = self.run.observed(self.config.launch, self.rank)
        self.writes = Writes(self.config.job_dir, self.config.run_dir, f"{path}.told")
        self.workers = AskingWorkers(f"{path}.workers")
        self.places = CostlyCalls(self.calls.models)

    def watch(self) -> ExitStack:
        """Does so from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        hooks.enter_context(self.calls.watch())
        if self.config.seeds_steps:
            hooks.enter_context(StepSeeds(self.rank, self.config.world_size).watch())
        if self.config.observe:
            hooks.enter_context(self.losses.watch())
            hooks.callback(self.workers.watch())
            if self.config.profile is not None:
                hooks.enter_context(self.places.watch())
            self.writes.began_s = self.run.launch_config(self.config.launch).stat().st_mtime
            hooks.enter_context(self.writes.watch())
            hooks.callback(register_optimizer_step_post_hook(lambda *_: self._stepped()).remove)
        return hooks

    def _stepped(self) -> None:
        self._num_steps += 1
        if self._num_steps <= FIRST_STEPS:
            self.calls.note_unused()
        if self._num_steps >= FIRST_STEPS:
            self.calls.note_ready(is_first=self._num_steps == FIRST_STEPS)

    def write(self) -> None:
        """Writes what is known by now, where that is new.

        Raises:
            MachineError: it can't be written.
        """
        if not self.config.observe:
            return
        known = Observed(
            calls=self.calls.noted(self.workers.found),
            losses=self.losses.values,
            loss_dtype=self.losses.dtype,
            steps=self._num_steps,
            places=self.places.found,
            writes=tuple(sorted(self.writes.all)),
            trainer_options=trainer_options(),
        )
        if known != self._written:
            write_json(Path(self.run.observed(self.config.launch, self.rank)), known)
            self._written = known
