"""The command's handle on the servers that fork the ranks (`gpurun.launcher.worker.entry.zygote`).

There is one per environment and interpreter: variables that torch reads at import can't be set in a fork.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from gpurun.launcher.errors import TRACEBACK, MachineError
from gpurun.launcher.machine.process_tree import (
    Leftover,
    command_of,
    descendants,
    is_stopped,
    kill_descendants,
    leftovers,
    send_signal,
)
from gpurun.launcher.machine.resource_limits import (
    in_kernel_log,
    oom_killed,
    oom_kills,
    remedy,
    start_problem,
)
from gpurun.launcher.masking import Secrets, revealed
from gpurun.launcher.processes.guard import SUPERVISOR_KILLED, Guard, python_argv
from gpurun.launcher.processes.import_variables import shared_by_ranks
from gpurun.launcher.processes.incoming_signals import interruptible
from gpurun.launcher.processes.protocol import (
    SERVICE_RANK,
    TERMINATE,
    Exit,
    Exited,
    ImportFailed,
    Preload,
    Release,
    Report,
    Request,
    ServingProcess,
    Signal,
    Started,
    StartFailed,
    StartRequest,
)
from gpurun.launcher.rundir.paths import main_file

if TYPE_CHECKING:
    from gpurun.launcher.inspect.snapshot import RankSnapshot
    from gpurun.launcher.jobfile.model import JobSpec


TORCH = ("torch", "torch.distributed")
TRAINING = (*TORCH, "torch.nn.parallel", "torch.profiler", "torch.optim")
OPTIMIZING = ("torch._dynamo",)
"""The modules that a process's first optimizer imports: 820, which take half as long as torch itself.

