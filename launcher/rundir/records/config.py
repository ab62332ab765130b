"""The configuration that the command gives to the workers of a launch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.strategies import STRATEGIES, strategy_named


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
class LaunchConfig:
    """Everything that the workers of one launch need; `launches/ID/launch.json`."""

    launch: str
    run_dir: str
    workload: str
    """`gpt`, `train.py:build` or `package.module:build`."""
    job_dir: str
    """Directory of the job file: relative file names of the job start here."""
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
    variants: tuple[VariantConfig, ...]
    baseline: str | None
    """The baseline's id if it is measured in this launch; it is then measured twice (A/A)."""
    warmup: int
    rounds: int
    gradient_check: bool = True
    profile: ProfileConfig | None = None
    memory: bool = False
    """Whether a step of each variant is run to see what its memory holds."""
    block_ms: float = 200.0
    """A round runs a block of steps of one variant that lasts at least this long."""
    compile: bool = False
    """Whether the model is compiled, separately for each shape of its inputs."""
    checkpointing: int | str = "none"
    """Which layers compute their activations again: `none`, `full`, or every n-th one."""
    optimizer: str = "default"
    """The implementation of the workload's optimizer: `default`, `foreach` or `fused`."""
    workers: int | None = None
    """Processes that read the dataset on each rank; `None`: as many as the workload says."""
    prefetch: int | None = None
    """Micro-batches that each of them reads ahead; `None`: as many as torch does by default."""
    channels_last: bool = False
    """Whether images have the channels-last memory format."""
    cudnn_benchmark: bool = False
    """Whether convolutions try their algorithms for each new shape."""
    ablation_rounds: int = 0
    """In how many of the first rounds every variant also runs a block without communication (`ddp`)."""
    draw: str = ""
    """The seed of the order of blocks: differs between runs, and is the same on all nodes."""
    collective_timeout_s: float = 900.0
    """After how long torch gives up a collective: later than the command ends the launch."""
    address: str = LOOPBACK
    """The address at which rank 0 listens: the loopback interface, unless other nodes have to reach it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the strategy's class takes as keyword arguments."""
    nccl: Mapping[str, Any] = field(default_factory=dict)
    """The job's choices for NCCL, by the names of the job file."""
    device_names: tuple[str, ...] = ()
    """The job's names for the devices; a process that sees one GPU only calls each `cuda:0`."""

    guests: tuple["LaunchConfig", ...] = ()
    """Other strategies in the same processes, each with a model of its own. One that has a single process is
    in the first rank alone."""
    takes_turns: bool = True
    """Whether they are measured in the same rounds; otherwise one follows the other, with the memory for
    itself."""

    def __post_init__(self) -> None:
        """Rejects an unknown strategy, also in a file that is read back."""
        strategy_named(self.strategy)

    @property
    def parts(self) -> tuple["LaunchConfig", ...]:
        """The configuration of each strategy."""
        return (self, *self.guests)

    @property
    def world_size(self) -> int:
        return STRATEGIES[self.strategy].num_processes(len(self.devices))


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

    @property
    def variant(self) -> str:
        return self.variants[0].id


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
    params: Mapping[str, Any]
    devices: tuple[str, ...]
    """The devices of this process, as it sees them: one, or all where one process has them."""
    index: int
    """Position of the first among the job's devices."""
    num_devices: int
    precision: str
    accumulate: int
    """Micro-batches of a batch."""
    keeps_gradients: bool
    """Whether as much memory as all gradients take is occupied all the time, as by DDP's buckets."""
    gradients_are_views: bool
    """Whether that is the gradients' only memory."""
    seed: int
    threads: int
    limit_bytes: int | None
    """Host memory that it may use in addition to its start; `None` on a GPU, which has its own limit."""
    attempts: str
    """Path of the file for its attempts, one line each."""
    fits: int
    """The largest batch that fit in earlier processes; 0 for none."""
    fails: int | None
    """The smallest batch that did not fit."""
    max_step_s: float = MAX_STEP_S
    """A batch whose step takes longer is large enough, whatever the memory."""


@dataclass(frozen=True)
class EstimateConfig:
    """Launches of whose variants a process estimates the memory."""

    launches: tuple[LaunchConfig, ...]


@dataclass(frozen=True)
class CaptureRequest:
    """A request of `gpurun capture` to the running ranks; `launches/ID/control/captureN.json`."""

    number: int
    steps: int
    ranks: tuple[int, ...] | None
    """Ranks to record; `None`: all."""
    first_step: int
    """The first step by the control block's counter: the trace begins there, unless ranks agree on one."""
