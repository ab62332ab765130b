"""What Ctrl-C does where nothing has to be put in order first.

Python's own answer, KeyboardInterrupt, comes with a traceback while modules are imported or the interpreter
shuts down, and where it hits a callback it is printed and forgotten. Both take a good part of a short command.
"""

import os
import signal
from types import FrameType

EXIT_CODE = 130
"""128 + SIGINT, as shells count."""


def quit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process on the spot, with 130 and without a word."""
    _answer_by(_quit)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, so that `finally` is honoured."""
    _answer_by(signal.default_int_handler)


def _answer_by(handler: "signal._HANDLER") -> None:
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # `nohup` and `&` ignore it: it stays so
        signal.signal(signal.SIGINT, handler)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)
