"""The command's three standard streams, which may be closed (daemons, cron) or lead to a full disk."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from gpurun.launcher.errors import MachineError

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def prepare_streams() -> None:
    """Makes sure that there are three, and that a loss of one is no traceback. The first thing to do.

    Without output a command has failed, and says so; without progress and messages it goes on.
    """
    fill_gaps()
    sys.stdout = Watched(sys.stdout, is_needed=True)
    sys.stderr = Watched(sys.stderr, is_needed=False)


def fill_gaps() -> None:
    """/dev/null in place of closed ones: the next file to be opened would get their number, a socket too."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))


class Watched:
    """A stream that goes to /dev/null once it can't be written, so that not even its last flush fails."""

    def __init__(self, stream: TextIO, is_needed: bool) -> None:
        self._stream = stream
        self._is_needed = is_needed
        self.is_reader_gone = False
        """Whether who read it has enough, as in `gpurun report RUN | head -3`."""

    def write(self, text: str) -> int:
        if text == "":  # by which click finds out what kind of stream it is, and passes over errors
            return 0
        with self._losses():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losses():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        """Passes over a full disk, and over a reader that went away: a command finds the same without it.

        Raises:
            MachineError: nothing can be written, and it is needed.
        """
        try:
            yield
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError):
                self.is_reader_gone = True
            elif self._is_needed:
                raise MachineError(f"can't write the output: {error.strerror}") from error


def is_reader_gone() -> bool:
    """Whether nobody reads our output any more: a command that would write for ever asks."""
    return isinstance(sys.stdout, Watched) and sys.stdout.is_reader_gone
