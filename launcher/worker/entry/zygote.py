"""The server that forks the ranks: it has imported torch once, so that a rank is ready in milliseconds.

Started as `python -P -m gpurun.launcher.worker.entry.zygote SUPERVISOR_PID` with a socket as file
descriptor 3. It only imports: a tensor operation would start OpenMP's threads, whose forks hang; CUDA can't
be forked.
"""

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import io
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpurun.launcher.machine.gpus.nvml import MIG_PREFIX, VISIBLE
from gpurun.launcher.machine.process_tree import (
    SHIELDED,
    become_subreaper,
    die_with,
    kill_descendants,
    send_signal,
)
from gpurun.launcher.processes.protocol import (
    PROGRAM_ENTRY,
    SERVICE_RANK,
    STREAM_FD,
    Channel,
    Exited,
    ImportFailed,
    Preload,
    Release,
    Report,
    Request,
    Signal,
    Started,
    StartFailed,
    StartRequest,
)
from gpurun.launcher.rundir.control import STACKS_SIGNAL, ControlDir, make_directory, socket_name, stacks_name
from gpurun.launcher.worker.base.blas import BLAS_THREADS
from gpurun.launcher.worker.base.exit import exit_code, finish, print_to_log
from gpurun.launcher.worker.base.preload import IMPORTED_WITH, note_what_torch_imports, preload_packages

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
    set_or_remove(changed)


def set_or_remove(variables: Mapping[str, str | None]) -> None:
    """Gives variables their values, where they have some."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class ForkServer:
    """Serves requests until the command closes its end."""

    def __init__(self, channel: Channel[Report, Request]) -> None:
        self._channel = channel
        self._ranks: dict[int, int] = {}
        """Process id to rank, of those that are not reaped yet."""
        self._leaders: set[int] = set()
        """Process ids of ranks that run a program."""
        self._ended_ns: dict[int, int] = {}
        """When those of them ended that are known to have, by process id."""
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: self._note_ends())
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
            IMPORTED_WITH.update({name: os.environ[name] for name in request.instead})
            _instead.update(request.instead)
            self._preload(request.modules, request.if_harmless)
        elif isinstance(request, StartRequest):
            self._import_entry(request.entry)
            self._fork(request)
        elif isinstance(request, Signal):
            for pid in [pid for pid, rank in self._ranks.items() if rank != SERVICE_RANK]:
                to_all = pid in self._leaders and request.number in ENDING
                if not (to_all and send_signal(-pid, request.number)):
                    send_signal(pid, request.number)
        elif isinstance(request, Release):
            _released.add(request.pid)

    def _preload(self, modules: Sequence[str], if_harmless: bool = False) -> None:
        with asking_the_driver():
            if if_harmless:
                preload_packages(modules)
                return
            for module in modules:
                is_torch = module == "torch" and module not in sys.modules
                try:
                    importlib.import_module(module)
                    if is_torch:
                        note_what_torch_imports()
                except BaseException as error:
                    self._channel.send(ImportFailed(module, f"{type(error).__name__}: {error}"))
                    raise

    def _import_entry(self, entry: str) -> None:
        """Imports, for all ranks at once, what they begin with; if that fails, the rank says why."""
        with asking_the_driver(), contextlib.suppress(Exception):
            importlib.import_module(entry.partition(":")[0])

    def _fork(self, request: StartRequest) -> None:
        # What exists now is shared by all ranks and stays: the garbage collector needn't visit it, and so
        # write to its pages, which would copy them.
        gc.freeze()
        server = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)  # until the rank handles them: one would be lost
        try:
            pid = os.fork()
        except OSError as error:
            self._channel.send(StartFailed(request.rank, error.errno or 0))
            return
        finally:
            if os.getpid() == server:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._channel.stream.close()
            os.close(self._wake)
            os.close(self._wake_write)
            run_rank(request, server)
        self._ranks[pid] = request.rank
        if request.entry == PROGRAM_ENTRY:
            self._leaders.add(pid)
        self._channel.send(Started(request.rank, pid))

    def _note_ends(self) -> None:
        """Notes when ranks have ended, also in the middle of an import, which may take seconds.

        Children of a module that is being imported are none of the ranks, and it waits for them itself.
        """
        for pid in [pid for pid in self._ranks if pid not in self._ended_ns]:
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._ended_ns[pid] = time.time_ns()

    def _reap(self) -> None:
        """Reports dead ranks; orphans of ranks are reaped here too, without a report."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                time_ns = self._ended_ns.pop(pid, None) or time.time_ns()
                rank = self._ranks.pop(pid, None)
                self._leaders.discard(pid)
                if rank is not None:
                    self._channel.send(Exited(rank, pid, os.waitstatus_to_exitcode(status), time_ns))


