"""Records of events during a run or a search, and how ranks, launches, variants and trials ended."""

import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from gpurun.launcher.rundir.records.config import LaunchConfig
from gpurun.launcher.rundir.records.measured import Count, Whole
from gpurun.launcher.units import refuse_no_time

Stage = Literal["start", "build", "balance", "check", "warmup", "round", "profile", "memory", "run", "done"]
"""`run`: a program is running."""


@dataclass(frozen=True)
class Event:
    """The stage of a rank, or of the command; a line of `launches/ID/events.jsonl`, rank 0's and the
    command's, or of another rank's file."""

    time_ns: Whole
    stage: Stage
    variant: str | None = None
    round: Count = 0
    """The round; of a program its steps so far."""
    rounds: Count = 0
    monotonic_ns: Whole = 0
    """The moment by `time.monotonic_ns()`, which no one sets: durations within a launch are differences of
    it. 0 in runs that are older than this field."""
    steps_ns: tuple[Whole, Whole] | None = None
    """Of a program: when its first step began and its last one so far ended, by that clock; `None` before,
    and in older runs."""

    @classmethod
    def now(
        cls,
        stage: Stage,
        variant: str | None = None,
        round: int = 0,
        rounds: int = 0,
        steps_ns: tuple[int, int] | None = None,
    ) -> "Event":
        """An event of this moment."""
        return cls(time.time_ns(), stage, variant, round, rounds, time.monotonic_ns(), steps_ns)


def elapsed_s(events: Sequence[Event]) -> float:
    """Seconds from the first to the last event of an attempt; 0 if there is none."""
    if not events:
        return 0.0
    first, last = events[0], events[-1]
    if first.monotonic_ns and last.monotonic_ns:
        return (last.monotonic_ns - first.monotonic_ns) / 1e9
    return (last.time_ns - first.time_ns) / 1e9


