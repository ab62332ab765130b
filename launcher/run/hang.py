"""Which rank a launch that takes too long waits for."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.run.ranks import Ranks
from launcher.run.stacks import BACKWARD, Activity, Thread, activity, parse_threads

_STACKS_S = 2.0
"""How long the ranks may take to write their stacks; they do it within milliseconds, unless they swap."""
_POLL_S = 0.05
_MOST_RANKS = 8
"""Named one by one."""


@dataclass(frozen=True)
class Hang:
    """What the stacks of all ranks show, and no more than that."""

    rank: int | None
    """The rank to look at: the only kind that doesn't wait; `None` where the stacks single out none."""
    headline: str
    """For one line; empty where there were no stacks."""
    details: tuple[str, ...]
    """What each rank was doing."""


def observe(pool: Ranks, logs: Mapping[int, Path]) -> Hang:
    """Has all running ranks write their stacks into their logs, and reads them there."""
    before = {rank: _size(log) for rank, log in logs.items()}
    pool.dump_stacks()
    deadline = time.monotonic() + _STACKS_S
    seen: dict[int, tuple[Thread, ...]] = {}
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # A stack is written frame by frame: it is complete when it no longer grows.
        last, seen = seen, {rank: parse_threads(_read(log, before[rank])) for rank, log in logs.items()}
        if seen == last and all(any(thread.current for thread in seen[rank]) for rank in logs):
            break
    return find_hang({rank: activity(threads) for rank, threads in seen.items()})


def find_hang(activities: Mapping[int, Activity | None]) -> Hang:
    """Who keeps whom waiting; `None` stands for a rank that left no stack."""
    busy = [rank for rank, doing in activities.items() if doing and doing.waiting is None]
    waiting = [rank for rank, doing in activities.items() if doing and doing.waiting]
    silent = [rank for rank, doing in activities.items() if doing is None]
    details = tuple(_detail(rank, doing, len(activities)) for rank, doing in activities.items())[:_MOST_RANKS]
    if not busy and not waiting:
        return Hang(None, "", ())
    if len(activities) == 1:
        return Hang(next(iter(activities)), _was(details[0]), details)
    if busy and waiting:
        place = activities[busy[0]]
        assert place is not None
        also = f" ({len(busy) - 1} more were busy too)" if len(busy) > 1 else ""
        return Hang(
            busy[0], f"rank {busy[0]} was at {place.frame}{also}, {_others(activities, waiting)}", details
        )
    if busy:
        return Hang(busy[0], f"no rank waited for another: {_was(details[0])}", details)
    if silent:
        return Hang(silent[0], f"rank {silent[0]} left no stack, and all others waited", details)
    return Hang(None, "all ranks waited for each other: not all take part in the same collective", details)


def _others(activities: Mapping[int, Activity | None], waiting: Sequence[int]) -> str:
    """What the waiting ranks were doing; of the backward pass it isn't known that they waited."""
    ways = {doing.waiting for rank in waiting if (doing := activities[rank])}
    who = f"rank {waiting[0]}" if len(waiting) == 1 else f"{len(waiting)} ranks"
    verb = "was" if len(waiting) == 1 else "were"
    return f"while {who} {'waited' if BACKWARD not in ways else f'{verb} in the backward pass'}"


def _detail(rank: int, doing: Activity | None, num_ranks: int) -> str:
    if doing is None:
        return f"rank {rank} left no stack"
    ddp = ", in which DDP waits for the other ranks" if doing.waiting == BACKWARD and num_ranks > 1 else ""
    return f"rank {rank} {doing.text}{ddp}"


def _was(detail: str) -> str:
    return detail.replace(" is ", " was ", 1).replace(" waits ", " waited ", 1)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _read(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
