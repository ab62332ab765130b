"""Snapshots of all ranks of a launch, taken from outside at any time: stacks, collectives, steps.

Which collective each rank has reached is known from torch's flight recorder. Ranks are compared by sequence
numbers alone: gloo never records that a collective has begun or ended. Each backend counts its own
collectives, also where several belong to one process group.
"""

import ast
import errno
import http.client
import io
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

import msgspec

from gpurun.launcher.grouping import grouped
from gpurun.launcher.inspect.stacks import Thread, is_workload, main_thread, parse_threads
from gpurun.launcher.machine.accelerators import CPU, inspect_gpus
from gpurun.launcher.machine.gpus.gpu import Gpu, Gpus
from gpurun.launcher.machine.process_tree import command_of, cpu_s, descendants
from gpurun.launcher.rundir.control import (
    MAX_BYTES,
    ControlDir,
    RankState,
    socket_name,
    stacks_name,
)
from gpurun.launcher.syntax import parsed
from gpurun.launcher.units import plural, ranks_text

MISMATCHED = "mismatched collectives"
_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
"""Collectives whose input has the same number of elements on all ranks."""
_COMPLETED = "completed"
"""Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, `completed_state`."""


@dataclass(frozen=True)
class CalledCollective:
    """A collective that a rank has called."""

    group: str
    """torch's number of the process group."""
    seq: int
    """Counts the collectives of the group from 1, equally on every rank."""
    name: str
    """`all_reduce`."""
    backend: str = "gloo"
    is_pending: bool = field(default=False, compare=False)
    """Whether the GPU has it before it, or still works on it; gloo never says."""
    num_elements: int | None = field(default=None, compare=False)
    """The number of elements of its input, where it has to be the same on all ranks."""

    @property
    def counted_in(self) -> tuple[str, str]:
        """The scope of its number: the collectives of one backend in one group."""
        return self.backend, self.group

    def __str__(self) -> str:
        return f"{self.name} #{self.seq}" + (f" of group {self.group}" if self.group != "0" else "")


History = tuple[CalledCollective, ...]
"""The collectives of one rank, oldest first, as many as the flight recorder keeps."""


class RecordedCall(msgspec.Struct):
    """A call of a collective, a send or a receive, as torch's flight recorder has it."""

    collective_seq_id: int
    process_group: tuple[str, str]
    profiling_name: str
    is_p2p: bool = False
    state: str = _COMPLETED
    input_sizes: list[list[int]] = []
    time_created_ns: int = 0


class FlightRecord(msgspec.Struct):
    """A dump of the flight recorder."""

    entries: list[RecordedCall] = []


@dataclass(frozen=True)
class Gap:
    """The collective that some ranks have called and others have not."""

    collective: CalledCollective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def parse_history(dump: bytes) -> History:
    """The collectives in a dump of the flight recorder, without sends and receives.

    Of collectives that NCCL runs as one, one more entry, with their number, says when they are completed. One
    of sends and receives has the number of the collective before it, which says nothing of what comes after.
    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective` and `endCoalescing`.

    Raises:
        msgspec.MsgspecError: this is not such a dump.
    """
    entries = msgspec.json.decode(dump, type=FlightRecord).entries
    done: set[tuple[tuple[str, str], int]] = set()
    called = []
    for collective in reversed([_collective(entry) for entry in entries if not entry.is_p2p]):
        if not collective.is_pending:
            done.add((collective.counted_in, collective.seq))
        called.append(replace(collective, is_pending=(collective.counted_in, collective.seq) not in done))
    return tuple(reversed(called))


def _collective(entry: RecordedCall) -> CalledCollective:
    """torch's name begins with that of the backend: `nccl:all_reduce`."""
    backend, _, name = entry.profiling_name.rpartition(":")
    is_pending = backend not in ("", CPU.backend) and entry.state != _COMPLETED
    size = sum(map(prod, entry.input_sizes)) if name in _SAME_SIZE and entry.input_sizes else None
    return CalledCollective(entry.process_group[0], entry.collective_seq_id, name, backend, is_pending, size)