SUPERVISOR_ENDED: int = signal.SIGRTMAX
"""The kernel's word to the server that the supervisor has died; nothing else sends it."""


def sweep(*_: object) -> NoReturn:
    """Ends the server and all below it; if it ended alone, the programs that ranks have started would stay.

    It ends as soon as Python can handle the signal, which in the middle of an import takes moments.
    """
    while kill_descendants(os.getpid(), _released, timeout_s=60.0):
        pass  # as the supervisor does
    os._exit(0)


def main() -> NoReturn:
    """Serves until the end with the supervisor, with the command, or when torch can't be imported."""
    become_subreaper()
    signal.signal(SUPERVISOR_ENDED, sweep)
    die_with(int(sys.argv[1]), SUPERVISOR_ENDED)
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)  # a batch system signals all processes; the command answers
    # The import makes millions of objects and no garbage: a fifth of its time would go into looking for some.
    gc.disable()
    # numpy's BLAS starts a thread per core when it is imported; a process that forks must have none.
    _instead[BLAS_THREADS] = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    code = 1
    try:
        ForkServer(Channel(socket.socket(fileno=STREAM_FD), Request)).serve()
        code = 0
    except ConnectionError:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        kill_descendants(os.getpid(), _released)
        os._exit(code)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals for a program's process group, as torchrun sends them: a rank leads one, once it has begun."""
FLIGHT_RECORDER_ENTRIES = "2000"
"""Collectives that torch remembers per rank, as torch 2.13 does by default; 1 MB as JSON."""

_kept: list[object] = []
"""Servers that live as long as the process."""
_instead: dict[str, str | None] = {}
"""Variables of the server alone, and what ranks have instead."""
_released: set[int] = set()
"""Processes that go on when the server ends."""


def run_rank(request: StartRequest, server: int) -> NoReturn:
    """Becomes the rank, calls its entry, and ends the process; never returns to the server's code."""
    code = os.EX_IOERR  # no log can be opened: the disk is full, and no message would be kept
    try:
        die_with(server)
        os.setsid()  # no terminal and no `kill 0` in user code connects it to anything else
        redirect(request.log, request.stdin, request.stdout, request.stderr)
        code = 1
        become_rank(request)
        module, _, function = request.entry.partition(":")
        getattr(importlib.import_module(module), function)(request.args)
        code = 0
    except SystemExit as end:
        code = exit_code(end)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()  # to the log, once there is one; else the server's last words
    finally:
        finish(code)


def become_rank(request: StartRequest) -> None:
    """A process of its own: signals, environment, random numbers."""
    answer_signals()
    set_or_remove(_instead)
    os.environ.update(request.environ(os.environ))
    os.chdir(request.cwd)
    if request.moved is not None:
        move_imports(*request.moved)
    reseed()
    if request.cpus:
        os.sched_setaffinity(0, request.cpus)  # before there are threads, which keep their own affinity
    if request.control:
        try:
            make_observable(Path(request.control), request.rank)
        except OSError as error:
            print_to_log(f"can't write {request.control}: {error.strerror}")
            finish(
                os.EX_IOERR
            )  # as `gpurun.launcher.worker.entry.workload_rank` does where the run directory can't be written
    gc.enable()


def answer_signals() -> None:
    """Signals do to the process what they do to any other; a crash shows its stack."""
    faulthandler.enable(file=2)
    for number in (signal.SIGCHLD, SUPERVISOR_ENDED, *SHIELDED):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Notice of a preemption: no program ends by it, unless it wants to. A handler, since programs that it
    # executes should not inherit SIG_IGN; in C, since Lightning adds its own only where Python knows none.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.signal(int(signal.SIGUSR1), ctypes.cast(libc.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SHIELDED, STACKS_SIGNAL})


def move_imports(old: str, new: str) -> None:
    """Replaces directories below `old` from which modules come, here and in programs that the rank starts.

    A package that is installed in editable mode, and PYTHONPATH, name directories of the working copy. What
    `new` doesn't have, such as a virtual environment, stays.
    """

    def moved(entry: str) -> str:
        inner = os.path.relpath(os.path.realpath(entry), old) if entry else ".."
        is_below = inner != ".." and not inner.startswith("../")
        return os.path.join(new, inner) if is_below and os.path.isdir(os.path.join(new, inner)) else entry

    sys.path[:] = [os.path.normpath(moved(entry)) if entry else entry for entry in sys.path]
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(map(moved, entries))


