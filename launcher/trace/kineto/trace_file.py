"""The uncompressed bytes of a trace file, one block at a time."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from gpurun.launcher.errors import TraceError
from gpurun.launcher.rundir.opening import open_file
from gpurun.launcher.units import format_count

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 17
MAX_PADDING_BYTES = 1 << 20
"""Zeros after the compressed data, as block devices and tapes leave them."""
UNPACKED_FREE_BYTES = 256 << 20
UNPACKED_RATIO = 200
"""Kineto traces compress 15 to 40 times; gzip's limit, 1032 times, is that of a zip bomb."""
MAX_UNPACKED_BYTES = 64 << 30
"""The most unpacked bytes of all traces that are read for one answer."""


def allowed_bytes(files: Sequence[Path], among: Sequence[Path] = ()) -> int:
    """How many bytes traces may have together when they are unpacked.

    Args:
        files: the traces.
        among: all traces that are read for the same answer; these get their share of what all may have.
    """
    sizes = {file: size_of(file) for file in {*files, *among}}
    whole = sum(sizes[file] for file in among or files)
    allowed = min(max(UNPACKED_FREE_BYTES, UNPACKED_RATIO * whole), MAX_UNPACKED_BYTES)
    return allowed * sum(sizes[file] for file in files) // max(whole, 1) if among else allowed


def size_of(file: Path) -> int:
    """Bytes of a file without the holes that it may have; 0 if it doesn't exist."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return min(status.st_size, 512 * status.st_blocks or status.st_size)  # some file systems count no blocks


@dataclass
class ReadLimits:
    """The limits of what may still be read."""

    left: int | None = None
    """Unpacked bytes of all files together; `None`: whoever reads decides."""
    within: Sequence[Path] = ()
    """The directories that each file has to be in, as `open_file` takes them."""


ANYTHING = ReadLimits()


class Unpacked:
    """The content of a gzip file, which may have several members and zeros after them.

    `gzip` looks at every zero on its own: a file that is made longer by 20 GB would take hours.
    """

    def __init__(self, raw: FileIO) -> None:
        self._raw = raw
        self._member = zlib.decompressobj(wbits=31)
        self._rest = b""
        """Compressed bytes that are read, but not unpacked yet."""

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` more bytes; none only at the end.

        Raises:
            EOFError: the file ends within a member.
            zlib.error: this isn't gzip, or it is damaged.
        """
        while True:
            if self._member.eof:
                if not self._begin_member():
                    return b""
                self._member = zlib.decompressobj(wbits=31)
            packed = self._rest or self._raw.read(_CHUNK_BYTES)
            if not packed:
                raise EOFError("the file ends within compressed data")
            data = self._member.decompress(packed, num_bytes)
            self._rest = self._member.unconsumed_tail or self._member.unused_data
            if data:
                return data

    def _begin_member(self) -> bool:
        """Passes over zeros to the next member, if there is one."""
        packed = self._rest
        for _ in range(MAX_PADDING_BYTES // _CHUNK_BYTES):
            self._rest = packed.lstrip(b"\0")
            if self._rest:
                return True
            packed = self._raw.read(_CHUNK_BYTES)
            if not packed:
                return False
        return False


@dataclass
class TraceSource:
    """A file, plain or gzip judged by its first bytes, read sequentially."""

    path: Path
    file: FileIO | Unpacked
    raw: FileIO
    """The file itself, which may be compressed."""
    packed_bytes: int | None
    """Size on disk if the file is compressed."""
    room: ReadLimits
    """The room that all files have together."""
    position: int = 0
    """Uncompressed bytes read so far."""

    def read(self, num_bytes: int) -> bytes:
        """Up to `num_bytes` more bytes; none only at the end, which may be that of a truncated gzip file.

        Raises:
            TraceError: the disk or the gzip stream fails, or it expands to more than a trace can hold.
        """
        try:
            data = self.file.read(num_bytes)
        except EOFError:
            return b""
        except (OSError, zlib.error) as error:
            raise TraceError(
                f"{self.path}: damaged after byte {self.position} of the uncompressed data: {error}"
            ) from error
        self.position += len(data)
        self._refuse_bomb()
        if self.room.left is not None:
            self.room.left -= len(data)
            if self.room.left < 0:
                text = "left out: together, the traces unpack to more than gpurun reads at once; name fewer"
                raise TraceError(f"{self.path}: {text}")
        return data

    def file_position(self) -> int:
        """Bytes of the file itself, compressed or not, read so far."""
        return os.lseek(self.raw.fileno(), 0, os.SEEK_CUR)

    def _refuse_bomb(self) -> None:
        if self.packed_bytes is None:
            return
        if self.position > max(UNPACKED_FREE_BYTES, UNPACKED_RATIO * self.packed_bytes):
            raise TraceError(
                f"{self.path}: {format_count(self.packed_bytes)} bytes unpack to more than"
                f" {format_count(self.position)}: "
                "this looks like a gzip bomb; if it is a trace, decompress it yourself"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.raw.close()


def open_source(path: Path, room: ReadLimits) -> TraceSource:
    """The file at `path`, ready to read, as far as there is room.

    Raises:
        TraceError: it can't be opened, is empty, is no regular file, or is elsewhere.
    """
    try:
        raw = FileIO(open_file(path, room.within), "rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    try:
        return _source(path, raw, room)
    except BaseException:
        raw.close()
        raise


def _source(path: Path, raw: FileIO, room: ReadLimits) -> TraceSource:
    num_bytes = os.fstat(raw.fileno()).st_size
    if num_bytes == 0:
        raise TraceError(f"{path}: empty (byte 0)")
    if os.pread(raw.fileno(), 2, 0) != GZIP_MAGIC:
        return TraceSource(path, raw, raw, None, room)
    return TraceSource(path, Unpacked(raw), raw, num_bytes, room)
