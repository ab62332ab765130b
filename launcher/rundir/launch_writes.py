"""The places to which any launch of a search may write: launches don't meet there, or make it again."""

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress

from gpurun.launcher.rundir.store import cache_directory

DEVICES = ("/dev", "/proc", "/sys")
SHARED_MEMORY = "/dev/shm"
_CACHES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "HF_HOME",
    "XDG_CACHE_HOME", "CUDA_CACHE_PATH", "MIOPEN_USER_DB_PATH", "NUMBA_CACHE_DIR",
)  # fmt: skip
"""Variables that name directories."""
_OF_A_HOME = (".cache", ".triton", ".nv", ".config/miopen")


def temporary_places() -> tuple[str, ...]:
    """The real paths of directories for temporary files; in them, launches may write what they have made."""
    stated = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return tuple(dict.fromkeys(map(os.path.realpath, (stated, "/tmp", "/var/tmp", SHARED_MEMORY))))


def stated_caches() -> tuple[str, ...]:
    """The real paths of directories that the environment names for what is made again where it is missing."""
    return tuple(os.path.realpath(path) for name in _CACHES if (path := os.environ.get(name)))


def cache_places(job_dir: str) -> tuple[str, ...]:
    """These, and those that need no variable; none in which the job's directory lies."""
    homes = (os.path.expanduser("~"), job_dir)
    known = [os.path.join(home, name) for home in homes for name in _OF_A_HOME]
    with suppress(OSError):
        known.append(str(cache_directory()))
    places = (*stated_caches(), *map(os.path.realpath, known))
    return tuple(place for place in places if not is_below(os.path.realpath(job_dir), (place,)))


def writable_places(job_dir: str, run_dir: str) -> tuple[str, ...]:
    """All of them: what lies elsewhere no launch can write, where the kernel knows Landlock."""
    return (os.path.realpath(run_dir), *DEVICES, *temporary_places(), *cache_places(job_dir))


def is_below(path: str, places: Iterable[str]) -> bool:
    """Whether a real path is one of these, or in one of them."""
    return any(f"{path}{os.sep}".startswith(f"{each.rstrip(os.sep)}{os.sep}") for each in places)
