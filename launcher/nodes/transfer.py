"""Result files of a node on their way to node 0: chunk by chunk, only what is new since the last time.

Files that are appended to go on where they ended, also where node 0 has had a beginning of them before this
command: that of a run that is resumed. All others are written in one piece, and are sent whole whenever they
change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gpurun.launcher.errors import MachineError
from gpurun.launcher.nodes.messages import Chunk
from gpurun.launcher.rundir.files import unwritable

CHUNK_BYTES = 1 << 18
"""2 s at 1 Mbit/s: a slow link still has its heartbeats in between."""
WINDOW_CHUNKS = 8
"""As many may be on their way: no memory holds more of a file."""
RESULTS = ("launches", "variants")
"""Directories of a run directory that ranks write into."""
OWN_COPIES = ("launch.json", "rendezvous")
"""What node 0 has given to every node."""
APPENDED = (".jsonl", ".log")
"""Suffixes of the files that only grow."""


@dataclass
class Outbox:
    """The results of a node whose run directory is not node 0's."""

    root: Path
    node: int
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Of files that only grow."""
    sent_states: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Of all others: number, size and time of change of what was sent."""

    def send(self, send: Callable[[Chunk], None], await_taken: Callable[[], None]) -> int:
        """Sends what is new; the number of bytes.

        Args:
            send: puts a chunk on its way.
            await_taken: returns when one more chunk has arrived.

        Raises:
            MachineError: a file can't be read.
        """
        on_the_way = total = 0
        for chunk in self._chunks():
            if on_the_way == WINDOW_CHUNKS:
                await_taken()
                on_the_way -= 1
            send(chunk)
            on_the_way += 1
            total += len(chunk.content)
        for _ in range(on_the_way):
            await_taken()
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
            file.seek(offset)
            while content := file.read(CHUNK_BYTES):
                yield Chunk(self.node, name, offset, content)
                offset += len(content)

    def _files(self) -> Iterator[Path]:
        for folder in RESULTS:
            for path in (self.root / folder).rglob("*"):
                if path.is_file() and not path.name.startswith(".") and path.name not in OWN_COPIES:
                    yield path


@dataclass
class Inbox:
    """Where node 0 puts the files of the other nodes."""

    root: Path
    had_bytes: dict[str, int] = field(default_factory=dict)
    """What there was of files that only grow, before their first chunk came."""

    def write(self, chunk: Chunk) -> None:
        """Writes a part of a file where it belongs.

        Raises:
            MachineError: it can't be written, or belongs nowhere in a run directory.
        """
        path = self.place(chunk)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in APPENDED:
                had_bytes = self.had_bytes.setdefault(chunk.path, path.stat().st_size if path.exists() else 0)
                _write_at(path, had_bytes + chunk.offset, chunk.content, path.exists())
            else:
                _write_at(path, chunk.offset, chunk.content, chunk.offset > 0)
        except OSError as error:
            raise unwritable(path, error) from error

    def place(self, chunk: Chunk) -> Path:
        """The file that it is a part of."""
        name = PurePosixPath(chunk.path)
        in_results = name.parts[:1] in [(folder,) for folder in RESULTS]
        if name.is_absolute() or ".." in name.parts or not in_results:
            raise MachineError(f"node {chunk.node} sent a file that belongs to no run: {chunk.path!r}")
        return self.root / name


def _write_at(path: Path, offset: int, content: bytes, goes_on: bool) -> None:
    with path.open("r+b" if goes_on else "wb") as file:
        file.seek(offset)
        file.write(content)
