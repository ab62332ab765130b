"""Ends what a session of tests has started, should the session itself be killed.

All processes of a session have its name in their environment, in whatever namespace, session or group they
are: as a variable, or in the path of a Slurm of its own, whose steps overwrite the first variables.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

VARIABLE = "GPURUN_TEST_SESSION"
NAMESPACES = Path("/run/netns")
"""Where `ip netns add` keeps their names; those of tests begin with `gpurun-PID-`."""

HOSTS = Path("/etc/hosts")
HOSTS_MARK = "# a test of gpurun, process "
"""Lines with it are removed when that process has ended."""

EXEC_S = 5.0
"""A process is within `execve` for less, also on a busy machine; at its end it gets its environment."""

_watching: list[subprocess.Popen[bytes]] = []


def own_directory() -> Path:
    """A new directory with a short path, which is removed with the session at the latest."""
    return Path(tempfile.mkdtemp(prefix=_prefix(os.environ[VARIABLE]), dir="/tmp"))


def _prefix(session: str) -> str:
    return f"gpurun-{session}-"


def watch(cache: Path) -> None:
    """Starts the watcher of this process; both end together.

    Args:
        cache: a directory to remove at the end.
    """
    os.environ[VARIABLE] = uuid.uuid4().hex
    argv = [sys.executable, "-I", __file__, os.environ[VARIABLE], str(cache)]
    env = {key: value for key, value in os.environ.items() if key != VARIABLE}
    _watching.append(subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, start_new_session=True))


def stop() -> None:
    """Lets the watcher look, and end."""
    while _watching:
        _watching.pop().communicate()


def pids() -> set[int]:
    """The watcher: it is no leak of a test."""
    return {process.pid for process in _watching}


def main(session: str, cache: Path) -> None:
    """Waits for the end of its stdin, which the session holds open, and ends what is left."""
    sys.stdin.buffer.read()
    until = time.monotonic() + EXEC_S
    while True:
        left, unknown = _processes_of(session)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + EXEC_S
        if not left and (not unknown or time.monotonic() > until):
            break
        time.sleep(0.01)
    for directory in (cache, *Path("/tmp").glob(f"{_prefix(session)}*")):
        shutil.rmtree(directory, ignore_errors=True)
    for name in os.listdir(NAMESPACES) if NAMESPACES.is_dir() else ():
        owner = name.split("-")[1] if name.startswith("gpurun-") else ""
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False)
    lines = HOSTS.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not _is_left_behind(line)]
    if kept != lines:
        with contextlib.suppress(PermissionError):
            HOSTS.write_text("".join(kept))


def _is_left_behind(line: str) -> bool:
    """Whether a line of /etc/hosts is that of a test whose process has ended."""
    _, mark, owner = line.strip().partition(HOSTS_MARK)
    return bool(mark) and not Path("/proc", owner).exists()


def _processes_of(session: str) -> tuple[list[int], list[int]]:
    """The session's processes, and those that have no environment, be it for good or yet."""
    found, unknown = [], []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
            if not environ:
                os.readlink(f"/proc/{entry}/exe")  # a thread of the kernel has none
                unknown.append(int(entry))
        except OSError:
            continue  # it has ended, or is another user's
        if session.encode() in environ:
            found.append(int(entry))
    return found, unknown


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
