"""`JobSpec`: a checked job file. Its docstrings are the text of the schema and of the reference."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.kinds import EVERY_KIND, PROGRAM, TRAINING, JobKind, workload_kind
from gpurun.launcher.jobfile.section import (
    ListOf,
    Section,
    Setting,
    ValueKind,
    number_of,
    plain,
    setting,
    whole,
)
from gpurun.launcher.jobfile.settings import PRECISIONS, SETTINGS, Settings
from gpurun.launcher.masking import masked
from gpurun.launcher.units import GIB

Name = Annotated[str, ValueKind(values.parse_name, {"type": "string", "pattern": r"^\w[\w.+-]{0,99}$"})]
Devices = Annotated[
    values.Devices,
    ValueKind(
        values.parse_devices,
        {
            "anyOf": [
                {"enum": [values.AUTO, *values.GPU_KINDS]},
                {"type": "string", "pattern": "^cpu:[0-9]+$"},
                {"type": "string", "pattern": values.ONE_GPU_PATTERN},
                {
                    "type": "array",
                    "items": {"type": "string", "pattern": values.DEVICE_PATTERN},
                    "minItems": 1,
                },
            ]
        },
    ),
]
_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?(s|m|h)$"},
        {"type": "number", "exclusiveMinimum": 0},
    ]
}
Duration = Annotated[float, ValueKind(values.parse_duration, _DURATION_SCHEMA)]
Silence = Annotated[float, ValueKind(values.parse_silence, _DURATION_SCHEMA)]
Size = Annotated[
    int,
    ValueKind(
        values.parse_size,
        {
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?(MiB|GiB)$"},
                {"type": "integer", "minimum": 1 << 20},
            ]
        },
    ),
]

Memory = Annotated[
    int,
    ValueKind(values.parse_memory, {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1 << 20}]}),
]
Peaks = Annotated[
    Mapping[str, float],
    ValueKind(
        partial(values.parse_peaks, precisions=PRECISIONS),
        {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"enum": [*PRECISIONS]},
            "additionalProperties": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": values.MAX_TFLOPS,
            },
        },
    ),
]


def _compared() -> dict[str, tuple[Any, Any]]:
    """A list under `compare` for every setting that may vary."""
    return {
        name: (Annotated[Any, ListOf(row.compared or row.rule, row.check_list)], ())
        for name, row in SETTINGS.items()
        if row.compare
    }


def _named() -> dict[str, tuple[Any, Any]]:
    """A value under `baseline` for every setting by which one can be named."""
    return {
        name: (Annotated[Any, row.named or row.rule] | None, None)
        for name, row in SETTINGS.items()
        if row.baseline
    }


@dataclass(frozen=True, kw_only=True)
class Compare(Section, derived=_compared()):
    """The values to compare: every combination of the listed values is one variant."""

    shorthand = ("strategy", "split", "precision")
    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, key: str) -> tuple[Any, ...]: ...

    def lists(self) -> dict[str, tuple[Any, ...]]:
        """The listed values, by key."""
        return {key: values for key in self.keys if (values := getattr(self, key))}


@dataclass(frozen=True, kw_only=True)
class Baseline(Section, derived=_named()):
    """Which variant the others are compared with. Without it: the first one."""

    shorthand = Compare.shorthand
    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any: ...


SIZES = frozenset({"rounds", "launches"})
"""Keys of `steps` that fix the size of a run."""
_NO_MFU = "MFU is a figure of training steps whose operations gpurun counts"
_ALL_STEPS = "all its steps count; `steps.launches` says how often it is run"


@dataclass(frozen=True, kw_only=True)
class Steps(Section):
    """How much is measured."""

    shorthand = ("rounds",)
    warmup: Annotated[int, whole(0, 100_000)] = 0
    """Minimum number of steps before timing begins. Every variant also warms up until its step time is
    steady: 10 steps or more, and after the first variant of a launch, which has warmed up the model, 6 or
    more."""
    rounds: Annotated[int, whole(1, 100_000)] = setting(28, instead=_ALL_STEPS)
    """Rounds of a run of fixed size, over all launches of a group of processes. In a round every variant runs
    once, the baseline twice, for at least 200 ms (1 s on GPUs) each, in a random order."""
    launches: Annotated[int, whole(1, 100)] | None = None
    """How often a run of fixed size launches each group of processes. By default 1 where only splits are
    compared, which says nothing of other launches, and 6 where several strategies, precisions or device
    counts are: their times come from different processes, and those scatter. Where strategies share their
    processes later (`together`), the first launches, which each has of its own, come in addition."""
    limit: Annotated[int, whole(1, 10**9)] | None = setting(
        None, kinds=frozenset({PROGRAM}), instead="`rounds`"
    )
    """Steps after which a program is ended on all ranks at once, without its own clean-up. By default it runs
    to its end."""
    together: Literal["auto", "always", "never"] = setting("auto", instead="")
    """Whether variants share their processes from the second launch on, where they scatter less against each
    other: those that differ in their strategy, its options, or another setting of the model, such as `seed`.
    They take turns in every round if the memory holds all their models at once, else one follows the other.
    The first launches, which measure memory and take traces, are each variant's own, and don't count. `auto`:
    on CPU devices."""


@dataclass(frozen=True, kw_only=True)
class Profile(Section):
    """The trace of each variant and rank, taken after the timed steps so that it costs them nothing."""

    shorthand = ("steps",)
    steps: Annotated[int, whole(0, 1000)] = 3
    """Steps in a trace; 0 takes none, and doesn't time steps without communication either, which measure
    what communication costs."""
    shapes: bool = False
    """Whether a trace holds the shapes of the operators' inputs."""
    memory: bool = False
    """Whether a trace holds allocations. On CUDA a snapshot for https://pytorch.org/memory_viz is kept
    next to it, where torch uses its own allocator."""
    stacks: bool = False
    """Whether a trace holds Python stacks; the traces grow and the traced steps become slower."""
    modules: bool = False
    """Whether a trace names the `nn.Module` of each operator; costs as much as `stacks`, which include it."""
    ranks: Annotated[tuple[int, ...], ListOf(whole(0, below=values.MAX_DEVICES), most=None)] | None = None
    """Ranks to record; by default all. Without the others, waiting can't be distinguished from transfer."""


