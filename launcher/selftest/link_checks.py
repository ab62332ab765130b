"""Finds faults of the links between devices. Pure."""

import re
from collections.abc import Callable, Sequence

from gpurun.launcher.rundir.records import PairRate
from gpurun.launcher.selftest.evidence import (
    NOT_REPORTED,
    CheckResult,
    Evidence,
    failed,
    impossible,
    judged,
    ok,
    skipped,
)
from gpurun.launcher.units import format_number, format_rate, plural, size_text

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
    wrong = [f"{text}, {seen.devices[facts.rank]}" for facts in seen.facts for text in facts.wrong_sums]
    most = max((each.num_bytes for facts in seen.facts for each in facts.reduces), default=0)
    return judged(wrong, f"right in three types, and up to {size_text(most, 'bytes')}")


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
    """Likewise an all-reduce."""
    return LEAST_OVER_NETWORK[seen.kind.is_host] if way == NETWORK else LEAST_REDUCED[is_nvlink(way)]


def peer_pairs(seen: Evidence) -> CheckResult:
    """The pair that is slow, or the device or the node whose pairs all are."""
    pairs = [pair for facts in seen.facts for pair in facts.pairs]
    rates = {f"{_ends(pair, seen)}: {_gb(pair.gb_per_s)} GB/s": pair.gb_per_s for pair in pairs}
    if wrong := impossible(rates):
        return wrong
    slow = [pair for pair in pairs if why_slow(pair, pairs, seen)]
    if not slow:
        lowest = ", ".join(_by_transport(pairs, seen))
        alone = "" if _can_judge(pairs, seen) else "; what this link should carry is unknown"
        return ok(f"{plural(len(pairs), 'pair')}: {lowest}{alone}")
    remedy = "look for other processes" if seen.kind.is_host and not seen.nodes else None
    if (name := common_place(slow, pairs, lambda rank: _place(rank, seen))) is not None:
        slowest = min(slow, key=_rate)
        return failed(f"all links of {name} are slow: {why_slow(slowest, pairs, seen)}", remedy)
    return failed("; ".join(f"{_ends(pair, seen)}: {why_slow(pair, pairs, seen)}" for pair in slow), remedy)


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
        text = f"generation {facts.pcie_link[0]} x{facts.pcie_link[1]}"
        found.append(text)
        if any(now < least for now, least in zip(facts.pcie_link, most, strict=True)):
            wrong.append(
                f"{seen.devices[facts.rank]} has {text} at work, not generation {most[0]} x{most[1]}"
            )
    if len(found) < len(seen.devices) and not wrong:
        return skipped(NOT_REPORTED)
    return judged(wrong, ", ".join(sorted(set(found))))


def why_slow(pair: PairRate, pairs: list[PairRate], seen: Evidence) -> str | None:
    """Against what its link carries, and against other pairs; `None` where it is as fast as it should be."""
    way, carries = transport(seen, pair.low, pair.high), link_gb_per_s(seen, pair.low, pair.high)
    if carries and pair.gb_per_s < least_sent(way, seen) * carries:
        return f"{_gb(pair.gb_per_s)} GB/s, but {way} carries {_gb(carries)}"
    best = max((each for each in pairs if transport(seen, each.low, each.high) == way), key=_rate)
    if pair.gb_per_s < LEAST_OF_PAIRS[seen.kind.is_host] * best.gb_per_s:
        return f"{_gb(pair.gb_per_s)} GB/s, but {_ends(best, seen)} over {way} have {_gb(best.gb_per_s)}"
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


def _by_transport(pairs: list[PairRate], seen: Evidence) -> list[str]:
    rates: dict[str, list[float]] = {}
    for pair in pairs:
        rates.setdefault(transport(seen, pair.low, pair.high), []).append(pair.gb_per_s)
    return [f"{_gb(min(found))} GB/s or more over {way}" for way, found in rates.items()]


def _ends(pair: PairRate, seen: Evidence) -> str:
    return f"{seen.devices[pair.low]} and {seen.devices[pair.high]}"


def _gb(gb_per_s: float) -> str:
    return format_rate(gb_per_s) if gb_per_s >= 0.01 else format_number(gb_per_s, 4)


def reduce_bandwidth(seen: Evidence) -> CheckResult:
    """All-reduce by size; the largest against what the slowest link carries."""
    reduces, pairs = seen.facts[0].reduces, [pair for facts in seen.facts for pair in facts.pairs]
    rates = {
        f"{_gb(each.bus_gb_per_s)} GB/s at {size_text(each.num_bytes, 'bytes')}": each.bus_gb_per_s
        for each in reduces
    }
    if wrong := impossible(rates):
        return wrong
    found, best = ", ".join(rates), max(rates.values())
    ways = sorted({transport(seen, pair.low, pair.high) for pair in pairs})
    links = [(rate, pair) for pair in pairs if (rate := link_gb_per_s(seen, pair.low, pair.high))]
    if links:
        carried, pair = min(links, key=lambda link: link[0])
        way = transport(seen, pair.low, pair.high)
        if best < least_reduced(way, seen) * carried:
            return failed(f"bus bandwidth {found}, but {way} carries {_gb(carried)} GB/s")
    return ok(f"bus bandwidth {found}, over {', '.join(ways)}")
