"""Matches collectives over ranks: which rank waited for which, and how far their clocks are apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpurun.launcher.trace.analysis.local_collectives import LocalCollective
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, SAME_SIZE, SYNCHRONISING

Key = tuple[object, ...]

GPU_NOISE_NS = 1_000_000
"""On GPUs the ends of a collective scatter by microseconds; a millisecond leaves room for clock drift."""
CPU_NOISE_NS = 50_000_000
"""On CPUs a thread may have to wait for a core before it sees the end."""


@dataclass(frozen=True)
class RankCollectives:
    """The collectives of a rank, with the time to which its own times are relative."""

    rank: int
    base_ns: int
    collectives: Sequence[LocalCollective]
    step_numbers: Mapping[int, int]
    """Number of a step by its position in the trace."""
    world_size: int | None


@dataclass(frozen=True)
class Part:
    """One rank's part in a collective."""

    rank: int
    local: LocalCollective
    start_ns: int
    """Unix time on this rank's own clock."""

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.local.duration


@dataclass(frozen=True)
class Collective:
    """One collective with the parts of all ranks whose traces show it."""

    group: str
    seq: int
    kind: str
    num_bytes: int | None
    group_size: int | None
    """Size of the group, including ranks without a trace; `None` if unknown."""
    parts: tuple[Part, ...]
    """By rank."""
    matched: bool
    """Whether waiting and transfer can be separated: needs two ranks and no point-to-point operation."""

    @property
    def transfer_ns(self) -> int:
        """The shortest time of any rank in it: the last rank to arrive doesn't wait."""
        return min(part.local.duration for part in self.parts)


@dataclass(frozen=True)
class Matched:
    """All collectives of all ranks, in order of time, and how many ns each rank's clock is ahead."""

    collectives: tuple[Collective, ...]
    offsets: Mapping[int, int]
    doubtful: int
    """Collectives that matched by order but didn't end together."""


def match(ranks: Sequence[RankCollectives]) -> Matched:
    """Finds the parts of each collective in the ranks' traces.

    Two parts match if group, step, kind and size agree and they are the n-th of that sort in their step; or,
    if the trace has the library's sequence numbers, if group and number agree. Sizes of an all-to-all may
    differ. Parts that then don't end together on aligned clocks aren't one collective (a trace may lack some,
    or begin in the middle of a step): they are matched by their ends instead.
    """
    groups: dict[Key, list[Part]] = defaultdict(list)
    for rank in ranks:
        for key, local in _keyed(rank):
            groups[key].append(Part(rank.rank, local, rank.base_ns + local.start))
    offsets = clock_offsets(list(groups.values()), [rank.rank for rank in ranks])
    good: list[list[Part]] = []
    loose: list[Part] = []
    doubtful = 0
    for parts in groups.values():
        if parts[0].local.kind not in SYNCHRONISING or (len(parts) > 1 and _end_together(parts, offsets)):
            good.append(parts)
        else:
            loose += parts
            doubtful += len(parts) > 1
    good += _by_ends(loose, offsets)
    good.sort(key=lambda parts: min(part.start_ns - offsets[part.rank] for part in parts))
    all_here = {rank.world_size for rank in ranks} == {len(ranks)}
    return Matched(tuple(_collectives(good, all_here)), offsets, doubtful)


def _group_size(parts: Sequence[Part], all_here: bool) -> int | None:
    """From the traces; else the number of parts, if no rank's trace is missing."""
    said = {part.local.group_size for part in parts} - {None}
    if not said:
        return len(parts) if all_here else None
    size = said.pop()
    return size if not said and size is not None and size >= len(parts) else None


def _collectives(groups: Iterable[list[Part]], all_here: bool) -> Iterable[Collective]:
    counts: Counter[str] = Counter()
    for parts in groups:
        local = parts[0].local
        sizes = [part.local.num_bytes for part in parts if part.local.num_bytes is not None]
        yield Collective(
            group=local.group,
            seq=counts[local.group] if local.sequence is None else local.sequence,
            kind=local.kind,
            num_bytes=max(sizes, default=None),
            group_size=_group_size(parts, all_here),
            parts=tuple(sorted(parts, key=lambda part: part.rank)),
            matched=len(parts) > 1 and local.kind not in POINT_TO_POINT,
        )
        counts[local.group] += 1


def _end_together(parts: Sequence[Part], offsets: Mapping[int, int]) -> bool:
    """Whether the ends are as close, on aligned clocks, as those of one synchronising collective."""
    ends = [part.end_ns - offsets[part.rank] for part in parts]
    shortest = min(part.local.duration for part in parts)
    return max(ends) - min(ends) <= _noise_ns(parts[0]) + shortest // 2


def _noise_ns(part: Part) -> int:
    return GPU_NOISE_NS if part.local.on_gpu else CPU_NOISE_NS


def _by_ends(parts: Sequence[Part], offsets: Mapping[int, int]) -> list[list[Part]]:
    """Parts of the same group and kind whose ends are close together; others stay single."""
    sorts: dict[Key, list[Part]] = defaultdict(list)
    for part in parts:
        size = part.local.num_bytes if part.local.kind in SAME_SIZE else None
        sorts[part.local.group, part.local.kind, size].append(part)
    found: list[list[Part]] = []
    for same in sorts.values():
        cluster: list[Part] = []
        for part in sorted(same, key=lambda part: part.end_ns - offsets[part.rank]):
            if cluster and _joins(part, cluster, offsets):
                cluster.append(part)
            else:
                cluster = [part]
                found.append(cluster)
    return found


