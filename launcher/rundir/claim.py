"""Which command works on a run directory: a claim that keeps a second command out."""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.errors import MachineError, SpecError, unwritable
from gpurun.launcher.machine.process_tree import start_ticks
from gpurun.launcher.rundir.files import RunDir, newest_name, write_bytes, write_json
from gpurun.launcher.rundir.paths import IMPROVEMENT, LATEST, PLAN, bytes_below

_WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of file systems without hard links: exFAT, many in user space."""


@dataclass(frozen=True)
class Running:
    """`running.json`: exists while a command works on the run; stale if the command was killed."""

    host: str
    boot_id: str
    pid: int
    """The process of the command."""
    start_ticks: int
    """When that process began: its number may have been reused since."""
    pid_namespace: int = 0
    """The namespace in which `pid` counts: containers may share host name and boot. 0 in older claims."""
    launch: str | None = None
    """The attempt of a launch that runs now; `None` between two attempts."""

    @property
    def is_here(self) -> bool:
        """Whether its process can be seen from here."""
        return self.host == platform.node() and self.pid_namespace in (0, pid_namespace())

    @property
    def may_live(self) -> bool:
        """Whether the command may still be running; on another host it can't be checked."""
        if not self.is_here:
            return True
        return self.boot_id == boot_id() and start_ticks(self.pid) == self.start_ticks


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator[None]:
    """Keeps other commands away from the run directory until the block is left.

    Raises:
        SpecError: another command works on it.
        MachineError: the directory can't be written.
    """
    pid = os.getpid()
    me = Running(platform.node(), boot_id(), pid, start_ticks(pid) or 0, pid_namespace())
    create(run, me)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            run.running.unlink()


def create(run: RunDir, claim: Running) -> None:
    """Writes the claim if there is no live one: of two commands, only one succeeds."""
    with _one_at_a_time(run.path):
        refuse_if_alive(run)
        try:
            run.running.unlink(missing_ok=True)  # of a command that was killed
            create_whole(run.running, msgspec.json.encode(claim))
        except FileExistsError:
            raise SpecError(in_use(run.path, read(run))) from None
        except OSError as error:
            raise unwritable(run.running, error) from error


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Locks out other commands on this host, which may write a claim while a stale one is being replaced."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise unwritable(directory, error) from error
    try:
        with contextlib.suppress(OSError):  # network file systems can't lock directories
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def create_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Creates a file that is never seen empty, as another command might read it, where there are hard links.

    Args:
        mode: its permissions, less those that the umask takes.

    Raises:
        FileExistsError: it exists.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_new(draft, content, mode)
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        _write_new(path, content, mode)
    finally:
        draft.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(content)


def refuse_if_alive(run: RunDir, is_new: bool = False) -> None:
    """Returns if no command works on the run.

    Args:
        is_new: whether the user may name another directory for this one.

    Raises:
        SpecError: one does.
    """
    if (found := live_claim(run)) is not None:
        raise SpecError(in_use(run.path, found, is_new))


def in_use(path: Path, found: Running | None, is_new: bool = False) -> str:
    """The message for a run directory that another command works on."""
    who = f"process {found.pid} on {found.host}" if found else "another gpurun"
    ways = "stop it, or name another --out" if is_new else "or stop it"
    text = f"{path} is in use by {who}; wait for it, {ways}"
    if found is not None and not found.is_here:
        text += f"\n    if that is no longer running, remove {path / 'running.json'}"
    return text


def progress_of(run: RunDir) -> Mapping[str, Any] | None:
    """The case of the next step that a command works on the run now, and its figures; `None`: none does."""
    if (found := live_claim(run)) is None:
        return None
    case = "in-progress" if found.is_here else "may-be-in-progress"
    return {"case": case, "pid": found.pid, "place": found.host}


def entered(run: RunDir, launch: str | None) -> None:
    """Records which launch runs now. A full disk costs nothing but `gpurun stacks`."""
    found = read(run)
    if found is not None:
        with contextlib.suppress(MachineError):
            write_json(run.running, replace(found, launch=launch))


def read(run: RunDir) -> Running | None:
    """The claim, live or stale; `None`: there is none, or it can't be read."""
    try:
        return run.read(run.running, Running)
    except MachineError:
        return None


def live_claim(run: RunDir) -> Running | None:
    """The claim of a command that may still be running."""
    found = read(run)
    return found if found is not None and found.may_live else None


def running_launch(run: RunDir) -> str:
    """The launch that runs now, on this machine.

    Raises:
        SpecError: nothing runs, or it runs on another host.
    """
    if (found := live_claim(run)) is None:
        raise SpecError(f"{run.path}: this run is not in progress; for its output: gpurun logs {run.path}")
    if not found.is_here:
        where = "in another container" if found.host == platform.node() else f"on {found.host}"
        raise SpecError(f"{run.path} is running {where}: run this command there")
    if found.launch is None:
        raise SpecError(f"{run.path}: no rank is running right now; try again")
    return found.launch


def pid_namespace() -> int:
    """Number of the namespace in which this process's id counts."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def boot_id() -> str:
    """Changes with every boot of the machine, after which process numbers start again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def delete(directory: Path) -> int:
    """Deletes the directory of a run, or of a search with its runs, and returns its size in bytes.

    Raises:
        SpecError: a command works on it.
        MachineError: it can't be deleted.
    """
    size = bytes_below(directory)
    for plan in directory.glob(f"*/{PLAN}"):
        refuse_if_alive(RunDir(plan.parent))
    with claimed(RunDir(directory)):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise MachineError(f"can't delete {error.filename or directory}: {error.strerror}") from error
    name_latest(directory.parent, directory.name)
    return size


def name_latest(directory: Path, deleted: str) -> None:
    """Lets `latest` name the newest run that is left, where it named the one that is deleted."""
    pointer = directory / LATEST
    if newest_name(pointer) != deleted:
        return
    left = sorted(file.parent.name for name in (PLAN, IMPROVEMENT) for file in directory.glob(f"*/{name}"))
    try:
        if left:
            write_bytes(pointer, f"{left[-1]}\n".encode())
            return
        pointer.unlink()
        directory.rmdir()  # only if it is empty
    except OSError:
        return
