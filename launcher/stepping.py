"""`gpurun.step()`: marks a step in a program whose loop has no optimizer; imports nothing heavy.

Outside of `gpurun` there is no observer, and the context manager does nothing.
"""

from types import TracebackType
from typing import Protocol


class StepObserver(Protocol):
    """The observer that a rank of `gpurun` attaches to its program."""

    def enter_step(self) -> None:
        """A step that the program marks begins."""

    def leave_step(self, completed: bool) -> None:
        """The step ends; not `completed` if an exception ends it."""


_observers: list[StepObserver] = []
"""The observers of this process: none, or the rank's own."""


def observe(observer: StepObserver) -> None:
    """Notifies `observer` of every step from now on, in place of another observer."""
    _observers[:] = [observer]


def stop_observing() -> None:
    """Removes the observer, as in a process that the program forks."""
    _observers.clear()


class step:  # noqa: N801 - reads as a function: `with gpurun.step():`
    """One step of a loop without an optimizer: `with gpurun.step(): …`.

    A program that uses it is timed by it alone: calls of its optimizers no longer count as steps.
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
