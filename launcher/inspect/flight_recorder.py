"""Asks running ranks which collectives they have called: torch answers itself, even while a rank is stuck."""

import http.client
import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from gpurun.launcher.inspect.collectives import History, parse_history
from gpurun.launcher.rundir.control import socket_path

TIMEOUT_S = 2.0
"""A dump takes milliseconds; a rank that is stopped (SIGSTOP) never answers."""
_HANDLER = "/handler/fr_trace_json"
_AT_ONCE = 32


def ask_histories(folder: Path, ranks: Iterable[int]) -> dict[int, History]:
    """What those ranks answer that do: not those that use no torch.distributed, nor on an older torch."""
    ranks = list(ranks)
    if not ranks:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(ranks))) as pool:
        answers = pool.map(lambda rank: ask_history(folder, rank), ranks)
        return {rank: history for rank, history in zip(ranks, answers, strict=True) if history}


def ask_history(folder: Path, rank: int) -> History | None:
    """One rank's collectives; `None` where it doesn't answer."""
    try:
        connection = _UnixConnection(socket_path(folder, rank))
        try:
            connection.request("POST", _HANDLER)
            return parse_history(connection.getresponse().read())
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None


class _UnixConnection(http.client.HTTPConnection):
    """HTTP on a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        # By way of /proc, since the path of a socket may have 107 bytes only.
        fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{fd}/{self._path.name}")
        finally:
            os.close(fd)
