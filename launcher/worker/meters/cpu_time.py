"""How long threads of this process waited for a core, and other processes had one, as the kernel counts it.

A thread can only have waited for another process as long as one ran. What it waited beyond that, it waited
for threads of its own process: the replicas of `dp` do so whenever there are more of them than cores.

The kernel samples `/proc/stat` and rounds it to 10 ms: the difference between two readings is off by some
milliseconds either way, and may be negative. Only the mean of many is right.

Sources: Linux, Documentation/scheduler/sched-stats.rst: the second number of /proc/PID/task/TID/schedstat;
Documentation/filesystems/proc.rst, section "Miscellaneous kernel statistics in /proc/stat".
"""

import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from gpurun.launcher.machine.accelerators import ACCELERATORS
from gpurun.launcher.machine.host import has_own_quota
from gpurun.launcher.machine.process_tree import cores_ns, cpu_ns

COMMUNICATING = tuple(kind.backend for kind in ACCELERATORS.values())
"""In the names of threads that communicate during a step: they queue behind their own rank's computing."""

_lock = threading.Lock()
_ended_ns: Counter[str] = Counter()


def waited_ns() -> dict[str, int] | None:
    """Nanoseconds in the run queue since its start, by thread that computes; `None` if not counted.

    Threads that have ended count together with those of the same name before them, if they called
    `note_end`; the kernel forgets the others.
    """
    try:
        threads = {
            thread: _waited_ns(f"/proc/self/task/{thread}")
            for thread in [thread for thread in os.listdir("/proc/self/task") if not _communicates(thread)]
        }
    except (OSError, ValueError, IndexError):
        return None
    return {**_ended_ns, **threads}


def note_end() -> None:
    """Keeps the waiting time of the calling thread, which is about to end."""
    waited = thread_waited_ns()
    with _lock:
        _ended_ns[threading.current_thread().name] += waited


def thread_waited_ns() -> int:
    """Nanoseconds of the calling thread in the run queue since its start; 0 if not counted."""
    try:
        return _waited_ns("/proc/thread-self")
    except (OSError, ValueError, IndexError):
        return 0


@lru_cache(maxsize=4096)
def _communicates(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            name = file.read().casefold()  # torch's `pt_nccl_watchdg`, NCCL's own `NCCL Progress 0`
            return any(word in name for word in COMMUNICATING)
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False


def _waited_ns(directory: str) -> int:
    try:
        with open(f"{directory}/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return 0


def others_ns() -> int | None:
    """CPU time of all other processes on this one's cores since the machine started, less what this one ran
    elsewhere: only the difference of two readings means something. `None` where the kernel doesn't count."""
    try:
        text = Path("/proc/stat").read_text()
        return cores_ns(text, os.sched_getaffinity(0)) - time.process_time_ns()
    except (OSError, ValueError):
        return None


def children_ns() -> int:
    """CPU time of the processes that this one has started, such as a data loader's workers, and of theirs.

    Those that have ended count once they are waited for.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = (child for thread in os.listdir("/proc/self/task") for child in _children("self", thread))
    return round((ended.ru_utime + ended.ru_stime) * 1e9) + sum(map(_tree_ns, children))


def _children(process: str, thread: str) -> list[str]:
    """Live children of a thread; none where the kernel doesn't list them (CONFIG_PROC_CHILDREN)."""
    try:
        with open(f"/proc/{process}/task/{thread}/children") as file:
            return file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _tree_ns(process: str) -> int:
    """CPU time of a process and of all that it has started."""
    return cpu_ns(int(process)) + sum(map(_tree_ns, _children(process, process)))


@dataclass(frozen=True)
class BlockNoise:
    """Other load that slowed one block of steps on one rank."""

    queue_ns: int | None = None
    """In the run queue, in the mean step."""
    others_ns: int | None = None
    """CPU time of other processes on this rank's cores, in the mean step; of one block it may be negative."""
    cpu_ns: int | None = None
    """CPU time of all threads of this rank, in the mean step."""
    thread_cpu_ns: int | None = None
    """CPU time of the thread that made the steps; `None` where another one ended the block."""
    children_ns: int | None = None
    """CPU time of the processes that this rank has started, in the mean step; part of `others_ns`."""


QUIET = BlockNoise()
Reading = tuple[Mapping[str, int] | None, int | None, int, tuple[int, int], int]
"""`waited_ns`, `others_ns`, the CPU time of this process, the calling thread with its own, `children_ns`."""


@dataclass
class NoiseMeter:
    """Adds up over the portions of a block; nothing is read while a step is timed."""

    read_ns: Callable[[], Mapping[str, int] | None] = waited_ns
    read_others_ns: Callable[[], int | None] = others_ns
    is_limited: Callable[[], bool] = has_own_quota
    """Whether the rank may wait for its own CPU quota, which looks like waiting for a core."""
    queue_ns: Counter[str] = field(default_factory=Counter)
    """The waiting time by thread."""
    others_ns: int | None = 0
    known: bool = True
    cpu_ns: int = 0
    thread_cpu_ns: int | None = 0
    children_ns: int = 0

    def clear(self) -> None:
        """A block begins."""
        self.queue_ns, self.others_ns, self.known = Counter(), 0, True
        self.cpu_ns, self.thread_cpu_ns, self.children_ns = 0, 0, 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what happens within it."""
        before = self.read()
        yield
        self.add(before, self.read())

    def read(self) -> Reading:
        """Reads the counters since the process began."""
        of_thread = threading.get_ident(), time.thread_time_ns()
        return self.read_ns(), self.read_others_ns(), time.process_time_ns(), of_thread, children_ns()

    def add(self, before: Reading, after: Reading) -> None:
        """Counts what happened between two readings."""
        before_ns, after_ns = before[0], after[0]
        self.cpu_ns += after[2] - before[2]
        self.children_ns += after[4] - before[4]
        self.others_ns = _advanced(self.others_ns, before[1], after[1])
        (first, begin_ns), (last, end_ns) = before[3], after[3]
        self.thread_cpu_ns = _advanced(self.thread_cpu_ns, begin_ns, end_ns if first == last else None)
        if before_ns is None or after_ns is None:
            self.known = False
        else:
            for thread, waited in after_ns.items():
                self.queue_ns[thread] += max(0, waited - before_ns.get(thread, 0))

    def per_step(self, num_steps: int) -> BlockNoise:
        """The load that slowed the block, per step; waiting is that of the thread that waited longest."""
        longest_ns = max(self.queue_ns.values(), default=0)
        known = self.known and not self.is_limited()
        queue_ns = longest_ns // num_steps if known else None
        others_ns = None if self.others_ns is None else round(self.others_ns / num_steps)
        thread_cpu_ns = None if self.thread_cpu_ns is None else self.thread_cpu_ns // num_steps
        own_ns = (self.cpu_ns // num_steps, thread_cpu_ns, self.children_ns // num_steps)
        return BlockNoise(queue_ns, others_ns, *own_ns)


def _advanced(total_ns: int | None, before_ns: int | None, after_ns: int | None) -> int | None:
    """`total_ns` with what came between two readings, if both are known."""
    if total_ns is None or before_ns is None or after_ns is None:
        return None
    return total_ns + after_ns - before_ns
