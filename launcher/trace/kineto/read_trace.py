"""Reads a trace file into columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.trace.added_by_ranks import STEP_MARK
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import (
    DEVICES_NOT_READ,
    GPU_CATEGORIES,
    KINETO,
    LAUNCH_CATEGORIES,
    MODULE_PREFIX,
    OP_CATEGORIES,
    PYTHON_CATEGORIES,
    RECORDING_CATEGORIES,
    TELLING,
    WAIT_CATEGORIES,
    GpuKind,
    HostKind,
    Writer,
    dtype_bytes,
    gpu_kind,
    host_kind,
    writer_of,
)
from gpurun.launcher.trace.kineto.columns import (
    MAX_BYTES,
    MAX_NS,
    NO_ARGUMENTS,
    NO_NAME,
    Arguments,
    Columns,
    CommFacts,
    DetailedEvent,
    DetailsReader,
    GpuWait,
    GpuWork,
    GroupRanks,
    HostRange,
    Int32,
    NameTable,
    Number,
    Numbering,
    RuntimeCalls,
    Spans,
    Text,
    Threads,
    Trace,
    TraceEvent,
    bounded,
    call_facts,
    comm_facts,
    decoded,
    gpu_wait,
    needs_text,
    time_texts,
    to_ns,
    whole,
)
from gpurun.launcher.trace.kineto.demangle import demangled
from gpurun.launcher.trace.kineto.trace_file import ANYTHING, ReadLimits, Skipped, TraceBlocks, open_source
from gpurun.launcher.trace.kineto.writers import as_kineto

MAX_US = 1 << 63
"""Columns hold no later times."""
LEAST_FUNCTION_US = 100
"""Shorter calls of Python's functions are left out: there may be millions."""
Times = dict[int, tuple[int | None, int | None]]


class Role(IntEnum):
    """The columns that an event goes to."""

    NONE = 0
    GPU = 1
    LAUNCH = 2
    OPERATOR = 3
    PYTHON = 4
    WAIT = 5
    RECORDING = 6


class Roles(dict[str | None, Role]):
    """The role of each category; none of those of this file that the analysis doesn't read, but for calls."""

    def __init__(self) -> None:
        super().__init__()
        self.update(dict.fromkeys(GPU_CATEGORIES, Role.GPU))
        self.update(dict.fromkeys(LAUNCH_CATEGORIES, Role.LAUNCH))
        self.update(dict.fromkeys(OP_CATEGORIES, Role.OPERATOR))
        self.update(dict.fromkeys(PYTHON_CATEGORIES, Role.PYTHON))
        self.update(dict.fromkeys(WAIT_CATEGORIES, Role.WAIT))
        self.update(dict.fromkeys(RECORDING_CATEGORIES, Role.RECORDING))

    def __missing__(self, category: str | None) -> Role:
        calls = category in DEVICES_NOT_READ and str(category).endswith("_runtime")
        self[category] = role = Role.LAUNCH if calls else Role.NONE
        return role

    @property
    def others(self) -> frozenset[str | None]:
        """The categories without a role, or of devices that the analysis doesn't know."""
        return frozenset(each for each, role in self.items() if role is Role.NONE or each in DEVICES_NOT_READ)


_ONLY = {role: bytes(role == code for code in range(256)) for role in Role}
"""Translation tables that map a role to 1 and the others to 0."""
_CATEGORY = attrgetter("cat")
_NAME = attrgetter("cat", "name")
_TEXT = attrgetter("name")
_PLACE = attrgetter("pid", "tid")
_OPERATORS = np.array([HostKind.OTHER, HostKind.OP, HostKind.COMM_CALL], dtype=np.int8)
"""Operators, the calls that issue collectives, and the annotations that old traces list as operators."""


