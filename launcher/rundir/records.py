"""The files through which workers and the command communicate, one dataclass each.

The run directory is the only channel back from a worker: a configuration goes in, the rest comes out. All are
JSON, encoded and checked by msgspec.
"""

import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from gpurun.launcher.grouping import grouped
from gpurun.launcher.units import COMMIT_CHARS, format_count, refuse_no_time


@dataclass(frozen=True)
class BalanceConfig:
    """The bounds of the search for `split: balanced`."""

    minimum: int
    """The fewest samples of a device; with 0, a device may be unused."""
    caps: tuple[int, ...]
    """The most samples of each device."""


@dataclass(frozen=True)
class VariantConfig:
    """One variant as a worker needs it."""

    id: str
    split: tuple[int, ...]
    accumulate: int
    balance: BalanceConfig | None = None
    """If set, `split` is only the start: the launch measures the devices, and finds the best split."""
    rounds: int | None = None
    """Rounds that it takes part in, the launch's first ones; `None`: all."""
    sync_every: int | None = None
    """Micro-batches between two averages of the gradients; `None`: only the last one is followed by one."""


@dataclass(frozen=True)
class ProfileConfig:
    """A `torch.profiler` capture per variant and rank, after the timed rounds."""

    steps: int
    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    modules: bool = False
    ranks: tuple[int, ...] | None = None
    """Ranks that are recorded; `None`: all."""


@dataclass(frozen=True)
class VariantRef:
    """A variant, in both kinds of configurations."""

    id: str
    rounds: int | None = None
    """The rounds, as in `VariantConfig`."""


@dataclass(frozen=True)
class ProgramConfig:
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
    """Seeds the random numbers of Python, numpy and torch; `None`: they are not seeded."""
    world_size: int
    warmup: int
    variants: tuple[VariantRef, ...]
    """The one variant that runs."""
    profile: ProfileConfig | None = None
    first_traced_step: int = 0
    """Counts from 0."""
    limit: int | None = None
    """Steps after which the program is ended; `None`: it runs to its end."""
    calls: Mapping[str, Mapping[str, bool | int | float | str]] = field(default_factory=dict)
    """Keyword arguments by call, as the setting of this name."""
    observe: bool = False
    """Whether each rank writes what it does: `Observed`."""
    seeds_steps: bool = False
    """Whether random numbers are seeded anew in every step and for every sample."""
    as_torchrun: bool = False
    """Whether `${local_rank}` in the arguments stands for the rank's own."""

    @property
    def variant(self) -> str:
        return self.variants[0].id


WORKLOAD = "workload"
"""The name of a workload's only site: its `given` are keys of the job that have an effect on it."""


AT_DDP = ("autocast", "compile", "comm_hook")
"""Changes of the module that is given to DDP, by name."""
NEEDS_WORKERS: Mapping[str, bool | None] = {
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
}
"""Arguments that a DataLoader refuses without workers, and their values then."""
MAX_OTHERS = 20
"""Different arguments of calls at one place that are noted, besides those of the first call."""


FIRST_STEPS = 10
"""Steps that don't count: DDP records unused parameters in each of them, and workers may load ahead."""