The first ranks import them in parallel, rather than wait for the server to import them first. The server
follows while the ranks build their models, so that later ranks start with these modules.
"""

_REPORT_TIMEOUT_S = 5.0
"""How long it may take until a killed rank is reported: the kernel has to free its memory."""
_SERVER = "the server that starts the ranks"
_SUPERVISOR = "the supervising process"
_WAITS = {_SERVER: "no end of a rank is noticed", _SUPERVISOR: "no further server is started"}
"""The consequence where a stopped process is not a rank."""
_LOOK_EVERY_S = 1.0
"""How often to look for processes that a signal has stopped."""
_MOMENT_S = 1.0
"""How long a process that a program has left may take to end by itself, until that is reported."""
_ENTRY = "gpurun.launcher.worker.entry"
"""A part of the command line of ranks, and of what they fork."""
_MOST_COMMAND = 100
"""Characters of a command line that are shown."""


def say_on_stderr(text: str) -> None:
    """Reports what happens while there is no progress line."""
    sys.stderr.write(text + "\n")


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Starts ranks, reports when they end, and stops them. A context manager.

    The server begins to import as soon as the pool exists; nothing here waits for it. A pool has one
    environment: variables that torch reads at import (`OMP_NUM_THREADS`) must be in `env`.
    """

    def __init__(
        self,
        guard: Guard,
        preload: Sequence[str] = TRAINING,
        env: Mapping[str, str] | None = None,
        secrets: Secrets | None = None,
        python: str = "",
        say: Callable[[str], None] = say_on_stderr,
        imported_with: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        say: shows which of the processes is stopped.
        imported_with: variables with which torch is imported, and that ranks don't begin with.
        """
        self._guard, self._say = guard, say
        self._python = python
        self._secrets = secrets or {}
        self._env = revealed(env or {}, self._secrets)
        instead = {name: self._env.get(name, os.environ.get(name)) for name in imported_with or {}}
        self._preload = Preload(tuple(preload), instead=instead)
        self._env = {**self._env, **(imported_with or {})}
        self._requested: set[int] = set()
        self._running: dict[int, int] = {}
        self._sessions: set[int] = set()
        """The sessions of the ranks of this launch: each has its own, named like its process."""
        self._settling_s: float | None = None
        """When it was first asked whether anything is left."""
        self._awaited: set[int] = set()
        """Processes that a program has left, of which it was said that they are waited for."""
        self._signals: tuple[int, ...] = ()
        self._forwarded: list[int] = []
        self._exits: list[Exit] = []
        self._looked_s = 0.0
        self._stopped: dict[int, bool] = {}
        """Processes that were stopped at the last look, and whether that has been reported."""
        self._oom_kills = oom_kills()
        self._server: ServingProcess | None = None
        self._start_server()

    def start(self, processes: Sequence[StartRequest]) -> None:
        """Starts the ranks of one launch; returns at once, they start when the server has imported torch.

        Raises:
            MachineError: the server or the supervisor has ended.
        """
        if self._server is None:
            self._start_server()
        self._signals = ()
        self._sessions.clear()
        self._settling_s = None
        for process in processes:
            self._requested.add(process.rank)
            self._send(structs.replace(process, env=revealed(process.env, self._secrets)))

    def preload(self, modules: Sequence[str], if_harmless: bool = False) -> None:
        """Makes the server import modules for ranks that are started later; returns at once.

        Args:
            if_harmless: only those packages whose import leaves nothing else behind.

        Raises:
            MachineError: the server or the supervisor has ended.
        """
        if self._server is None:
            self._start_server()
        self._send(Preload(tuple(modules), if_harmless))

    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that are known to be running."""
        return {rank: pid for rank, pid in self._running.items() if rank != SERVICE_RANK}

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks that ended since the last call; waits for the first one, at most `timeout_s`.

        Raises:
            MachineError: torch can't be imported, or the server has ended.
        """
        deadline = time.monotonic() + timeout_s
        self._report_stopped()
        while True:
            while self._forwarded:
                number = self._forwarded.pop(0)
                if self._server is not None:  # else no rank is left that could get it
                    self._send(Signal(number))
            remaining_s = 0.0 if self._exits else max(0.0, deadline - time.monotonic())
            if not self._receive(remaining_s) and (self._exits or time.monotonic() >= deadline):
                exits, self._exits = self._exits, []
                return exits

    def _report_stopped(self) -> None:
        """Reports each process that was stopped at two looks: it reports nothing, nor does who waits for it.

        A batch system that suspends a job stops this process too, and continues all of them at once.
        """
        if (now_s := time.monotonic()) - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s, before = now_s, self._stopped
        self._stopped = {pid: before.get(pid, False) for pid in self._processes() if is_stopped(pid)}
        for pid, was_reported in self._stopped.items():
            if pid in before and not was_reported:
                self._say(stopped_text(self._processes()[pid], pid))
                self._stopped[pid] = True

    def _processes(self) -> dict[int, str]:
        """The supervisor, the server and the ranks, by process id, and what a report calls them."""
        ranks = {pid: _rank_text(rank) for rank, pid in self._running.items()}
        server = {} if self._server is None else {self._server.pid: _SERVER}
        return {self._guard.supervisor: _SUPERVISOR, **server, **ranks}

    def _continue_stopped(self) -> None:
        """Lets stopped processes go on, or they couldn't end: only those that are surely this command's."""
        self._guard.continue_supervisor()
        for pid in self._processes().keys() & set(descendants(self._guard.supervisor)):
            if is_stopped(pid):
                send_signal(pid, signal.SIGCONT)

    def forward(self, number: int) -> None:
        """Sends a signal to all running ranks, with the next `poll`; may be called by a signal handler."""
        self._forwarded.append(number)

    def observe(self, directory: Path) -> "tuple[RankSnapshot, ...]":
        """All running ranks whose control blocks are in `directory`; takes some tens of milliseconds."""
        from gpurun.launcher.inspect.snapshot import (
            observe,  # an HTTP client and more, before torch begins to load
        )

        return observe(directory)

    def steps_elsewhere(self) -> tuple[int, ...]:
        """No steps: all ranks are on this machine."""
        return ()

    def has_settled(
        self, say: Callable[[str], None], waits: bool = True, keep: Callable[[str], None] = lambda _: None
    ) -> bool:
        """Whether no process is left of ranks that have ended well; those that are detached may go on.

        Args:
            say: shows once for which of them it is waited.
            waits: or whether `stop` is to end all of them.
            keep: is told which go on, or are ended; after `say`.
        """

        def tell(text: str) -> None:
            say(text)
            keep(text)

        now_s, server = time.monotonic(), self._server
        self._settling_s = self._settling_s or now_s
        without = {*self._guard.released, *self._running.values()}  # the ranks' store still runs
        left = leftovers(server.pid, self._sessions, without) if server else []
        own = command_of(server.pid) if server and left else ""
        if now_s - self._settling_s < _MOMENT_S:
            return not left
        if not waits:
            for each in left:
                tell(f"{_process_text(each, own)}, which the program has left, is ended (`leftover: stop`)")
            return True
        for each in left:
            if each.is_detached:
                tell(f"{_process_text(each, own)} goes on: it isn't a part of the rank that has started it")
                self._guard.release(each.pid)
                self._send(Release(each.pid))
            elif each.pid not in self._awaited:
                say(f"waiting for {_process_text(each, own)}, which the program has left; Ctrl-C ends it")
                self._awaited.add(each.pid)
        return all(each.is_detached for each in left)

    def stop(self, grace_s: float, signals: tuple[int, ...] = TERMINATE) -> None:
        """Ends all ranks and everything that they started, even in other sessions.

        The next `poll` returns how they ended. A dead server raises nothing: there is nothing left to stop.

        Args:
            grace_s: seconds until SIGKILL.
            signals: what ranks get before, one after the other, each for an equal part of that time.
        """
        self._continue_stopped()
        running = self._running.keys() - {SERVICE_RANK}
        with contextlib.suppress(MachineError):
            self._ask_to_end(grace_s, signals)
        if self._server is None:  # it was killed, and the ranks with it
            done = [
                each for each in self._exits if each.rank not in running or each.returncode != -signal.SIGKILL
            ]
            killed = sorted(running - {each.rank for each in done})
            sent, now_ns = self._signals, time.time_ns()
            self._exits = [*done, *(Exit(n, -signal.SIGKILL, now_ns, sent, hurried=True) for n in killed)]
            return
        if self._requested:
            self._drop_server()  # It is still importing, and would fork them afterwards.
            return
        self._signals += (signal.SIGKILL,)
        kill_descendants(self._server.pid, self._guard.released)
        with contextlib.suppress(MachineError):
            self._await_reports(_REPORT_TIMEOUT_S)

    def close(self) -> None:
        """Stops all ranks at once, and the server."""
        self.stop(0.0)
        self._drop_server()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_server(self) -> None:
        argv = python_argv(f"{_ENTRY}.zygote", str(self._guard.supervisor), python=self._python)
        self._server = ServingProcess(self._guard, argv, self._env)
        self._send(self._preload)

    def _drop_server(self) -> None:
        """Kills the server and the ranks; the next `start` starts a new server."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        if server.pid in descendants(
            self._guard.supervisor
        ):  # else its number may be another process's by now
            kill_descendants(server.pid, self._guard.released)
            send_signal(server.pid, signal.SIGKILL)
            kill_descendants(server.pid, self._guard.released)
        self._requested.clear()
        self._running.clear()

    def _ask_to_end(self, grace_s: float, signals: tuple[int, ...]) -> None:
        if grace_s <= 0 or self._server is None or not (self._running or descendants(self._server.pid)):
            return  # it may still import, and ranks that are not there can't end
        for number in signals:
            self._signals += (number,)
            self._send(Signal(number))
            if self._await_reports(grace_s / len(signals), {SERVICE_RANK}):
                return  # their store is left: ranks that save may use it until they have ended

    def _await_reports(self, timeout_s: float, without: Set[int] = frozenset()) -> bool:
        """Receives reports until every rank has ended, but for those in `without`; whether they have."""
        deadline = time.monotonic() + timeout_s
        while left := (self._running.keys() | self._requested) - without:
            if (remaining_s := deadline - time.monotonic()) <= 0:
                break
            self._receive(remaining_s)
        return not left

    def _send(self, request: Request) -> None:
        if self._server is None:
            raise MachineError(f"{_SERVER} is not running")
        try:
            self._server.channel.send(request)
        except OSError:
            while self._receive(0.0):  # it may have said why it ends
                pass
            self._server_ended()

    def _receive(self, timeout_s: float) -> bool:
        """Handles the reports that have come; whether there were any."""
        if self._server is None or not self._server.channel.has_news(timeout_s):
            return False
        reports = self._server.channel.receive()
        if reports is None:
            self._server_ended()
            return False
        for report in reports:
            self._take(report)
        return True

    def _take(self, report: Report) -> None:
        if isinstance(report, Started):
            self._requested.discard(report.rank)
            self._running[report.rank] = report.pid
            self._sessions.add(report.pid)
        elif isinstance(report, Exited):
            self._requested.discard(report.rank)  # an interrupt may have lost the report of its start
            self._running.pop(report.rank, None)
            if report.rank != SERVICE_RANK:
                self._exits.append(self._exit(report))
        elif isinstance(report, StartFailed):
            self._drop_server()
            raise MachineError(f"can't start {_rank_text(report.rank)}: {start_problem(report.errno)}")
        elif isinstance(report, ImportFailed):
            self._drop_server()
            python = python_argv("…", python=self._python)[0]
            what_to_do = remedy(report.message) or f"try: {python} -c 'import {report.module}'"
            raise MachineError(f"{report.module} can't be imported: {report.message}\n    {what_to_do}")

    def _exit(self, report: Exited) -> Exit:
        """The report, with what only the command knows: which signals it sent."""
        killed = report.returncode == -signal.SIGKILL and signal.SIGKILL not in self._signals
        return Exit(
            rank=report.rank,
            returncode=report.returncode,
            time_ns=report.time_ns,
            signals_sent=self._signals,
            oom_killed=killed and self._was_oom_killed(report.pid),
        )

    def _was_oom_killed(self, pid: int) -> bool:
        before, self._oom_kills = self._oom_kills, oom_kills()
        grown = before is not None and self._oom_kills is not None and self._oom_kills > before
        return grown or in_kernel_log(pid)

    def _server_ended(self) -> None:
        """Explains why the server has ended.

        Raises:
            MachineError: always.
        """
        last_words = self._server.last_words() if self._server else []
        is_oom = self._server is not None and self._was_oom_killed(self._server.pid)
        self._drop_server()
        if self._guard.supervisor_has_ended:
            raise MachineError(SUPERVISOR_KILLED)
        raise MachineError(why_server_ended(last_words, is_oom))


