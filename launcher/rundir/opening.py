"""Opens files of directories that may be anyone's, and may change at any time: every reader does it here."""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from gpurun.launcher.errors import TraceError


def real_path(path: Path) -> Path:
    """Where a file or directory is now, all links resolved.

    Raises:
        OSError: there is none.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return _real_path(fd)
    finally:
        os.close(fd)


def places_of(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Where files and directories are that a user names: they may be links, to what is meant.

    Raises:
        TraceError: one doesn't exist.
    """
    try:
        return tuple(map(real_path, paths))
    except OSError as error:
        raise TraceError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error


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
            raise OSError(errno.EINVAL, "not a regular file")
        if within and not any(map(_real_path(found).is_relative_to, within)):
            raise OSError(errno.ELOOP, f"a link that leads out of {', '.join(map(str, within))}")
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