def redirect(log: str, stdin: str = "", stdout: str = "", stderr: str = "") -> None:
    """Sends stdout and stderr to the log by line, so that it is complete however the rank dies.

    Args:
        log: appended to.
        stdin: a file, pipe or terminal to read; empty: none.
        stdout: a file or pipe that takes stdout instead.
        stderr: and stderr.
    """
    os.makedirs(os.path.dirname(log), exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, place in ((_source(stdin), 0), (_opened(stdout, target), 1), (_opened(stderr, target), 2)):
        os.dup2(fd, place)
        os.close(fd)
    os.close(target)
    set_streams()


def _source(path: str) -> int:
    """What is read; a file from where the command's own descriptor is.  Source: proc(5), /proc/PID/fdinfo."""
    # A FIFO whose writer has ended would be waited for.
    fd = os.open(path or os.devnull, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    with contextlib.suppress(OSError, ValueError):  # a pipe has none
        _, position, *_ = Path(path.replace("/fd/", "/fdinfo/")).read_text().split()
        os.lseek(fd, int(position), os.SEEK_SET)
    return fd


def _opened(path: str, log: int) -> int:
    """A descriptor of the file; of the log where there is none, or it is a FIFO whose reader has ended."""
    if not path:
        return os.dup(log)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.dup(log)
    os.set_blocking(fd, True)
    return fd


def set_streams() -> None:
    """New standard streams, as `python -u` makes them: everything is written at once.

    Those of the server may hold a lock or a buffer from the moment of the fork. Its encodings are what the
    interpreter has found in PYTHONIOENCODING, PYTHONUTF8 and the locale. Source: Python/pylifecycle.c,
    `create_stdio`
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        before = getattr(sys, f"__{name}__")
        _kept.append(before)
        buffer: Any = os.fdopen(fd, f"{mode}b", buffering=-1 if mode == "r" else 0, closefd=False)
        raw = buffer.raw if mode == "r" else buffer
        raw.name = f"<{name}>"
        stream: Any = io.TextIOWrapper(
            buffer, before.encoding, before.errors, newline="\n", write_through=True
        )
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def reseed() -> None:
    """Every fork begins with the server's random state; no rank should continue with it.

    What the server has not made is seeded in the rank that makes it: numpy's generator when it is imported, a
    GPU's at its first use. Source: ATen/cuda/CUDAGeneratorImpl.cpp, `getDefaultCUDAGenerator`
    """
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def make_observable(directory: Path, rank: int) -> None:
    """Makes stacks, collectives and progress readable from outside: a signal, a socket and a control block.

    Raises:
        OSError: the directory can't be written.
    """
    make_directory(directory)
    with ControlDir(directory) as control:
        # A file of its own: a program may close its stderr, or send it elsewhere.
        stacks = control.open(stacks_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(STACKS_SIGNAL, file=stacks)
        if "torch" in sys.modules:
            make_collectives_observable(control, rank)
        # Last: a process that sees the block may send the signal, which would kill a rank without a handler.
        try:
            _kept.append(control.block(rank, create=True))
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.EINVAL):
                raise
            print_to_log(f"{directory}: files can't be shared in memory there, so that stacks can't be shown")


def make_collectives_observable(control: ControlDir, rank: int) -> None:
    """Makes torch, once it has been imported, remember collectives and answer about them on a socket.

    A thread in C++ answers, which needs no GIL. Without it, only stacks can be shown: an older torch has no
    such server, some file systems no sockets.
    """
    remember_collectives()
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:
        return
    control.remove(socket_name(rank))
    # By way of /proc, since the path of a socket may have 107 bytes only.
    with contextlib.suppress(RuntimeError), quiet_stderr():
        _kept.append(_WorkerServer(f"/proc/self/fd/{control.fd}/{socket_name(rank)}"))


def remember_collectives() -> None:
    """Has torch's flight recorder remember collectives, unless the job says how many.

    Before torch 2.9 the variable had another name, which newer ones warn of, and the default was none.
    Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, and PyTorch's pull request 152563
    """
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    if not any(name in os.environ for name in names):
        os.environ[names[sys.modules["torch"].__version__ < "2.9"]] = FLIGHT_RECORDER_ENTRIES


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keeps a line that torch logs at the start of its server out of the rank's log."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


if __name__ == "__main__":
    main()
