"""A fork server for the test session: it has imported gpurun, torch and `torch._dynamo` once.

`start` is `subprocess.Popen` for `python -m MODULE`: a fork of the server becomes the command, and when that
command starts the server of its ranks, a fork becomes that one too. What only a new interpreter can do
(variables that are read at its start, modules that shadow others) starts cold; so do the tests of
`integration/cli/test_cold_start.py`, so that a fault of an import, or of a fork, isn't hidden.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
ZYGOTE = "gpurun.launcher.worker.entry.zygote"
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.profiler",
    "torch.optim",
    "torch._dynamo",
    "gpurun.launcher.cli.commands.gate",
    "gpurun.launcher.cli.commands.job",
    "gpurun.launcher.cli.commands.job_file",
    "gpurun.launcher.cli.commands.report",
    "gpurun.launcher.cli.commands.runs",
    "gpurun.launcher.cli.commands.runs",
    "gpurun.launcher.cli.commands.selftest",
    "gpurun.launcher.cli.commands.submit",
    "gpurun.launcher.cli.commands.traces",
    "gpurun.launcher.report.markdown",
    "gpurun.launcher.report.tensorboard",
    "gpurun.launcher.report.terminal.table",
    "gpurun.launcher.start",
    "gpurun.launcher.start_gate",
    "gpurun.launcher.tensorboard_plugin.plugin",
    "gpurun.launcher.worker.entry.workload_rank",
    "gpurun.launcher.worker.program.program_rank",
    "gpurun.launcher.worker.strategies.ddp",
    "gpurun.launcher.worker.strategies.dp",
    ZYGOTE,
)
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "KMP_", "GOMP_", "MKL_", "TORCH", "PYTORCH", "GRPC_")
"""Variables that the interpreter, or a library at its import, reads: another value needs a new process."""
APPLIED = ("OMP_NUM_THREADS", "PYTHONPATH", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
"""Those of them that don't: the first two are applied after the fork, the server and all ranks' servers have
the third, and torch reads the last when it is needed."""

CHEAP_TO_FORK = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PYTHONMALLOC": "malloc"}
"""With these, memory comes in huge pages where the system has some: then a fork takes a fifth of the time."""

BLOCK_MS = 40.0
"""What a timed block of CPU devices lasts in a fork; in a new interpreter, as for a user, it is 200 ms."""

UNNAMED = """
import sys
source = open(sys.argv[1]).read()
exec(compile(source, "<fork server>", "exec"), {"__name__": "__main__", "__file__": sys.argv[1]})
"""
"""Runs this file under a name that is no file's: gpurun shows the user's frames, and lists their files."""


def start(
    module: str,
    *args: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    is_cold: bool = False,
    **how: Any,
) -> subprocess.Popen[str]:
    """`python -m MODULE ARGS` as a child of this process; `how` is as in `subprocess.Popen`.

    Args:
        env: added to the environment of this process.
        is_cold: a new interpreter, whatever else could do.
    """
    whole = {**os.environ, **(env or {})}
    popen = subprocess.Popen[str] if is_cold else _Forked
    return popen([sys.executable, "-m", module, *args], cwd=cwd or Path.cwd(), env=whole, text=True, **how)


def run(
    module: str,
    *args: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    is_cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(capture_output=True)` for `python -m MODULE ARGS`; a command that hangs is killed."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    how: dict[str, Any] = {"stdin": null, "stdout": pipe, "stderr": pipe, "is_cold": is_cold}
    with start(module, *args, cwd=cwd, env=env, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Forked(subprocess.Popen[str]):
    """A `Popen` whose process is forked by the server, unless something asks for a new interpreter."""

    def _execute_child(self, *given: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]  # private; the same since Python 3.11
        asked = inspect.signature(execute).bind(*given).arguments
        env, cwd = asked["env"], asked["cwd"]
        plain = asked["preexec_fn"] is None and not asked["pass_fds"] and not asked["shell"]
        if not plain or needs_new_interpreter(env, _at_start()) or shadows(_import_path(env, cwd)):
            execute(*given)
            return
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [number if end == -1 else end for number, end in enumerate(ends)]
        request = {
            "argv": list(asked["args"])[2:],
            "cwd": os.fspath(cwd),
            "env": dict(env),
            "session": asked["start_new_session"],
            "ignored": _ignored(),
            "umask": _umask(),
            "cpus": list(os.sched_getaffinity(0)),
        }
        self.pid = _server().fork(request, fds)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def needs_new_interpreter(env: Mapping[str, str], at_start: Mapping[str, str]) -> bool:
    """Whether variables that are read at the start differ from those that the server started with."""
    return _read_at_start(env) != _read_at_start(at_start)


def _import_path(env: Mapping[str, str], cwd: str | Path) -> list[str]:
    """Directories from which `python -m` imports before all others."""
    return [os.fspath(cwd), *(entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry)]


def shadows(path: Sequence[str]) -> bool:
    """Whether a module there comes before one that the server may have, or runs when Python starts."""
    for entry in path:
        names = {name.partition(".")[0] for name in os.listdir(entry)} if os.path.isdir(entry) else set()
        for name in names - {""}:
            ours = PathFinder.find_spec(name, [entry])
            if ours is None or ours.origin is None:
                continue
            theirs = PathFinder.find_spec(name, sys.path)
            taken = name in ("sitecustomize", *sys.builtin_module_names)
            if taken or (theirs is not None and theirs.origin != ours.origin):
                return True
    return False


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(READ_AT_START) and k not in APPLIED}


def _ignored() -> list[int]:
    """Signals that a new program would inherit as ignored."""
    candidates = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
    return [number for number in candidates if signal.getsignal(number) is signal.SIG_IGN]


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


class _Server:
    """This process's end of the server, which is started with the first command."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**self.environ, "OPENBLAS_NUM_THREADS": "1", **CHEAP_TO_FORK}
        env.pop("OMP_NUM_THREADS", None)
        argv = [sys.executable, "-c", UNNAMED, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(
            argv, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The process id of the command, which is a child of this process."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the fork server of the tests has ended")
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


_servers: list[_Server] = []


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


def _at_start() -> Mapping[str, str]:
    return _servers[0].environ if _servers else os.environ


def collect_seldom() -> None:
    """Has the garbage collector leave alone what there is, and look seldom.

    It took a twentieth of the unit tests' CPU time, and a fifth of that of ranks.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pids() -> set[int]:
    """The server, where there is one: it is no leak of a test."""
    return {server.process.pid for server in _servers}


def close() -> None:
    """Ends the server, if one was started."""
    while _servers:
        _servers.pop().close()


# From here on: the server and its forks.


def main(fd: int) -> NoReturn:
    """Forks a command per request, until the session has closed its end."""
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    object.__setattr__(sys.modules["gpurun.launcher.machine.accelerators"].CPU, "block_ms", BLOCK_MS)
    gc.freeze()
    channel = socket.socket(fileno=fd)
    while True:
        packet, fds, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not packet:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            # The one in the middle ends at once, so that the session, a subreaper, becomes the parent.
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            os.close(channel.fileno())
            _become(json.loads(packet), fds)
        os.waitpid(middle, 0)
        channel.send(os.read(reader, 64))
        for each in (reader, writer, *fds):
            os.close(each)


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    """Becomes `python -m MODULE ARGS`."""
    if request["session"]:
        os.setsid()
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number, received in enumerate(fds):
        os.dup2(received, number)
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    os.chdir(request["cwd"])
    os.posix_spawn = _fork_the_zygote(request["env"])
    sys.path[:1] = _import_path(request["env"], request["cwd"])
    _run_module(request["argv"][0], request["argv"][1:], request["env"])


def _fork_the_zygote(at_start: Mapping[str, str]) -> Callable[..., int]:
    """`os.posix_spawn` that forks where the program is the server of the ranks; else it is the real one."""
    spawn = os.posix_spawn

    def fork_or_spawn(path: str, argv: list[str], env: Mapping[str, str], **how: Any) -> int:
        warm = argv[:4] == [sys.executable, "-P", "-m", ZYGOTE]
        other_path = env.get("PYTHONPATH") != at_start.get("PYTHONPATH")
        if not warm or other_path or needs_new_interpreter(env, at_start):
            return spawn(path, argv, env, **how)
        if pid := os.fork():
            return pid
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in range(1, signal.NSIG):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for action, fd, *rest in how["file_actions"]:
            if action == os.POSIX_SPAWN_OPEN:
                opened = os.open(*rest)
                os.dup2(opened, fd)
            else:
                os.dup2(fd, rest[0])
        threads = env.get("OMP_NUM_THREADS", "")
        if threads.isdecimal():
            sys.modules["torch"].set_num_threads(int(threads))
        del sys.path[0]
        _run_module(ZYGOTE, argv[4:], env, num_fds=4)

    return fork_or_spawn


def _run_module(module: str, args: Sequence[str], env: Mapping[str, str], num_fds: int = 3) -> NoReturn:
    """Runs it as `__main__` in a process that looks as if it had just been started, and ends the process."""
    os.closerange(num_fds, 1024)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = [module, *args]
    _open_streams()
    random.seed()
    sys.modules["torch"].seed()
    sys.modules["numpy"].random.seed()
    gc.enable()
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python itself ends
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _open_streams() -> None:
    """Streams as Python opens them when it starts."""
    sys.stdin = sys.__stdin__ = _stream(0, "r", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace")  # type: ignore[misc]


def _stream(fd: int, mode: str, errors: str) -> Any:
    raw = open(fd, f"{mode}b", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, errors=errors, line_buffering=fd == 2 or os.isatty(fd))


if __name__ == "__main__":
    main(int(sys.argv[2]))
