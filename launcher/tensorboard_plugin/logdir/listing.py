"""What a log directory holds: runs of ours, and directories of traces."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.tensorboard_plugin.logdir.directories import Directory, inside, walk
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces
from gpurun.launcher.trace.analysis.discover import is_merged, rank_in_name

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
    """As the name says; `None` where only the content shows it."""


@dataclass(frozen=True)
class Listed:
    """A run as it was found. Only these are ever opened: what a request names is looked up here."""

    root: Path
    """The log directory, resolved."""
    path: Path
    kind: Literal["gpurun", "traces"]
    trace_names: tuple[str, ...] = field(default=(), repr=False)
    """Of a directory of traces."""

    @cached_property
    def name(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def run(self) -> RunDir:
        return RunDir(self.path)

    def title(self, job: str | None) -> str:
        """`gpt-splits · 2026-11-21 14:02`."""
        stamp = _STAMP.match(self.path.name)
        name = job or (self.path.parent.name if stamp else self.path.name)
        return f"{name} · {stamp[1]} {stamp[2]}:{stamp[3]}" if stamp else name

    def traces_of(self, variant: str) -> tuple[TraceFile, ...]:
        """The variant's traces that may be read, by rank; `variant` is an id out of our own listing."""
        readable = [path for path in self._paths(variant) if inside(self.root, path) and not _is_merged(path)]
        found = [TraceFile(path, rank_in_name(path.name)) for path in readable]
        return tuple(sorted(found, key=lambda each: (each.rank is None, each.rank or 0, each.path.name)))

    def outside(self, variant: str) -> tuple[Path, ...]:
        """What looks like a trace of the variant, but isn't opened: links that lead out, or to nothing."""
        return tuple(
            path for path in self._paths(variant) if path.is_symlink() and not inside(self.root, path)
        )

    def _paths(self, variant: str) -> list[Path]:
        if self.kind == "traces":
            return [self.path / name for name in self.trace_names]
        return sorted(self.run.variant(variant).glob("rank*.pt.trace.json.gz"))

    def indexed(self, variant: str) -> Traces | None:
        """The variant's traces as an index takes them; `None` if there are none."""
        files = tuple(each.path for each in self.traces_of(variant))
        return Traces(files[0].parent, files) if files else None


def _is_merged(path: Path) -> bool:
    """Whether it holds all ranks: next to them it would count as one more rank."""
    try:
        status = path.stat()
    except OSError:
        return False
    return _head_says_merged(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=10_000)
def _head_says_merged(path: Path, num_bytes: int, mtime_ns: int) -> bool:
    """Read once per file as it is: a page asks for the same traces many times."""
    return is_merged(path)


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
    return Listed(root, directory.path, "traces", directory.traces) if directory.traces else None


class Listing:
    """The runs of a log directory, looked for again once the last look is old. Safe for threads."""

    def __init__(self, logdir: str | None) -> None:
        self._root = Path(logdir).expanduser() if logdir and "://" not in logdir else None
        self._lock = threading.Lock()
        self._looked_s = float("-inf")
        self._found: dict[str, Listed] = {}

    @property
    def logdir(self) -> str:
        return str(self._root or "")

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
