"""How fast the ranks' clocks run against each other: computers' clocks differ by up to some 100 ppm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np

from gpurun.launcher.trace.analysis.collectives.clocks import MAX_RATE
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.kineto.classify import SAME_SIZE, SYNCHRONISING

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
    collectives: Sequence[Sequence[RankPart]],
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
    """The least and the largest rate that collectives of two ranks allow; `None` if too few do."""
    bounds = _rate_bounds(pairs)
    return bounds if bounds is not None and bounds[0] <= bounds[1] else None


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
