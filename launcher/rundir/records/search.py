"""What `gpurun tune` writes: the space of a search, the trials of its ranks, and what came of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpurun.launcher.rundir.records.config import LaunchConfig


@dataclass(frozen=True)
class TrialConfig:
    """What live ranks try next; `launches/ID/trials/N.json`."""

    launch: LaunchConfig
    """With the one variant that is tried."""
    steps: int
    """Timed steps, at least."""
    least_ms: float
    """How long they last together, at least."""


@dataclass(frozen=True)
class TrialTimes:
    """What live ranks have measured; `launches/ID/trials/N.times.json`, written by rank 0."""

    step_ns: tuple[float, ...]
    """Of each timed step, on the slowest rank."""
    peak_bytes: int | None = None
    """Of the fullest device in one step; `None`: it wasn't looked at."""


@dataclass(frozen=True)
class TrialRecord:
    """How a trial of a combination ended; a line of `trials.jsonl`."""

    variant: str
    number: int
    """Counts from 1 for each variant."""
    status: Literal["ok", "oom", "failed", "timeout"]
    seconds: float
    """What the trial took, the start of processes included."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What makes the variant."""
    step_ms: float | None = None
    """The median of its steps."""
    variance: float = 0.0
    """Of the logarithm of that, by the scatter of the steps."""
    peak_gib: float | None = None
    reason: str | None = None
    """Why it failed."""


@dataclass(frozen=True)
class Unmeasured:
    """A combination that wasn't tried, or that failed."""

    settings: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class SearchRecord:
    """What a search is about, and what it has come to; `search.json`."""

    space: int
    """Combinations of what the job compares."""
    distinct: int
    """Of those that can be, the ones that differ."""
    own: str | None
    """The variant that is the job's own setting; `None`: that can't be."""
    budget_s: float
    finalists: tuple[str, ...] = ()
    """What is compared in the end; empty while combinations are tried."""
    best: str | None = None
    """The fastest by the trials."""
    left_out: tuple[Unmeasured, ...] = ()
    failed: tuple[Unmeasured, ...] = ()
    at_most_missed_percent: float | None = None
    """By the model, with 95 % confidence: no other combination is faster than the best by more."""
