"""What a session needs of whoever starts its ranks: one machine, or several nodes."""

from collections.abc import Sequence
from typing import Protocol

from launcher.run.blame import Exit
from launcher.run.wire import StartRequest


class Ranks(Protocol):
    """As `launcher.run.pool.WorkerPool` does it on one machine."""

    def start(self, processes: Sequence[StartRequest]) -> None:
        """Starts the ranks of one launch; returns at once."""

    def preload(self, modules: Sequence[str]) -> None:
        """Has modules imported for the ranks that are started after this; returns at once."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks that ended since the last call; waits for the first one, at most `timeout_s`."""

    def dump_stacks(self) -> None:
        """Every running rank writes the stacks of its threads to its log."""

    def stop(self, grace_s: float) -> None:
        """Ends all ranks; how they ended comes with the next `poll`."""
