"""Which failures may pass when the same is tried again, and how long to wait before: pure.

A rule of thumb that errs on the side of trying: what the machine or the network did may pass, what the
program's text says will happen again.
"""

from gpurun.launcher.errors import ParamsError
from gpurun.launcher.failures.root_cause import Failure

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

LASTING_ERRORS = frozenset(
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
"""Exceptions that tell of the program or its installation: the next attempt would raise them too."""

LASTING_CODES = frozenset({2, 126, 127})
"""By which programs and shells say that they were called wrongly: usage, not executable, not found."""


def is_transient(failure: Failure) -> bool:
    """Whether another attempt may succeed.

    Yes: signals (SIGKILL, SIGSEGV, …), the kernel's OOM killer, lost connections, other exit codes and
    exceptions. No: mistakes in the job or the program, and memory that a rank itself found to be too small.
    """
    if failure.kind == "user" or failure.error in LASTING_ERRORS:
        return False
    if failure.kind == "oom":
        return failure.error is None  # the kernel's: another process may have taken the memory
    if failure.kind == "exit":
        return failure.code not in LASTING_CODES
    return True


def fails_everywhere(failure: Failure) -> bool:
    """Whether the mistake is in the text of program or job, so that no other rank or strategy avoids it.

    Other exceptions of a user's code may depend on where it runs: on the number of ranks, say.
    """
    return failure.error in LASTING_ERRORS or failure.error in ("UserError", ParamsError.__name__)


def pause_s(restart: int) -> float:
    """Seconds to wait before restart number `restart`, which counts from 1: doubled each time."""
    return float(min(FIRST_PAUSE_S * 2 ** min(restart - 1, 20), LONGEST_PAUSE_S))
