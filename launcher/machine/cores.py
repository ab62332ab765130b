"""Cores that other processes leave, and the next step where a job takes more than these.

Sources: Linux, Documentation/filesystems/proc.rst, section "Miscellaneous kernel statistics in /proc/stat";
proc(5), /proc/PID/stat.
"""

import math
import os
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.machine.process_tree import TICK_NS, cpu_ns, descendants
from gpurun.launcher.units import plural

PROGRAMS = slice(0, 3)
"""user, nice, system: not idle, waiting for I/O, interrupts, or stolen by the hypervisor."""
LOOK_S = 0.25
"""How long is looked. The kernel counts in 10 ms, so a core's share is off by a few percent."""


QUIET_CORES = 0.1
"""Programs that keep less of the cores busy are no load: a shell, a monitor, the kernel's own work."""


@dataclass(frozen=True)
class Reading:
    """CPU time since the machine started."""

    at_ns: int
    """The time of the reading."""
    all_ns: int
    """CPU time of all programs on the cores that may be used."""
    own_ns: int
    """CPU time of this process and of those that it has started."""


def free_cores(usable: int, pause: Callable[[float], None] = time.sleep) -> int:
    """How many of the usable cores other processes leave at the moment: a look of 0.25 s, at least 1.

    What this command has started doesn't count as another process. All usable cores, where the kernel
    doesn't say.
    """
    try:
        before = _read()
        pause(LOOK_S)
        return left_by_others(usable, len(os.sched_getaffinity(0)), before, _read())
    except (OSError, ValueError):
        return usable


def becomes_quiet(limit_s: float, now_s: Callable[[], float], pause: Callable[[float], None]) -> bool | None:
    """Waits until other processes have left the cores for a look of 0.25 s; whether they have.

    `False` after `limit_s`; `None`, at once, where the kernel doesn't say.

    Args:
        limit_s: the most that is waited.
        now_s: a monotonic clock.
        pause: waits for so many seconds.
    """
    end_s = now_s() + limit_s
    try:
        before = _read()
        while True:
            pause(LOOK_S)
            after = _read()
            if busy_with_others(before, after) < QUIET_CORES:
                return True
            if now_s() >= end_s:
                return False
            before = after
    except (OSError, ValueError):
        return None


def busy_with_others(before: Reading, after: Reading) -> float:
    """How many cores other processes kept busy between two readings."""
    others_ns = (after.all_ns - before.all_ns) - (after.own_ns - before.own_ns)
    return max(0.0, others_ns / max(1, after.at_ns - before.at_ns))


def left_by_others(usable: int, allowed: int, before: Reading, after: Reading) -> int:
    """Whole cores that other processes leave, at least 1.

    Args:
        usable: cores that this process can keep busy: those that it may run on, cut by a quota.
        allowed: cores that it may run on, and that were read.
        before: the first reading.
        after: the second.
    """
    return max(1, min(usable, math.floor(allowed - busy_with_others(before, after) + 0.5)))


def _read() -> Reading:
    text = Path("/proc/stat").read_text()
    own_ns = sum(cpu_ns(pid) for pid in (os.getpid(), *descendants(os.getpid())))
    return Reading(time.monotonic_ns(), cores_ns(text, os.sched_getaffinity(0)), own_ns)


def cores_ns(stat: str, cores: Set[int]) -> int:
    """CPU time that programs took of `cores`, by the text of `/proc/stat`.

    Raises:
        ValueError: it lists none of them.
    """
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    ticks = {name: sum(map(int, counts[PROGRAMS])) for name, *counts in lines}
    named = {f"cpu{core}" for core in cores} & ticks.keys()
    if not named:
        raise ValueError("none of the cores is listed")
    if named == ticks.keys() - {"cpu"}:
        return ticks["cpu"] * TICK_NS  # rounded once, not once per core
    return sum(ticks[name] for name in named) * TICK_NS


def less_at_once(num_devices: int, threads: int, free: int) -> str | None:
    """The next step where CPU devices take more cores than were free: fewer threads, else fewer devices.

    `None` where they don't, or where nothing is left to reduce.

    Args:
        num_devices: CPU devices of one machine that compute at the same time.
        threads: of each of them; 0 of a program, which may have started any number: counts as 1.
        free: cores that other processes left, at least 1.
    """
    threads = max(1, threads)
    if num_devices * threads <= free or num_devices == threads == 1:
        return None
    fewer = f"threads: {max(1, free // num_devices)}" if threads > 1 else f"devices: cpu:{free}"
    were = "1 was" if free == 1 else f"{free} were"
    return f"Set `{fewer}`: {cores_text(num_devices, threads)}, and {were} free."


def cores_text(num_devices: int, threads: int) -> str:
    """`2 devices with 1 thread each take 2 cores`."""
    devices, each = plural(num_devices, "device"), plural(threads, "thread")
    take = f"{each} takes" if num_devices == 1 else f"{each} each take"
    return f"{devices} with {take} {plural(num_devices * threads, 'core')}"
