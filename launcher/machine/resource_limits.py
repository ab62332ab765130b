"""Limits of a process, a user, a cgroup or a machine that end a launch, and what to do about each.

The system's own messages (`Resource temporarily unavailable`) don't say what to do, and that the kernel's OOM
killer ended a process is shown by its own counters and the kernel's log only.
"""

import errno
import os
import re
import resource
from pathlib import Path

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine import read_numbers, read_text
from gpurun.launcher.machine.process_tree import status_number
from gpurun.launcher.units import GIB, format_gib, plural

_PROCESSES = re.compile(
    r"can't start new thread|resource temporarily unavailable|thread creation failed|pthread_create failed"
    r"|libgomp: thread creation"
    r"|terminate called without an active exception.{0,600}\b_new_process_group_helper\b",
    re.IGNORECASE | re.DOTALL,
)
"""The last: where gloo can start only some of its threads, C++ aborts."""
_THREADS_PER_RANK = 16
"""The threads that torch, gloo and the profiler start in a rank on two cores: 13 to 15 were seen."""
_EXEMPT = 1 << 21 | 1 << 24
"""CAP_SYS_ADMIN and CAP_SYS_RESOURCE: Linux doesn't count. Source: kernel/fork.c, `copy_process`."""
_FILES_AT_LEAST = 64
_FILES_PER_RANK = 8
"""Open at a time in one process: gloo has a connection or two to each of the other ranks."""
_NO_FILES = "no more open files are allowed"
_FILES = re.compile(r"too many open files", re.IGNORECASE)
_SHARED_MEMORY = re.compile(
    r"insufficient shared memory|unable to (open|allocate|write to|resize).{0,60}shared memory"
    r"|(creating|extend)\b.{0,40}/dev/shm/nccl-|unable to (mmap|write).{0,80}/?torch_\d+"
    r"|no space left on device.{0,200}(/dev/shm|torch_\d+)"
    r"|(/dev/shm|torch_shm|shm_open|_multiprocessing\.SemLock).{0,200}no space left on device"
    r"|bus error.{0,120}\bshm\b",
    re.IGNORECASE | re.DOTALL,
)
"""Words of torch's shared memory and DataLoader, of Python's semaphores, and of NCCL."""
_UNWRITABLE_SHARED_MEMORY = re.compile(
    r"(/dev/shm|torch_shm|torch_\d+|shm_open|_multiprocessing\.SemLock).{0,200}"
    r"(read-only file system|permission denied)"
    r"|(read-only file system|permission denied).{0,200}(/dev/shm|torch_\d+)",
    re.IGNORECASE | re.DOTALL,
)
_FILE_SIZE = re.compile(re.escape(os.strerror(errno.EFBIG)))
_MEMORY = re.compile(
    r"\bMemoryError\b|can(no|')t allocate memory|std::bad_alloc|failed to map segment from shared object",
    re.IGNORECASE,
)
"""Words of Python, of torch's `DefaultCPUAllocator`, of C++ and of the loader of libraries."""
_ABORT = re.compile("Fatal Python error: Aborted")
"""Words of faulthandler. C++ may abort where an allocation fails."""
OOM_KILLER = "the kernel's OOM killer ended"
_OOM_KILLS = re.compile(rf"{OOM_KILLER} |DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: Killed")
"""The second is of a process whose end torch sees: it may have another cause."""
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files with the memory limit, in both versions of cgroups."""
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number of this size where there is no limit."""
_UNLIMITED = "unlimited"
_KMSG = Path("/dev/kmsg")


def start_problem(number: int) -> str:
    """Why a process could not be started, and in a second line what to do."""
    if number == errno.EAGAIN:
        return f"no more processes are allowed\n    {_processes()}"
    if number == errno.EMFILE:
        return f"{_NO_FILES}\n    {_files()}"
    if number == errno.ENOMEM:
        return "there is no memory left for a process\n    end others, or use fewer ranks"
    if number == errno.E2BIG:
        return "a variable of its environment, or all of them, is longer than Linux allows\n    shorten `env`"
    return errno.errorcode.get(number, f"error {number}") if number else "for an unknown reason"


