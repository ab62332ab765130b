"""The tables of a `TraceReport` that are made on request. Times are µs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Table = Literal["kernels", "shapes", "operators", "collectives", "copies", "launches", "critical-path"]
"""The table that is shown on request."""
TABLES: tuple[Table, ...] = get_args(Table)


@dataclass(frozen=True)
class ShapeTotal:
    """Calls of an operator with the same shapes; sums over all ranks."""

    name: str
    shapes: str
    """The shapes of its tensors: `64×3×224×224, 64×3×7×7`."""
    types: str
    """The types of the same tensors."""
    count: int
    """The number of calls, with each replay of a CUDA graph that captured them."""
    device_us: float
    """The time of the GPU work launched directly from it; where the CPU is the device, on the CPU."""
    flops: int | None
    """The operations of one call: matrix products, convolutions and attention only."""
    bytes: int | None
    """The bytes of its inputs and outputs, each once."""
    tflop_per_s: float | None
    gb_per_s: float | None
    roofline_percent: float | None
    """The time at the device's peak rates, of FLOPs or bytes, as a share of what it took."""
    bound: str | None
    """`compute` or `memory`: which peak limits it."""


@dataclass(frozen=True)
class KernelTotal:
    """A kernel as launched by an operator with the same shapes; sums over all ranks."""

    name: str
    kind: str
    """compute, comm or memcpy."""
    op: str | None
    """The operator; `None` where none launched it."""
    shapes: str
    graph: bool
    """Whether a CUDA graph launched it."""
    count: int
    device_us: float
    min_us: float
    max_us: float


RowKind = Literal["module", "op", "shapes", "outside"]


@dataclass(frozen=True)
class OperatorTotal:
    """A row of the tree of modules and operators, by which called which; sums over all ranks.

    A row's time contains that of the rows below it that are one deeper, up to the next one of its own depth.
    """

    depth: int
    """0: nothing encloses it."""
    kind: RowKind
    """The shapes and types of an operator's calls are rows below it, which divide its own time.
    outside: GPU work that was launched outside of all modules and operators."""
    name: str
    count: int
    """Calls; of those that a CUDA graph captured, its replays instead. Of `outside`, pieces of work."""
    total_us: float
    """The time of the GPU work launched or captured within it; of operators, where the CPU is the device."""
    self_us: float
    """The part of `total_us` without the modules and operators within it."""


@dataclass(frozen=True)
class CollectiveTotal:
    """Collectives of one group, operation, size and type."""

    group: str
    kind: str
    bytes: int | None
    """The bytes of each, as in NCCL's tests: the larger of input and output."""
    dtype: str | None
    count: int
    transfer_us: float | None
    """Mean of those that several ranks' traces show; so are the next three."""
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    arrival_spread_us: float | None
    """The time from the first rank's arrival to the last one's."""
    wait_us: float | None
    """Sum over ranks and collectives."""


@dataclass(frozen=True)
class CopyTotal:
    """Copies and memsets of one direction; sums over all ranks."""

    direction: str
    """`HtoD (Pageable -> Device)` and the like, as the GPU's driver says; `Memset`."""
    count: int
    bytes: int | None
    device_us: float
    gb_per_s: float | None
    exposed_us: float
    """Time without compute or communication on the same device at the same time."""


@dataclass(frozen=True)
class LaunchTotals:
    """How one rank feeds its GPU."""

    rank: int
    delay_percentiles_us: tuple[float, float, float, float]
    """Percentiles of the delay from the launching call to the work: 50 %, 90 %, 99 %, largest."""
    queue_mean: float
    """Pieces of work that are launched and not done, over time."""
    queue_max: int
    queue_empty_percent: float
    """Share of the time in which nothing was launched that wasn't done."""
    queue: tuple[tuple[float, int], ...]
    """Lengths over time: µs since `base_time_ns` on the rank's own clock, pieces; up to 200 points."""
    short_kernels: int
    """Kernels of less than 10 µs."""
    short_us: float
    slow_launches: int
    """Kernels whose launching call took longer than they did; not those of CUDA graphs."""


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path."""

    part: str
    """compute, transfer, copies, input, host (the CPU launches), latency (between launch and start) or before
    (the rank's capture began later than that of others)."""
    name: str | None
    """A kernel, or a kind of collective and its group; `None`: all of that part."""
    rank: int | None
    """`None`: on whatever rank."""
    path_us: float
    gain_us: float | None
    """The time that the job would gain without it, by replaying the graph; `None` where not computed."""


@dataclass(frozen=True)
class CriticalPath:
    """The chain of tasks, over all ranks, that decides how long the job takes."""

    length_us: float
    """The length of the replay as recorded."""
    recorded_us: float
    num_steps: int
    """Steps in it; 0 if unknown."""
    parts: tuple[PathPart, ...]
    """Add up to `length_us`."""
    names: tuple[PathPart, ...]
    """Kernels and collectives with most time on the path."""
    ranks: tuple[PathPart, ...]
    """The path's time by rank, without transfer, which belongs to no rank."""
    even_gain_us: float | None
    """The time that the job would gain if all ranks computed and copied equally long.

    Negative where it would be longer: the critical path may run over a rank that has less to do.
    """
    guessed_waits: int
    """Waits for GPU work that the traces don't record, but that their times show."""
    contradictions: int
    """Waits that contradict others or the recorded times, and were left out."""
