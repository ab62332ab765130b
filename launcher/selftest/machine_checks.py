"""Finds faults of a machine's driver, its GPUs and its disk. Pure."""

import re
from contextlib import suppress

from gpurun.launcher.machine.accelerators import peak_tflop_per_s
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.plan.devices import shared_gpus
from gpurun.launcher.rundir.records import DeviceFacts
from gpurun.launcher.selftest.evidence import (
    NOT_REPORTED,
    CheckResult,
    DeviceRate,
    Evidence,
    failed,
    impossible,
    is_possible,
    judged,
    ok,
    skipped,
)
from gpurun.launcher.stats.busy import QUEUE_PERCENT
from gpurun.launcher.units import (
    format_count,
    format_gib,
    format_number,
    format_percent,
    format_rate,
    numbers_text,
    plural,
    round_up,
)

_SERIAL = re.compile("[0-9a-f]{16}")
CLOCK_OFF = 0.05
"""Share by which a device's clock may differ from the host's over half a second."""
LEAST_CLOCK = 0.6
"""The share of the highest clock, at work: power caps take less."""
AT_POWER_LIMIT = 0.9
"""The share of its power limit, at work: the limit keeps the clock down, as it should."""
LEAST_OF_BEST = {True: 0.5, False: 0.85}
"""The least rate of a device, as a share of the fastest of its model; by whether devices share the host."""
LEAST_OF_PEAK = 0.3
"""Likewise of its model's peak, which GPUs with a low power limit reach to less than a half."""
LEAST_OF_EARLIER = {True: 0.5, False: 0.9}
"""Likewise of the fastest that the device was before."""
LEAST_FREE_GIB = 1.0
"""Traces of a long job take more; a self-test needs a few MiB."""


def driver(seen: Evidence) -> CheckResult:
    """torch's build against the driver."""
    machine = seen.machine
    if seen.kind.is_host:
        return ok(f"torch {seen.torch}") if seen.torch else failed("there is no torch", "pip install torch")
    if machine.nvml_error:
        return failed(f"the driver doesn't answer: {machine.nvml_error}")
    if problem := next((gpu.unusable for gpu in seen.gpus if gpu.unusable), None):
        why, _, remedy = problem.partition("\n")
        return failed(why, remedy.strip() or None)
    if not machine.driver:
        return failed("; ".join(["no driver is installed, or it can't be reached from here", *machine.notes]))
    return ok(f"{seen.kind.driver_text(machine.driver, machine.cuda_driver_version)}; torch {seen.torch}")


def visible_devices(seen: Evidence) -> CheckResult:
    """GPUs that are there, but not for this process."""
    if seen.kind.is_host:
        found = f"{plural(len(seen.devices), 'CPU device')} on {plural(seen.machine.cpu_cores, 'core')}"
        return ok("; ".join([found, *(() if seen.machine.gpus else seen.machine.notes)]))
    closed = [note for note in seen.machine.notes if "can't be opened" in note]
    if closed:
        return failed("; ".join(closed), "give this user, or this container, access to their /dev files")
    variable, named = seen.kind.visible_variable, [part for part in (seen.visible or "").split(",") if part]
    hidden = seen.visible is not None and len(named) > len(seen.machine.gpus)
    if hidden or (seen.visible is not None and not seen.machine.gpus):
        count = plural(len(seen.machine.gpus), "GPU")
        return failed(
            f"{variable}={seen.visible} leaves {count} visible",
            f"name GPUs that exist, or: unset {variable}",
        )
    names = sorted({gpu.name for gpu in seen.gpus})
    return (
        ok(f"{plural(len(seen.gpus), 'GPU')}: {', '.join(names)}")
        if names
        else failed("no GPU is here", "to check CPU devices: --devices cpu:2")
    )


def whole_gpus(seen: Evidence) -> CheckResult:
    """Devices that their backend can't connect."""
    shared = shared_gpus(seen.devices, seen.machine)
    parts = [gpu for gpu in seen.gpus if _is_part(gpu, seen)]
    if shared:
        what = "instances (MIG)" if parts else "parts"
        backend = seen.kind.backend.upper()
        return failed(f"{', '.join(shared)} are {what} of one GPU, which {backend} doesn't connect")
    return ok(plural(len(parts), "MIG instance") if parts else "no GPU is divided")


def free_gpus(seen: Evidence) -> CheckResult:
    """GPUs that other processes use: they affect the figures, and might run out of memory."""
    named = zip(seen.devices, seen.gpus, strict=False)
    wrong = [
        f"{device} is used by other processes: {gpu.busy_with}" for device, gpu in named if gpu.busy_with
    ]
    return judged(wrong, "no other process uses them")


