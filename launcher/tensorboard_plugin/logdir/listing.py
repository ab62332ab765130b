"""Lists a log directory: runs of ours, and directories of traces.

Its content may come from anywhere: files are opened only where they lie inside it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal

from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.opening import open_file
from gpurun.launcher.rundir.paths import rank_files
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces
from gpurun.launcher.trace.analysis.discover import SUFFIXES, begins_as_trace, is_merged, rank_in_name

MAX_ENTRIES = 50_000
"""Files and directories that are looked at for one listing."""
MAX_DEPTH = 8
ENVIRONMENT = "pyvenv.cfg"
"""A file of every virtual environment, which may have more entries than that and no runs."""
MAX_TRACES = 1024
"""The limit of one directory: ranks of one capture."""
TRACE_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
MAX_OTHERS = 8
"""The number of other JSON files, none of them a trace, from which a directory is one of data."""


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
    """The file, open for reading; `None` if it isn't regular, or lies, links resolved, outside of `root`."""
    try:
        return os.fdopen(open_file(path, (root,)), "rb")
    except (OSError, ValueError):
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
    """The directories in `root`, itself first, by name.

    Hidden ones, what lies inside a leaf or a virtual environment, and what has a name that isn't text are
    left out. Every directory is visited once, however many links lead to it; at most `MAX_ENTRIES` entries
    are read.
    """
    return _walk(Tree(root, is_leaf), root, 0, MAX_ENTRIES)


@dataclass(frozen=True)
class Tree:
    """The state of a walk through a directory."""

    root: Path
    is_leaf: Callable[[Directory], bool]
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Devices and inodes of the directories."""


def _walk(tree: Tree, path: Path, depth: int, most: int) -> Generator[Directory, None, int]:
    """Reads at most so many entries, and returns how many.

    All directories in one have the same share, or the last ones more: a large one doesn't hide others.
    """
    found = _list(tree, path, most) if most else None
    if found is None:
        return 0
    files, directories = found
    left = most - len(files) - len(directories)
    directory = Directory(path, files)
    yield directory
    if depth < MAX_DEPTH and ENVIRONMENT not in files and not tree.is_leaf(directory):
        for num_left, name in zip(range(len(directories), 0, -1), directories, strict=True):
            left -= yield from _walk(tree, path / name, depth + 1, left // num_left)
    return most - left


def is_text(name: str) -> bool:
    """Whether a name can be a part of an answer: on disk it may be any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, for one
        return False


def _list(tree: Tree, path: Path, most: int) -> tuple[tuple[str, ...], list[str]] | None:
    """Names of files and of directories, at most so many; `None` for one that isn't readable, or known."""
    files: list[str] = []
    directories: list[str] = []
    with suppress(OSError, RuntimeError, ValueError):
        status = path.stat()
        if (status.st_dev, status.st_ino) in tree.seen or not path.resolve().is_relative_to(tree.root):
            return None
        tree.seen.add((status.st_dev, status.st_ino))
        with os.scandir(path) as listing:
            for number, entry in enumerate(listing):
                if number >= most:
                    break
                if not entry.name.startswith(".") and is_text(entry.name):
                    (directories if _is_directory(entry) else files).append(entry.name)
        return tuple(sorted(files)), sorted(directories)
    return None


MAX_RUNS = 2000
FRESH_S = 2.0
"""A listing is used again for so long: a page asks for several things at once."""
EVENTS = "tfevents"
"""In the name of every event file."""
TRACES = "traces"
"""Id of the one variant of a directory of traces."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)_(\d\d)-(\d\d)-\d\d")


@dataclass(frozen=True)
class TraceFile:
    """A variant's trace."""

    path: Path
    rank: int | None
    """The rank in the file's name; `None` where only the content shows it."""


