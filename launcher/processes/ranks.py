"""What a session needs of whoever starts its ranks: one machine, or several nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.processes.protocol import Exit, StartRequest


class Ranks(Protocol):
    """As `gpurun.launcher.processes.pool.WorkerPool` does it on one machine."""

    def start(self, processes: Sequence[StartRequest]) -> None:
        """Starts the ranks of one launch; returns at once."""

    def preload(self, modules: Sequence[str]) -> None:
        """Has modules imported for the ranks that are started after this; returns at once."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks that ended since the last call; waits for the first one, at most `timeout_s`."""

    def forward(self, number: int) -> None:
        """Sends a signal to this machine's ranks, soon: may be called by a signal handler."""

    def observe(self, folder: Path) -> tuple[RankSnapshot, ...]:
        """All running ranks, seen from outside; `folder` has the control blocks of this machine's."""

    def steps_elsewhere(self) -> tuple[int, ...]:
        """Steps so far of ranks that have their control blocks on other machines."""

    def stop(self, grace_s: float) -> None:
        """Ends all ranks; how they ended comes with the next `poll`."""


class Pools(Protocol):
    """As `gpurun.launcher.processes.pools.WorkerPools` does it."""

    def get(self, env: Mapping[str, str]) -> Ranks:
        """Who starts ranks whose server has this environment."""
