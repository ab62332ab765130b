"""Ctrl-C, SIGTERM and a closed terminal as an exception, so that clean-up is ordinary `finally`."""

import contextlib
import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from types import FrameType

from gpurun.launcher.errors import CTRL_C, Interrupted

BURST_S = 0.5
"""A terminal repeats a key that is held down some 30 times per second."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def interruptible(kill_workers: Callable[[], None]) -> Iterator[None]:
    """Raises `Interrupted` in the main thread at the first signal.

    Ctrl-C during the clean-up kills the workers at once; the next signal ends the command like any other
    program, unless it comes within `BURST_S`, as from a key that is held down, also after the clean-up. Other
    signals don't hurry the clean-up: Slurm sends SIGTERM to all processes, and srun passes it on once more. A
    signal that was ignored (`nohup`) stays ignored. The terminal's settings are restored. SIGUSR1, which
    announces a preemption, ends nothing, as long as there is no one to pass it on to.
    """
    is_ending, killed_s = False, float("inf")

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending, killed_s
        if not is_ending:
            is_ending = True
            raise Interrupted(_name(number))
        if time.monotonic() > killed_s + BURST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif number == signal.SIGINT and killed_s == float("inf"):
            killed_s = time.monotonic()
            kill_workers()

    replaced = {
        number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN
    }
    with _terminal_kept(), forwarded(lambda number: None):
        for number in replaced:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            # Otherwise the key may be down still, and the last message is to come.
            if killed_s == float("inf"):
                for number, handler in replaced.items():
                    signal.signal(number, handler)


@contextlib.contextmanager
def forwarded(forward: Callable[[int], None], ends: bool = False) -> Iterator[None]:
    """Passes SIGUSR1, with which batch systems announce a preemption, to `forward`; it ends nothing.

    Args:
        ends: whether it ends the command as SIGTERM does, instead.
    """
    ending = signal.getsignal(signal.SIGTERM)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if ends and callable(ending):
            ending(number, frame)
        else:
            forward(number)

    previous = signal.signal(signal.SIGUSR1, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous)


@contextlib.contextmanager
def _terminal_kept() -> Iterator[None]:
    """Restores the terminal's settings, if there is a terminal."""
    fd = _terminal()
    state = termios.tcgetattr(fd) if fd is not None else None
    try:
        yield
    finally:
        if fd is not None and state is not None:
            with contextlib.suppress(termios.error):  # It may be closed: SIGHUP says so.
                termios.tcsetattr(fd, termios.TCSADRAIN, state)


def _terminal() -> int | None:
    """A terminal that this process may change: it must be in the foreground, or it would be stopped."""
    for stream in (sys.__stdin__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fd = stream.fileno()  # type: ignore[union-attr]  # None is met by AttributeError
            if is_in_foreground(fd):
                return fd
    return None


def is_in_foreground(fd: int) -> bool:
    """Whether it is a terminal at which this process is the one that reads."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def _name(number: int) -> str:
    return CTRL_C if number == signal.SIGINT else signal.Signals(number).name
