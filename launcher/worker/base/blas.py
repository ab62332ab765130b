"""The threads of numpy's BLAS: a server that forks has one, whatever the ranks are to have."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_SETTERS = [
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")
]
"""In numpy's own builds, and in those of distributions."""


def wanted_threads(env: Mapping[str, str]) -> int:
    """The threads with which OpenBLAS begins in this environment.

    Source: OpenBLAS, driver/others/openblas_env.c, and `blas_get_cpu_number` in driver/others/memory.c
    """
    most = len(os.sched_getaffinity(0))
    for name in (BLAS_THREADS, "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        value = env.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return min(int(value), most)
    return most


def set_blas_threads(number: int) -> None:
    """Gives every OpenBLAS that this process has loaded so many threads."""
    if number == 1:
        return
    lines = Path("/proc/self/maps").read_text().splitlines()
    for path in {words[5] for line in lines if len(words := line.split(maxsplit=5)) == 6}:
        if "openblas" in os.path.basename(path):
            with suppress(OSError):  # any file may have such a name
                library = ctypes.CDLL(path)  # it is loaded: this is a handle of it
                for name in _SETTERS:
                    if hasattr(library, name):
                        getattr(library, name)(number)
