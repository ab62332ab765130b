"""Mistakes in a user's workload, with file, line, what was expected and what came instead."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gpurun.launcher.errors import ParamsError, VariantError
from gpurun.launcher.inspect.stacks import is_users
from gpurun.launcher.worker.base.failure import is_out_of_memory, text_of


@dataclass(frozen=True)
class SourceLine:
    """A line of a user's file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class UserError(VariantError):
    """The workload is wrong, and its author can fix it."""

    def __init__(
        self, what: str, *, expected: str, got: str, place: SourceLine | None, frames: str = ""
    ) -> None:
        self.place, self.expected, self.got = place, expected, got
        where = f"{place}: " if place else ""
        text = f"{where}{what}\n    expected: {expected}\n    got:      {got}"
        super().__init__(f"{text}\n{frames}".rstrip())


def place_of(*objects: Any) -> SourceLine | None:
    """Where the first of the objects that is the user's own is defined: a function, class or instance."""
    for obj in objects:
        place = definition(obj)
        if place and is_users(place.file):
            return place
    return next((place for obj in objects if (place := definition(obj))), None)


def definition(obj: Any) -> SourceLine | None:
    """Where a function or class (or the class of an instance) is written down; `None` for built-in ones."""
    obj = inspect.unwrap(obj) if callable(obj) else obj
    obj = getattr(obj, "func", obj)  # functools.partial
    if not (inspect.isclass(obj) or inspect.isroutine(obj)):
        obj = type(obj)
    try:
        file = inspect.getsourcefile(obj)
        if file and hasattr(obj, "__code__"):  # asked for at every batch: without reading the file
            return SourceLine(file, obj.__code__.co_firstlineno)
        return SourceLine(file, inspect.getsourcelines(obj)[1]) if file else None
    except (OSError, TypeError):
        return None


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an error's traceback that lie in the user's files, outermost first."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]


def from_exception(error: BaseException, what: str, expected: str, fallback: SourceLine | None) -> UserError:
    """An exception in a user's code as a `UserError`, with the traceback reduced to their frames."""
    frames = user_frames(error)
    place = SourceLine(frames[-1].filename, frames[-1].lineno or 0) if frames else fallback
    if isinstance(error, SyntaxError) and error.filename:
        place = SourceLine(error.filename, error.lineno or 0)
    got = f"{type(error).__name__}: {text_of(error)}"
    return UserError(
        what, expected=expected, got=got, place=place, frames="".join(traceback.format_list(frames))
    )


@contextmanager
def users_code(
    what: str, expected: str, fallback: SourceLine | Callable[[], SourceLine | None] | None
) -> Iterator[None]:
    """Turns any exception of the code within into a `UserError`, except running out of memory.

    Args:
        what: what went wrong, if anything does.
        expected: what the code should have given.
        fallback: where to look if the traceback doesn't say; a function is called only then.
    """
    try:
        yield
    except (UserError, ParamsError):
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        place = fallback() if callable(fallback) else fallback
        raise from_exception(error, what, expected, place) from error
