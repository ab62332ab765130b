"""One trace event as Kineto writes it: its times as exact integer nanoseconds, and what its arguments say.

Source of the arguments of collectives: `torch/csrc/profiler/util.cpp`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import collective_kind, dtype_bytes

EXACT_BELOW_US = float(1 << 43)
"""Below it a double is within half a nanosecond of the decimal text; rounding restores that text."""
MAX_NS = (1 << 62) - 1

MAX_DIGITS = 18
"""Longer numbers can't fit into 64 bits."""

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
    text = bytes(raw)
    if text.isdigit():
        return int(text) * 1000
    try:
        return round(Decimal(text.decode()) * 1000)
    except (ArithmeticError, ValueError):
        return None


def to_ns(times_us: Sequence[int | float], base_us: int) -> Int64:
    """Integer ns since `base_us`; exact unless a time `needs_text`.

    Floats are split before they are scaled: 1e15 µs times 1000 would be rounded to 128 ns.
    """
    if times_us and type(times_us[0]) is int and set(map(type, times_us)) == {int}:
        return _whole_ns(times_us, base_us)
    values = np.clip(np.array(times_us, dtype=np.float64), -MAX_NS // 1000, MAX_NS // 1000)
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
