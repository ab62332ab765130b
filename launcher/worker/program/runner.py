"""Runs a program as Python itself would: as `__main__`, in a process forked from the server."""

import atexit
import builtins
import gc
import importlib.machinery
import io
import os
import runpy
import sys
import threading
from contextlib import suppress
from types import CodeType, ModuleType, TracebackType

import gpurun


def run_script(script: str, args: tuple[str, ...]) -> None:
    """`python SCRIPT ARGS…`, from the working directory.

    Raises:
        BaseException: whatever the program raises, `SystemExit` included.
    """
    path = os.path.abspath(script)
    prepare(os.path.dirname(os.path.realpath(path)), [script, *args])
    main = new_main()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(read_code(path), main.__dict__)


def run_module(module: str, args: tuple[str, ...]) -> None:
    """`python -m MODULE ARGS…`, from the working directory; raises like `run_script`."""
    prepare(os.getcwd(), ["-m", *args])  # runpy puts the module's file in place of the first
    new_main()
    # What the interpreter itself calls for `-m`, and all that sets `__spec__` right for `multiprocessing`.
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]


def prepare(directory: str, argv: list[str]) -> None:
    """`sys.path` and `sys.argv` as the interpreter would set them; imports look in `directory` first."""
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, *argv]
    sys.path.insert(0, directory)


def new_main() -> ModuleType:
    """An empty `__main__` in place of the server's."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def read_code(path: str) -> CodeType:
    """The compiled file; `io.open_code` and no inherited flags, as the interpreter does it."""
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


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


def end_program() -> None:
    """What the interpreter does when a program has ended, as far as the program can observe it.

    Waits for threads, calls exit handlers, and flushes files that were left open; it does not run
    destructors, in which gloo's threads abort now and then.
    """
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # The server's own objects are frozen, so that only the program's are found.
    for found in gc.get_objects():
        if isinstance(found, io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with suppress(Exception):
                found.flush()
