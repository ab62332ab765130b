"""A rank's own report of why it failed, written while it still can.

Mistakes in a user's workload have file, line, what was expected and what came instead.
"""

import functools
import inspect
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from gpurun.launcher.errors import TRACEBACK, GpurunError, ParamsError, VariantError
from gpurun.launcher.inspect.stacks import is_users
from gpurun.launcher.machine.accelerators import ACCELERATORS
from gpurun.launcher.masking import hidden
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import FailureRecord
from gpurun.launcher.units import format_count

MAX_MESSAGE, MAX_TRACEBACK = 4_000, 16_000
"""Characters. An exception may quote a whole tensor or batch, which no one reads, and which takes minutes to
search for known words."""

T = TypeVar("T")
Kind = Literal["exception", "oom", "exit", "user"]

_OUT_OF_MEMORY = re.compile(
    "|".join(error for kind in ACCELERATORS.values() for error in kind.memory_errors), re.IGNORECASE
)

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was closed|was lost)|closed by (remote )?peer|reset by peer"
    r"|broken pipe|socket (closed|error|timeout)|no route to host|transport endpoint|gloo/transport"
    r"|ncclRemoteError|remote process exited|watchdog caught collective|NCCL timeout (in|when)\b"
    r"|timed ?out (waiting|after)|operation timed out|wait timeout|application timeout"
    r"|another rank|peer (rank|process)|failed to (recv|send), got \d+ bytes",
    re.IGNORECASE,
)
"""Words of gloo's and NCCL's transports and of torch's store when the other side is gone or never came.

Not `ncclSystemError`, which is a failed call of this rank's own.
Source: torch/csrc/distributed/c10d/NCCLUtils.cpp, `getNcclErrorDetailStr`.
"""


def record_failure(
    run: RunDir,
    launch: str,
    rank: int,
    variant: str | None,
    stage: str,
    error: BaseException,
) -> FailureRecord:
    """Writes why this rank failed, and returns it. Call it first: its time decides who failed first."""
    is_explained = isinstance(error, GpurunError) and error.__cause__ is not None
    record = FailureRecord(
        time_ns=time.time_ns(),
        rank=rank,
        variant=variant,
        stage=stage,
        kind=kind_of(error),
        type=encodable(type(error.__cause__ if is_explained else error).__name__),
        message=shortened(hidden(message_of(error), os.environ.items()), MAX_MESSAGE),
        # The message of a user's mistake has the place; our own frames would only hide it.
        traceback=""
        if is_explained_to_user(error)
        else shortened(hidden(traceback_of(error), os.environ.items()), MAX_TRACEBACK),
        secondary=is_secondary(error),
    )
    write_json(run.failure(launch, rank), record)
    return record


def is_explained_to_user(error: BaseException) -> bool:
    """Whether the message is ours and meant for users, such as that no split fits in memory."""
    return isinstance(error, GpurunError) or isinstance(error.__cause__, GpurunError)


def kind_of(error: BaseException) -> Kind:
    """The kind of the failure; out of memory is a kind of its own, wherever it was raised."""
    if is_out_of_memory(error):
        return "oom"
    if isinstance(error, SystemExit):
        return "exit"
    return "user" if isinstance(error, GpurunError) else "exception"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out.

    Only `RuntimeError` and `OSError` are judged by their message: a user's own exception may say anything.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_MEMORY.search(text_of(error)))


def if_it_fits(compute: Callable[[], T]) -> T | None:
    """The result of `compute`, or `None` where memory runs out on the way."""
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None  # after the handler: until then the traceback holds the tensors that filled the memory


def is_secondary(error: BaseException) -> bool:
    """Whether this rank only noticed that another one was gone, or never joined."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError):
        return True
    if isinstance(error, ConnectionError):
        return in_torch(error)
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(text_of(error)))


def in_torch(error: BaseException) -> bool:
    """Whether torch.distributed raised it: a user's own broken connection is a cause, not a consequence."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/torch/distributed/" in frames[-1].filename.replace("\\", "/")


def message_of(error: BaseException) -> str:
    """The exception's message."""
    if isinstance(error, SystemExit):
        code = error.code if error.code is not None else 0
        return f"exit code {code & 0xFF}" if isinstance(code, int) else text_of(code)
    return text_of(error)


def text_of(value: object) -> str:
    """`str` of an object of the user's, which may raise, as text that can be written."""
    try:
        return encodable(str(value))
    except Exception as error:
        return f"({type(value).__name__}'s __str__ raised {encodable(type(error).__name__)})"


def traceback_of(error: BaseException) -> str:
    """The traceback as Python would print it, as far as its exceptions have a message."""
    try:
        return encodable("".join(traceback.format_exception(error)))
    except Exception:
        frames = "".join(traceback.format_tb(error.__traceback__))
        return encodable(f"{TRACEBACK}:\n{frames}{type(error).__name__}\n")


def shortened(text: str, most: int) -> str:
    """A text of at most about so many characters: its beginning and its end. The rank's log has all of it."""
    if len(text) <= most:
        return text
    left_out = format_count(len(text) - most)
    return f"{text[: most // 2]}\n… {left_out} characters are left out …\n{text[-most // 2 :]}"


def encodable(text: str) -> str:
    """Plain text: no subclass of `str`, as torch's DataLoader has them, and no half of a surrogate pair."""
    return str.encode(text, "utf-8", "backslashreplace").decode()


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


def place_of(*objects: Any, users_only: bool = False) -> SourceLine | None:
    """The place at which the first of the objects that is the user's own is defined.

    Where none is, the first one's place or, with `users_only`, nothing: a line of torch's may help no one.
    """
    for obj in objects:
        place = definition(obj)
        if place and is_users(place.file):
            return place
    return None if users_only else next((place for obj in objects if (place := definition(obj))), None)


def definition(obj: Any) -> SourceLine | None:
    """The place of a function or class (or the class of an instance); `None` for built-in ones."""
    obj = inspect.unwrap(obj) if callable(obj) else obj
    obj = getattr(obj, "func", obj)  # functools.partial
    if not (inspect.isclass(obj) or inspect.isroutine(obj)):
        obj = type(obj)
    try:
        file = inspect.getsourcefile(obj)
        if file and hasattr(obj, "__code__"):  # asked for at every batch: without reading the file
            return SourceLine(file, obj.__code__.co_firstlineno)
        return SourceLine(file, _first_line(obj)) if file else None
    except (OSError, TypeError):
        return None


@functools.cache
def _first_line(cls: type) -> int:
    """The line at which a class begins; to find it takes reading the whole file."""
    return inspect.getsourcelines(cls)[1]


def from_exception(error: BaseException, what: str, expected: str, fallback: SourceLine | None) -> UserError:
    """An exception in a user's code as a `UserError`, with the traceback reduced to their frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
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
