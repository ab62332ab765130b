"""How far the ranks' clocks are apart, and how fast they run against each other.

Both follow from what links the ranks: collectives, and messages between two. Computers' clocks differ by up
to some 100 ppm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import SAME_SIZE, SYNCHRONISING

MAX_RATE = 1e-3
"""No working clock runs faster or slower than others by more; more is not drift."""
Shift = tuple[int | None, int | None]
"""The least and the most ns by which one clock may be ahead of another; `None`: no bound."""


@dataclass(frozen=True)
class Clocks:
    """How many ns each rank's clock is ahead of the lowest rank's, and how well that is known."""

    offsets: Mapping[int, int]
    slack: Mapping[int, int | None]
    """± ns to those that link them, of ranks that only messages link with the lowest rank; `None` where they
    run one way only."""
    between: Mapping[int, Shift]
    """Between which each offset is; of ranks that collectives on GPUs link with the lowest rank one value, if
    their drift is known."""
    unlinked: tuple[tuple[int, ...], ...]
    """Ranks that nothing links with the lowest rank, by what links them; their clocks are as recorded."""
    rates: Mapping[int, float | None] = field(default_factory=dict)
    """The gain of each clock per unit of time, from the start of its trace on; `None`: unknown."""
    bounds: Mapping[int, tuple[float, float] | None] = field(default_factory=dict)
    """Between which it certainly does; `None`: unknown."""
    owners: Mapping[int, int] = field(default_factory=dict)
    """The lowest rank with the same clock, of each rank."""

    def are_one(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have one clock, so that their times can be compared as they are."""
        return len({self.owners.get(rank, rank) for rank in ranks}) == 1

    def are_linked(self, ranks: Iterable[int]) -> bool:
        """Whether it is known which of these ranks came first, as far as their clocks are aligned."""
        islands = {rank: island for island in self.unlinked for rank in island}
        ranks = set(ranks)
        if len({islands.get(rank) for rank in ranks}) > 1:
            return False
        return self.are_one(ranks) or all(self.slack.get(rank, 0) is not None for rank in ranks)

    def of_all(self, owners: Mapping[int, int]) -> Clocks:
        """The clocks of all ranks, from those of the lowest ranks that have each."""
        return replace(
            self,
            offsets={rank: self.offsets[owner] for rank, owner in owners.items()},
            slack={rank: self.slack[owner] for rank, owner in owners.items() if owner in self.slack},
            between={rank: self.between[owner] for rank, owner in owners.items()},
            rates={rank: self.rates[owner] for rank, owner in owners.items()},
            bounds={rank: self.bounds[owner] for rank, owner in owners.items()},
            unlinked=tuple(
                tuple(rank for rank, owner in owners.items() if owner in island) for island in self.unlinked
            ),
            owners=owners,
        )

    def with_drift(
        self, rates: Mapping[int, float | None], collectives: Sequence[Sequence[RankPart]]
    ) -> Clocks:
        """The clocks with these rates; where a drift is unknown, offsets may be all that collectives show."""
        left = [
            [(part.rank, part.end_ns - self.offsets[part.rank]) for part in parts]
            for parts in collectives
            if parts[0].local.kind in SYNCHRONISING
        ]
        times_ns = [time_ns for parts in left for _, time_ns in parts]
        most_ns = MAX_RATE * (max(times_ns, default=0) - min(times_ns, default=0))
        doubts: dict[int, tuple[int, int]] = {}
        for parts in left:
            known_ns = next((ns for rank, ns in parts if rates.get(rank) is not None), parts[0][1])
            for rank, ns in parts:
                if rates.get(rank) is None and abs(ns - known_ns) <= most_ns:  # more is no drift
                    least, most = doubts.get(rank, (0, 0))
                    doubts[rank] = min(least, ns - known_ns), max(most, ns - known_ns)
        between = {rank: _wider(own, doubts.get(rank, (0, 0))) for rank, own in self.between.items()}
        return replace(self, rates=rates, between=between)

    def realigned(self, rank: int, base_ns: int, origin_ns: int) -> Realigned:
        """Converts times since a rank's `base_ns` to those since `origin_ns`, on the lowest rank's clock."""
        return Realigned(base_ns - self.offsets[rank] - origin_ns, self.rates.get(rank))