def _is_part(gpu: Gpu, seen: Evidence) -> bool:
    prefix = seen.kind.part_prefix
    return prefix is not None and gpu.uuid.startswith(prefix)


def identities(seen: Evidence) -> CheckResult:
    """Whether a forked rank sees the GPU that the driver shows under its name."""
    wrong = [
        f"rank {facts.rank} uses {facts.uuid}, but {device} is {gpu.uuid}"
        for facts, gpu, device in zip(seen.facts, seen.gpus, seen.devices, strict=False)
        if not _is_part(gpu, seen) and not gpu.uuid.isdecimal() and _bare(facts.uuid or "") != _bare(gpu.uuid)
    ]
    return judged(wrong, f"{plural(len(seen.facts), 'rank')} on the GPUs that the driver names")


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
    off = {seen.devices[facts.rank]: abs(facts.clock_off) for facts in seen.facts}
    wrong = [
        f"{name} is off by {format_percent(100 * share)}"
        for name, share in off.items()
        if not share <= CLOCK_OFF
    ]
    if wrong:
        return failed("; ".join(wrong))
    most_percent = round_up(100 * max(off.values()), 1)
    return ok(f"within {format_number(most_percent, 1)} % of the host's over half a second")


def device_speed(seen: Evidence) -> CheckResult:
    """A device that is slower than its like."""
    if busy := _busy(seen):
        return skipped(busy)
    rates = {
        f"{seen.devices[facts.rank]} does {format_rate(facts.gflop_per_s)} GFLOP/s in float32": facts
        for facts in seen.facts
    }
    if no_rate := impossible({text: facts.gflop_per_s for text, facts in rates.items()}):
        return no_rate
    wrong = [f"{text}, {why}" for text, facts in rates.items() if (why := why_slow(facts, seen))]
    slowest = min(facts.gflop_per_s for facts in seen.facts)
    return judged(wrong, f"{format_rate(slowest)} GFLOP/s or more in float32 products")


def why_slow(facts: DeviceFacts, seen: Evidence) -> str | None:
    """Against the fastest of its model, and against the model's peak, which a part of a GPU doesn't have."""
    like = [other for other in seen.facts if other.name == facts.name]
    best = max(like, key=lambda other: other.gflop_per_s)
    if facts.gflop_per_s < LEAST_OF_BEST[seen.kind.is_host] * best.gflop_per_s:
        return f"but {seen.devices[best.rank]} {format_rate(best.gflop_per_s)}"
    is_whole = any(not _is_part(gpu, seen) and gpu.name == facts.name for gpu in seen.gpus)
    peak = peak_tflop_per_s(facts.name, "fp32") if is_whole else None
    if peak and facts.gflop_per_s < LEAST_OF_PEAK * 1000 * peak:
        return f"but a {facts.name} {format_rate(1000 * peak)} at its peak"
    return None


def _busy(seen: Evidence) -> str | None:
    """Why rates can't be judged, where ranks of CPU devices wait for a core."""
    worst = max(seen.facts, key=lambda facts: facts.queue_share)
    if not seen.kind.is_host or 100 * worst.queue_share <= QUEUE_PERCENT:
        return None
    waited = f"rank {worst.rank} waited for a core {format_percent(100 * worst.queue_share)} of the time"
    return ": ".join([*_users_of_cores(worst, seen), waited])


def _users_of_cores(facts: DeviceFacts, seen: Evidence) -> list[str]:
    """Other load on a rank's cores: other processes, or only the other ranks; empty if unknown."""
    if facts.others_share is None:
        return []
    sharing = [each for each in seen.facts if _share_cores(each, facts, seen)]
    others = facts.others_share - sum(each.cpu_share for each in sharing if each is not facts)
    if 100 * others > QUEUE_PERCENT:
        return ["other processes use the cores"]
    return [f"{plural(len(sharing), 'rank')} share {plural(len(facts.cores), 'core')}"]


def _share_cores(one: DeviceFacts, other: DeviceFacts, seen: Evidence) -> bool:
    """Whether two ranks are on one machine, and may use the same cores there."""
    is_elsewhere = bool(seen.nodes) and seen.nodes[one.rank] != seen.nodes[other.rank]
    return not is_elsewhere and not set(one.cores).isdisjoint(other.cores)


