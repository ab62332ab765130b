"""What a run does next: a pure state machine on frozen data, which `session.py` executes.

`begin` returns the first action; `step` and `fail` take the result of an action, or its error, and return the
next one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from gpurun.launcher.errors import Interrupted, ParamsError
from gpurun.launcher.failures.restart import fails_everywhere, is_transient, pause_s
from gpurun.launcher.failures.root_cause import Failure, root_cause
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run.watch import Late, Limits, Tick, Watch, located
from gpurun.launcher.rundir.records import Event, FailureRecord


@dataclass(frozen=True)
class Ended:
    """How an attempt of a launch ended; without failure and `late`, well."""

    failure: Failure | None = None
    late: str | None = None
    """Why the ranks were stopped: `took longer than 5 s`, `no step completed for 30 s`."""
    hang: Hang | None = None
    """What they were doing then."""
    variant: str | None = None
    """The variant that was running when it failed; `None`: none had begun."""


# --- What to do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRemaining:
    """Read what is still missing of a launch."""

    position: int
    """Of the launch in the plan."""


@dataclass(frozen=True)
class Start:
    """Start the ranks of a launch, for these variants."""

    position: int
    attempt: int
    """Counts from 1 within the launch."""
    variants: tuple[str, ...]
    rounds: int
    preloads: Literal["before", "after"] | None = None
    """When what only later ranks need is imported for them; that takes as long as the first ones build."""


@dataclass(frozen=True)
class Wait:
    """Wait until a rank ends, at most for a moment, and read what is new."""

    has_failed: bool
    """A rank has failed: the others now only report that they lost their peer."""
    steps_due_s: float | None = None
    """When the step counters have to be read next; `None`: never."""


@dataclass(frozen=True)
class Diagnose:
    """Find out what late ranks are doing, and report it."""

    late: Late
    variant: str | None

    def text(self, hang: Hang, launch: str) -> str:
        """What is late, and which limit was exceeded: `ddp-2-6-2: took longer than 5 s`."""
        return f"{self.variant or launch}: {self.late.text(hang)}"


@dataclass(frozen=True)
class Stop:
    """End the ranks that are still running, and read their results."""

    why: Literal["ended", "late", "error"]
    """All have ended or one has failed; a time limit; an error of the command, Ctrl-C too."""
    exits: tuple[Exit, ...] = ()
    """So far."""
    variants: tuple[str, ...] = ()
    """What was to be measured."""
    interruption: Interrupted | None = None
    """The error, if it is Ctrl-C or a signal: then a person waits for the ranks to end."""

    @property
    def shows_output(self) -> bool:
        """Whether to show what the ranks write last: after a failure only that they lost their peer."""
        return self.interruption is not None or self.why == "late"


@dataclass(frozen=True)
class Explain:
    """Report a failure."""

    failure: Failure


@dataclass(frozen=True)
class ReportFullDisk:
    """End the run: a rank could not write its results."""

    rank: int


@dataclass(frozen=True)
class Restart:
    """Wait, then start the launch again as it was."""

    number: int
    """Counts from 1 within the launch."""
    limit: int
    pause_s: float
    reason: str

    def text(self, launch: str) -> str:
        """What is reported: `restart 1 of 3 of 03-ddp-2 in 2 s`."""
        return f"restart {self.number} of {self.limit} of {launch} in {self.pause_s:g} s"


@dataclass(frozen=True)
class Settle:
    """Write down how the variants of an attempt ended."""

    ended: Ended
    lost: tuple[str, ...] = ()
    """Variants that the attempt failed to measure."""
    skips_same_failure: bool = False
    """Whether variants of other launches that build the same model would fail likewise: they are skipped."""
    mistake: ParamsError | None = None
    """What is wrong with the job itself, where only building its workload could show it."""


@dataclass(frozen=True)
class Compare:
    """Compare what has been measured so far."""


@dataclass(frozen=True)
class Finish:
    """End the run: all launches are done, or there was this error. No rank runs any more."""

    error: BaseException | None = None


Effect = (
    ReadRemaining | Start | Wait | Diagnose | Stop | Explain | ReportFullDisk | Restart | Settle | Compare
)
Action = Effect | Finish


# --- What happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remaining:
    """How far a launch is, from the run directory."""

    missing: tuple[str, ...]
    """Variants that are still to be measured."""
    variants: tuple[str, ...] = ()
    """Those to run next: the missing ones, and the baseline with them."""
    rounds: int = 0
    """To run."""
    attempts: int = 0
    """Started so far, of this launch."""
    restarts: int = 0
    """So far."""


@dataclass(frozen=True)
class Started:
    """The ranks have been requested."""

    num_ranks: int
    now_s: float


@dataclass(frozen=True)
class Diagnosed:
    """What late ranks were doing."""

    late: Late
    hang: Hang


@dataclass(frozen=True)
class Stopped:
    """No rank runs any more."""

    exits: tuple[Exit, ...]
    """That came with the stop."""
    stopped_ns: int
    """When it began, by `time.time_ns()`."""
    records: tuple[FailureRecord, ...] = ()
    """What ranks wrote down of their failures."""
    finished: frozenset[str] = frozenset()
    """Variants of the launch that are measured."""
    last: Mapping[int, Event] = field(default_factory=dict)
    """The newest event of each rank that has written some."""


@dataclass(frozen=True)
class Explained:
    """A failure was reported; the rank's log may have added to it."""

    failure: Failure


