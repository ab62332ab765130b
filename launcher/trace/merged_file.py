"""The file that `gpurun trace --merge` writes: how it is recognised, and where it may be written."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpurun.launcher.errors import SpecError, TraceError
from gpurun.launcher.rundir.files import no_directory
from gpurun.launcher.trace.kineto.trace_file import open_source

HEAD_BYTES = 4096
MARK = {"gpurun": {"merged": True}}
"""The beginning of a merged trace's header."""


class _Mark(msgspec.Struct):
    merged: bool = False


class _Header(msgspec.Struct):
    gpurun: _Mark | None = None


def is_merged(path: Path) -> bool:
    """Whether the header marks the file as a trace merged by gpurun; false for unreadable files."""
    try:
        with open_source(path) as source:
            head, found, _ = source.read(HEAD_BYTES).partition(b'"traceEvents"')
        header = msgspec.json.decode(head.rstrip(b", \r\n\t") + b"}", type=_Header) if found else _Header()
    except (TraceError, msgspec.DecodeError, RecursionError):
        return False
    return header.gpurun is not None and header.gpurun.merged


def place_for(out: Path, inputs: Sequence[Path] = ()) -> Path:
    """`out`, if it may be written: there is nothing yet, or a regular file. A link, which whoever made the
    directory may have put there, is not followed.

    Raises:
        SpecError: the path is not a regular file, is one of `inputs`, or its directory is missing.
    """
    try:
        status = _status(out)
        if status is not None and any(os.path.samestat(status, each.stat()) for each in inputs):
            raise SpecError(f"can't write {out}: it is one of the traces to merge; name another file")
    except OSError as error:
        raise SpecError(f"can't write {out}: {error.strerror}; name another file") from error
    return out


def _status(out: Path) -> os.stat_result | None:
    """Status of the regular file at `out`; `None` if there is none yet, in a directory that exists."""
    if not out.parent.is_dir():
        raise SpecError(f"can't write {out}: {no_directory(out.parent)} or name another file")
    if not os.path.lexists(out):
        return None
    status = out.lstat()
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise SpecError(f"can't write {out}: it is {what}; name a file, such as all.json.gz")
    return status
