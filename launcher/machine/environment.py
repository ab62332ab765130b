"""The environment of Python processes that we start."""

import os
from pathlib import Path

import gpurun

ROOT = str(Path(gpurun.__file__).parents[1])


def child_environment() -> dict[str, str]:
    """This process's environment, with this package importable from any directory."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
