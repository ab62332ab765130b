"""Sends a node's result files to node 0: in chunks, and only what is new since the last time.

Files that only grow continue where they ended, also if node 0 had their beginning before this command, in a
run that is resumed. All other files are written in one piece, and sent whole whenever they change.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gpurun.launcher.errors import MachineError
from gpurun.launcher.nodes.messages import Chunk
from gpurun.launcher.rundir.files import unwritable
from gpurun.launcher.rundir.paths import is_name, is_of_program

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
    """For files that only grow."""
    sent_states: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """For all others: inode, size and modification time of what was sent."""

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
        for chunk in self._parts(path, name, self.sent_bytes.get(name, 0)):
            yield chunk
            self.sent_bytes[name] = chunk.offset + len(chunk.content)

    def _whole(self, path: Path, name: str) -> Iterator[Chunk]:
        found = path.stat()
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        if self.sent_states.get(name) != state:
            yield from self._parts(path, name, 0)
            self.sent_states[name] = state

    def _parts(self, path: Path, name: str, offset: int) -> Iterator[Chunk]:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(offset)
            while content := file.read(CHUNK_BYTES):
                yield Chunk(self.node, name, offset, content, offset + len(content) >= size_bytes)
                offset += len(content)

    def _files(self) -> Iterator[Path]:
        for directory in RESULTS:
            for path in (self.root / directory).rglob("*"):
                is_ours = not any(map(is_of_program, path.relative_to(self.root).parents))
                if is_ours and path.is_file() and path.name[0] != "." and path.name not in OWN_COPIES:
                    yield path


@dataclass
class Inbox:
    """Writes the other nodes' files into node 0's run directory."""

    root: Path
    had_bytes: dict[str, int] = field(default_factory=dict)
    """Size of files that only grow, before their first chunk came."""

    def write(self, chunk: Chunk) -> None:
        """Writes a chunk of a file.

        Raises:
            MachineError: it can't be written, or does not belong into a run directory.
        """
        path = self.place(chunk)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in APPENDED:
                had_bytes = self.had_bytes.setdefault(chunk.path, path.stat().st_size if path.exists() else 0)
                _write_at(path, had_bytes + chunk.offset, chunk.content, path.exists())
            else:
                part = path.with_name(f".{path.name}.part")
                _write_at(part, chunk.offset, chunk.content, chunk.offset > 0)
                if chunk.is_last:
                    part.replace(path)
        except OSError as error:
            raise unwritable(path, error) from error

    def place(self, chunk: Chunk) -> Path:
        """The file that the chunk is a part of."""
        name = PurePosixPath(chunk.path)
        in_results = name.parts[:1] in [(directory,) for directory in RESULTS]
        if not in_results or not all(map(is_name, name.parts)):
            raise MachineError(
                f"node {chunk.node} sent a file that does not belong to the run: {chunk.path!r}"
            )
        return self.root / name


def _write_at(path: Path, offset: int, content: bytes, goes_on: bool) -> None:
    with path.open("r+b" if goes_on else "wb") as file:
        file.seek(offset)
        file.write(content)
