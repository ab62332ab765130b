"""Matches collectives over ranks: which parts belong together, and how far the ranks' clocks are apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from gpurun.launcher.trace.analysis.collectives.clocks import Clocks, clock_offsets, clock_owners, steady
from gpurun.launcher.trace.analysis.collectives.collective import Collective, can_separate, waits_and_transfer
from gpurun.launcher.trace.analysis.collectives.drift import Bounds, bounds_of_rates, clock_rates, contradict
from gpurun.launcher.trace.analysis.collectives.local_collectives import (
    LocalCollective,
    RankPart,
    group_labels,
)
from gpurun.launcher.trace.analysis.collectives.unnamed import groups_found, named
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, SAME_SIZE, SEND_RECV, SYNCHRONISING

Key = tuple[object, ...]
SOURCE = 4
"""Place of the sender in the key of a message."""

GPU_NOISE_NS = 1_000_000
"""Scatter of a collective's ends on GPUs: microseconds; a millisecond leaves room for clock drift."""
CPU_NOISE_NS = 50_000_000
"""Scatter on CPUs: a thread may have to wait for a core before it sees the end."""
MIN_IN_ORDER = 3
"""Fewer parts of a sort don't show where they belong among another rank's."""
MAX_COMPARED = 64
"""Parts by which that is found."""
PLACE_NOISE_NS = 20_000
"""A place is clear if distances scatter by so much more at any other one."""


@dataclass(frozen=True)
class RankCollectives:
    """The collectives of a rank, with the time to which its own times are relative."""

    rank: int
    base_ns: int
    collectives: Sequence[LocalCollective]
    step_numbers: Mapping[int, int]
    """Number of a step by its position in the trace."""
    world_size: int | None
    clock: str | None = None
    """Equal for ranks whose times come from the same clock; `None`: unknown."""


@dataclass(frozen=True)
class Matched:
    """All collectives of all ranks, in order of time, and the ranks' clocks."""

    collectives: tuple[Collective, ...]
    clocks: Clocks
    unknown_groups: int
    """Collectives of which the traces don't say between which ranks they were."""
    unknown_peers: int
    """Sends and receives of which the traces don't say to or from which rank."""

    @property
    def offsets(self) -> Mapping[int, int]:
        """How many ns each rank's clock is ahead."""
        return self.clocks.offsets


@dataclass(frozen=True)
class _Sorted:
    """Parts that belong together by what their traces say."""

    collectives: dict[Key, list[RankPart]]
    messages: dict[Key, list[RankPart]]
    """A send and its receive."""
    unknown_groups: list[RankPart]
    unknown_peers: list[RankPart]


def match(ranks: Sequence[RankCollectives]) -> Matched:
    """Finds the parts of each collective in the ranks' traces.

    Two parts match if group (its name and its ranks), step, kind and size agree and they are the n-th of that
    sort in their step; or, if the trace has the library's sequence numbers, if group and number agree. Sizes
    of an all-to-all may differ. A send matches the receive of its peer that is the n-th between the two in
    that step. Parts that then don't end together on aligned clocks aren't one collective (a trace may lack
    some, or begin in the middle of a step): they are matched by their ends instead.

    Where a trace doesn't say which ranks a group has, all ranks are taken for one group, as in the traces of
    old versions of torch; unless most of its collectives then don't end together.
    """
    ranks = _with_groups(ranks)
    found, clocks = _aligned(ranks, frozenset())
    doubtful = _not_one_group(found.collectives, clocks.offsets)
    if doubtful:
        found, clocks = _aligned(ranks, doubtful)
    offsets = clocks.offsets
    good = [[part] for part in (*found.unknown_groups, *found.unknown_peers)]
    loose: list[RankPart] = []
    for parts in found.collectives.values():
        if parts[0].local.kind not in SYNCHRONISING or (len(parts) > 1 and _end_together(parts, offsets)):
            good.append(parts)
        else:
            loose += parts
    good += _by_ends(loose, clocks)
    good += _linked(found.messages, offsets)
    good.sort(key=lambda parts: min(part.start_ns - offsets[part.rank] for part in parts))
    all_here = {rank.world_size for rank in ranks} == {len(ranks)}
    collectives = tuple(_collectives(good, all_here, clocks))
    unknown = len(found.unknown_groups), len(found.unknown_peers)
    return Matched(collectives, clocks, *unknown)