def _joins(part: Part, cluster: Sequence[Part], offsets: Mapping[int, int]) -> bool:
    apart_ns = part.end_ns - offsets[part.rank] - cluster[0].end_ns + offsets[cluster[0].rank]
    return apart_ns <= GPU_NOISE_NS and all(part.rank != other.rank for other in cluster)


def _keyed(rank: RankCollectives) -> Iterable[tuple[Key, LocalCollective]]:
    """Each collective with a key that is the same on all ranks and unique on each.

    The n-th is counted in the order of their ends: threads may issue them in different orders on different
    ranks, but all ranks leave together.
    """
    seen: Counter[Key] = Counter()
    for local in sorted(rank.collectives, key=lambda each: each.end):
        size = local.num_bytes if local.kind in SAME_SIZE else None
        place: Key = (local.group, "step", rank.step_numbers.get(local.step))
        if local.sequence is not None:
            place = (local.group, "seq", local.sequence)
        key = (*place, local.kind, size)
        yield (*key, seen[key]), local
        seen[key] += 1


def clock_offsets(groups: Sequence[Sequence[Part]], ranks: Sequence[int]) -> dict[int, int]:
    """How many ns each rank's clock is ahead of the lowest rank's: the median over common collectives.

    All ranks leave a synchronising collective at the same moment, within microseconds. Kinds whose size must
    agree are more reliable; others count only between ranks that share none of those. Ranks without any link
    to the lowest rank keep their clock unchanged.
    """
    sized, other = _differences(groups, True), _differences(groups, False)
    edges: dict[int, dict[int, int]] = defaultdict(dict)
    for pair, differences in (other | sized).items():
        median = int(np.median(np.array(differences, dtype=np.int64)))
        edges[pair[0]][pair[1]], edges[pair[1]][pair[0]] = median, -median
    offsets: dict[int, int] = {}
    for rank in sorted(ranks):
        if rank not in offsets:
            offsets[rank] = 0
            _spread(rank, edges, offsets)
    return offsets


def _differences(groups: Sequence[Sequence[Part]], same_size: bool) -> dict[tuple[int, int], list[int]]:
    """End on the other rank less end on the first, for the first rank of each collective and each other."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for parts in groups:
        kind = parts[0].local.kind
        if kind in SYNCHRONISING and (kind in SAME_SIZE) == same_size:
            for part in parts[1:]:
                found[parts[0].rank, part.rank].append(part.end_ns - parts[0].end_ns)
    return found


def _spread(start: int, edges: Mapping[int, Mapping[int, int]], offsets: dict[int, int]) -> None:
    """Propagates the offset of `start` to all ranks linked with it."""
    todo = [start]
    while todo:
        rank = todo.pop(0)
        for other, difference in edges.get(rank, {}).items():
            if other not in offsets:
                offsets[other] = offsets[rank] + difference
                todo.append(other)


@dataclass(frozen=True)
class Straggler:
    """How often each rank arrived last, and how long the others waited for it."""

    rank: int
    last_arrivals: int
    wait_caused_ns: int


def last_rank(collective: Collective, offsets: Mapping[int, int]) -> int | None:
    """The rank that arrived last, on aligned clocks; `None` if unclear, as with ties."""
    if not collective.matched:
        return None
    arrivals = [(part.start_ns - offsets[part.rank], part.rank) for part in collective.parts]
    latest_ns, rank = max(arrivals)
    return rank if sum(start_ns == latest_ns for start_ns, _ in arrivals) == 1 else None


def stragglers(
    collectives: Sequence[Collective], offsets: Mapping[int, int], ranks: Sequence[int]
) -> list[Straggler]:
    """All ranks, sorted by how long the others waited for them."""
    arrivals: Counter[int] = Counter()
    caused: Counter[int] = Counter()
    for each in collectives:
        last = last_rank(each, offsets)
        if last is not None:
            arrivals[last] += 1
            caused[last] += sum(
                part.local.duration - each.transfer_ns for part in each.parts if part.rank != last
            )
    rows = [Straggler(rank, arrivals[rank], caused[rank]) for rank in ranks]
    return sorted(rows, key=lambda row: (-row.wait_caused_ns, row.rank))


def bandwidths(collective: Collective) -> tuple[float | None, float | None]:
    """Algorithm and bus bandwidth in GB/s (1e9 bytes), over the transfer time.

    Source: nccl-tests, doc/PERFORMANCE.md; bus bandwidth is what the links carry, however many ranks.
    """
    if collective.num_bytes is None or not collective.matched or collective.transfer_ns == 0:
        return None, None
    algorithm = collective.num_bytes / collective.transfer_ns
    factor = _bus_factor(collective.kind, collective.group_size)
    return algorithm, None if factor is None else algorithm * factor


def _bus_factor(kind: str, group_size: int | None) -> float | None:
    if kind in {"broadcast", "reduce"}:
        return 1.0
    if group_size is None:
        return None
    share = (group_size - 1) / group_size
    others = dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "send_recv"), share)
    return ({"all_reduce": 2 * share} | others).get(kind)
