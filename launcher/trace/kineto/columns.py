"""A trace's events as Kineto writes them, and as columns: what the analysis needs, 20 to 40 bytes per event.

Times are exact integer ns, in columns since the trace's base. Details are what only tables on request need:
shapes, sizes of copies, waits for streams.

Source of the arguments of collectives: `torch/csrc/profiler/util.cpp`.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import islice, starmap
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpurun.launcher.findings.finding import Finding
from gpurun.launcher.trace.intervals import Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind, Writer, collective_kind, dtype_bytes

EXACT_BELOW_US = float(1 << 43)
"""Below it a double is within half a nanosecond of the decimal text; rounding restores that text."""
MAX_NS = (1 << 62) - 1

MAX_DIGITS = 18
"""Longer numbers can't fit into 64 bits."""
_FAR_US = Decimal(10) ** 20
"""Stands for all later times: no column holds it, whatever the base."""

Text = str | int | None
Number = int | str | None
"""Some writers put numbers in quotes."""


class Arguments(msgspec.Struct, gc=False, frozen=True, rename={
    "dims": "Input Dims",
    "types": "Input type",
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group": "Process Group Name",
    "description": "Process Group Description",
    "group_ranks": "Process Group Ranks",
    "first_rank": "Global rank start",
    "rank_stride": "Global rank stride",
    "group_size": "Group size",
    "source": "Src Rank",
    "target": "Dst Rank",
    "sequence": "Seq",
    "inputs": "Concrete Inputs",
    "graph_node": "graph node id",
    "waits_for_stream": "wait_on_stream",
    "waits_for_record": "wait_on_cuda_event_record_corr_id",
}):  # fmt: skip
    """The arguments that the analysis reads; others are skipped."""

    correlation: Number = None
    stream: Text = None
    device: Text = None
    dims: msgspec.Raw = msgspec.Raw()
    types: msgspec.Raw = msgspec.Raw()
    collective: Text = None
    in_elements: Number = None
    out_elements: Number = None
    dtype: Text = None
    group: Text = None
    description: Text = None
    group_ranks: Text | list[int] = None
    """The ranks as text, `[0, 1, 2]`, in which torch leaves out the middle of long lists."""
    first_rank: Number = None
    rank_stride: Number = None
    group_size: Number = None
    source: Number = None
    target: Number = None
    sequence: Number = None
    inputs: msgspec.Raw = msgspec.Raw()
    graph_node: Number = None
    kernel: Text = None
    """The name of the kernel that a call launches."""
    waits_for_stream: Text = None
    waits_for_record: Number = None


NO_ARGUMENTS = Arguments()


def whole(number: Number) -> int | None:
    """The number, also if given as text; `None` for other text."""
    if not isinstance(number, str):
        return number
    return int(number) if len(number) <= MAX_DIGITS and number.isascii() and number.isdigit() else None


class TraceEvent(msgspec.Struct, gc=False, frozen=True):
    """A trace event; times in µs, as in the file."""

    ph: str
    name: str | None = None
    cat: str | None = None
    pid: Text = None
    tid: Text = None
    ts: int | float | None = None
    dur: int | float | None = 0
    """`None` if the file has no number: `NaN`, `Infinity`, `null`."""
    args: Arguments | None = None


class TimeText(msgspec.Struct, gc=False, frozen=True):
    """An event's times as text: for decimals that a double can't represent."""

    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()


_TIME_TEXTS = msgspec.json.Decoder(list[TimeText])


def needs_text(times_us: Sequence[int | float]) -> bool:
    """Whether a double may have lost nanoseconds: large absolute times with a fraction."""
    if not times_us or max(max(times_us), -min(times_us)) < EXACT_BELOW_US:
        return False
    return any(type(time) is float and abs(time) >= EXACT_BELOW_US for time in times_us)