def find_gap(histories: Mapping[int, History]) -> Gap | None:
    """The first collective that not all ranks of its group have called; `None`: there is none.

    A rank belongs to a group if it has called one of its collectives; all ranks belong to the default group.
    """
    counts = dict.fromkeys(collective.counted_in for history in histories.values() for collective in history)
    gaps = [gap for counted_in in counts if (gap := _gap_in(counted_in, histories))]
    return gaps[0] if gaps else None


def _gap_in(counted_in: tuple[str, str], histories: Mapping[int, History]) -> Gap | None:
    backend, group = counted_in
    last = {rank: _last(history, counted_in) for rank, history in histories.items()}
    if group != "0":
        last = {rank: seq for rank, seq in last.items() if seq}
    lowest, highest = min(last.values()), max(last.values())
    if lowest == highest:
        return None
    waiting = tuple(rank for rank, seq in last.items() if seq > lowest)
    missing = tuple(rank for rank, seq in last.items() if seq == lowest)
    after = (counted_in, lowest + 1)
    called = [
        collective
        for rank in waiting
        for collective in histories[rank]
        if (collective.counted_in, collective.seq) == after
    ]
    name = called[0].name if called else "collective"
    return Gap(CalledCollective(group, lowest + 1, name, backend), waiting, missing)


def _last(history: History, counted_in: tuple[str, str]) -> int:
    return max((collective.seq for collective in history if collective.counted_in == counted_in), default=0)


@dataclass(frozen=True)
class Mismatch:
    """The calls of ranks under one number, which should be one collective."""

    calls: tuple[tuple[CalledCollective, tuple[int, ...]], ...]
    """Each call with its ranks."""

    def __str__(self) -> str:
        """`rank 0 called all_reduce #4, rank 1 called broadcast #4`."""
        has_names = len({call.name for call, _ in self.calls}) > 1
        return ", ".join(
            f"{ranks_text(ranks)} called {call if has_names else _with_size(call)}"
            for call, ranks in self.calls
        )


def _with_size(call: CalledCollective) -> str:
    return f"{call} with {plural(call.num_elements or 0, 'element')}"


def find_mismatch(histories: Mapping[int, History]) -> Mismatch | None:
    """The first collective that ranks called by several names, or with several sizes; `None`: there is none.

    gloo accepts some of these without an error, and then each rank has other data. Numbers that a rank has
    more than once, as for calls that NCCL ran as one, are not compared.
    """
    made = ((call, rank) for rank, history in histories.items() for call in history)
    calls = grouped(made, lambda pair: (*pair[0].counted_in, pair[0].seq))
    found = [_by_kind(ones) for ones in calls.values() if len({rank for _, rank in ones}) == len(ones)]
    several = [mismatch for mismatch in found if len(mismatch.calls) > 1]
    return min(several, key=lambda mismatch: mismatch.calls[0][0].seq, default=None)


def _by_kind(calls: Sequence[tuple[CalledCollective, int]]) -> Mismatch:
    kinds = grouped(calls, lambda pair: (pair[0].name, pair[0].num_elements))
    return Mismatch(tuple((ones[0][0], tuple(rank for _, rank in ones)) for ones in kinds.values()))


def find_pending(histories: Mapping[int, History]) -> CalledCollective | None:
    """The first collective that all ranks have called and no GPU has completed; `None`: there is none."""
    first = [
        next((collective for collective in history if collective.is_pending), None)
        for history in histories.values()
    ]
    return first[0] if len(set(first)) == 1 else None


def last_ones(history: History) -> Sequence[CalledCollective]:
    """The newest collective of each group and backend."""
    return list({collective.counted_in: collective for collective in history}.values())


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
    history: History | None
    """Empty if the rank has called no collective; `None` if it did not answer."""
    cpu_s: float = 0.0
    """CPU time of its process and of all that it has started, so far."""
    gpu_percent: int | None = 0
    """The utilisation of the busiest GPU that it may use; 0 without any, `None` if that isn't known."""
    unguarded: str | None = None
    """The program's file, if processes that the rank has started by spawn run it from its beginning."""