@dataclass(frozen=True)
class CallSite:
    """A place at which a program calls a constructor of torch."""

    name: str
    """`DataLoader`, `DistributedDataParallel`, or the class of the optimizer; `WORKLOAD` of a workload."""
    file: str
    line: int
    """The line of the statement in the caller that runs."""
    is_users: bool
    """Whether it is in a file of the user's; only such calls are changed."""
    library: str = ""
    """The package whose file it is in, where that isn't a user's: `transformers`, or `torch`."""
    given: Mapping[str, str] = field(default_factory=dict)
    """The arguments of the first call by name, as Python has them; of what isn't plain, the name of its
    class."""
    others: tuple[Mapping[str, str], ...] = ()
    """The arguments of later calls that differ from earlier ones, of at most `MAX_OTHERS` calls."""
    parameters: tuple[str, ...] = ()
    """Names of the arguments that are passed by position, at least of the first one."""
    applied: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Changed arguments, of any call at this place; of DDP also `AT_DDP`."""
    skipped: tuple[str, ...] = ()
    """Arguments of the job that mean nothing to this call."""
    count: int = 1
    end_column: int | None = None
    """Bytes of its last line up to the end of the call, as `ast` counts them; `None`: Python didn't say."""
    unused_bytes: int | None = None
    """The most bytes of parameters that a backward pass of this rank left unused in the first steps, by DDP's
    own record; `None` where it doesn't look for them."""
    epochs: int = 0
    """How often a DataLoader of this place was begun, of the longest where they differ; 0: not seen."""
    batches: int | None = None
    """How many batches that one has; `None`: it isn't known without asking the program's own code."""
    drained: int = 0
    """How many batches fewer a DataLoader with workers has ready than after the first steps: so many steps
    took what had been loaded before them. Of one that began an epoch since, 0."""
    repeats: str = ""
    """The class of its iterable dataset, where several workers read that which weren't seen to ask which they
    are: each may yield all samples."""

    @property
    def all_given(self) -> tuple[Mapping[str, str], ...]:
        """The arguments of each call, those of like ones once."""
        return self.given, *self.others

    def with_later(self, later: "CallSite") -> "CallSite":
        """The place with later calls."""
        more = (each for each in later.all_given if each not in self.all_given)
        return replace(
            self,
            applied={**self.applied, **later.applied},
            others=(*self.others, *more)[:MAX_OTHERS],
            repeats=self.repeats or later.repeats,
            epochs=max(self.epochs, later.epochs),
            batches=self.batches if self.epochs else later.batches,
            count=self.count + later.count,
        )


PlaceKind = Literal["wait", "copy", "gradients"]


@dataclass(frozen=True)
class Place:
    """A line of the user's files at which a rank waits for its GPU or for a copy, or sends gradients."""

    kind: PlaceKind
    name: str
    """The method of a tensor that is called there."""
    file: str
    line: int
    count: int


@dataclass(frozen=True)
class Observed:
    """A program's calls, losses and files, by rank: `observed.json`, `rankN.observed.json` from 1 on.

    Also of a workload, in the facts of a launch; the losses are then those of the global batch.
    """

    calls: tuple[CallSite, ...] = ()
    losses: tuple[float | None, ...] = ()
    """The numbers on which `backward` was called, the first ones, also where a GradScaler has scaled them;
    `None`: no finite number, or not computed yet when the program was ended."""
    loss_dtype: str = ""
    """The type of the first loss: `float32`. Under autocast most losses have that, too."""
    steps: int = 0
    """Calls of optimizers."""
    places: tuple[Place, ...] = ()
    """Looked for in a traced launch."""
    writes: tuple[str, ...] = ()
    """Paths of files and directories that the rank itself has made, changed, renamed or removed, some at
    least; not those of temporary files, of caches, and below the run's directory. Programs that it starts,
    and libraries other than torch that write in C, aren't seen."""
    trainer_options: tuple[str, ...] = ()
    """The options that transformers' `TrainingArguments` have, if the program has imported them."""


@dataclass(frozen=True)
class LaunchHead:
    """The keys that both kinds of configurations have in common."""

    variants: tuple[VariantRef, ...]
    rounds: int = 1
    guests: tuple["LaunchHead", ...] = ()
    """Other strategies in the same processes, as in `LaunchConfig`."""

    @property
    def all_variants(self) -> tuple[VariantRef, ...]:
        """The variants of the launch and of its guests."""
        return (*self.variants, *(variant for guest in self.guests for variant in guest.all_variants))


MAX_STEP_S = 10.0
"""The longest step that is wanted of `global_batch: max`."""


@dataclass(frozen=True)
class MaxBatchConfig:
    """The configuration of a process that finds the largest batch that each of its devices holds."""

    workload: str
    job_dir: str
    settings: Mapping[str, Any]
    """Settings that change the memory of a step, by name."""
    devices: tuple[str, ...]
    """The devices of this process, as it sees them: one, or all where one process has them."""
    index: int
    """Position of the first among the job's devices."""
    num_devices: int
    accumulate: int
    """Micro-batches of a batch."""
    keeps_gradients: bool
    """Whether as much memory as all gradients take is occupied all the time, as by DDP's buckets."""
    gradients_are_views: bool
    """Whether that is the gradients' only memory."""
    seed: int
    threads: int
    limit_bytes: int | None
    """Memory that it may use, of the host in addition to its start; `None` on a GPU of its own."""
    attempts: str
    """Path of the file for its attempts, one line each."""
    fits: int
    """The largest batch that fit in earlier processes; 0 for none."""
    fails: int | None
    """The smallest batch that did not fit."""
    max_step_s: float = MAX_STEP_S
    """A batch whose step takes longer is large enough, whatever the memory."""


