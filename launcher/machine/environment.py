"""The environment of Python processes that we start."""

import os
from pathlib import Path

import gpurun

ROOT = str(Path(gpurun.__file__).parents[1])


def child_environment() -> dict[str, str]:
    """Ours, with this package importable however it was found here, and whatever the current folder is."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