@dataclass(frozen=True)
class Listed:
    """A run as it was found. Only these are ever opened: what a request names is looked up here."""

    root: Path
    """The log directory, resolved."""
    path: Path
    kind: Literal["gpurun", "traces"]
    trace_names: tuple[str, ...] = field(default=(), repr=False)
    """The names of a directory's traces."""

    @cached_property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def run(self) -> RunDir:
        return RunDir(self.path, real=self.root)

    def title(self, job: str | None) -> str:
        """`gpt-splits · 2026-11-21 14:02`."""
        stamp = _STAMP.match(self.path.name)
        name = job or (self.path.parent.name if stamp else self.path.name)
        return f"{name} · {stamp[1]} {stamp[2]}:{stamp[3]}" if stamp else name

    def traces_of(self, variant: str) -> tuple[TraceFile, ...]:
        """The variant's traces that may be read, by rank; `variant` is an id out of our own listing."""
        inner = [path for path in self._paths(variant) if inside(self.root, path)]
        ours = [path for path in inner if not _is_merged(self.root, path)]
        found = [TraceFile(path, rank_in_name(path.name)) for path in ours]
        return tuple(sorted(found, key=lambda each: (each.rank is None, each.rank or 0, each.path.name)))

    def outside(self, variant: str) -> tuple[Path, ...]:
        """Files like a trace of the variant that aren't opened: links that lead out, or to nothing."""
        return tuple(
            path for path in self._paths(variant) if path.is_symlink() and not inside(self.root, path)
        )

    def _paths(self, variant: str) -> list[Path]:
        if self.kind == "traces":
            return [self.path / name for name in self.trace_names]
        return list(rank_files(self.run.variant(variant), ".pt.trace.json.gz").values())

    def indexed(self, variant: str) -> Traces | None:
        """The variant's traces as an index takes them; `None` if there are none."""
        files = tuple(each.path for each in self.traces_of(variant))
        return Traces(files[0].parent, files, self.root) if files else None


def _is_merged(root: Path, path: Path) -> bool:
    """Whether it holds all ranks: next to them it would count as one more rank."""
    try:
        status = path.stat()
    except OSError:
        return False
    return _head_says_merged(root, path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=10_000)
def _head_says_merged(root: Path, path: Path, num_bytes: int, mtime_ns: int) -> bool:
    """Read once per file as it is: a page asks for the same traces many times."""
    return is_merged(path, (root,))


def find_all(root: Path) -> Iterator[Listed]:
    """Runs and directories of traces in `root`, at most `MAX_RUNS`; inside a run nothing is looked for."""
    found = (_listed(root, directory) for directory in walk(root, lambda directory: _is_run(root, directory)))
    return islice((listed for listed in found if listed is not None), MAX_RUNS)


def _is_run(root: Path, directory: Directory) -> bool:
    marks = [name for name in ("plan.json", "comparison.json") if name in directory.files]
    return any(inside(root, directory.path / name) for name in marks)


def _listed(root: Path, directory: Directory) -> Listed | None:
    if _is_run(root, directory):
        return Listed(root, directory.path, "gpurun")
    names = directory.traces or _traces_of_other_names(root, directory)
    return Listed(root, directory.path, "traces", names) if names else None


def _traces_of_other_names(root: Path, directory: Directory) -> tuple[str, ...]:
    """Files of `export_chrome_trace`, under whatever name; only the content shows it."""
    names = [name for name in directory.files if name.endswith(SUFFIXES)]
    paths = [path for name in names[:MAX_TRACES] if (path := inside(root, directory.path / name))]
    if not any(_is_trace(root, path) for path in paths[:MAX_OTHERS]):
        return ()
    return tuple(path.name for path in paths if _is_trace(root, path))


def _is_trace(root: Path, path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return _head_says_trace(root, path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=10_000)
def _head_says_trace(root: Path, path: Path, num_bytes: int, mtime_ns: int) -> bool:
    """Read once per file as it is."""
    return begins_as_trace(path, (root,))


class Listing:
    """The runs of a log directory, looked for again once the last look is old. Safe for threads."""

    def __init__(self, logdir: str | None) -> None:
        self._root = Path(logdir).expanduser() if logdir and "://" not in logdir else None
        self._lock = threading.Lock()
        self._looked_s = float("-inf")
        self._found: dict[str, Listed] = {}

    @property
    def logdir(self) -> str:
        """The log directory, or the URL of which it is a copy."""
        return str(source_of(self._root)) if self._root else ""

    def all(self) -> dict[str, Listed]:
        """Runs by name."""
        with self._lock:
            if time.monotonic() - self._looked_s > FRESH_S:
                self._found = {each.name: each for each in self._look()}
                self._looked_s = time.monotonic()
            return self._found

    def get(self, name: str) -> Listed | None:
        """The run of that name, if the listing has it: no other way leads from a request to a directory."""
        return self.all().get(name)

    def any(self) -> bool:
        """Whether there is anything to show; stops at the first find."""
        if self._found:
            return True
        return next(self._look(), None) is not None

    def has_events(self) -> bool:
        """Whether there may be event files, which TensorBoard's own tabs show; elsewhere there is none."""
        if self._root is None:
            return True
        directories = walk(self._root.resolve(), lambda _: False) if self._root.is_dir() else ()
        return any(EVENTS in name for directory in directories for name in directory.files)

    def _look(self) -> Iterator[Listed]:
        if self._root is None or not self._root.is_dir():
            return iter(())
        return find_all(self._root.resolve())
