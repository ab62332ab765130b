"""What the command and the server that forks the ranks say to each other: lines of JSON on a socket."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

SERVICE_RANK = -1
"""A process that serves the ranks and is none: it is ended with them, and its own end is no news."""

WORKER_ENTRY = "gpurun.launcher.worker.entry.main:main"
"""What a workload's rank runs."""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    pid: int
    returncode: int
    """Exit code, or minus the signal's number."""
    time_ns: int
    """`time.time_ns()` when it was reaped; comparable on one host only."""
    signals_sent: tuple[int, ...] = ()
    """Signals that the command itself had sent it."""
    oom_killed: bool = False
    """The kernel ended it because memory ran out."""

    @property
    def stopped(self) -> bool:
        """It ended by a signal of ours."""
        return -self.returncode in self.signals_sent


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import these modules before the next rank is started."""

    modules: tuple[str, ...]


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
    """Absolute path of the folder with the control blocks; empty: the rank has none."""
    cpus: tuple[int, ...] = ()
    """Hardware threads that it may run on; empty: all that the command may."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to every rank that still runs. The server does it, who knows which are not yet reaped."""

    number: int


Request = Preload | StartRequest | Signal


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
    """When the server took notice, by `time.time_ns()`."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank can't be forked; the server goes on."""

    rank: int
    errno: int


class ImportFailed(msgspec.Struct, frozen=True, tag=True):
    """A module of `Preload` can't be imported; the server ends."""

    module: str
    message: str


Report = Started | StartFailed | Exited | ImportFailed

_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(Request)
_reports = msgspec.json.Decoder(Report)


class Lines:
    """A stream socket as a sequence of lines."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._rest = b""

    def send(self, message: Request | Report) -> None:
        self.stream.sendall(_encoder.encode(message) + b"\n")

    def requests(self) -> list[Request] | None:
        """The next requests; blocks until something is there. `None` at the end of the stream."""
        lines = self._read()
        return None if lines is None else [_requests.decode(line) for line in lines]

    def reports(self) -> list[Report] | None:
        """The next reports, likewise."""
        lines = self._read()
        return None if lines is None else [_reports.decode(line) for line in lines]

    def _read(self) -> list[bytes] | None:
        try:
            chunk = self.stream.recv(1 << 16)
        except ConnectionError:
            return None
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines
