"""Finds faults of a machine's driver, its GPUs and its disk, and of the links between devices. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine.accelerators import peak_tflop_per_s
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.machine.gpus.nvml import PCIE_GB_PER_S
from gpurun.launcher.plan.devices import shared_gpus
from gpurun.launcher.rundir.records import DeviceFacts, PairRate
from gpurun.launcher.selftest.evidence import (
    CheckResult,
    DeviceRate,
    Evidence,
    failed,
    is_possible,
    judged,
    ok,
    skipped,
)
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.units import format_gib, format_rate, numbers_text, percent_decimals, round_up, size_text

_SERIAL = re.compile("[0-9a-f]{16}")
CLOCK_OFF_PERCENT = 5.0
"""Percent by which a device's clock may differ from the host's over half a second."""
LEAST_CLOCK = 0.6
"""The share of the highest clock, at work: power caps take less."""
AT_POWER_LIMIT = 0.9
"""The share of its power limit, at work: the limit keeps the clock down, as it should."""
LEAST_OF_BEST = {True: 0.5, False: 0.85}
"""The least rate of a device, as a share of the fastest of its model; by whether devices share the host."""
LEAST_OF_PEAK = 0.3
"""The least rate, as a share of its model's peak: GPUs with a low power limit reach less than a half."""
LEAST_OF_EARLIER = {True: 0.5, False: 0.9}
"""The least rate, as a share of the device's fastest earlier one; by whether devices share the host."""
LEAST_FREE_GIB = 1.0
"""Traces of a long job take more; a self-test needs a few MiB."""


def driver(seen: Evidence) -> CheckResult:
    """torch's build against the driver."""
    machine = seen.machine
    if not seen.torch:
        return failed("no-torch")
    if seen.kind.is_host:
        return ok("torch", version=seen.torch)
    if machine.nvml_error:
        return failed("driver-silent", error=machine.nvml_error)
    if problem := next((gpu.unusable for gpu in seen.gpus if gpu.unusable), None):
        why, _, advice = problem.partition("\n")
        return failed("gpu-unusable", problem=why, advice=advice.strip() or None)
    if not machine.driver:
        return failed("no-driver", notes=_notes(seen))
    driver = seen.kind.driver_text(machine.driver, machine.cuda_driver_version)
    return ok("torch", driver=driver, version=seen.torch)


def _notes(seen: Evidence, words: str = "") -> str | None:
    """The notes of the machine that have these words."""
    return "; ".join(note for note in seen.machine.notes if words in note) or None


def visible_devices(seen: Evidence) -> CheckResult:
    """GPUs that are there, but not for this process."""
    if seen.kind.is_host:
        notes = None if seen.machine.gpus else _notes(seen)
        return ok("cpu-devices", num_devices=len(seen.devices), num_cores=seen.machine.cpu_cores, notes=notes)
    if closed := _notes(seen, "can't be opened"):
        return failed("gpus-closed", notes=closed)
    variable, named = seen.kind.visible_variable, [part for part in (seen.visible or "").split(",") if part]
    hidden = seen.visible is not None and len(named) > len(seen.machine.gpus)
    if hidden or (seen.visible is not None and not seen.machine.gpus):
        num_gpus = len(seen.machine.gpus)
        return failed("gpus-hidden", variable=variable, value=seen.visible, num_gpus=num_gpus)
    models = ", ".join(sorted({gpu.name for gpu in seen.gpus}))
    return ok("gpus", num_gpus=len(seen.gpus), models=models) if models else failed("no-gpu")


def whole_gpus(seen: Evidence) -> CheckResult:
    """Devices that their backend can't connect."""
    if twice := [each for each in dict.fromkeys(seen.devices) if seen.devices.count(each) > 1]:
        return failed("gpu-twice", device=twice[0])
    shared = shared_gpus(seen.devices, seen.machine)
    parts = [gpu for gpu in seen.gpus if _is_part(gpu, seen)]
    if shared:
        what, backend = "instances (MIG)" if parts else "parts", seen.kind.backend.upper()
        return failed("parts-of-one-gpu", devices=", ".join(shared), parts=what, backend=backend)
    return ok("parts", num_parts=len(parts)) if parts else ok("undivided")


