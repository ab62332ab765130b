"""What makes a rank observable from outside, whatever it is doing: set up before any user's code runs."""

import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpurun.launcher.rundir.control import STACKS_SIGNAL, ControlBlock, make_folder, socket_path, stacks_path

FLIGHT_RECORDER_ENTRIES = "2000"
"""Collectives that torch remembers per rank; what NCCL's recorder has by default, 1 MB as JSON."""

_kept: list[object] = []
"""Servers that live as long as the process."""


def light_beacon(folder: Path, rank: int) -> None:
    """Writes stacks on a signal, says what collectives there were on a socket, and has a control block.

    Raises:
        OSError: the folder can't be written.
    """
    make_folder(folder)
    # A file of its own: a program may close its stderr, or send it elsewhere.
    stacks = os.open(stacks_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(STACKS_SIGNAL, file=stacks)
    if "torch" in sys.modules:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDER_ENTRIES)
        answer_about_collectives(folder, rank)
    # Last: whoever sees the block may send the signal, which would kill a process that isn't ready for it.
    _kept.append(ControlBlock(folder, rank, create=True))


def answer_about_collectives(folder: Path, rank: int) -> None:
    """Has torch answer on a socket, from a thread in C++ that needs no GIL.

    Without it, stacks remain: an older torch has no such server, and some file systems have no sockets.
    """
    try:
        from torch._C._distributed_c10d import _WorkerServer
    except ImportError:
        return
    socket = socket_path(folder, rank)
    socket.unlink(missing_ok=True)
    # By way of /proc, since the path of a socket may have 107 bytes only.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(RuntimeError), quiet_stderr():
        _kept.append(_WorkerServer(f"/proc/self/fd/{fd}/{socket.name}"))
    os.close(fd)


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
