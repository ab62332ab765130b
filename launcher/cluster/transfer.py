"""Result files of a node on their way to node 0: chunk by chunk, only what has grown since the last time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from launcher.cluster.messages import Chunk
from launcher.errors import MachineError
from launcher.rundir import unwritable

CHUNK_BYTES = 1 << 18
"""2 s at 1 Mbit/s: a slow link still has its heartbeats in between."""
WINDOW_CHUNKS = 8
"""As many may be on their way: no memory holds more of a file."""
RESULTS = ("launches", "variants")
"""Folders of a run directory that ranks write into."""
OWN_COPIES = ("launch.json", "rendezvous")
"""What node 0 has given to every node."""


@dataclass
class Outbox:
    """The results of a node whose run directory is not node 0's."""

    root: Path
    node: int
    sent_bytes: dict[str, int] = field(default_factory=dict)

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
            offset = self.sent_bytes.get(name, 0)
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    while content := file.read(CHUNK_BYTES):
                        yield Chunk(self.node, name, offset, content)
                        offset += len(content)
            except OSError as error:
                raise MachineError(f"can't read {path}: {error.strerror}") from error
            self.sent_bytes[name] = offset

    def _files(self) -> Iterator[Path]:
        for folder in RESULTS:
            for path in (self.root / folder).rglob("*"):
                if path.is_file() and not path.name.startswith(".") and path.name not in OWN_COPIES:
                    yield path


def write_chunk(root: Path, chunk: Chunk) -> None:
    """Writes a part of a file where it belongs.

    Raises:
        MachineError: it can't be written, or belongs nowhere in a run directory.
    """
    name = PurePosixPath(chunk.path)
    if name.is_absolute() or ".." in name.parts or name.parts[:1] not in [(folder,) for folder in RESULTS]:
        raise MachineError(f"node {chunk.node} sent a file that belongs to no run: {chunk.path!r}")
    path = root / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(chunk.offset)
            file.write(chunk.content)
    except OSError as error:
        raise unwritable(path, error) from error
