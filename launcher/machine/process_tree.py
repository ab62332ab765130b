"""The process tree, by Linux's own means: what descends from a process, how to end it all, what others leave.

A process that calls `setsid` and forks twice leaves its group, its session and its parent; it never leaves
the nearest ancestor that is a subreaper. So orphans are found by walking up parents, not by groups.

Cores that all but the descendants keep busy are not left to a job. Sources: Linux,
Documentation/filesystems/proc.rst, section "Miscellaneous kernel statistics in /proc/stat"; proc(5),
/proc/PID/stat and /proc/PID/status.
"""

import ctypes
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gpurun.launcher.errors import MachineError
from gpurun.launcher.grouping import grouped
from gpurun.launcher.machine import read_text

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""Source: linux/prctl.h."""

SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGUSR1,
)
"""Signals that a person or a batch system sends to all processes; the command handles them for all."""
TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
"""The unit of CPU times in /proc."""
_PASSES = 20
"""0.1 s on a machine where processes begin and end all the time."""
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Parts of the command lines of processes that remove shared memory once all that use it have ended."""
_CLEANING_S = 2.0
"""How long they may take for that."""


class _Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    alive: bool
    stopped: bool
    """Whether a signal such as SIGSTOP has stopped it until SIGCONT; a debugger's process isn't."""
    ticks: int
    """CPU time in clock ticks, with that of the children that it has waited for."""
    start_ticks: int
    """When it began, in clock ticks since boot."""


def check_proc() -> None:
    """Returns if /proc shows this process: everything here relies on it.

    Raises:
        MachineError: it shows those of another PID namespace, as after `unshare --pid` alone.
    """
    try:
        shown = os.readlink("/proc/self")
    except OSError as error:
        raise MachineError(f"can't read /proc: {error.strerror}; mount it") from error
    if shown != str(os.getpid()):
        raise MachineError(
            "/proc shows the processes of another PID namespace; mount this one's: unshare -pf --mount-proc"
        )


def become_subreaper() -> None:
    """From now on, orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel sends this process a signal when `parent` dies; at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def descendants(root: int, without: Collection[int] = ()) -> list[int]:
    """Living processes below `root`, parents first; those in `without` and all below them are left out.

    Zombies are not alive, unless threads of theirs still run.
    """
    children = grouped(_all_processes(), lambda stat: stat.parent)
    found: list[int] = []
    queue = [root]
    while queue:
        below = [stat for stat in children.get(queue.pop(0), []) if stat.pid not in without]
        queue += [stat.pid for stat in below]
        found += [stat.pid for stat in below if stat.alive]
    return found


@dataclass(frozen=True)
class Leftover:
    """A process that goes on after the one that has started it."""

    pid: int
    command: str
    """Its command line."""
    is_detached: bool
    """Whether it has left that process's session (`setsid`), or ignores a session's end (`nohup`)."""


def leftovers(root: int, sessions: Collection[int], without: Collection[int] = ()) -> list[Leftover]:
    """The living processes below `root`, each without those below it that are like it.

    Those that only remove shared memory and then end are left out.

    Args:
        sessions: those of the processes that have started them.
        without: is left out, with all below.
    """
    found = []
    covered: dict[int, bool] = {}
    for pid in descendants(root, without):
        stat = _stat(str(pid))
        if stat is None or not stat.alive or _is_cleaner(pid):
            continue
        covered[pid] = stat.session not in sessions or has_signal(pid, "SigIgn", signal.SIGHUP)
        if covered.get(stat.parent) != covered[pid]:
            found.append(Leftover(pid, command_of(pid), covered[pid]))
    return found


def command_of(pid: int) -> str:
    """The command line of a process as a shell would read it; empty if there is no such process."""
    return shlex.join(_command_line(pid).decode(errors="replace").strip("\0").split("\0"))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_cleaner(pid: int) -> bool:
    command = _command_line(pid)
    return any(name in command for name in _CLEANERS)


def has_signal(pid: int, mask: Literal["SigIgn", "SigCgt"], number: int) -> bool:
    """Whether a process ignores a signal, or has a handler for it; not if it has ended."""
    return bool(status_number(Path(f"/proc/{pid}"), mask, 16) >> (number - 1) & 1)


def status_number(process: Path, name: str, base: int = 10) -> int:
    """A number in the `status` of a directory of /proc; 0 if the process has ended."""
    lines = read_text(process / "status").splitlines()
    return next((int(line.split()[1], base) for line in lines if line.startswith(f"{name}:")), 0)


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; `None`: it is not running, or a zombie."""
    stat = _stat(str(pid))
    return stat.start_ticks if stat is not None and stat.alive else None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, so that it does nothing until it gets SIGCONT."""
    stat = _stat(str(pid))
    return stat is not None and stat.stopped


def cpu_ns(pid: int) -> int:
    """CPU time of a process and of the children that it has waited for; 0 if there is no such process."""
    stat = _stat(str(pid))
    return stat.ticks * TICK_NS if stat is not None else 0


def cpu_s(pids: Collection[int]) -> float:
    """Seconds of CPU time of these processes so far, with those of their children that have ended."""
    return sum(map(cpu_ns, pids)) / 1e9


def kill_descendants(
    root: int, without: Collection[int] = (), timeout_s: float = 5.0, last: Collection[int] = ()
) -> list[int]:
    """SIGKILLs everything below `root` until nothing is left.

    One pass is not enough: a process may fork between being seen and being killed. The child is then found by
    the next pass, since its own parent is below `root`, or `root` itself is a subreaper. Processes that
    remove the others' shared memory have time for that.

    Args:
        last: subreapers below `root`, which get the signal after all others: if this process is killed
            meanwhile, they can end what is left.

    Returns:
        What still lives after `timeout_s`: processes that a driver or a dead file server holds in the kernel.
    """
    deadline = time.monotonic() + timeout_s
    cleaned_s = time.monotonic() + _CLEANING_S
    pause_s = 0.001
    while (left := _surely_left(root, without)) and (now_s := time.monotonic()) < deadline:
        users = [pid for pid in left if not _is_cleaner(pid)]
        if users:
            cleaned_s = now_s + _CLEANING_S
        for pid in sorted(users if now_s < cleaned_s else left, key=last.__contains__):
            send_signal(pid, signal.SIGKILL)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return left


def _surely_left(root: int, without: Collection[int]) -> list[int]:
    """The descendants; none only if no process has begun or gone meanwhile, or there is always one that has.

    A pass misses the child of a process that forks after the processes were listed and has ended before it is
    looked at, as a daemon does when it starts.
    """
    for _ in range(_PASSES):
        before = os.listdir("/proc")
        if (left := descendants(root, without)) or os.listdir("/proc") == before:
            return left
    return []


def send_signal(pid: int, number: int) -> bool:
    """Whether the signal could be sent: the process may be gone, or may have become another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _all_processes() -> list[_Stat]:
    found = (_stat(name) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in found if stat is not None]


def _stat(pid: str) -> _Stat | None:
    """One line of /proc; `None` when the process went away meanwhile, or is another user's that /proc hides.

    Source: proc(5), hidepid.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command's name is in parentheses, and may itself contain any character.
    fields = line[line.rindex(b")") + 2 :].split()
    num_threads = int(fields[17])
    is_alive, ticks = fields[0] not in b"ZX" or num_threads > 1, sum(map(int, fields[11:15]))
    return _Stat(
        int(pid), int(fields[1]), int(fields[3]), is_alive, fields[0] == b"T", ticks, int(fields[19])
    )


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


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