def _with_groups(ranks: Sequence[RankCollectives]) -> list[RankCollectives]:
    """The ranks with the groups of unnamed collectives, where only one is possible."""
    groups = groups_found(
        (rank.rank, local, rank.step_numbers.get(local.step)) for rank in ranks for local in rank.collectives
    )
    return [
        replace(rank, collectives=[named(local, groups.get(id(local))) for local in rank.collectives])
        for rank in ranks
    ]


def _sorted(ranks: Sequence[RankCollectives], rates: Mapping[int, float | None]) -> _Sorted:
    """All parts by what they may belong to, with what each clock gains taken off."""
    found = _Sorted({}, {}, [], [])
    for sort, by_rank in _by_sort(ranks, rates, found).items():
        first = _first_numbers(by_rank)
        for rank, parts in by_rank.items():
            for number, part in enumerate(parts, first[rank]):
                is_message = sort[0] is None
                same = found.messages if is_message else found.collectives
                same.setdefault((*sort, number), []).append(part)
    return found


def _by_sort(
    ranks: Sequence[RankCollectives], rates: Mapping[int, float | None], found: _Sorted
) -> dict[Key, dict[int, list[RankPart]]]:
    """The parts of each sort by rank, in order; `found` gets those of which too little is known."""
    without_steps = {rank.rank for rank in ranks if not rank.step_numbers}
    sorts: dict[Key, dict[int, list[RankPart]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for local in sorted(rank.collectives, key=_place_in_order):
            start_ns = rank.base_ns + steady(local.start, rates.get(rank.rank))
            part = RankPart(rank.rank, local, start_ns)
            peers = [peer for _, peer in local.sent_and_received]
            if _is_message(local) and (not peers or rank.rank in peers):
                found.unknown_peers.append(part)
            elif not _is_message(local) and local.group.is_ambiguous:
                found.unknown_groups.append(part)
            else:
                for sort in _sorts(rank, local, without_steps):
                    sorts[sort][rank.rank].append(part)
    return sorts


def _first_numbers(by_rank: Mapping[int, Sequence[RankPart]]) -> dict[int, int]:
    """The number of each rank's first part, counted from the first one of the rank that has most.

    A trace that lacks some may lack those before it begins: of all places for its parts that one is taken
    from which their distances to the other rank's scatter least, if it is much better than any other.
    """
    whole = max(by_rank.values(), key=len)
    return {rank: _place_in(whole, parts) for rank, parts in by_rank.items()}


def _place_in(whole: Sequence[RankPart], parts: Sequence[RankPart]) -> int:
    """Which of the whole's parts the first one of `parts` belongs to; 0 if that isn't clear."""
    if len(parts) == len(whole) or len(parts) < MIN_IN_ORDER:
        return 0
    times, places_ns = _times_ns(parts), _times_ns(whole)
    chosen = np.unique(np.linspace(0, len(times) - 1, MAX_COMPARED).astype(np.int64))
    places = np.arange(len(whole) - len(parts) + 1)
    apart_ns = times[chosen] - places_ns[places[:, None] + chosen]
    scatter_ns = np.mean(np.abs(apart_ns - np.median(apart_ns, axis=1)[:, None]), axis=1)
    best, second = np.argsort(scatter_ns, kind="stable")[:2]
    is_clear = scatter_ns[second] > 2 * scatter_ns[best] + PLACE_NOISE_NS
    return int(best) if is_clear else 0


def _aligned(ranks: Sequence[RankCollectives], doubtful: Set[object]) -> tuple[_Sorted, Clocks]:
    """All parts, those of doubtful groups apart, and the clocks that the others show."""
    owners = clock_owners({rank.rank: rank.clock for rank in ranks})
    found = _without(doubtful, _sorted(ranks, {}))
    rates, bounds = _drift(found, owners)
    if any(rates.values()):
        found = _without(doubtful, _sorted(ranks, {rank: rates[own] for rank, own in owners.items()}))
    links = _links(found, owners)
    clocks = replace(clock_offsets(*links, sorted(rates)), bounds=bounds)
    return found, clocks.with_drift(rates, links[0]).of_all(owners)


def _without(doubtful: Set[object], found: _Sorted) -> _Sorted:
    for key in [key for key in found.collectives if key[0] in doubtful]:
        found.unknown_groups.extend(found.collectives.pop(key))
    return found


def _drift(
    found: _Sorted, owners: Mapping[int, int]
) -> tuple[dict[int, float | None], dict[int, Bounds | None]]:
    """The rate of each clock, and its bounds, by its lowest rank."""
    links, lowest = _links(found, owners), sorted(set(owners.values()))
    bounds = bounds_of_rates([parts for parts in links[0] if len(parts) > 1], lowest)
    return clock_rates(*links, lowest), bounds


def _links(
    found: _Sorted, owners: Mapping[int, int]
) -> tuple[list[list[RankPart]], list[tuple[RankPart, RankPart]]]:
    """The links of clocks: collectives and messages, each part as one of the lowest rank with its clock."""
    collectives, messages = list(found.collectives.values()), _pairs(found)
    if all(rank == owner for rank, owner in owners.items()):
        return collectives, messages

    def owned(part: RankPart) -> RankPart:
        return replace(part, rank=owners[part.rank])

    apart = [
        [owned(parts[0]), *(owned(part) for part in parts if owners[part.rank] != owners[parts[0].rank])]
        for parts in collectives
    ]
    return apart, [(owned(sent), owned(got)) for sent, got in messages]


def _pairs(found: _Sorted) -> list[tuple[RankPart, RankPart]]:
    return [_in_order(key, parts) for key, parts in found.messages.items() if len(parts) == 2]


def _in_order(key: Key, parts: Sequence[RankPart]) -> tuple[RankPart, RankPart]:
    """The sender's part, and the receiver's."""
    sent, got = sorted(parts, key=lambda part: part.rank != key[SOURCE])
    return sent, got


def _can_be_one(key: Key, parts: Sequence[RankPart], offsets: Mapping[int, int]) -> bool:
    """Whether both ends of the message are known, and it arrives after it was sent."""
    if len(parts) != 2 or parts[0].rank == parts[1].rank:
        return False
    sent, got = _in_order(key, parts)
    return got.end_ns - offsets[got.rank] - sent.start_ns + offsets[sent.rank] >= -_noise_ns(sent)


def _linked(
    messages: Mapping[Key, Sequence[RankPart]], offsets: Mapping[int, int]
) -> Iterator[list[RankPart]]:
    """Sends with their receives; of grouped ones all kernels that messages link.

    Each is alone where a message has no other end, or a rank has several kernels in it.
    """
    near: defaultdict[RankPart, set[RankPart]] = defaultdict(set)
    alone: set[RankPart] = set()
    for key, parts in messages.items():
        for part in parts:
            near[part].update(parts)
        if not _can_be_one(key, parts, offsets):
            alone.update(parts)
    left = dict.fromkeys(near)
    while left:
        todo, together = [next(iter(left))], list[RankPart]()
        while todo:
            part = todo.pop()
            if part in left:
                del left[part]
                together.append(part)
                todo += near[part]
        ranks = {part.rank for part in together}
        if len(ranks) == len(together) and not alone.intersection(together):
            yield together
        else:
            yield from ([part] for part in together)


def _not_one_group(groups: Mapping[Key, Sequence[RankPart]], offsets: Mapping[int, int]) -> set[object]:
    """Groups without known ranks that are several, since their collectives mostly don't end together.

    Or since they can't at all: unless some are missing, so that the n-th of two ranks aren't the same.
    """
    found: defaultdict[object, list[Sequence[RankPart]]] = defaultdict(list)
    for key, parts in groups.items():
        if parts[0].local.group.ranks is None and parts[0].local.kind in SYNCHRONISING:
            found[key[0]].append(parts)
    return {group for group, same in found.items() if _are_several(same, offsets)}


def _are_several(same: Sequence[Sequence[RankPart]], offsets: Mapping[int, int]) -> bool:
    shared = [parts for parts in same if len(parts) > 1]
    if 2 * sum(_end_together(parts, offsets) for parts in shared) < len(shared):
        return True
    return len({len(parts) for parts in same}) == 1 and contradict(shared)


def _group_size(parts: Sequence[RankPart], all_here: bool) -> int | None:
    """The size of the group in the traces; else the number of parts, if no rank's trace is missing."""
    if parts[0].local.kind in POINT_TO_POINT:
        return 2
    said = {part.local.group_size for part in parts} - {None}
    if not said:
        return len(parts) if all_here else None
    size = said.pop()
    return size if not said and size is not None and size >= len(parts) else None


def _collectives(groups: Sequence[list[RankPart]], all_here: bool, clocks: Clocks) -> Iterable[Collective]:
    counts: Counter[str] = Counter()
    labels = group_labels({parts[0].local.group for parts in groups})
    for parts in groups:
        local = min(parts, key=lambda part: part.local.kind != "send").local
        sizes = [part.local.num_bytes for part in parts if part.local.num_bytes is not None]
        label = labels[local.group]
        if any(part.local.messages for part in parts):
            local = replace(local, kind=SEND_RECV)
        waits, transfer_ns = waits_and_transfer(parts, clocks)
        yield Collective(
            group=label,
            group_ranks=local.group.ranks,
            seq=counts[label] if local.sequence is None else local.sequence,
            kind=local.kind,
            num_bytes=max(sizes, default=None),
            group_size=_group_size(parts, all_here),
            parts=tuple(sorted(parts, key=lambda part: part.rank)),
            dtype=local.dtype,
            matched=(len(parts) > 1 and can_separate(parts, clocks)) or local.group.ranks == (parts[0].rank,),
            description=local.group.description,
            waits=waits,
            transfer_ns=transfer_ns,
        )
        counts[label] += 1


def _end_together(parts: Sequence[RankPart], offsets: Mapping[int, int]) -> bool:
    """Whether the ends are as close, on aligned clocks, as those of one synchronising collective."""
    ends = [part.end_ns - offsets[part.rank] for part in parts]
    shortest = min(part.local.duration for part in parts)
    return max(ends) - min(ends) <= _noise_ns(parts[0]) + shortest // 2


def _noise_ns(part: RankPart) -> int:
    return GPU_NOISE_NS if part.local.on_gpu else CPU_NOISE_NS


def _by_ends(parts: Sequence[RankPart], clocks: Clocks) -> list[list[RankPart]]:
    """Parts of the same group and kind whose ends are close together; others stay single.

    So do those of ranks whose clocks nothing links: how far their ends are apart isn't known.
    """
    offsets = clocks.offsets
    islands = {rank: island for island in clocks.unlinked for rank in island}
    sorts: dict[Key, list[RankPart]] = defaultdict(list)
    for part in parts:
        size = part.local.num_bytes if part.local.kind in SAME_SIZE else None
        sorts[islands.get(part.rank), part.local.group, part.local.kind, size].append(part)
    found: list[list[RankPart]] = []
    for same in sorts.values():
        cluster: list[RankPart] = []
        for part in sorted(same, key=lambda part: part.end_ns - offsets[part.rank]):
            if cluster and _joins(part, cluster, offsets):
                cluster.append(part)
            else:
                cluster = [part]
                found.append(cluster)
    return found


def _joins(part: RankPart, cluster: Sequence[RankPart], offsets: Mapping[int, int]) -> bool:
    apart_ns = part.end_ns - offsets[part.rank] - cluster[0].end_ns + offsets[cluster[0].rank]
    return apart_ns <= GPU_NOISE_NS and all(part.rank != other.rank for other in cluster)


def _sorts(rank: RankCollectives, local: LocalCollective, without_steps: Set[int]) -> Iterator[Key]:
    """The keys that are the same for a collective on all ranks, but for which one of its sort it is.

    The n-th is counted in the order of their ends: threads may issue them in different orders on different
    ranks, but all ranks leave together. Messages on the CPU are counted as they were issued, since they end
    when the rank asks for it. They are counted by step, unless a rank that takes part has none.
    """
    size = local.num_bytes if local.kind in SAME_SIZE else None
    step = rank.step_numbers.get(local.step)
    if not _is_message(local):
        group = local.group
        has_steps = without_steps.isdisjoint(group.ranks.members if group.ranks else without_steps)
        place: Key = ("step", step if has_steps else None)
        if local.sequence is not None:  # torch counts those of messages by rank
            place = ("seq", local.sequence)
        yield (group.name, group.ranks), *place, local.kind, size
    for kind, peer in local.sent_and_received if _is_message(local) else ():
        has_steps = without_steps.isdisjoint((rank.rank, peer))
        ends = ("from", rank.rank, peer) if kind == "send" else ("from", peer, rank.rank)
        yield None, "step", step if has_steps else None, *ends


def _is_message(local: LocalCollective) -> bool:
    return local.kind in POINT_TO_POINT or local.kind == SEND_RECV or bool(local.messages)


def _place_in_order(local: LocalCollective) -> int:
    is_message = local.kind in POINT_TO_POINT and not local.on_gpu
    return local.start if is_message else local.end


def _times_ns(parts: Sequence[RankPart]) -> Int64:
    """The times by which parts are counted, on their rank's clock."""
    return np.array([part.start_ns + _place_in_order(part.local) - part.local.start for part in parts])