def time_texts(block: bytes) -> list[tuple[int | None, int | None]]:
    """`ts` and `dur` in ns of all events of a JSON array, from their decimal text."""
    return [(_text_ns(event.ts), _text_ns(event.dur)) for event in _TIME_TEXTS.decode(block)]


def _text_ns(raw: msgspec.Raw) -> int | None:
    text = bytes(raw).strip(b'"')  # torch_npu writes times as text
    if len(text) <= MAX_DIGITS and text.isdigit():
        return int(text) * 1000
    try:
        time_us = Decimal(text.decode())
        if time_us.adjusted() >= _FAR_US.adjusted() and time_us:
            time_us = _FAR_US.copy_sign(time_us)
        return round(time_us * 1000)
    except (ArithmeticError, ValueError):
        return None


def to_ns(times_us: Sequence[int | float], base_us: int) -> Int64:
    """Integer ns since `base_us`; exact unless a time `needs_text`.

    Floats are split before they are scaled: 1e15 µs times 1000 would be rounded to 128 ns.
    """
    if times_us and type(times_us[0]) is int and set(map(type, times_us)) == {int}:
        return _whole_ns(times_us, base_us)
    most_us = MAX_NS // 1000
    try:
        values = np.array(times_us, dtype=np.float64)
    except OverflowError:  # whole numbers of hundreds of digits
        values = np.array([max(-most_us, min(most_us, time)) for time in times_us], dtype=np.float64)
    values = np.clip(np.nan_to_num(values, nan=np.inf), -most_us, most_us)  # "nan" in quotes is a number
    whole = np.floor(values)
    fraction_ns = np.rint((values - whole) * 1000).astype(np.int64)
    return (whole.astype(np.int64) - base_us) * 1000 + fraction_ns


def _whole_ns(times_us: Sequence[int | float], base_us: int) -> Int64:
    try:
        values = np.array(times_us, dtype=np.int64) - base_us
    except OverflowError:
        return bounded([(int(time) - base_us) * 1000 for time in times_us])
    return np.clip(values, -MAX_NS // 1000, MAX_NS // 1000) * 1000


def bounded(values: Sequence[int]) -> Int64:
    """The values as an array; values too large for a column become its largest."""
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        return np.array([max(-MAX_NS, min(MAX_NS, value)) for value in values], dtype=np.int64)


MAX_BYTES = 1 << 53
"""No collective moves more; larger sizes are damage."""
MAX_RANKS = 1 << 20
"""All groups of a rank together have no more; what is beyond that is damage."""
MAX_INPUTS_BYTES = 1 << 16
"""The inputs of a send or receive are shorter."""
_RANKS = re.compile(r"\[[0-9]{1,9}(, ?[0-9]{1,9})*\]")
"""All ranks of a group; of long lists torch leaves out the middle, and writes `...` for it."""
_PEERS = {"c10d::send": "send", "c10d::recv_": "recv"}
_PEER_INPUT = 2
"""Position of the peer in the inputs of these calls, after the tensors and the group."""


class RankTuple(tuple[int, ...]):
    """The ranks of a group, sorted.

    There may be a million, and each event of a rank names its group: they are compared by a digest,
    and what is made of all of them is made once.
    """

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.blake2b(repr(tuple(self)).encode()).digest()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankTuple):
            return super().__eq__(other)
        return self is other or (len(self) == len(other) and self._digest == other._digest)

    def __reduce__(self) -> tuple[type[RankTuple], tuple[tuple[int, ...]]]:
        return RankTuple, (tuple(self),)


@dataclass(frozen=True)
class CommFacts:
    """The arguments of a communication kernel, or of the call that issued it; `None` for missing ones."""

    kind: str
    num_bytes: int | None
    group: str | None
    group_size: int | None
    sequence: int | None
    ranks: RankTuple | None = None
    """The ranks of the group."""
    peer: int | None = None
    """The other rank of a send or receive."""
    group_peer: int | None = None
    """The other rank's number within the group."""
    description: str | None = None
    """The program's name for the group."""
    dtype: str | None = None


