"""A server per environment and interpreter: variables that torch reads at import can't be set in a fork."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from gpurun.launcher.masking import Secrets
from gpurun.launcher.processes.guard import Guard
from gpurun.launcher.processes.incoming_signals import interruptible
from gpurun.launcher.processes.pool import TRAINING, WorkerPool, say_on_stderr
from gpurun.launcher.processes.protocol import Exit, StartRequest

if TYPE_CHECKING:
    from gpurun.launcher.inspect.snapshot import RankSnapshot  # slow to import

MOST_SERVERS = 4
"""Each holds an imported torch (about 300 MB). The least recently used one is ended first."""
STORE = "gpurun.launcher.worker.base.process_group"
"""All ranks need it. A server imports the rest of what its ranks begin with when it starts the first one."""


Environment = tuple[Mapping[str, str], str]
"""Variables that are added to the command's own, and the interpreter; empty: the command's."""


def key_of(environment: Environment) -> tuple[tuple[tuple[str, str], ...], str]:
    """A hashable key, which is equal for equal environments."""
    env, python = environment
    return tuple(sorted(env.items())), python


class RankPool(Protocol):
    """Starts the ranks of a session: `WorkerPool` on one machine, `nodes.cluster_pool` on several."""

    def start(self, processes: Sequence[StartRequest]) -> None:
        """Starts the ranks of one launch; returns at once."""

    def preload(self, modules: Sequence[str]) -> None:
        """Imports modules for ranks that are started later; returns at once."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks that ended since the last call; waits for the first one, at most `timeout_s`."""

    def forward(self, number: int) -> None:
        """Sends a signal to this machine's ranks, with the next `poll`; may be called by a signal handler."""

    def observe(self, directory: Path) -> "tuple[RankSnapshot, ...]":
        """Snapshots of all running ranks; `directory` has the control blocks of this machine's ranks."""

    def steps_elsewhere(self) -> tuple[int, ...]:
        """Steps so far of the ranks on other machines."""

    def stop(self, grace_s: float) -> None:
        """Ends all ranks; the next `poll` returns how they ended."""


class Pools(Protocol):
    """`WorkerPools` on one machine."""

    def get(self, env: Mapping[str, str], python: str = "") -> RankPool:
        """The pool that starts ranks in this environment; `python`: an interpreter other than this one's."""


class WorkerPools:
    """A `WorkerPool` per distinct environment. A context manager.

    The first one, which adds nothing to the environment, begins to import at once.
    """

    def __init__(self, guard: Guard, preload: Sequence[str]) -> None:
        self._guard = guard
        self._preload = tuple(preload)
        self._pools: dict[tuple[tuple[tuple[str, str], ...], str], WorkerPool] = {}
        self.secrets: Secrets = {}
        """The secrets behind the masks in environments."""
        self.say: Callable[[str], None] = say_on_stderr
        """Shows which of the processes is stopped."""
        self.get({})

    def get(self, env: Mapping[str, str], python: str = "") -> WorkerPool:
        """The pool whose server has `env`; the ranks of other pools should have ended."""
        key = key_of((env, python))
        pool = self._pools.pop(key, None)
        if pool is None:
            while len(self._pools) >= MOST_SERVERS:
                self._pools.pop(next(iter(self._pools))).close()
            pool = WorkerPool(
                self._guard, self._preload, env, self.secrets, python, lambda text: self.say(text)
            )
        self._pools[key] = pool  # the last one used comes last
        return pool

    def keep_only(self, environments: Sequence[Environment]) -> None:
        """Ends the servers of all other environments, such as the first one."""
        wanted = set(map(key_of, environments))
        for key in [key for key in self._pools if key not in wanted]:
            self._pools.pop(key).close()

    def close(self) -> None:
        """Ends all ranks and servers."""
        while self._pools:
            self._pools.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def early_servers(guard: Guard) -> Iterator[WorkerPools]:
    """Servers that import torch while the command still imports its own part and reads the job.

    This module's own imports delay that, so there are few. From here on a signal raises `Interrupted`.
    """
    with interruptible(guard.kill_workers), WorkerPools(guard, (*TRAINING, STORE)) as pools:
        yield pools
