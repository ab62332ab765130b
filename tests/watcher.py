"""Ends what a session of tests has started, should the session itself be killed.

All processes of a session have a variable with its name in their environment, in whatever namespace, session
or group they are.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

VARIABLE = "GPURUN_TEST_SESSION"
NAMESPACES = Path("/run/netns")
"""Where `ip netns add` keeps their names; those of tests begin with `gpurun-PID-`."""

_watching: list[subprocess.Popen[bytes]] = []


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
    while left := _processes_of(session):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    shutil.rmtree(cache, ignore_errors=True)
    for name in os.listdir(NAMESPACES) if NAMESPACES.is_dir() else ():
        owner = name.split("-")[1] if name.startswith("gpurun-") else ""
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False)


def _processes_of(session: str) -> list[int]:
    mark = f"{VARIABLE}={session}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue  # it has ended, or is another user's
            if mark in environ.split(b"\0"):
                found.append(int(entry))
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