def free_gpus(seen: Evidence) -> CheckResult:
    """GPUs that other processes use: they affect the figures, and might run out of memory."""
    named = zip(seen.devices, seen.gpus, strict=False)
    wrong = [failed("gpu-busy", device=device, used=gpu.busy_with) for device, gpu in named if gpu.busy_with]
    return judged(wrong, ok("gpus-free"))


def _is_part(gpu: Gpu, seen: Evidence) -> bool:
    prefix = seen.kind.part_prefix
    return prefix is not None and gpu.uuid.startswith(prefix)


def identities(seen: Evidence) -> CheckResult:
    """Whether a forked rank sees the GPU that the driver shows under its name."""
    wrong = [
        failed("other-gpu", rank=facts.rank, uuid=str(facts.uuid), device=device, expected_uuid=gpu.uuid)
        for facts, gpu, device in zip(seen.facts, seen.gpus, seen.devices, strict=False)
        if not _is_part(gpu, seen) and not is_named(facts.uuid or "", gpu)
    ]
    return judged(wrong, ok("gpus-as-named", num_ranks=len(seen.facts)))


def is_named(uuid: str, gpu: Gpu) -> bool:
    """Whether torch's UUID is that of the GPU, if it has one: some of AMD's are numbered."""
    return gpu.uuid.isdecimal() or _bare(uuid) == _bare(gpu.uuid)


def _bare(uuid: str) -> str:
    """torch leaves out `GPU-`, and writes the letters of AMD's as bytes.

    Source: torch/csrc/cuda/Module.cpp, `uuid_to_string`; HIP's `hipDeviceGetUuid` copies text.
    """
    bare = uuid.lower().removeprefix("gpu-")
    digits = bare.replace("-", "")
    with suppress(ValueError):
        letters = bytes.fromhex(digits).decode("ascii")
        return letters if _SERIAL.fullmatch(letters) else bare
    return bare


def clocks_agree(seen: Evidence) -> CheckResult:
    """Events of the device against the host's clock."""
    off_percent = {seen.devices[facts.rank]: 100 * abs(facts.clock_off) for facts in seen.facts}
    wrong = [
        failed("clock-off", device=device, off_percent=percent)
        for device, percent in off_percent.items()
        if not percent <= CLOCK_OFF_PERCENT
    ]
    if wrong:
        return judged(wrong)
    most = max(off_percent.values())
    return ok("clocks-agree", most_percent=round_up(most, percent_decimals(most, None)))


def device_speed(seen: Evidence) -> CheckResult:
    """A device that is slower than its like."""
    if busy := _busy(seen):
        return busy
    impossible = [
        failed("impossible-speed", device=seen.devices[facts.rank], gflop_per_s=facts.gflop_per_s)
        for facts in seen.facts
        if not is_possible(facts.gflop_per_s)
    ]
    slowest = min(facts.gflop_per_s for facts in seen.facts)
    return judged(
        impossible or [slow for facts in seen.facts if (slow := _slow(facts, seen))],
        ok("speed", least_gflop_per_s=slowest),
    )


def _slow(facts: DeviceFacts, seen: Evidence) -> CheckResult | None:
    """Against the fastest of its model, and against the model's peak, which a part of a GPU doesn't have."""
    device, rate = seen.devices[facts.rank], facts.gflop_per_s
    best = max((each for each in seen.facts if each.name == facts.name), key=lambda each: each.gflop_per_s)
    if rate < LEAST_OF_BEST[seen.kind.is_host] * best.gflop_per_s:
        other = seen.devices[best.rank]
        return failed(
            "slower-than-like",
            device=device,
            gflop_per_s=rate,
            other=other,
            best_gflop_per_s=best.gflop_per_s,
        )
    is_whole = any(not _is_part(gpu, seen) and gpu.name == facts.name for gpu in seen.gpus)
    peak = 1000 * (peak_tflop_per_s(facts.name, "fp32") or 0.0) if is_whole else 0.0
    if rate < LEAST_OF_PEAK * peak:
        return failed(
            "slower-than-peak", device=device, gflop_per_s=rate, model=facts.name, peak_gflop_per_s=peak
        )
    return None