def check_limits(num_ranks: int) -> None:
    """Refuses limits under which ranks abort or hang without a message.

    Raises:
        MachineError: a limit is too low for this many ranks.
    """
    check_open_files(num_ranks)
    check_processes(num_ranks)
    check_cgroup(num_ranks)


def check_processes(num_ranks: int, proc: Path = Path("/proc")) -> None:
    """Refuses a limit under which gloo can't start its threads, so that ranks wait for those that lack some.

    Raises:
        MachineError: the limit is too low for this many ranks next to what this user runs.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = _THREADS_PER_RANK * num_ranks
    if (
        soft == resource.RLIM_INFINITY
        or os.getuid() == 0
        or status_number(proc / "self", "CapEff", 16) & _EXEMPT
    ):
        return
    running = sum(status_number(each, "Threads") for each in proc.glob("[0-9]*") if _is_ours(each))
    if running + needed > soft:
        raise MachineError(
            f"`ulimit -u` is {soft}, but this user runs {plural(running, 'thread')}, "
            f"and {plural(num_ranks, 'rank')} may need {needed} more\n    raise it: ulimit -u 4096"
        )


def check_cgroup(num_ranks: int, root: Path = Path("/")) -> None:
    """Refuses a limit of a cgroup, as of a container, under which gloo can't start its threads.

    Raises:
        MachineError: this process's cgroup or one above it allows too few for this many ranks.
    """
    needed = _THREADS_PER_RANK * num_ranks
    for directory in cgroup_directories(root, "pids"):
        limit, running = (_number(directory / name) for name in ("pids.max", "pids.current"))
        if limit is not None and running is not None and running + needed > limit:
            raise MachineError(
                f"{directory / 'pids.max'} is {limit}: {plural(running, 'thread')} run in this cgroup, and "
                f"{plural(num_ranks, 'rank')} may need {needed} more\n"
                "    raise it (docker run --pids-limit=4096), or use fewer ranks"
            )


def _number(file: Path) -> int | None:
    """A limit or a count of a cgroup; `None` where there is none."""
    text = read_text(file)  # empty where it isn't mounted here
    return int(text) if text.isdecimal() else None  # "max"


def _is_ours(process: Path) -> bool:
    try:
        return process.stat().st_uid == os.getuid()
    except OSError:  # it has just ended
        return False


def check_open_files(num_ranks: int) -> None:
    """Refuses a limit under which torch's store aborts without a message.

    Raises:
        MachineError: the limit is too low for this many ranks.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_AT_LEAST + _FILES_PER_RANK * num_ranks
    if soft != resource.RLIM_INFINITY and soft < needed:
        ranks = plural(num_ranks, "rank")
        raise MachineError(
            f"`ulimit -n` is {soft}, but {ranks} may need {needed} open files\n    raise it: ulimit -n 65536"
        )


def remedy(text: str) -> str | None:
    """The advice if the end of a rank's log shows an exhausted limit; `None` if it doesn't."""
    if (killed := _OOM_KILLS.search(text)) and (killed["pid"] is None or _was_oom_killed(int(killed["pid"]))):
        return f"the kernel ended a process for lack of memory: {more_memory()}"
    if _SHARED_MEMORY.search(text):
        return (
            "/dev/shm is full: use fewer DataLoader workers, remove what dead programs left there "
            "(df -h /dev/shm), or give the container more (docker run --shm-size=8g)"
        )
    if _UNWRITABLE_SHARED_MEMORY.search(text):
        return "/dev/shm can't be written: mount it writable (mount -o remount,rw,mode=1777 /dev/shm)"
    if _FILE_SIZE.search(text) and (limit := _limit(resource.RLIMIT_FSIZE, 1024)) != _UNLIMITED:
        return f"`ulimit -f` is {limit} KiB: raise it (ulimit -f unlimited)"
    if _FILES.search(text):
        return f"{_NO_FILES}; {_files()}"
    address_space = _address_space()
    if _PROCESSES.search(text):
        if address_space:  # `check_limits` has counted the threads before: their stacks lack room
            return f"no more threads fit into memory; {address_space}; or {_processes()}"
        return f"no more processes or threads are allowed; {_processes()}"
    if address_space and _MEMORY.search(text):
        return f"no more memory is allowed; {address_space}"
    if address_space and _ABORT.search(text):
        return f"a process aborted, maybe for lack of memory; {address_space}"
    return None


