"""Messages between the command and the processes that serve it, and how they are sent; how ranks end."""

import os
import select
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from gpurun.launcher.errors import MachineError

if TYPE_CHECKING:
    from gpurun.launcher.processes.guard import Guard


SERVICE_RANK = -1
"""Not a rank, but a process that serves the ranks: it is ended with them, and its end is not reported."""

WORKER_ENTRY = "gpurun.launcher.worker.entry.workload_rank:main"
"""The entry point of a workload's rank."""
TRIAL_ENTRY = "gpurun.launcher.worker.entry.workload_rank:try_combinations"
"""The entry point of a rank that tries several combinations of a workload's settings."""
PROGRAM_ENTRY = "gpurun.launcher.worker.program.program_rank:main"
"""The entry point of a program's rank."""

TERMINATE: tuple[int, ...] = (signal.SIGTERM,)
"""The signals that end ranks; SIGKILL follows."""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    returncode: int
    """Exit code, or minus the signal's number."""
    time_ns: int
    """`time.time_ns()` when it was reaped; comparable on one host only."""
    signals_sent: tuple[int, ...] = ()
    """Signals that the command itself had sent it."""
    oom_killed: bool = False
    """Whether the kernel killed it because memory ran out."""
    hurried: bool = False
    """Whether it was killed before its time to end was over, as by a second Ctrl-C."""

    @property
    def stopped(self) -> bool:
        """Whether a signal from the command ended it."""
        return -self.returncode in self.signals_sent

    @property
    def was_killed(self) -> bool:
        """Whether it had not ended when its time for that was over, or was cut short."""
        return self.hurried or (self.stopped and self.returncode == -signal.SIGKILL)


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import these modules before the next rank is started."""

    modules: tuple[str, ...]
    if_harmless: bool = False
    """Whether only those that leave no trace in the process but modules."""
    instead: Mapping[str, str | None] = {}
    """Variables of the server that are for its imports alone, and what ranks have instead, if anything."""


class StartRequest(msgspec.Struct, frozen=True, tag=True):
    """Start one rank."""

    rank: int
    args: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the server's own environment."""
    log: str
    """Absolute path of the file that takes its stdout and stderr; appended to."""
    cwd: str
    entry: str = WORKER_ENTRY
    """`module:function`, called with `args`."""
    control: str = ""
    """Absolute path of the directory with the control blocks; empty: the rank has none."""
    cpus: tuple[int, ...] = ()
    """Hardware threads that it may run on; empty: all that the command may."""
    moved: tuple[str, str] | None = None
    """Two directories: what is imported from the first comes from the second, if it is there as well."""
    stdin: str = ""
    """Absolute path of its stdin; empty: it has none."""
    stdout: str = ""
    """Absolute path of what takes its stdout instead of the log; empty: the log."""
    stderr: str = ""
    """Absolute path of what takes its stderr instead of the log; empty: the log."""
    preset: Mapping[str, str] = {}
    """Variables that it gets where the server has none by these names."""

    def environ(self, server: Mapping[str, str]) -> dict[str, str]:
        """Its environment, which begins as the server's."""
        return {**self.preset, **server, **self.env}


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to every running rank, not to their store. The server knows which are not reaped yet."""

    number: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let a process go on when the server ends."""

    pid: int


Request = Preload | StartRequest | Signal | Release


class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank has been forked."""

    rank: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank has ended."""

    rank: int
    pid: int
    returncode: int
    """Exit code, or minus the signal's number."""
    time_ns: int
    """When the server noticed it, by `time.time_ns()`."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank can't be forked; the server continues."""

    rank: int
    errno: int


class ImportFailed(msgspec.Struct, frozen=True, tag=True):
    """A module of `Preload` can't be imported; the server ends."""

    module: str
    message: str


Report = Started | StartFailed | Exited | ImportFailed


Sent = TypeVar("Sent")
Received = TypeVar("Received")

STREAM_FD = 3
"""The descriptor at which a serving process finds its end of the socket."""
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


class ServingProcess:
    """The server that starts the ranks: its channel, and what it wrote to stderr."""

    def __init__(self, guard: "Guard", argv: Sequence[str], env: Mapping[str, str]) -> None:
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
        self.channel: Channel[Request, Report] = Channel(ours, Report)

    def last_words(self) -> list[str]:
        """The lines that it wrote to stderr."""
        os.lseek(self._stderr, 0, os.SEEK_SET)
        return os.read(self._stderr, _LAST_WORDS_BYTES).decode("utf-8", "replace").strip().splitlines()

    def close(self) -> None:
        """Closes the channel, which ends a process that still listens to it."""
        self.channel.stream.close()
        os.close(self._stderr)
