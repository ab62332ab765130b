"""What only tables on request need of a trace: shapes, sizes of copies, waits for streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.kineto.classify import GpuKind
from gpurun.launcher.trace.kineto.events import NO_ARGUMENTS, Arguments, Event, Number, Text, whole

NO_SHAPES = -1


class DetailedArguments(Arguments, gc=False, frozen=True, rename={
    "num_bytes": "bytes",
    "waits_for_stream": "wait_on_stream",
    "waits_for_record": "wait_on_cuda_event_record_corr_id",
}):  # fmt: skip
    """The arguments that tables on request read in addition."""

    num_bytes: Number = None
    waits_for_stream: Text = None
    waits_for_record: Number = None


class DetailedEvent(Event, gc=False, frozen=True):
    """An event with these arguments."""

    args: DetailedArguments | None = None


@dataclass(frozen=True)
class OpArguments:
    """The arguments of an operator, as JSON: equal for calls with equal shapes."""

    dims: bytes
    types: bytes
    inputs: bytes
    """Values of those that aren't tensors."""


@dataclass(frozen=True)
class GpuWait:
    """The GPU's own record of a wait: by the host for the GPU, or by a stream for another one."""

    name: str
    """`Stream Sync`, `Event Sync`, `Context Sync` or `Stream Wait Event`."""
    correlation: int
    """That of the call."""
    stream: str
    """The stream that waits; of `Stream Sync`, the one that is waited for."""
    waits_for_stream: str | None
    waits_for_record: int | None
    """Correlation of the call that recorded the event."""


@dataclass(frozen=True, eq=False)
class Details:
    """What the file says beyond the columns."""

    op_arguments: tuple[OpArguments, ...]
    """Each kind of call once."""
    of_op: NDArray[np.int32]
    """By position in `trace.ops`: the number of its arguments; −1: none."""
    waits: tuple[GpuWait, ...]
    copy_bytes: dict[int, int]
    """By position in `trace.gpu`."""


@dataclass
class DetailsReader:
    """Collects them while a file is read."""

    arguments: dict[tuple[bytes, bytes, bytes], int] = field(default_factory=dict)
    of_op: list[NDArray[np.int32]] = field(default_factory=list)
    waits: list[GpuWait] = field(default_factory=list)
    copy_bytes: dict[int, int] = field(default_factory=dict)

    def add_gpu(self, first: int, arguments: Sequence[Any], kinds: NDArray[np.int8]) -> None:
        """Adds GPU work; `first` is the position of the first piece."""
        for i in np.flatnonzero(kinds >= GpuKind.MEMCPY).tolist():
            size = whole(getattr(arguments[i], "num_bytes", None))
            if size is not None and size >= 0:
                self.copy_bytes[first + i] = size

    def add_ops(self, events: Sequence[Event]) -> None:
        """Adds operators, in the order in which they get into their column."""
        numbers = [self._number(event.args or NO_ARGUMENTS) for event in events]
        self.of_op.append(np.array(numbers, dtype=np.int32))

    def _number(self, args: Arguments) -> int:
        dims = bytes(args.dims)
        if not dims:
            return NO_SHAPES
        key = (dims, bytes(args.types), bytes(args.inputs))
        return self.arguments.setdefault(key, len(self.arguments))

    def add_waits(self, events: Sequence[Event]) -> None:
        """Adds events of the category `cuda_sync`."""
        for event in events:
            args = event.args
            correlation = whole(args.correlation) if isinstance(args, DetailedArguments) else None
            if not isinstance(args, DetailedArguments) or correlation is None:
                continue
            other = args.waits_for_stream
            self.waits.append(
                GpuWait(
                    event.name or "",
                    correlation,
                    str(event.tid if args.stream is None else args.stream),
                    None if other is None else str(other),
                    whole(args.waits_for_record),
                )
            )

    def done(self) -> Details:
        return Details(
            tuple(OpArguments(*key) for key in self.arguments),
            np.concatenate(self.of_op) if self.of_op else np.empty(0, dtype=np.int32),
            tuple(self.waits),
            self.copy_bytes,
        )


def decoded(raw: bytes) -> list[Any]:
    """A list that was kept as JSON; empty where it isn't one."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return []
    return found if isinstance(found, list) else []