def _process_text(process: Leftover, server: str) -> str:
    command = process.command
    if command == server or _ENTRY in command:
        return f"process {process.pid} (a fork of the program)"
    shown = command if len(command) <= _MOST_COMMAND else command[: _MOST_COMMAND - 1] + "…"
    return f"process {process.pid} (`{shown}`)"


def _rank_text(rank: int) -> str:
    return "the ranks' store" if rank == SERVICE_RANK else f"rank {rank}"


def stopped_text(what: str, pid: int) -> str:
    """The text that a process is stopped, what waits for it, and how it goes on."""
    waits = _WAITS.get(what, "the ranks wait for it")
    return (
        f"{what} (process {pid}) was stopped by a signal, such as SIGSTOP: until it is continued, {waits}\n"
        f"    to continue it: kill -CONT {pid}"
    )


def why_server_ended(last_words: Sequence[str], was_oom_killed: bool = False) -> str:
    """A sentence, the traceback of its last exception or else its last lines, and what to do if known."""
    began = [at for at, line in enumerate(last_words) if line.startswith(TRACEBACK)]
    shown = last_words[began[-1] :] if began else last_words[-5:]
    if was_oom_killed:
        what = oom_killed("the server that starts the ranks, and the ranks with it")
    elif began:
        what = "the server that starts the ranks failed, and the ranks with it:"
    else:
        ended = "was killed or crashed, and the ranks with it (out of memory? see the kernel's log)"
        what = f"the server that starts the ranks {ended}" + ("; its last output:" if shown else "")
    hint = remedy("\n".join([what, *last_words]))
    return "\n    ".join([what, *shown, *([hint] if hint else [])])


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

    def preload(self, modules: Sequence[str], if_harmless: bool = False) -> None:
        """Imports modules for ranks that are started later; returns at once."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks that ended since the last call; waits for the first one, at most `timeout_s`."""

    def forward(self, number: int) -> None:
        """Sends a signal to this machine's ranks, with the next `poll`; may be called by a signal handler."""

    def observe(self, directory: Path) -> "tuple[RankSnapshot, ...]":
        """Snapshots of all running ranks; `directory` has the control blocks of this machine's ranks."""

    def steps_elsewhere(self) -> tuple[int, ...]:
        """Steps so far of the ranks on other machines."""

    def has_settled(
        self, say: Callable[[str], None], waits: bool = True, keep: Callable[[str], None] = lambda _: None
    ) -> bool:
        """Whether no process is left of ranks that have ended well, or it has been let go."""

    def stop(self, grace_s: float, signals: tuple[int, ...] = TERMINATE) -> None:
        """Ends all ranks; the next `poll` returns how they ended."""


