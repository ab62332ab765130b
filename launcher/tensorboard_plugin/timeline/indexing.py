"""The server's indexes: being built, broken, or ready. Each is built in a separate process."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from gpurun.launcher.machine.helper_process import helper_argv
from gpurun.launcher.tensorboard_plugin.timeline.format import DamagedIndex, Index, UnreadableFile, open_index
from gpurun.launcher.tensorboard_plugin.timeline.index.build import BrokenTraces, News, Order
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces, find, forget, making
from gpurun.launcher.trace.kineto.trace_file import allowed_bytes
from gpurun.launcher.units import format_count

MAX_OPEN = 4
"""Indexes mapped at a time; the least recently used are closed."""
MAX_BROKEN = 100
READING_SHARE = 0.7
"""Share of the build time that reading takes; then ranks are matched and columns written."""
MAX_BUILDS = 32
"""Running or queued; of more, none begins until it is asked for again."""
BUILD_LIMIT_S = 1800.0
"""The limit of an index, or a merged trace. A trace of 1 GB takes 20 s."""
ENTRY = "gpurun.launcher.tensorboard_plugin.timeline.index.build:main"


@dataclass(frozen=True)
class Indexing:
    """The index was requested and is being built."""

    done_bytes: int
    total_bytes: int
    seconds_left: float | None


@dataclass(frozen=True)
class Broken:
    """No trace of the variant can be read."""

    problems: tuple[UnreadableFile, ...]


State = Indexing | Broken | Index


@dataclass
class _Build:
    """A build that is running or queued."""

    total_bytes: int
    started_s: float | None = None
    reported_s: float = 0.0
    positions: dict[int, int] = field(default_factory=dict)

    def report(self, file: int, position: int) -> None:
        """Records how many bytes of a file have been read."""
        self.positions[file] = position
        self.reported_s = time.monotonic()

    def state(self) -> Indexing:
        done_bytes = min(sum(self.positions.values()), self.total_bytes)
        left_s = None
        if self.started_s is not None and done_bytes:
            reading_s = (self.reported_s - self.started_s) * self.total_bytes / done_bytes
            left_s = max(reading_s / READING_SHARE - (time.monotonic() - self.started_s), 0.0)
        return Indexing(done_bytes, self.total_bytes, left_s)


class Indexes:
    """All indexes of a server, by the state of their traces. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """One build at a time: each uses all cores already."""
        self._builds: dict[str, _Build] = {}
        self._broken: OrderedDict[str, Broken] = OrderedDict()
        self._open: OrderedDict[str, Index] = OrderedDict()

    def get(self, traces: Traces, again: bool = False) -> State:
        """The index of these traces as they are now; if there is none, a build is started.

        Args:
            traces: the files of one variant.
            again: retry traces that couldn't be read.
        """
        key = traces.key()
        with self._lock:
            if again:
                self._broken.pop(key, None)
            if key in self._builds:
                return self._builds[key].state()
            if key in self._broken:
                return self._broken[key]
            found = self._opened(traces, key)
            if found is None:
                build = _Build(traces.num_bytes)
                if len(self._builds) >= MAX_BUILDS:
                    return build.state()
                self._builds[key] = build
                threading.Thread(target=self._build, args=(traces, key, build), daemon=True).start()
                return build.state()
            return found

    def wait(self) -> None:
        """Returns when no build is running."""
        while self._builds:
            with self._turn:
                pass

    def _opened(self, traces: Traces, key: str) -> Index | None:
        """The index if it exists; a damaged one is removed."""
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        directory = find(traces, key)
        if directory is None:
            return None
        try:
            index = open_index(directory)
        except DamagedIndex:
            forget(traces, key)
            return None
        self._open[key] = index
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return index

    def _build(self, traces: Traces, key: str, build: _Build) -> None:
        """The body of the thread that waits for the building process."""
        broken: Broken | None = None
        with self._turn:
            try:
                build.started_s = time.monotonic()
                with making(traces, key) as directory:
                    problems = run_child(traces, directory, build.report)
                    if problems:
                        raise BrokenTraces(problems)
            except BrokenTraces as error:
                broken = Broken(error.problems)
            except OSError as error:
                broken = Broken(
                    (UnreadableFile(traces.directory.name, None, f"the index can't be written: {error}"),)
                )
            with self._lock:
                if broken is not None:
                    self._broken[key] = broken
                    while len(self._broken) > MAX_BROKEN:
                        self._broken.popitem(last=False)
                del self._builds[key]


def run_child(
    traces: Traces, directory: Path, report: Callable[[int, int], None], limit_s: float = BUILD_LIMIT_S
) -> tuple[UnreadableFile, ...]:
    """Builds the index of `traces` in `directory`; returns the problems if that fails.

    Args:
        traces: the files to read.
        directory: an empty one.
        report: called with the number of a file and how many of its bytes have been read.
        limit_s: a process that takes longer is killed.
    """
    # With the server's stderr: a traceback is a bug of ours, for the server's user.
    process = subprocess.Popen(helper_argv(ENTRY), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    timer = threading.Timer(limit_s, process.kill)
    timer.daemon = True  # it must not keep a server from ending
    timer.start()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        order = Order(os.getpid(), tuple(map(str, traces.files)), str(traces.within), str(directory))
        with suppress(BrokenPipeError), closing(process.stdin) as stdin:
            stdin.write(msgspec.json.encode(order))
        last = _follow(process.stdout, report, traces)
        process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
    if last.done and process.returncode == 0:
        return ()
    reason = (
        "probably out of memory, or it took too long"
        if process.returncode < 0
        else "because of an internal error"
    )
    text = f"the process that reads the traces ended with {process.returncode}, {reason}"
    return last.problems or (UnreadableFile(traces.directory.name, None, text),)


def _follow(stdout: IO[bytes], report: Callable[[int, int], None], traces: Traces) -> News:
    """Passes on the progress; returns the last line, which is the outcome, or that it is too much to read."""
    last, unpacked, most_bytes = News(), [0] * len(traces.files), allowed_bytes(traces.files)
    for line in stdout:
        with suppress(msgspec.DecodeError):
            last = msgspec.json.decode(line, type=News)
        if last.file >= 0:
            report(last.file, last.position)
            unpacked[last.file] = last.unpacked
        if sum(unpacked) > most_bytes:
            text = f"the traces unpack to more than {format_count(most_bytes >> 20)} MiB together"
            return News(problems=(UnreadableFile(traces.directory.name, None, text),))
    return last