Happened = Remaining | Started | Tick | Diagnosed | Stopped | Explained | None
"""`None`: an action without a result was executed."""


# --- From one to the other ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The state of a run."""

    limits: Limits
    num_launches: int
    position: int = 0
    """Of the launch that runs now."""
    has_run: bool = False
    """Whether this command started that launch."""
    remaining: Remaining = field(default=Remaining(()))
    may_run: bool = False
    """Whether ranks may be running."""
    watch: Watch | None = None
    """Of the present attempt."""
    late: Ended | None = None
    """How the present attempt ended, where it was late."""
    error: BaseException | None = None
    """What ends the run as soon as no rank runs any more."""


Next = tuple[State, Action]


def begin(num_launches: int, limits: Limits) -> Next:
    """The first action of a run."""
    return _read_remaining(State(limits, num_launches))


def step(state: State, happened: Happened) -> Next:
    """The next action, from the result of the last one."""
    match happened:
        case Remaining():
            return _on_remaining(state, happened)
        case Started():
            return _waits(state, Watch.begin(happened.num_ranks, happened.now_s))
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
    if state.position == state.num_launches:
        return state, Finish()
    return replace(state, watch=None, late=None), ReadRemaining(state.position)


def _on_remaining(state: State, remaining: Remaining) -> Next:
    """Runs what is missing of the launch; the next launch follows when nothing is."""
    if remaining.missing:
        return replace(state, remaining=remaining, has_run=True, may_run=True), _start(state, remaining)
    following = replace(state, position=state.position + 1, has_run=False)
    return (following, Compare()) if state.has_run else _read_remaining(following)


def _start(state: State, remaining: Remaining) -> Start:
    """Launches after the first, and further attempts, find more modules imported."""
    is_first = state.position == 0 and state.num_launches > 1
    preloads: Literal["before", "after"] | None
    preloads = "before" if remaining.attempts else "after" if is_first else None
    rounds = max(1, remaining.rounds)
    return Start(state.position, remaining.attempts + 1, remaining.variants, rounds, preloads)


def _on_tick(state: State, tick: Tick) -> Next:
    watch = _watch(state).after(tick, state.limits)
    if watch.is_over:
        return replace(state, watch=watch), Stop("ended", watch.exits, state.remaining.variants)
    if late := watch.late(state.limits):
        watch = replace(watch, hang_reported=watch.hang_reported or late.is_hang)
        return replace(state, watch=watch), Diagnose(late, watch.variant)
    return _waits(state, watch)


def _waits(state: State, watch: Watch) -> Next:
    return replace(state, watch=watch), Wait(watch.has_failed, watch.steps_due_s(state.limits))


def _on_diagnosed(state: State, found: Diagnosed) -> Next:
    watch = _watch(state)
    if not found.late.stops:
        return _waits(state, watch)
    ended = Ended(late=found.late.text(found.hang), hang=found.hang, variant=watch.variant)
    return replace(state, late=ended), Stop("late", watch.exits, state.remaining.variants)


def _on_stopped(state: State, stopped: Stopped) -> Next:
    """Why the ranks have ended: an error, a time limit, a full disk, a failure, or none of these."""
    if state.error is not None:
        return state, Finish(state.error)
    if state.late is not None:
        return _conclude(state, state.late)
    if stopped.finished >= set(state.remaining.variants):
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
    """What a failure costs: the variant that caused it; if none had begun, all of the launch."""
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
