"""Limits of a process, a user or a machine that end a launch, and what to do about each.

The system's own messages (`Resource temporarily unavailable`) don't say what to do.
"""

import errno
import re
import resource

from gpurun.launcher.errors import MachineError
from gpurun.launcher.units import plural

_PROCESSES = re.compile(
    r"can't start new thread|resource temporarily unavailable|thread creation failed|pthread_create failed"
    r"|libgomp: thread creation",
    re.IGNORECASE,
)
_FILES_AT_LEAST = 64
_FILES_PER_RANK = 8
"""Open at a time in one process: gloo has a connection or two to each of the other ranks."""
_FILES = re.compile(r"too many open files", re.IGNORECASE)
_SHARED_MEMORY = re.compile(
    r"insufficient shared memory|unable to (open|allocate|write to|resize).{0,60}shared memory"
    r"|(creating|extend)\b.{0,40}/dev/shm/nccl-|unable to (mmap|write).{0,80}/?torch_\d+"
    r"|no space left on device.{0,200}(/dev/shm|torch_\d+)"
    r"|(/dev/shm|torch_shm|shm_open).{0,200}no space left on device|bus error.{0,120}\bshm\b",
    re.IGNORECASE | re.DOTALL,
)
"""Words of torch's shared memory and DataLoader, and of NCCL."""


def start_problem(number: int) -> str:
    """Why a process could not be started, and what to do."""
    if number == errno.EAGAIN:
        return f"no more processes are allowed; {_processes()}"
    if number == errno.EMFILE:
        return _files()
    if number == errno.ENOMEM:
        return "there is no memory left for a process; end others, or use fewer ranks"
    return errno_text(number)


def check_open_files(num_ranks: int) -> None:
    """Refuses a limit under which torch's store aborts without a message.

    Raises:
        MachineError: the limit is too low for this many ranks.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_AT_LEAST + _FILES_PER_RANK * num_ranks
    if soft != resource.RLIM_INFINITY and soft < needed:
        ranks = plural(num_ranks, "rank")
        raise MachineError(f"`ulimit -n` is {soft}: {ranks} may need {needed}; raise it (ulimit -n 65536)")


def remedy(text: str) -> str | None:
    """What to do if the end of a rank's log shows an exhausted limit; `None` if it doesn't."""
    if _SHARED_MEMORY.search(text):
        return (
            "/dev/shm is full: use fewer DataLoader workers, remove what dead programs left there "
            "(df -h /dev/shm), or give the container more (docker run --shm-size=8g)"
        )
    if _FILES.search(text):
        return _files()
    if _PROCESSES.search(text):
        return f"no more processes or threads are allowed; {_processes()}"
    return None


def errno_text(number: int) -> str:
    return errno.errorcode.get(number, f"error {number}") if number else "for an unknown reason"


def _processes() -> str:
    limit = _limit(resource.RLIMIT_NPROC)
    return f"`ulimit -u` is {limit}, a cgroup may have a limit (pids.max): raise them, or use fewer ranks"


def _files() -> str:
    limit = _limit(resource.RLIMIT_NOFILE)
    return f"no more open files are allowed; `ulimit -n` is {limit}: raise it (ulimit -n 65536)"


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}"