def comm_facts(name: str, args: Arguments, groups: GroupRanks) -> CommFacts:
    """The facts on a kernel, or a call, of this name; `groups` are those of its trace."""
    kind = collective_kind(name if args.collective is None else str(args.collective))
    in_elements = whole(args.in_elements)
    elements = max(in_elements or 0, whole(args.out_elements) or 0)
    size = dtype_bytes(str(args.dtype))
    num_bytes = -1 if size is None else elements * size
    return CommFacts(
        kind=kind,
        num_bytes=num_bytes if in_elements is not None and 0 <= num_bytes < MAX_BYTES else None,
        group=None if args.group is None else str(args.group),
        group_size=whole(args.group_size),
        sequence=whole(args.sequence),
        ranks=groups.of(args),
        peer=whole(args.target if kind == "send" else args.source) if kind in ("send", "recv") else None,
        description=None if args.description is None else str(args.description),
        dtype=None if args.dtype is None else str(args.dtype),
    )


def call_facts(name: str, args: Arguments, groups: GroupRanks) -> CommFacts | None:
    """The facts on a call that issues a collective, as in `comm_facts`; `None` if the trace has none."""
    if args.collective is not None or args.group is not None:
        return comm_facts(name, args, groups)
    if name not in _PEERS:
        return None
    return CommFacts(_PEERS[name], None, None, None, None, group_peer=_group_peer(args))


def _group_peer(args: Arguments) -> int | None:
    """The peer of `c10d::send` and `c10d::recv_`, as a rank of their group."""
    try:
        inputs = msgspec.json.decode(args.inputs if len(args.inputs) <= MAX_INPUTS_BYTES else b"null")
    except (msgspec.DecodeError, RecursionError):
        return None
    known = isinstance(inputs, list) and len(inputs) > _PEER_INPUT
    peer: Number = inputs[_PEER_INPUT] if known and isinstance(inputs[_PEER_INPUT], str | int) else None
    return whole(peer)


Stated = TypeVar("Stated", str, tuple[int, ...], range)


class GroupRanks:
    """The ranks of the groups of a trace: one tuple for all events of a group.

    An event states a group of any size in a few bytes, and the next one another group.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, RankTuple] = {}
        self._num_ranks = 0

    def of(self, args: Arguments) -> RankTuple | None:
        """The ranks of an event's group: as listed, else from the first one and the distance between them."""
        if isinstance(args.group_ranks, list):
            return self._once(tuple(args.group_ranks), len(args.group_ranks), _valid)
        text = "" if args.group_ranks is None else str(args.group_ranks)
        listed = self._once(text, text.count(",") + 1, _parsed) if text else None
        if listed is not None:
            return listed
        first, stride, size = map(whole, (args.first_rank, args.rank_stride, args.group_size))
        if first is None or not stride or not size or min(first, stride, size) < 0:
            return None
        return self._once(range(first, first + stride * size, stride), size, RankTuple)

    def _once(
        self, stated: Stated, size: int, ranks_of: Callable[[Stated], RankTuple | None]
    ) -> RankTuple | None:
        """The ranks that an event states in this form, at most `size`; `None` where that is too many."""
        found = self._known.get(stated)
        if found is None and self._num_ranks + size <= MAX_RANKS:
            found = ranks_of(stated)
            if found is not None:
                self._known[stated] = found
                self._num_ranks += size
        return found


def _parsed(text: str) -> RankTuple | None:
    """The ranks in `[0, 1, 2]`."""
    return _valid([int(rank) for rank in text[1:-1].split(",")]) if _RANKS.fullmatch(text) else None


def _valid(ranks: Sequence[int]) -> RankTuple | None:
    """Sorted; `None` for an empty or impossible list."""
    unique = sorted(set(ranks))
    return RankTuple(unique) if unique and len(unique) == len(ranks) and unique[0] >= 0 else None


