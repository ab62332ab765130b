"""What Ctrl-C does where nothing has to be put in order first.

Python's own answer, KeyboardInterrupt, ends in a traceback while modules are imported or the interpreter
shuts down, which is most of a short command; where it hits a callback, it is printed and forgotten.
"""

import _signal  # type: ignore[import-not-found]  # `signal` imports enum: milliseconds for Ctrl-C to hit
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_CODE = 130
"""128 + SIGINT, as shells count."""


def quit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process on the spot, with 130 and without a word."""
    _answer_by(_quit)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, so that `finally` is honoured."""
    _answer_by(_signal.default_int_handler)


def _answer_by(handler: "Callable[..., object]") -> None:
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:  # `nohup` and `&` ignore it: it stays so
        _signal.signal(_signal.SIGINT, handler)


def _quit(number: int, frame: object) -> None:
    os._exit(EXIT_CODE)
