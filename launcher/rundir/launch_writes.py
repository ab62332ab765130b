"""The places to which any launch of a search may write: launches don't meet there, or make it again.

Sources: for CUDA https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
and https://docs.nvidia.com/deploy/mps; for AMD https://rocm.docs.amd.com/projects/MIOpen and comgr's
`comgr-env.h`; for Triton its `knobs.py`; for torch `aten/src/ATen/native/cuda/jit_utils.cpp`.
"""

import os
import tempfile
from collections.abc import Collection, Iterable
from contextlib import suppress

from gpurun.launcher.rundir.store import cache_directory

DEVICES = ("/dev", "/proc", "/sys")
SHARED_MEMORY = "/dev/shm"
_CACHES = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR",
    "PYTORCH_KERNEL_CACHE_PATH", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME",
    "CUDA_CACHE_PATH", "MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "AMD_COMGR_CACHE_DIR",
    "NEO_CACHE_DIR", "SYCL_CACHE_DIR", "NUMBA_CACHE_DIR", "MPLCONFIGDIR",
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


def temporary_places() -> tuple[str, ...]:
    """The real paths of directories for temporary files; in them, launches may write what they have made."""
    stated = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return tuple(dict.fromkeys(map(os.path.realpath, (stated, "/tmp", "/var/tmp", SHARED_MEMORY))))


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
    """Directories for what is made again where it is missing; none in which the job's directory lies."""
    known = [*_in_homes(_OF_A_HOME), *(os.path.join(job_dir, name) for name in _OF_A_HOME)]
    with suppress(OSError):
        known.append(str(cache_directory()))
    places = (*_stated(_CACHES), *map(os.path.realpath, known))
    return tuple(place for place in places if not is_below(os.path.realpath(job_dir), (place,)))


def writable_places(job_dir: str, run_dir: str) -> tuple[str, ...]:
    """All of them: what lies elsewhere no launch can write, where the kernel knows Landlock."""
    shared = (*DEVICES, *_stated((_PIPES,)), *temporary_places())
    return (os.path.realpath(run_dir), *shared, *cache_places(job_dir))


def is_below(path: str, places: Iterable[str]) -> bool:
    """Whether a real path is one of these, or in one of them."""
    return any(f"{path}{os.sep}".startswith(f"{each.rstrip(os.sep)}{os.sep}") for each in places)
