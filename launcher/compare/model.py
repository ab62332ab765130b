"""`Comparison`: the one object that every report renders, and the schema of `comparison.json`.

What does not apply is `None` (`null`), never 0. Schema version 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "unsteady", "oom", "failed", "timeout", "skipped"]
Verdict = Literal["baseline", "faster", "slower", "same", "inconclusive"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class StepTime:
    """Milliseconds per optimizer step: median over rounds, with its 95 % confidence interval.

    With several launches: median of the launches' medians, and an interval that covers their scatter.
    """

    median: float
    ci: Interval | None


@dataclass(frozen=True)
class Difference:
    """100·(t / t_baseline − 1), in percent: positive is slower.

    t is the time of a step, or, where the global batches differ, of a sample.
    """

    percent: float | None
    ci: Interval | None
    verdict: Verdict


@dataclass(frozen=True)
class Noise:
    """The baseline measured twice in the same rounds: what differs is noise."""

    aa_percent: float | None
    ci: Interval | None
    launch_scatter_percent: float | None
    """Standard deviation of the baseline's launch medians; `None` with fewer than 2 launches."""


@dataclass(frozen=True)
class ExposedComm:
    """Communication outside compute, per step, from two independent sources."""

    trace: float | None = None
    """What the trace shows while nothing computes, in steps that the profiler slows down a little."""
    ablation: float | None = None
    """The median step less the median step without communication; noise can make it negative."""


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank (of one replica for `dp`). Times are medians per step.

    Those from `span_ms` to `transfer_ms` come from the trace, all as means of the same steps, the half of
    those in it that is nearest to the medians: compute + exposed transfer, wait and memcpy + idle = span.
    """

    rank: int
    device: str
    local_batch: int
    step_ms: float | None
    phases_ms: Mapping[str, float]
    peak_gib: float | None
    trace: str | None
    span_ms: float | None = None
    compute_ms: float | None = None
    exposed_transfer_ms: float | None = None
    exposed_wait_ms: float | None = None
    exposed_memcpy_ms: float | None = None
    idle_ms: float | None = None
    input_ms: float | None = None
    """The part of idle that waits for data."""
    host_ms: float | None = None
    """The part of idle in which the CPU has given the device nothing to do: Python between the operators."""
    wait_ms: float | None = None
    """In collectives until the last rank came, whatever overlaps it; `None` with one rank's trace only."""
    transfer_ms: float | None = None
    """In collectives after that."""
    exposed_comm_ms: ExposedComm = ExposedComm()
    host: str | None = None
    """Name of the rank's node, where the job has several."""


@dataclass(frozen=True)
class VariantResult:
    """One variant's figures and how it ended."""

    id: str
    strategy: str
    devices: tuple[str, ...]
    split: tuple[int, ...]
    split_name: str
    global_batch: int
    precision: str
    accumulate: int
    varied: Mapping[str, Any]
    status: Status
    reason: str | None
    log: str | None
    rounds: int
    launches: int
    step_ms: StepTime | None
    samples_per_s: float | None
    vs_baseline: Difference | None
    scaling_efficiency: float | None
    gradient_error: float | None
    gradient_reference: str | None
    exposed_comm_ms: ExposedComm
    warnings: tuple[str, ...]
    ranks: tuple[RankFigures, ...]
    launch_medians_ms: tuple[float, ...] = ()
    """Median step of each launch, by repetition: what two runs are compared by."""


@dataclass(frozen=True)
class Comparison:
    """All that a run found out; renders without a GPU and without rerunning anything."""

    schema: int
    name: str
    job: Mapping[str, Any]
    host: Mapping[str, Any]
    baseline: str
    ci_level: float | None
    noise: Noise
    variants: tuple[VariantResult, ...]
    fastest: str | None
    """The variant with the highest throughput; how sure its lead is says `summary`."""
    summary: str
    notes: tuple[str, ...]
    complete: bool
    """Whether all that was planned has been run."""
