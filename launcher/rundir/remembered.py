"""Packages that programs import, remembered in the user's cache: later ranks share one import."""

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.paths import main_file
from gpurun.launcher.rundir.records import ProgramConfig
from gpurun.launcher.rundir.store import cache_directory

IMPORTS = "imports"
"""The name of the directory in the cache."""
MOST_MODULES = 10_000
SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI")
"""Variables that torch sets for itself. Sources: torch/_inductor/runtime/cache_dir_utils.py,
torch/profiler/profiler.py."""


class Imports(msgspec.Struct, frozen=True):
    """What a program imports from installed packages."""

    modules: tuple[str, ...]
    """In the order in which their import began."""
    sets_variables: str = ""
    """The hash of its file if it was seen to set variables before it imported torch."""


def place_of(script: str, python: str) -> Path:
    """The file about a program and the interpreter that runs it.

    Raises:
        OSError: there can't be a cache.
    """
    name = sha256(f"{python}\0{os.path.realpath(script)}".encode(errors="surrogateescape")).hexdigest()[:32]
    return cache_directory() / IMPORTS / f"{name}.json"


def _read(script: str, python: str) -> Imports:
    """What is remembered of a program; nothing if it has not run, or that can't be read."""
    try:
        return read_json(place_of(script, python), Imports)
    except (OSError, MachineError, msgspec.MsgspecError, ValueError):
        return Imports(())


def remembered(script: str, python: str) -> tuple[str, ...]:
    """The modules that the program has imported in an earlier run; none if there was none."""
    return _read(script, python or sys.executable).modules


def name_of(config: ProgramConfig) -> str:
    """What a program is remembered by: its file, or its module in this directory."""
    return main_file(config.script) if config.script else f"-m {config.module}"


def _hash_of(source: bytes) -> str:
    return sha256(source).hexdigest()


def sets_variables(program: str, source: bytes) -> bool:
    """Whether an earlier run of a program, with this text, has set variables before it imported torch."""
    return _read(program, sys.executable).sets_variables == _hash_of(source)


def remember_that_it_sets_variables(program: str) -> None:
    """Writes down that the program in this process does so before it imports torch."""
    source = b""
    with suppress(OSError):
        source = Path(program).read_bytes()
    _write(program, Imports((), _hash_of(source)))


def _write(program: str, imports: Imports) -> None:
    with suppress(OSError, MachineError):  # then the next run starts like this one
        path = place_of(program, sys.executable)
        path.parent.mkdir(exist_ok=True)
        write_json(path, imports)


def remember(script: str, imported: Sequence[str], env: Mapping[str, str]) -> None:
    """Writes down what the program in this process has imported, as far as that is installed.

    Nothing, if it has set a variable: a package may read it when it is imported.

    Args:
        script: of the program.
        imported: names of modules, in the order in which their import began.
        env: the environment when it began.
    """
    packages = {top for name in imported if is_installed(top := name.partition(".")[0])} - {"torch"}
    modules = tuple(name for name in imported if name.partition(".")[0] in packages)
    set_by_torch = dict.fromkeys(SET_BY_TORCH)
    has_set_variable = {**env, **set_by_torch} != {**os.environ, **set_by_torch}
    kept = () if has_set_variable or len(modules) > MOST_MODULES else modules
    with suppress(OSError):
        if kept or place_of(script, sys.executable).exists():
            _write(script, Imports(kept))


def is_installed(package: str) -> bool:
    """Whether a package comes from where packages are installed, and not from the program's own files."""
    origin = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None) or ""
    places = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return origin.startswith(tuple(place + os.sep for place in places))
