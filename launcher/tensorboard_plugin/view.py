"""`gpurun view`: TensorBoard on this machine, as a child that ends with us."""

import importlib.util
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.helper_process import helper_argv
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.run.find import find_run
from gpurun.launcher.tensorboard_plugin.logdir import Listing

WsgiApp = Callable[[dict[str, Any], Any], Any]
FONTS = "/font-roboto/"
START_LIMIT_S = 60.0
"""TensorBoard needs 2 s on an idle machine; a cold disk or a busy one takes longer."""
GRACE_S = 5.0


@dataclass(frozen=True)
class TensorBoardServer:
    """A TensorBoard that answers."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def tab(self) -> str:
        """Address of our tab: TensorBoard by itself opens another one."""
        return f"{self.url}#gpurun"

    def wait(self) -> None:
        """Returns when it ends, which by itself it doesn't."""
        self.process.wait()


@contextmanager
def open_view(path: Path, host: str = "127.0.0.1", port: int = 0) -> Iterator[TensorBoardServer]:
    """A TensorBoard that shows `path`, a run or a directory of runs, until the block is left; also by Ctrl-C.

    Args:
        path: a directory with runs, traces or event files below, now or later, or a name that `find_run`
            understands.
        host: the address it listens on.
        port: 0 lets the kernel choose a free one.

    Raises:
        SpecError: there is no such directory or run.
        MachineError: TensorBoard is missing, or doesn't start.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise MachineError("TensorBoard is not installed here; install it: pip install tensorboard")
    directory = path if path.is_dir() else find_run(path).path
    with tempfile.TemporaryFile() as log:
        process = _start(directory, host, port, log)
        try:
            server = TensorBoardServer(_url(process, log), process)
            with suppress(KeyboardInterrupt):  # the way to close a view
                yield server
        finally:
            _stop(process)


def is_empty(path: Path) -> bool:
    """Whether a directory has nothing to show yet."""
    listing = Listing(str(path))
    return path.is_dir() and not listing.any() and not listing.has_events()


def _start(directory: Path, host: str, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C reaches us alone, and we end it in order.

    Its log may show names of a stranger's files; its address comes by a pipe that nothing else is written to.

    On a shared machine, other users can connect to the port. They don't know the random path.
    """
    parent = str(os.getpid())
    arguments = [f"--logdir={directory}", f"--host={host}", f"--port={port}", "--reload_interval=5"]
    # TensorBoard's data server would answer every user of this machine.
    arguments += ["--load_fast=false", f"--path_prefix=/{secrets.token_urlsafe(16)}"]
    process = subprocess.Popen(
        helper_argv("gpurun.launcher.tensorboard_plugin.view:serve", parent),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # every user can read a process's arguments
        stdin.write(json.dumps(arguments).encode())
    return process


def serve() -> None:
    """The body of the child: TensorBoard, until SIGTERM, which the kernel sends too when its parent dies.

    Not `tensorboard.main`: that leaves a directory of its own behind in the temporary directory. Our own
    tab is there also where nothing is installed and so no entry point names it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    die_with(int(sys.argv[1]), signal.SIGTERM)
    from tensorboard import default, program

    from gpurun.launcher.tensorboard_plugin.plugin import BoundedServer, GpurunPlugin

    plugins = [each for each in default.get_plugins() if not each.__module__.startswith("gpurun.")]

    class Board(BoundedServer, program.WerkzeugServer):  # type: ignore[misc]
        """TensorBoard's own server, which by itself takes any number of connections, for any time."""

    def server(app: WsgiApp, flags: Any) -> Any:
        return program.with_port_scanning(Board)(for_the_owner(app, flags), flags)

    board = program.TensorBoard(plugins=[*plugins, GpurunPlugin], server_class=server)
    board.configure([sys.argv[0], *json.load(sys.stdin)])
    try:
        os.write(pipe, board.launch().encode())
        os.close(pipe)
    except program.TensorBoardServerException as error:
        sys.exit(error.msg)
    signal.pause()


def for_the_owner(app: WsgiApp, flags: Any) -> WsgiApp:
    """TensorBoard, which asks for its fonts without the prefix of all other addresses.

    Whoever knows the prefix has opened this view: such a request is answered, however many others come. On
    loopback, what names another host is refused, whatever it asks for: by itself TensorBoard answers it.
    """
    from werkzeug import wrappers

    from gpurun.launcher.tensorboard_plugin.plugin import EXPECTED, foreign_name, is_loopback

    prefix, is_own = flags.path_prefix, is_loopback(flags)

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if is_own and (reason := foreign_name(wrappers.Request(environ))) is not None:
            return wrappers.Response(f"{reason}\n", 403)(environ, start_response)
        path = environ.get("PATH_INFO", "")
        if path.startswith(f"{prefix}/"):
            environ[EXPECTED]()
        return app(
            {**environ, "PATH_INFO": prefix + path if path.startswith(FONTS) else path}, start_response
        )

    return answer


def _url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """The child says its address once it listens there."""
    assert process.stdout is not None
    with process.stdout as pipe:
        if not select.select([pipe], [], [], START_LIMIT_S)[0]:
            raise MachineError(f"TensorBoard didn't start within {START_LIMIT_S:.0f} s:\n{_last_lines(log)}")
        url = pipe.read().decode().strip()
    if not url:
        raise MachineError(f"TensorBoard ended at once:\n{_last_lines(log)}")
    return url


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL; its data server ends with it, by the pipe between the two."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_lines(log: IO[bytes]) -> str:
    """The last lines of the log; the position that the child shares with us doesn't move."""
    text = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-5:])
