"""Every strategy and what it implies, without importing torch.

A new strategy is a row of this table and a class under `worker/strategies/`. Whatever depends on the strategy
looks up a property here and never compares names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType


class Reach(Enum):
    """Which of the job's devices a strategy can use together."""

    DEVICE = "one device"
    NODE = "the devices of one node"
    JOB = "the devices of all nodes"


@dataclass(frozen=True)
class Strategy:
    """One way of running a model on devices."""

    name: str
    summary: str
    """A summary for the job file's reference: what runs, in a few words."""
    reach: Reach
    worker: str
    """`module:class` that trains; empty for a program, which runs its own code."""
    process_per_device: bool = False
    """Whether every device has a process of its own; otherwise one process has them all."""
    has_replicas: bool = False
    """Whether one process computes on several devices, with a thread for each."""
    has_split: bool = True
    """Whether the batch is split over devices, by sizes that the job chooses."""
    has_buckets: bool = False
    """Whether gradients are averaged between processes in DDP's buckets, which always take memory."""
    collectives: tuple[str, ...] = ()
    """The collectives of its processes in every step, in NCCL's words."""
    shards_optimizer: bool = False
    """Whether each process updates only a part of the parameters, and has the optimizer's state of that."""
    shards_parameters: bool = False
    """Whether each process has a part of the parameters only, so that all are needed in every step."""
    has_shard_groups: bool = False
    """Whether parameters are divided within groups of processes, each of which has them all."""
    transfer_advice: str = ""
    """The case of the advice to shorten exposed communication; empty: as for any data parallel training."""
    compile_refusal: str = ""
    """Why `torch.compile` can't be used with it; empty where it can."""
    checkpointing_refusal: str = ""
    """Why activations can't be computed again with it; empty where they can."""
    loop: str = "DistributedDataParallel"
    """The name of a training loop of your own that trains like it."""
    precision_refusals: Mapping[str, str] = field(default_factory=dict)
    """Why a precision can't be used with it, of those that can't."""
    snippet_refusal: str = ""
    """Why a training loop of your own can't use an uneven split with it; empty where it can."""
    in_jobs: bool = True
    """Whether a job file can name it."""

    @property
    def has_backend(self) -> bool:
        """Whether its processes communicate through a process group that gpurun makes."""
        return bool(self.collectives)

    def num_devices(self, wanted: int | None, num_devices: int, num_local: int) -> int:
        """How many devices a variant has: `wanted` by the job, by default all that it can use."""
        most = self.most_devices(num_devices, num_local)
        return most if self.reach is Reach.DEVICE else wanted or most

    def most_devices(self, num_devices: int, num_local: int) -> int:
        """How many devices it can use, of `num_devices` of which the first node has `num_local`."""
        return {Reach.DEVICE: 1, Reach.NODE: num_local, Reach.JOB: num_devices}[self.reach]

    def num_processes(self, num_devices: int) -> int:
        """Processes that train together on so many devices."""
        return num_devices if self.process_per_device else 1

    def devices_by_process(self, devices: Sequence[str]) -> list[tuple[str, ...]]:
        """Which of the devices each process has, by rank."""
        return [(device,) for device in devices] if self.process_per_device else [tuple(devices)]

    def positions_of(self, rank: int, num_devices: int) -> tuple[int, ...]:
        """Which parts of the split, and which of the launch's devices, are the rank's."""
        return tuple(range(num_devices)) if self.has_replicas else (rank,)


PROGRAM = "script"
"""The strategy of variants that are programs."""

_AVERAGES = ("allreduce",)
_GATHERS = ("allgather", "reducescatter")
NCCL_ALGORITHMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ring": (*_GATHERS, *_AVERAGES, "broadcast", "reduce"),
        "tree": _AVERAGES,
        "collnetdirect": (*_GATHERS, *_AVERAGES),
        "collnetchain": _AVERAGES,
        "nvls": (*_GATHERS, *_AVERAGES),
        "nvlstree": _AVERAGES,
        "pat": _GATHERS,
    }
)
"""The collectives that each of NCCL's algorithms can do.
Source: NVIDIA's nccl, src/graph/tuning.cc, `ncclTopoTuneModel`.
"""
NCCL_ANY_PROTOCOL = ("ring", "tree")
"""Algorithms of NCCL's that have all its protocols; the others have `simple` only. Source: as above."""

_FSDP = Strategy(
    "fsdp",
    "parameters, gradients and optimizer state are divided among processes, one per device (FSDP2)",
    Reach.JOB,
    "gpurun.launcher.worker.strategies.fsdp:Fsdp",
    process_per_device=True,
    collectives=_GATHERS,
    shards_optimizer=True,
    shards_parameters=True,
    loop="FSDP2",
    transfer_advice="transfer-sharded",
    compile_refusal="gpurun compiles the whole model, but FSDP2 needs its blocks compiled one by one",
    precision_refusals={
        "fp16": "loss scaling communicates in every step, also in those measured without communication"
    },
)

_ALL = (
    Strategy(
        "single",
        "one device",
        Reach.DEVICE,
        "gpurun.launcher.worker.strategies.dp:Single",
        has_split=False,
    ),
    Strategy(
        "dp",
        "one process with a thread per device (DataParallel)",
        Reach.NODE,
        "gpurun.launcher.worker.strategies.dp:Dp",
        has_replicas=True,
        compile_refusal="dp replicates the model in every step, which torch.compile doesn't support",
        checkpointing_refusal="dp's threads share a generator of random numbers, so what a layer computes "
        "again might differ",
        snippet_refusal="torch's DataParallel splits evenly only",
    ),
    Strategy(
        "ddp",
        "a process per device (DistributedDataParallel)",
        Reach.JOB,
        "gpurun.launcher.worker.strategies.ddp:Ddp",
        process_per_device=True,
        has_buckets=True,
        collectives=_AVERAGES,
    ),
    Strategy(
        "zero1",
        "`ddp` whose optimizer state is divided among the processes (ZeroRedundancyOptimizer)",
        Reach.JOB,
        "gpurun.launcher.worker.strategies.zero1:Zero1",
        process_per_device=True,
        has_buckets=True,
        collectives=_AVERAGES,
        shards_optimizer=True,
        loop="DistributedDataParallel and ZeroRedundancyOptimizer",
        transfer_advice="transfer-zero",
    ),
    _FSDP,
    replace(
        _FSDP,
        name="hsdp",
        summary="`fsdp` within groups of devices, each of which has all parameters (HSDP)",
        worker="gpurun.launcher.worker.strategies.fsdp:Hsdp",
        collectives=(*_GATHERS, *_AVERAGES),
        has_shard_groups=True,
        loop="FSDP2 with a mesh of two dimensions",
        transfer_advice="transfer-shard-size",
    ),
    Strategy(
        PROGRAM,
        "a program that runs unchanged, one process per device",
        Reach.JOB,
        "",
        process_per_device=True,
        has_split=False,
        in_jobs=False,
    ),
)

STRATEGIES: Mapping[str, Strategy] = MappingProxyType({strategy.name: strategy for strategy in _ALL})

IN_JOBS = tuple(strategy.name for strategy in _ALL if strategy.in_jobs)
"""Names that a job file can give."""


def strategy_named(name: str) -> Strategy:
    """The strategy of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy `{name}`; the strategies are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
