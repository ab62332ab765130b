"""Handles Ctrl-C while there is nothing to clean up.

Python's KeyboardInterrupt ends in a traceback while modules are imported or the interpreter shuts down, which
is most of the time of a short command; in a callback it is printed and ignored.
"""

import _signal  # type: ignore[import-not-found]  # `signal` imports enum: milliseconds for Ctrl-C to hit
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_CODE = 130
"""128 + SIGINT, as shells count."""


def quit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, with exit code 130 and without a message."""
    _answer_by(_quit)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, so that `finally` blocks run."""
    _answer_by(_signal.default_int_handler)


def _answer_by(handler: "Callable[..., object]") -> None:
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:  # under `nohup` and `&` it stays ignored
        _signal.signal(_signal.SIGINT, handler)


def _quit(number: int, frame: object) -> None:
    os._exit(EXIT_CODE)
