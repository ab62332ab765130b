"""A trace as columns: what the analysis needs, 20 to 40 bytes per event. Times are ns since its base.

Details are what only tables on request need: shapes, sizes of copies, waits for streams.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, starmap
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpurun.launcher.findings.finding import Finding
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind
from gpurun.launcher.trace.kineto.events import (
    NO_ARGUMENTS,
    Arguments,
    CommFacts,
    Number,
    Text,
    TraceEvent,
    whole,
)

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


class DetailedEvent(TraceEvent, gc=False, frozen=True):
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
    """Correlation of the call."""
    device: str
    """The device of both streams: each GPU of a process counts its own."""
    stream: str
    """The stream that waits; of `Stream Sync`, the one that is waited for."""
    waits_for_stream: str | None
    waits_for_record: int | None
    """Correlation of the call that recorded the event."""


@dataclass(frozen=True, eq=False)
class Details:
    """The file's content beyond the columns."""

    op_arguments: tuple[OpArguments, ...]
    """Each kind of call once."""
    of_op: NDArray[np.int32]
    """The number of an op's arguments, by position in `trace.ops`; −1: none."""
    waits: tuple[GpuWait, ...]
    copy_bytes: dict[int, int]
    """The bytes by position in `trace.gpu`."""


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

    def add_ops(self, events: Sequence[TraceEvent]) -> None:
        """Adds operators, in the order in which they get into their column."""
        numbers = [self._number(event.args or NO_ARGUMENTS) for event in events]
        self.of_op.append(np.array(numbers, dtype=np.int32))

    def _number(self, args: Arguments) -> int:
        dims = bytes(args.dims)
        if not dims:
            return NO_SHAPES
        key = (dims, bytes(args.types), bytes(args.inputs))
        return self.arguments.setdefault(key, len(self.arguments))

    def add_waits(self, events: Sequence[TraceEvent]) -> None:
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
                    str(event.pid if args.device is None else args.device),
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


Int32 = NDArray[np.int32]
NO_NAME = 0


@dataclass(frozen=True, eq=False)
class Timed:
    """Timed events in file order: one entry per event in every array."""

    start: Int64
    duration: Int64

    @property
    def end(self) -> Int64:
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def covered(self) -> Intervals:
        """The moments in which any of them was running."""
        return union(self.start, self.end)


@dataclass(frozen=True, eq=False)
class Spans(Timed):
    """Timed events with a name and a thread or stream."""

    name: Int32
    """Index into the table of names that the owner of this column keeps."""
    thread: Int32

    def where(self, chosen: NDArray[np.bool_]) -> Spans:
        """The chosen events."""
        return Spans(self.start[chosen], self.duration[chosen], self.name[chosen], self.thread[chosen])


@dataclass(frozen=True, eq=False)
class GpuWork(Spans):
    """Kernels, copies and memsets. `thread` is the number of the stream."""

    kind: NDArray[np.int8]
    """`GpuKind`."""
    correlation: Int64
    """Equal for the work and the call that launched it; −1: unknown."""
    node: Int64
    """Number of the node of the CUDA graph that replayed it; 0: none, or the trace doesn't say."""


@dataclass(frozen=True, eq=False)
class RuntimeCalls(Spans):
    """Calls of the CUDA or HIP API."""

    correlation: Int64
    kernel: Int32
    """Index into `Trace.launched_kernels`; 0: none, as always with CUDA."""


@dataclass(frozen=True)
class HostRange:
    """A range on the CPU that is more than an operator."""

    kind: HostKind
    name: str
    start: int
    end: int
    thread: int
    tensors: tuple[int, ...]
    """Bytes of each tensor (or list of tensors) argument, if the trace has their shapes."""
    facts: CommFacts | None = None
    """The facts of a call that issues a collective, if the trace has them."""

    @property
    def num_bytes(self) -> int | None:
        """The bytes of all tensors together."""
        return sum(self.tensors) or None


@dataclass(frozen=True, eq=False)
class Trace:
    """One trace file. Times are integer ns since `base_ns` (unix time if the file has that)."""

    base_ns: int
    zero_ns: int
    """Unix time of the file's `ts` 0."""
    header: dict[str, Any]
    gpu: GpuWork
    gpu_names: tuple[str, ...]
    comm_facts: dict[int, CommFacts]
    """The facts by position in `gpu`."""
    launches: RuntimeCalls
    launch_names: tuple[str, ...]
    launched_kernels: tuple[str, ...]
    """Names of kernels in the arguments of calls; the first is none."""
    ops: Spans
    op_names: tuple[str, ...]
    op_kinds: NDArray[np.int8]
    """`HostKind` by name of operator."""
    modules: Spans
    module_names: tuple[str, ...]
    ranges: tuple[HostRange, ...]
    skipped: tuple[Finding, ...]
    """Notes on events that were left out."""
    cut: int | None
    """The byte at which the file ends too early, if it does."""
    other_categories: frozenset[str | None]
    """Categories of events that are in no column."""
    annotations: Spans
    """Named ranges: `record_function`, `Optimizer.step#SGD.step`. They enclose work."""
    annotation_names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    """Process and thread as spelled in the file, by the numbers in `thread` of CPU events."""
    streams: tuple[tuple[str, str], ...]
    """Device and stream, by the numbers in `gpu.thread`; the process id replaces a missing device."""
    named_devices: frozenset[str]
    """Devices that GPU work names as its own."""
    details: Details | None = None
    """The file's further content, if it was asked for."""

    def of_kind(self, kind: HostKind) -> list[HostRange]:
        return [each for each in self.ranges if each.kind is kind]

    def union_of(self, kind: HostKind) -> Intervals:
        ranges = self.of_kind(kind)
        starts = np.array([each.start for each in ranges], dtype=np.int64)
        return union(starts, np.array([each.end for each in ranges], dtype=np.int64))


class Numbering(dict[Any, int]):
    """Numbers keys 0, 1, 2, … in order of first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class Threads(dict[tuple[Text, Text], int]):
    """Numbers pairs of process and thread, or device and stream; `7` and `"7"` are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.spelled = Numbering()

    def __missing__(self, key: tuple[Text, Text]) -> int:
        self[key] = number = self.spelled[str(key[0]), str(key[1])]
        return number


class NameTable(Numbering):
    """Numbers pairs of category and name, and classifies each pair once."""

    def __init__(self, classify: Callable[[str, str], int]) -> None:
        super().__init__()
        self.classify = classify
        self._kinds = array("b")

    @property
    def kinds(self) -> NDArray[np.int8]:
        """The class of each pair, by number."""
        self._kinds.extend(starmap(self.classify, islice(self, len(self._kinds), None)))
        return np.array(self._kinds, dtype=np.int8)

    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self)


class Columns:
    """Columns that grow in place: concatenating parts at the end would double the memory."""

    def __init__(self) -> None:
        self.columns: dict[str, array[int]] = {}

    def add(self, **columns: NDArray[Any]) -> None:
        for name, values in columns.items():
            if name not in self.columns:
                self.columns[name] = array(values.dtype.char if values.dtype != np.int64 else "q")
            self.columns[name].frombytes(np.ascontiguousarray(values).data.cast("B"))

    def done(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        """A whole column."""
        return np.frombuffer(self.columns[name], dtype=dtype) if name in self.columns else np.empty(0, dtype)