@dataclass(frozen=True, kw_only=True)
class Logs(Section):
    """How much of the ranks' output is kept."""

    shorthand = ("keep",)
    keep_bytes: Size = GIB
    """How much the logs of one launch may take on each node: `500 MiB`, `1 GiB` or a number of bytes. Each
    rank has an equal share. When its log is larger, the newest half is moved to `rankN.log.1`, and what came
    before is removed. What a rank writes at that very moment may be lost."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(Settings, Section):
    """A job for gpurun: a workload and the ways of splitting its batch to compare, or a program as it is."""

    name: Name = "job"
    """Name of the directory under `runs/`. By default the job file's own name."""
    devices: Devices = "auto"
    """Devices to use. `auto`: all GPUs that no other process uses, or all if none is free; on a machine
    without GPUs two CPU devices. `cpu:4`: four devices that share this machine's cores. `cuda`: all GPUs.
    `cuda:0`: that one. A list names several, GPUs also by the UUID of a GPU or of a MIG instance; a GPU that
    is listed twice is shared by two ranks. Numbers count what CUDA_VISIBLE_DEVICES leaves. Where nodes
    differ, `cuda:1@0` is the second GPU of node 0."""
    nodes: Annotated[values.Nodes, values.NODES] = 1
    """Machines that train together. Each runs `gpurun` with this job file. `devices` are those of each node,
    unless a list names nodes; those of the first node come first. `2..4`: as many as are there at the start.
    How they find each other: see `docs/clusters.md`."""
    min_local_batch: Annotated[int, number_of(0, 1)] = setting(1)
    """Whether `balanced` must use every device: `1` gives each at least one sample, `0` may leave out devices
    that would not help."""
    compare: Compare = Compare()
    """The values to compare: every combination of the listed values is one variant."""
    baseline: Baseline | None = None
    """Which variant the others are compared with: values of the keys that vary. By default the first one."""
    steps: Steps = Steps()
    """How much is measured."""
    until: Literal["decided", "fixed"] = "decided"
    """When to stop. `decided`: short launches are repeated until the fastest variant is known and how the
    others compare with it, or until `budget` is spent or 64 launches are made; variants that are clearly
    slower get fewer rounds.
    `fixed`: after `steps.rounds` in `steps.launches`. A job that states one of the two has a fixed size, and
    so has one with a single variant."""
    budget_s: Duration = 180.0
    """The most time to decide in, from when the run begins: imports before the first launch count. Every
    variant is launched once, however long that takes; a launch begins only if it is likely to end in time."""
    wait_for_quiet_s: Duration | None = None
    """The most time that each launch waits, before it begins, for other programs to use no core of this
    machine: at most a tenth of one. It is part of `budget`. By default none waits."""
    memory_bytes: Memory | None = setting(None, kinds=frozenset({TRAINING, PROGRAM}), instead="")
    """Memory of a device for a variant: `20 GiB`, a number of bytes, or the name of a GPU, `H100 80GB` or
    `RTX 4090` (its memory as it is sold, in 10⁹ bytes). The report then also names the fastest variant whose
    peak memory is not above that. What a GPU needs besides tensors, such as CUDA's context and what torch
    keeps free, is not in that peak: leave a margin."""
    peak_tflops: Peaks | None = setting(None, kinds=frozenset({TRAINING}), instead=_NO_MFU)
    """The peak of one device by precision, dense, in TFLOP/s: `{bf16: 989}`. MFU is a share of it. By default
    it is the data sheet's, of GPUs that gpurun knows; of CPUs, none."""
    profile: Profile = Profile()
    """The trace of each variant and rank, taken after the timed steps so that it costs them nothing."""
    logs: Logs = Logs()
    """How much of the ranks' output is kept."""
    timeout_s: Duration = setting(600.0, kinds=EVERY_KIND, optional_for=frozenset({PROGRAM}))
    """The most that a variant may take: `90s`, `10m`, `1h`, or a number of seconds. Starting processes and
    building the model, which comes before any variant, may take as long, and at least a minute. A program has
    no limit unless the job sets one."""
    hang_timeout_s: Duration | None = None
    """The time without a completed step after which a launch has hung. In any case a message says which ranks
    wait where after 60 s, or ten times the longest step so far, if that is more. By default a launch of a
    workload has hung once every rank has waited in a collective, or used neither CPU nor GPU, for ten minutes
    after that message; a program has no limit."""
    on_hang: Literal["stop", "continue"] = "stop"
    """The reaction to a hang: `stop` ends the variant, with the status `hung`; `continue` only reports it,
    after `hang_timeout` if that is stated."""
    silence_s: Silence | None = None
    """The time without a heartbeat after which a node counts as lost, and the run ends; a network that comes
    back before costs nothing. At least `3s`; by default `30s` for programs, and `10s` for workloads."""
    grace_s: Duration | None = None
    """The time that ranks have to end, in which a program can save its state; then they get SIGKILL. By
    default `30s` for programs, and `5s` for workloads. Ranks get SIGTERM; after Ctrl-C, those of programs get
    SIGINT, and SIGTERM in the middle of that time. A second Ctrl-C doesn't wait."""
    master_port: Annotated[int, whole(1, 65_535)] | None = setting(
        None, kinds=frozenset({PROGRAM}), instead=""
    )
    """The port of the store through which a program's ranks find each other, on node 0, for a program that is
    given it otherwise than by MASTER_PORT. By default a free one, another for each launch."""
    leftover: Literal["wait", "stop"] = setting("wait", kinds=frozenset({PROGRAM}), instead="")
    """What becomes of processes that a program has started, and that still run when all its ranks have ended
    well, such as an upload. `wait` lets those go on that have a session of their own (`setsid`) or ignore
    SIGHUP (`nohup`), and waits for the others; `stop` ends them all."""
    restarts: Annotated[int, whole(0, 1000)] = 0
    """How often each launch may start again after a transient failure: a signal, the kernel's OOM
    killer, a lost connection, a hang, most exceptions and exit codes; not after an error of
    the program or its installation, such as `SyntaxError`, `ImportError`, `NameError`, `TypeError`,
    `AttributeError`, `FileNotFoundError` or the exit codes 2, 126 and 127. The pause before is 1 s, and
    doubles each time, up to 30 s. A program on several nodes also goes on after a lost node has come back."""
    bind: Literal["none", "numa", "cores"] = "none"
    """The cores that each rank runs on. `numa`: those of its GPU's NUMA node; without GPUs, ranks are spread
    over the NUMA nodes. `cores`: its own share of those, in whole cores."""
    gradient_check: bool = setting(True, instead="")
    """Whether to compare, before the timing, each variant's gradient with that of the whole batch on one
    device."""

    @property
    def is_on_nodes(self) -> bool:
        """Whether several machines train together."""
        return self.nodes != 1

    @property
    def ends_on_sigusr1(self) -> bool:
        """Whether SIGUSR1 ends the command, as a line of torchrun says with `--signals-to-handle`."""
        return "SIGUSR1" in self.env.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")

    @property
    def program(self) -> str | None:
        """The program that a job runs, in words: `train.py`, `-m package.train`; `None` for a workload's."""
        if self.module == values.BECOMES_COMMAND:
            return self.args[0] if self.args else ""
        return f"-m {self.module}" if self.module else self.script

    @property
    def command_line(self) -> tuple[str, ...]:
        """The words of the program and its arguments: `-m`, `package.train`, `--epochs`, `1`."""
        if self.module == values.BECOMES_COMMAND:
            return self.args
        return (*(("-m", self.module) if self.module else (str(self.script),)), *self.args)

    @cached_property
    def kind(self) -> JobKind:
        """The kind of the job; of several workloads, the first one's."""
        if self.program is not None:
            return PROGRAM
        return workload_kind((self.compare.workload or (self.workload,))[0])

    @property
    def limit_s(self) -> float:
        """The most that a variant may take; a program, which may train for days, has no default."""
        return self.timeout_s if "timeout" in self.stated or not self.kind.runs_program else float("inf")

    @property
    def has_fixed_size(self) -> bool:
        """Whether the job says how much is measured, not only when all is decided."""
        is_stated = not SIZES.isdisjoint(self.steps.stated)
        return self.until == "fixed" or is_stated or not self.kind.is_ranked

    @property
    def silence_limit_s(self) -> float:
        """How long a node may be silent: a program may have trained for days."""
        return self.silence_s or (30.0 if self.kind.runs_program else 10.0)

    @property
    def grace_limit_s(self) -> float:
        """How long ranks may take to end: only a program has something to save."""
        return self.grace_s or (30.0 if self.kind.runs_program else 5.0)

    def place_of(self, key: str) -> tuple[str, ...]:
        """The place at which the job states a key."""
        return ("compare", key) if getattr(self.compare, key, None) else (key,)

    @property
    def secrets(self) -> dict[str, str]:
        """The values of the secrets that the job's file states, by their masks; they are nowhere else."""
        return {masked(name, value): value for name, value in self.stated_secrets}

    @property
    def stated_secrets(self) -> tuple[tuple[str, str], ...]:
        """Names and values of the secrets, as the job's file states them."""
        return secrets_in(self.source.root.plain()) if self.source is not None else ()

    def resolved(self) -> dict[str, Any]:
        """The whole job with its defaults, as plain data for JSON and YAML; loads again as the same job."""
        is_fixed = self.has_fixed_size
        without = {"budget"} if is_fixed else set()
        job = plain(self, without=keys_without_effect(self, self.kind) | without)
        job["until"] = "fixed" if is_fixed else "decided"
        sizes = frozenset() if is_fixed else SIZES
        job["steps"] = plain(self.steps, without=keys_without_effect(self.steps, self.kind) | sizes)
        job["compare"] = {key: value for key, value in job["compare"].items() if value}
        return job


