"""Collectives over ranks: which parts belong together, who waited, who came last, how fast the data moved.

Ranges of gloo carry no group. But all ranks of a group take part in its collectives, so that the number of
those of one kind and size that a rank shows in a step is a sum over the groups that it is in. Where these
equations have one solution, and only one group of a rank has any, they are of that group. Where they have
several solutions, as with the rows and columns of a mesh, nothing is assumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from gpurun.launcher.grouping import grouped
from gpurun.launcher.trace.analysis.collectives.clocks import (
    Bounds,
    Clocks,
    bounds_of_rates,
    clock_offsets,
    clock_owners,
    clock_rates,
    contradict,
    steady,
)
from gpurun.launcher.trace.analysis.collectives.local_collectives import (
    CLOCK_NS,
    UNNAMED,
    LocalCollective,
    RankPart,
    TracedGroup,
    group_labels,
)
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import POINT_TO_POINT, SAME_SIZE, SEND_RECV, SYNCHRONISING
from gpurun.launcher.trace.kineto.columns import RankTuple

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
        if part.local.is_cpu_message:
            return self.transfer_ns
        return part.local.duration - self.waits[part.rank]

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


def _waits_and_transfer(parts: Sequence[RankPart], clocks: Clocks) -> tuple[dict[int, int], int]:
    """How long each rank waited, in ns, and how long the data then moved.

    All leave a collective together, so whoever is in it for longer than the last rank to come has waited. The
    two ends of a message on the CPU don't: a rank may ask much later whether its own is done. There both wait
    until the other has come, if their clocks are known to each other, and then the receiver gets it. And a
    thread on the CPU may get a core late to see the end. On one clock, no rank waits after the last has come;
    on aligned ones the last rank doesn't, whose end may be recorded later than those of others.
    """
    is_message = parts[0].local.is_cpu_message
    lengths = {part.rank: part.local.duration for part in parts}
    if is_message and len(parts) == 2 and all(clocks.slack.get(part.rank, 0) is not None for part in parts):
        starts_ns = {part.rank: part.start_ns - clocks.offsets[part.rank] for part in parts}
        came_ns = max(starts_ns.values())
        got = max(parts, key=lambda part: part.local.kind == "recv")
        waits = {each.rank: min(came_ns - starts_ns[each.rank], lengths[each.rank]) for each in parts}
        return waits, lengths[got.rank] - waits[got.rank]
    if len(parts) > 2 and any(part.local.messages for part in parts):
        waits = {part.rank: _until_all_came(part, parts, clocks) for part in parts}
        return waits, max(lengths[rank] - waited_ns for rank, waited_ns in waits.items())
    shortest_ns = min(lengths.values())
    waits = {rank: length_ns - shortest_ns for rank, length_ns in lengths.items()}
    if not parts[0].local.on_gpu and clocks.are_one(waits):
        latest_ns = max(part.start_ns for part in parts)
        meets = parts[0].local.kind in SYNCHRONISING
        for part in parts:
            longest_ns = lengths[part.rank] if meets else waits[part.rank]
            waits[part.rank] = min(latest_ns - part.start_ns, longest_ns)
    if (last := _last(parts, clocks)) is not None:
        waits[last] = 0
    return waits, min(lengths[rank] - waited_ns for rank, waited_ns in waits.items())


def _can_separate(parts: Sequence[RankPart], clocks: Clocks) -> bool:
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


def last_rank(collective: Collective, clocks: Clocks) -> int | None:
    """The rank that arrived last, on aligned clocks; `None` if unclear, as with ties.

    Of messages that link several ranks none did: each rank waits for its own neighbours.
    """
    is_ring = collective.is_grouped and len(collective.parts) > 2
    is_shown = collective.matched and len(collective.parts) > 1 and not is_ring
    return _last(collective.parts, clocks) if is_shown else None


def _last(parts: Sequence[RankPart], clocks: Clocks) -> int | None:
    if not clocks.are_linked(part.rank for part in parts):
        return None
    arrivals = [(part.start_ns - clocks.offsets[part.rank], part.rank) for part in parts]
    latest_ns, rank = max(arrivals)
    return rank if sum(start_ns == latest_ns for start_ns, _ in arrivals) == 1 else None


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


Sort = tuple[object, ...]
"""Number of the step, kind, size."""
Located = tuple[int, LocalCollective, int | None]
"""Rank, collective, number of its step."""


def _groups_found(collectives: Iterable[Located]) -> dict[int, TracedGroup]:
    """The groups of collectives whose traces don't name one, by the `id` of the collective."""
    unnamed = [each for each in collectives if _is_unnamed(each[1])]
    names: defaultdict[RankTuple, set[str]] = defaultdict(set)
    counts: defaultdict[Sort, Counter[int]] = defaultdict(Counter)
    for rank, local, step in unnamed:
        counts[_sort(local, step)][rank] += 1
        for name, ranks in local.group.possible:
            names[ranks].add(name)
    used = {sort: _used(list(names), by_rank) for sort, by_rank in counts.items()}
    found = {}
    for rank, local, step in unnamed:
        mine = [ranks for ranks in used[_sort(local, step)] if rank in ranks.members]
        if len(mine) == 1:
            called = names[mine[0]]
            name = next(iter(called)) if len(called) == 1 else UNNAMED
            found[id(local)] = TracedGroup(name, mine[0])
    return found


