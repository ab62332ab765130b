"""Whether the kernel's OOM killer ended a process: only its own counters and the kernel's log show it."""

import os
from pathlib import Path

_KMSG = Path("/dev/kmsg")


def oom_kills(pid: str = "self") -> int | None:
    """Processes that the OOM killer has ended in this process's memory cgroup; `None` if unknown.

    Source: Documentation/admin-guide/cgroup-v2.rst (memory.events, oom_kill) and cgroup-v1/memory.rst.
    """
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    for file in _counter_files(lines):
        count = _read_counter(file)
        if count is not None:
            return count
    return None


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


def _counter_files(cgroup_lines: list[str]) -> list[Path]:
    """Where the counter may be. A container often sees its own group as the root of the mount."""
    files: list[Path] = []
    for line in cgroup_lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
            name = "memory.events"
        elif "memory" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup/memory")]
            name = "memory.oom_control"
        else:
            continue
        files += [directory / name for root in roots for directory in (root / path.lstrip("/"), root)]
    return files


def _read_counter(file: Path) -> int | None:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
