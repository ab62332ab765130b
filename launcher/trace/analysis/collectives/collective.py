"""One collective over all ranks: who waited, who came last, how fast the data moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpurun.launcher.trace.analysis.collectives.clocks import Clocks
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, SYNCHRONISING
from gpurun.launcher.trace.model import StragglerReport

MAX_SLACK_NS = 5_000
"""Clocks that are known less well don't show how long a rank waited."""


@dataclass(frozen=True)
class Collective:
    """One collective with the parts of all ranks whose traces show it."""

    group: str
    """The name; unique."""
    group_ranks: tuple[int, ...] | None
    """All ranks of the group, if the traces say."""
    seq: int
    kind: str
    """A message between two ranks is a `send`; grouped ones are `send_recv`."""
    num_bytes: int | None
    group_size: int | None
    """Size of the group, including ranks without a trace; `None` if unknown."""
    parts: tuple[RankPart, ...]
    """The parts by rank."""
    matched: bool
    """Whether waiting and transfer can be separated: needs two ranks, or a group of one."""
    description: str | None
    """The program's name for the group, such as `mesh_tp`."""
    waits: Mapping[int, int]
    """How long each rank waited for the others, in ns, from its start on."""
    transfer_ns: int
    """How long the data then moved: on the rank that saw that for the shortest time."""
    dtype: str | None = None

    @property
    def is_message(self) -> bool:
        """Whether it is a send, a receive, or both."""
        return self.kind in POINT_TO_POINT or self.is_grouped

    @property
    def is_grouped(self) -> bool:
        """Whether some kernel of it has several messages."""
        return any(part.local.messages for part in self.parts)

    def awaited(self, part: RankPart) -> Sequence[RankPart]:
        """The parts, its own among them, that a rank's part can't end without."""
        if not self.is_grouped:
            return self.parts
        near = {part.rank, *(peer for _, peer in part.local.sent_and_received)}
        return [other for other in self.parts if other.rank in near]

    def transfer(self, part: RankPart) -> int:
        """How long data then moved for this rank, in ns, and until its thread had a core to see the end.

        Of a message on the CPU, how long the receiver took: the sender may ask any time whether it is done.
        """
        is_apart = part.local.kind in POINT_TO_POINT and not part.local.on_gpu
        return self.transfer_ns if is_apart else part.local.duration - self.waits[part.rank]

    def waiting(self, part: RankPart) -> tuple[int, int]:
        """Start and end of a rank's wait, in its trace's time; empty if that isn't known."""
        waited_ns = self.waits[part.rank] if self.matched else 0
        return part.local.start, part.local.start + waited_ns

    def moving(self, part: RankPart) -> tuple[int, int]:
        """Start and end of the movement of data; all of the part if waiting isn't known."""
        if not self.matched:
            return part.local.start, part.local.end
        _, start_ns = self.waiting(part)
        return start_ns, min(start_ns + self.transfer(part), part.local.end)


def waits_and_transfer(parts: Sequence[RankPart], clocks: Clocks) -> tuple[dict[int, int], int]:
    """How long each rank waited, in ns, and how long the data then moved.

    All leave a collective together, so whoever is in it for longer than the last rank to come has waited. The
    two ends of a message on the CPU don't: a rank may ask much later whether its own is done. There both wait
    until the other has come, if their clocks are known to each other, and then the receiver gets it. And a
    thread on the CPU may get a core late to see the end. On one clock, no rank waits after the last has come.
    """
    is_message = parts[0].local.kind in POINT_TO_POINT and not parts[0].local.on_gpu
    if is_message and len(parts) == 2 and all(clocks.slack.get(part.rank, 0) is not None for part in parts):
        starts_ns = {part.rank: part.start_ns - clocks.offsets[part.rank] for part in parts}
        came_ns = max(starts_ns.values())
        got = max(parts, key=lambda part: part.local.kind == "recv")
        waits = {each.rank: min(came_ns - starts_ns[each.rank], each.local.duration) for each in parts}
        return waits, got.local.duration - waits[got.rank]
    if len(parts) > 2 and any(part.local.messages for part in parts):
        waits = {part.rank: _until_all_came(part, parts, clocks) for part in parts}
        return waits, max(part.local.duration - waits[part.rank] for part in parts)
    shortest_ns = min(part.local.duration for part in parts)
    waits = {part.rank: part.local.duration - shortest_ns for part in parts}
    if not parts[0].local.on_gpu and clocks.are_one(waits):
        latest_ns = max(part.start_ns for part in parts)
        meets = parts[0].local.kind in SYNCHRONISING
        for part in parts:
            longest_ns = part.local.duration if meets else waits[part.rank]
            waits[part.rank] = min(latest_ns - part.start_ns, longest_ns)
    return waits, min(part.local.duration - waits[part.rank] for part in parts)


