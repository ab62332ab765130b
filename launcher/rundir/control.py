"""Directories of a run that are opened once, since the run may be anyone's and may change meanwhile.

In one of them is what a rank and the command share: a few numbers in a file that is mapped into memory.

The rank writes its process id and counts its steps; the command rings a bell. Neither needs a system call, so
a rank can check the bell after every step. Readers of the file see what was last written: both use the same
page cache.
"""

import contextlib
import errno
import mmap
import os
import signal
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import SpecError, unwritable
from gpurun.launcher.machine.process_tree import has_signal, start_ticks
from gpurun.launcher.rundir.files import RunDir, replacing
from gpurun.launcher.rundir.paths import is_rank

_MAGIC = 0x6770_7572_756E_0001
"""`gpurun`, version 1: a file that is not complete yet has none."""
_LAYOUT = struct.Struct("=5Q")
_STEPS, _BELL = 3, 4
"""Positions in: magic, process id, start time of the process, steps, bell."""
STACKS_SIGNAL: int = signal.SIGRTMAX - 1
"""Makes a rank write the stacks of all its threads to a file, even while C code holds the GIL.

No signal that programs use: at SIGUSR2 many save and end, as `#SBATCH --signal=USR2` asks them to.
"""
DIRECTORY_MODE = 0o700
"""The mode of the directory with all blocks: a user with access could make the ranks write traces."""
NOT_STARTED = "no rank has started yet, or none can be observed, as its log says then; try again in a moment"
_ONLY_OWN = "gpurun stacks and gpurun capture work on your own runs only"
MAX_BYTES = 1 << 24
"""The most that is read of a file there, or of a rank's answer: 2,000 collectives are 1 MB."""


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

    def __init__(self, fd: int, create: bool = False) -> None:
        """Maps the open file, which the caller closes.

        Raises:
            OSError: it can't be mapped, or the disk is full.
        """
        if create:
            # A sparse file would end the rank with SIGBUS when the disk is full.
            os.posix_fallocate(fd, 0, _LAYOUT.size)
        elif os.fstat(fd).st_size < _LAYOUT.size:
            raise OSError(errno.EINVAL, "the control block is not complete")
        self._map = mmap.mmap(fd, _LAYOUT.size)
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

    @property
    def mapped_file(self) -> tuple[bytes, bytes] | None:
        """Device and inode, as the kernel lists them: stat(2) reports others on btrfs and overlays."""
        import ctypes

        byte = ctypes.c_char.from_buffer(self._map)
        start = b"%08x-" % ctypes.addressof(byte)
        del byte  # else the mapping could not be closed
        lines = Path("/proc/self/maps").read_bytes().splitlines()
        return next((_file_of(line) for line in lines if line.startswith(start)), None)

    def close(self) -> None:
        self._words.release()
        self._map.close()


