"""The files of a job's directory, and those that change while it runs."""

import os
import stat
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from gpurun.launcher.rundir.paths import LATEST, is_ours

MAX_FILES = 50_000
"""Those nearest to the top are looked at."""
_LEFT_OUT = frozenset({".git", "__pycache__", ".cache", ".triton", "node_modules"})
Stamp = tuple[int, int, int, int]
"""Device, inode, size, and time of the last change in ns."""


def files_of(directory: Path, search: Path) -> dict[str, Stamp]:
    """The regular files of a directory by path, at most `MAX_FILES`.

    Caches, virtual environments, what git keeps, and runs of gpurun are left out.

    Args:
        search: is left out, too.
    """
    found, to_do, left_out = dict[str, Stamp](), deque([directory.resolve()]), search.resolve()
    while to_do and len(found) < MAX_FILES:
        place = to_do.popleft()
        if place == left_out or is_ours(place) or (place / "pyvenv.cfg").exists():
            continue
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and entry.name not in _LEFT_OUT:
                    to_do.append(place / entry.name)
                elif stat.S_ISREG(status.st_mode) and entry.name != LATEST:
                    stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                    found[entry.path] = stamp
    return found


def changed_files(before: Mapping[str, Stamp], after: Mapping[str, Stamp]) -> list[str]:
    """Paths of files that are new, gone or other ones, but for those that a running process writes.

    That is the log into which the command's own output goes, or another program's.
    """
    is_whole = max(len(before), len(after)) < MAX_FILES
    paths = before.keys() | after.keys() if is_whole else before.keys() & after.keys()
    changed = [path for path in paths if before.get(path) != after.get(path)]
    held = _held_open() if changed else set()
    return sorted(path for path in changed if after.get(path, (0, 0, 0, 0))[:2] not in held)


def _held_open() -> set[tuple[int, int]]:
    """Device and inode of the files that processes hold open, as far as that may be seen."""
    found = set()
    with suppress(OSError):
        for name in chain.from_iterable(map(_descriptors, Path("/proc").glob("[0-9]*"))):
            with suppress(OSError):
                status = name.stat()
                found.add((status.st_dev, status.st_ino))
    return found


def _descriptors(process: Path) -> list[Path]:
    with suppress(OSError):
        return list((process / "fd").iterdir())
    return []