def named(local: LocalCollective, group: TracedGroup | None) -> LocalCollective:
    """The collective with its group, if it may be of any of several and one was found."""
    if group is None or group.ranks is None or not local.group.is_ambiguous:
        return local
    return replace(local, group=group, group_size=len(group.ranks))


def _is_unnamed(local: LocalCollective) -> bool:
    return bool(local.group.possible) and local.kind not in POINT_TO_POINT


def _sort(local: LocalCollective, step: int | None) -> Sort:
    return step, local.kind, local.num_bytes if local.kind in SAME_SIZE else None


def _used(groups: Sequence[RankTuple], counts: Mapping[int, int]) -> list[RankTuple]:
    """The groups that had collectives, by how many each rank shows; none where that isn't certain."""
    able = [ranks for ranks in groups if all(counts.get(rank) for rank in ranks)]
    rows = sorted(counts)
    matrix = np.array([[rank in ranks.members for ranks in able] for rank in rows], dtype=float).reshape(
        len(rows), -1
    )
    if not able or np.linalg.matrix_rank(matrix) < len(able):
        return []
    seen = np.array([counts[rank] for rank in rows], dtype=float)
    numbers = np.rint(np.linalg.lstsq(matrix, seen, rcond=None)[0])
    if (numbers < 0).any() or not np.array_equal(matrix @ numbers, seen):
        return []
    return [ranks for ranks, number in zip(able, numbers.tolist(), strict=True) if number]


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
    host: str | None = None
    """The name of the computer, whose clock it is if no other one has that name; `None`: unknown."""


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
    ranks = _with_groups(_as_others_show(ranks))
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


MAX_TRIED = 8
"""Other ranks that may say what a rank's collectives are."""


def _as_others_show(ranks: Sequence[RankCollectives]) -> Sequence[RankCollectives]:
    """The ranks with the kinds and sizes of collectives that their traces lack, as without the CPU's events.

    They are those of another rank that has as many of a group in a step, in the same order.
    """
    runs = [_runs(rank) for rank in ranks]
    known: defaultdict[Key, list[list[LocalCollective]]] = defaultdict(list)
    for key, run in ((key, run) for each in runs for key, run in each.items()):
        if all(local.num_bytes is not None for local in run):
            known[key].append(run)
    completed = {
        id(own): _as_shown(own, other)
        for each in runs
        for key, run in each.items()
        if any(local.num_bytes is None for local in run)
        for others in known[key][:MAX_TRIED]
        if len(run) == len(others) and all(map(_may_be, run, others))
        for own, other in zip(run, others, strict=True)
    }
    return [
        replace(rank, collectives=[completed.get(id(each), each) for each in rank.collectives])
        for rank in ranks
    ]


def _runs(rank: RankCollectives) -> Mapping[Key, list[LocalCollective]]:
    """The collectives of each group and step, in the order of their ends."""
    found: defaultdict[Key, list[LocalCollective]] = defaultdict(list)
    for local in sorted(rank.collectives, key=_place_in_order):
        found[local.group, rank.step_numbers.get(local.step)].append(local)
    return found


def _may_be(own: LocalCollective, other: LocalCollective) -> bool:
    """NCCL runs an all-to-all as sends and receives."""
    is_open = own.kind == SEND_RECV and not own.messages and own.num_bytes is None
    return own.kind == other.kind or (is_open and other.kind == "all_to_all")


def _as_shown(own: LocalCollective, other: LocalCollective) -> LocalCollective:
    """The collective with what only another rank's trace says; the bytes of an all-to-all differ by rank."""
    if own.num_bytes is not None:
        return own
    num_bytes = other.num_bytes if other.kind in SAME_SIZE else None
    return replace(own, kind=other.kind, num_bytes=num_bytes, dtype=other.dtype, group_size=other.group_size)


