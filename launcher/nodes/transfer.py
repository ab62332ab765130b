"""Sends a node's result files to node 0: in chunks, and only what is new since the last time.

Files that only grow continue where they ended, also if node 0 had their beginning before this command, in a
run that is resumed. A rotated log begins again: its older part has what it held. All other files are written
in one piece, and sent whole whenever they change.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from gpurun.launcher.errors import MachineError, unwritable
from gpurun.launcher.nodes.messages import Chunk
from gpurun.launcher.rundir.files import end_of_lines, open_regular
from gpurun.launcher.rundir.paths import CONTROL, is_name, is_of_program, older_part

CHUNK_BYTES = 1 << 17
"""1 s at 1 Mbit/s: a slow connection still passes heartbeats in between."""
WINDOW_CHUNKS = 8
"""How many may be in flight, which bounds the memory in use."""
RESULTS = ("launches", "variants")
"""Directories of a run directory that ranks write into."""
OWN_COPIES = ("launch.json", "rendezvous")
"""Files that node 0 has sent to every node."""
APPENDED = (".jsonl", ".log")
"""Suffixes of the files that only grow."""


@dataclass
class Outbox:
    """The results of a node whose run directory is not node 0's."""

    root: Path
    node: int
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """The number of bytes sent so far, of files that only grow."""
    sent_states: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Inode, size and modification time of what was sent, of all other files."""
    base_bytes: dict[str, int] = field(default_factory=dict)
    """The size of files that only grow, as node 0 had them when this node joined."""

    def join_again(self) -> None:
        """Node 0 counts from now on: what it has of each file is where the next chunk begins."""
        self.base_bytes = dict(self.sent_bytes)

    def send(self, send: Callable[[Chunk], None], await_ack: Callable[[], None]) -> int:
        """Sends what is new; the number of bytes.

        Args:
            send: sends a chunk.
            await_ack: returns when one more chunk is acknowledged.

        Raises:
            MachineError: a file can't be read.
        """
        in_flight = total = 0
        for chunk in self._chunks():
            if in_flight == WINDOW_CHUNKS:
                await_ack()
                in_flight -= 1
            send(chunk)
            in_flight += 1
            total += len(chunk.content)
        for _ in range(in_flight):
            await_ack()
        return total

    def _chunks(self) -> Iterator[Chunk]:
        for path in sorted(self._files()):
            name = path.relative_to(self.root).as_posix()
            try:
                yield from self._appended(path, name) if path.suffix in APPENDED else self._whole(path, name)
            except OSError as error:
                raise MachineError(f"can't read {path}: {error.strerror}") from error

    def _appended(self, path: Path, name: str) -> Iterator[Chunk]:
        older = older_part(path)
        if name in self.sent_bytes and older.exists() and self.sent_states.get(f"{name}.1") != _state(older):
            yield Chunk(self.node, name, 0, b"")
            self.sent_bytes[name] = self.base_bytes[name] = 0
        for chunk in self._parts(path, name, self.sent_bytes.get(name, 0)):
            yield msgspec.structs.replace(chunk, offset=chunk.offset - self.base_bytes.get(name, 0))
            self.sent_bytes[name] = chunk.offset + len(chunk.content)

    def _whole(self, path: Path, name: str) -> Iterator[Chunk]:
        if self.sent_states.get(name) != (state := _state(path)):
            yield from self._parts(path, name, 0)
            self.sent_states[name] = state

    def _parts(self, path: Path, name: str, offset: int) -> Iterator[Chunk]:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(offset)
            while content := file.read(CHUNK_BYTES):
                yield Chunk(self.node, name, offset, content, offset + len(content) >= size_bytes)
                offset += len(content)

    def _files(self) -> Iterator[Path]:
        for directory in RESULTS:
            for path in (self.root / directory).rglob("*"):
                name = path.relative_to(self.root)
                is_ours = not any(map(is_of_program, name.parents)) and CONTROL not in name.parts
                is_result = path.name[0] != "." and path.name not in OWN_COPIES
                if is_ours and is_result and path.is_file() and not path.is_symlink():
                    yield path


def _state(path: Path) -> tuple[int, int, int]:
    """Inode, size and modification time."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass
class Inbox:
    """Writes the other nodes' files into node 0's run directory."""

    root: Path
    had_bytes: dict[str, int] = field(default_factory=dict)
    """Size of files that only grow, before their first chunk came; a line that was cut off is ended."""

    def write(self, chunk: Chunk) -> None:
        """Writes a chunk of a file.

        Raises:
            MachineError: it can't be written, or does not belong into a run directory.
        """
        path = self.place(chunk)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in APPENDED:
                self._append(path, chunk)
            else:
                _write_part(path, chunk)
        except OSError as error:
            raise unwritable(path, error) from error

    def _append(self, path: Path, chunk: Chunk) -> None:
        with _open_for_writing(path) as file:
            if not chunk.content:
                self.had_bytes[chunk.path] = file.truncate(0)
            elif chunk.path not in self.had_bytes:
                self.had_bytes[chunk.path] = end_of_lines(file)
            file.seek(self.had_bytes[chunk.path] + chunk.offset)
            file.write(chunk.content)

    def place(self, chunk: Chunk) -> Path:
        """The file that the chunk is a part of."""
        name = PurePosixPath(chunk.path)
        in_results = name.parts[:1] in [(directory,) for directory in RESULTS]
        if not in_results or not all(map(is_name, name.parts)):
            raise MachineError(
                f"node {chunk.node} sent a file that does not belong to the run: {chunk.path!r}"
            )
        return self.root / name


def _write_part(path: Path, chunk: Chunk) -> None:
    """Writes next to the file, which the last chunk replaces."""
    part = path.with_name(f".{path.name}.part")
    with _open_for_writing(part, os.O_TRUNC if chunk.offset == 0 else 0) as file:
        file.seek(chunk.offset)
        file.write(chunk.content)
    if chunk.is_last:
        part.replace(path)


def _open_for_writing(path: Path, flags: int = 0) -> BinaryIO:
    """A file that may be new, but is no link: programs may leave links in a run directory."""
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+b")
