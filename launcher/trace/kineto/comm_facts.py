"""What the arguments of communication kernels, and of the calls that issue them, say.

Source of their names and formats: `torch/csrc/profiler/util.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gpurun.launcher.trace.kineto.classify import collective_kind, dtype_bytes
from gpurun.launcher.trace.kineto.columns import CommFacts
from gpurun.launcher.trace.kineto.events import Arguments, Number, whole

MAX_BYTES = 1 << 53
"""No collective moves more; larger sizes are damage."""
MAX_GROUP = 1 << 20
"""No group has more ranks; larger ones are damage."""
_RANKS = re.compile(r"\[[0-9]{1,9}(, ?[0-9]{1,9})*\]")
"""All ranks of a group; of long lists torch leaves out the middle, and writes `...` for it."""
_PEERS = {"c10d::send": "send", "c10d::recv_": "recv"}
_PEER_INPUT = 2
"""Position of the peer in the inputs of these calls, after the tensors and the group."""


def comm_facts(name: str, args: Arguments) -> CommFacts:
    """The facts on a kernel, or a call, of this name."""
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
        ranks=_group_ranks(args),
        peer=whole(args.target if kind == "send" else args.source) if kind in ("send", "recv") else None,
    )


def call_facts(name: str, args: Arguments) -> CommFacts | None:
    """The facts on a call that issues a collective; `None` if the trace has none."""
    if args.collective is not None or args.group is not None:
        return comm_facts(name, args)
    if name not in _PEERS:
        return None
    return CommFacts(_PEERS[name], None, None, None, None, group_peer=_group_peer(args))


def _group_peer(args: Arguments) -> int | None:
    """The peer of `c10d::send` and `c10d::recv_`, as a rank of their group."""
    try:
        inputs = msgspec.json.decode(args.inputs)
    except (msgspec.DecodeError, RecursionError):
        return None
    known = isinstance(inputs, list) and len(inputs) > _PEER_INPUT
    peer: Number = inputs[_PEER_INPUT] if known and isinstance(inputs[_PEER_INPUT], str | int) else None
    return whole(peer)


def _group_ranks(args: Arguments) -> tuple[int, ...] | None:
    """The ranks of the group: as listed, else from the first one and the distance between them."""
    if isinstance(args.group_ranks, list):
        return _valid(args.group_ranks)
    listed = _parsed(str(args.group_ranks)) if args.group_ranks is not None else None
    if listed is not None:
        return listed
    first, stride, size = map(whole, (args.first_rank, args.rank_stride, args.group_size))
    if first is None or not stride or not size or not 0 < size < MAX_GROUP or first < 0 or stride < 0:
        return None
    return _strided(first, stride, size)


@lru_cache(maxsize=4096)
def _strided(first: int, stride: int, size: int) -> tuple[int, ...]:
    return tuple(range(first, first + stride * size, stride))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[int, ...] | None:
    """The ranks in `[0, 1, 2]`; one tuple for all events of a group."""
    return _valid([int(rank) for rank in text[1:-1].split(",")]) if _RANKS.fullmatch(text) else None


def _valid(ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Sorted; `None` for an empty or impossible list."""
    unique = sorted(set(ranks))
    return tuple(unique) if unique and len(unique) == len(ranks) and unique[0] >= 0 else None
