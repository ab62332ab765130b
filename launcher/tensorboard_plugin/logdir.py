"""Lists a log directory, runs of ours and directories of traces, and reads the files of a run.

Its content may come from anywhere: files are opened only where they lie inside it, they are checked and
bounded, and what is damaged counts as not there. Recorded steps are thinned out to what a page can show.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from gpurun.launcher.compare.figures.recorded import step_numbers
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.claim import Running
from gpurun.launcher.rundir.files import RunDir, decoded_portion, open_file
from gpurun.launcher.rundir.improvement import Improvement
from gpurun.launcher.rundir.paths import IMPROVEMENT, Stamp, rank_files, stamp_of
from gpurun.launcher.rundir.records import StepRecord
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
    seen: set[tuple[int, int]] = set()

    def below(path: Path, depth: int, most: int) -> Generator[Directory, None, int]:
        """Reads at most so many entries, and returns how many.

        All directories in one have the same share, or the last ones more: a large one doesn't hide others.
        """
        found = _list(root, path, most, seen) if most else None
        if found is None:
            return 0
        files, directories = found
        left = most - len(files) - len(directories)
        directory = Directory(path, files)
        yield directory
        if depth < MAX_DEPTH and ENVIRONMENT not in files and not is_leaf(directory):
            for num_left, name in zip(range(len(directories), 0, -1), directories, strict=True):
                left -= yield from below(path / name, depth + 1, left // num_left)
        return most - left

    return below(root, 0, MAX_ENTRIES)


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


def _list(
    root: Path, path: Path, most: int, seen: set[tuple[int, int]]
) -> tuple[tuple[str, ...], list[str]] | None:
    """Names of files and of directories, at most so many; `None` for one that isn't readable or is known.

    `seen`: devices and inodes of the directories that are known, to which this one is added.
    """
    files: list[str] = []
    directories: list[str] = []
    with suppress(OSError, RuntimeError, ValueError):
        status = path.stat()
        if (status.st_dev, status.st_ino) in seen or not path.resolve().is_relative_to(root):
            return None
        seen.add((status.st_dev, status.st_ino))
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
        """`gpt-splits · 2026-11-21 14:02`; of a run in a search of `gpurun improve` also what it is there."""
        is_stage = inside(self.root, self.path.parent / IMPROVEMENT) is not None
        place = self.path.parent if is_stage else self.path
        stamp = _STAMP.match(place.name)
        name = job or (place.parent.name if stamp else place.name)
        time_text = f"{stamp[1]} {stamp[2]}:{stamp[3]}" if stamp else ""
        return " · ".join(filter(None, (name, self.path.name if is_stage else "", time_text)))

    def traces_of(self, variant: str) -> dict[Path, int | None]:
        """The variant's traces that may be read, by rank, `None` where no name has it.

        `variant` is an id out of our own listing.
        """
        inner = [path for path in self._paths(variant) if inside(self.root, path)]
        # One that holds all ranks would count as one more rank next to them.
        ours = [path for path in inner if not _is(is_merged, self.root, path)]
        ranks = {path: rank_in_name(path.name) for path in ours}
        return dict(sorted(ranks.items(), key=lambda item: (item[1] is None, item[1] or 0, item[0].name)))

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
        files = tuple(self.traces_of(variant))
        return Traces(files[0].parent, files, self.root) if files else None


def own(run: RunDir) -> Listed:
    """A run named on the command line: it is its own log directory."""
    path = run.real or run.path.resolve()
    return Listed(path, path, "gpurun")


Judge = Callable[[Path, tuple[Path, ...]], bool]
"""Whether the head of a file in these directories says something of it."""


def _is(judged: Judge, root: Path, path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return _judged_once(judged, root, path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=20_000)
def _judged_once(judged: Judge, root: Path, path: Path, num_bytes: int, mtime_ns: int) -> bool:
    """Read once per file as it is: a page asks for the same traces many times."""
    return judged(path, (root,))


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
    if not any(_is(begins_as_trace, root, path) for path in paths[:MAX_OTHERS]):
        return ()
    return tuple(path.name for path in paths if _is(begins_as_trace, root, path))


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


T = TypeVar("T")
Status = Literal["running", "done", "stopped"]
MAX_BYTES = 64 << 20
LIVE_S = 120.0
"""Rounds are written every second or so; building a model and its first step may take a minute."""


class Outline(msgspec.Struct, frozen=True):
    """The part of a comparison or a plan that the list of runs needs."""

    name: str = ""
    complete: bool = False


def read_comparison(listed: Listed) -> Comparison | None:
    """Reads the run's comparison; no figures of another gpurun, of which the terminal may show others now."""
    found = _read(listed, listed.run.comparison, Comparison)
    return found if found is None or found.is_current else found.without_figures()


def read_plan(listed: Listed) -> Plan | None:
    return _read(listed, listed.run.plan, Plan)


def read_host(listed: Listed) -> dict[str, Any]:
    return _read(listed, listed.run.host, dict[str, Any]) or {}


def improvement_file(listed: Listed) -> Path:
    """The result of the search of `gpurun improve` that the run belongs to, if it belongs to one."""
    return listed.path.parent / IMPROVEMENT


def read_improvement(listed: Listed) -> Improvement | None:
    return _read(listed, improvement_file(listed), Improvement)


def outline(listed: Listed) -> Outline:
    """Name and whether all is measured; from the plan while there is no comparison."""
    found = _read(listed, listed.run.comparison, Outline) or _read(listed, listed.run.plan, Outline)
    return found or Outline()