@dataclass(frozen=True)
class CaptureRequest:
    """A request of `gpurun capture` to the running ranks; `launches/ID/control/captureN.json`."""

    number: int
    steps: int
    ranks: tuple[int, ...] | None
    """Ranks to record; `None`: all."""
    first_step: int
    """The first step by the control block's counter: the trace begins there, unless ranks agree on one."""


Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
"""Anyone may have written a record, so that its numbers have limits: within these, no figure overflows."""
Length = Annotated[int, Meta(ge=1, le=1 << 62)]
"""Nanoseconds that something took; a figure may be the logarithm of it."""
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
LengthOfMean = Annotated[float, Meta(ge=1e-3, le=1e18)]
"""Nanoseconds, of the mean of several."""
Kind = Literal["warmup", "timed", "aa", "ablation", "profile", "skipped"]
"""`aa`: the baseline's second block in a round. `skipped`: a step whose update a GradScaler left out."""
LossOver = Literal["mean", "sum", "counted"]
"""How a workload's loss is reduced over its samples; `counted`: the mean over what `count` returns."""
MemoryPart = Literal["parameters", "optimizer", "gradients", "communication", "activations"]
MEMORY_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)
"""A tensor with several parts counts as the first of them: DDP may keep gradients in its buckets."""
NO_STEPS = (
    "no steps were recorded, only the running time: no optimizer stepped at least twice; "
    "in a loop without an optimizer, mark each step: `with gpurun.step():`; a program that goes "
    "on from its own checkpoint may have had nothing left to do"
)
"""A warning about one attempt at a program: another may have recorded some."""
NO_GROUP = (
    "the ranks made no process group; unless they communicate without torch, each trained its own model. "
    "Call `torch.distributed.init_process_group`, and wrap the model in `DistributedDataParallel`"
)
"""A warning that ranks record of a program, and that reports don't repeat."""
NO_TRACE = "no trace: "
"""How a warning about a program begins that ended before the steps to be traced."""


@dataclass(frozen=True)
class GpuLoad:
    """One GPU's load during a block of steps."""

    peak_bytes: Whole | None = None
    """Peak of allocated memory."""
    sm_clock_mhz: Number | None = None
    """The mean, where the driver keeps samples; else at the end."""
    power_w: Number | None = None
    """The mean, where the driver counts energy; else at the end."""
    throttled: str | None = None
    """Why it ran below its clock."""
    alloc_retries: Count = 0
    """How often torch had to release cached memory, and so to wait, before an allocation succeeded."""


class StepRecord(Struct, frozen=True, gc=False):
    """One step on one rank; a line of `variants/ID/rankN.jsonl`. No dataclass, since a run has many.

    It adds to a `StepTiming` where the step belongs and what else was measured: a report reads files alone.
    """

    launch: str
    round: Count
    """Counts from 1 within its launch; 0 outside rounds (warm-up, profile)."""
    order: Count
    """Position of the variant's block within the round."""
    step: Count
    kind: Kind
    step_ns: Length
    phases_ns: Mapping[str, Whole]
    """data, h2d, forward, backward, optimizer; adds up to `step_ns` without the gaps between them."""
    peak_bytes: Whole | None
    """Peak since the block began: of allocated memory on the rank's fullest GPU, or of the process's resident
    set (CPU)."""
    queue_ns: Whole | None = None
    """How long the computing thread of this rank that waited longest was ready to run but had no core, in the
    mean step of the block."""
    throttled: str | None = None
    """Why a GPU of the rank ran below its clock in the block: `too hot`, `power brake`; `None`: none did."""
    energy_mj: Number | None = None
    """Millijoules that the rank's GPUs took for the block, shared among its steps."""
    others_ns: Whole | None = None
    """CPU time of other processes on the rank's cores, in the mean step of the block. The clock is so coarse
    that only a mean over blocks is meaningful; `None` if it is not measured."""
    gpus: tuple[GpuLoad, ...] = ()
    """The load of each GPU of the rank, during the block; in the record of a block's first step only."""
    cpu_ns: Whole | None = None
    """CPU time of all threads of the rank, in the mean step of the block; `None` in older runs."""
    thread_cpu_ns: Whole | None = None
    """CPU time of the thread that makes the steps, in the mean step of the block; `None` in older runs."""
    block_ns: LengthOfMean | None = None
    """The mean step of the block, where this is the only one of its steps that is recorded."""
    children_ns: Whole | None = None
    """CPU time of the processes that the rank has started, in the mean step of the block: part of
    `others_ns`. `None` in older runs."""


@dataclass(frozen=True)
class MemoryPeak:
    """The content of a rank's device when live tensors had most bytes, in one untimed step;
    `variants/ID/rankN.memory.json`. In bytes."""

    parameters: Whole = 0
    """Buffers of the model, gathered shards and the copies of `dp` included."""
    gradients: Whole = 0
    optimizer: Whole = 0
    """State of the optimizer, and what it makes while it runs."""
    activations: Whole = 0
    """The tensors that forward and backward make and keep, inputs included."""
    communication: Whole = 0
    """Buffers of collectives that are nothing else, such as the buckets of `ddp`."""
    reserved: Whole | None = None
    """The memory that the allocator held by then, in use or not; `None` on the CPU."""

    @property
    def parts(self) -> dict[MemoryPart, int]:
        """Bytes by part."""
        return {part: getattr(self, part) for part in MEMORY_PARTS}

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a step of a variant is expected to hold, on its fullest rank."""

    peak: MemoryPeak | None = None
    reason: str = ""
    """Why it isn't estimated."""


@dataclass(frozen=True)
class PointRecord:
    """One block of a micro-benchmark's case; a line of `variants/ID/points.jsonl`, written by rank 0."""

    launch: str
    round: Count
    series: str
    unit: Literal["bytes", "rows"]
    size: Count
    """In `unit`."""
    time_ns: LengthOfMean
    """The time of one repetition: the block's mean on the slowest rank."""
    repetitions: Count
    nbytes: Whole | None = None
    flops: Whole | None = None
    bus_factor: Number | None = None
    """Bytes that cross the busiest link, as a share of `nbytes`."""


@dataclass(frozen=True)
class RoundTime:
    """Mean step of a variant in a round: of the rank that is slowest in it, of a program in the launch.

    Over ranks and the steps of a round, unlike a `StepRecord`: rounds are what variants are compared in.
    """

    launch: str
    round: int
    step_ns: float
    num_steps: int = 1
    """How many steps it is the mean of: of a program, whose last round may be shorter."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a variant trains with, and how its gradient compares with that of a reference."""

    gradient_error: Number | None = None
    """Relative."""
    gradient_reference: str | None = None
    """`one device`, or the id of the variant that it was compared with."""
    gradient_warning: str | None = None
    """The warning that the gradient isn't the reference's, by how much, and the likely reason."""
    parameter_error: Number | None = None
    """Relative difference of the parameters after 5 steps to those of one device; `None` where each rank
    updates all of them, so that the gradient says it."""
    loss: LossOver | None = None
    """The kind of the workload's loss over its samples; `None` of a program, and in older runs."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Every file of the user's code that rank 0 has loaded, relative to the job's directory, with a hash of
    its content. Empty where there was none, and in older runs."""


@dataclass(frozen=True)
class VariantFacts(Checked):
    """A launch's findings about a variant besides times; `variants/ID/facts.json`."""

    warnings: tuple[str, ...] = ()
    """Findings to show next to the figures: BatchNorm, unused parameters."""
    inexact: str | None = None
    """That the gradient isn't the reference's, as no two ways to run the model have one."""
    unsteady: str | None = None
    """Why the warm-up did not become steady."""
    untimed: str | None = None
    """Why no step of a program was timed, though it had some."""
    flops_per_sample: Number | None = None
    """Floating-point operations of forward and backward; `None` if an operator can't be counted."""
    bytes_per_sample: Number | None = None
    """Memory of a sample's inputs and targets."""
    observed: Observed | None = None
    """What the workload is trained with, and its losses, where the plan asks for them."""


