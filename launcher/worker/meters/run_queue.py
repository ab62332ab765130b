"""How long threads of this process were ready to run while no core was free: the kernel's own count.

Source: Linux, Documentation/scheduler/sched-stats.rst: the second number of /proc/PID/task/TID/schedstat.
"""

import os
import threading
from collections import Counter
from functools import lru_cache

COMMUNICATING = ("gloo", "nccl")
"""In the names of threads that work beside a step: they queue behind their own rank's computing."""

_lock = threading.Lock()
_ended_ns: Counter[str] = Counter()


def waited_ns() -> dict[str, int] | None:
    """Nanoseconds in the run queue since its start, by thread that computes; `None` where nobody counts.

    Threads that have ended count together with those of the same name before them, if they called
    `note_end`; the kernel forgets the others.
    """
    try:
        threads = {thread: _waited_ns(f"/proc/self/task/{thread}") for thread in _computing()}
    except (OSError, ValueError, IndexError):
        return None
    return {**_ended_ns, **threads}


def note_end() -> None:
    """Keeps the calling thread's share beyond its end, which is about to come."""
    try:
        waited = _waited_ns("/proc/thread-self")
    except (OSError, ValueError, IndexError):
        return
    with _lock:
        _ended_ns[threading.current_thread().name] += waited


def _computing() -> list[str]:
    return [thread for thread in os.listdir("/proc/self/task") if not _communicates(thread)]


@lru_cache(maxsize=4096)
def _communicates(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return any(word in file.read() for word in COMMUNICATING)
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False


def _waited_ns(folder: str) -> int:
    try:
        with open(f"{folder}/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return 0
