"""Chooses a run's next action: a pure state machine on frozen data, which `session.py` executes.

`begin` returns the first action; `step` and `fail` take the result of an action, or its error, and return the
next one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from gpurun.launcher.errors import Interrupted, ParamsError
from gpurun.launcher.failures.root_cause import Failure, root_cause
from gpurun.launcher.run.effects import (
    Action,
    Compare,
    Diagnose,
    Diagnosed,
    Ended,
    Explain,
    Explained,
    Finish,
    Happened,
    ReadRemaining,
    Remaining,
    ReportFullDisk,
    Restart,
    Review,
    Reviewed,
    Settle,
    Start,
    Started,
    Stop,
    Stopped,
    Wait,
)
from gpurun.launcher.run.watch import Limits, Tick, Watch, located

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

PERMANENT_ERRORS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "TabError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "UnboundLocalError",
        "AttributeError",
        "TypeError",
        "NotImplementedError",
        "FileNotFoundError",
        "IsADirectoryError",
        "NotADirectoryError",
        "PermissionError",
        "RecursionError",
    }
)
"""Exceptions about the program or its installation: the next attempt would raise them too."""

PERMANENT_CODES = frozenset({2, 126, 127})
"""Exit codes for a wrong command: usage, not executable, not found."""


@dataclass(frozen=True)
class State:
    """The state of a run."""

    limits: Limits
    repetitions: tuple[int, ...]
    """The repetition of each planned launch, in their order."""
    has_budget: bool
    """Whether to review after each repetition what is measured next."""
    rounds: Mapping[str, int] | None = None
    """The rounds by the last review."""
    reviewed: int = 0
    """Repetitions of which that was a review."""
    position: int = 0
    """The position of the launch that runs now."""
    has_run: bool = False
    """Whether this command started that launch."""
    remaining: Remaining = field(default=Remaining(()))
    may_run: bool = False
    """Whether ranks may be running."""
    watch: Watch | None = None
    """The watch of the newest attempt."""
    late: Ended | None = None
    """How the present attempt ended, where it was late."""
    error: BaseException | None = None
    """The error that ends the run as soon as no rank runs any more."""


Next = tuple[State, Action]


def begin(repetitions: Sequence[int], limits: Limits, has_budget: bool = False) -> Next:
    """The first action of a run, whose launches have these repetitions."""
    return _read_remaining(State(limits, tuple(repetitions), has_budget))


def step(state: State, happened: Happened) -> Next:
    """The next action, from the result of the last one."""
    match happened:
        case Remaining():
            return _on_remaining(state, happened)
        case Reviewed():
            return _on_reviewed(state, happened.rounds)
        case Started():
            return _waits(state, Watch.begin(happened.num_ranks, happened.now_s, state.watch))
        case Tick():
            return _on_tick(state, happened)
        case Diagnosed():
            return _on_diagnosed(state, happened)
        case Stopped():
            return _on_stopped(replace(state, may_run=False), happened)
        case Explained():
            return _on_explained(state, happened.failure)
        case None:
            return _read_remaining(state)
        case _:
            assert_never(happened)


def _read_remaining(state: State) -> Next:
    if state.position == len(state.repetitions):
        return _review(state, state.repetitions[-1] + 1) or (state, Finish())
    return replace(state, late=None), ReadRemaining(state.position, state.rounds)


def _review(state: State, repetitions: int) -> Next | None:
    """The review of so many repetitions, unless it has been made or there is no budget."""
    if not state.has_budget or repetitions == state.reviewed:
        return None
    return replace(state, reviewed=repetitions), Review(repetitions)


def _on_reviewed(state: State, rounds: Mapping[str, int]) -> Next:
    if not rounds:
        return state, Finish()
    return _read_remaining(replace(state, rounds=rounds))


def _on_remaining(state: State, remaining: Remaining) -> Next:
    """Runs what is missing of the launch; the next launch follows when nothing is."""
    if not remaining.attempts and (review := _review(state, state.repetitions[state.position])):
        return review
    if remaining.missing:
        return replace(state, remaining=remaining, has_run=True, may_run=True), _start(state, remaining)
    following = replace(state, position=state.position + 1, has_run=False)
    is_compared = state.has_run and not (state.has_budget and _ends_repetition(state))
    return (following, Compare()) if is_compared else _read_remaining(following)


def _ends_repetition(state: State) -> bool:
    """Whether the launch is the last one of its repetition: then comes a review, which compares."""
    return len(set(state.repetitions[state.position : state.position + 2])) == 2 or (
        state.position + 1 == len(state.repetitions)
    )


def _start(state: State, remaining: Remaining) -> Start:
    """Launches after the first, and further attempts, find more modules imported."""
    is_first = state.position == 0 and len(state.repetitions) > 1
    preloads: Literal["before", "after"] | None
    preloads = "before" if remaining.attempts else "after" if is_first else None
    return Start(state.position, remaining.attempts + 1, remaining.rounds, preloads)


def _on_tick(state: State, tick: Tick) -> Next:
    watch = _watch(state).after(tick, state.limits)
    if watch.is_over:
        return replace(state, watch=watch), Stop("ended", watch.exits, tuple(state.remaining.rounds))
    if late := watch.late(state.limits):
        watch = replace(watch, hang_reported=watch.hang_reported or late.is_hang)
        return replace(state, watch=watch), Diagnose(late, watch.variant)
    return _waits(state, watch)


def _waits(state: State, watch: Watch) -> Next:
    return replace(state, watch=watch), Wait(watch.has_failed, watch.due(state.limits))


def _on_diagnosed(state: State, found: Diagnosed) -> Next:
    watch = _watch(state)
    if not found.late.stops:
        return _waits(state, watch)
    late = found.late
    ended = Ended(late=late.text(found.hang), is_hung=late.is_hang, hang=found.hang, variant=watch.variant)
    return replace(state, late=ended), Stop("late", watch.exits, tuple(state.remaining.rounds))


def _on_stopped(state: State, stopped: Stopped) -> Next:
    """Why the ranks have ended: an error, a time limit, a full disk, a failure, or none of these."""
    if state.error is not None:
        return state, Finish(state.error)
    if state.late is not None:
        return _conclude(state, state.late)
    if stopped.finished >= set(state.remaining.rounds):
        return state, Settle(Ended())
    exits = _watch(state).exits + stopped.exits
    full = [exit_.rank for exit_ in exits if exit_.returncode == os.EX_IOERR]
    if full:
        return state, ReportFullDisk(full[0])
    cause = root_cause(exits, stopped.records, stopped.stopped_ns)
    return state, Explain(located(cause, stopped.last.get(cause.rank), _watch(state)))


def _on_explained(state: State, failure: Failure) -> Next:
    """A rank's own record of its variant counts more than the events.

    Rank 0, which writes the events, may have reached a variant while another rank was still building.
    """
    variant = failure.variant if failure.stage else _watch(state).variant
    return _conclude(state, Ended(failure=failure, variant=variant))


def _conclude(state: State, ended: Ended) -> Next:
    """Starts the launch again, or gives up what it failed to measure."""
    number = state.remaining.restarts + 1
    if should_restart(ended, number, state.limits):
        reason = ended.failure.reason if ended.failure else str(ended.late)
        return state, Restart(number, state.limits.restarts, pause_s(number), reason)
    return state, settled(ended, state.remaining.missing)


def should_restart(ended: Ended, number: int, limits: Limits) -> bool:
    """Whether restart `number` is allowed, and may help."""
    if number > limits.restarts:
        return False
    return ended.failure is None or is_transient(ended.failure)


def settled(ended: Ended, missing: Sequence[str]) -> Settle:
    """The variants that a failure costs: the one that caused it; if none had begun, all of the launch."""
    if ended.variant is not None:
        return Settle(ended, (ended.variant,))
    if not is_same_everywhere(ended.failure):
        return Settle(ended, tuple(missing))
    return Settle(ended, tuple(missing), True, mistake_of(ended.failure))


def is_same_everywhere(failure: Failure | None) -> bool:
    """Whether every launch that builds the same model would fail likewise."""
    return failure is not None and failure.stage == "build" and fails_everywhere(failure)


def mistake_of(failure: Failure | None) -> ParamsError | None:
    """The job's own mistake that the workload found in its parameters."""
    is_mistake = failure is not None and failure.error == ParamsError.__name__
    return ParamsError(failure.message) if failure is not None and is_mistake else None


