"""Where indexes are kept: beside the traces, or in the user's cache where that folder can't be written."""

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
"""A build that is older than this has died."""


@dataclass(frozen=True)
class Traces:
    """The traces of one variant, one file per rank, in a fixed order."""

    folder: Path
    """Where they lie."""
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def key(self) -> str:
        """Another one if a file is another, or has changed, or indexes are made another way."""
        stats = [(file.name, file.stat()) for file in self.files]
        facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(msgspec.json.encode((FORMAT, facts))).hexdigest()[:24]


def homes(traces: Traces) -> Iterator[Path]:
    """Folders that may hold the index, the one beside the traces first."""
    beside = traces.folder / FOLDER
    if not beside.is_symlink():  # a stranger's log directory must not choose where we write
        yield beside
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(traces.folder.resolve())).hexdigest()[:24]
    yield Path(cache) / "gpurun" / "timeline" / name


def find(traces: Traces, key: str) -> Path | None:
    """The finished index of these traces."""
    for home in homes(traces):
        folder = home / key
        if (folder / INDEX_FILE).is_file() and not folder.is_symlink():
            return folder
    return None


@contextmanager
def making(traces: Traces, key: str) -> Iterator[Path]:
    """An empty folder for a new index, which takes its place in one step when the block is left.

    If the block raises, nothing is left of it.

    Raises:
        OSError: no folder can be written.
    """
    home = _writable(homes(traces))
    folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=home))
    try:
        yield folder
        _replace(folder, home / key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _sweep(home, key)


def forget(traces: Traces, key: str) -> None:
    """Removes an index that turned out to be damaged."""
    for home in homes(traces):
        shutil.rmtree(home / key, ignore_errors=True)


def _writable(folders: Iterator[Path]) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise PermissionError("neither the folder of the traces nor the user's cache can be written")


def _replace(folder: Path, target: Path) -> None:
    """No folder replaces one that isn't empty: if another server was faster, its index stays."""
    with suppress(OSError):
        folder.rename(target)
    if not (target / INDEX_FILE).is_file():
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)


def _sweep(home: Path, key: str) -> None:
    """Removes indexes of what the traces were before, and what builds that died have left."""
    for folder in _others(home, key):
        is_new = folder.name.startswith(_NEW)
        if not is_new or time.time() - folder.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _others(home: Path, key: str) -> Sequence[Path]:
    return [each for each in home.iterdir() if each.name != key and each.is_dir() and not each.is_symlink()]
