"""Two "hosts" on one machine, joined by a cable: each has a network, a host name and a working directory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

TIMEOUT_S = 180
"""A command that takes longer hangs."""
ADDRESSES = ("10.213.7.1", "10.213.7.2")
SECRET = {"GPURUN_SECRET": "f5c1a7e09b3d4826"}
"""By which both know each other."""
NAMES = ("hosta", "hostb")
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
"""A host has a name, and knows those of both."""
_AT_WORK = 'mount --bind "$1" "$2" && cd "$2" && shift 2 && exec "$@"'
"""Both hosts work at the same path, where each finds its own directory: nothing is shared."""


@dataclass(frozen=True)
class Ended:
    """How a host's command ended, and what it said."""

    code: int
    out: str
    err: str


class Command:
    """A command that runs on a host."""

    def __init__(self, process: subprocess.Popen[str], stderr: Path) -> None:
        self.process, self.stderr = process, stderr

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


class Hosts:
    """Two hosts. A context manager, which leaves no namespace and no process behind."""

    def __init__(self, directory: Path) -> None:
        self.work, self.names = directory / "work", directory / "names"
        self.directories = tuple(directory / name for name in NAMES)
        self.temporary = tuple(directory / f"tmp-{name}" for name in NAMES)
        tag = os.getpid()
        self.spaces = [f"gpurun-{tag}-{index}" for index in range(2)]
        self._commands: list[Command] = []

    def __enter__(self) -> Self:
        for path in (self.work, *self.directories, *self.temporary):
            path.mkdir(parents=True, exist_ok=True)
        self.write_names(NAMES)
        for space in self.spaces:
            _ip("netns", "add", space)
        _ip("link", "add", "cable", "netns", self.spaces[0],
            "type", "veth", "peer", "name", "cable", "netns", self.spaces[1])  # fmt: skip
        for space, address in zip(self.spaces, ADDRESSES, strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "cable", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for command in self._commands:
            if command.process.poll() is None:
                command.kill()
            command.process.communicate()
        for space in self.spaces:
            _ip("netns", "del", space)

    def entering(self, host: int) -> list[str]:
        """What runs a command on a host."""
        space = ("ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "--mount")
        return [*space, "sh", "-c", _ENTER, "sh", NAMES[host], str(self.names)]

    def start(self, host: int, *args: str, env: dict[str, str] | None = None) -> Command:
        """`gpurun ARGS` on a host."""
        argv = [*self.entering(host), "sh", "-c", _AT_WORK, "sh", str(self.directories[host]), str(self.work)]
        said = self.work.with_name(f"stderr-{len(self._commands)}")
        with said.open("w") as stderr:
            process = subprocess.Popen(
                [*argv, sys.executable, "-m", "gpurun", *args],
                env={**os.environ, **SECRET, "TMPDIR": str(self.temporary[host]), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._commands.append(Command(process, said))
        return self._commands[-1]

    def start_both(self, *args: str) -> list[Command]:
        """`gpurun ARGS` on both, as node 0 and node 1."""
        return [self.start_node(host, *args) for host in range(2)]

    def start_node(self, host: int, *args: str, env: dict[str, str] | None = None) -> Command:
        """`gpurun ARGS` on one of them, as the node of its number."""
        place = ("--node-rank", str(host), "--rendezvous", f"{ADDRESSES[0]}:29400")
        return self.start(host, *args, *place, env=env)

    def write_names(self, names: Sequence[str]) -> None:
        """What the hosts call each other, from now on."""
        lines = (f"{address} {name}\n" for address, name in zip(ADDRESSES, names, strict=False))
        self.names.write_text(f"127.0.0.1 localhost\n{''.join(lines)}")

    def write(self, name: str, text: str) -> None:
        """A file on both hosts."""
        for directory in self.directories:
            (directory / name).write_text(text)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """The cable is out; no side is notified."""
        _ip("-n", self.spaces[1], "link", "set", "cable", "down")
        try:
            yield
        finally:
            _ip("-n", self.spaces[1], "link", "set", "cable", "up")

    @contextmanager
    def slowed(self, mbit_per_s: int, latency_ms: int) -> Iterator[None]:
        """The cable takes no more than this, in either direction; what it can't take at once has to wait."""
        limit = ("rate", f"{mbit_per_s}mbit", "burst", "16k", "latency", f"{latency_ms}ms")
        for space in self.spaces:
            _ip("netns", "exec", space, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", *limit)
        try:
            yield
        finally:
            for space in self.spaces:
                _ip("netns", "exec", space, "tc", "qdisc", "del", "dev", "cable", "root")


def ended(commands: list[Command]) -> list[Ended]:
    """What each command said, once all have ended."""
    results = []
    for command in commands:
        out, _ = command.process.communicate(timeout=TIMEOUT_S)
        results.append(Ended(command.process.returncode, out, command.stderr.read_text()))
    return results


def await_file(path: Path, containing: str = "") -> None:
    """Returns when the file is there and says this."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (path.is_file() and containing in path.read_text()):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