_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def opened_in(run: RunDir, directory: Path) -> Iterator[int]:
    """A descriptor of a directory in a run, made if it is missing: no link leads there, at any time.

    Raises:
        OSError: something else is in its place, or another directory in that of the run that was checked.
    """
    if run.inode is None:
        os.makedirs(run.path, exist_ok=True)
    fd = os.open(run.path, _OPEN_DIRECTORY)
    try:
        status = os.fstat(fd)
        if run.inode not in (None, (status.st_dev, status.st_ino)):
            raise OSError(errno.ESTALE, "another directory was put in the place of the run", str(run.path))
        for part in directory.relative_to(run.path).parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=fd)
            below = os.open(part, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def write_in(run: RunDir, path: Path, content: bytes, is_asked: bool = True) -> None:
    """Replaces a file of a run in one step, through no link.

    Args:
        is_asked: what no one has asked for is written into no directory of another user.

    Raises:
        MachineError: it can't be written.
    """
    try:
        with opened_in(run, path.parent) as fd:
            if not is_asked and os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            with replacing(path.name, fd) as file:
                file.write(content)
    except OSError as error:
        raise unwritable(path, error) from error


def block_name(rank: int) -> str:
    return f"rank{rank}"


def stacks_name(rank: int) -> str:
    """The file to which the rank writes its stacks on request."""
    return f"rank{rank}.stacks"


def socket_name(rank: int) -> str:
    """The name of the socket at which torch answers requests for the rank's collectives."""
    return f"rank{rank}.sock"


def capture_name(number: int) -> str:
    """The file with a request of `gpurun capture`, which counts them from 1."""
    return f"capture{number}.json"


class ControlDir(AbstractContextManager["ControlDir"]):
    """The directory of all blocks of a launch, open.

    The run may be anyone's, and may change meanwhile. So everything in it is opened by way of this one
    descriptor and through no link, and has to be a file of the directory's owner that has no other name.
    """

    def __init__(self, directory: Path) -> None:
        """Opens the directory.

        Raises:
            OSError: it does not exist, or is a link.
        """
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        self._owner = status.st_uid
        self.is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == DIRECTORY_MODE
        """Whether only this user can have put anything there."""

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file; one that is created is for its owner alone.

        Raises:
            OSError: it can't be opened, or is no such file.
        """
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != self._owner:
            os.close(fd)
            raise OSError(errno.EINVAL, "not a file of its owner alone", name)
        return fd

    def read(self, name: str, start: int = 0) -> bytes:
        """A file from `start` on, at most `MAX_BYTES`; empty if there is no such file."""
        try:
            with os.fdopen(self.open(name), "rb") as file:
                file.seek(start)
                return file.read(MAX_BYTES)
        except OSError:
            return b""

    def num_bytes(self, name: str) -> int:
        """The size of a file; 0 if there is none."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size
        except OSError:
            return 0

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file in one step.

        Raises:
            OSError: it can't be written.
        """
        draft = f".{name}.{os.getpid()}"
        self.remove(draft)  # of a killed process with this number
        with os.fdopen(self.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
        os.replace(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Removes a file, if there is one."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)

    def block(self, rank: int, create: bool = False) -> ControlBlock:
        """A rank's block; `create` makes it, as the rank does at its start.

        Raises:
            OSError: it does not exist, or can't be written.
        """
        fd = self.open(block_name(rank), os.O_RDWR | (os.O_CREAT if create else 0))
        try:
            return ControlBlock(fd, create)
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def states(self) -> dict[int, RankState]:
        """The contents of all blocks, by rank, without blocks that are not complete yet."""
        numbers = [name.removeprefix("rank") for name in self.names() if name.startswith("rank")]
        ranks = sorted(int(number) for number in numbers if is_rank(number))
        return {rank: state for rank in ranks if (state := self._state(rank))}

    def running(self) -> dict[int, RankState]:
        """The contents of the blocks of ranks that still run."""
        return {rank: state for rank, state in self.states().items() if state.is_running}

    def _state(self, rank: int) -> RankState | None:
        try:
            magic, pid, start, steps, _ = _LAYOUT.unpack(self.read(block_name(rank)))
        except struct.error:
            return None
        return RankState(rank, pid, start, steps) if magic == _MAGIC else None

    def ask_for_stacks(self, state: RankState) -> None:
        """Sends a rank the signal that makes it write its stacks.

        The block may name any process. Only one that has this very block mapped and handles the signal gets
        it: no one can make another process look like that.
        """
        try:
            process = os.pidfd_open(state.pid)  # stays that process, even if its number is reused meanwhile
        except (OSError, OverflowError):
            return
        try:
            if (
                state.is_running
                and self._is_mapped_by(state)
                and has_signal(state.pid, "SigCgt", STACKS_SIGNAL)
            ):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(process, STACKS_SIGNAL)
        finally:
            os.close(process)

    def _is_mapped_by(self, state: RankState) -> bool:
        """Whether the process is this user's, and has the rank's block in its memory."""
        try:
            if os.stat(f"/proc/{state.pid}").st_uid != os.geteuid():
                return False
            block = self.block(state.rank)
            wanted = block.mapped_file
            block.close()
            maps = Path(f"/proc/{state.pid}/maps").read_bytes()
            return wanted is not None and wanted in map(_file_of, maps.splitlines())
        except OSError:
            return False


def _file_of(line: bytes) -> tuple[bytes, bytes]:
    """Device and inode of a mapping. Source: proc(5), /proc/PID/maps."""
    _, _, _, device, inode, *_ = line.split(maxsplit=5)
    return device, inode


def make_directory(directory: Path) -> None:
    """Creates the directory of all blocks, for its owner alone.

    Raises:
        OSError: it can't be made, or a link has its name.
    """
    directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    # exFAT has no permissions of files; whoever mounted it sets all.
    with ControlDir(directory) as control, contextlib.suppress(PermissionError):
        os.fchmod(control.fd, DIRECTORY_MODE)


def open_own(directory: Path) -> ControlDir:
    """The directory of blocks of a run that is in progress, for commands in another terminal.

    Raises:
        SpecError: there is none yet, or others than this user may have put something there.
    """
    try:
        control = ControlDir(directory)
    except FileNotFoundError:
        raise SpecError(f"{directory}: {NOT_STARTED}") from None
    except OSError as error:
        raise SpecError(f"can't open {directory}: {error.strerror}; {_ONLY_OWN}") from error
    if not control.is_private:
        control.__exit__()
        raise SpecError(f"{directory} is not yours alone (owner, mode 0700); {_ONLY_OWN}")
    return control


def read_states(directory: Path) -> Mapping[int, RankState]:
    """The contents of all blocks in a directory by rank; none before the first rank makes the directory."""
    try:
        with ControlDir(directory) as control:
            return control.states()
    except OSError:
        return {}


def leave(directory: Path) -> None:
    """Removes the directory, which only running ranks need."""
    with contextlib.suppress(OSError):
        with ControlDir(directory) as control:
            for name in control.names():
                control.remove(name)
        directory.rmdir()
