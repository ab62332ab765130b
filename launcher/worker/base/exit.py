"""How a rank ends: its exit code, its last line in the log, its flushed streams. Needs no torch."""

import contextlib
import os
import signal
import sys
from typing import NoReturn


def exit_code(end: SystemExit) -> int:
    """The exit code that Python itself would end with."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print_to_log(str(end.code))
    return 1


def print_to_log(text: str) -> None:
    """Writes a line to the log; where the disk is full, the exit code has to say it alone."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: user code has closed the stream
        sys.stderr.write(text + "\n")


def finish(code: int) -> NoReturn:
    """Ends the process without running destructors: gloo's threads abort in about one of nine runs.

    The streams are flushed here; files have been closed by their owners.

    Args:
        code: the exit code; negative: it ends by the signal of that number, as Python does by SIGINT.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            continue  # The disk may be full, or user code may have closed the stream.
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
