"""The plan of a run, as data: nodes, variants, launches and the processes of each launch.

It is read back from the files of a run: names that no table has, and numbers without end, are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.kinds import JobKind, is_workload, no_such_builtin, variant_kind
from gpurun.launcher.jobfile.settings import SETTINGS, TASK_SETTINGS, Settings, settings_of
from gpurun.launcher.jobfile.values import with_options
from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.machine.accelerators import CUDA, accelerator_of
from gpurun.launcher.machine.gpus.gpu import GpuProperties
from gpurun.launcher.machine.host import Topology
from gpurun.launcher.strategies import STRATEGIES, strategy_named
from gpurun.launcher.units import format_count, refuse_no_time

Cpus = tuple[int, ...]
"""Hardware threads."""
_ELASTIC = ("TORCHELASTIC_", "ROLE_NAME")
"""How the names of variables begin that no import reads."""


@dataclass(frozen=True)
class NodeGpu(GpuProperties):
    """A GPU of a node."""

    kind: str = CUDA.name
    """Absent in plans of older runs."""
    busy_with: str | None = None


@dataclass(frozen=True)
class Node:
    """The properties of one node that planning needs; its position in the plan is its node rank."""

    host: str
    address: str
    """IP address at which the other nodes reach it."""
    interface: str
    """Network interface that has this address, or the one that the person chose: gloo's and NCCL's."""
    cpu_cores: int
    gpus: tuple[NodeGpu, ...]
    topology: Topology = field(default_factory=lambda: Topology({}, ()))
    notes: tuple[str, ...] = ()
    network_gb_per_s: float | None = None
    """The rate of the interface in one direction; `None` where it doesn't say."""
    free_cores: ClassVar[int | None] = None
    """Not measured on several nodes: their plan has to be the same if a lost one is replaced."""
    has_mps: ClassVar[bool] = False
    """Not looked at on several nodes."""


def node_of_device(name: str) -> int:
    """The node rank in a device's name; 0 where there is one node only."""
    return int(name.partition("@")[2] or 0)


def device_of_node(name: str) -> str:
    """The device as its own node calls it."""
    return name.partition("@")[0]


def devices_of_node(node: int, devices: Iterable[str]) -> tuple[str, ...]:
    """The devices of a node, as it calls them."""
    return tuple(device_of_node(name) for name in devices if node_of_device(name) == node)


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank among all ranks, and among those of its node."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables that `torch.distributed` reads."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
        }


