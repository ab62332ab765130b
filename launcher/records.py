"""The files through which workers and the command speak, one dataclass each.

The run directory is the only channel back from a worker. `LaunchOrder` goes in, the rest comes out. All are
JSON, encoded and checked by msgspec.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LOOPBACK = "127.0.0.1"

Kind = Literal["warmup", "timed", "aa", "ablation", "profile"]


@dataclass(frozen=True)
class VariantOrder:
    """One variant as a worker needs it."""

    id: str
    split: tuple[int, ...]
    accumulate: int


@dataclass(frozen=True)
class RoundTime:
    """Step time of one variant in one round: the maximum over ranks of the block's mean step."""

    launch: str
    round: int
    step_ns: float


@dataclass(frozen=True)
class ProfileOrder:
    """A `torch.profiler` capture per variant and rank, after the timed rounds."""

    steps: int
    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    modules: bool = False
    ranks: tuple[int, ...] | None = None
    """Ranks that are recorded; `None`: all."""


@dataclass(frozen=True)
class LaunchOrder:
    """Everything that the workers of one launch need; `launches/ID/launch.json`."""

    launch: str
    run_dir: str
    workload: str
    """`gpt`, `train.py:build` or `package.module:build`."""
    job_dir: str
    """Folder of the job file: relative file names of the job start here."""
    params: Mapping[str, Any]
    strategy: str
    devices: tuple[str, ...]
    """torch device of each rank (`ddp`) or replica (`dp`), as the worker sees them: `cpu`, `cuda:0`."""
    backend: str | None
    """`gloo` or `nccl` for `ddp`; `None` for one process."""
    precision: str
    seed: int
    threads: int
    """Intra-op threads of one device; a CPU device is this share of the cores."""
    variants: tuple[VariantOrder, ...]
    baseline: str | None
    """The baseline's id if it is measured in this launch; it is then measured twice (A/A)."""
    warmup: int
    rounds: int
    """Rounds of this launch at the most."""
    looks: tuple[tuple[int, float], ...]
    """(rounds so far, α of one comparison): when to look, at which level. One entry: no early stop."""
    prior: Mapping[str, tuple[RoundTime, ...]] = field(default_factory=dict)
    """Rounds of earlier launches, by variant, that the looks count as well."""
    gradient_check: bool = True
    profile: ProfileOrder | None = None
    block_ms: float = 200.0
    """A round runs a block of steps of one variant that lasts at least this long."""
    ablation_rounds: int = 0
    """In how many rounds, the first ones, every variant also runs a block without communication (`ddp`)."""
    draw: str = ""
    """What the order of blocks is drawn from: differs from run to run, and is the same on all nodes."""
    address: str = LOOPBACK
    """Where rank 0 listens: the loopback interface, unless ranks on other nodes have to reach it."""

    @property
    def world_size(self) -> int:
        return len(self.devices) if self.strategy == "ddp" else 1


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank; a line of `variants/ID/rankN.jsonl`."""

    launch: str
    round: int
    """Counts from 1 within its launch; 0 outside rounds (warm-up, profile)."""
    order: int
    """Position of the variant's block within the round."""
    step: int
    kind: Kind
    """`aa`: the baseline's second block in a round."""
    step_ns: int
    phases_ns: Mapping[str, int]
    """data, h2d, forward, backward, optimizer; adds up to `step_ns` less what lies between them."""
    peak_bytes: int | None
    """Peak of allocated device memory (CUDA) or of the process's resident set (CPU) since the block began."""


@dataclass(frozen=True)
class Event:
    """What rank 0 is doing now; a line of `launches/ID/events.jsonl`."""

    time_ns: int
    stage: Literal["start", "build", "check", "warmup", "round", "profile", "done"]
    variant: str | None = None
    round: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class VariantFacts:
    """What a launch found out about a variant besides times; `variants/ID/facts.json`."""

    gradient_error: float | None = None
    gradient_reference: str | None = None
    """`one device`, or the id of the variant that it was compared with."""
    warnings: tuple[str, ...] = ()
    """Findings that belong beside the figures: BatchNorm, a large gradient error, dropout."""
    unsteady: str | None = None
    """Why the warm-up never became steady."""


@dataclass(frozen=True)
class FailureRecord:
    """A rank's own account of its end; `launches/ID/failures/rankN.json`."""

    time_ns: int
    rank: int
    variant: str | None
    stage: str
    kind: Literal["exception", "oom", "exit", "user"]
    """`user`: a mistake in the user's workload that we explain (file, line, expected, got)."""
    type: str
    message: str
    traceback: str
    secondary: bool
    """The message of a rank that lost its peer ("connection closed by peer"), not a cause."""


@dataclass(frozen=True)
class VariantStatus:
    """How a variant ended; `variants/ID/status.json`, written by the command."""

    status: Literal["ok", "unsteady", "oom", "failed", "timeout", "skipped"]
    reason: str | None = None
    launch: str | None = None
    rank: int | None = None
    log: str | None = None
    """Path of the log that tells more, relative to the run directory."""
