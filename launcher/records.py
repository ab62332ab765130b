"""The files through which workers and the command speak, one dataclass each.

The run directory is the only channel back from a worker. `LaunchOrder` goes in, the rest comes out. All are
JSON, encoded and checked by msgspec.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.loopback import LOOPBACK

Kind = Literal["warmup", "timed", "aa", "ablation", "profile", "skipped"]
"""`aa`: the baseline's second block in a round. `skipped`: a step whose update a GradScaler left out."""


@dataclass(frozen=True)
class BalanceOrder:
    """Between what bounds `split: balanced` is to be found."""

    minimum: int
    """The fewest samples of a device; 0 lets it do without one."""
    caps: tuple[int, ...]
    """The most samples of each device."""


@dataclass(frozen=True)
class VariantOrder:
    """One variant as a worker needs it."""

    id: str
    split: tuple[int, ...]
    accumulate: int
    balance: BalanceOrder | None = None
    """`split` is only where to begin: the launch measures the devices, and finds the one that is best."""


@dataclass(frozen=True)
class Curve:
    """What samples cost on one device: its own work in a step, without communication. In milliseconds."""

    alpha_ms: float
    """Of a step, whatever its samples."""
    alpha_ci: tuple[float, float] | None
    beta_ms: float
    """Of each sample."""
    beta_ci: tuple[float, float] | None
    straight: bool
    """Whether α + β·b meets the measured points; else the curve goes through them."""
    points: tuple[tuple[int, float], ...]
    """Samples and their measured time, both rising."""
    cap: int | None
    """The most samples that fitted into its memory, where more did not."""


@dataclass(frozen=True)
class Prediction:
    """What the curves say of a split."""

    split: tuple[int, ...]
    compute_ms: float
    """Of its slowest device."""


@dataclass(frozen=True)
class Balance:
    """The best split of a batch over measured devices; `variants/ID/balance.json`."""

    curves: tuple[Curve, ...]
    best: Prediction
    """Its time is T*: by the curves no split of whole samples is faster."""
    even: Prediction | None
    """`None` where it doesn't fit."""
    proportional: Prediction | None
    """In proportion to speed, 1/β, which is best only where all α are alike."""
    overhead_ms: float
    """What a step of the best split takes beyond its slowest device: communication, measured."""

    @property
    def predicted_ms(self) -> float:
        """The step of the best split."""
        return self.best.compute_ms + self.overhead_ms


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
    compile: bool = False
    """Whether the model is compiled, for each shape of its inputs anew."""
    channels_last: bool = False
    """Whether images lie in memory pixel by pixel."""
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
class OrderedVariant:
    """What both kinds of orders say of a variant."""

    id: str


@dataclass(frozen=True)
class ProgramOrder:
    """Everything that the ranks of a program's launch need; `launches/ID/launch.json`."""

    launch: str
    run_dir: str
    job_dir: str
    """Working directory, where relative file names of the job start."""
    script: str | None
    """Path of a Python file, as the job states it."""
    module: str | None
    """Name of a module, if there is no script."""
    args: tuple[str, ...]
    seed: int | None
    """What Python's, numpy's and torch's random numbers begin with; `None` leaves them alone."""
    world_size: int
    warmup: int
    variants: tuple[OrderedVariant, ...]
    """The one that is run."""
    profile: ProfileOrder | None = None

    @property
    def variant(self) -> str:
        return self.variants[0].id


@dataclass(frozen=True)
class OrderHead:
    """What both kinds of orders have in common."""

    variants: tuple[OrderedVariant, ...]


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
    step_ns: int
    phases_ns: Mapping[str, int]
    """data, h2d, forward, backward, optimizer; adds up to `step_ns` less what lies between them."""
    peak_bytes: int | None
    """Peak of allocated device memory (CUDA) or of the process's resident set (CPU) since the block began."""
    queue_ns: int | None = None
    """How long a thread of this rank was ready to run, but had no core, in the mean step of the block: of the
    computing thread that waited longest."""
    throttled: str | None = None
    """Why the GPU ran below its clock when the block ended: `hot`, `power brake`; `None`: it did not."""
    energy_mj: float | None = None
    """Millijoules that the rank's GPUs took for the block, shared among its steps."""
    others_ns: int | None = None
    """CPU time of other processes on the rank's cores, in the mean step of the block. The clock is so coarse
    that only a mean over blocks counts; `None` where nobody counts."""