@dataclass(frozen=True)
class CodeVersion:
    """`code.json`: which commit a run was started from; absent outside of git."""

    root: str
    """Top directory of the working copy."""
    commit: str
    is_changed: bool
    """Whether tracked files differ from the commit."""

    @property
    def text(self) -> str:
        """`1a2b3c4d5e`, or `1a2b3c4d5e with uncommitted changes`."""
        return f"{self.commit[:COMMIT_CHARS]}{' with uncommitted changes' if self.is_changed else ''}"


@dataclass(frozen=True)
class Look:
    """A line of `looks.jsonl`: when a run with a budget judged what it had measured."""

    launches: Count
    """Repetitions that were complete."""
    fraction: Number
    """The share of the budget that was spent, up to 1: as much of the error rate is spent, too."""


@dataclass(frozen=True)
class ReduceRate:
    """An all-reduce over all ranks, at its fastest."""

    num_bytes: Count
    bus_gb_per_s: Number
    """Bytes that cross the busiest link of a ring, per second, by the slowest rank; 0 where the time can't
    be."""


@dataclass(frozen=True)
class PairRate:
    """A message from one rank to another one and back, at its fastest."""

    low: Count
    high: Count
    gb_per_s: Number
    """One way; 0 where the time can't be."""


@dataclass(frozen=True)
class DeviceFacts:
    """A rank's findings about its device and its links in `gpurun selftest`; `facts/rankN.json`.

    What the device or its driver doesn't report is `None`."""

    rank: Count
    device: str
    name: str
    uuid: str | None
    clock_off: Number
    """How far half a second of products is off by the device's clock, as a share of the host's time."""
    matrix_rows: Whole
    gflop_per_s: Number
    """Float32 products of square matrices: the fastest of many blocks."""
    queue_share: Number
    """Share of the products' time in which the rank was ready to run, but other processes had the cores."""
    power_w: Number | None = None
    energy_mj: Number | None = None
    """Energy of the device during the products, in millijoules."""
    clock_mhz: Number | None = None
    throttled: str | None = None
    """Why the clock was low at work."""
    pcie_link: tuple[Whole, Whole] | None = None
    """Generation and lanes of its PCIe link at work."""
    copy_gb_per_s: Number | None = None
    """Copies of pinned memory to it, the fastest, while no other rank copies; `None` on a CPU."""
    wrong_sums: tuple[str, ...] = ()
    """All-reduces that gave another sum than they should."""
    reduces: tuple[ReduceRate, ...] = ()
    """The reductions by size, smallest first."""
    pairs: tuple[PairRate, ...] = ()
    """The rates of the pairs in which this rank is the lower one."""
    cores: tuple[Whole, ...] = ()
    """Numbers of the cores that it may use."""
    cpu_share: Number = 0.0
    """CPU time of this rank over that of the products."""
    others_share: Number | None = None
    """CPU time of other processes on its cores, as `cpu_share`; below 0 where the kernel's ticks say so."""


@dataclass(frozen=True)
class CostCurve:
    """The time of a step on one device over its samples, without communication, in milliseconds."""

    alpha_ms: Number
    """The constant part of a step."""
    alpha_ci: tuple[Number, Number] | None
    beta_ms: Number
    """The time of each sample."""
    beta_ci: tuple[Number, Number] | None
    straight: bool
    """Whether the line α + β·b fits the measured points; else the curve goes through them."""
    points: tuple[tuple[Count, Number], ...]
    """Samples and their measured time, both increasing."""
    max_samples: Count | None = None
    """The most that the device's memory holds, where the batch has more."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of the curves for a split."""

    split: tuple[Count, ...]
    compute_ms: Number
    """The time of its slowest device."""


