"""Stores indexes in the user's own cache, where no one else can read or change them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.launcher.findings.finding import Finding, relative_to
from gpurun.launcher.rundir.store import cache_directory
from gpurun.launcher.tensorboard_plugin.timeline.format import FORMAT, INDEX_FILE

TIMELINE = "timeline"
_NEW = "new-"
ABANDONED_S = 7200.0
"""Older builds are considered dead."""
MAX_CACHE_BYTES = 10 << 30
"""The limit of all indexes together; a trace of 1 GB has one of 0.3 GB."""


@dataclass(frozen=True)
class Traces:
    """The traces of one variant, one file per rank, in a fixed order."""

    directory: Path
    """Their directory."""
    files: tuple[Path, ...]
    within: Path
    """The directory in which they have to be when they are opened, links resolved."""

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def key(self) -> str:
        """Changes when a file or the index format changes."""
        stats = [(file.name, file.stat()) for file in self.files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(msgspec.json.encode((FORMAT, facts))).hexdigest()[:24]


def home_of(traces: Traces) -> Path:
    """The directory of the indexes of these traces, in the user's own cache.

    Never next to the traces: their owner could change an index while it is mapped, or forge one.

    Raises:
        OSError: there is no cache.
    """
    name = hashlib.sha256(os.fsencode(traces.directory.resolve())).hexdigest()[:24]
    return cache_directory() / TIMELINE / name


def find(traces: Traces, key: str) -> Path | None:
    """The finished index of these traces; from now on, it is the one used last."""
    try:
        index = home_of(traces) / key / INDEX_FILE
        os.utime(index)
    except OSError:
        return None
    return index.parent


def with_file_names(findings: Iterable[Finding], files: Iterable[Path]) -> tuple[Finding, ...]:
    """The findings with the names of these files instead of their paths."""
    found = tuple(findings)
    for directory in dict.fromkeys(file.parent for file in files):
        found = tuple(relative_to(directory, each) for each in found)
    return found


@contextmanager
def making(traces: Traces, key: str) -> Iterator[Path]:
    """An empty directory for a new index, which is moved into place atomically when the block ends.

    If the block raises, it is removed.

    Raises:
        OSError: the cache can't be written.
    """
    home = home_of(traces)
    home.parent.mkdir(mode=0o700, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=_NEW, dir=home))
    try:
        yield directory
        _replace(directory, home / key)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _sweep(home, key)
    _evict(home.parent, home / key)


def forget(traces: Traces, key: str) -> None:
    """Removes an index that turned out to be damaged."""
    shutil.rmtree(home_of(traces) / key, ignore_errors=True)


def _replace(directory: Path, target: Path) -> None:
    """A directory never replaces one that isn't empty: if another server was faster, its index stays."""
    with suppress(OSError):
        directory.rename(target)
    if not (target / INDEX_FILE).is_file():
        shutil.rmtree(target, ignore_errors=True)
        directory.rename(target)


def _sweep(home: Path, key: str) -> None:
    """Removes indexes of older versions of the traces, and leftovers of dead builds."""
    for directory in [each for each in home.iterdir() if each.name != key and each.is_dir()]:
        is_new = directory.name.startswith(_NEW)
        if not is_new or time.time() - directory.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(directory, ignore_errors=True)


def _evict(cache: Path, newest: Path) -> None:
    """Removes the indexes that were used longest ago, until the rest fits into `MAX_CACHE_BYTES`."""
    used = sorted(cache.glob(f"*/*/{INDEX_FILE}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    total_bytes = 0
    for directory in (file.parent for file in used):
        total_bytes += sum(file.stat().st_size for file in directory.iterdir())
        if total_bytes > MAX_CACHE_BYTES and directory != newest:
            shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):
                directory.parent.rmdir()