@dataclass(frozen=True)
class PointRecord:
    """One block of a micro-benchmark's case; a line of `variants/ID/points.jsonl`, written by rank 0."""

    launch: str
    round: int
    series: str
    unit: Literal["bytes", "rows"]
    size: int
    """In `unit`."""
    time_ns: float
    """Of one repetition: the block's mean on the rank where it was longest."""
    repetitions: int
    nbytes: int | None = None
    flops: int | None = None
    bus_factor: float | None = None
    """Bytes that cross the busiest link, as a share of `nbytes`."""


@dataclass(frozen=True)
class Event:
    """What rank 0 is doing now, or the command with it; a line of `launches/ID/events.jsonl`."""

    time_ns: int
    stage: Literal["start", "build", "balance", "check", "warmup", "round", "profile", "run", "done"]
    """`run`: a program is running."""
    variant: str | None = None
    round: int = 0
    """Of a program: its steps so far."""
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
    flops_per_sample: float | None = None
    """Floating-point operations of forward and backward; `None` where an operator can't be counted."""
    bytes_per_sample: float | None = None
    """Memory of a sample's inputs and targets."""


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
    """Of the exception; of a mistake in the workload, of what the user's code raised, if it did."""
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


@dataclass(frozen=True)
class FitOrder:
    """What one device needs to find the largest batch that it holds."""

    workload: str
    job_dir: str
    params: Mapping[str, Any]
    device: str
    """As its process sees it."""
    index: int
    """Its position among the job's devices."""
    num_devices: int
    precision: str
    seed: int
    threads: int
    limit_bytes: int | None
    """Host memory that it may use beyond what it begins with; `None` on a GPU, which has its own limit."""
    attempts: str
    """Path of the file that takes its attempts, a line each."""
    fits: int
    """Found by processes before it: the largest batch that fitted, 0 for none,"""
    fails: int | None
    """and the smallest that did not."""


@dataclass(frozen=True)
class Attempt:
    """A line of a search: a batch begins, fits or fails; the search is done, or it failed."""

    outcome: str
    batch: int
    message: str = ""


@dataclass(frozen=True)
class Fit:
    """What `global_batch: max` came to; `fit.json`."""

    global_batch: int
    caps: tuple[int, ...]
    """The most samples of each device of the job, with a margin."""


@dataclass(frozen=True)
class RootCause:
    """Why an attempt of a launch failed; `launches/ID/failure.json`, written by the command."""

    time_ns: int
    host: str
    rank: int
    status: str
    """`was killed by SIGKILL`, `raised ValueError`, `ended with exit code 3`."""
    kind: str
    code: int | None
    """Exit code, or minus the signal's number; `None`: the command had to stop it."""
    message: str
    traceback: str
    variant: str | None
    stage: str | None
    log: str
    """Relative to the run directory."""
    last_lines: tuple[str, ...]
    """Of the log, as far as they say more than the traceback."""
    victims: tuple[int, ...]
    """Ranks that ended only because of it."""
    also: tuple[int, ...]
    """Ranks that failed by themselves a little later."""
    secondary: bool
    """No cause was found: even this rank only lost its peers."""
    hint: str | None
    """What to do about it, where an exhausted limit is known to be behind it."""


@dataclass(frozen=True)
class Restart:
    """A line of `restarts.jsonl`."""

    time_ns: int
    launch: str
    """The attempt that failed."""
    restart: int
    """Counts from 1 within the launch."""
    reason: str


@dataclass(frozen=True)
class CaptureRequest:
    """What `gpurun capture` asks of the ranks that run; `launches/ID/control/captureN.json`."""

    number: int
    steps: int
    ranks: tuple[int, ...] | None
    """Ranks to record; `None`: all."""
    first_step: int
    """By the count of the control block: the trace begins there, where ranks don't agree on it themselves."""
