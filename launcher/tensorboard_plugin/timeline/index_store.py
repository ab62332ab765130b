"""Stores indexes next to the traces, or in the user's cache if that directory isn't writable."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.launcher.tensorboard_plugin.timeline.format import FORMAT, INDEX_FILE

FOLDER = ".gpurun-timeline"
_NEW = "new-"
ABANDONED_S = 7200.0
"""Older builds are considered dead."""


@dataclass(frozen=True)
class Traces:
    """The traces of one variant, one file per rank, in a fixed order."""

    directory: Path
    """Their directory."""
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def key(self) -> str:
        """Changes when a file or the index format changes."""
        stats = [(file.name, file.stat()) for file in self.files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(msgspec.json.encode((FORMAT, facts))).hexdigest()[:24]


def homes(traces: Traces) -> Iterator[Path]:
    """Directories that may hold the index, the one next to the traces first."""
    next_to_traces = traces.directory / FOLDER
    if not next_to_traces.is_symlink():  # a log directory of others must not choose where we write
        yield next_to_traces
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(traces.directory.resolve())).hexdigest()[:24]
    yield Path(cache) / "gpurun" / "timeline" / name


def find(traces: Traces, key: str) -> Path | None:
    """The finished index of these traces."""
    for home in homes(traces):
        directory = home / key
        if (directory / INDEX_FILE).is_file() and not directory.is_symlink():
            return directory
    return None


@contextmanager
def making(traces: Traces, key: str) -> Iterator[Path]:
    """An empty directory for a new index, which is moved into place atomically when the block ends.

    If the block raises, it is removed.

    Raises:
        OSError: no directory is writable.
    """
    home = _writable(homes(traces))
    directory = Path(tempfile.mkdtemp(prefix=_NEW, dir=home))
    try:
        yield directory
        _replace(directory, home / key)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _sweep(home, key)


def forget(traces: Traces, key: str) -> None:
    """Removes an index that turned out to be damaged."""
    for home in homes(traces):
        shutil.rmtree(home / key, ignore_errors=True)


def _writable(directories: Iterator[Path]) -> Path:
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    raise PermissionError("neither the directory of the traces nor the user's cache is writable")


def _replace(directory: Path, target: Path) -> None:
    """A directory never replaces one that isn't empty: if another server was faster, its index stays."""
    with suppress(OSError):
        directory.rename(target)
    if not (target / INDEX_FILE).is_file():
        shutil.rmtree(target, ignore_errors=True)
        directory.rename(target)


def _sweep(home: Path, key: str) -> None:
    """Removes indexes of older versions of the traces, and leftovers of dead builds."""
    for directory in _others(home, key):
        is_new = directory.name.startswith(_NEW)
        if not is_new or time.time() - directory.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(directory, ignore_errors=True)


def _others(home: Path, key: str) -> Sequence[Path]:
    return [each for each in home.iterdir() if each.name != key and each.is_dir() and not each.is_symlink()]
