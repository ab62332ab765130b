"""Reads a trace file into columns."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from launcher.trace.blocks import Skipped, TraceFile
from launcher.trace.classify import (
    GPU_CATEGORIES,
    LAUNCH_CATEGORIES,
    MODULE_PREFIX,
    OP_CATEGORIES,
    PYTHON_CATEGORIES,
    GpuKind,
    HostKind,
    collective_kind,
    dtype_bytes,
    gpu_kind,
    host_kind,
)
from launcher.trace.columns import CommFacts, GpuWork, HostRange, Int32, Launches, Spans, Trace
from launcher.trace.events import (
    MAX_NS,
    NO_ARGUMENTS,
    Arguments,
    Event,
    Text,
    bounded,
    needs_text,
    time_texts,
    to_ns,
)
from launcher.trace.intervals import Int64
from launcher.trace.source import open_source

MAX_BYTES = 1 << 53
"""No collective moves more; what claims to is damaged."""

Times = dict[int, tuple[int | None, int | None]]


class Numbering(dict[Any, int]):
    """Numbers what it is asked for: 0, 1, 2, … in the order of first sight."""

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


class Names(dict[tuple[str, str | None], int]):
    """Numbers pairs of category and name, and classifies each pair once."""

    def __init__(self, classify: Callable[[str, str], int]) -> None:
        super().__init__()
        self.classify = classify
        self.kinds: list[int] = []

    def __missing__(self, key: tuple[str, str | None]) -> int:
        self[key] = number = len(self)
        self.kinds.append(self.classify(key[0], key[1] or ""))
        return number

    def names(self) -> tuple[str, ...]:
        return tuple(name or "" for _, name in self)


class Columns:
    """Columns that grow block by block, in place: to join parts at the end would take the memory twice."""

    def __init__(self) -> None:
        self.columns: dict[str, array[int]] = {}

    def add(self, **columns: NDArray[Any]) -> None:
        for name, values in columns.items():
            if name not in self.columns:
                self.columns[name] = array(values.dtype.char if values.dtype != np.int64 else "q")
            self.columns[name].frombytes(np.ascontiguousarray(values).data.cast("B"))

    def done(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        """All of a column."""
        return np.frombuffer(self.columns[name], dtype=dtype) if name in self.columns else np.empty(0, dtype)


@dataclass
class Reader:
    """Sorts the events of one file into columns."""

    base_us: int | None = None
    gpu: Columns = field(default_factory=Columns)
    launches: Columns = field(default_factory=Columns)
    ops: Columns = field(default_factory=Columns)
    modules: Columns = field(default_factory=Columns)
    annotations: Columns = field(default_factory=Columns)
    ranges: list[HostRange] = field(default_factory=list)
    comm_facts: dict[int, CommFacts] = field(default_factory=dict)
    gpu_names: Names = field(default_factory=lambda: Names(gpu_kind))
    launch_names: Numbering = field(default_factory=Numbering)
    op_names: Names = field(default_factory=lambda: Names(host_kind))
    module_names: Numbering = field(default_factory=Numbering)
    annotation_names: Numbering = field(default_factory=Numbering)
    threads: Threads = field(default_factory=Threads)
    streams: Threads = field(default_factory=Threads)
    num_gpu: int = 0
    negative: int = 0

    def add(self, events: Sequence[Event], block: bytes) -> None:
        """Takes what the analysis needs from a block of events."""
        groups: defaultdict[str | None, list[Event]] = defaultdict(list)
        for event in events:
            if event.ph == "X" and event.ts is not None and event.name is not None:
                groups[event.cat].append(event)
        if self.base_us is None:
            self.base_us = next((int(group[0].ts or 0) for group in groups.values()), None)
        times_us = [event.ts for event in events if event.ts is not None]
        times = self._texts(events, block) if needs_text(times_us) else None
        for category, group in groups.items():
            self._add_group(category, group, times)

    def _add_group(self, category: str | None, events: list[Event], times: Times | None) -> None:
        if category in GPU_CATEGORIES:
            self._add_gpu(category, *self._timed(events, times))
        elif category in LAUNCH_CATEGORIES:
            self._add_launches(*self._timed(events, times))
        elif category in OP_CATEGORIES:
            self._add_ops(category, *self._timed(events, times))
        elif category in PYTHON_CATEGORIES:
            modules = [event for event in events if (event.name or "").startswith(MODULE_PREFIX)]
            self._add_modules(*self._timed(modules, times))

    def _texts(self, events: Sequence[Event], block: bytes) -> Times:
        return {id(event): times for event, times in zip(events, time_texts(block), strict=True)}

    def _timed(self, events: list[Event], texts: Times | None) -> tuple[list[Event], Int64, Int64]:
        """Events with start and duration in ns, without those that end before they start or out of range."""
        base_us = self.base_us or 0
        if texts is None:
            start = to_ns([event.ts or 0 for event in events], base_us)
            duration = to_ns([event.dur or 0 for event in events], 0)
        else:
            pairs = [texts[id(event)] for event in events]
            start = bounded([(ts or 0) - base_us * 1000 for ts, _ in pairs])
            duration = bounded([dur or 0 for _, dur in pairs])
        good = (duration >= 0) & (np.abs(start) < MAX_NS // 4) & (duration < MAX_NS // 4)
        if good.all():
            return events, start, duration
        self.negative += int(len(good) - good.sum())
        kept = [event for event, is_good in zip(events, good.tolist(), strict=True) if is_good]
        return kept, start[good], duration[good]

    def _threads(self, events: Iterable[Event]) -> NDArray[np.int32]:
        threads = self.threads
        return np.array([threads[event.pid, event.tid] for event in events], dtype=np.int32)

    def _add_gpu(self, category: str, events: list[Event], start: Int64, duration: Int64) -> None:
        names = [self.gpu_names[category, event.name] for event in events]
        kinds = self.gpu_names.kinds
        arguments = [event.args or NO_ARGUMENTS for event in events]
        streams = [
            self.streams[event.pid if args.device is None else args.device, _stream(event, args)]
            for event, args in zip(events, arguments, strict=True)
        ]
        for position, (name, args) in enumerate(zip(names, arguments, strict=True)):
            if kinds[name] is GpuKind.COMM:
                self.comm_facts[self.num_gpu + position] = _comm_facts(events[position].name or "", args)
        self.num_gpu += len(events)
        self.gpu.add(
            start=start,
            duration=duration,
            name=np.array(names, dtype=np.int32),
            kind=np.array([kinds[name] for name in names], dtype=np.int8),
            stream=np.array(streams, dtype=np.int32),
            correlation=_correlations(arguments),
        )

    def _add_launches(self, events: list[Event], start: Int64, duration: Int64) -> None:
        self.launches.add(
            start=start,
            duration=duration,
            name=np.array([self.launch_names[event.name] for event in events], dtype=np.int32),
            thread=self._threads(events),
            correlation=_correlations([event.args or NO_ARGUMENTS for event in events]),
        )

    def _add_ops(self, category: str, events: list[Event], start: Int64, duration: Int64) -> None:
        names = np.array([self.op_names[category, event.name] for event in events], dtype=np.int32)
        kinds = np.array(self.op_names.kinds, dtype=np.int8)[names]
        threads = self._threads(events)
        for i in np.flatnonzero(kinds > HostKind.OP).tolist():
            args, begin = events[i].args or NO_ARGUMENTS, int(start[i])
            end, kind = begin + int(duration[i]), HostKind(int(kinds[i]))
            size = _tensor_bytes(args) if kind in (HostKind.COMM, HostKind.COMM_CALL) else None
            self.ranges.append(HostRange(kind, events[i].name or "", begin, end, int(threads[i]), size))
        # Operators, the calls that issue collectives, and the annotations that old traces list as operators.
        ops = (kinds == HostKind.OP) | (kinds == HostKind.COMM_CALL)
        named = kinds == HostKind.OTHER
        if category == "user_annotation":
            self._add_annotations(events, (start, duration, threads), np.flatnonzero(named))
        else:
            ops |= named
        self.ops.add(start=start[ops], duration=duration[ops], name=names[ops], thread=threads[ops])

    def _add_annotations(
        self, events: list[Event], spans: tuple[Int64, Int64, Int32], chosen: NDArray[np.intp]
    ) -> None:
        start, duration, threads = spans
        names = [self.annotation_names[events[i].name] for i in chosen.tolist()]
        self.annotations.add(
            start=start[chosen],
            duration=duration[chosen],
            name=np.array(names, dtype=np.int32),
            thread=threads[chosen],
        )

    def _add_modules(self, events: list[Event], start: Int64, duration: Int64) -> None:
        names = [self.module_names[(event.name or "").removeprefix(MODULE_PREFIX)] for event in events]
        threads = self._threads(events)
        self.modules.add(start=start, duration=duration, name=np.array(names, dtype=np.int32), thread=threads)

    def done(self, header: dict[str, Any], skipped: Skipped) -> Trace:
        """All that was added."""
        zero = header.get("baseTimeNanoseconds")
        zero_ns = zero if isinstance(zero, int) else 0
        return Trace(
            base_ns=zero_ns + (self.base_us or 0) * 1000,
            zero_ns=zero_ns,
            header=header,
            gpu=GpuWork(
                *_spans(self.gpu, "stream"),
                kind=self.gpu.done("kind", np.int8),
                correlation=self.gpu.done("correlation", np.int64),
            ),
            gpu_names=self.gpu_names.names(),
            comm_facts=self.comm_facts,
            launches=Launches(
                *_spans(self.launches), correlation=self.launches.done("correlation", np.int64)
            ),
            launch_names=tuple(self.launch_names),
            ops=Spans(*_spans(self.ops)),
            op_names=self.op_names.names(),
            op_kinds=np.array(self.op_names.kinds, dtype=np.int8),
            modules=Spans(*_spans(self.modules)),
            module_names=tuple(self.module_names),
            ranges=tuple(self.ranges),
            num_devices=len({device for device, _ in self.streams.spelled}),
            skipped=self._skipped(skipped),
            annotations=Spans(*_spans(self.annotations)),
            annotation_names=tuple(self.annotation_names),
            threads=tuple(self.threads.spelled),
            streams=tuple(self.streams.spelled),
        )

    def _skipped(self, skipped: Skipped) -> str | None:
        parts = []
        if skipped.count:
            parts.append(
                f"{skipped.count} malformed events, first at byte {skipped.first_byte} ({skipped.reason})"
            )
        if self.negative:
            parts.append(f"{self.negative} events of negative length or with times out of range")
        return " and ".join(parts) + " left out" if parts else None


def read_trace(path: Path, progress: Callable[[int], None] | None = None) -> Trace:
    """The trace in `path`, plain or gzip.

    Args:
        path: where it lies.
        progress: is told the position in the file, in bytes, after every block.

    Raises:
        TraceError: it can't be read, is none, or is damaged; with the byte.
    """
    reader = Reader()
    with open_source(path) as source:
        file = TraceFile(source, Event)
        for events, block in file.blocks():
            reader.add(events, block)
            if progress is not None:
                progress(source.file_position())
    return reader.done(file.header, file.skipped)


def _spans(columns: Columns, thread: str = "thread") -> tuple[Int64, Int64, Int32, Int32]:
    return (
        columns.done("start", np.int64),
        columns.done("duration", np.int64),
        columns.done("name", np.int32),
        columns.done(thread, np.int32),
    )


def _correlations(arguments: list[Arguments]) -> Int64:
    return bounded([-1 if args.correlation is None else args.correlation for args in arguments])


def _stream(event: Event, args: Arguments) -> str | int | None:
    return event.tid if args.stream is None else args.stream


def _comm_facts(name: str, args: Arguments) -> CommFacts:
    kind = collective_kind(str(args.collective)) if args.collective is not None else collective_kind(name)
    elements = max(args.in_elements or 0, args.out_elements or 0)
    size = dtype_bytes(str(args.dtype))
    num_bytes = -1 if size is None else elements * size
    return CommFacts(
        kind=kind,
        num_bytes=num_bytes if args.in_elements is not None and 0 <= num_bytes < MAX_BYTES else None,
        group=None if args.group is None else str(args.group),
        group_size=args.group_size,
        sequence=args.sequence,
    )


def _tensor_bytes(args: Arguments) -> int | None:
    """Bytes of all tensors among the arguments of an operator."""
    try:
        shapes, types = msgspec.json.decode(args.dims), msgspec.json.decode(args.types)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    total = 0
    for shape, dtype in zip(shapes, types, strict=False):
        size = dtype_bytes(str(dtype))
        total += _elements(shape) * size if size is not None and shape else 0
    return total if 0 < total < MAX_BYTES else None


def _elements(shape: Any) -> int:
    """Elements of a tensor's shape, or of a list of shapes."""
    if not isinstance(shape, list) or not shape:
        return 0
    if isinstance(shape[0], list):
        return sum(_elements(each) for each in shape)
    return int(np.prod([side for side in shape if isinstance(side, int)], dtype=object))
