"""The files of a job's directory, and those that change while it runs."""

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from gpurun.launcher.machine.git import refs_of
from gpurun.launcher.machine.landlock import can_restrict_writes
from gpurun.launcher.rundir.launch_writes import (
    DEVICES,
    cache_places,
    is_below,
    temporary_places,
    writable_places,
)
from gpurun.launcher.rundir.paths import IMPROVEMENT, INVOCATION, LATEST, SELFTEST

MAX_FILES = 50_000
"""Limit on the files of a directory, nearest to its top first, and on the files that links in it lead to."""
_LEFT_OUT = frozenset({".git", "__pycache__", ".cache", ".triton", "node_modules"})
_OF_A_RUN = (INVOCATION, IMPROVEMENT, SELFTEST)
"""A directory with one of these is a run or a search, or begins to be one."""


class Stamp(NamedTuple):
    """A file as it is at a moment."""

    device: int
    inode: int
    mode: int
    owner: int
    group: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(
            status.st_dev, status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_size, *times
        )


@dataclass(frozen=True)
class JobFiles:
    """What lies in a job's directory."""

    directory: Path
    own: Mapping[str, Stamp]
    """The files and links, by path."""
    linked: Mapping[str, Stamp]
    """The files outside of the directory to which links in it lead, by path."""
    refs: Mapping[str, str]
    """The commits of git's branches and tags, by name."""


def files_of(directory: Path, search: Path) -> JobFiles:
    """Files of a directory, files to which links in it lead, at most `MAX_FILES` of each; git's refs.

    Caches, virtual environments, what git keeps, and runs of gpurun are left out.

    Args:
        search: is left out, too.
    """
    directory = directory.resolve()
    elsewhere = (str(search.resolve()), *DEVICES, *cache_places(str(directory)))
    own = _scan([directory], elsewhere)
    links = (Path(path) for path, stamp in own.items() if stat.S_ISLNK(stamp.mode))
    targets = [target for link in links if (target := _target(link)) is not None]
    linked = _scan(targets, (*elsewhere, str(directory)))
    return JobFiles(directory, own, linked, refs_of(directory))


def _scan(places: Iterable[Path], elsewhere: Sequence[str]) -> dict[str, Stamp]:
    """The files that these places are, or that are in them, but for those elsewhere."""
    found, to_do, seen = dict[str, Stamp](), deque(places), set[Path]()
    while to_do and len(found) < MAX_FILES:
        place = to_do.popleft()
        if place in seen or is_below(str(place), elsewhere):
            continue
        seen.add(place)
        if os.path.isfile(place):
            with suppress(OSError):
                found[str(place)] = Stamp.of(place.stat())
        elif not (_is_run(place) or os.path.exists(place / "pyvenv.cfg")):
            for entry, status in _entries(place):
                if stat.S_ISDIR(status.st_mode) and entry.name not in _LEFT_OUT:
                    to_do.append(place / entry.name)
                elif not stat.S_ISDIR(status.st_mode) and not _is_latest(entry.name):
                    found[entry.path] = Stamp.of(status)
    return found


def _target(link: Path) -> Path | None:
    """Where a link leads; `None` where that isn't looked at."""
    with suppress(OSError, RuntimeError):
        target = link.resolve(strict=True)
        return None if _LEFT_OUT.intersection(target.parts) else target
    return None


def _is_run(place: Path) -> bool:
    return any(os.path.isfile(place / name) for name in _OF_A_RUN)  # `Path.is_file` raises PermissionError


def _is_latest(name: str) -> bool:
    """Whether it is the file that names the newest run, or a draft of it."""
    return name == LATEST or name.startswith(f".{LATEST}.")


def _entries(place: Path) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
    """What a directory has; of links, the links."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):
                yield entry, entry.stat(follow_symlinks=False)


def reachable_places(directory: Path, search: Path) -> tuple[str, ...]:
    """Where launches can write: everywhere, if the kernel can't keep them from it."""
    return writable_places(str(directory), str(search)) if can_restrict_writes() else ("/",)


def is_temporary(path: str, directory: Path) -> bool:
    """Whether it lies in a directory for temporary files, which isn't in the job's project."""
    return is_below(path, temporary_places(str(directory)))


def changed_files(before: JobFiles, after: JobFiles, reachable: Sequence[str] = ("/",)) -> list[str]:
    """Paths of files that are new, gone or other ones, but for those that a running process writes.

    That is the log into which the command's own output goes, or another program's. Last, git's refs.

    Args:
        reachable: where launches could write, if not everywhere; elsewhere they can change only a file's mode
            and owner, and all else is the user's own doing.
    """
    changed = {
        path: now
        for was, now in ((before.own, after.own), (before.linked, after.linked))
        for path in _changed(was, now, reachable)
        if not _is_in_run(Path(path), before.directory)
    }
    held = _held_open() if changed else set()
    files = sorted(path for path, now in changed.items() if path not in now or now[path][:2] not in held)
    names = (
        sorted(before.refs.keys() | after.refs.keys()) if is_below(str(before.directory), reachable) else []
    )
    refs = [f"{name} of git" for name in names if before.refs.get(name) != after.refs.get(name)]
    return [*files, *refs]


def _changed(
    before: Mapping[str, Stamp], after: Mapping[str, Stamp], reachable: Sequence[str]
) -> Iterator[str]:
    is_whole = max(len(before), len(after)) < MAX_FILES
    for path in before.keys() | after.keys() if is_whole else before.keys() & after.keys():
        was, now = before.get(path), after.get(path)
        if was == now:
            continue
        if is_below(path, reachable):
            yield path
        elif was is not None and now is not None and was[:2] == now[:2] and was[2:5] != now[2:5]:
            yield path  # mode or owner of the same file


def _is_in_run(path: Path, directory: Path) -> bool:
    """Whether it lies in a run that is below the directory, by now."""
    return any(_is_run(place) for place in path.parents if directory in place.parents)


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