def stages_s(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """Every event of an attempt but the last, with the seconds until the next one."""
    return [(event, elapsed_s((event, after))) for event, after in pairwise(events)]


@dataclass(frozen=True)
class Resumption:
    """The parts of a run that `--resume` keeps, and those that it measures again."""

    launches: Count
    """The number of launches in which variants are measured completely."""
    variants: Count
    """The number of variants that are measured completely in at least one of them."""
    again: Mapping[str, str] = field(default_factory=dict)
    """How each variant ended that is tried again."""
    with_baseline: str | None = None
    """The baseline, where it runs once more next to what is missing of a launch, since rounds are pairs."""
    left_out: tuple[str, ...] = ()
    """Variants that ran out of memory, as they would again."""
    replaced: tuple[str, ...] = ()
    """Attempts whose launches are measured again, since they ran other software."""
    interrupted: Mapping[str, tuple[Count, Count]] = field(default_factory=dict)
    """Launches that go on: how many of how many rounds they have completed."""
    not_begun: Count | None = 0
    """Launches that are still to come; `None`: a budget decides."""


@dataclass(frozen=True)
class Command:
    """A line of `commands.jsonl`: a command begins to work on a run."""

    time_ns: Whole
    resumed: Resumption | None = None
    """The beginning of a `--resume`; `None` of the first command, and in older runs."""


def between_s(logs: Iterable[Sequence[Event]], commands: Sequence[Command]) -> list[float]:
    """Seconds from the end of each launch to the start of the next one that the same command ran.

    Args:
        logs: of each attempt.
        commands: all of the run; a run that is older than their file has none, and no time between launches.
    """
    pairs = (pair for _, own in _by_command(logs, commands) for pair in pairwise(own))
    gaps = (elapsed_s((before[-1], after[0])) for before, after in pairs)
    return [gap for gap in gaps if gap > 0]


def before_s(logs: Iterable[Sequence[Event]], commands: Sequence[Command]) -> float:
    """Seconds from the start of each command to its first launch, together: processes import torch."""
    gaps_ns = (own[0][0].time_ns - begun_ns for begun_ns, own in _by_command(logs, commands))
    return sum(gap for gap in gaps_ns if gap > 0) / 1e9


def _by_command(
    logs: Iterable[Sequence[Event]], commands: Sequence[Command]
) -> Iterator[tuple[int, list[Sequence[Event]]]]:
    """When each command that ran launches began, and their logs in order."""
    begun_ns = sorted(command.time_ns for command in commands)
    by_command: dict[int, list[Sequence[Event]]] = {}
    for log in sorted((log for log in logs if log), key=lambda log: log[0].time_ns):
        by_command.setdefault(bisect(begun_ns, log[0].time_ns), []).append(log)
    by_command.pop(0, None)  # no command is known
    return ((begun_ns[number - 1], own) for number, own in by_command.items())


@dataclass(frozen=True)
class FailureRecord:
    """A rank's own record of its failure; `launches/ID/failures/rankN.json`."""

    time_ns: Whole
    rank: Count
    variant: str | None
    stage: str
    kind: Literal["exception", "oom", "exit", "user"]
    """`user`: a mistake in the user's workload that gpurun explains (file, line, expected, got)."""
    type: str
    """The exception's type; for a mistake in the workload, that of the user's exception, if any."""
    message: str
    traceback: str
    secondary: bool
    """Whether the rank only lost its peer ("connection closed by peer")."""


Status = Literal["ok", "unsteady", "oom", "failed", "timeout", "hung", "skipped"]
MEASURED = frozenset({"ok", "unsteady"})
"""The states of a variant that ran to its end."""


@dataclass(frozen=True)
class VariantStatus:
    """How a variant ended; `variants/ID/status.json`, written by the command."""

    status: Status
    reason: str | None = None
    launch: str | None = None
    rank: Count | None = None
    log: str | None = None
    """Path of the log with more, relative to the run directory."""


@dataclass(frozen=True)
class Restart:
    """A line of `restarts.jsonl`."""

    time_ns: Whole
    launch: str
    """The attempt that failed."""
    restart: Count
    """Counts from 1 within the launch."""
    reason: str


@dataclass(frozen=True)
class QuietWait:
    """A line of `waits.jsonl`: a launch began later, for other programs to leave the cores."""

    time_ns: Whole
    launch: str
    waited_s: float
    is_quiet: bool
    """Whether they did."""


@dataclass(frozen=True)
class Stall:
    """A line of `stalls.jsonl`: for a while no step was completed, and the launch wasn't ended."""

    time_ns: Whole
    launch: str
    """The attempt."""
    reason: str
    """`ddp-2-6-2: no step completed for 60 s: rank 1 is in `forward` (model.py:12); rank 0 waits`."""


@dataclass(frozen=True)
class TrialConfig:
    """The next trial of live ranks; `launches/ID/trials/N.json`."""

    launch: LaunchConfig
    """The configuration with the one variant that is tried."""
    steps: int
    """Timed steps, at least."""
    least_ms: float
    """How long they last together, at least."""


@dataclass(frozen=True)
class TrialTimes:
    """The times that live ranks have measured; `launches/ID/trials/N.times.json`, written by rank 0."""

    step_ns: tuple[float, ...]
    """The time of each timed step, on the slowest rank."""
    peak_bytes: int | None = None
    """The peak of the fullest device in one step; `None`: it wasn't looked at."""


@dataclass(frozen=True)
class TrialRecord:
    """How a trial of a combination ended; a line of `trials.jsonl`."""

    variant: str
    number: int
    """Counts from 1 for each variant."""
    status: Literal["ok", "oom", "failed", "timeout", "hung"]
    seconds: float
    """The length of the trial, the start of processes included."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that make the variant."""
    label: str = ""
    """The name in reports; empty in runs that are older than this field."""
    global_batch: Count | None = None
    step_ms: float | None = None
    """The median of its steps."""
    variance: float = 0.0
    """The variance of that logarithm, by the scatter of the steps."""
    peak_gib: float | None = None
    reason: str | None = None
    """Why it failed."""

    def is_too_large(self, memory_gib: float | None) -> bool:
        """Whether it takes more memory than it may."""
        return None not in (memory_gib, self.peak_gib) and (self.peak_gib or 0.0) > (memory_gib or 0.0)


@dataclass(frozen=True)
class TimeChange:
    """How much longer steps take, in percent; negative: shorter."""

    percent: float
    ci: tuple[float, float] | None
    """The interval at 95 % confidence; `None` where too few launches show it."""
    variant: str | None = None
    """The combination that takes so much longer; `None` of an average."""


@dataclass(frozen=True)
class Effect:
    """The effect of a value of a key on the time of a step: at the best combination, and on average."""

    key: str
    """The key in the job; of a mapping or of arguments with the name of the part: `params width`."""
    value: str
    against: str
    """The value that it is compared with: the best combination's, where this has one that was measured."""
    at_best: TimeChange | None = None
    """The best combination with this one value changed, compared with the best as it is. Of several, which
    differ in keys that the best lacks, the fastest; `None` where none was measured."""
    average: TimeChange | None = None
    """By the model of the search: the geometric mean over all pairs of combinations that differ in no other
    key that both have. `None` in older runs."""


@dataclass(frozen=True)
class Unmeasured:
    """A combination that wasn't tried, or that failed."""

    settings: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class SearchRecord:
    """The space of a search, and its result; `search.json`."""

    space: int
    """Combinations of what the job compares."""
    distinct: int
    """The number of possible combinations that differ."""
    own: str | None
    """The variant that is the job's own setting; `None`: that can't be."""
    budget_s: float
    finalists: tuple[str, ...] = ()
    """The combinations that are compared in the end; empty while combinations are tried."""
    best: str | None = None
    """The fastest by the trials."""
    left_out: tuple[Unmeasured, ...] = ()
    failed: tuple[Unmeasured, ...] = ()
    at_most_missed_percent: float | None = None
    """The bound by the model, with 95 % confidence: no other combination is faster than the best by more."""
    effects_at: Mapping[str, tuple[Effect, ...]] = field(default_factory=dict)
    """The effects of values, for each combination that may turn out to be the best."""
    memory_gib: float | None = None
    """The memory that a combination may take, where the job states `memory`."""

    def __post_init__(self) -> None:
        refuse_no_time(self.budget_s)