def earlier_speed(seen: Evidence) -> CheckResult:
    """A device that was faster in an earlier self-test."""
    if busy := _busy(seen):
        return skipped(busy)
    before = {comparable(was.rate): was for was in seen.earlier}
    now = rates_of(seen)
    known = [(rate, before[comparable(rate)]) for rate in now if comparable(rate) in before]
    if not known:
        return skipped("; ".join([_why_not_compared(now, seen), *seen.earlier_notes]))
    wrong = [
        f"{rate.device} does {format_rate(rate.gflop_per_s)} GFLOP/s; "
        f"it did {format_rate(was.rate.gflop_per_s)} on {was.day}"
        for rate, was in known
        if rate.gflop_per_s < LEAST_OF_EARLIER[seen.kind.is_host] * was.rate.gflop_per_s
    ]
    count = f"{len(known)} of {plural(len(now), 'device')}"
    days = ", ".join(sorted({was.day for _, was in known}))
    return judged(wrong, "; ".join([f"{count} as fast as on {days}", *seen.earlier_notes]))


def comparable(rate: DeviceRate) -> tuple[str, int]:
    """A key that is equal where rates of the same device may be compared."""
    return rate.identity, rate.matrix_rows


def _why_not_compared(now: tuple[DeviceRate, ...], seen: Evidence) -> str:
    if any(rate.identity in seen.earlier_busy for rate in now):
        return "in the earlier self-tests of these devices ranks waited for a core"
    return "no earlier self-test that they can be compared with was found"


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
            wrong.append(f"{device} was throttled: {facts.throttled}")
        elif clock_mhz and most and clock_mhz < LEAST_CLOCK * most:
            if _is_capped(facts.power_w, gpu.power_limit_w):
                capped.append(device)
            else:
                wrong.append(f"{device} ran at {format_count(clock_mhz)} of {format_count(most)} MHz")
        clocks += [clock_mhz] if clock_mhz else []
    if not clocks and not wrong:
        return skipped(NOT_REPORTED)
    of_capped = f"; {', '.join(capped)} at the power limit" if capped else ""
    return judged(wrong, f"{format_count(min(clocks, default=0))} MHz or more at work{of_capped}")


def _is_capped(power_w: float | None, limit_w: float | None) -> bool:
    """Whether the power limit explains a low clock; where one of them isn't known, nothing is blamed."""
    return power_w is None or limit_w is None or power_w >= AT_POWER_LIMIT * limit_w


def memory_errors(seen: Evidence) -> CheckResult:
    """Errors that ECC could not correct, and rows that wait to be replaced, or can't be."""
    wrong, unknown = [], []
    for device, health in zip(seen.devices, seen.health, strict=False):
        unknown += [device] if health.ecc_errors is None else []
        if health.ecc_errors:
            wrong.append(f"{device} had {plural(health.ecc_errors, 'memory error')} that ECC can't correct")
        if health.needs_reset:
            wrong.append(f"{device} has memory rows that wait for a reset to be replaced")
        if health.has_lost_rows:
            wrong.append(f"{device} has memory rows that can't be replaced: no spare ones are left")
    if len(unknown) == len(seen.devices) and not wrong:
        return skipped(NOT_REPORTED)
    of_others = f"; those of {', '.join(unknown)} are {NOT_REPORTED}" if unknown else ""
    return judged(wrong, f"no uncorrected memory error{of_others}")


def energy(seen: Evidence) -> CheckResult:
    """Whether there are figures for energy."""
    without = [seen.devices[facts.rank] for facts in seen.facts if facts.energy_mj is None]
    if without:
        return skipped(f"the energy counter of {', '.join(without)} is {NOT_REPORTED}")
    wrong = [seen.devices[facts.rank] for facts in seen.facts if not is_possible(facts.energy_mj)]
    if wrong:
        return skipped(
            f"the energy counter of {', '.join(wrong)} did not advance in half a second at work: "
            f"energy is {NOT_REPORTED}"
        )
    powers = [facts.power_w for facts in seen.facts if facts.power_w and is_possible(facts.power_w)]
    return ok(f"{format_count(max(powers))} W at work" if powers else "counted; power is " + NOT_REPORTED)


def numa(seen: Evidence) -> CheckResult:
    """Whether it is known which cores a GPU is nearest to."""
    nodes = {device: gpu.numa_node for device, gpu in zip(seen.devices, seen.gpus, strict=False)}
    if len(seen.machine.topology.nodes) < 2:
        return ok("the machine has one NUMA node")
    unknown = [device for device, node in nodes.items() if node is None]
    if unknown:
        return skipped(f"the NUMA node of {', '.join(unknown)} is not reported by this machine")
    return ok(", ".join(f"{device} on node {node}" for device, node in nodes.items()))


def disk(seen: Evidence) -> CheckResult:
    """Whether the run directory has room."""
    free = format_gib(seen.free_gib)
    if not seen.free_gib >= LEAST_FREE_GIB:  # also NaN
        return failed(f"{free} are free where runs are written")
    return ok(f"{free} free")
