"""Whether a file is the user's, gpurun's or a library's; which of the user's a process has loaded."""

import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import gpurun

OURS = f"{Path(gpurun.__file__).parent}/"
WORKLOADS = f"{OURS}workloads/"
LIBRARY_DIRECTORIES = tuple(
    f"{directory}/"
    for directory in {
        *site.getsitepackages(),
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def is_users(file: str) -> bool:
    """Whether a file is neither part of gpurun nor of an installed library."""
    return not file.startswith((OURS, *LIBRARY_DIRECTORIES, "<"))


def is_workload(file: str) -> bool:
    """Whether a file is the user's, or one of the built-in workloads."""
    return is_users(file) or file.startswith(WORKLOADS)


MOST_FILES = 2000
"""More would be a library that lies where the user's code does."""
GENERATED = "torchinductor_"
"""In the names of directories that compiled models are kept in."""


def code_hashes(job_dir: str | Path) -> dict[str, str]:
    """Every file of the user's code that this process has imported, or runs, with a hash of its content.

    Names are relative to `job_dir`. Files that can't be read are left out.
    """
    found = {}
    for path in sorted(set(_users_files()))[:MOST_FILES]:
        try:
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        except OSError:
            continue
        found[os.path.relpath(path, os.path.realpath(job_dir))] = digest
    return found


def _users_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and is_users(file) and GENERATED not in file:
            yield os.path.realpath(file)
