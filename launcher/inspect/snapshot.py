"""Snapshots of all ranks of a launch, taken from outside at any time: stacks, collectives, steps."""

import http.client
import os
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.launcher.inspect.collectives import History, parse_history
from gpurun.launcher.inspect.stacks import Thread, parse_threads
from gpurun.launcher.rundir.control import RankState, ask_for_stacks, read_states, socket_path, stacks_path
from gpurun.launcher.rundir.files import num_bytes

STACKS_S = 2.0
"""How long the ranks may take to write their stacks; they do it within milliseconds, unless they swap."""
_POLL_S = 0.02


@dataclass(frozen=True)
class RankSnapshot:
    """One rank at one moment."""

    rank: int
    pid: int
    steps: int
    threads: tuple[Thread, ...]
    """Empty if the rank wrote no stack."""
    history: History
    """Empty if the rank did not answer."""


def observe(folder: Path) -> tuple[RankSnapshot, ...]:
    """All ranks that run, by the control blocks in `folder`; takes some tens of milliseconds."""
    states = {rank: state for rank, state in read_states(folder).items() if state.is_running}
    threads = ask_stacks(folder, states)
    histories = ask_histories(folder, states)
    return tuple(
        RankSnapshot(rank, state.pid, state.steps, threads[rank], histories.get(rank, ()))
        for rank, state in states.items()
    )


def ask_stacks(folder: Path, states: dict[int, RankState]) -> dict[int, tuple[Thread, ...]]:
    """The stacks of these ranks, whatever they are doing: the signal handler needs no GIL."""
    before = {rank: num_bytes(stacks_path(folder, rank)) for rank in states}
    for state in states.values():
        ask_for_stacks(folder, state)
    seen: dict[int, tuple[Thread, ...]] = dict.fromkeys(states, ())
    deadline = time.monotonic() + STACKS_S
    while states and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # A stack is written frame by frame: it is complete when it no longer grows.
        last = seen
        seen = {rank: parse_threads(_read(stacks_path(folder, rank), before[rank])) for rank in states}
        if seen == last and all(any(thread.current for thread in threads) for threads in seen.values()):
            break
    return seen


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


TIMEOUT_S = 2.0
"""A dump takes milliseconds; a rank that is stopped (SIGSTOP) never answers."""
_HANDLERS = ("/handler/fr_trace_json", "/handler/dump_nccl_trace_json")
"""NCCL's recorder is another one than gloo's; only builds of torch with NCCL have its handler. Source:
torch/csrc/distributed/c10d/control_plane/Handlers.cpp and torch/csrc/distributed/c10d/FlightRecorderCuda.cpp.
"""
_AT_ONCE = 32


def ask_histories(folder: Path, ranks: Iterable[int]) -> dict[int, History]:
    """The histories of the ranks that answer: those that use torch.distributed, of a recent torch."""
    ranks = list(ranks)
    if not ranks:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(ranks))) as pool:
        answers = pool.map(lambda rank: ask_history(folder, rank), ranks)
        return {rank: history for rank, history in zip(ranks, answers, strict=True) if history}


def ask_history(folder: Path, rank: int) -> History:
    """One rank's collectives, of each backend in turn; none if it does not answer."""
    histories = (_ask_recorder(socket_path(folder, rank), handler) for handler in _HANDLERS)
    return tuple(collective for history in histories for collective in history)


def _ask_recorder(socket: Path, handler: str) -> History:
    try:
        connection = _UnixConnection(socket)
        try:
            connection.request("POST", handler)
            return parse_history(connection.getresponse().read())
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return ()


class _UnixConnection(http.client.HTTPConnection):
    """HTTP on a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        # Through /proc, since the path of a socket may have only 107 bytes.
        fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{fd}/{self._path.name}")
        finally:
            os.close(fd)
