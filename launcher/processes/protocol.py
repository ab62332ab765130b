"""What the command and the server that forks the ranks send each other, and how ranks end."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

SERVICE_RANK = -1
"""Not a rank, but a process that serves the ranks: it is ended with them, and its end is not reported."""

WORKER_ENTRY = "gpurun.launcher.worker.entry.workload_rank:main"
"""What a workload's rank runs."""
TRIAL_ENTRY = "gpurun.launcher.worker.entry.trial_rank:main"
"""What a rank runs that tries several combinations of a workload's settings."""
PROGRAM_ENTRY = "gpurun.launcher.worker.program.program_rank:main"
"""What a program's rank runs."""


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
    """Whether the kernel killed it because memory ran out."""

    @property
    def stopped(self) -> bool:
        """Whether a signal from the command ended it."""
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
    """Absolute path of the directory with the control blocks; empty: the rank has none."""
    cpus: tuple[int, ...] = ()
    """Hardware threads that it may run on; empty: all that the command may."""
    moved: tuple[str, str] | None = None
    """Two directories: what is imported from the first comes from the second, if it is there as well."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to every running rank. The server does it: it knows which are not reaped yet."""

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