@dataclass(frozen=True)
class Realigned:
    """Turns times since the start of a rank's trace into those on the lowest rank's clock."""

    shift_ns: int
    rate: float | None = None

    def time_ns(self, local_ns: int) -> int:
        """A time in ns, on the lowest rank's clock."""
        return self.shift_ns + steady(local_ns, self.rate)

    def each(self, local_ns: Int64) -> Int64:
        """Many such times."""
        gained_ns = np.rint(local_ns * self.rate).astype(np.int64) if self.rate else 0
        return local_ns - gained_ns + self.shift_ns


def steady(local_ns: int, rate: float | None) -> int:
    """A time since the start of a rank's trace, without what its clock has gained since then."""
    return local_ns - round(local_ns * rate) if rate else local_ns


def clock_owners(clocks: Mapping[int, str | None]) -> dict[int, int]:
    """The lowest rank with the same clock, of each rank; of a clock that isn't known, the rank itself."""
    lowest: dict[str | int, int] = {}
    return {rank: lowest.setdefault(clocks[rank] or rank, rank) for rank in sorted(clocks)}


def clock_offsets(
    collectives: Sequence[Sequence[RankPart]],
    messages: Sequence[tuple[RankPart, RankPart]],
    ranks: Sequence[int],
) -> Clocks:
    """The clocks of all ranks.

    All ranks leave a synchronising collective at the same moment, on GPUs within microseconds: the median
    difference of their ends is that of their clocks. On CPUs, a thread sees the end when it gets a core, and
    the difference is only bounded: none leaves before all have come. Ranks that share no collective are
    linked by messages: none arrives before it was sent. Messages in both directions bound it from both sides.

    Args:
        collectives: the parts of each collective.
        messages: the part of the sender and of the receiver of each message.
        ranks: all ranks.
    """
    parts = _islands(_edges(collectives), ranks)
    linked = {rank: link for part in parts for rank, link in part.items()}
    left = [{rank: link.ahead_ns for rank, link in part.items()} for part in parts]
    offsets, slack = left.pop(0), dict[int, int | None]()
    between: dict[int, Shift] = {rank: (linked[rank].least_ns, linked[rank].most_ns) for rank in offsets}
    while left:
        shifts = [_shift(offsets, offsets, each, messages) for each in left]
        best = min(range(len(left)), key=lambda i: _uncertainty(shifts[i]))
        if shifts[best] == (None, None):
            break
        ahead_ns, known_ns = _estimate(shifts[best])
        island = left.pop(best)
        bounds = _around(ahead_ns, _shift(*_ends(between), island, messages))
        offsets |= {rank: own + ahead_ns for rank, own in island.items()}
        slack |= dict.fromkeys(island, known_ns)
        between |= {rank: _wider(bounds, (linked[rank].least_ns, linked[rank].most_ns)) for rank in island}
    for island in left:
        offsets |= island
        between |= dict.fromkeys(island, (None, None))
    return Clocks(offsets, slack, between, tuple(tuple(sorted(island)) for island in left))


def _ends(between: Mapping[int, Shift]) -> tuple[dict[int, int], dict[int, int]]:
    """The least and the most that offsets may be, of ranks that have such a bound."""
    least = {rank: ns for rank, (ns, _) in between.items() if ns is not None}
    return least, {rank: ns for rank, (_, ns) in between.items() if ns is not None}


def _around(ahead_ns: int, shift: Shift) -> Shift:
    """The bounds, or beyond them where times that scatter contradict each other."""
    least, most = shift
    if least is None or most is None:
        return least, most
    return min(least, most, ahead_ns), max(least, most, ahead_ns)


def _wider(shift: Shift, doubt: tuple[int, int]) -> Shift:
    (least, most), (less, more) = shift, doubt
    return None if least is None else least + less, None if most is None else most + more