def observe(directory: Path) -> tuple[RankSnapshot, ...]:
    """All ranks that run, by the control blocks in `directory`, which the first rank makes."""
    try:
        with ControlDir(directory) as control:
            return observe_in(control)
    except OSError:
        return ()


def observe_in(control: ControlDir) -> tuple[RankSnapshot, ...]:
    """All ranks that run, by their control blocks; takes some tens of milliseconds."""
    states = control.running()
    processes = {rank: (state.pid, *descendants(state.pid)) for rank, state in states.items()}
    gpus = ask_gpus() if states else None
    threads = ask_stacks(control, states)
    histories = ask_histories(control, states)
    return tuple(
        RankSnapshot(
            rank,
            state.pid,
            state.steps,
            threads[rank],
            histories.get(rank),
            cpu_s(processes[rank]),
            utilisation(gpus, processes[rank]),
            unguarded(threads[rank], processes[rank][1:]),
        )
        for rank, state in states.items()
    )


_SPAWNED = "multiprocessing.spawn"
"""A part of the command line of a process that Python has started by spawn."""
_MAX_PROGRAM_BYTES = 1 << 20


def unguarded(threads: Sequence[Thread], started: Collection[int]) -> str | None:
    """The program's file, if the processes that the rank has started by spawn run all of it.

    Source: multiprocessing's programming guidelines, "Safe importing of main module".
    """
    main = main_thread(threads)
    files = [frame.file for frame in main.frames if is_workload(frame.file)] if main else []
    if not files or not any(_SPAWNED in command_of(pid) for pid in started):
        return None
    file = files[-1]
    try:
        with open(file, "rb", opener=_without_waiting) as program:
            code = parsed(program.read(_MAX_PROGRAM_BYTES))
    except (OSError, SyntaxError, ValueError):
        return None
    has_guard = any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in code.body)
    return None if has_guard else file


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; one that is a pipe meanwhile is empty."""
    return os.open(path, flags | os.O_NONBLOCK)


GPUS_S = 2.0
"""How long drivers may take; one that waits for a broken GPU never answers."""


def ask_gpus() -> Gpus | None:
    """This machine's GPUs; `None` if their drivers don't answer in time, or no thread can be started."""
    found: list[Gpus] = []
    thread = threading.Thread(target=lambda: found.append(inspect_gpus(os.environ)), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    thread.join(GPUS_S)
    return next(iter(found), None)


def utilisation(gpus: Gpus | None, processes: Collection[int]) -> int | None:
    """The utilisation of the busiest GPU that these processes may use, in percent; `None` if not known.

    They may use each GPU but those that are known to have other users only: in a container the driver may
    list no process, or ones by numbers that they have outside.
    """
    if gpus is None or gpus.nvml_error:
        return None
    percents = [gpu.utilisation_percent for gpu in gpus.gpus if _may_use(gpu, processes)]
    known = [percent for percent in percents if percent is not None]
    return max(known, default=0) if len(known) == len(percents) else None


def _may_use(gpu: Gpu, processes: Collection[int]) -> bool:
    users = gpu.processes or ()
    return not users or any(user.pid in processes or user.name is None for user in users)


def ask_stacks(control: ControlDir, states: dict[int, RankState]) -> dict[int, tuple[Thread, ...]]:
    """The stacks of these ranks, whatever they are doing: the signal handler needs no GIL."""
    before = {rank: control.num_bytes(stacks_name(rank)) for rank in states}
    for state in states.values():
        control.ask_for_stacks(state)
    seen: dict[int, tuple[Thread, ...]] = dict.fromkeys(states, ())
    deadline = time.monotonic() + STACKS_S
    while states and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # A stack is written frame by frame: it is complete when it no longer grows.
        last = seen
        texts = {rank: control.read(stacks_name(rank), before[rank]) for rank in states}
        seen = {rank: parse_threads(text.decode("utf-8", "replace")) for rank, text in texts.items()}
        if seen == last and all(map(_is_complete, seen.values())):
            break
    return seen


def _is_complete(threads: tuple[Thread, ...]) -> bool:
    """Whether the thread that faulthandler writes last, the current one, is there with its frames."""
    return any(thread.current and thread.frames for thread in threads)


TIMEOUT_S = 2.0
"""A dump takes milliseconds; a rank that is stopped (SIGSTOP) never answers."""
_HANDLERS = ("/handler/fr_trace_json", "/handler/dump_nccl_trace_json")
"""NCCL's recorder is another one than gloo's; only builds of torch with NCCL have its handler. Source:
torch/csrc/distributed/c10d/control_plane/Handlers.cpp and torch/csrc/distributed/c10d/FlightRecorderCuda.cpp.
"""
_HEADERS = "Host: localhost\r\nContent-Length: 0\r\nConnection: close"
_AT_ONCE = 32
_PEER = struct.Struct("=3i")
"""Process, user and group at the other end of a socket. Source: unix(7), SO_PEERCRED."""


def ask_histories(control: ControlDir, states: Mapping[int, RankState]) -> dict[int, History | None]:
    """The history of each rank; one after the other where this process may start no thread."""
    if not states:
        return {}
    ask = partial(ask_history, control)
    try:
        with ThreadPoolExecutor(min(_AT_ONCE, len(states))) as pool:
            return dict(zip(states, pool.map(ask, states.values()), strict=True))
    except RuntimeError:  # at the limit of processes, which may be why the ranks hang
        return {rank: ask(state) for rank, state in states.items()}


def ask_history(control: ControlDir, state: RankState) -> History | None:
    """One rank's collectives, of each backend in turn.

    `None` if it does not answer in time, or its torch is too old to: what it has called isn't known then.
    """
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        answers = [_ask_recorder(control, state, handler, deadline_s) for handler in _HANDLERS]
    except OSError:
        return None
    known = [history for history in answers if history is not None]
    return tuple(collective for history in known for collective in history) if known else None


def _ask_recorder(control: ControlDir, state: RankState, handler: str, deadline_s: float) -> History | None:
    """`None` if torch has no such recorder.

    Raises:
        OSError: the rank does not answer in time.
    """
    with _connected(control, state, deadline_s) as connection:
        connection.sendall(f"POST {handler} HTTP/1.1\r\n{_HEADERS}\r\n\r\n".encode())
        answer = _read_all(connection, deadline_s)
    try:
        response = http.client.HTTPResponse(_Received(answer))  # type: ignore[arg-type]
        response.begin()
        return parse_history(response.read())
    except (http.client.HTTPException, msgspec.MsgspecError, ValueError):
        return None


def _connected(control: ControlDir, state: RankState, deadline_s: float) -> socket.socket:
    """A connection to the socket of a rank, and to no other process.

    Raises:
        OSError: the rank has none, or another process listens there.
    """
    name = socket_name(state.rank)
    if not stat.S_ISSOCK(os.stat(name, dir_fd=control.fd, follow_symlinks=False).st_mode):
        raise OSError(errno.ENOTSOCK, "not a socket", name)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        # Through /proc, since the path of a socket may have only 107 bytes.
        connection.connect(f"/proc/self/fd/{control.fd}/{name}")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[:2] != (state.pid, os.geteuid()):
            raise OSError(errno.EPERM, "another process listens there", name)
    except OSError:
        connection.close()
        raise
    return connection


def _read_all(connection: socket.socket, deadline_s: float) -> bytes:
    """The bytes that the other end sends until it closes the connection.

    Raises:
        OSError: it does not close it in time, or sends more than any rank has to say.
    """
    answer = bytearray()
    while len(answer) <= MAX_BYTES:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        if time.monotonic() > deadline_s or not (part := connection.recv(1 << 16)):
            break
        answer += part
    if len(answer) > MAX_BYTES or time.monotonic() > deadline_s:
        raise OSError(errno.EMSGSIZE, "no complete answer in time")
    return bytes(answer)


class _Received:
    """A whole answer, in the place of the connection that `HTTPResponse` reads from."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)