def rank_places(nodes: Sequence[int]) -> list[RankPlace]:
    """The places of the ranks whose nodes are given, in their order."""
    return [
        RankPlace(rank, len(nodes), node, nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
    ]


def bind_ranks(bind: str, gpu_nodes: Sequence[int | None], topology: Topology) -> tuple[Cpus, ...]:
    """The hardware threads of each rank; empty: all that there are.

    Args:
        bind: `none`, `numa` or `cores`.
        gpu_nodes: each rank's NUMA node by its GPU; `None` where it has none, or its node isn't known.
    """
    if bind == "none" or not topology.cpus:
        return ((),) * len(gpu_nodes)
    nodes = _nodes(gpu_nodes, topology)
    if bind == "numa":
        return tuple(topology.nodes[node] for node in nodes)
    return _share_cores(nodes, topology)


def _nodes(gpu_nodes: Sequence[int | None], topology: Topology) -> list[int]:
    """A node for every rank: its GPU's, else the nodes in turn by blocks, neighbours together."""
    numbers = list(topology.nodes)
    spread = [numbers[rank * len(numbers) // len(gpu_nodes)] for rank in range(len(gpu_nodes))]
    return [
        wanted if wanted is not None and wanted in topology.nodes else given
        for wanted, given in zip(gpu_nodes, spread, strict=True)
    ]


def _share_cores(nodes: Sequence[int], topology: Topology) -> tuple[Cpus, ...]:
    """Whole cores of its node for every rank, equally many or one more; with too few, ranks share a core."""
    given: list[Cpus] = []
    for rank, node in enumerate(nodes):
        cores = [core for core in topology.cores if core[0] in topology.nodes[node]]
        neighbours = [other for other, its in enumerate(nodes) if its == node]
        position, count = neighbours.index(rank), len(neighbours)
        first, last = position * len(cores) // count, (position + 1) * len(cores) // count
        mine = cores[first:last] or [cores[position % len(cores)]]
        given.append(tuple(cpu for core in mine for cpu in core))
    return tuple(given)


def ranks_there(num_ranks: int) -> str:
    """Which ranks a user may name."""
    return f"the ranks are 0 to {num_ranks - 1}" if num_ranks > 1 else "there is only rank 0"


SideName = Literal["a", "b", ""]
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(setting.rule.schema["enum"])
        for name, setting in SETTINGS.items()
        if "enum" in setting.rule.schema
    }
)
"""The possible values of settings whose value is a name."""
NAMES = (*_CHOICES, "workload", "devices")
"""The keys whose values `refuse_unknown_names` checks."""
MOST = 1 << 48
"""Larger counts and seconds are damage: figures that are made of them would have no end."""
MAX_PROCESSES = 20_000
"""A run that starts more would take days; keeps a slip in the job file from filling the memory."""
MAX_DEVICES_OF_ALL = 300_000
"""The most devices of all variants, which may share processes: 1,000 combinations on 256 devices."""


def refuse_unknown_names(given: Mapping[str, Any]) -> None:
    """Checks the names among these values of settings, and the devices: what a file of a run has.

    Raises:
        ValueError: no table has a strategy, a built-in workload, a precision or another choice of that
            name, or a device of that kind.
    """
    for key, choices in _CHOICES.items():
        value = given.get(key)
        if key == "strategy" and value is not None:
            strategy_named(str(value))
        elif value is not None and value != SETTINGS[key].absent and value not in choices:
            raise ValueError(f"there is no {key} `{value}`; known ones: {', '.join(choices)}")
    if (workload := given.get("workload")) and not is_workload(str(workload)):
        raise ValueError(f"there is no workload `{workload}` ({no_such_builtin(str(workload))[1]})")
    named = given.get("devices") or ()
    for device in named if isinstance(named, list | tuple) else (named,):
        if device != values.AUTO:
            _refuse_unknown_kind(str(device))


@cache
def _refuse_unknown_kind(device: str) -> None:
    try:
        accelerator_of(device)
    except SpecError as error:
        raise ValueError(str(error)) from error


def refuse_unknown_names_in_job(job: Mapping[str, Any]) -> None:
    """Checks a recorded job, what it compares and its baseline; as `refuse_unknown_names`."""
    compare, baseline = (_mapping_in(job, key) for key in ("compare", "baseline"))
    lists = {key: items for key, items in compare.items() if isinstance(items, list | tuple)}
    for given in (job, baseline, *({key: item} for key in lists for item in lists[key])):
        refuse_unknown_names(given)


def _mapping_in(job: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = job.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"`{key}` is no mapping")
    return value


def resolved_setting(name: str, job: Mapping[str, Any], varied: Mapping[str, Any]) -> Any:
    """A variant's value of a setting: what varied, merged into the job's own value or the default.

    Args:
        name: of the setting.
        job: the run's job as plain data.
        varied: the variant's values of what varied.
    """
    own = job.get(name, getattr(Settings(), name))
    value = SETTINGS[name].shape.merge(own, varied[name]) if name in varied else own
    return tuple(value) if isinstance(value, list) else value


def allowed(most: int) -> str:
    """The end of a message about too many of something."""
    return f"at most {format_count(most)} are allowed"


def refuse_endless(*numbers: float | None) -> None:
    """Raises `ValueError` for a count or a time that can't be, in a plan that is read back."""
    for number in numbers:
        if number is not None and not 0 <= number <= MOST:
            raise ValueError("a count or a time is negative, or too large to be one")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The settings that tell a variant from others, in plans and in comparisons.

    What its kind of job or its strategy doesn't have is absent: `None`, 0 or empty.
    """

    id: str
    """`strategy-count-split[-key-value…]`, unique in a plan and safe as a file name."""
    strategy: str = Settings.strategy
    devices: tuple[str, ...]
    """Global device names, one per chunk of the batch: `cpu:0`, `cuda:1`; of several nodes `cuda:1@0`."""
    split: tuple[int, ...]
    """Samples per device and optimizer step; adds up to `global_batch`. Empty for a program, and for
    `balanced` in a plan: its first launch finds them."""
    split_name: str
    """The job's own word: `even`, `48/16`, `3:1`, `balanced`; `-` where there is no split."""
    varied: Mapping[str, Any]
    """The keys under `compare` besides strategy, device_count and split, with this variant's values; for a
    program all keys."""
    workload: str = ""
    """The workload's name in the job; empty for programs, and in plans of runs older than this field."""
    global_batch: int | None = None
    """`None` for a program whose job doesn't state it; it decides all this itself."""
    precision: str | None = None
    accumulate: int | None = None
    threads: int = 0
    """Intra-op threads of one device; 0 for programs, and in plans of runs that are older than this field."""

    @cached_property
    def kind(self) -> JobKind:
        """The kind of job that it belongs to."""
        return variant_kind(self.strategy, self.workload)


@dataclass(frozen=True, kw_only=True)
class Variant(Identity, Settings):
    """One way of running the workload, measured on its own: a value for every setting, and its devices."""

    seed: int | None = None  # type: ignore[assignment]
    side: SideName = ""
    """Which version of the code it runs, where a gate compares two."""

    def __post_init__(self) -> None:
        """Refuses names that no table has and parts without a device, in a plan that is read back too."""
        refuse_unknown_names(settings_of(self) | {"devices": self.devices})
        if self.split and len(self.split) != len(self.devices):
            raise ValueError(f"{len(self.split)} parts of the batch for {len(self.devices)} devices")
        refuse_endless(*self.split, self.global_batch, self.accumulate, self.threads)

    @property
    def line(self) -> tuple[str, ...]:
        """A program's arguments, with its options in them."""
        return with_options(self.args, self.options)

    def same_task(self, other: "Variant") -> bool:
        """Whether both do the same task, so that one can be faster than the other."""
        return all(getattr(self, name) == getattr(other, name) for name in TASK_SETTINGS)

    def same_but_devices(self, other: "Variant") -> bool:
        """Whether both do the same, of all that both have, on other devices."""
        return self.side == other.side and all(
            getattr(self, name) == getattr(other, name)
            for name, setting in SETTINGS.items()
            if not setting.names_variant and self.has(name) and other.has(name)
        )

    @cached_property
    def world_size(self) -> int:
        """Processes that train together."""
        return STRATEGIES[self.strategy].num_processes(len(self.devices))


def num_devices(variants: Iterable[Variant]) -> int:
    """The devices of all variants, each counted as often as it is used."""
    return sum(len(variant.devices) for variant in variants)


@dataclass(frozen=True)
class SkippedCombination:
    """A combination of `compare` that cannot be, with the reason."""

    combination: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Process:
    """One process of a launch."""

    rank: int
    env: Mapping[str, str]
    """The variables that are added to the command's own environment."""
    devices: tuple[str, ...]
    """Global names of the devices that it owns: one for `single` and `ddp`, all for `dp`."""
    cpus: tuple[int, ...] = ()
    """Hardware threads that it may run on; empty: all that the command may."""
    node: int = 0
    """Rank of the node that it runs on."""


@dataclass(frozen=True)
class Launch:
    """Variants that share processes, so that their steps are interleaved and drift cancels."""

    id: str
    """`01-ddp-2`: position in the order of the run, group."""
    group: str
    """Launches of one group repeat the same processes."""
    repetition: int
    """0-based; the launches of all groups with the same repetition are neighbours, and form pairs."""
    variants: tuple[str, ...]
    rounds: int
    """Rounds that this launch runs at the most."""
    processes: tuple[Process, ...]

    def __post_init__(self) -> None:
        refuse_endless(self.repetition, self.rounds)


@dataclass(frozen=True)
class Side:
    """One of the two versions of the code that a gate compares."""

    name: str
    """`main`, `../before`, `working copy`."""
    root: str
    """Top directory of its code."""
    job_dir: str
    """The directory in its code from which relative file names of the job start."""
    python: str = ""
    """The interpreter that its ranks run in; empty: this command's."""
    commit: str = ""
    """The commit, with a note if files differ from it; empty outside of git."""


Metric = Literal["wall", "cpu"]
"""The quantity that a gate compares: the time of a step, or the CPU time of ranks and their children."""


@dataclass(frozen=True)
class GatePlan:
    """Which two versions are compared, and how much slower the second may be."""

    threshold_percent: float
    a: Side
    """Before."""
    b: Side
    """After."""
    shared: tuple[str, ...] = ()
    """Paths below the root of b that both have."""
    notes: tuple[str, ...] = ()
    """Notes on the versions."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Ids of each variant in a and in b."""
    metric: Metric = "wall"

    def side(self, name: SideName) -> Side:
        return self.a if name == "a" else self.b


@dataclass(frozen=True)
class Plan:
    """All that a run will do. `launches` are in the order in which they run."""

    name: str
    workload: str
    """The workload, or the program: `train.py`, `-m package.train`."""
    baseline: str
    variants: tuple[Variant, ...]
    left_out: tuple[SkippedCombination, ...]
    launches: tuple[Launch, ...]
    notes: tuple[str, ...]
    """Notes before the run: shared GPUs, fewer chunks than devices, merged splits."""
    unused_budget: str | None = None
    """A note, if the job states a budget that the plan has no use for."""
    nodes: tuple[Node, ...] = ()
    """The nodes by node rank, where the job has several."""
    budget_s: float | None = None
    """Launches are repeated until all is decided, or for so long; `launches` are those that there can be.
    `None`: all are run."""

    step_s: float = 0.0
    """The time of a step, where the search for the largest batch has shown it; 0: not known."""
    crowding: float = 1.0
    """CPU devices per core where there are more of them than cores: so much longer everything takes."""
    observe: bool = False
    """Whether the ranks write what they do: losses, and of programs calls and files."""
    seeds_steps: bool = False
    """Whether random numbers are seeded anew in every step and for every sample."""
    gate: GatePlan | None = None
    """Set where two versions of the code are compared; then every launch belongs to one of them."""

    def __post_init__(self) -> None:
        """Refuses ids of variants that there are not, in a plan that is read back too."""
        refuse_endless(self.budget_s, self.step_s)
        refuse_no_time(self.budget_s)
        self._refuse_too_many()
        pairs = self.gate.pairs if self.gate else ()
        used = {self.baseline, *chain(*(launch.variants for launch in self.launches), *pairs)}
        if unknown := used - {variant.id for variant in self.variants}:
            raise ValueError(f"the plan has no variant {', '.join(map(repr, sorted(unknown)))}")

    def _refuse_too_many(self) -> None:
        counts = {
            "devices": (num_devices(self.variants), MAX_DEVICES_OF_ALL),
            "processes": (sum(len(launch.processes) for launch in self.launches), MAX_PROCESSES),
        }
        for what, (count, most) in counts.items():
            if count > most:
                raise ValueError(f"{format_count(count)} {what} in one plan; {allowed(most)}")

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, with that on its budget."""
        return (*self.notes, *([self.unused_budget] if self.unused_budget else ()))

    def side_of(self, variant_id: str) -> Side | None:
        """The version of the code that a variant runs; `None`: there is only one."""
        return self.gate.side(self.variant(variant_id).side) if self.gate else None

    def environment(self, variant_id: str) -> tuple[Mapping[str, str], str]:
        """Variables and the interpreter of its ranks' server; those for elastic aren't read at an import."""
        side, env = self.side_of(variant_id), self.variant(variant_id).env
        read = {name: value for name, value in env.items() if not name.startswith(_ELASTIC)}
        return read, side.python if side else ""

    @property
    def address(self) -> str:
        """The address at which the first node's ranks listen for the others."""
        return self.nodes[0].address if self.nodes else LOOPBACK

    def variant(self, variant_id: str) -> Variant:
        return next(variant for variant in self.variants if variant.id == variant_id)