def of_hang() -> str | None:
    """The advice for a hang under a limit by which some ranks may lack threads; `None` without one."""
    address_space = _address_space()
    return f"ranks may lack threads, whose stacks need memory; {address_space}" if address_space else None


def exhausted(error: Exception) -> MachineError | None:
    """The error with what to do, where an exhausted limit has caused it; `None`: it has another cause."""
    what_to_do = remedy(f"{type(error).__name__}: {error}")
    return MachineError(f"gpurun can't continue: {error}\n    {what_to_do}") if what_to_do else None


def _processes() -> str:
    limit = _limit(resource.RLIMIT_NPROC)
    return f"`ulimit -u` is {limit}, a cgroup may have a limit (pids.max): raise them, or use fewer ranks"


def _address_space() -> str | None:
    limit = _limit(resource.RLIMIT_AS, 1024)
    return None if limit == _UNLIMITED else f"`ulimit -v` is {limit} KiB: raise it (ulimit -v unlimited)"


def _files() -> str:
    limit = _limit(resource.RLIMIT_NOFILE)
    return f"`ulimit -n` is {limit}: raise it (ulimit -n 65536)"


def oom_killed(what: str = "it") -> str:
    """The text about a process that the kernel's OOM killer ended."""
    return f"{OOM_KILLER} {what}: the machine or its cgroup ran out of memory"


def more_memory(root: Path = Path("/")) -> str:
    """The advice for too little memory, with the limit of the cgroup that allows least, if there is one."""
    limits = [
        (limit, directory / name)
        for directory in cgroup_directories(root, "memory")
        for name in _MEMORY_LIMITS
        if (limit := _number(directory / name)) is not None and limit < UNLIMITED_BYTES
    ]
    usual = "end other programs, or use fewer ranks or smaller batches"
    if not limits:
        return usual
    least, file = min(limits)
    return f"{file} is {format_gib(least / GIB)}: raise it (docker run --memory=16g), or {usual}"


def _was_oom_killed(pid: int) -> bool:
    """Whether it probably was: a process that another one has waited for can't be asked any more."""
    return bool(oom_kills()) or in_kernel_log(pid)


def _limit(which: int, unit: int = 1) -> str:
    soft, _ = resource.getrlimit(which)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else f"{soft // unit}"


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the OOM killer has ended in this process's memory cgroup; `None` if unknown.

    `root` is where `proc` and `sys` are.
    Source: Documentation/admin-guide/cgroup-v2.rst (memory.events, oom_kill) and cgroup-v1/memory.rst.
    """
    counts = (
        read_numbers(directory / name).get("oom_kill")
        for directory in cgroup_directories(root, "memory")
        for name in ("memory.events", "memory.oom_control")
    )
    return next((count for count in counts if count is not None), None)


def cgroup_directories(root: Path, controller: str) -> list[Path]:
    """Directories of this process's cgroup and its parents, innermost first; of both versions.

    In a container `/proc/self/cgroup` may name a path that is not mounted here: then only `/` counts.
    """
    directories: list[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        inner = Path(path.lstrip("/"))
        for mount in ("", "unified") if number == "0" else (controller,):
            base = root / "sys/fs/cgroup" / mount
            directories += [base / part for part in (inner, *inner.parents)]
    return [directory for directory in dict.fromkeys(directories) if directory.is_dir()]


def in_kernel_log(pid: int) -> bool:
    """Whether the kernel's log says that this process was killed for memory; needs the right to read it."""
    try:
        fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return any(f"Killed process {pid} " in line for line in _records(fd))
    finally:
        os.close(fd)


def _records(fd: int) -> list[str]:
    """The kernel log; every read gives one record, a lost one gives EPIPE."""
    found = []
    while True:
        try:
            found.append(os.read(fd, 8192).decode("utf-8", "replace"))
        except BrokenPipeError:
            continue
        except OSError:
            return found