def status(listed: Listed) -> Status:
    """Whether a command works on it: here its process lives; elsewhere something was written a moment ago."""
    if listed.kind == "traces" or outline(listed).complete:
        return "done"
    claim = _read(listed, listed.run.running, Running)
    if claim is None or not claim.may_live:
        return "stopped"
    if claim.is_here:
        return "running"
    return "running" if time.time() - changed_s(listed) < LIVE_S else "stopped"


def changed_s(listed: Listed) -> float:
    """When something was last written, in unix time."""
    if listed.kind == "traces":
        return max(_mtime_s(listed, listed.path / name) for name in listed.trace_names)
    run = listed.run
    if outline(listed).complete:
        return _mtime_s(listed, run.comparison)
    events = (run.path / "launches").glob("*/events.jsonl")
    return max(_mtime_s(listed, path) for path in (run.plan, run.comparison, *events))


def version(*facts: Any, files: Iterable[Path] = ()) -> str:
    """Another one whenever the facts or the files are others."""
    stamps = [(os.fsencode(file).hex(), stamp_of(file)) for file in files]  # a name may be any bytes
    return hashlib.sha256(msgspec.json.encode((facts, stamps))).hexdigest()[:16]


def _read(listed: Listed, path: Path, kind: type[T]) -> T | None:
    if listed.kind == "traces" or inside(listed.root, path) is None:
        return None
    found: T | None = _DOCUMENTS.get(
        (listed.root, path, kind), stamp_of(path), lambda: _decoded(listed.root, path, kind)
    )
    return found


class Kept:
    """Results made of files, each as it is now; of all together, those of so many bytes of files."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, tuple[Stamp, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, stamp: Stamp, make: Callable[[], Any]) -> Any:
        """Returns the result made when the file had this stamp, or makes it now."""
        with self._lock:
            before, value = self._kept.get(key, (None, None))
            if before == stamp:
                self._kept.move_to_end(key)
                return value
        value = make()
        with self._lock:
            self._kept[key] = stamp, value
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and self.num_bytes > self._max_bytes:
                self._kept.popitem(last=False)
        return value

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(max(stamp[0], _LEAST_BYTES) for stamp, _ in self._kept.values())


_LEAST_BYTES = 1 << 12
_DOCUMENTS = Kept(MAX_BYTES)


def _decoded(root: Path, path: Path, kind: Any) -> Any:
    content = read_inside(root, path, MAX_BYTES)
    try:
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _mtime_s(listed: Listed, path: Path) -> float:
    return path.stat().st_mtime if inside(listed.root, path) else 0.0


MAX_STEPS_BYTES = 64 << 20
"""The limit of one rank's file, from its end; 300,000 steps."""
MAX_VARIANT_BYTES = 256 << 20
"""The limit of the files of all ranks together; each may give the same share of it."""
MAX_RANKS = 256
MAX_VALUES = 2000
"""The limit of one variant, over all ranks."""
NUM_SLOWEST = 10
"""Steps that stay in any case."""

Key = tuple[str, int, int, int]


def variant_steps(listed: Listed, variant: str) -> dict[str, Any]:
    """Every timed step, or evenly chosen ones, on every rank; see README.md."""
    by_rank, first = _timed_by_rank(listed, variant)
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    found = {key: step for step in first if (key := key_of(step)) in common}
    ordered, numbers = list(found), step_numbers(list(found.values()))
    slowest = [max(steps[key] for steps in by_rank.values()) for key in ordered]
    chosen = choose(slowest, max(MAX_VALUES // max(len(by_rank), 1), 2 * NUM_SLOWEST))
    keys = [ordered[i] for i in chosen]
    return {
        "total": len(ordered),
        "ranks": list(by_rank),
        "number": [numbers[i] for i in chosen],
        "round": [key[1] for key in keys],
        "launch": [key[0] for key in keys],
        "step_ms": [slowest[i] for i in chosen],
        "by_rank_ms": [[steps[key] for key in keys] for steps in by_rank.values()],
    }


def _timed_by_rank(listed: Listed, variant: str) -> tuple[dict[int, Mapping[Key, float]], list[StepRecord]]:
    """The result of `timed` for each rank, and all records of the first; those of all would fill memory."""
    files = list(rank_files(listed.run.variant(variant), ".jsonl").items())[:MAX_RANKS]
    share = min(MAX_STEPS_BYTES, MAX_VARIANT_BYTES // max(len(files), 1))
    found: dict[int, Mapping[Key, float]] = {}
    first: list[StepRecord] = []
    for rank, path in files:
        records = decoded_portion(read_end(listed.root, path, share), msgspec.json.Decoder(StepRecord))
        first = records if not found else first
        found[rank] = timed(records)
    return found, first


def timed(records: Sequence[StepRecord]) -> Mapping[Key, float]:
    """Milliseconds of the timed steps, in their order."""
    return {key_of(record): record.step_ns / 1e6 for record in records if record.kind == "timed"}


def key_of(record: StepRecord) -> Key:
    """Which step this is, on all ranks."""
    return record.launch, record.round, record.order, record.step


def choose(values: Sequence[float], number: int) -> list[int]:
    """Positions of `number` values, evenly chosen, the largest ones always among them; in order."""
    if len(values) <= number:
        return list(range(len(values)))
    largest = sorted(range(len(values)), key=values.__getitem__)[-NUM_SLOWEST:]
    even = [i * len(values) // (number - NUM_SLOWEST) for i in range(number - NUM_SLOWEST)]
    return sorted({*largest, *even})
