"""The interface through which a session starts its ranks, on one machine or on several nodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.processes.protocol import Exit, StartRequest


class Ranks(Protocol):
    """Implemented by `processes.pool.WorkerPool` for one machine, by `nodes.cluster_pool` for several."""

    def start(self, processes: Sequence[StartRequest]) -> None:
        """Starts the ranks of one launch; returns at once."""

    def preload(self, modules: Sequence[str]) -> None:
        """Imports modules for ranks that are started later; returns at once."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks that ended since the last call; waits for the first one, at most `timeout_s`."""

    def forward(self, number: int) -> None:
        """Sends a signal to this machine's ranks, with the next `poll`; may be called by a signal handler."""

    def observe(self, folder: Path) -> tuple[RankSnapshot, ...]:
        """Snapshots of all running ranks; `folder` has the control blocks of this machine's ranks."""

    def steps_elsewhere(self) -> tuple[int, ...]:
        """Steps so far of the ranks on other machines."""

    def stop(self, grace_s: float) -> None:
        """Ends all ranks; the next `poll` returns how they ended."""


class Pools(Protocol):
    """Implemented by `processes.pool_per_env.WorkerPools`."""

    def get(self, env: Mapping[str, str], python: str = "") -> Ranks:
        """What starts ranks in this environment; `python` is an interpreter other than this command's."""