class Pools(Protocol):
    """`WorkerPools` on one machine."""

    def get(self, env: Mapping[str, str], python: str = "") -> RankPool:
        """The pool that starts ranks in this environment; `python`: an interpreter other than this one's."""


class WorkerPools(AbstractContextManager["WorkerPools"]):
    """A `WorkerPool` per distinct environment. A context manager.

    The first one, which adds nothing to the environment, begins to import at once.
    """

    def __init__(self, guard: Guard, preload: Sequence[str], script: str = "") -> None:
        self._guard = guard
        self._script = script
        self._preload = tuple(preload)
        self._pools: dict[tuple[tuple[tuple[str, str], ...], str], WorkerPool] = {}
        self._secrets: Secrets = {}
        self.say: Callable[[str], None] = say_on_stderr
        """Shows which of the processes is stopped."""
        self.get({})

    def know(self, spec: "JobSpec") -> None:
        """Learns the secrets behind the masks in the job's environments.

        Raises:
            SpecError: the value of one isn't known.
        """
        self._secrets = spec.secrets
        for env in (spec.env, *spec.compare.env):
            revealed(env, self._secrets)  # now, not when the first rank starts

    def get(self, env: Mapping[str, str], python: str = "") -> WorkerPool:
        """The pool whose server has `env`; the ranks of other pools should have ended."""
        key = key_of((env, python))
        pool = self._pools.pop(key, None)
        if pool is None:
            while len(self._pools) >= MOST_SERVERS:
                self._pools.pop(next(iter(self._pools))).close()
            sets = shared_by_ranks(main_file(self._script), env)
            pool = WorkerPool(
                self._guard, self._preload, env, self._secrets, python, lambda text: self.say(text), sets
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

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def early_servers(guard: Guard, script: str = "") -> Iterator[WorkerPools]:
    """Servers that import torch while the command still imports its own part and reads the job.

    They import it with the variables that `script` sets before; its path, or empty if that isn't known yet.
    This module's own imports delay that, so there are few. From here on a signal raises `Interrupted`.
    """
    with interruptible(guard.kill_workers), WorkerPools(guard, (*TRAINING, STORE), script) as pools:
        yield pools
