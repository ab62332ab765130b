"""Who works on a run directory: a claim that keeps a second command out, and that other terminals find."""

import contextlib
import fcntl
import os
import platform
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.rundir.control import start_ticks
from gpurun.launcher.rundir.files import RunDir, unwritable, write_json


@dataclass(frozen=True)
class Running:
    """`running.json`: there while a command works on the run, and stale where it was killed."""

    host: str
    boot_id: str
    pid: int
    """Of the command."""
    start_ticks: int
    """When that process began: its number alone may be another's by now."""
    launch: str | None = None
    """The attempt of a launch that runs now; `None` between two."""

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()

    @property
    def may_live(self) -> bool:
        """Whether it still runs, as far as can be seen from here: of other hosts nothing can."""
        if not self.is_here:
            return True
        return self.boot_id == boot_id() and start_ticks(self.pid) == self.start_ticks


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator[None]:
    """Keeps other commands away from the run directory until the block is left.

    Raises:
        SpecError: another one works on it.
        MachineError: the directory can't be written.
    """
    me = Running(platform.node(), boot_id(), os.getpid(), start_ticks(os.getpid()) or 0)
    create(run, me)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            run.running.unlink()


def create(run: RunDir, claim: Running) -> None:
    """Writes the claim if there is none that lives: of two commands, one can."""
    with _one_at_a_time(run.path):
        refuse_if_alive(run)
        try:
            run.running.unlink(missing_ok=True)  # of a command that was killed
            _create_whole(run.running, msgspec.json.encode(claim))
        except FileExistsError:
            raise SpecError(in_use(run.path, read(run))) from None
        except OSError as error:
            raise unwritable(run.running, error) from error


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keeps rivals on this host out: between a look at a stale claim and its removal one may put its own."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        with contextlib.suppress(OSError):  # network file systems lock no directories
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _create_whole(path: Path, content: bytes) -> None:
    """A file that nobody sees empty: a rival would take it for a stale one.

    Raises:
        FileExistsError: there is one.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.write_bytes(content)
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def refuse_if_alive(run: RunDir) -> None:
    """Passes if nobody works on the run.

    Raises:
        SpecError: somebody does.
    """
    found = read(run)
    if found is not None and found.may_live:
        raise SpecError(in_use(run.path, found))


def in_use(path: Path, found: Running | None) -> str:
    """What to say to somebody who wants a run directory that another command has."""
    who = f"process {found.pid} on {found.host}" if found else "another gpurun"
    text = f"{path} is in use by {who}; wait for it, stop it, or name another --out"
    if found is not None and not found.is_here:
        text += f"\n    if it doesn't run any more, remove {path / 'running.json'}"
    return text


def entered(run: RunDir, launch: str | None) -> None:
    """Says which launch runs now. A full disk costs nothing but `gpurun stacks`."""
    found = read(run)
    if found is not None:
        with contextlib.suppress(MachineError):
            write_json(run.running, replace(found, launch=launch))


def read(run: RunDir) -> Running | None:
    """The claim, whether it lives or not; `None`: there is none, or none that can be read."""
    try:
        return msgspec.json.decode(run.running.read_bytes(), type=Running)
    except (OSError, msgspec.MsgspecError):
        return None


def running_launch(run: RunDir) -> str:
    """The launch that runs now, on this machine.

    Raises:
        SpecError: nothing runs, or elsewhere.
    """
    found = read(run)
    if found is None or not found.may_live:
        raise SpecError(f"{run.path}: this run is not running; what it did say: gpurun logs {run.path}")
    if not found.is_here:
        raise SpecError(f"{run.path} runs on {found.host}: ask there")
    if found.launch is None:
        raise SpecError(f"{run.path}: no rank runs at this moment; try again")
    return found.launch


def boot_id() -> str:
    """Changes with every start of the machine, which counts processes anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