def fail(state: State, error: BaseException) -> Next:
    """The next action after one that raised an error: the ranks are stopped before the run ends by it.

    If stopping them fails, that error ends the run.
    """
    if not state.may_run:
        return state, Finish(error)
    interruption = error if isinstance(error, Interrupted) else None
    return replace(state, error=error, may_run=False), Stop("error", interruption=interruption)


def _watch(state: State) -> Watch:
    """The ranks' watch, which is there from `Started` on."""
    if state.watch is None:
        raise RuntimeError("no launch has been started")
    return state.watch


def is_transient(failure: Failure) -> bool:
    """Whether another attempt may succeed: a rule of thumb that errs on the side of trying.

    Yes: signals (SIGKILL, SIGSEGV, …), the kernel's OOM killer, lost connections, other exit codes and
    exceptions. No: mistakes in the job or the program, and a rank that itself ran out of memory.
    """
    if failure.kind == "user" or failure.error in PERMANENT_ERRORS:
        return False
    if failure.kind == "oom":
        return failure.error is None  # the kernel's OOM killer: another process may have taken the memory
    if failure.kind == "exit":
        return failure.code not in PERMANENT_CODES
    return True


def fails_everywhere(failure: Failure) -> bool:
    """Whether the mistake is in the program or the job, so that every rank and strategy fails alike.

    Other exceptions of a user's code may depend on where it runs, for example on the number of ranks.
    """
    return failure.error in PERMANENT_ERRORS or failure.error in ("UserError", ParamsError.__name__)


def pause_s(restart: int) -> float:
    """Seconds to wait before restart number `restart`, from 1: doubled each time, up to a limit."""
    return float(min(FIRST_PAUSE_S * 2 ** min(restart - 1, 20), LONGEST_PAUSE_S))
