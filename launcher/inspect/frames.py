"""Whether a stack frame's file belongs to the user, to gpurun, or to a library."""

import site
import sysconfig
from pathlib import Path

import gpurun

OURS = f"{Path(gpurun.__file__).parent}/"
WORKLOADS = f"{OURS}workloads/"
LIBRARY_FOLDERS = tuple(
    f"{folder}/"
    for folder in {
        *site.getsitepackages(),
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def is_users(file: str) -> bool:
    """Whether a file is neither part of gpurun nor of an installed library."""
    return not file.startswith((OURS, *LIBRARY_FOLDERS, "<"))


def is_workload(file: str) -> bool:
    """Whether a file is the user's, or one of the built-in workloads."""
    return is_users(file) or file.startswith(WORKLOADS)
