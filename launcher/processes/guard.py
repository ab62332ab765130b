"""Two processes that watch each other, so that nothing outlives the command, however it dies.

The command forks once, before threads and heavy imports exist: the *front* continues as the command, the
*supervisor* starts the servers that the front requests and otherwise waits. Both are subreapers, connected by
a socket. When one dies, the other kills all of its descendants; when both die, each server does. The ranks
need no thread or handler for that: it works even for a rank that holds the GIL in C.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NoReturn

import gpurun
from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.process_tree import (
    SHIELDED,
    become_subreaper,
    check_proc,
    descendants,
    is_stopped,
    kill_descendants,
    send_signal,
)
from gpurun.launcher.machine.resource_limits import start_problem

SUPERVISOR_KILLED = "the supervising process was killed, and the ranks with it (see the kernel's log)"
SECRET_VARIABLE = "GPURUN_SECRET"
"""The variable by which the nodes of a job know each other; no server and no rank gets it."""
_CLOSE_TIMEOUT_S = 10.0
_SPAWN = b"?"
"""The request for a server; any other is the number of a process that goes on."""


def split_process() -> "Guard":
    """Forks the supervisor; returns only in the front.

    Call it before anything else: a fork copies locks that other threads hold.

    Raises:
        RuntimeError: this process has more than one Python thread already.
        MachineError: no process can be started, or /proc is not this process's.
    """
    if threading.active_count() != 1:
        raise RuntimeError("split_process() must come before any thread is started")
    check_proc()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    become_subreaper()
    try:
        pid = os.fork()
    except OSError as error:
        raise MachineError(f"can't start: {start_problem(error.errno or 0)}") from error
    if pid == 0:
        _supervise(theirs)
    theirs.close()
    # numpy's BLAS starts a thread per core at import, which the command does not need; at the limit of
    # processes, it raises SIGINT instead of an error. Ranks get the supervisor's variables, without this one.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return Guard(pid, ours)


class Guard(AbstractContextManager["Guard"]):
    """The front's handle of its supervisor. A context manager that leaves no process behind."""

    def __init__(self, supervisor: int, control: socket.socket) -> None:
        self.supervisor = supervisor
        self._control = control
        self._closed = False
        self._servers: set[int] = set()
        self.released: set[int] = set()
        """Processes that programs have left, and that go on after the command, with all below them."""
        self._previous = signal.signal(signal.SIGCHLD, self._on_child)

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], stream: socket.socket, stderr: int) -> int:
        """Starts a program as a child of the supervisor, and returns its process id.

        Args:
            argv: the program's absolute path and its arguments.
            env: added to the command's environment.
            stream: becomes its file descriptor 3; 0 and 1 are /dev/null.
            stderr: becomes its file descriptor 2.

        Raises:
            MachineError: the supervisor has ended, or the program can't be started.
        """
        with os.fdopen(os.memfd_create("gpurun-request"), "wb") as request:  # no message may be as large
            request.write(json.dumps({"argv": list(argv), "env": dict(env)}).encode())
            request.flush()
            try:
                socket.send_fds(self._control, [_SPAWN], [stream.fileno(), stderr, request.fileno()])
                answer = self._control.recv(4096)
            except ConnectionError:
                answer = b""
        if not answer:
            raise MachineError(SUPERVISOR_KILLED)
        reply = json.loads(answer)
        if "error" in reply:
            raise MachineError(f"can't start {argv[0]}: {reply['error']}")
        self._servers.add(int(reply["pid"]))
        return int(reply["pid"])

    def release(self, pid: int) -> None:
        """Lets a process go on after the command, however that ends."""
        self.released.add(pid)
        with contextlib.suppress(ConnectionError):
            self._control.send(str(pid).encode())

    @property
    def supervisor_has_ended(self) -> bool:
        """Whether the supervisor is dead, and its servers and ranks with it."""
        return _has_ended(self.supervisor)

    def kill_workers(self) -> None:
        """Kills all descendants of the command but the supervisor, at once."""
        kill_descendants(os.getpid(), without={self.supervisor, *self.released})
        kill_descendants(self.supervisor, self.released, last=self._servers)

    def continue_supervisor(self) -> None:
        """Lets it go on if a signal has stopped it: else it would neither start nor end anything."""
        if is_stopped(self.supervisor):
            send_signal(self.supervisor, signal.SIGCONT)

    def close(self) -> None:
        """Ends everything that was started, the supervisor included, and waits for that.

        Raises:
            MachineError: the kernel can't end some processes.
        """
        if self._closed:
            return
        self._closed = True
        signal.signal(signal.SIGCHLD, self._previous)
        self._control.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while (status := _reap(self.supervisor)) is None:
            self.continue_supervisor()
            if time.monotonic() > deadline:
                left = ", ".join(map(str, descendants(self.supervisor, self.released) or [self.supervisor]))
                raise MachineError(
                    f"can't end these processes, which a driver or a file system holds: {left}"
                )
            time.sleep(0.001)
        if status != 0:
            kill_descendants(os.getpid(), self.released)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """A dead supervisor's children become ours; they are killed at once."""
        if _has_ended(self.supervisor):
            kill_descendants(os.getpid(), self.released, last=self._servers)
        if callable(self._previous):
            self._previous(number, frame)