class Link(NamedTuple):
    """How far a clock is ahead of another one, and between what."""

    ahead_ns: int
    least_ns: int
    most_ns: int

    def back(self) -> Link:
        """How far the other one is ahead of it."""
        return Link(-self.ahead_ns, -self.most_ns, -self.least_ns)

    def after(self, link: Link) -> Link:
        """How far it is ahead of the clock that the other one is this far ahead of."""
        return Link(*(own + other for own, other in zip(self, link, strict=True)))


def _edges(collectives: Sequence[Sequence[RankPart]]) -> dict[int, dict[int, Link]]:
    """Median difference of two ranks' clocks.

    Kinds whose size must agree are more reliable; others count only between ranks that share none of those.
    """
    sized, other = (
        _pairs(parts for parts in collectives if (parts[0].local.kind in SAME_SIZE) == is_sized)
        for is_sized in (True, False)
    )
    edges: dict[int, dict[int, Link]] = defaultdict(dict)
    for (mine, their), pairs in (other | sized).items():
        link = _link(pairs)
        edges[mine][their], edges[their][mine] = link, link.back()
    return edges


def _link(pairs: Sequence[tuple[RankPart, RankPart]]) -> Link:
    """How far the clock of the second rank is ahead of the first one's."""
    ends = np.array([part.end_ns - first.end_ns for first, part in pairs], dtype=np.int64)
    median = int(np.median(ends))
    if all(part.local.on_gpu for pair in pairs for part in pair):
        return Link(median, median, median)
    least = max(part.start_ns - first.end_ns for first, part in pairs)
    most = min(part.end_ns - first.start_ns for first, part in pairs)
    return Link(median, min(least, most, median), max(least, most, median))


def _islands(edges: Mapping[int, Mapping[int, Link]], ranks: Sequence[int]) -> list[dict[int, Link]]:
    """The ranks that collectives link, each with how far its clock is ahead of the first one's."""
    found: list[dict[int, Link]] = []
    for rank in sorted(ranks):
        if not any(rank in island for island in found):
            found.append(_reached(rank, edges))
    return found


def _reached(start: int, edges: Mapping[int, Mapping[int, Link]]) -> dict[int, Link]:
    found, todo = {start: Link(0, 0, 0)}, [start]
    while todo:
        rank = todo.pop(0)
        for other, link in edges.get(rank, {}).items():
            if other not in found:
                found[other] = link.after(found[rank])
                todo.append(other)
    return found


def _shift(
    least: Mapping[int, int],
    most: Mapping[int, int],
    island: Mapping[int, int],
    messages: Sequence[tuple[RankPart, RankPart]],
) -> Shift:
    """How far the island's clocks may be ahead of those that are known to be from `least` to `most`."""
    there = list(_travelled(most, island, messages))
    back = list(_travelled(island, least, messages))
    return -min(back) if back else None, min(there) if there else None


def _travelled(
    senders: Mapping[int, int], receivers: Mapping[int, int], messages: Sequence[tuple[RankPart, RankPart]]
) -> Iterator[int]:
    """The time from the sending of each message to its arrival, on the two clocks.

    On a GPU a receiver is done after its sender; on a CPU the sender may notice later that it is done, and a
    kernel of several messages goes on with the others.
    """
    for sent, got in messages:
        if sent.rank in senders and got.rank in receivers:
            ends_first = sent.local.on_gpu and not sent.local.messages
            sent_ns = sent.end_ns if ends_first else sent.start_ns
            yield got.end_ns - receivers[got.rank] - sent_ns + senders[sent.rank]


def _uncertainty(shift: Shift) -> tuple[int, int]:
    """Sorts what is known best first."""
    least, most = shift
    if least is not None and most is not None:
        return 0, abs(most - least)
    return (1, 0) if shift != (None, None) else (2, 0)


def _estimate(shift: Shift) -> tuple[int, int | None]:
    """The middle, and how far it may be off; else the bound, as if the fastest message took no time."""
    least, most = shift
    if least is not None and most is not None:
        return (least + most) // 2, (abs(most - least) + 1) // 2
    return (least if most is None else most) or 0, None


