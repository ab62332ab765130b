"""`pytest --workers N`: tests side by side, in forks of the process that has collected them.

What is imported and collected once takes 12 s; with xdist each process does it again. A process takes a file
at a time, and what it reports is as if its parent had run the test. The last process runs the tests that are
marked `alone`, once the others have ended.
"""

import contextlib
import os
import random
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

from gpurun.launcher.machine.process_tree import become_subreaper, die_with
from tests import forkserver
from tests.leaks import have_own_shared_memory

_FIRST = "tests/integration/processes/"
"""These split their process, which must have no thread yet; others leave some, as fsspec's for requests."""
_GROUPED = (_FIRST, "tests/browser/", "tests/unit/house/")
"""Tests of these files run in one process: one browser and one TensorBoard for all; all code parsed once."""
_COMPUTING = "tests/unit/"
_ALONE = "alone"

is_worker = False
"""Whether this process is one of several."""


def run(session: pytest.Session, num_workers: int) -> None:
    """Runs all tests of a session; raises what ends it early, as pytest's own loop does."""
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
    left = session.items
    while left:
        started = _run(session, left, num_workers)
        if not started:
            raise session.Failed("no process of the tests has begun one")
        left = [item for item in left if item.nodeid not in started]  # a process broke off before them


def _run(session: pytest.Session, items: list[pytest.Item], num_workers: int) -> set[str]:
    """Runs tests in new processes; returns the names of those that were begun."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.partition("::")[0]
        group = next((group for group in _GROUPED if name.startswith(group)), name)
        files.setdefault(_ALONE if item.get_closest_marker(_ALONE) else group, []).append(item)
    alone = files.pop(_ALONE, [])
    # Tests with processes wait much of their time: those without use the cores meanwhile.
    names = list(enumerate(files))
    computing = [number for number, name in names if name.startswith(_COMPUTING)]
    others = [number for number, name in names if not name.startswith((_COMPUTING, _FIRST))]
    first = [number for number, name in names if name == _FIRST]
    queues = [_queue([*first, *others]), _queue(computing)]
    last = _Last(alone, *Pipe(duplex=False), _queue(range(num_workers - 1)))
    workers: dict[Connection, int] = {}
    parent = os.getpid()
    try:
        for number in range(num_workers):
            ours, theirs = Pipe(duplex=False)
            with warnings.catch_warnings(action="ignore"):  # of threads: a fork has none of theirs
                pid = os.fork()
            if pid == 0:
                chosen = _items(list(files.values()), queues[:: -1 if number % 2 else 1], last)
                _work(session, chosen, theirs, parent)
            theirs.close()
            workers[ours] = pid
        return _hear(session, workers, last)
    finally:
        for queue in (*queues, last.others):
            os.close(queue)
        last.receiver.close()
        last.sender.close()
        for ours, pid in workers.items():
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        for pid in workers.values():
            os.waitpid(pid, 0)


@dataclass(frozen=True)
class _Last:
    """The tests that the last process runs."""

    items: list[pytest.Item]
    receiver: Connection
    """That process waits here for the word that the others have ended."""
    sender: Connection
    others: int
    """The end of a pipe: a process that is out of files reads two bytes; the last one finds none."""

    def begin(self) -> list[pytest.Item]:
        """The tests, when all other processes have ended; in any other process there are none."""
        if not self.items or os.read(self.others, 2):
            return []
        self.receiver.recv()
        return self.items


def _hear(session: pytest.Session, workers: dict[Connection, int], last: _Last) -> set[str]:
    """Passes on what the processes report, until all have ended; one that breaks off fails its test.

    Returns the names of the tests that were begun.
    """
    hook = session.config.hook
    started: set[str] = set()
    running: dict[Connection, tuple[str, Any] | None] = dict.fromkeys(workers)
    while running:
        for worker in wait(list(running)):
            assert isinstance(worker, Connection)
            try:
                kind, content = worker.recv()
            except EOFError:
                kind, content = "broken off", None
            if kind == "start":
                running[worker] = content
                started.add(content[0])
                hook.pytest_runtest_logstart(nodeid=content[0], location=content[1])
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=content)
                hook.pytest_runtest_logreport(report=report)
            else:
                test = running.pop(worker)
                _, status = os.waitpid(workers.pop(worker), 0)
                worker.close()
                if kind == "broken off":
                    said = f"the process of the test broke off, wait status {status}"
                    nodeid, location = test or ("a test", ("", 0, ""))
                    hook.pytest_runtest_logreport(
                        report=pytest.TestReport(nodeid, location, {}, "failed", said, "call")
                    )
                if len(running) == 1:
                    last.sender.send(None)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return started


class _Reporter:
    """Sends what pytest reports to the parent."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self.config, self.channel = config, channel

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.channel.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.channel.send(("report", data))


def _work(
    session: pytest.Session,
    items: Iterator[pytest.Item],
    channel: Connection,
    parent: int,
) -> NoReturn:
    """Runs tests until none is left, in a process of its own; ends it."""
    global is_worker
    is_worker = True
    die_with(parent)
    code = 1
    try:
        become_subreaper()
        have_own_shared_memory()
        random.seed()
        config: Any = session.config
        _have_own_streams(config)
        base = config._tmp_path_factory.getbasetemp() / f"worker{os.getpid()}"
        base.mkdir()
        config._tmp_path_factory._basetemp = base
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Reporter(config, channel))
        item = next(items, None)
        while item:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        channel.send(("end", None))
        code = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    finally:
        forkserver.close()
        os._exit(code)


def _queue(numbers: Iterable[int]) -> int:
    """The end of a pipe: who reads two bytes takes the file of that number."""
    queue, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(2, "little") for number in numbers))
    os.close(writer)
    return queue


def _items(files: list[list[pytest.Item]], queues: Sequence[int], last: _Last) -> Iterator[pytest.Item]:
    for queue in queues:
        while ticket := os.read(queue, 2):
            yield from files[int.from_bytes(ticket, "little")]
    yield from last.begin()


def _have_own_streams(config: Any) -> None:
    """What the parent has captured so far, and where it writes, isn't this process's."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    capture.start_global_capturing()