def keys_without_effect(section: Section, kind: JobKind) -> frozenset[str]:
    """Keys that mean nothing for this kind of job, or only where the job states them, which it doesn't."""
    meanings = key_settings(type(section)).items()
    return frozenset(
        key
        for key, meaning in meanings
        if kind not in meaning.kinds or (kind in meaning.optional_for and key not in section.stated)
    )


def key_settings(section: type[Section]) -> dict[str, Setting]:
    """The `Setting` of each key that has one; the others are for every kind of job."""
    by_field = {
        field.name: field.metadata["setting"] for field in fields(section) if "setting" in field.metadata
    }
    return {name: by_field[key.field] for name, key in section.keys.items() if key.field in by_field}


SECTIONS: dict[str, type[Section]] = {
    "compare": Compare,
    "baseline": Baseline,
    "steps": Steps,
    "profile": Profile,
    "logs": Logs,
}
"""Keys of a job that hold keys of their own."""


def secrets_in(job: Any) -> tuple[tuple[str, str], ...]:
    """Names and values of the secrets that a job states, given as plain data: in `env`, wherever it is."""
    pairs = ((name, str(value)) for name, value in _variables(job, is_env=False))
    return tuple((name, value) for name, value in pairs if masked(name, value) != value)


def _variables(part: Any, is_env: bool) -> Iterator[tuple[str, Any]]:
    items = part.items() if isinstance(part, dict) else enumerate(part)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from _variables(value, is_env or key == "env")
        elif is_env and isinstance(key, str):
            yield key, value
