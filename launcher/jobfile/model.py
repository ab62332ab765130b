"""`JobSpec`: a checked job file. Its docstrings are the text of the schema and of the reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from gpurun.launcher.jobfile import program_values as program
from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.field_types import MAPPING, Kind, Several, whole
from gpurun.launcher.jobfile.section import Section, plain

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
Strategy = Literal["single", "dp", "ddp"]

Name = Annotated[str, Kind(values.parse_name, {"type": "string", "pattern": r"^\w[\w.+-]{0,99}$"})]
Workload = Annotated[str, Kind(values.parse_workload, {"type": "string"})]
Script = Annotated[str, Kind(program.parse_script, {"type": "string"})]
Module = Annotated[str, Kind(program.parse_module, {"type": "string"})]
ARGS = Kind(program.parse_args, {"type": "array", "items": {"type": ["string", "number"]}})
Args = Annotated[tuple[str, ...], ARGS]
Env = Annotated[
    Mapping[str, str],
    Kind(program.parse_env, {"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
Devices = Annotated[
    values.Devices,
    Kind(
        values.parse_devices,
        {
            "anyOf": [
                {"enum": [values.AUTO, *values.GPU_KINDS]},
                {"type": "string", "pattern": "^cpu:[0-9]+$"},
                {
                    "type": "array",
                    "items": {"type": "string", "pattern": values.DEVICE_PATTERN},
                    "minItems": 1,
                },
            ]
        },
    ),
]
SPLIT = Kind(
    values.parse_split,
    {
        "anyOf": [
            {"enum": ["even", "balanced"]},
            {"type": "string", "pattern": values.RATIO_PATTERN},
            {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
        ]
    },
)
Split = Annotated[values.Split, SPLIT]
Duration = Annotated[
    float,
    Kind(
        values.parse_duration,
        {
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?(s|m|h)$"},
                {"type": "number", "exclusiveMinimum": 0},
            ]
        },
    ),
]
GlobalBatch = Annotated[int, values.COUNT]
OneGlobalBatch = Annotated[int, Kind(values.parse_one_global_batch, values.COUNT.schema)]
GlobalBatchOrMax = Annotated[
    int | Literal["max"],
    Kind(values.parse_global_batch, {"anyOf": [{"const": "max"}, values.COUNT.schema]}),
]
DeviceCount = Annotated[int, whole(1, values.MAX_DEVICES)]
Accumulate = Annotated[int, whole(1, 4096)]
Threads = Annotated[
    int | Literal["auto"],
    Kind(
        values.parse_threads,
        {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": values.MAX_THREADS}]},
    ),
]
Seed = Annotated[int, whole(0, below=2**63)]
Params = Annotated[Mapping[str, Any], MAPPING]

OF_WORKLOADS = frozenset(
    {
        *("params", "precision", "compile", "channels_last", "threads", "strategy", "split"),
        *("min_local_batch", "accumulate", "gradient_check"),
    }
)
"""Keys that mean nothing for a program, which decides all that itself."""
OF_PROGRAMS = frozenset({"args", "env"})
"""Keys that mean nothing for a workload."""
VARIED_BY_PROGRAMS = frozenset({"args", "env", "device_count", "seed"})
"""Keys under `compare` and `baseline` that a program has."""
ROUNDS = frozenset({"rounds", "early_stop"})
"""Keys under `steps` that mean nothing for a program: all its steps count."""


@dataclass(frozen=True, kw_only=True)
class Compare(Section):
    """What varies: every combination of the listed values is one variant."""

    workload: tuple[Workload, ...] = ()
    """Workloads to run, each by itself: they do different work, so none is called faster. A built-in that has
    a batch of its own takes that where the job gives none."""
    strategy: tuple[Strategy, ...] = ()
    """Strategies to compare: `single`, `dp`, `ddp`."""
    device_count: tuple[DeviceCount, ...] = ()
    """Numbers of devices to compare; each takes the first ones of `devices`."""
    split: Annotated[tuple[Split, ...], Several(SPLIT, values.check_split_list)] = ()
    """Splits to compare. Each item is one split, so samples per device are a list in the list:
    `[even, [48, 16]]`."""
    global_batch: tuple[OneGlobalBatch, ...] = ()
    """Global batch sizes to compare, in samples; they take the place of the one at the top."""
    precision: tuple[Precision, ...] = ()
    """Precisions to compare."""
    compile: tuple[bool, ...] = ()
    """`[false, true]` compares the model as it is with the compiled one."""
    channels_last: tuple[bool, ...] = ()
    """Memory layouts of images to compare."""
    threads: tuple[Threads, ...] = ()
    """Numbers of threads of a CPU device to compare."""
    accumulate: tuple[Accumulate, ...] = ()
    """Numbers of micro-batches to compare."""
    params: tuple[Params, ...] = ()
    """Parameters of the workload to compare: a list of mappings, each laid over the `params` at the top."""
    args: Annotated[tuple[Args, ...], Several(ARGS, program.check_args_list)] = ()
    """Arguments of the program to compare: a list of lists, each put behind the `args` at the top."""
    env: tuple[Env, ...] = ()
    """Environments of the program to compare: a list of mappings, each laid over the `env` at the top."""
    seed: tuple[Seed, ...] = ()
    """Seeds to compare."""


@dataclass(frozen=True, kw_only=True)
class Baseline(Section):
    """Which variant the others are compared with. Without it: the first one."""

    strategy: Strategy | None = None
    """The baseline's strategy."""
    device_count: DeviceCount | None = None
    """The baseline's number of devices. If several variants match, it is the one with most devices."""
    split: Split | None = None
    """The baseline's split, or another that comes to the same samples."""
    global_batch: GlobalBatch | None = None
    """The baseline's global batch."""
    precision: Precision | None = None
    """The baseline's precision."""
    compile: bool | None = None
    """Whether the baseline's model is compiled."""
    channels_last: bool | None = None
    """The baseline's memory layout of images."""
    threads: Threads | None = None
    """The baseline's threads of a CPU device."""
    accumulate: Accumulate | None = None
    """The baseline's number of micro-batches."""
    params: Params | None = None
    """Parameters that the baseline has; others may be anything."""
    args: Args | None = None
    """The baseline's arguments, as they stand under `compare`."""
    env: Env | None = None
    """Environment variables that the baseline has; others may be anything."""
    seed: Seed | None = None
    """The baseline's seed."""


