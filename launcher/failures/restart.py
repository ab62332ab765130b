"""Transient failures: which ones a restart may avoid, and how long to wait before it. Pure.

A rule of thumb that errs on the side of trying: failures of the machine or the network are transient,
mistakes in the program are not.
"""

from gpurun.launcher.errors import ParamsError
from gpurun.launcher.failures.root_cause import Failure

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

PERMANENT_ERRORS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "TabError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "UnboundLocalError",
        "AttributeError",
        "TypeError",
        "NotImplementedError",
        "FileNotFoundError",
        "IsADirectoryError",
        "NotADirectoryError",
        "PermissionError",
        "RecursionError",
    }
)
"""Exceptions about the program or its installation: the next attempt would raise them too."""

PERMANENT_CODES = frozenset({2, 126, 127})
"""Exit codes for a wrong command: usage, not executable, not found."""


def is_transient(failure: Failure) -> bool:
    """Whether another attempt may succeed.

    Yes: signals (SIGKILL, SIGSEGV, …), the kernel's OOM killer, lost connections, other exit codes and
    exceptions. No: mistakes in the job or the program, and a rank that itself ran out of memory.
    """
    if failure.kind == "user" or failure.error in PERMANENT_ERRORS:
        return False
    if failure.kind == "oom":
        return failure.error is None  # the kernel's OOM killer: another process may have taken the memory
    if failure.kind == "exit":
        return failure.code not in PERMANENT_CODES
    return True


def fails_everywhere(failure: Failure) -> bool:
    """Whether the mistake is in the program or the job, so that every rank and strategy fails alike.

    Other exceptions of a user's code may depend on where it runs, for example on the number of ranks.
    """
    return failure.error in PERMANENT_ERRORS or failure.error in ("UserError", ParamsError.__name__)


def pause_s(restart: int) -> float:
    """Seconds to wait before restart number `restart`, from 1: doubled each time, up to a limit."""
    return float(min(FIRST_PAUSE_S * 2 ** min(restart - 1, 20), LONGEST_PAUSE_S))
