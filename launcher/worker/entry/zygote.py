"""The server that forks the ranks: it has imported torch once, so that a rank is ready in milliseconds.

Started as `python -P -m gpurun.launcher.worker.entry.zygote SUPERVISOR_PID` with a socket as file
descriptor 3. It only imports: a tensor operation would start OpenMP's threads, whose forks hang; CUDA can't
be forked.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn

from gpurun.launcher.machine.gpus.nvml import MIG_PREFIX, VISIBLE
from gpurun.launcher.machine.process_tree import (
    SHIELDED,
    become_subreaper,
    die_with,
    kill_descendants,
    send_signal,
)
from gpurun.launcher.processes.channel import STREAM_FD, Channel
from gpurun.launcher.processes.protocol import (
    Exited,
    ImportFailed,
    Preload,
    Report,
    Request,
    Signal,
    Started,
    StartFailed,
    StartRequest,
)
from gpurun.launcher.worker.entry.forked_rank import run_rank

ASK_THE_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextlib.contextmanager
def asking_the_driver() -> Iterator[None]:
    """Within it, what an extension asks torch at its import does not begin to use CUDA: no fork could then.

    About parts of GPUs torch would ask CUDA all the same: it sees the whole ones instead.
    Source: torch/cuda/__init__.py, `_nvml_based_avail` and `_device_count_nvml`.
    """
    changed = {ASK_THE_DRIVER: os.environ.get(ASK_THE_DRIVER)}
    os.environ.setdefault(ASK_THE_DRIVER, "1")
    if os.environ.get(VISIBLE, "").startswith(MIG_PREFIX):
        changed[VISIBLE] = os.environ.pop(VISIBLE)
    yield
    for name, before in changed.items():
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


class ForkServer:
    """Serves requests until the command closes its end."""

    def __init__(self, channel: Channel[Report, Request]) -> None:
        self._channel = channel
        self._ranks: dict[int, int] = {}
        """Process id to rank, of those that are not reaped yet."""
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)

    def serve(self) -> None:
        stream = self._channel.stream.fileno()
        while True:
            ready, _, _ = select.select([stream, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if stream in ready:
                requests = self._channel.receive()
                if requests is None:
                    return
                for request in requests:
                    self._handle(request)

    def _handle(self, request: Request) -> None:
        if isinstance(request, Preload):
            self._preload(request.modules)
        elif isinstance(request, StartRequest):
            self._fork(request)
        elif isinstance(request, Signal):
            for pid in self._ranks:
                send_signal(pid, request.number)

    def _preload(self, modules: Iterable[str]) -> None:
        with asking_the_driver():
            for module in modules:
                try:
                    importlib.import_module(module)
                except BaseException as error:
                    self._channel.send(ImportFailed(module, f"{type(error).__name__}: {error}"))
                    raise

    def _fork(self, request: StartRequest) -> None:
        # What exists now is shared by all ranks and stays: the garbage collector needn't visit it, and so
        # write to its pages, which would copy them.
        gc.freeze()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.send(StartFailed(request.rank, error.errno or 0))
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._channel.stream.close()
            os.close(self._wake)
            os.close(self._wake_write)
            run_rank(request, server)
        self._ranks[pid] = request.rank
        self._channel.send(Started(request.rank, pid))

    def _reap(self) -> None:
        """Reports dead ranks; orphans of ranks are reaped here too, without a report."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                time_ns = time.time_ns()
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    self._channel.send(Exited(rank, pid, os.waitstatus_to_exitcode(status), time_ns))


def main() -> NoReturn:
    """Serves until the end with the supervisor, with the command, or when torch can't be imported."""
    die_with(int(sys.argv[1]))
    become_subreaper()
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)  # a batch system signals all processes; the command answers
    # The import makes millions of objects and no garbage: a fifth of its time would go into looking for some.
    gc.disable()
    code = 1
    try:
        ForkServer(Channel(socket.socket(fileno=STREAM_FD), Request)).serve()
        code = 0
    except ConnectionError:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        kill_descendants(os.getpid())
        os._exit(code)


if __name__ == "__main__":
    main()
