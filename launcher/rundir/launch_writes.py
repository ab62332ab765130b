"""The places to which any launch of a search may write: launches don't meet there, or make it again.

Sources: for CUDA https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
and https://docs.nvidia.com/deploy/mps; for AMD https://rocm.docs.amd.com/projects/MIOpen and comgr's
`comgr-env.h`; for Triton its `knobs.py`; for torch `aten/src/ATen/native/cuda/jit_utils.cpp`.
"""

import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from gpurun.launcher.rundir.store import cache_directory

DEVICES = ("/dev", "/proc", "/sys")
SHARED_MEMORY = "/dev/shm"
_COMPILED = "PYTHONPYCACHEPREFIX"
_CACHES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR",
    "PYTORCH_KERNEL_CACHE_PATH", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME",
    "CUDA_CACHE_PATH", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "AMD_COMGR_CACHE_DIR",
    "NEO_CACHE_DIR", "SYCL_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR", _COMPILED,
)  # fmt: skip
"""Variables that name directories."""
_HOMES = {"TRITON_HOME": ".triton", "FLASHINFER_WORKSPACE_BASE": ".cache"}
"""Variables that name directories which stand for the user's home, with what they stand for it for."""
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""The directory of the pipes by which clients of NVIDIA's MPS reach its server; by default in `/tmp`."""
_NVIDIA, _AMD, _INTEL = ("/dev/nvidiactl", "/dev/dxg"), ("/dev/kfd",), ("/dev/dri",)
_OF_A_HOME = {
    ".cache": ("/",), ".triton": (*_NVIDIA, *_AMD, *_INTEL), ".nv": _NVIDIA, ".config/miopen": _AMD,
    ".config/matplotlib": (),
}  # fmt: skip
"""Directories of a home, with the files that a machine has where programs can't do without them."""
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
MAX_COPIED, MAX_COPIED_BYTES = 10_000, 1 << 16
"""Entries of a cache that a launch finds in its own, nearest to the top first; larger files are linked."""


def project_of(job_dir: str) -> str:
    """The real path of the work tree of git that the job's directory is in, or of that directory itself."""
    directory = Path(os.path.realpath(job_dir))
    tops = (each for each in (directory, *directory.parents) if os.path.lexists(each / ".git"))
    return str(next(tops, directory))


def temporary_places(job_dir: str) -> tuple[str, ...]:
    """The real paths of directories for temporary files; in them, launches may write what they have made.

    None is in the job's project.
    """
    stated = os.path.realpath(os.environ.get("TMPDIR") or tempfile.gettempdir())
    first = () if is_below(stated, (project_of(job_dir),)) else (stated,)
    return tuple(dict.fromkeys((*first, *map(os.path.realpath, ("/tmp", "/var/tmp", SHARED_MEMORY)))))


def _stated(names: Iterable[str]) -> tuple[str, ...]:
    """The real paths that these variables name."""
    return tuple(os.path.realpath(path) for name in names if (path := os.environ.get(name)))


def caches_to_make() -> tuple[str, ...]:
    """The directories of caches that have to exist before a launch is kept from making them.

    That is what the environment names, and what the devices of this machine use in the user's home.
    """
    used = [name for name, devices in _OF_A_HOME.items() if any(map(os.path.exists, devices))]
    return (*_stated(_CACHES), *_in_homes(used))


def _in_homes(names: Collection[str]) -> tuple[str, ...]:
    """These directories of the user's home, and of what stands for it."""
    stated = ((home, name) for of, name in _HOMES.items() if name in names for home in _stated((of,)))
    own = os.path.expanduser("~")
    return tuple(os.path.join(home, name) for home, name in (*((own, name) for name in names), *stated))


def cache_places(job_dir: str) -> tuple[str, ...]:
    """Directories for what is made again where it is missing; none in which the job's directory lies.

    In its project, none but those whose names say that they are caches: others may hold the user's files.
    """
    known = [*_in_homes(_OF_A_HOME), *(os.path.join(job_dir, name) for name in _OF_A_HOME)]
    with suppress(OSError):
        known.append(str(cache_directory()))
    named = [
        place for place in map(os.path.realpath, known) if not is_below(os.path.realpath(job_dir), (place,))
    ]
    project = project_of(job_dir)
    stated = (
        place
        for place in _stated(_CACHES)
        if is_below(place, named) or not (is_below(place, (project,)) or is_below(project, (place,)))
    )
    return (*stated, *named)


def use_own_places(job_dir: str, own: str) -> None:
    """Has variables that name other places in the project, or around it, name those of a launch.

    A cache is a copy, with links to large files, which can't be written; temporary files go where they go by
    default.

    Args:
        own: the directory for the launch's caches.
    """
    places, project = cache_places(job_dir), project_of(job_dir)
    for name in _CACHES:
        for place in _stated((name,)):
            if not is_below(place, places):
                os.environ[name] = os.path.join(own, name)
                _copy(place, os.environ[name])
                if name == _COMPILED:  # which Python has read
                    sys.pycache_prefix = os.environ[name]
    for name in _TEMPORARY:
        if any(is_below(place, (project,)) for place in _stated((name,))):
            del os.environ[name]
    tempfile.tempdir = None  # where an earlier environment had it


def _copy(cache: str, copy: str) -> None:
    """Copies a cache, unless another rank has done so."""
    draft, to_do, num = f"{copy}.{os.getpid()}", deque([""]), 0
    with suppress(OSError):
        while to_do and num < MAX_COPIED:
            below = to_do.popleft()
            os.makedirs(os.path.join(draft, below))
            with suppress(OSError), os.scandir(os.path.join(cache, below)) as entries:
                for entry in islice(entries, MAX_COPIED - num):
                    num, name = num + 1, os.path.join(below, entry.name)
                    if entry.is_dir(follow_symlinks=False) and not is_below(draft, (entry.path,)):
                        to_do.append(name)
                    else:
                        _copy_or_link(entry, os.path.join(draft, name))
        os.rename(draft, copy)
    shutil.rmtree(draft, ignore_errors=True)


def _copy_or_link(entry: "os.DirEntry[str]", copy: str) -> None:
    with suppress(OSError):
        if entry.is_file(follow_symlinks=False) and entry.stat().st_size <= MAX_COPIED_BYTES:
            shutil.copy2(entry.path, copy)
        else:
            os.symlink(os.path.realpath(entry.path), copy)


def writable_places(job_dir: str, run_dir: str) -> tuple[str, ...]:
    """All of them: what lies elsewhere no launch can write, where the kernel knows Landlock."""
    shared = (*DEVICES, *_stated((_PIPES,)), *temporary_places(job_dir))
    return (os.path.realpath(run_dir), *shared, *cache_places(job_dir))


def is_below(path: str, places: Iterable[str]) -> bool:
    """Whether a real path is one of these, or in one of them."""
    return any(f"{path}{os.sep}".startswith(f"{each.rstrip(os.sep)}{os.sep}") for each in places)
