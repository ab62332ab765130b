"""Which rank a launch waits for, from snapshots of all ranks. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from gpurun.launcher.inspect.snapshot import (
    MISMATCHED,
    CalledCollective,
    Gap,
    Mismatch,
    RankSnapshot,
    find_gap,
    find_mismatch,
    find_pending,
    last_ones,
)
from gpurun.launcher.inspect.stacks import (
    BACKWARD,
    COLLECTIVE,
    RENDEZVOUS,
    Activity,
    Thread,
    activity,
    is_workload,
    main_thread,
)
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.units import ranks_text

_STARTS_PROCESSES = ("/multiprocessing/spawn.py", "/multiprocessing/process.py")
"""Files of torch and of Python, for a program that starts processes and waits for them."""
_MOST_RANKS = 8
"""How many ranks are described one by one."""


@dataclass(frozen=True)
class RankView:
    """One rank, as `gpurun stacks` shows it."""

    rank: int
    pid: int
    steps: int
    doing: str
    """`is in `lookup` (train.py:25)`, `waits for the other ranks in a collective`."""
    collectives: tuple[CalledCollective, ...]
    """The newest one of each process group."""
    threads: tuple[Thread, ...]


@dataclass(frozen=True)
class RankUsage:
    """A rank's use of CPU and GPU up to one moment, and the collective in which it waits then."""

    waits_in: tuple[CalledCollective, ...] | None
    """The newest collective of each process group, if it waits for other ranks; `None`: it doesn't, as far as
    is known."""
    cpu_s: float
    """CPU time of its process and of all that it has started, so far."""
    gpu_percent: int | None
    """Utilization of its GPU in percent, as in `RankSnapshot`."""


@dataclass(frozen=True)
class Hang:
    """The finding from the stacks and collectives of all ranks."""

    rank: int | None
    """The rank to look at: one that does not wait; `None` if there is no such rank."""
    headline: str
    """One line; empty if nothing was found."""
    details: tuple[str, ...]
    """The activity of each rank."""
    missing: tuple[int, ...] = ()
    """Ranks that have not called a collective in which others wait."""
    ranks: tuple[RankView, ...] = ()

    @property
    def is_before_first_step(self) -> bool:
        """Whether no rank has completed a step yet."""
        return bool(self.ranks) and not any(view.steps for view in self.ranks)


def diagnose(snapshots: Sequence[RankSnapshot]) -> Hang:
    """Which ranks wait, and for which."""
    activities = {snapshot.rank: activity(snapshot.threads) for snapshot in snapshots}
    histories = {each.rank: each.history for each in snapshots if each.history is not None}
    gap = find_gap(histories)
    views = tuple(
        _view(snapshot, doing_text(snapshot.rank, activities[snapshot.rank], gap)) for snapshot in snapshots
    )
    found = find_hang(activities, gap, views, find_pending(histories), find_mismatch(histories))
    return replace(found, details=found.details + _own_processes(snapshots))


def usage_of(snapshots: Sequence[RankSnapshot]) -> dict[int, RankUsage]:
    """The usage by rank. The backward pass alone is no waiting: no stack distinguishes it from computing."""
    histories = {each.rank: each.history for each in snapshots if each.history is not None}
    gap, pending = find_gap(histories), find_pending(histories)
    found = {}
    for each in snapshots:
        doing = activity(each.threads)
        in_gap = gap is not None and each.rank in gap.waiting and _may_wait(doing, gap)
        waits = in_gap or pending is not None or (doing and doing.waiting in (COLLECTIVE, RENDEZVOUS))
        waits_in = tuple(last_ones(each.history)) if waits and each.history is not None else None
        found[each.rank] = RankUsage(waits_in, each.cpu_s, each.gpu_percent)
    return found


def find_hang(
    activities: Mapping[int, Activity | None],
    gap: Gap | None = None,
    views: tuple[RankView, ...] = (),
    pending: CalledCollective | None = None,
    mismatch: Mismatch | None = None,
) -> Hang:
    """Which ranks wait, and for which; the activity is `None` for a rank without a stack.

    Sequence numbers of collectives are preferred to stacks, which in the backward pass don't distinguish
    waiting from computing.
    """
    if not (gap or pending or mismatch or any(activities.values())):
        return Hang(None, "", (), ranks=views)
    shown = list(activities.items())[:_MOST_RANKS]
    details = tuple(
        f"rank {rank} {doing_text(rank, doing, gap, len(activities) > 1)}" for rank, doing in shown
    )
    rank, headline, missing = _by_numbers(activities, gap) if gap else _by_stacks(activities)
    if pending and not gap and len(activities) > 1:
        rank, headline, missing = None, f"all ranks have called {pending}, which no GPU has completed", ()
    details += _how_to_meet(activities)
    if mismatch:  # who waits for whom afterwards only follows from it
        rank, headline, missing = None, f"{MISMATCHED}: {mismatch}", ()
    return Hang(rank, headline, details, missing, views)


_Finding = tuple[int | None, str, tuple[int, ...]]


