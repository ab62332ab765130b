"""The logs of a run as lines, during the run or afterwards."""

import time
from collections.abc import Iterator
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.logs.lines import NOISE, LineReader, prefixed
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.rundir.claim import read
from gpurun.launcher.rundir.files import RunDir, open_regular
from gpurun.launcher.rundir.paths import older_part, rank_files, unreadable

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def all_lines(run: RunDir, rank: int | None, launch: str | None, colour: bool) -> Iterator[str]:
    """The output of one launch's ranks so far, rank by rank.

    Raises:
        SpecError: there is no such log.
    """
    launch = launch or newest_launch(run)
    logs = logs_of(run, launch, rank) if launch else {}
    if launch is None or not logs:
        raise SpecError(_no_log(run, launch, rank))
    for number, path in logs.items():
        for line in log_lines(path):
            if not line.startswith(NOISE):
                yield prefixed(number, line, colour)


def log_lines(path: Path) -> Iterator[str]:
    """The lines of one log and of its older part, read in portions: the log may be larger than memory.

    Raises:
        MachineError: it can't be read.
    """
    reader = LineReader()
    try:
        for part in parts_of(path):
            with open_regular(part) as file:
                while portion := file.read(_CHUNK_BYTES):
                    yield from reader.feed(portion)
    except OSError as error:
        raise MachineError(unreadable(path, error)) from error
    yield from reader.finish()


def parts_of(log: Path) -> list[Path]:
    """The files of a log, from the oldest on."""
    older = older_part(log)
    return [older, log] if older.exists() else [log]


def newest_lines(run: RunDir, rank: int | None, colour: bool) -> Iterator[str]:
    """What the ranks write from now on, as it comes, until the run is no longer in progress."""
    found: list[str] = []
    relay = Relay(found.append, None if rank is None else (rank,), colour)
    launch: str | None = None
    while True:
        running = read(run)
        alive = running is not None and running.may_live
        newest = newest_launch(run)
        if newest is not None and newest != launch:
            relay.finish()
            from_start = launch is not None
            launch = newest
            relay.follow(logs_of(run, launch, rank), from_start)
        elif launch is not None:
            relay.add(logs_of(run, launch, rank))
        relay.look()
        if not alive:
            relay.finish()
        yield from found
        found.clear()
        if not alive:
            return
        time.sleep(_POLL_S)


def newest_launch(run: RunDir) -> str | None:
    """The launch whose ranks were the last to begin writing."""
    logs = run.path.glob("launches/*/log")
    newest = max(logs, key=lambda log: log.stat().st_ctime_ns, default=None)
    return newest.parent.name if newest else None


def logs_of(run: RunDir, launch: str, rank: int | None) -> dict[int, Path]:
    """The logs of a launch by rank."""
    found = rank_files(run.launch(launch) / "log", ".log")
    return {number: file for number, file in found.items() if rank is None or number == rank}


def _no_log(run: RunDir, launch: str | None, rank: int | None) -> str:
    if launch is None:
        running = read(run)
        is_running = running is not None and running.may_live
        return f"{run.path}: no rank has written anything yet" if is_running else f"{run.path} has no logs"
    ranks = logs_of(run, launch, None)
    if rank is not None and ranks:
        return f"{launch} has no log of rank {rank}; it has those of {', '.join(map(str, ranks))}"
    names = sorted(log.parent.name for log in run.path.glob("launches/*/log"))
    return f"{run.path} has no launch {launch}; it has {', '.join(names)}"
