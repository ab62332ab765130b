"""Looks at all ranks of a launch from outside, at any time: stacks, collectives, steps."""

import time
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.inspect.collectives import History
from gpurun.launcher.inspect.flight_recorder import ask_histories
from gpurun.launcher.inspect.stacks import Thread, parse_threads
from gpurun.launcher.machine.process_tree import send_signal
from gpurun.launcher.rundir.control import STACKS_SIGNAL, RankState, read_states, stacks_path
from gpurun.launcher.rundir.files import num_bytes

STACKS_S = 2.0
"""How long the ranks may take to write their stacks; they do it within milliseconds, unless they swap."""
_POLL_S = 0.02


@dataclass(frozen=True)
class RankSnapshot:
    """One rank as it was seen."""

    rank: int
    pid: int
    steps: int
    threads: tuple[Thread, ...]
    """Empty where the rank left no stack."""
    history: History
    """Empty where it did not say."""


def observe(folder: Path) -> tuple[RankSnapshot, ...]:
    """All ranks that run, by the control blocks in `folder`; takes some tens of milliseconds."""
    states = {rank: state for rank, state in read_states(folder).items() if state.is_running}
    threads = ask_stacks(folder, states)
    histories = ask_histories(folder, states)
    return tuple(
        RankSnapshot(rank, state.pid, state.steps, threads[rank], histories.get(rank, ()))
        for rank, state in states.items()
    )


def ask_stacks(folder: Path, states: dict[int, RankState]) -> dict[int, tuple[Thread, ...]]:
    """The stacks of these ranks, whatever they are doing: the handler needs no GIL."""
    before = {rank: num_bytes(stacks_path(folder, rank)) for rank in states}
    for state in states.values():
        send_signal(state.pid, STACKS_SIGNAL)
    seen: dict[int, tuple[Thread, ...]] = dict.fromkeys(states, ())
    deadline = time.monotonic() + STACKS_S
    while states and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # A stack is written frame by frame: it is complete when it no longer grows.
        last = seen
        seen = {rank: parse_threads(_read(stacks_path(folder, rank), before[rank])) for rank in states}
        if seen == last and all(any(thread.current for thread in threads) for threads in seen.values()):
            break
    return seen


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