def _by_numbers(activities: Mapping[int, Activity | None], gap: Gap) -> _Finding:
    """Ranks that have called a collective against those that have not."""
    absent = "; ".join(_phrase(rank, activities.get(rank)) for rank in gap.missing[:_MOST_RANKS])
    waiting = [rank for rank in gap.waiting if _may_wait(activities.get(rank), gap)]
    others = f"; {ranks_text(waiting)} {_wait(waiting)} in {gap.collective}" if waiting else ""
    return gap.missing[0], f"{absent}{others}", gap.missing


def _may_wait(doing: Activity | None, gap: Gap) -> bool:
    """Whether a rank that has called the collective may wait in it.

    On a GPU the call itself returns at once: the rank waits wherever it needs a value, as in `loss.item()`.
    """
    return doing is None or bool(doing.waiting) or gap.collective.backend != CPU.backend


def _by_stacks(activities: Mapping[int, Activity | None]) -> _Finding:
    busy = [rank for rank, doing in activities.items() if doing and doing.waiting is None]
    waiting = [rank for rank, doing in activities.items() if doing and doing.waiting]
    silent = [rank for rank, doing in activities.items() if doing is None]
    if len(activities) == 1:
        (rank,) = activities
        return rank, _phrase(rank, activities[rank]), ()
    if busy and waiting:
        also = f" ({ranks_text(busy[1:])} {'is' if len(busy) == 2 else 'are'} busy, too)" if busy[1:] else ""
        first = _phrase(busy[0], activities[busy[0]])
        return busy[0], f"{first}{also}; {_others(activities, waiting)}", tuple(busy)
    if busy:
        return busy[0], f"no rank waits for another: {_phrase(busy[0], activities[busy[0]])}", ()
    if silent:
        others = "; all other ranks are waiting" if waiting else ""
        return silent[0], f"{ranks_text(silent)} did not report a stack{others}", tuple(silent)
    if all(doing and doing.waiting == RENDEZVOUS for doing in activities.values()):
        return None, "all ranks wait for each other in `init_process_group`: they don't find each other", ()
    return None, "all ranks wait for each other: not all take part in the same collective", ()


def _how_to_meet(activities: Mapping[int, Activity | None]) -> tuple[str, ...]:
    """The advice where no rank gets through a call of `init_process_group` in the user's program."""
    calls = [doing.frame for doing in activities.values() if doing and doing.waiting == RENDEZVOUS]
    if len(calls) < len(activities) or not all(frame and is_workload(frame.file) for frame in calls):
        return ()
    return (
        f"there each rank has to pass its own number, `rank` from 0 to {len(calls) - 1}, "
        f"`world_size={len(calls)}`, and one address, at which rank 0 listens",
        "without these arguments it takes all of them from the environment, as under torchrun",
    )


def _own_processes(snapshots: Sequence[RankSnapshot]) -> tuple[str, ...]:
    """The advice where all ranks wait for processes that they have started, and none has made a step."""
    file = next(filter(None, (each.unguarded for each in snapshots)), None)
    if file is not None and not any(each.steps for each in snapshots):
        return (
            f"each process that a rank starts by spawn runs {PurePath(file).name} from its beginning: put "
            'what that does below `if __name__ == "__main__":`',
        )
    mains = [main_thread(each.threads) for each in snapshots if not each.steps]
    if not mains or len(mains) < len(snapshots):
        return ()
    if not all(
        main and any(frame.file.endswith(_STARTS_PROCESSES) for frame in main.frames) for main in mains
    ):
        return ()
    return (
        "a program that starts its own processes (mp.spawn) is run by plain python, or without starting them",
    )


def _others(activities: Mapping[int, Activity | None], waiting: Sequence[int]) -> str:
    """The activity of the waiting ranks; in the backward pass it is not known whether they wait."""
    ways = {doing.waiting for rank in waiting if (doing := activities[rank])}
    if BACKWARD in ways:
        return f"{ranks_text(waiting)} {'is' if len(waiting) == 1 else 'are'} in the backward pass"
    return f"{ranks_text(waiting)} {_wait(waiting)}"


def _view(snapshot: RankSnapshot, doing: str) -> RankView:
    threads = tuple(sorted(snapshot.threads, key=lambda thread: thread is not main_thread(snapshot.threads)))
    newest = tuple(last_ones(snapshot.history or ()))
    return RankView(snapshot.rank, snapshot.pid, snapshot.steps, doing, newest, threads)


def _phrase(rank: int, doing: Activity | None) -> str:
    """`rank 2 is in `DataLoader.__next__`, called at train.py:41`."""
    return f"rank {rank} {doing.short if doing else 'reported no stack'}"


def doing_text(rank: int, doing: Activity | None, gap: Gap | None, has_peers: bool = False) -> str:
    """A rank's activity; that it waits in a collective only if the sequence numbers show it."""
    if doing is None:
        return "reported no stack"
    if gap is not None and rank in gap.waiting and _may_wait(doing, gap):
        where = f" ({doing.frame})" if doing.frame and is_workload(doing.frame.file) else ""
        return f"waits in {gap.collective}{where}"
    ddp = ", in which DDP waits for the other ranks" if doing.waiting == BACKWARD and has_peers else ""
    return f"{doing.text}{ddp}"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