MIN_LINKS = 9
"""Fewer can't show a trend."""
MIN_CHANGE_NS = 500
"""A smaller change over all links is none: traces have whole nanoseconds, or microseconds."""
MIN_CHANGE_ON_CPU_NS = 1_000_000
"""There a thread sees an end when it gets a core."""
SIGMAS = 5
MAX_BOUNDS = 16
"""Collectives at either end of the traces that bound a rate."""
Links = list[tuple[int, int]]
"""A time, and by how much one clock is ahead of the other then, in ns."""
Bounds = tuple[float, float]


def clock_rates(
    collectives: Sequence[Sequence[RankPart]],
    messages: Sequence[tuple[RankPart, RankPart]],
    ranks: Sequence[int],
) -> dict[int, float | None]:
    """How much each rank's clock gains on the lowest rank's, per unit of time; `None` if not determinable.

    The change is that of the difference between ends of collectives, from the first third of them to the last
    one. Where only messages link ranks, those of both directions must agree on it.
    """
    parts = [part for same in (*collectives, *messages) for part in same]
    least_ns = MIN_CHANGE_NS if all(part.local.on_gpu for part in parts) else MIN_CHANGE_ON_CPU_NS
    by_collectives = _by_collectives(collectives, least_ns)
    by_messages = _by_messages(messages, least_ns)
    first = min(ranks)
    rates = {first: 0.0}
    todo = [first]
    while todo:
        rank = todo.pop(0)
        for other, rate in (_neighbours(rank, by_messages) | _neighbours(rank, by_collectives)).items():
            if other not in rates:
                rates[other] = rates[rank] + rate
                todo.append(other)
    return {rank: rates.get(rank) for rank in ranks}


def _neighbours(rank: int, rates: Mapping[tuple[int, int], float]) -> dict[int, float]:
    ahead = {other: rate for (mine, other), rate in rates.items() if mine == rank}
    return ahead | {other: -rate for (other, mine), rate in rates.items() if mine == rank}


def _by_collectives(collectives: Sequence[Sequence[RankPart]], least_ns: int) -> dict[tuple[int, int], float]:
    links: defaultdict[tuple[int, int], Links] = defaultdict(list)
    for parts in collectives:
        if parts[0].local.kind in SYNCHRONISING & SAME_SIZE:
            for part in parts[1:]:
                links[parts[0].rank, part.rank].append((part.end_ns, part.end_ns - parts[0].end_ns))
    bounds = {pair: rate_bounds(same) for pair, same in _pairs(collectives).items()}
    rates = {pair: _within(rate_of(same, least_ns), same, bounds.get(pair)) for pair, same in links.items()}
    return {pair: rate for pair, rate in rates.items() if rate is not None}


def _within(rate: float | None, links: Links, bounds: Bounds | None) -> float | None:
    """The rate within its bounds; the trend of the links where noise hides it but it can't be 0."""
    if rate is None or bounds is None:
        return rate
    trend = rate or (0.0 if bounds[0] <= 0 <= bounds[1] else rate_of(links, 0, 0) or 0.0)
    return min(max(trend, bounds[0]), bounds[1])


def bounds_of_rates(
    collectives: Sequence[Sequence[RankPart]], ranks: Sequence[int]
) -> dict[int, Bounds | None]:
    """Between which rates each rank's clock runs against the lowest rank's, whatever the noise.

    `None` where the two share too few collectives.
    """
    first, pairs = min(ranks), _pairs(collectives)
    found = {rank: rate_bounds(pairs.get((first, rank), [])) for rank in ranks}
    return found | {first: (0.0, 0.0)}


def _pairs(
    collectives: Iterable[Sequence[RankPart]],
) -> dict[tuple[int, int], list[tuple[RankPart, RankPart]]]:
    found: defaultdict[tuple[int, int], list[tuple[RankPart, RankPart]]] = defaultdict(list)
    for parts in collectives:
        if parts[0].local.kind in SYNCHRONISING:
            for part in parts[1:]:
                found[parts[0].rank, part.rank].append((parts[0], part))
    return found


def contradict(collectives: Sequence[Sequence[RankPart]]) -> bool:
    """Whether these can't be collectives of one group: a rank would leave before another has come."""
    found = map(_rate_bounds, _pairs(collectives).values())
    return any(bounds is not None and bounds[0] - bounds[1] > MAX_RATE for bounds in found)


