"""Processes that serve the command, and the messages between them and the command."""

import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from gpurun.launcher.errors import MachineError

if TYPE_CHECKING:
    from gpurun.launcher.processes.guard import Guard

Sent = TypeVar("Sent")
Received = TypeVar("Received")

STREAM_FD = 3
"""Where a serving process finds its end of the socket."""
_LENGTH = struct.Struct(">I")
_MAX_READ_BYTES = 1 << 20
_LAST_WORDS_BYTES = 1 << 16


class Channel(Generic[Sent, Received]):
    """A stream socket as a sequence of messages: msgpack, each with its length in front."""

    def __init__(self, stream: socket.socket, received: Any) -> None:
        """Args:
        received: the type of what comes, a union of tagged structs.
        """
        self.stream = stream
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._rest = bytearray()

    def send(self, message: Sent) -> None:
        """Sends one message.

        Raises:
            OSError: the other end is closed.
        """
        content = self._encoder.encode(message)
        self.stream.sendall(_LENGTH.pack(len(content)) + content)

    def has_news(self, timeout_s: float) -> bool:
        """Whether `receive` would return at once; waits for that, at most `timeout_s`."""
        return bool(select.select([self.stream], [], [], timeout_s)[0])

    def receive(self) -> list[Received] | None:
        """The next messages; blocks until something is there. `None` at the end of the stream."""
        try:
            part = self.stream.recv(_MAX_READ_BYTES)
        except ConnectionError:
            return None
        if not part:
            return None
        self._rest += part
        return [self._decoder.decode(frame) for frame in self._whole_frames()]

    def _whole_frames(self) -> list[bytes]:
        frames = []
        while len(self._rest) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._rest)[0]
            if len(self._rest) < end:
                break
            frames.append(bytes(self._rest[_LENGTH.size : end]))
            del self._rest[:end]
        return frames


class ServingProcess(Generic[Sent, Received]):
    """A process that serves the command: its channel, and what it wrote to stderr."""

    def __init__(self, guard: "Guard", argv: Sequence[str], env: Mapping[str, str], received: Any) -> None:
        """Starts it.

        Raises:
            MachineError: it can't be started.
        """
        self._stderr = os.memfd_create("gpurun-stderr")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.pid = guard.spawn(argv, env, theirs, self._stderr)
            except MachineError:
                ours.close()
                os.close(self._stderr)
                raise
        self.channel: Channel[Sent, Received] = Channel(ours, received)

    def last_words(self) -> list[str]:
        """The lines that it wrote to stderr."""
        os.lseek(self._stderr, 0, os.SEEK_SET)
        return os.read(self._stderr, _LAST_WORDS_BYTES).decode("utf-8", "replace").strip().splitlines()

    def close(self) -> None:
        """Closes the channel, which ends a process that still listens to it."""
        self.channel.stream.close()
        os.close(self._stderr)
