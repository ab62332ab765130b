"""`gpurun.step()`: marks a step in a program whose loop has no optimizer; imports nothing heavy.

Outside of `gpurun` no observer is set, and the context manager does nothing.
"""

from types import TracebackType
from typing import Protocol


class StepObserver(Protocol):
    """What a rank of `gpurun` has listen to its program."""

    def enter_step(self) -> None:
        """A step that the program marks begins."""

    def leave_step(self, completed: bool) -> None:
        """It ends; not `completed` if by an exception."""


_observers: list[StepObserver] = []
"""Of this process: none, or the rank's own."""


def observe(observer: StepObserver) -> None:
    """Calls `observer` for every step from now on; replaces the previous one."""
    _observers[:] = [observer]


def stop_observing() -> None:
    """Removes the observer, as in a process that the program forks."""
    _observers.clear()


class step:  # noqa: N801 - reads as a function: `with gpurun.step():`
    """One step of a loop without an optimizer: `with gpurun.step(): …`.

    A program that uses it is timed by it alone: what its optimizers do no longer counts.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        for observer in _observers:
            observer.enter_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for observer in _observers:
            observer.leave_step(completed=error is None)