def _with_groups(ranks: Sequence[RankCollectives]) -> list[RankCollectives]:
    """The ranks with the groups of unnamed collectives, where only one is possible."""
    groups = _groups_found(
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
    unmarked = _unmarked(ranks)
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
                for sort in _sorts(rank, local, unmarked):
                    sorts[sort][rank.rank].append(part)
    return sorts


def _unmarked(ranks: Sequence[RankCollectives]) -> Mapping[int | None, Set[int]]:
    """The ranks without any steps, under `None`; by step, those that also lack its mark alone."""
    without = {rank.rank for rank in ranks if not rank.step_numbers}
    found: defaultdict[int | None, set[int]] = defaultdict(lambda: without, {None: without})
    every = {number for rank in ranks for number in rank.step_numbers.values()}
    for rank in ranks:
        numbers = set(rank.step_numbers.values())
        if numbers and any(each.step not in rank.step_numbers for each in rank.collectives):
            for number in every - numbers:
                if min(numbers) < number < max(numbers):
                    found[number] = found[number] | {rank.rank}
    return found


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
    found = _without(doubtful, _sorted(ranks, {}))
    owners = clock_owners({rank.rank: rank.clock for rank in ranks})
    named = clock_owners({rank.rank: rank.clock or rank.host for rank in ranks})
    if named != owners and _can_have_one_clock(named, found):
        owners = named
    rates, bounds = _drift(found, owners)
    if any(rates.values()):
        found = _without(doubtful, _sorted(ranks, {rank: rates[own] for rank, own in owners.items()}))
    links = _links(found, owners)
    clocks = replace(clock_offsets(*links, sorted(rates)), bounds=bounds)
    return found, clocks.with_drift(rates, links[0]).of_all(owners)


def _can_have_one_clock(owners: Mapping[int, int], found: _Sorted) -> bool:
    """Whether, with these clocks, none leaves a collective before all have come, or gets what isn't sent."""
    meetings = [
        same
        for parts in found.collectives.values()
        if parts[0].local.kind in SYNCHRONISING
        for same in grouped(parts, lambda part: owners[part.rank]).values()
    ]
    together = all(
        max(part.start_ns for part in same) <= min(part.end_ns for part in same) + CLOCK_NS
        for same in meetings
    )
    return together and all(
        owners[sent.rank] != owners[got.rank] or sent.start_ns <= got.end_ns + CLOCK_NS
        for sent, got in _pairs(found)
    )


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
        waits, transfer_ns = _waits_and_transfer(parts, clocks)
        yield Collective(
            group=label,
            group_ranks=local.group.ranks,
            seq=counts[label] if local.sequence is None else local.sequence,
            kind=local.kind,
            num_bytes=max(sizes, default=None),
            group_size=_group_size(parts, all_here),
            parts=tuple(sorted(parts, key=lambda part: part.rank)),
            dtype=local.dtype,
            matched=(len(parts) > 1 and _can_separate(parts, clocks))
            or local.group.ranks == (parts[0].rank,),
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


def _sorts(
    rank: RankCollectives, local: LocalCollective, unmarked: Mapping[int | None, Set[int]]
) -> Iterator[Key]:
    """The keys that are the same for a collective on all ranks, but for which one of its sort it is.

    The n-th is counted in the order of their ends: threads may issue them in different orders on different
    ranks, but all ranks leave together. Messages on the CPU are counted as they were issued, since they end
    when the rank asks for it. They are counted by step, unless a rank that takes part has none; or, of those
    that end together, doesn't mark this step.
    """
    size = local.num_bytes if local.kind in SAME_SIZE else None
    step = rank.step_numbers.get(local.step)
    if not _is_message(local):
        group = local.group
        without = unmarked[step if local.kind in SYNCHRONISING else None]
        has_steps = without.isdisjoint(group.ranks.members if group.ranks else without)
        place: Key = ("step", step if has_steps else None)
        if local.sequence is not None:  # torch counts those of messages by rank
            place = ("seq", local.sequence)
        yield (group.name, group.ranks), *place, local.kind, size
    for kind, peer in local.sent_and_received if _is_message(local) else ():
        has_steps = unmarked[None].isdisjoint((rank.rank, peer))
        ends = ("from", rank.rank, peer) if kind == "send" else ("from", peer, rank.rank)
        yield None, "step", step if has_steps else None, *ends


def _is_message(local: LocalCollective) -> bool:
    return local.kind in POINT_TO_POINT or local.kind == SEND_RECV or bool(local.messages)


def _place_in_order(local: LocalCollective) -> int:
    return local.start if local.is_cpu_message else local.end


def _times_ns(parts: Sequence[RankPart]) -> Int64:
    """The times by which parts are counted, on their rank's clock."""
    return np.array([part.start_ns + _place_in_order(part.local) - part.local.start for part in parts])
