"""Checks directories that may be anyone's, and opens their files, though all may change at any time.

Every reader does it here.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from gpurun.launcher.errors import SpecError, TraceError, unreadable
from gpurun.launcher.rundir.paths import CONTROL, is_of_program
from gpurun.launcher.units import format_number

_RECORD = re.compile(r"(?!.*events\.jsonl$|rank.*\.jsonl$|.*\.pt\.trace\.json$).*\.jsonl?")
_DEEPEST = 16
"""A run of gpurun has directories on fewer levels."""
MAX_ENTRIES = 1_000_000
"""The most entries of a run, without what programs save: ten times those of 100 launches on 256 devices."""


def real_path(path: Path) -> Path:
    """The path of a file or directory now, all links resolved.

    Raises:
        OSError: there is none.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return _real_path(fd)
    finally:
        os.close(fd)


def places_of(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The real paths of files and directories that a user names: they may be links.

    Raises:
        TraceError: one doesn't exist.
    """
    try:
        return tuple(map(real_path, paths))
    except OSError as error:
        hint = f"; {_near(Path(error.filename))}" if isinstance(error, FileNotFoundError) else ""
        raise TraceError(f"{error.filename}: {(error.strerror or str(error)).lower()}{hint}") from error


def _near(path: Path) -> str:
    """The hint for a name that isn't there."""
    import difflib

    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"did you mean {path.with_name(near[0])}?" if near else "name a trace, or a directory of traces"


def _real_path(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def open_file(path: Path, within: Sequence[Path] = (), flags: int = 0) -> int:
    """A descriptor of a regular file, for reading.

    What has been opened is judged, not what `path` led to before: its owner may put a link or a pipe in the
    place of any part of it meanwhile. Until then it is opened for no access, which neither waits nor does
    anything else.

    Args:
        path: of the file.
        within: directories, or files, by `real_path`: it is one of them or in one. None: it may be anywhere.
        flags: further ones of open(2).

    Raises:
        OSError: it can't be opened, is no regular file, or is elsewhere.
    """
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if within and not any(map(_real_path(found).is_relative_to, within)):
            what = f"a link that leads out of {', '.join(map(str, within))}"
            raise OSError(errno.ELOOP, what, str(path))
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)


def open_regular(path: Path, within: Sequence[Path] = ()) -> BinaryIO:
    """A file of a run, open for reading; it is no link, and lies in the run's directory as it was checked.

    Args:
        path: of the file.
        within: as `RunPaths` has it.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    return os.fdopen(open_file(path, within, os.O_NOFOLLOW), "rb")


def refuse_links(directory: Path) -> int:
    """How many bytes the records in a run directory have together, without steps and events.

    Returns if everything in it is a directory, a file or a socket: gpurun makes nothing else. A link would
    have us read, or write, elsewhere; a pipe would have us wait. Whoever made the run may have put them
    there. What programs save for themselves is not looked at, since gpurun never opens it.

    Raises:
        SpecError: there is something else, too much, or a directory that can't be read.
    """
    num_bytes = 0
    for number, of_entry in enumerate(_everything_in(directory, 0)):
        if number >= MAX_ENTRIES:
            most = format_number(MAX_ENTRIES, 0)
            raise SpecError(f"{directory} has more than {most} files and directories; remove some")
        num_bytes += of_entry
    return num_bytes


def _everything_in(directory: Path, depth: int) -> Iterator[int]:
    """The bytes of each entry, if it is a record."""
    if depth > _DEEPEST:
        raise SpecError(f"{directory} lies deeper than any directory of a run; remove it")
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield _num_bytes_of(entry)
                if entry.is_dir(follow_symlinks=False) and not is_of_program(Path(entry.path)):
                    yield from _everything_in(Path(entry.path), depth + 1)
    except FileNotFoundError:
        pass  # a run in progress removes files
    except PermissionError as error:
        if directory.name != CONTROL:  # which only ranks and their owner need
            raise SpecError(unreadable(directory, error)) from None


def _num_bytes_of(entry: "os.DirEntry[str]") -> int:
    status = entry.stat(follow_symlinks=False)
    if not any(is_it(status.st_mode) for is_it in (stat.S_ISDIR, stat.S_ISREG, stat.S_ISSOCK)):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
        raise SpecError(f"{entry.path} is {what}, which no run of gpurun contains; remove it")
    return status.st_size if stat.S_ISREG(status.st_mode) and _RECORD.fullmatch(entry.name) else 0


_MOST_NAME_BYTES = 255


def newest_name(pointer: Path) -> str:
    """The name of the newest run; empty if there is no such file."""
    if not pointer.is_file():
        return ""
    with open_regular(pointer) as file:
        return file.read(_MOST_NAME_BYTES).decode("utf-8", "replace").strip()
