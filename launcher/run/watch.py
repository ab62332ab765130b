"""The ranks of one attempt of a launch while they run: pure, on times of one monotonic clock, in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.rundir.records import Event

LAST_WORDS_S = 0.5
"""How long the other ranks may still write down why they fail, once one has failed."""
LEFT_BEHIND_S = 8.0
"""How long a rank may outlive another one that ended well; they all end within milliseconds."""
START_S = 60.0
"""The least that a launch has until its ranks exist and have built the model, whatever limit a variant has:
importing torch is no part of a variant, and takes long on a busy machine."""
READ_STEPS_EVERY_S = 1.0
"""Reading the ranks' step counters costs a file per rank."""
BALANCE = "balance"
"""The stage that measures the devices for a balanced split, all at once."""


@dataclass(frozen=True)
class Limits:
    """The limits that a job sets for its launches."""

    variant_s: float
    """Seconds that a launch may spend on one variant."""
    hang_s: float | None
    """Seconds without a completed step after which a launch counts as hanging; `None`: no limit."""
    hang_stops: bool
    """Whether a hang ends the launch, or is only reported."""
    restarts: int
    """How often a launch is started again after a transient failure."""
    is_program: bool
    """Whether the ranks are programs, of which one may run on long after the others."""


def limits_of(spec: JobSpec) -> Limits:
    """The limits that the job states."""
    return Limits(
        variant_s=spec.limit_s,
        hang_s=spec.hang_timeout_s,
        hang_stops=spec.on_hang == "stop",
        restarts=spec.restarts,
        is_program=spec.kind.runs_program,
    )


@dataclass(frozen=True)
class Tick:
    """The observations since the last tick."""

    now_s: float
    exits: tuple[Exit, ...] = ()
    events: tuple[Event, ...] = ()
    steps: tuple[int, ...] | None = None
    """Completed steps of every rank; `None`: not read this time."""


@dataclass(frozen=True)
class Late:
    """A time limit that a launch has exceeded."""

    limit: str
    """`took longer than 5 s`, `no step completed for 30 s`."""
    is_hang: bool
    is_balancing: bool
    stops: bool
    """Whether the launch ends by it."""

    def text(self, hang: Hang) -> str:
        """The limit, and what the launch was doing."""
        if self.is_balancing:
            return f"{self.limit} while its split was being found"
        if self.is_hang and hang.is_before_first_step:
            return f"{self.limit} (not even the first one)"
        return self.limit


@dataclass(frozen=True)
class Watch:
    """The known state of the ranks of an attempt."""

    num_ranks: int
    started_s: float
    now_s: float
    exits: tuple[Exit, ...] = ()
    last: Event | None = None
    """The newest event of rank 0."""
    spent_s: Mapping[str | None, float] = field(default_factory=dict)
    """The time by variant, up to the newest event."""
    steps: tuple[int, ...] = ()
    steps_read_s: float = 0.0
    alive_s: float = 0.0
    """When a step was last completed, or another sign of life came."""
    hang_reported: bool = False
    """Whether the present hang has been reported."""
    deadline_s: float | None = None
    """When the ranks that still run are stopped, because others have ended."""

    @classmethod
    def begin(cls, num_ranks: int, now_s: float) -> "Watch":
        """Ranks that have just been started."""
        return cls(num_ranks, started_s=now_s, now_s=now_s, steps_read_s=now_s, alive_s=now_s)

    @property
    def variant(self) -> str | None:
        """The variant that runs now; `None`: none has begun."""
        return self.last.variant if self.last else None

    @property
    def is_balancing(self) -> bool:
        """Whether the devices are being measured for a balanced split."""
        return self.last is not None and self.last.stage == BALANCE

    @property
    def has_failed(self) -> bool:
        """Whether a rank has."""
        return any(exit_.returncode != 0 for exit_ in self.exits)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended, or the rest has had its time."""
        all_ended = len(self.exits) >= self.num_ranks
        return all_ended or (self.deadline_s is not None and self.now_s > self.deadline_s)

    def steps_due_s(self, limits: Limits) -> float | None:
        """When the step counters should be read next; `None`: never."""
        if limits.hang_s is None:
            return None
        return self.steps_read_s + min(READ_STEPS_EVERY_S, limits.hang_s / 4)

    def after(self, tick: Tick, limits: Limits) -> "Watch":
        """The same ranks, one tick later."""
        watch = replace(self, now_s=tick.now_s, exits=self.exits + tick.exits)
        for event in tick.events:
            watch = watch._entered(event)
        if tick.events:
            watch = replace(watch, alive_s=tick.now_s, hang_reported=False)
        if tick.steps is not None:
            watch = watch._counted(tick.steps)
        return watch._with_deadline(limits)

    def late(self, limits: Limits) -> Late | None:
        """The limit that is exceeded now; a hang counts once, until a step is completed again."""
        limit_s = limits.variant_s if self.variant else max(limits.variant_s, START_S)
        if self._busy_s() > limit_s:
            return Late(f"took longer than {limit_s:g} s", False, self.is_balancing, True)
        if limits.hang_s is None or self.hang_reported or self.steps_read_s < self.now_s:
            return None
        if self.now_s - self.alive_s < limits.hang_s:
            return None
        reason = f"no step completed for {limits.hang_s:g} s"
        return Late(reason, True, self.is_balancing, limits.hang_stops)

    def _busy_s(self) -> float:
        """Seconds spent so far on the variant that runs now, or on the start."""
        if self.last is None:
            return self.now_s - self.started_s
        return self.spent_s.get(self.variant, 0.0) + self.now_s - self.last.monotonic_ns / 1e9

    def _entered(self, event: Event) -> "Watch":
        if self.last is None:
            return replace(self, last=event)
        spent_s = (event.monotonic_ns - self.last.monotonic_ns) / 1e9
        total_s = self.spent_s.get(self.variant, 0.0) + spent_s
        return replace(self, last=event, spent_s={**self.spent_s, self.variant: total_s})

    def _counted(self, steps: tuple[int, ...]) -> "Watch":
        watch = replace(self, steps=steps, steps_read_s=self.now_s)
        if steps == self.steps and steps:  # before the ranks exist, torch is being imported
            return watch
        return replace(watch, alive_s=self.now_s, hang_reported=False)

    def _with_deadline(self, limits: Limits) -> "Watch":
        """A program's last rank may save a model for long after the others have ended."""
        ends = self.has_failed or (bool(self.exits) and not limits.is_program)
        if not ends or self.deadline_s is not None:
            return self
        return replace(self, deadline_s=self.now_s + (LAST_WORDS_S if self.has_failed else LEFT_BEHIND_S))


def located(cause: Failure, last: Event | None, watch: Watch) -> Failure:
    """The cause with what the rank was doing, where it left no record of its failure.

    Args:
        cause: the failure.
        last: the newest event of that rank. Rank 0's may be of the next variant: ranks don't wait for each
            other in blocks without communication.
        watch: of the launch. Only while devices are measured for a balanced split are all ranks certain to be
            in the same stage as rank 0.
    """
    if cause.stage is not None:
        return cause
    if last is not None:
        return replace(cause, stage=last.stage, variant=last.variant)
    return replace(cause, stage=BALANCE, variant=watch.variant) if watch.is_balancing else cause
