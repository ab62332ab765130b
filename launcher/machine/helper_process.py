"""Python processes of our own that help the command: they read traces, build indexes, are TensorBoard."""

import contextlib
import json
import os
import resource
import sys
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
    """For a process that reads traces of any size and origin: it gets what others leave.

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
    """Where this process imports from, without the working directory, however it is spelled."""
    here = os.path.realpath(os.getcwd())
    kept = [each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) != here]
    return kept if ROOT in kept else [*kept, ROOT]
