"""What the ranks of a launch read: the settings of its variants, and all that follows from them.

A module of its own: `gpurun check` starts without msgspec, and a rank without what makes plans.
"""

from dataclasses import dataclass
from typing import Any

from gpurun.launcher.jobfile.settings import SETTINGS, Settings
from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.rundir.records import ProfileConfig, VariantConfig
from gpurun.launcher.strategies import STRATEGIES, strategy_named


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Settings):
    """Everything that the workers of one launch need; `launches/ID/launch.json`.

    Settings in which variants of the same processes may differ stand in `variants`.
    """

    launch: str
    run_dir: str
    job_dir: str
    """Directory of the job file: relative file names of the job start here."""
    devices: tuple[str, ...]
    """torch device of each rank (`ddp`) or replica (`dp`), as the worker sees them: `cpu`, `cuda:0`."""
    workload: str
    split: tuple[int, ...] = ()
    backend: str | None
    """`gloo` or `nccl` for `ddp`; `None` for one process."""
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
    ablation_rounds: int = 0
    """In how many of the first rounds every variant also runs a block without communication (`ddp`)."""
    draw: str = ""
    """The seed of the order of blocks: differs between runs, and is the same on all nodes."""
    collective_timeout_s: float = 900.0
    """After how long torch gives up a collective: later than the command ends the launch."""
    observe: bool = False
    """Whether the first losses of each variant are recorded, and which keys have an effect."""
    seeds_steps: bool = False
    """Whether random numbers are seeded anew in every step and for every sample."""
    address: str = LOOPBACK
    """The address at which rank 0 listens: the loopback interface, unless other nodes have to reach it."""
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
    def strategy_options(self) -> dict[str, Any]:
        """Settings that the strategy's class takes as keyword arguments."""
        options = (name for name, setting in SETTINGS.items() if setting.option)
        return {name: getattr(self, name) for name in options if self.has(name)}

    @property
    def world_size(self) -> int:
        return STRATEGIES[self.strategy].num_processes(len(self.devices))


@dataclass(frozen=True)
class TrialConfig:
    """The next trial of live ranks; `launches/ID/trials/N.json`."""

    launch: LaunchConfig
    """The configuration with the one variant that is tried."""
    steps: int
    """Timed steps, at least."""
    least_ms: float
    """How long they last together, at least."""