def rate_bounds(pairs: Sequence[tuple[RankPart, RankPart]]) -> Bounds | None:
    """The least and the largest rate that collectives of two ranks allow; `None` if that is any rate."""
    bounds = _rate_bounds(pairs)
    if bounds is None or bounds[0] > bounds[1]:
        return None
    least, most = max(bounds[0], -MAX_RATE), min(bounds[1], MAX_RATE)
    return None if least > most or most - least == 2 * MAX_RATE else (least, most)


def _rate_bounds(pairs: Sequence[tuple[RankPart, RankPart]]) -> Bounds | None:
    """The rates; the least is above the largest where the ends contradict each other.

    None leaves a collective before the other has come: so each bounds how far one clock is ahead, and two of
    them, by the time between them, how much faster it runs.
    """
    if len(pairs) < 2:
        return None
    ordered = sorted(pairs, key=lambda pair: pair[0].end_ns)
    half = len(ordered) // 2
    early, late = (
        sorted(some, key=lambda pair: pair[0].local.duration + pair[1].local.duration)[:MAX_BOUNDS]
        for some in (ordered[:half], ordered[half:])
    )
    rates = [
        _bounds(before, after) for before in early for after in late if before[0].end_ns < after[0].start_ns
    ]
    return (max(least for least, _ in rates), min(most for _, most in rates)) if rates else None


def _bounds(before: tuple[RankPart, RankPart], after: tuple[RankPart, RankPart]) -> Bounds:
    (mine, theirs), (my_next, their_next) = before, after
    most_ns = (their_next.end_ns - my_next.start_ns) - (theirs.start_ns - mine.end_ns)
    least_ns = (their_next.start_ns - my_next.end_ns) - (theirs.end_ns - mine.start_ns)
    shortest, longest = my_next.start_ns - mine.end_ns, my_next.end_ns - mine.start_ns
    return (
        least_ns / (longest if least_ns > 0 else shortest),
        most_ns / (shortest if most_ns > 0 else longest),
    )


def _by_messages(
    messages: Sequence[tuple[RankPart, RankPart]], least_ns: int
) -> dict[tuple[int, int], float]:
    links: defaultdict[tuple[int, int], Links] = defaultdict(list)
    for sent, got in messages:
        sent_ns = sent.end_ns if sent.local.on_gpu and not sent.local.messages else sent.start_ns
        links[sent.rank, got.rank].append((got.end_ns, got.end_ns - sent_ns))
    found = {}
    for pair in _both_ways(set(links)):
        there, back = rate_of(links[pair], least_ns), rate_of(links[pair[::-1]], least_ns)
        if there is not None and back is not None and abs(there + back) <= max(abs(there), 1e-6) / 2:
            found[pair] = (there - back) / 2
    return found


def _both_ways(pairs: Set[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    return [(a, b) for a, b in sorted(pairs) if a < b and (b, a) in pairs]


def rate_of(links: Links, least_ns: int = MIN_CHANGE_NS, sigmas: float = SIGMAS) -> float | None:
    """The change of the difference per unit of time; 0 if there is none; `None` if the links don't show it.

    Medians of the first and the last third: single late ends don't count.
    """
    if len(links) < MIN_LINKS:
        return None
    times, ahead = np.array(sorted(links), dtype=np.int64).T
    third = len(links) // 3
    apart_ns = float(np.median(times[-third:] - times[0]) - np.median(times[:third] - times[0]))
    ahead = ahead - ahead[0]  # small numbers, which doubles hold exactly
    change_ns = float(np.median(ahead[-third:]) - np.median(ahead[:third]))
    if apart_ns <= 0:
        return None
    rate = change_ns / apart_ns
    rest = ahead - rate * (times - times[0])
    spread_ns = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    uncertain_ns = sigmas * 1.2533 * spread_ns * (2 / third) ** 0.5
    if abs(change_ns) <= max(uncertain_ns, least_ns):
        return 0.0
    return rate if abs(rate) <= MAX_RATE else None
