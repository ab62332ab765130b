"""Python processes of our own that help the command: they read traces, build indexes, are TensorBoard."""

import json
import os
import sys
from pathlib import Path

import gpurun

ROOT = str(Path(gpurun.__file__).parents[1])
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


def import_path() -> list[str]:
    """Where this process imports from, without the working directory, however it is spelled."""
    here = os.path.realpath(os.getcwd())
    kept = [each for each in sys.path if os.path.isabs(each) and os.path.realpath(each) != here]
    return kept if ROOT in kept else [*kept, ROOT]