@dataclass(frozen=True, kw_only=True)
class Steps(Section):
    """How much is measured."""

    warmup: Annotated[int, whole(0, 100_000)] = 10
    """Steps before timing begins, at least; a variant that is not steady yet takes more."""
    rounds: Annotated[int, whole(1, 100_000)] = 28
    """Rounds at the most. In a round every variant runs once, for at least 200 ms, in a random order."""
    early_stop: bool = True
    """Whether to stop as soon as every comparison is decided. The error rate stays the same: looking early
    costs some precision, which the intervals show."""
    launches: Annotated[int, whole(1, 100)] | None = None
    """How often each group of processes is launched. By default 1 where only splits are compared, and 6 where
    several strategies, precisions or device counts are: their times come from different processes, and those
    scatter."""


@dataclass(frozen=True, kw_only=True)
class Profile(Section):
    """The trace of each variant and rank, taken after the timed steps so that it costs them nothing."""

    steps: Annotated[int, whole(0, 1000)] = 3
    """Steps in a trace; 0 takes none, and doesn't time steps without communication either, which tell what
    communication costs."""
    shapes: bool = False
    """Whether a trace holds the shapes of the operators' inputs."""
    memory: bool = False
    """Whether a trace holds allocations. On CUDA a snapshot for https://pytorch.org/memory_viz is kept beside
    it."""
    stacks: bool = False
    """Whether a trace holds Python stacks; the traces grow and the traced steps become slower."""
    modules: bool = False
    """Whether a trace tells which `nn.Module` an operator belongs to; costs as much as `stacks`, which tell
    it too."""
    ranks: Annotated[tuple[int, ...], Several(whole(0, below=values.MAX_DEVICES), most=None)] | None = None
    """Ranks to record; by default all. Without the others, waiting can't be told from transfer."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(Section):
    """A job for gpurun: a workload and the ways of splitting its batch to compare, or a program as it is."""

    name: Name = "job"
    """Name of the folder under `runs/`. By default the job file's own name."""
    workload: Workload | None = None
    """What to train: a built-in (`gpt`), a function in a file beside the job (`train.py:build`), or one in a
    module (`package.module:build`). A job has this, a `script` or a `module`."""
    script: Script | None = None
    """A program to run unchanged, once per device, with the environment that `torchrun` gives: `train.py`.
    Its steps are those of its optimizer."""
    module: Module | None = None
    """Like `script`, by its module's name as for `python -m`: `package.train`."""
    args: Args = ()
    """Arguments of the program: `[--epochs, "1"]`."""
    env: Env = field(default_factory=dict)
    """Environment variables of the program: `{NCCL_DEBUG: INFO}`."""
    params: Params = field(default_factory=dict)
    """Arguments of the workload's function, by name."""
    devices: Devices = "auto"
    """Devices to use. `auto`: all GPUs that nobody else uses, or two CPU devices where there is none.
    `cpu:4`: four devices that share this machine's cores. `cuda`: all GPUs. A list names them, GPUs also by
    the UUID of a GPU or of a MIG instance; a GPU that stands in it twice is shared by two ranks. Numbers
    count what CUDA_VISIBLE_DEVICES leaves."""
    nodes: Annotated[int, whole(1, values.MAX_NODES)] = 1
    """Machines that train together. Each runs `gpurun` with this job file; `devices` are those of every one,
    and count from the first node's on. How they find each other: see `docs/cluster.md`."""
    global_batch: GlobalBatchOrMax | None = None
    """Samples per optimizer step, over all devices. `max`: the most that every split of the job can hold;
    each device tries batches, in a process that may die of it, and keeps a margin. Only a few built-ins have
    a batch of their own, which then is the default; `gpurun workloads` lists them. A program may say it, so
    that its samples per second can be shown."""
    precision: Precision = "fp32"
    """Number format of the computation: `bf16` and `fp16` by autocast, `tf32` on NVIDIA GPUs only."""
    compile: bool = False
    """Whether `torch.compile` compiles the model, for each split anew; not with `dp`, which copies it."""
    channels_last: bool = False
    """Whether images lie in memory channel by channel (`false`), or pixel by pixel, as convolutions on tensor
    cores like it."""
    threads: Threads = "auto"
    """Threads of a CPU device. `auto`: its share of the cores."""
    strategy: Strategy = "ddp"
    """`single`: one device. `dp`: one process with a thread per device (DataParallel). `ddp`: a process per
    device (DistributedDataParallel)."""
    device_count: DeviceCount | None = None
    """How many of the devices to use, the first ones; by default all. `single` always uses one."""
    split: Split = "even"
    """Samples per device. `even`: as `torch.chunk` does it. `[48, 16]`: these; they must add up to the global
    batch. `"3:1"`: in this ratio, by largest remainder. `balanced`: measures the devices, and takes the split
    that by their curves no other beats."""
    min_local_batch: Annotated[int, whole(0, 1)] = 1
    """The fewest samples that `balanced` gives a device; 0 lets it do without devices that would not help."""
    accumulate: Accumulate = 1
    """Micro-batches per optimizer step: every device cuts its samples into this many, to save memory."""
    seed: Seed = 0
    """Seed of the weights and of the data. The same samples are drawn whatever the split. A program's random
    numbers are seeded only where the job states this."""
    compare: Compare = Compare()
    """What varies: every combination of the listed values is one variant."""
    baseline: Baseline | None = None
    """Which variant the others are compared with: values of the keys that vary. By default the first one."""
    steps: Steps = Steps()
    """How much is measured."""
    profile: Profile = Profile()
    """The trace of each variant and rank, taken after the timed steps so that it costs them nothing."""
    timeout_s: Duration = 600.0
    """The most that a variant may take: `90s`, `10m`, `1h`, or plain seconds. Starting processes and building
    the model, which comes before any variant, may take as long, and always a minute. A program has all the
    time that it needs unless the job states this."""
    hang_timeout_s: Duration | None = None
    """How long no step may end before the job counts as hanging: then it is said which rank the others wait
    for. By default only `timeout` counts."""
    on_hang: Literal["stop", "continue"] = "stop"
    """What then: `stop` gives the variant up, `continue` only tells of it."""
    grace_s: Duration = 5.0
    """How long ranks may take to end after SIGTERM, before SIGKILL: what handlers of the program need to
    save. A second Ctrl-C doesn't wait."""
    restarts: Annotated[int, whole(0, 1000)] = 0
    """How often each launch may start again after a failure that can pass: a signal, the kernel's OOM
    killer, a lost connection, a hang, most exceptions and exit codes; not after one that tells of the
    program or its installation, as `SyntaxError`, `ImportError`, `NameError`, `TypeError`,
    `AttributeError`, `FileNotFoundError` or exit code 2 do. The pause before is 1 s, and doubles each time,
    up to 30 s."""
    bind: Literal["none", "numa", "cores"] = "none"
    """On which cores each rank runs. `numa`: those of its GPU's NUMA node; without GPUs, ranks are spread
    over the nodes. `cores`: its own share of those, by whole cores."""
    gradient_check: bool = True
    """Whether to compare, before the timing, each variant's gradient with that of the whole batch on one
    device."""

    @property
    def program(self) -> str | None:
        """What a program's job runs, in words: `train.py` or `-m package.train`; `None` for a workload's."""
        return f"-m {self.module}" if self.module else self.script

    @property
    def limit_s(self) -> float:
        """The most that a variant may take; a program, which may train for days, has no default."""
        is_endless = self.program is not None and "timeout" not in self.stated
        return float("inf") if is_endless else self.timeout_s

    def resolved(self) -> dict[str, Any]:
        """The whole job with its defaults, as plain data for JSON and YAML; loads again as the same job."""
        if self.program is None:
            job = plain(self, without=OF_PROGRAMS | {"script", "module"})
        else:
            unset = {"seed", "timeout"} - self.stated
            job = plain(self, without=OF_WORKLOADS | unset)
            job["steps"] = plain(self.steps, without=ROUNDS)
        job["compare"] = {key: value for key, value in job["compare"].items() if value}
        return job


SECTIONS: dict[str, type[Section]] = {
    "compare": Compare,
    "baseline": Baseline,
    "steps": Steps,
    "profile": Profile,
}
"""Keys of a job that hold keys of their own."""
