"""What a rank and the command share while the rank runs: a few numbers in a file that is mapped into memory.

The rank writes its process id and counts its steps; the command rings a bell. Neither needs a system call, so
a rank can check the bell after every step. Readers of the file see what was last written: both use the same
page cache.
"""

import contextlib
import mmap
import os
import signal
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MAGIC = 0x6770_7572_756E_0001
"""`gpurun`, version 1: a file that is not complete yet has none."""
_LAYOUT = struct.Struct("=5Q")
_STEPS, _BELL = 3, 4
"""Positions in: magic, process id, start time of the process, steps, bell."""
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads to a file, even while C code holds the GIL."""
FOLDER_MODE = 0o700
"""Of the directory with all blocks: a user with access could make the ranks write traces."""


@dataclass(frozen=True)
class RankState:
    """The content of a rank's block."""

    rank: int
    pid: int
    start_ticks: int
    steps: int
    """Optimizer steps since the rank began."""

    @property
    def is_running(self) -> bool:
        """Whether this process still runs; its number may have been reused."""
        return start_ticks(self.pid) == self.start_ticks


class ControlBlock:
    """A rank's block, mapped for reading and writing."""

    def __init__(self, folder: Path, rank: int, create: bool = False) -> None:
        """Opens the block, or creates it, as a rank does at its start.

        Raises:
            OSError: it does not exist, or can't be written.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(block_path(folder, rank), flags, 0o600)
        try:
            if create:
                # A sparse file would end the rank with SIGBUS when the disk is full.
                os.posix_fallocate(fd, 0, _LAYOUT.size)
            self._map = mmap.mmap(fd, _LAYOUT.size)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")
        if create:
            self._map[:] = _LAYOUT.pack(_MAGIC, os.getpid(), start_ticks(os.getpid()) or 0, 0, 0)

    def count_step(self) -> None:
        """Counts a completed step; takes some tens of nanoseconds."""
        self._words[_STEPS] += 1

    @property
    def steps(self) -> int:
        return self._words[_STEPS]

    @property
    def bell(self) -> int:
        """Number of the newest request; 0: none so far."""
        return self._words[_BELL]

    def ring(self, number: int) -> None:
        self._words[_BELL] = number

    def close(self) -> None:
        self._words.release()
        self._map.close()


def block_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def stacks_path(folder: Path, rank: int) -> Path:
    """Where the rank writes its stacks on request."""
    return folder / f"rank{rank}.stacks"


def socket_path(folder: Path, rank: int) -> Path:
    """Where torch answers requests for the rank's collectives."""
    return folder / f"rank{rank}.sock"


def make_folder(folder: Path) -> None:
    """Creates the directory of all blocks, for its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(
        PermissionError
    ):  # exFAT has no permissions of files; whoever mounted it sets all
        folder.chmod(FOLDER_MODE)


def read_states(folder: Path) -> Mapping[int, RankState]:
    """The contents of all blocks in a directory, by rank, without blocks that are not complete yet."""
    states = {}
    for path in folder.glob("rank*"):
        number = path.name.removeprefix("rank")
        if number.isdecimal() and (state := _read_state(path, int(number))):
            states[state.rank] = state
    return dict(sorted(states.items()))


def _read_state(path: Path, rank: int) -> RankState | None:
    try:
        magic, pid, start, steps, _ = _LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return RankState(rank, pid, start, steps) if magic == _MAGIC else None


def ask_for_stacks(folder: Path, state: RankState) -> None:
    """Sends a rank the signal that makes it write its stacks.

    The directory may be anyone's, and may name any process. Only one that has this very block mapped and
    handles the signal gets it: no one can make another process look like that.
    """
    try:
        process = os.pidfd_open(state.pid)  # stays that process, even if its number is reused meanwhile
    except OSError:
        return
    try:
        if (
            state.is_running
            and _has_mapped(state.pid, block_path(folder, state.rank))
            and _handles(state.pid)
        ):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, STACKS_SIGNAL)
    finally:
        os.close(process)


def _has_mapped(pid: int, block: Path) -> bool:
    """Whether the process is this user's, and has the file in its memory."""
    wanted = os.fsencode(os.path.realpath(block)).replace(b"\n", rb"\012")
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        return any(
            line.endswith(b" " + wanted) for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        )
    except OSError:
        return False


def _handles(pid: int) -> bool:
    """Whether the process has a handler for the signal, which ends any other.

    Source: proc(5), /proc/PID/status, SigCgt.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; `None`: it is not running.

    Source: proc(5), /proc/PID/stat, field 22.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in b"ZX" else int(fields[19])


def leave(folder: Path) -> None:
    """Removes the directory, which only running ranks need."""
    for path in folder.glob("*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
