"""How the processes of ranks end."""

from dataclasses import dataclass


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
