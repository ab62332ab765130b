"""Runs a program as Python does; what a rank needs for that before torch is imported."""

import atexit
import builtins
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from string import Template
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

import gpurun
from gpurun.launcher.inspect.stacks import is_users
from gpurun.launcher.machine.landlock import can_restrict_writes, restrict_writes
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.launch_writes import caches_to_make, use_own_places, writable_places
from gpurun.launcher.rundir.paths import CACHES, holds_main
from gpurun.launcher.rundir.records import ProgramConfig
from gpurun.launcher.worker.base.exit import exit_code, finish


def with_own_directory(config: ProgramConfig, run: RunDir) -> ProgramConfig:
    """The configuration with a directory for what the program saves, which no other launch finds there.

    It is in the environment, and in place of `{launch_dir}` in the arguments. Those of torchrun's line may
    have `${local_rank}`. In a search, nothing can be written where launches would meet, if the kernel can
    prevent that. Source: torch/distributed/elastic/utils/api.py, `macros`
    """
    directory = run.program_files(config.launch)
    directory.mkdir(parents=True, exist_ok=True)
    os.environ["GPURUN_LAUNCH_DIR"] = str(directory)
    if config.observe:
        keep_to_own_places(config.job_dir, run, config.launch)
    args = config.args
    if config.as_torchrun:
        args = tuple(Template(arg).safe_substitute(local_rank=os.environ["LOCAL_RANK"]) for arg in args)
    return replace(config, args=tuple(arg.replace("{launch_dir}", str(directory)) for arg in args))


def keep_to_own_places(job_dir: str, run: RunDir, launch: str) -> None:
    """Keeps the process, and all that it starts, from writing where launches of a search meet.

    Without Landlock, it only gives it places of its own.
    """
    use_own_places(job_dir, os.path.realpath(run.launch(launch) / CACHES))
    if not can_restrict_writes():
        return
    for place in caches_to_make():
        with suppress(OSError):
            os.makedirs(place, exist_ok=True)
    restrict_writes(writable_places(job_dir, str(run.path)))


def run_program(config: ProgramConfig) -> None:
    """Runs the program to its end; raises whatever it raises, `SystemExit` included."""
    if config.module is not None:
        run_module(config.module, config.args)
    else:
        run_script(config.script or "", config.args)


@contextmanager
def watched_exit(pid: int, close: Callable[[int], None]) -> Iterator[None]:
    """Within it, `close` gets the exit code with which the program ends this process by `os._exit`."""
    exit_now = os._exit

    def close_and_exit(status: int) -> NoReturn:
        os._exit = exit_now
        if os.getpid() == pid:
            with suppress(Exception):
                close(status)
        exit_now(status)

    os._exit = close_and_exit
    try:
        yield
    finally:
        os._exit = exit_now


def run_script(script: str, args: tuple[str, ...]) -> None:
    """`python SCRIPT ARGS…`, from the working directory; of a directory or archive, its `__main__.py`.

    Raises:
        BaseException: whatever the program raises, `SystemExit` included.
    """
    path = os.path.join(os.getcwd(), script)  # as the interpreter does it: `..` may follow a symlink
    if holds_main(path):
        set_path_and_argv(path, [script, *args], [script])
        new_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    set_path_and_argv(os.path.dirname(os.path.realpath(path)), [script, *args], [script])
    main = new_main()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(read_code(path), main.__dict__)


def run_module(module: str, args: tuple[str, ...]) -> None:
    """`python -m MODULE ARGS…`, from the working directory; raises like `run_script`."""
    set_path_and_argv(
        os.getcwd(), ["-m", *args], ["-m", module]
    )  # runpy puts the module's file in place of the first
    new_main()
    # What the interpreter itself calls for `-m`, and all that sets `__spec__` right for `multiprocessing`.
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]


def set_path_and_argv(directory: str, argv: list[str], program: list[str]) -> None:
    """`sys.path` and `sys.argv` as the interpreter would set them; imports look in `directory` first."""
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, "-u", *program, *argv[1:]]
    sys.path.insert(0, directory)


def new_main() -> ModuleType:
    """An empty `__main__` in place of the server's."""
    main = ModuleType("__main__")
    main.__dict__.update({"__annotations__": {}, "__builtins__": builtins})
    sys.modules["__main__"] = main
    return main


def read_code(path: str) -> CodeType:
    """The compiled file; `io.open_code` and no inherited flags, as the interpreter does it."""
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def shown(error: BaseException) -> int:
    """The exit code of a program that has ended by this error, after showing it as Python does."""
    if isinstance(error, SystemExit):
        return exit_code(error)
    sys.excepthook(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def end_child(error: BaseException | None) -> NoReturn:
    """Ends a process that the program has forked, as Python does; nothing of the rank is recorded there."""
    code = 0 if error is None else shown(error.with_traceback(users_frames(error)))
    end_program()
    finish(code)


def end_program() -> None:
    """Does what the interpreter does when a program has ended, as far as the program can observe it.

    Waits for threads, calls exit handlers and destructors of the program's own classes, and completes files
    that were left open, archives too; it does not run torch's destructors, in which gloo's threads abort now
    and then.
    """
    await_threads()
    atexit._run_exitfuncs()
    # The server's own objects are frozen, so that only the program's are found.
    found = gc.get_objects()
    _destroy(filter(_is_own, found))
    _flush(found)
    _destroy(filter(_is_archive, found))
    _flush(found)


def await_threads() -> None:
    """Waits for threads that aren't daemons; does nothing the second time."""
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]


def _destroy(found: Iterable[Any]) -> None:
    for each in found:
        with suppress(Exception):
            type(each).__del__(each)


def _flush(found: Iterable[Any]) -> None:
    for each in found:
        # By its type: `isinstance` asks a weak reference's proxy for the class of what may be gone.
        if issubclass(type(each), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with suppress(Exception):
                each.flush()


_ARCHIVES = frozenset({"gzip", "bz2", "lzma", "zipfile", "tarfile", "tempfile"})
"""Modules of the standard library whose objects write, or remove, something when they are destroyed."""


def _is_own(found: object) -> bool:
    """Whether it has a destructor that the program's own code defines."""
    kind = type(found)
    if not hasattr(kind, "__del__"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_users(file)


def _is_archive(found: object) -> bool:
    return type(found).__module__ in _ARCHIVES and hasattr(type(found), "__del__")


def users_frames(error: BaseException) -> TracebackType | None:
    """The error's traceback without the frames of this launcher and of runpy at its top.

    None of them remain for a program that could not be compiled.
    """
    trace = error.__traceback__
    own = (
        os.path.dirname(gpurun.__file__) + os.sep,
        runpy.__file__,
        "<frozen runpy>",
    )
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return trace
