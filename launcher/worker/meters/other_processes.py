"""CPU time that other processes took of the cores that this one may use.

A thread can only have waited for another process as long as one ran. What it waited beyond that, it waited
for threads of its own process: the replicas of `dp` do so whenever there are more of them than cores.

The kernel samples what `/proc/stat` says, and rounds it to 10 ms: the difference between two readings is off
by some milliseconds either way, and may be negative. It is the mean of many that is right.

Source: Linux, Documentation/filesystems/proc.rst, section "Miscellaneous kernel statistics in /proc/stat".
"""

import os
import time
from collections.abc import Set
from pathlib import Path

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
PROGRAMS = slice(0, 3)
"""user, nice, system: not idle, waiting for I/O, interrupts, or stolen by the hypervisor."""


def others_ns() -> int | None:
    """CPU time of all other processes on this one's cores since the machine started, less what this one ran
    elsewhere: only the difference of two readings means something. `None` where nobody counts."""
    try:
        text = Path("/proc/stat").read_text()
        return cores_ns(text, os.sched_getaffinity(0)) - time.process_time_ns()
    except (OSError, ValueError):
        return None


def cores_ns(stat: str, cores: Set[int]) -> int:
    """CPU time that programs took of `cores`, by the text of `/proc/stat`.

    Raises:
        ValueError: it doesn't tell of any of them.
    """
    lines = (line.split() for line in stat.splitlines() if line.startswith("cpu"))
    ticks = {name: sum(map(int, counts[PROGRAMS])) for name, *counts in lines}
    named = {f"cpu{core}" for core in cores} & ticks.keys()
    if not named:
        raise ValueError("none of the cores is listed")
    if named == ticks.keys() - {"cpu"}:
        return ticks["cpu"] * TICK_NS  # rounded once, not once per core
    return sum(ticks[name] for name in named) * TICK_NS
