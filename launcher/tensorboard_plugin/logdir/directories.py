"""Files of a log directory, opened only where they lie inside it: its content may come from anywhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_ENTRIES = 50_000
"""Files and directories that are looked at for one listing."""
MAX_DEPTH = 8
MAX_TRACES = 1024
"""Of one directory: ranks of one capture."""
TRACE_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")


@dataclass(frozen=True)
class Directory:
    """A directory below the log directory, with what lies in it. Links that lead out aren't listed."""

    path: Path
    files: tuple[str, ...]

    @property
    def traces(self) -> tuple[str, ...]:
        """At most `MAX_TRACES`, by name."""
        return tuple(name for name in self.files if name.endswith(TRACE_SUFFIXES))[:MAX_TRACES]


def inside(root: Path, path: Path) -> Path | None:
    """`path`, if it is a regular file and lies, links resolved, in `root`, which is resolved itself."""
    file = open_inside(root, path)
    if file is None:
        return None
    file.close()
    return path


def open_inside(root: Path, path: Path) -> BinaryIO | None:
    """The file, open for reading; `None` if it isn't regular, or lies, links resolved, outside of `root`.

    What is judged is what was opened: others may change the directory meanwhile.
    """
    try:
        found = os.open(
            path, os.O_PATH | os.O_CLOEXEC
        )  # which neither waits for a pipe nor does anything else
    except (OSError, ValueError):
        return None
    try:
        own = f"/proc/self/fd/{found}"
        if stat.S_ISREG(os.fstat(found).st_mode) and Path(os.readlink(own)).is_relative_to(root):
            return open(own, "rb")
    except OSError:
        return None
    finally:
        os.close(found)
    return None


def read_inside(root: Path, path: Path, max_bytes: int) -> bytes | None:
    """The content of a file in `root`; `None` if it isn't there, isn't inside, or is larger than allowed."""
    file = open_inside(root, path)
    if file is None:
        return None
    try:
        with file:
            content = file.read(max_bytes + 1)
    except OSError:
        return None
    return content if len(content) <= max_bytes else None


def read_end(root: Path, path: Path, max_bytes: int) -> bytes:
    """The last whole lines of a file in `root`; nothing if it isn't there or isn't inside."""
    file = open_inside(root, path)
    if file is None:
        return b""
    try:
        with file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - max_bytes, 0))
            content = file.read(max_bytes)
    except OSError:
        return b""
    if size > max_bytes:
        content = content[content.find(b"\n") + 1 :]
    return content[: content.rfind(b"\n") + 1]


def walk(root: Path, is_leaf: Callable[[Directory], bool]) -> Iterator[Directory]:
    """The directories in `root`, itself first, by name; hidden ones and what lies inside a leaf are left out.

    Every directory is visited once, however many links lead to it; at most `MAX_ENTRIES` entries are read.
    """
    seen: set[tuple[int, int]] = set()
    todo = [(root, 0)]
    entries = 0
    while todo and entries < MAX_ENTRIES:
        path, depth = todo.pop()
        found = _list(root, path, seen)
        if found is None:
            continue
        files, directories = found
        entries += len(files) + len(directories)
        directory = Directory(path, files)
        yield directory
        if depth < MAX_DEPTH and not is_leaf(directory):
            todo += [(path / name, depth + 1) for name in reversed(directories)]


def _list(root: Path, path: Path, seen: set[tuple[int, int]]) -> tuple[tuple[str, ...], list[str]] | None:
    """Names of the files and of the directories; `None` for one that isn't readable, or known."""
    files: list[str] = []
    directories: list[str] = []
    with suppress(OSError, RuntimeError, ValueError):
        status = path.stat()
        if (status.st_dev, status.st_ino) in seen or not path.resolve().is_relative_to(root):
            return None
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(path) as listing:
            for number, entry in enumerate(listing):
                if number >= MAX_ENTRIES:
                    break
                if not entry.name.startswith("."):
                    (directories if entry.is_dir() else files).append(entry.name)
        return tuple(sorted(files)), sorted(directories)
    return None
