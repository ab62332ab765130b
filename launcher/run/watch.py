"""The ranks of one attempt of a launch while they run: pure, on times of one monotonic clock, in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.inspect.hang_diagnosis import Hang, RankUsage
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.rundir.records import Event
from gpurun.launcher.units import format_duration

LAST_WORDS_S = 0.5
"""How long the other ranks may still write down why they fail, once one has failed."""
LEFT_BEHIND_S = 8.0
"""How long a rank may outlive another one that ended well; they all end within milliseconds."""
START_S = 60.0
"""The least that a launch has until its ranks exist and have built the model, whatever limit a variant has:
importing torch is no part of a variant, and takes long on a busy machine."""
READ_STEPS_EVERY_S = 1.0
"""Reading the ranks' step counters costs a file per rank."""
REPORT_S = 60.0
"""The least time without a completed step that is reported, where the job states none."""
REPORT_STEPS = 10
"""How many times the longest step so far that is at least."""
IDLE_S = 600.0
"""How long all ranks of a workload are idle until the launch is ended, where the job states no limit."""
OBSERVE_EVERY_S = 60.0
"""Between two observations of ranks that complete no step; each interrupts them for some milliseconds."""
IDLE_SHARE = 0.01
"""The share of a core that a rank which does nothing may use: observing it takes some, too."""
BALANCE = "balance"
"""The stage that measures the devices for a balanced split, all at once."""


def ends_idle_ranks(spec: JobSpec) -> bool:
    """Whether a launch ends once all its ranks have been idle for `IDLE_S`; those of a program may be."""
    return spec.hang_timeout_s is None and spec.on_hang == "stop" and not spec.kind.runs_program


@dataclass(frozen=True)
class Due:
    """When the rest of a launch's state is read next."""

    steps_s: float
    """The step counters."""
    usage_s: float | None = None
    """Whether the ranks do anything; `None`: that isn't asked."""


@dataclass(frozen=True)
class Tick:
    """The observations since the last tick."""

    now_s: float
    exits: tuple[Exit, ...] = ()
    events: tuple[Event, ...] = ()
    steps: tuple[int, ...] | None = None
    """Completed steps of every rank; `None`: not read this time."""
    usage: Mapping[int, RankUsage] | None = None
    """The activity of each running rank; `None`: not asked this time."""


@dataclass(frozen=True)
class Observation:
    """All running ranks at one moment."""

    at_s: float
    ranks: Mapping[int, RankUsage]


def were_idle(before: Observation, after: Observation, num_ranks: int) -> bool:
    """Whether every rank has waited, or used neither CPU nor GPU, from one observation to the next.

    What isn't known counts as use: a rank that was not seen, and a time in which this process didn't run.
    """
    elapsed_s = after.at_s - before.at_s
    seen = before.ranks.keys() & after.ranks.keys()
    if elapsed_s > 2 * OBSERVE_EVERY_S or len(seen) < num_ranks:
        return False
    return all(_was_idle(before.ranks[rank], after.ranks[rank], elapsed_s) for rank in seen)


def _was_idle(before: RankUsage, after: RankUsage, elapsed_s: float) -> bool:
    """Whether a rank has waited in one and the same collective, or used neither CPU nor GPU."""
    if after.waits_in is not None and before.waits_in == after.waits_in:
        return True
    used_s = abs(after.cpu_s - before.cpu_s)  # less than before: a process has left the tree
    return used_s < IDLE_SHARE * elapsed_s and before.gpu_percent == after.gpu_percent == 0


