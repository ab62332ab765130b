"""Records of measurements: steps, points, rounds; cost curves of devices; findings of a self-test."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from gpurun.launcher.units import format_count

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
GRADIENT_DIFFERS = "the gradient differs from that of "
"""How a warning begins where an error is larger than the precision explains: gradients don't agree then."""


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
    """One step on one rank; a line of `variants/ID/rankN.jsonl`. No dataclass, since a run has many."""

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
class MemoryEstimates:
    """The estimates by variant."""

    variants: Mapping[str, MemoryEstimate]


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
    """Mean step of a variant in a round: of the rank that is slowest in it, of a program in the launch."""

    launch: str
    round: int
    step_ns: float
    num_steps: int = 1
    """How many steps it is the mean of: of a program, whose last round may be shorter."""


@dataclass(frozen=True)
class VariantFacts:
    """A launch's findings about a variant besides times; `variants/ID/facts.json`."""

    gradient_error: Number | None = None
    gradient_reference: str | None = None
    """`one device`, or the id of the variant that it was compared with."""
    warnings: tuple[str, ...] = ()
    """Findings to show next to the figures: BatchNorm, dropout."""
    unsteady: str | None = None
    """Why the warm-up did not become steady."""
    untimed: str | None = None
    """Why no step of a program was timed, though it had some."""
    flops_per_sample: Number | None = None
    """Floating-point operations of forward and backward; `None` if an operator can't be counted."""
    bytes_per_sample: Number | None = None
    """Memory of a sample's inputs and targets."""
    loss: LossOver | None = None
    """`None` in runs that are older than this field."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Every file of the user's code that rank 0 has loaded, relative to the job's directory, with a hash of
    its content. Empty where there was none, and in older runs."""
    gradient_warning: str | None = None
    """The warning that the gradient isn't the reference's, by how much, and the likely reason."""
    parameter_error: Number | None = None
    """Relative difference of the parameters after 5 steps to those of one device; `None` where each rank
    updates all of them, so that the gradient says it."""


@dataclass(frozen=True)
class CodeVersion:
    """`code.json`: which commit a run was started from; absent outside of git."""

    root: str
    """Top directory of the working copy."""
    commit: str
    is_changed: bool
    """Whether tracked files differ from the commit."""


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
    time_us: Number
    """The time of the slowest rank."""
    bus_gb_per_s: Number
    """Bytes that cross the busiest link of a ring, per second; 0 where the time can't be."""


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
    """The share of that time in which the rank was ready to run, but other processes had the cores."""
    power_w: Number | None = None
    energy_mj: Number | None = None
    """Over that time."""
    clock_mhz: Number | None = None
    throttled: str | None = None
    """Why the clock was low at work."""
    pcie_link: tuple[Whole, Whole] | None = None
    """Generation and lanes of its PCIe link at work."""
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
    cap: Count | None
    """The most samples that its memory holds, if the batch has more."""


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
