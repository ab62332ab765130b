"""Actions of a run and their results: `decisions.py` chooses the actions, `session.py` executes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpurun.launcher.errors import Interrupted, ParamsError
from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run.watch import Due, Late, Tick
from gpurun.launcher.rundir.records import Event, FailureRecord


@dataclass(frozen=True)
class Ended:
    """How an attempt of a launch ended; without failure and `late`, well."""

    failure: Failure | None = None
    late: str | None = None
    """Why the ranks were stopped: `took longer than 5 s`, `no step completed for 30 s`."""
    is_hung: bool = False
    """Whether that was a hang, not the time limit of a variant."""
    hang: Hang | None = None
    """The activity of the ranks then."""
    variant: str | None = None
    """The variant that was running when it failed; `None`: none had begun."""


# --- What to do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRemaining:
    """Read what is still missing of a launch."""

    position: int
    """The position of the launch in the plan."""
    rounds: Mapping[str, int] | None = None
    """The rounds of each variant that is measured from now on; `None`: as planned."""


@dataclass(frozen=True)
class Start:
    """Start the ranks of a launch, for these variants."""

    position: int
    attempt: int
    """Counts from 1 within the launch."""
    rounds: Mapping[str, int]
    """The rounds of each variant."""
    preloads: Literal["before", "after"] | None = None
    """When what only later ranks need is imported for them; that takes as long as the first ones build."""


@dataclass(frozen=True)
class Wait:
    """Wait until a rank ends, at most for a moment, and read what is new."""

    has_failed: bool
    """A rank has failed: the others now only report that they lost their peer."""
    due: Due


@dataclass(frozen=True)
class Diagnose:
    """Find out what late ranks are doing, and report it."""

    late: Late
    variant: str | None

    def text(self, hang: Hang, launch: str) -> str:
        """The stage that is late, and the limit that was exceeded: `ddp-2-6-2: took longer than 5 s`."""
        return f"{self.variant or launch}: {self.late.text(hang)}"


@dataclass(frozen=True)
class Stop:
    """End the ranks that are still running, and read their results."""

    why: Literal["ended", "late", "error"]
    """All have ended or one has failed; a time limit; an error of the command, Ctrl-C too."""
    exits: tuple[Exit, ...] = ()
    """So far."""
    variants: tuple[str, ...] = ()
    """The variants that were to be measured."""
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
        """The line that is reported: `restart 1 of 3 of 03-ddp-2 in 2 s`."""
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
    """The mistake in the job itself, where only building its workload could show it."""


@dataclass(frozen=True)
class Compare:
    """Compare what has been measured so far."""


@dataclass(frozen=True)
class Review:
    """Decide what is measured next, all groups having been launched as often; compare what there is."""

    repetitions: int
    """How often."""


@dataclass(frozen=True)
class Finish:
    """End the run: all launches are done, or there was this error. No rank runs any more."""

    error: BaseException | None = None


Effect = (
    ReadRemaining | Start | Wait | Diagnose | Stop | Explain | ReportFullDisk | Restart | Settle | Compare
    | Review
)  # fmt: skip
Action = Effect | Finish


# --- What happened ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remaining:
    """How far a launch is, from the run directory."""

    missing: tuple[str, ...]
    """Variants that are still to be measured."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """To run next, by variant: the missing ones, and the baseline with them."""
    attempts: int = 0
    """Started so far, of this launch."""
    restarts: int = 0
    """So far."""
    done: int = 0
    """Rounds that all of the missing variants have completed."""


@dataclass(frozen=True)
class Started:
    """The ranks have been requested."""

    num_ranks: int
    now_s: float


@dataclass(frozen=True)
class Diagnosed:
    """The activity of late ranks."""

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
    """The ranks' own records of their failures."""
    finished: frozenset[str] = frozenset()
    """Variants of the launch that are measured."""
    last: Mapping[int, Event] = field(default_factory=dict)
    """The newest event of each rank that has written some."""


@dataclass(frozen=True)
class Explained:
    """A failure was reported; the rank's log may have added to it."""

    failure: Failure


@dataclass(frozen=True)
class Reviewed:
    """The next measurements."""

    rounds: Mapping[str, int]
    """The rounds of each variant in every launch; none: all is decided, or the budget is spent."""


Happened = Remaining | Reviewed | Started | Tick | Diagnosed | Stopped | Explained | None
"""`None`: an action without a result was executed."""
