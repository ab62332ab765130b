"""Finds faults of the links between devices. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpurun.launcher.rundir.records import PairRate
from gpurun.launcher.selftest.evidence import (
    CheckResult,
    Evidence,
    failed,
    is_possible,
    judged,
    ok,
    skipped,
)
from gpurun.launcher.units import format_rate, size_text

LEAST_SENT = {True: 0.3, False: 0.2}
"""The share of a link's specified rate, in a message; by whether it is NVLink. Messages that can't go
from GPU to GPU over PCIe are copied through the host's memory, twice."""
LEAST_OF_PAIRS = {True: 0.2, False: 0.5}
"""Share of the best pair with links of the same kind; by whether devices share the host and are less even."""
LEAST_REDUCED = {True: 0.3, False: 0.1}
"""Share of the slowest pair's link: in an all-reduce all devices send at once, and may share PCIe paths."""
LEAST_OVER_NETWORK = {True: 0.05, False: 0.1}
"""The share of the slower interface's rate, for pairs and all-reduces; by whether devices share the host. TCP
leaves much of a fast network unused; a network for RDMA is faster than the interface by which nodes meet."""
_NVLINKS = re.compile(r"NVLink (\d+)x")
"""As `machine.gpus` names links."""
LOOPBACK, NETWORK = "loopback (gloo)", "the network"


def sums(seen: Evidence) -> CheckResult:
    """All-reduces of known results."""
    wrong = [
        failed("wrong-sum", wrong=text, device=seen.devices[facts.rank])
        for facts in seen.facts
        for text in facts.wrong_sums
    ]
    most = max((each.num_bytes for facts in seen.facts for each in facts.reduces), default=0)
    return judged(wrong, ok("sums", size=size_text(most, "bytes")))


def transport(seen: Evidence, low: int, high: int) -> str:
    """How two devices are linked: `NVLink 18x`, the way over PCIe, or the host's loopback interface."""
    if seen.nodes:
        return NETWORK
    if not seen.gpus:
        return LOOPBACK
    return seen.gpus[low].peer_links.get(seen.gpus[high].index, "an unknown link")


def is_nvlink(way: str) -> bool:
    return _NVLINKS.fullmatch(way) is not None


def is_pcie(way: str) -> bool:
    return way.startswith("PCIe")


def link_gb_per_s(seen: Evidence, low: int, high: int) -> float | None:
    """The rate of two devices' link in one direction; `None` where it isn't known."""
    if seen.nodes:
        both = [seen.network_gb_per_s[seen.nodes[rank]] for rank in (low, high)]
        return min(rate for rate in both if rate) if all(both) else None
    if not seen.health:
        return None
    if found := _NVLINKS.fullmatch(transport(seen, low, high)):
        rates = [seen.health[rank].nvlink_gb_per_s for rank in (low, high)]
        return min(rate * int(found[1]) for rate in rates if rate) if all(rates) else None
    if not is_pcie(transport(seen, low, high)):
        return None
    lanes = [seen.health[rank].pcie_gb_per_s for rank in (low, high)]
    return min(rate for rate in lanes if rate) if all(lanes) else None


def least_sent(way: str, seen: Evidence) -> float:
    """The share of what a link carries that a message has to reach."""
    return LEAST_OVER_NETWORK[seen.kind.is_host] if way == NETWORK else LEAST_SENT[is_nvlink(way)]


def least_reduced(way: str, seen: Evidence) -> float:
    """The share of what a link carries that an all-reduce has to reach."""
    return LEAST_OVER_NETWORK[seen.kind.is_host] if way == NETWORK else LEAST_REDUCED[is_nvlink(way)]


def peer_pairs(seen: Evidence) -> CheckResult:
    """The pair that is slow, or the device or the node whose pairs all are."""
    pairs = [pair for facts in seen.facts for pair in facts.pairs]
    impossible = [
        failed("impossible-rate", link=_ends(pair, seen), gb_per_s=pair.gb_per_s)
        for pair in pairs
        if not is_possible(pair.gb_per_s)
    ]
    if impossible:
        return judged(impossible)
    slow = {pair: why for pair in pairs if (why := why_slow(pair, pairs, seen))}
    if not slow:
        case = "pairs" if _can_judge(pairs, seen) else "one-pair"
        return judged((), *(ok(case, **figures) for figures in _by_transport(pairs, seen)))
    case = "slow-link-of-cpu" if seen.kind.is_host and not seen.nodes else "slow-link"
    if (place := common_place(list(slow), pairs, lambda rank: _place(rank, seen))) is not None:
        return failed(case, place=place, **slow[min(slow, key=_rate)])
    return judged([failed(case, link=_ends(pair, seen), **why) for pair, why in slow.items()])