def can_separate(parts: Sequence[RankPart], clocks: Clocks) -> bool:
    """Whether clocks show who waited: of messages that link several ranks, only when each came shows it."""
    if len(parts) <= 2 or not any(part.local.messages for part in parts):
        return True
    ranks = {part.rank for part in parts}
    if ranks.intersection(rank for island in clocks.unlinked for rank in island):
        return False
    slack = [clocks.slack.get(rank, 0) for rank in ranks]
    return all(ns is not None and ns <= MAX_SLACK_NS for ns in slack)


def _until_all_came(part: RankPart, parts: Sequence[RankPart], clocks: Clocks) -> int:
    """How long a rank waited until the last came of those that it sends to, or receives from.

    A send may be done before the other rank comes: then nothing waited for that.
    """
    near = {peer for _, peer in part.local.sent_and_received}
    own_ns = part.start_ns - clocks.offsets[part.rank]
    late = [each.start_ns - clocks.offsets[each.rank] - own_ns for each in parts if each.rank in near]
    return max((ns for ns in late if 0 < ns <= part.local.duration), default=0)


def last_rank(collective: Collective, offsets: Mapping[int, int]) -> int | None:
    """The rank that arrived last, on aligned clocks; `None` if unclear, as with ties.

    Of messages that link several ranks none is it: each rank waits for its own neighbours.
    """
    if not collective.matched or len(collective.parts) < 2:
        return None
    if collective.is_grouped and len(collective.parts) > 2:
        return None
    arrivals = [(part.start_ns - offsets[part.rank], part.rank) for part in collective.parts]
    latest_ns, rank = max(arrivals)
    return rank if sum(start_ns == latest_ns for start_ns, _ in arrivals) == 1 else None


def stragglers(
    collectives: Sequence[Collective], last_ranks: Sequence[int | None], ranks: Sequence[int]
) -> list[StragglerReport]:
    """All ranks, sorted by how long the others waited for them; `last_ranks` has that of each collective."""
    known, arrivals, caused_ns = Counter[int](), Counter[int](), Counter[int]()
    for each, last in zip(collectives, last_ranks, strict=True):
        if last is not None:
            known.update(part.rank for part in each.parts)
            arrivals[last] += 1
            caused_ns[last] += sum(waited_ns for rank, waited_ns in each.waits.items() if rank != last)
    rows = [StragglerReport(rank, known[rank], arrivals[rank], caused_ns[rank] / 1000) for rank in ranks]
    return sorted(rows, key=lambda row: (-row.wait_caused_us, row.rank))


def bandwidths(collective: Collective) -> tuple[float | None, float | None]:
    """Algorithm and bus bandwidth in GB/s (1e9 bytes), over the transfer time.

    Source: nccl-tests, doc/PERFORMANCE.md; bus bandwidth is what the links carry, however many ranks.
    """
    if collective.num_bytes is None or not collective.matched or collective.transfer_ns == 0:
        return None, None
    if collective.is_grouped:
        return None, None  # which ranks exchange how much isn't one number
    algorithm = collective.num_bytes / collective.transfer_ns
    factor = _bus_factor(collective.kind, collective.group_size)
    return algorithm, None if factor is None else algorithm * factor


def _bus_factor(kind: str, group_size: int | None) -> float | None:
    if kind in {"broadcast", "reduce", "send"}:
        return 1.0
    if group_size is None:
        return None
    share = (group_size - 1) / group_size
    others = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "send_recv"), share)
    return ({"all_reduce": 2 * share} | others).get(kind)
