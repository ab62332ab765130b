"""Python processes of our own that help the command: they read traces, build indexes, are TensorBoard.

And temporary directories, which the next command removes if one that has made them is killed.
"""

import contextlib
import fcntl
import json
import os
import platform
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import gpurun

ROOT = str(Path(gpurun.__file__).parents[1])
LEAST_MEMORY_BYTES = 2 << 30
"""Enough for a trace of 1 GB."""
_BODY = """\
import sys, json
sys.path[:] = json.loads(sys.argv[1])
from importlib import import_module
module, _, function = sys.argv[2].partition(":")
del sys.argv[1:3]
getattr(import_module(module), function)()
"""


def helper_argv(entry: str, *args: str) -> list[str]:
    """A Python process that calls a function of ours; its `sys.argv[1:]` are `args`.

    The command may be used in a directory with anyone's files. So the process is isolated (`-I`): neither the
    working directory nor variables such as PYTHONPATH decide what it imports; it imports from where this
    process does.

    Args:
        entry: `package.module:function`.
        args: for the function.
    """
    return [sys.executable, "-I", "-c", _BODY, json.dumps(import_path()), entry, *args]


def yield_to_others() -> None:
    """Leaves the machine to others, in a process that reads traces of any size and origin.

    It has a lower priority, is what the kernel's OOM killer ends first, and may take half of the memory that
    is available now.
    """
    os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    limit = max(psutil.virtual_memory().available // 2, LEAST_MEMORY_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def import_path() -> list[str]:
    """The paths that this process imports from, without the working directory, however it is spelled."""
    here = os.path.realpath(os.getcwd())
    kept = [each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) != here]
    return kept if ROOT in kept else [*kept, ROOT]


@contextlib.contextmanager
def temporary_directory(
    purpose: str, is_kept: Callable[[Path], bool] = lambda directory: False
) -> Iterator[Path]:
    """A new directory, gone after the block; those that killed processes have left for this purpose go first.

    Args:
        purpose: a word of its name.
        is_kept: which of them stay.

    Raises:
        OSError: it can't be created.
    """
    with contextlib.suppress(OSError):  # anyone's TMPDIR may be unreadable
        for directory in Path(tempfile.gettempdir()).iterdir():
            if is_own(directory, purpose) and not is_in_use(directory) and not is_kept(directory):
                shutil.rmtree(directory, ignore_errors=True)
    with locked_directory(purpose) as directory:
        try:
            yield directory
        finally:
            if not is_kept(directory):
                shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def locked_directory(purpose: str) -> Iterator[Path]:
    """A new directory that stays; until the block is left, it has a lock that ends with this process.

    Raises:
        OSError: it can't be created.
    """
    prefix = _prefix(purpose)
    new = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks: `is_in_use`
            fcntl.flock(lock, fcntl.LOCK_EX)
        directory = new.rename(new.with_name(new.name[1:]))  # by this name others find it: locked before
        yield directory.resolve()
    finally:
        os.close(lock)


def is_own(directory: Path, purpose: str) -> bool:
    """Whether it is a directory that a process of this user has made on this host."""
    if not directory.name.startswith(_prefix(purpose)):
        return False
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def is_in_use(directory: Path) -> bool:
    """Whether a process has its lock, or that can't be known."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _prefix(purpose: str) -> str:
    """The prefix of a name, with the host: others, whose locks may not be seen here, may share the place."""
    return f"gpurun-{purpose}-{platform.node()}-"