def _rate(pair: PairRate) -> float:
    return pair.gb_per_s


def _can_judge(pairs: list[PairRate], seen: Evidence) -> bool:
    """Whether a GPU's pair has anything to be compared with."""
    return len(pairs) > 1 or seen.kind.is_host or link_gb_per_s(seen, pairs[0].low, pairs[0].high) is not None


def pcie_links(seen: Evidence) -> CheckResult:
    """Links that have fewer lanes or an older generation at work than card and slot have in common."""
    wrong, found = [], []
    for facts, health in zip(seen.facts, seen.health, strict=False):
        if not facts.pcie_link or not (health.pcie_generation and health.max_pcie_lanes):
            continue
        most = (health.pcie_generation, health.max_pcie_lanes)
        link, expected = (f"generation {each[0]} x{each[1]}" for each in (facts.pcie_link, most))
        found.append(link)
        if any(now < least for now, least in zip(facts.pcie_link, most, strict=True)):
            device = seen.devices[facts.rank]
            wrong.append(failed("slow-pcie", device=device, link=link, expected_link=expected))
    if len(found) < len(seen.devices) and not wrong:
        return skipped("not-reported")
    return judged(wrong, ok("pcie", links=", ".join(sorted(set(found)))))


def why_slow(pair: PairRate, pairs: list[PairRate], seen: Evidence) -> Mapping[str, Any] | None:
    """Figures of a slow pair, next to its link's or another pair's; `None` where the pair is fast enough."""
    way, carries = transport(seen, pair.low, pair.high), link_gb_per_s(seen, pair.low, pair.high)
    if carries and pair.gb_per_s < least_sent(way, seen) * carries:
        return {"gb_per_s": pair.gb_per_s, "way": way, "carried_gb_per_s": carries}
    best = max((each for each in pairs if transport(seen, each.low, each.high) == way), key=_rate)
    if pair.gb_per_s < LEAST_OF_PAIRS[seen.kind.is_host] * best.gb_per_s:
        other = {"other": _ends(best, seen), "other_way": way, "best_gb_per_s": best.gb_per_s}
        return {"gb_per_s": pair.gb_per_s, **other}
    return None


def _place(rank: int, seen: Evidence) -> str:
    """The device of a rank, or the node where nodes are compared."""
    if not seen.nodes:
        return seen.devices[rank]
    return f"node {seen.nodes[rank]} ({seen.hosts[seen.nodes[rank]]})"


def common_place(
    slow: Sequence[PairRate], pairs: Sequence[PairRate], place: Callable[[int], str]
) -> str | None:
    """The one of three or more that all slow pairs have in common, where all of its pairs are slow."""
    ends = {pair: {place(pair.low), place(pair.high)} for pair in pairs}
    places = set().union(*ends.values())
    alike = (each for each in places if [pair for pair in pairs if each in ends[pair]] == slow)
    return next(alike, None) if len(places) > 2 else None


def _by_transport(pairs: list[PairRate], seen: Evidence) -> list[Mapping[str, Any]]:
    """How many pairs each way links, and the rate of the slowest."""
    rates: dict[str, list[float]] = {}
    for pair in pairs:
        rates.setdefault(transport(seen, pair.low, pair.high), []).append(pair.gb_per_s)
    return [
        {"num_pairs": len(found), "least_gb_per_s": min(found), "way": way} for way, found in rates.items()
    ]


def _ends(pair: PairRate, seen: Evidence) -> str:
    return f"{seen.devices[pair.low]} and {seen.devices[pair.high]}"


def reduce_bandwidth(seen: Evidence) -> CheckResult:
    """All-reduce by size; the largest against what the slowest link carries."""
    reduces, pairs = seen.facts[0].reduces, [pair for facts in seen.facts for pair in facts.pairs]
    rates = [(each.bus_gb_per_s, size_text(each.num_bytes, "bytes")) for each in reduces]
    impossible = [
        failed("impossible-rate", gb_per_s=rate, size=size) for rate, size in rates if not is_possible(rate)
    ]
    if impossible:
        return judged(impossible)
    found = ", ".join(f"{format_rate(rate)} GB/s at {size}" for rate, size in rates)
    ways = sorted({transport(seen, pair.low, pair.high) for pair in pairs})
    links = [(rate, pair) for pair in pairs if (rate := link_gb_per_s(seen, pair.low, pair.high))]
    if links:
        carried, pair = min(links, key=lambda link: link[0])
        way = transport(seen, pair.low, pair.high)
        if max(rates)[0] < least_reduced(way, seen) * carried:
            return failed("slow-all-reduce", rates=found, way=way, carried_gb_per_s=carried)
    return ok("all-reduce", rates=found, ways=", ".join(ways))
