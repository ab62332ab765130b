"""Looks for what a test may leave behind. Each look gives names: what is new after a test was left by it."""

import contextlib
import ctypes
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpurun.launcher.machine.process_tree import descendants
from tests import forkserver, watcher

SETTLE_S = float(os.environ.get("GPURUN_SETTLE_S", "60"))
"""How long what was asked to end may take, on a machine with other load too: only a leak takes that long."""
_SHARED_MEMORY = Path("/dev/shm")
_CLONE_NEWNS, _MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 0x20000, 2, 4, 0x4000, 0x80000


def look_everywhere() -> dict[str, set[str]]:
    """What there is now, by kind."""
    return {kind: look() for kind, look in LOOKS.items()}


def reap() -> None:
    """Waits for all children that have ended: with none left, no look has to go through all processes."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def left_since(before: Mapping[str, set[str]]) -> list[str]:
    """What has come since and stays, when everything that is about to end has had `SETTLE_S` to do so."""
    deadline = time.monotonic() + SETTLE_S
    while (left := _new_since(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _new_since(before: Mapping[str, set[str]]) -> list[str]:
    new = {kind: look() - before[kind] for kind, look in LOOKS.items()}
    new["shared memory"] = {name for name in new["shared memory"] if _unmapped(name)}
    return [f"{kind} {name}" for kind, names in new.items() for name in sorted(names)]


def have_own_shared_memory() -> bool:
    """Mounts an empty `/dev/shm` that only this process and its children see; whether that is possible.

    Where it is, no other program's segments can be taken for a leak, and several tests may run at a time.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not _SHARED_MEMORY.is_dir() or libc.unshare(_CLONE_NEWNS) != 0:
        return False  # only root may
    # What is mounted here must not be seen outside, what is mounted outside may be seen here.
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) != 0:
        return False
    flags, options = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), b"mode=1777"
    return bool(libc.mount(b"tmpfs", bytes(_SHARED_MEMORY), b"tmpfs", flags, options) == 0)


def _processes() -> set[str]:
    ours = forkserver.pids() | watcher.pids()
    if _children() <= ours and not any(map(_children, ours)):
        return set()  # then there are no orphans either: those become children
    found = set()
    for pid in descendants(os.getpid()):
        if pid in ours:
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace(chr(0), " ").strip()
        except OSError:
            continue
        # A browser starts and ends helpers as it likes; they end with it, and it is looked for.
        if "chromium --type=" not in command:
            found.add(f"{pid} ({command})")
    return found


def _children(pid: int | str = "self") -> set[int]:
    """Child processes, zombies among them; cheaper than a look at all processes.

    Source: proc(5), /proc/pid/task/tid/children.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def _threads() -> set[str]:
    # gRPC has one that ends with the process.
    found = (thread for thread in threading.enumerate() if "_poll_wrapper" not in thread.name)
    return {f"{thread.ident} ({thread.name})" for thread in found}


def _segments() -> set[str]:
    return {entry.name for entry in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def _unmapped(name: str) -> bool:
    """Whether a segment is unused: a process that still uses one is found itself."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return False
        except OSError:
            continue
    return (_SHARED_MEMORY / name).exists()


def _ports() -> set[str]:
    """Those that the process of the tests listens on; another's are found with the process."""
    return {port for entry in os.listdir("/proc/self/fd") if (port := _listens_on(int(entry)))}


def _listens_on(fd: int) -> str:
    """The port, or the address of another kind; nothing for what is no listening socket."""
    try:
        copy = os.dup(fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else -1
    except OSError:  # the one that lists them is closed
        return ""
    if copy < 0:
        return ""
    with socket.socket(fileno=copy) as opened:
        if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return ""
        address = opened.getsockname()
    return str(address[1] if isinstance(address, tuple) else address)


LOOKS: dict[str, Callable[[], set[str]]] = {
    "process": _processes,
    "thread": _threads,
    "port": _ports,
    "shared memory": _segments,
}