@dataclass(frozen=True)
class Late:
    """A time limit that a launch has exceeded."""

    limit: str
    """`took longer than 5 s`, `no step completed for 30 s`."""
    is_hang: bool
    is_balancing: bool
    stops: bool
    """Whether the launch ends by it."""
    idle_s: float = 0.0
    """How long all its ranks have been idle, where it ends by that."""

    def text(self, hang: Hang) -> str:
        """The limit, and what the launch was doing."""
        is_first = self.is_hang and hang.is_before_first_step and not self.is_balancing
        doing = (
            " while its split was being found" * self.is_balancing + " (not even the first one)" * is_first
        )
        if not self.idle_s:
            return f"{self.limit}{doing}"
        still = f"every rank waited, or used neither CPU nor GPU, for {format_duration(self.idle_s)}"
        return f"{self.limit}{doing}, and {still}"


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
    longest_step_s: float = 0.0
    """The longest time until a step was completed, in earlier launches too."""
    hang_reported: bool = False
    """Whether the present hang has been reported."""
    observed: tuple[Observation, ...] = ()
    """The newest observations, of ranks that have all been idle from each to the next."""
    deadline_s: float | None = None
    """When the ranks that still run are stopped, because others have ended."""

    @classmethod
    def begin(cls, num_ranks: int, now_s: float, longest_step_s: float = 0.0) -> "Watch":
        """Ranks that have just been started; earlier launches had a step that long."""
        return cls(
            num_ranks,
            started_s=now_s,
            now_s=now_s,
            steps_read_s=now_s,
            alive_s=now_s,
            longest_step_s=longest_step_s,
        )

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
        """Whether a rank has exited with another code than 0."""
        return any(exit_.returncode != 0 for exit_ in self.exits)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended, or the rest has had its time."""
        all_ended = len(self.exits) >= self.num_ranks
        return all_ended or (self.deadline_s is not None and self.now_s > self.deadline_s)

    @property
    def idle_s(self) -> float:
        """How long all ranks have been idle, as far as was observed."""
        return self.observed[-1].at_s - self.observed[0].at_s if self.observed else 0.0

    def report_after_s(self, spec: JobSpec) -> float:
        """The time without a completed step after which that is reported."""
        if spec.hang_timeout_s is not None and spec.on_hang == "continue":
            return spec.hang_timeout_s
        return max(REPORT_S, REPORT_STEPS * self.longest_step_s)

    def due(self, spec: JobSpec) -> Due:
        """When step counters and ranks are read next. Ranks are observed once the hang has been reported."""
        hang_s = spec.hang_timeout_s or self.report_after_s(spec)
        steps_s = self.steps_read_s + min(READ_STEPS_EVERY_S, hang_s / 4)
        if not (self.hang_reported and ends_idle_ranks(spec)):
            return Due(steps_s)
        return Due(steps_s, self.observed[-1].at_s + OBSERVE_EVERY_S if self.observed else self.now_s)

    def after(self, tick: Tick, spec: JobSpec) -> "Watch":
        """The state of the ranks one tick later."""
        watch = replace(self, now_s=tick.now_s, exits=self.exits + tick.exits)
        for event in tick.events:
            watch = watch._entered(event)
        if tick.events:
            watch = watch._lives()
        if tick.usage is not None:
            watch = watch._seen(Observation(tick.now_s, tick.usage))
        if tick.steps is not None:
            watch = watch._counted(tick.steps, spec)
        return watch._with_deadline(spec)

    def late(self, spec: JobSpec) -> Late | None:
        """The limit that is exceeded now; a hang is reported once, until a step is completed again."""
        limit_s = spec.limit_s if self.variant else max(spec.limit_s, START_S)
        if self._busy_s() > limit_s:
            return Late(f"took longer than {limit_s:g} s", False, self.is_balancing, True)
        if self.steps_read_s < self.now_s:
            return None
        without_step_s, hang_s = self.now_s - self.alive_s, spec.hang_timeout_s
        if hang_s is not None and spec.on_hang == "stop" and without_step_s >= hang_s:
            return self._hang(hang_s, stops=True)
        if ends_idle_ranks(spec) and self.idle_s >= IDLE_S:
            return self._hang(round(without_step_s), stops=True, idle_s=self.idle_s)
        after_s = self.report_after_s(spec)
        if self.hang_reported or without_step_s < after_s:
            return None
        return self._hang(round(after_s, 1), stops=False)

    def _hang(self, without_step_s: float, stops: bool, idle_s: float = 0.0) -> Late:
        return Late(f"no step completed for {without_step_s:g} s", True, self.is_balancing, stops, idle_s)

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

    def _counted(self, steps: tuple[int, ...], spec: JobSpec) -> "Watch":
        watch = replace(self, steps=steps, steps_read_s=self.now_s)
        if steps == self.steps and steps:  # before the ranks exist, torch is being imported
            return watch
        # A program may load its data before its first step; a workload's stages are events.
        if any(self.steps if spec.kind.runs_program else steps):
            step_s = self.now_s - self.alive_s
            watch = replace(watch, longest_step_s=max(self.longest_step_s, step_s))
        return watch._lives()

    def _lives(self) -> "Watch":
        return replace(self, alive_s=self.now_s, hang_reported=False, observed=())

    def _seen(self, observation: Observation) -> "Watch":
        before = self.observed[-1:]
        is_idle = bool(before) and were_idle(before[0], observation, self.num_ranks)
        return replace(self, observed=(*self.observed, observation) if is_idle else (observation,))

    def _with_deadline(self, spec: JobSpec) -> "Watch":
        """A program's last rank may save a model for long after the others have ended."""
        ends = self.has_failed or (bool(self.exits) and not spec.kind.runs_program)
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