def _busy(seen: Evidence) -> CheckResult | None:
    """Why rates can't be judged, where ranks of CPU devices wait for a core: who else uses it, if known."""
    worst = max(seen.facts, key=lambda facts: facts.queue_share)
    if not seen.kind.is_host or 100 * worst.queue_share <= QUEUE_PERCENT:
        return None
    waited = {"rank": worst.rank, "waited_percent": 100 * worst.queue_share}
    if worst.others_share is None:
        return skipped("cores-shared", **waited)
    sharing = [each for each in seen.facts if _share_cores(each, worst, seen)]
    others = worst.others_share - sum(each.cpu_share for each in sharing if each is not worst)
    if 100 * others > QUEUE_PERCENT:
        return skipped("cores-of-others", **waited)
    return skipped("cores-shared", num_ranks=len(sharing), num_cores=len(worst.cores), **waited)


def _share_cores(facts: DeviceFacts, other: DeviceFacts, seen: Evidence) -> bool:
    """Whether two ranks are on one machine, and may use the same cores there."""
    is_elsewhere = bool(seen.nodes) and seen.nodes[facts.rank] != seen.nodes[other.rank]
    return not is_elsewhere and not set(facts.cores).isdisjoint(other.cores)


def earlier_speed(seen: Evidence) -> CheckResult:
    """A device that was faster in an earlier self-test."""
    if busy := _busy(seen):
        return busy
    before = {comparable(was.rate): was for was in seen.earlier}
    now = rates_of(seen)
    known = [(rate, before[comparable(rate)]) for rate in now if comparable(rate) in before]
    if not known:
        is_busy = any(rate.identity in seen.earlier_busy for rate in now)
        return judged((), skipped("earlier-busy" if is_busy else "nothing-earlier"), *seen.earlier_notes)
    wrong = [
        failed(
            "slower-than-before",
            device=rate.device,
            gflop_per_s=rate.gflop_per_s,
            before_gflop_per_s=was.rate.gflop_per_s,
            day=was.day,
        )
        for rate, was in known
        if rate.gflop_per_s < LEAST_OF_EARLIER[seen.kind.is_host] * was.rate.gflop_per_s
    ]
    days = ", ".join(sorted({was.day for _, was in known}))
    alike = ok("as-before", num_alike=len(known), num_devices=len(now), days=days)
    return judged(wrong, alike, *seen.earlier_notes)


def comparable(rate: DeviceRate) -> tuple[str, int]:
    """A key that is equal where rates of the same device may be compared."""
    return rate.identity, rate.matrix_rows


def rates_of(seen: Evidence) -> tuple[DeviceRate, ...]:
    """The rates of the devices that are kept for later self-tests."""
    return tuple(
        DeviceRate(
            device=seen.devices[facts.rank],
            identity=seen.gpus[facts.rank].uuid if seen.gpus else _cpu_identity(facts, seen),
            gflop_per_s=facts.gflop_per_s,
            matrix_rows=facts.matrix_rows,
            queue_share=facts.queue_share,
        )
        for facts in seen.facts
        if is_possible(facts.gflop_per_s)
    )


def _cpu_identity(facts: DeviceFacts, seen: Evidence) -> str:
    """A CPU device of another machine of that name, or with other cores, has another one."""
    machine = f"{seen.machine.hostname} {seen.machine_id}".strip()
    cores = f"{seen.machine.cpu_cores} of cores {numbers_text(facts.cores)}"
    return f"{machine}: {seen.machine.cpu_model}, {cores}, {facts.rank} of {len(seen.devices)}"


