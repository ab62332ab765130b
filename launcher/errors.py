"""The errors that users and machines cause, with the exit code of the command.

A message says what happened, where, and what to do next. Anything that is not a `GpurunError` is a bug in
gpurun and keeps its traceback.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TRACEBACK = "Traceback (most recent call last)"
"""The first line of a Python traceback."""


class GpurunError(Exception):
    """An error that is not a bug in gpurun; the command prints the message and exits with `exit_code`."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One mistake in a job file. Lines and columns count from 1; `file` is empty if it is in none."""

    message: str
    hint: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None
    path: tuple[str | int, ...] | None = field(default=None, compare=False, repr=False)
    """Which value of the job it is about, where it is about one."""

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        text = f"{place}: {self.message}" if place else self.message
        return f"{text}\n    {self.hint}" if self.hint else text


class ProblemsError(GpurunError):
    """Has all mistakes that were found, not only the first."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem(p) if isinstance(p, str) else p for p in problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class SpecError(ProblemsError):
    """The job file or the command line is wrong."""

    exit_code = 2


class ParamsError(SpecError):
    """A workload doesn't take these params: the job is wrong, and not the workload."""


class MachineError(ProblemsError):
    """This machine lacks what the job needs: devices, memory, a writable directory, disk space."""

    exit_code = 3


class VariantError(GpurunError):
    """A variant failed, timed out or hung; what was measured before is kept."""

    exit_code = 4


class StepsError(VariantError):
    """No step was timed of a program that ended well, where one is required."""


class NodesError(GpurunError):
    """A node of the job, or the connection to it, is lost; what was measured before is kept."""

    exit_code = 4


class NodesEnded(NodesError):
    """The end of the run was announced to all nodes; `exit_code` is the same on each."""

    def __init__(
        self, text: str, exit_code: int, unread: Sequence[object] = (), starts_again: bool = False
    ) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.starts_again = starts_again
        """Whether all nodes join again, since one of them is replaced."""
        self.unread = unread
        """Messages that came before the announcement."""


class GateError(GpurunError):
    """A `--fail-slower` gate tripped."""

    exit_code = 5


class UndecidedError(GpurunError):
    """A `--fail-slower` gate could not be decided, so it doesn't pass."""

    exit_code = 6


CTRL_C = "Ctrl-C"


class Interrupted(GpurunError):
    """Ctrl-C or SIGTERM ended the command; of a run, what was measured before is kept."""

    exit_code = 130

    def __init__(self, cause: str = CTRL_C, kept: bool = False) -> None:
        self.cause = cause
        super().__init__(f"interrupted by {cause}{'; what was measured before is kept' if kept else ''}")


class TraceError(GpurunError):
    """A trace can't be read, or no path holds one. The message names the file and, if it can, the byte."""

    exit_code = 2


_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "your quota is used up; free some space",
    errno.EFBIG: "`ulimit -f` or the file system allows no larger file",
    errno.EROFS: "write to another file system",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "you have no write permission there"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a part of that path is not a directory"),
    errno.EISDIR: "there is a directory with that name",
    errno.ENAMETOOLONG: "choose a shorter name",
}
"""The advice about an error, or what the system's short message means here."""


def unwritable(path: Path, error: OSError) -> MachineError:
    """The error for a full disk or a directory that can't be written."""
    remedy = _misplaced(path, error.errno) or _REMEDIES.get(error.errno or 0)
    return MachineError(f"can't write {path}: {error.strerror}" + (f"; {remedy}" if remedy else ""))


def _misplaced(path: Path, number: int | None) -> str | None:
    """The meaning of the system's message about a place that is a dead link, or takes no files."""
    if number not in (errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
        return None
    links = (each for each in (path, *path.parents) if each.is_symlink() and not each.exists())
    if link := next(links, None):
        return f"the link {link} leads to {link.readlink()}, which is not there"
    takes_none = number == errno.ENOENT and path.parent.is_dir()
    return f"no files can be made in {path.parent}" if takes_none else None


def unreadable(path: Path | str, error: OSError) -> str:
    """The message about a file or a directory that can't be read."""
    is_denied = isinstance(error, PermissionError)
    return f"can't read {path}: {error.strerror}" + ("; ask its owner for a copy" if is_denied else "")


def no_directory(path: Path) -> str:
    """The message about a file whose directory is missing."""
    return f"there is no directory {path}; create it"