def _has_ended(pid: int) -> bool:
    """Whether a child is dead; it is not reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _reap(pid: int) -> int | None:
    """A child's exit status once it is dead; -1 if it was reaped elsewhere."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -1
    return status if reaped == pid else None


def _supervise(control: socket.socket) -> NoReturn:
    """The life of the supervisor: it starts servers, kills what they leave, and ends with the front."""
    try:
        become_subreaper()
        os.setpgid(0, 0)
        _detach(keep=control.fileno())
        servers, released = _Supervisor(control).run()
        while kill_descendants(os.getpid(), released, timeout_s=60.0, last=servers):
            pass  # The kernel holds them: if we ended now, they would stay.
    finally:
        os._exit(0)


def _detach(keep: int) -> None:
    """Closes the command's files: other programs may wait for a pipe to be closed."""
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for fd in map(int, os.listdir("/proc/self/fd")):  # in a container the limit may be a billion
        if fd > 2 and fd != keep:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(fd)


class _Supervisor:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._servers: set[int] = set()
        self._released: set[int] = set()
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write)

    def run(self) -> tuple[set[int], set[int]]:
        """Returns when the front has ended, or has closed its end of the socket.

        Returns:
            The servers, and the processes that go on.
        """
        control = self._control.fileno()
        while True:
            ready, _, _ = select.select([control, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap_children()
            if control in ready and not self._serve():
                return self._servers, self._released

    def _serve(self) -> bool:
        """Answers one request; whether the front still exists."""
        try:
            request, fds, _, _ = socket.recv_fds(self._control, 16, 3)
        except ConnectionError:
            return False
        if not request:
            return False
        if request != _SPAWN:
            self._released.add(int(request))
            return True
        reply = self._start(fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ConnectionError):
            self._control.send(json.dumps(reply).encode())
        return True

    def _start(self, fds: Sequence[int]) -> dict[str, Any]:
        stream, stderr, request_fd = fds
        request = json.loads(os.pread(request_fd, os.fstat(request_fd).st_size, 0))
        argv = request["argv"]
        for fd in fds:
            # Received descriptors are inheritable: if a server kept a copy of its own socket, the front would
            # never notice its death.
            os.set_inheritable(fd, False)
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
            (os.POSIX_SPAWN_DUP2, stream, 3),
        ]
        env = {**os.environ, **request["env"]}
        env.pop(SECRET_VARIABLE, None)
        try:
            pid = os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigmask=[], setpgroup=0)
        except OSError as error:
            return {"error": start_problem(error.errno or 0)}
        self._servers.add(pid)
        return {"pid": pid}

    def _reap_children(self) -> None:
        """Reaps dead children, and kills what dead servers left behind."""
        swept = False
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                swept |= pid in self._servers
                self._servers.discard(pid)
        if swept:
            kill_descendants(os.getpid(), without=self._servers | self._released)


WITH_OUR_CODE = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("gpurun", sys.argv.pop(1))
sys.modules["gpurun"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["gpurun"])
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Runs a module of this gpurun in another interpreter, which may have none, or another version."""


def python_argv(module: str, *args: str, python: str = "") -> list[str]:
    """Runs a module in a fresh interpreter; `-P` keeps the working directory from shadowing packages.

    Args:
        python: another interpreter than this command's.
    """
    if not python:
        return [sys.executable, "-P", "-m", module, *args]
    return [python, "-P", "-c", WITH_OUR_CODE, str(gpurun.__file__), module, *args]