@dataclass
class Reader:
    """Sorts the events of one file into columns."""

    roles: Roles = field(default_factory=Roles)
    writer: Writer | None = None
    base_us: int | None = None
    gpu: Columns = field(default_factory=Columns)
    launches: Columns = field(default_factory=Columns)
    ops: Columns = field(default_factory=Columns)
    modules: Columns = field(default_factory=Columns)
    annotations: Columns = field(default_factory=Columns)
    functions: Columns = field(default_factory=Columns)
    ranges: list[HostRange] = field(default_factory=list)
    waits: list[GpuWait] = field(default_factory=list)
    comm_facts: dict[int, CommFacts] = field(default_factory=dict)
    groups: GroupRanks = field(default_factory=GroupRanks)
    gpu_names: NameTable = field(default_factory=lambda: NameTable(gpu_kind))
    launch_names: Numbering = field(default_factory=Numbering)
    launched_kernels: Numbering = field(default_factory=lambda: Numbering({None: NO_NAME}))
    op_names: NameTable = field(default_factory=lambda: NameTable(host_kind))
    module_names: Numbering = field(default_factory=Numbering)
    annotation_names: Numbering = field(default_factory=Numbering)
    function_names: Numbering = field(default_factory=Numbering)
    threads: Threads = field(default_factory=Threads)
    streams: Threads = field(default_factory=Threads)
    named_devices: set[Text] = field(default_factory=set)
    num_gpu: int = 0
    negative: int = 0
    timeless: int = 0
    lost: Counter[Role] = field(default_factory=Counter)
    """Events that were left out for their times, by role."""
    has_stacks: bool = False
    recorded_until: int | None = None
    details: DetailsReader | None = None
    """Takes what only some tables need."""

    def add(self, events: Sequence[TraceEvent], block: bytes) -> None:
        """Adds what the analysis needs from a block of events."""
        # For a large trace, all time is spent in the lines that run for every event.
        self.writer = writer_of(block, self.writer)
        events = as_kineto(events, self.writer)
        spans = [event for event in events if event.ph == "X" and event.name is not None]
        spans = self._with_times(spans)
        if not spans:
            return
        if self.base_us is None:
            self.base_us = next((int(event.ts or 0) for event in spans if abs(event.ts or 0) < MAX_US), None)
        times = (
            {id(event): times for event, times in zip(events, time_texts(block), strict=True)}
            if needs_text([event.ts or 0 for event in spans])
            else None
        )
        roles = bytes(map(self.roles.__getitem__, map(_CATEGORY, spans)))
        self._add_gpu(*self._timed(_of(Role.GPU, spans, roles), times, Role.GPU))
        self._add_launches(*self._timed(_of(Role.LAUNCH, spans, roles), times))
        self._add_ops(*self._timed(_of(Role.OPERATOR, spans, roles), times, Role.OPERATOR))
        self.waits += filter(None, map(gpu_wait, _of(Role.WAIT, spans, roles)))
        _, *recorded = self._timed(_of(Role.RECORDING, spans, roles), times)
        for end in np.add(*recorded).tolist():
            self.recorded_until = max(end, self.recorded_until or end)
        python = _of(Role.PYTHON, spans, roles)
        modules = [event for event in python if (event.name or "").startswith(MODULE_PREFIX)]
        self._add_modules(*self._timed(modules, times))
        self.has_stacks |= len(modules) < len(python)
        named = [event for event in python if (event.name or "").endswith(TELLING)]
        telling = [event for event in named if host_kind(*_NAME(event)) is not HostKind.OP]
        self._add_ops(*self._timed(telling, times))
        long = [event for event in python if (event.dur or 0) >= LEAST_FUNCTION_US]
        functions = [event for event in long if not (event.name or "").startswith(MODULE_PREFIX)]
        self._add_functions(*self._timed(functions, times))

    def _with_times(self, spans: list[TraceEvent]) -> list[TraceEvent]:
        kept = [event for event in spans if event.ts is not None and event.dur is not None]
        self.timeless += len(spans) - len(kept)
        if len(kept) < len(spans):
            self.lost.update(self.roles[each.cat] for each in spans if each.ts is None or each.dur is None)
        return kept

    def _timed(
        self, events: list[TraceEvent], texts: Times | None, role: Role = Role.NONE
    ) -> tuple[list[TraceEvent], Int64, Int64]:
        """Events with start and duration in ns, except those of negative length or out of range."""
        base_us = self.base_us or 0
        if texts is None:
            start = to_ns([event.ts or 0 for event in events], base_us)
            duration = to_ns([event.dur or 0 for event in events], 0)
        else:
            pairs = [texts[id(event)] for event in events]
            start = bounded([MAX_NS if ts is None else ts - base_us * 1000 for ts, _ in pairs])
            duration = bounded([dur or 0 for _, dur in pairs])
        good = (duration >= 0) & (np.abs(start) < MAX_NS // 4) & (duration < MAX_NS // 4)
        if good.all():
            return events, start, duration
        num_bad = int(len(good) - good.sum())
        self.negative += num_bad
        self.lost[role] += num_bad
        kept = [event for event, is_good in zip(events, good.tolist(), strict=True) if is_good]
        return kept, start[good], duration[good]

    def _add_gpu(self, events: list[TraceEvent], start: Int64, duration: Int64) -> None:
        names = _numbers(self.gpu_names, map(_NAME, events), len(events))
        arguments = [event.args or NO_ARGUMENTS for event in events]
        places = [
            (
                event.pid if args.device is None else args.device,
                event.tid if args.stream is None else args.stream,
            )
            for event, args in zip(events, arguments, strict=True)
        ]
        self.named_devices.update({args.device for args in arguments})
        kinds = self.gpu_names.kinds[names]
        for i in np.flatnonzero(kinds == GpuKind.COMM).tolist():
            name = demangled(events[i].name or "")
            self.comm_facts[self.num_gpu + i] = comm_facts(name, arguments[i], self.groups)
        if self.details is not None:
            self.details.add_gpu(self.num_gpu, arguments, kinds)
        self.num_gpu += len(events)
        self.gpu.add(
            start=start,
            duration=duration,
            name=names,
            kind=kinds,
            stream=_numbers(self.streams, places, len(places)),
            correlation=_whole_numbers([args.correlation for args in arguments], -1),
            node=_whole_numbers([args.graph_node for args in arguments], 0),
        )

    def _add_launches(self, events: list[TraceEvent], start: Int64, duration: Int64) -> None:
        arguments = [event.args or NO_ARGUMENTS for event in events]
        self.launches.add(
            start=start,
            duration=duration,
            name=_numbers(self.launch_names, map(_TEXT, events), len(events)),
            thread=self._threads(events),
            correlation=_whole_numbers([args.correlation for args in arguments], -1),
            kernel=_numbers(self.launched_kernels, (args.kernel for args in arguments), len(arguments)),
        )

    def _add_ops(self, events: list[TraceEvent], start: Int64, duration: Int64) -> None:
        names = _numbers(self.op_names, map(_NAME, events), len(events))
        kinds = self.op_names.kinds[names]
        threads = self._threads(events)
        for i in np.flatnonzero(kinds > HostKind.OP).tolist():
            args, begin = events[i].args or NO_ARGUMENTS, int(start[i])
            end, kind = begin + int(duration[i]), HostKind(int(kinds[i]))
            sizes = _tensor_bytes(args) if kind in (HostKind.COMM, HostKind.COMM_CALL) else ()
            name = events[i].name or ""
            facts = call_facts(name, args, self.groups) if kind is HostKind.COMM_CALL else None
            self.ranges.append(HostRange(kind, name, begin, end, int(threads[i]), sizes, facts))
        annotated = np.flatnonzero(kinds == HostKind.ANNOTATION)
        self._add_annotations(events, (start, duration, threads), annotated)
        ops = np.isin(kinds, _OPERATORS)
        if self.details is not None:
            self.details.add_ops([events[i] for i in np.flatnonzero(ops).tolist()])
        self.ops.add(start=start[ops], duration=duration[ops], name=names[ops], thread=threads[ops])

    def _add_annotations(
        self, events: list[TraceEvent], spans: tuple[Int64, Int64, Int32], chosen: NDArray[np.intp]
    ) -> None:
        start, duration, threads = spans
        texts = (events[i].name for i in chosen.tolist())
        self.annotations.add(
            start=start[chosen],
            duration=duration[chosen],
            name=_numbers(self.annotation_names, texts, len(chosen)),
            thread=threads[chosen],
        )

    def _add_modules(self, events: list[TraceEvent], start: Int64, duration: Int64) -> None:
        modules = ((event.name or "").removeprefix(MODULE_PREFIX) for event in events)
        names = _numbers(self.module_names, modules, len(events))
        self.modules.add(start=start, duration=duration, name=names, thread=self._threads(events))

    def _add_functions(self, events: list[TraceEvent], start: Int64, duration: Int64) -> None:
        names = _numbers(self.function_names, map(_TEXT, events), len(events))
        self.functions.add(start=start, duration=duration, name=names, thread=self._threads(events))

    def _threads(self, events: list[TraceEvent]) -> NDArray[np.int32]:
        return _numbers(self.threads, map(_PLACE, events), len(events))

    def done(self, header: dict[str, Any], skipped: Skipped, cut: int | None = None) -> Trace:
        """Everything that was added."""
        zero = header.get("baseTimeNanoseconds")
        zero_ns = zero if isinstance(zero, int) else 0
        return Trace(
            base_ns=zero_ns + (self.base_us or 0) * 1000,
            zero_ns=zero_ns,
            header=header,
            writer=self.writer or KINETO,
            gpu=GpuWork(
                *_spans(self.gpu, "stream"),
                kind=self.gpu.done("kind", np.int8),
                correlation=self.gpu.done("correlation", np.int64),
                node=self.gpu.done("node", np.int64),
            ),
            gpu_names=tuple(map(demangled, self.gpu_names.names())),
            comm_facts=self.comm_facts,
            launches=RuntimeCalls(
                *_spans(self.launches),
                correlation=self.launches.done("correlation", np.int64),
                kernel=self.launches.done("kernel", np.int32),
            ),
            launch_names=tuple(self.launch_names),
            launched_kernels=tuple(demangled(str(name or "")) for name in self.launched_kernels),
            ops=Spans(*_spans(self.ops)),
            op_names=self.op_names.names(),
            op_kinds=self.op_names.kinds,
            modules=Spans(*_spans(self.modules)),
            module_names=tuple(self.module_names),
            ranges=tuple(_with_one_sort_of_steps(self.ranges)),
            skipped=tuple(self._skipped(skipped)),
            lost_gpu_events=self.lost[Role.GPU] + skipped.count,
            lost_operators=self.lost[Role.OPERATOR] + skipped.count,
            cut=cut,
            other_categories=self.roles.others,
            annotations=Spans(*_spans(self.annotations)),
            annotation_names=tuple(self.annotation_names),
            functions=Spans(*_spans(self.functions)),
            function_names=tuple(self.function_names),
            threads=tuple(self.threads.spelled),
            streams=tuple(self.streams.spelled),
            named_devices=frozenset(str(device) for device in self.named_devices if device is not None),
            waits=tuple(self.waits),
            has_stacks=self.has_stacks,
            recorded_until=self.recorded_until,
            details=None if self.details is None else self.details.done(),
        )

    def _skipped(self, skipped: Skipped) -> Iterator[Finding]:
        if skipped.count:
            yield noticed(
                "malformed",
                num_events=skipped.count,
                first_byte=skipped.first_byte,
                reason=skipped.reason,
            )
        if self.timeless:
            yield noticed("timeless", num_events=self.timeless)
        if self.negative:
            yield noticed("out-of-range", num_events=self.negative)


def read_trace(
    path: Path,
    progress: Callable[[int, int], None] | None = None,
    with_details: bool = False,
    room: ReadLimits = ANYTHING,
) -> Trace:
    """The trace in `path`, plain or gzip; of a truncated file as far as it goes.

    Args:
        path: the file.
        progress: called after every block, with the bytes read of the file and those that they unpacked to.
        with_details: also read what only some tables need, which takes longer.
        room: what may be read of this file and others.

    Raises:
        TraceError: it can't be read, is not a trace, or is damaged; with the byte.
    """
    reader = Reader(details=DetailsReader() if with_details else None)
    event_type: type[TraceEvent] = DetailedEvent if with_details else TraceEvent
    with open_source(path, room) as source:
        file = TraceBlocks(source, event_type)
        for events, block in file.blocks():
            reader.add(events, block)
            if progress is not None:
                progress(source.file_position(), source.position)
    return reader.done(file.header, file.skipped, file.cut)


def _of(role: Role, events: list[TraceEvent], roles: bytes) -> list[TraceEvent]:
    """The events with this role."""
    return list(compress(events, roles.translate(_ONLY[role])))


def _numbers(table: dict[Any, int], keys: Iterable[Hashable], count: int) -> NDArray[np.int32]:
    """The number of each key; unknown keys get new numbers from `table`."""
    return np.fromiter(map(table.__getitem__, keys), dtype=np.int32, count=count)


def _with_one_sort_of_steps(ranges: Sequence[HostRange]) -> list[HostRange]:
    """Without marks of steps of other profilers where there are ours.

    Next to each of ours is one for other tools, and a program may make others at any time.
    """
    has_ours = any(each.name.startswith(STEP_MARK) for each in ranges if each.kind is HostKind.STEP)
    return [
        each
        for each in ranges
        if not has_ours or each.kind is not HostKind.STEP or each.name.startswith(STEP_MARK)
    ]


def _spans(columns: Columns, thread: str = "thread") -> tuple[Int64, Int64, Int32, Int32]:
    return (
        columns.done("start", np.int64),
        columns.done("duration", np.int64),
        columns.done("name", np.int32),
        columns.done(thread, np.int32),
    )


def _whole_numbers(found: list[Number], otherwise: int) -> Int64:
    if set(map(type, found)) <= {int}:
        return bounded(cast(list[int], found))
    return bounded([otherwise if (number := whole(each)) is None else number for each in found])


def _tensor_bytes(args: Arguments) -> tuple[int, ...]:
    """Bytes of each tensor, or list of tensors, among the arguments of an operator."""
    shapes, types = decoded(args.dims), decoded(args.types)
    sizes = [
        _elements(shape) * (dtype_bytes(str(dtype)) or 0) for shape, dtype in zip(shapes, types, strict=False)
    ]
    damaged = any(size < 0 for size in sizes) or sum(sizes) >= MAX_BYTES
    return () if damaged else tuple(size for size in sizes if size)


def _elements(shape: Any) -> int:
    """Elements of a tensor's shape, or of a list of shapes."""
    if not isinstance(shape, list) or not shape:
        return 0
    if isinstance(shape[0], list):
        return sum(_elements(each) for each in shape)
    return int(np.prod([side for side in shape if isinstance(side, int)], dtype=object))