NO_SHAPES = -1
_EXPANDED = re.compile(rb"[\[,]\s*0\s*[,\]]")
"""A stride of 0: the tensor says the same again along that side."""


class DetailedArguments(Arguments, gc=False, frozen=True, rename={
    "num_bytes": "bytes",
    "strides": "Input Strides",
}):  # fmt: skip
    """The arguments that tables on request read in addition."""

    num_bytes: Number = None
    strides: msgspec.Raw = msgspec.Raw()


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
    strides: bytes
    """Empty where no tensor is expanded."""


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
    copy_bytes: dict[int, int]
    """The bytes by position in `trace.gpu`."""


@dataclass
class DetailsReader:
    """Collects them while a file is read."""

    arguments: dict[tuple[bytes, bytes, bytes, bytes], int] = field(default_factory=dict)
    of_op: list[NDArray[np.int32]] = field(default_factory=list)
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
        strides = bytes(args.strides) if isinstance(args, DetailedArguments) else b""
        strides = strides if _EXPANDED.search(strides) else b""
        key = (dims, bytes(args.types), bytes(args.inputs), strides)
        return self.arguments.setdefault(key, len(self.arguments))

    def done(self) -> Details:
        return Details(
            tuple(OpArguments(*key) for key in self.arguments),
            np.concatenate(self.of_op) if self.of_op else np.empty(0, dtype=np.int32),
            self.copy_bytes,
        )


def gpu_wait(event: TraceEvent) -> GpuWait | None:
    """The wait of an event of the category `cuda_sync`; `None` if it lacks its call."""
    args = event.args or NO_ARGUMENTS
    correlation, other = whole(args.correlation), args.waits_for_stream
    if correlation is None:
        return None
    return GpuWait(
        event.name or "",
        correlation,
        str(event.pid if args.device is None else args.device),
        str(event.tid if args.stream is None else args.stream),
        None if other is None else str(other),
        whole(args.waits_for_record),
    )


_Plain = bool | int | float | str | None
_ARGUMENTS = msgspec.json.Decoder(list[_Plain | list[_Plain | list[_Plain]]])
"""Values, tensors by their sides, and lists of tensors: nothing is nested deeper."""


def decoded(raw: bytes) -> list[Any]:
    """The arguments of an operator that were kept as JSON; empty where they are damaged."""
    try:
        return _ARGUMENTS.decode(raw)
    except msgspec.DecodeError:
        return []


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

    def near(self, window: Intervals) -> Spans:
        """The events that reach into the time from the window's start to its end."""
        if not len(window.starts):
            return self.where(np.zeros(len(self), dtype=bool))
        return self.where((self.start < window.ends[-1]) & (self.end > window.starts[0]))

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
    writer: Writer
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
    lost_gpu_events: int
    """Damaged events that were left out and are, or may be, GPU work."""
    lost_operators: int
    """Likewise operators."""
    cut: int | None
    """The byte at which the file ends too early, if it does."""
    other_categories: frozenset[str | None]
    """Categories of events that are in no column."""
    annotations: Spans
    """Named ranges: `record_function`, `Optimizer.step#SGD.step`. They enclose work."""
    annotation_names: tuple[str, ...]
    functions: Spans
    """Python's functions, but for short calls."""
    function_names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]
    """Process and thread as spelled in the file, by the numbers in `thread` of CPU events."""
    streams: tuple[tuple[str, str], ...]
    """Device and stream, by the numbers in `gpu.thread`; the process id replaces a missing device."""
    named_devices: frozenset[str]
    """Devices that GPU work names as its own."""
    waits: tuple[GpuWait, ...]
    """The GPU's own records of waits."""
    has_stacks: bool = False
    """Whether it has Python's functions."""
    recorded_until: int | None = None
    """When the capture ended, where the file says so."""
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