@dataclass(frozen=True)
class Balance:
    """The best split of a batch over measured devices; `variants/ID/balance.json`."""

    curves: tuple[CostCurve, ...]
    best: Prediction
    """The split with the least predicted time, T*; of measured sizes, if a curve is not straight."""
    even: Prediction | None
    """`None` if it does not fit."""
    proportional: Prediction | None
    """In proportion to speed, 1/β: best only if all α are equal. `None` if a curve is not straight."""
    overhead_ms: Number
    """The time of a step of the best split beyond its slowest device: communication, measured."""

    @property
    def predicted_ms(self) -> float:
        """The step of the best split."""
        return self.best.compute_ms + self.overhead_ms


@dataclass(frozen=True)
class Attempt:
    """A line of a search: a batch begins, fits or fails; or the search is done, or has failed."""

    outcome: str
    batch: Count
    """The batch; of a search that is done the one that needs no margin, since the dataset has no more."""
    message: str = ""
    step_s: Number = 0.0
    """The time of a step of a batch that fits, without communication."""


@dataclass(frozen=True, order=True)
class Room:
    """How many samples a device can hold, less a margin where memory is the limit."""

    samples: int
    open_end: str = ""
    """Why no more was tried, if something else than memory ended the search."""

    def __str__(self) -> str:
        samples = format_count(self.samples)
        return f"at least {samples} ({self.open_end})" if self.open_end else samples


@dataclass(frozen=True)
class NodeRooms:
    """The findings of one machine."""

    devices: tuple[str, ...]
    """Names, on several nodes with the node's rank."""
    rooms: tuple[Room, ...]
    step_s: float
    """A step of the largest batch that fits, on the slowest device."""


@dataclass(frozen=True)
class MaxBatch:
    """The result of `global_batch: max`; `max_batch.json`."""

    global_batch: Count
    caps: tuple[Count, ...]
    """The most samples of each device of the job, with a margin."""
    step_s: Number = 0.0
    """The time of a step of the largest batches that were tried; 0 in older runs."""


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
    """When a program's first step began and its last step so far ended, by that clock; `None` before,
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
    changed: tuple[str, ...] = ()
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
    in_order = sorted((log for log in logs if log), key=lambda log: log[0].time_ns)
    by_command = grouped(in_order, lambda log: bisect(begun_ns, log[0].time_ns))
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
class Killed:
    """A line of `killed.jsonl`: a program was stopped, or had not ended when its time for that was over."""

    time_ns: Whole
    launch: str
    """The attempt."""
    ranks: tuple[int, ...]
    """Ranks that had not ended by then."""
    grace_s: float
    """How long they had."""
    cause: str = ""
    """The signal that the command got; empty: none."""
    ended: str = ""
    """The ways in which the ranks ended: `exit code 0 and SIGTERM`."""
    hurried: bool = False
    """Whether the ranks were killed before that time was over, as by a second Ctrl-C."""


@dataclass(frozen=True)
class LeftProcess:
    """A line of `left.jsonl`: a process that a program has left after a good end, and what became of it."""

    time_ns: Whole
    launch: str
    """The attempt."""
    what: str


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
    """The variance of the logarithm of `step_ms`, by the scatter of the steps."""
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


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space of a search, and what was found in it."""

    space: int
    """Combinations of what the job compares."""
    distinct: int
    """The number of possible combinations that differ, with the job's own setting."""
    own: str | None
    """The variant that is the job's own setting; `None`: that can't be."""
    finalists: tuple[str, ...] = ()
    """The combinations that are compared in the end; empty while combinations are tried."""
    best: str | None = None
    """The fastest by the trials; in a result, the one that leads the comparison at the end."""
    left_out: tuple[Unmeasured, ...] = ()
    """Combinations that can't be, and those that weren't tried."""
    failed: tuple[Unmeasured, ...] = ()
    at_most_missed_percent: float | None = None
    """The bound by the model, with 95 % confidence: no other combination is faster than the best by more."""
    memory_gib: float | None = None
    """The memory that a combination may take, where the job states `memory`."""


@dataclass(frozen=True, kw_only=True)
class SearchRecord(SearchSpace):
    """A search as `search.json` keeps it."""

    budget_s: float
    effects_at: Mapping[str, tuple[Effect, ...]] = field(default_factory=dict)
    """The effects of values, for each combination that may turn out to be the best."""

    def __post_init__(self) -> None:
        refuse_no_time(self.budget_s)