def clock_rates(seen: Evidence) -> CheckResult:
    """A clock that is kept down."""
    wrong, clocks, capped = [], [], list[str]()
    for facts, gpu in zip(seen.facts, seen.gpus, strict=False):
        device, most = seen.devices[facts.rank], gpu.max_sm_clock_mhz
        clock_mhz = facts.clock_mhz if is_possible(facts.clock_mhz) else None
        if facts.throttled:
            wrong.append(failed("throttled", device=device, reason=facts.throttled))
        elif clock_mhz and most and clock_mhz < LEAST_CLOCK * most:
            if _is_capped(facts.power_w, gpu.power_limit_w):
                capped.append(device)
            else:
                wrong.append(failed("low-clock", device=device, mhz=round(clock_mhz), most_mhz=most))
        clocks += [clock_mhz] if clock_mhz else []
    if not clocks and not wrong:
        return skipped("not-reported")
    return judged(wrong, ok("clocks", least_mhz=min(clocks, default=0), capped=", ".join(capped) or None))


def _is_capped(power_w: float | None, limit_w: float | None) -> bool:
    """Whether the power limit explains a low clock; where one of them isn't known, nothing is blamed."""
    return power_w is None or limit_w is None or power_w >= AT_POWER_LIMIT * limit_w


def memory_errors(seen: Evidence) -> CheckResult:
    """Errors that ECC could not correct, and rows that wait to be replaced, or can't be."""
    wrong, unknown = [], []
    for device, health in zip(seen.devices, seen.health, strict=False):
        unknown += [device] if health.ecc_errors is None else []
        if health.ecc_errors:
            wrong.append(failed("memory-errors", device=device, num_errors=health.ecc_errors))
        if health.needs_reset:
            wrong.append(failed("rows-to-replace", device=device))
        if health.has_lost_rows:
            wrong.append(failed("rows-lost", device=device))
    if len(unknown) == len(seen.devices) and not wrong:
        return skipped("not-reported")
    return judged(wrong, ok("no-memory-errors", unknown=", ".join(unknown) or None))


def energy(seen: Evidence) -> CheckResult:
    """Whether there are figures for energy."""
    without = [seen.devices[facts.rank] for facts in seen.facts if facts.energy_mj is None]
    if without:
        return skipped("no-energy", devices=", ".join(without))
    wrong = [seen.devices[facts.rank] for facts in seen.facts if not is_possible(facts.energy_mj)]
    if wrong:
        return skipped("energy-stuck", devices=", ".join(wrong))
    powers = [facts.power_w for facts in seen.facts if facts.power_w and is_possible(facts.power_w)]
    return ok("power", power_w=round(max(powers))) if powers else ok("energy")


def numa(seen: Evidence) -> CheckResult:
    """Whether it is known which cores a GPU is nearest to."""
    nodes = {device: gpu.numa_node for device, gpu in zip(seen.devices, seen.gpus, strict=False)}
    if len(seen.machine.topology.nodes) < 2:
        return ok("one-node")
    unknown = [device for device, node in nodes.items() if node is None]
    if unknown:
        return skipped("numa-unknown", devices=", ".join(unknown))
    return ok("near-nodes", places=", ".join(f"{device} on node {node}" for device, node in nodes.items()))


def disk(seen: Evidence) -> CheckResult:
    """Whether the run directory has room."""
    free = format_gib(seen.free_gib)
    if not seen.free_gib >= LEAST_FREE_GIB:  # also NaN
        return failed("disk-full", free=free, least=format_gib(LEAST_FREE_GIB))
    return ok("disk-free", free=free)


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
    if not transport(seen, low, high).startswith("PCIe"):
        return None
    lanes = [seen.health[rank].pcie_gb_per_s for rank in (low, high)]
    # Without peer access, messages take the way that copies take.
    copies = [seen.facts[rank].copy_gb_per_s for rank in (low, high) if rank < len(seen.facts)]
    return min(rate for rate in (*lanes, *copies) if rate) if all(lanes) else None


