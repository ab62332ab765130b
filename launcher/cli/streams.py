"""The three standard streams, which may be closed (daemons, cron) or on a full disk."""

import codecs
import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from gpurun.launcher.errors import MachineError
from gpurun.launcher.logs.lines import clean

_PASSED = frozenset({"closed", "encoding", "errors", "fileno", "isatty", "name", "newlines"})
"""Attributes of the real stream that others may use: nothing that writes, such as `buffer`."""
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def prepare_streams() -> None:
    """Makes sure that all three exist, and that losing one causes no traceback. Call it first.

    Without output a command fails with a message; without progress and messages it continues.
    """
    fill_gaps()
    for stream in (sys.stdout, sys.stderr):
        show_everything(stream)
    sys.stdout = Cleaned(sys.stdout, is_needed=True)
    sys.stderr = Cleaned(sys.stderr, is_needed=False)


def fill_gaps() -> None:
    """Opens /dev/null in place of closed streams: else the next file or socket would get their number."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))


def show_everything(stream: Any) -> None:
    """Shows characters that the encoding lacks by their codes, and lets no byte pass as it is.

    ASCII becomes UTF-8 here, since click would otherwise write to the bytes below the stream.
    """
    if isinstance(stream, io.TextIOWrapper):
        encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else None
        stream.reconfigure(encoding=encoding, errors="backslashreplace")


class Watched:
    """A stream that switches to /dev/null once it can't be written, so that its last flush does not fail."""

    def __init__(self, stream: TextIO, is_needed: bool) -> None:
        self._stream = stream
        self._is_needed = is_needed
        self.is_reader_gone = False
        """Whether the reader has closed it, as in `gpurun report RUN | head -3`."""

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
        if name not in _PASSED:
            raise AttributeError(f"the output has no {name!r}: text is written by write() only")
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        """Ignores a full disk, and a reader that is gone: the command's results don't depend on them.

        Raises:
            MachineError: nothing can be written, and it is needed.
        """
        try:
            yield
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError) or error.errno == errno.EIO:  # the terminal is closed
                self.is_reader_gone = True
            elif self._is_needed:
                raise MachineError(f"can't write the output: {error.strerror}") from error


class Cleaned(Watched):
    """A stream whose text does nothing to the terminal but colour it, whatever file the text is from."""

    def __init__(self, stream: TextIO, is_needed: bool) -> None:
        super().__init__(stream, is_needed)
        self.unfiltered = Watched(stream, is_needed)
        """The stream for output that redraws a line of its own."""

    def write(self, text: str) -> int:
        super().write(clean(text))
        return len(text)


def is_reader_gone() -> bool:
    """Whether the reader of the output is gone: commands that write without end check this."""
    return isinstance(sys.stdout, Watched) and sys.stdout.is_reader_gone