def least_share(of_link: Mapping[bool, float], way: str, seen: Evidence) -> float:
    """The share of what a link carries that has to be reached, by whether it is NVLink."""
    return LEAST_OVER_NETWORK[seen.kind.is_host] if way == NETWORK else of_link[bool(_NVLINKS.fullmatch(way))]


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


def persistence(seen: Evidence) -> CheckResult:
    """Whether each start of ranks has to wait until the driver has initialised the GPUs."""
    modes = {device: gpu.persistence for device, gpu in zip(seen.devices, seen.gpus, strict=False)}
    if None in modes.values() or not modes:
        return skipped("not-reported")
    off = [device for device, is_on in modes.items() if not is_on]
    return ok("not-persistent", devices=", ".join(off)) if off else ok("persistent")


LEAST_COPIED = 0.25
"""Share of what card and slot could carry that copies have to reach. With half of the lanes, as two cards in
a desktop often have, they reach 0.4; in a virtual machine the driver may not know its real link."""


def pcie_links(seen: Evidence) -> CheckResult:
    """Links that have fewer lanes or an older generation at work than card and slot have in common.

    A fault only where copies are slow.
    """
    wrong: list[CheckResult] = []
    narrow: list[CheckResult] = []
    found = []
    for facts, health in zip(seen.facts, seen.health, strict=False):
        if not facts.pcie_link or not (health.pcie_generation and health.max_pcie_lanes):
            continue
        most = (health.pcie_generation, health.max_pcie_lanes)
        link, expected = (f"generation {each[0]} x{each[1]}" for each in (facts.pcie_link, most))
        found.append(link)
        if any(now < least for now, least in zip(facts.pcie_link, most, strict=True)):
            carried = PCIE_GB_PER_S.get(most[0], 0.0) * most[1]
            rate = facts.copy_gb_per_s
            is_slow = rate is not None and rate < LEAST_COPIED * carried
            result = (failed if is_slow else ok)(
                "slow-pcie",
                device=seen.devices[facts.rank],
                link=link,
                expected_link=expected,
                gb_per_s=facts.copy_gb_per_s,
            )
            (wrong if is_slow else narrow).append(result)
    if len(found) < len(seen.devices) and not wrong:
        return skipped("not-reported")
    return judged(wrong, *(narrow or [ok("pcie", links=", ".join(sorted(set(found))))]))


def why_slow(pair: PairRate, pairs: list[PairRate], seen: Evidence) -> Mapping[str, Any] | None:
    """Figures of a slow pair, next to its link's or another pair's; `None` where the pair is fast enough."""
    way, carries = transport(seen, pair.low, pair.high), link_gb_per_s(seen, pair.low, pair.high)
    if carries and pair.gb_per_s < least_share(LEAST_SENT, way, seen) * carries:
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
    """The place, of three or more, that all slow pairs have in common, where all of its pairs are slow."""
    ends = {pair: {place(pair.low), place(pair.high)} for pair in pairs}
    places = set().union(*ends.values())
    alike = (each for each in places if [pair for pair in pairs if each in ends[pair]] == slow)
    return next(alike, None) if len(places) > 2 else None


def _by_transport(pairs: list[PairRate], seen: Evidence) -> list[Mapping[str, Any]]:
    """How many pairs each way links, and the rate of the slowest."""
    by_way = grouped(pairs, lambda pair: transport(seen, pair.low, pair.high))
    return [
        {"num_pairs": len(found), "least_gb_per_s": min(pair.gb_per_s for pair in found), "way": way}
        for way, found in by_way.items()
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
        if max(rates)[0] < least_share(LEAST_REDUCED, way, seen) * carried:
            return failed("slow-all-reduce", rates=found, way=way, carried_gb_per_s=carried)
    return ok("all-reduce", rates=found, ways=", ".join(ways))
