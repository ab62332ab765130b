"""`JobSpec`: a checked job file. Its docstrings are the text of the schema and of the reference."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, WrapValidator

from launcher.errors import Problem
from launcher.spec import program, values
from launcher.spec.source import Source
from launcher.spec.tree import Path

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
Strategy = Literal["single", "dp", "ddp"]

Name = Annotated[
    str,
    BeforeValidator(values.parse_name),
    WithJsonSchema({"type": "string", "pattern": r"^\w[\w.+-]{0,99}$"}),
]
Workload = Annotated[str, BeforeValidator(values.parse_workload), WithJsonSchema({"type": "string"})]
Script = Annotated[str, BeforeValidator(program.parse_script), WithJsonSchema({"type": "string"})]
Module = Annotated[str, BeforeValidator(program.parse_module), WithJsonSchema({"type": "string"})]
Args = Annotated[
    tuple[str, ...],
    BeforeValidator(program.parse_args),
    WithJsonSchema({"type": "array", "items": {"type": ["string", "number"]}}),
]
Env = Annotated[
    dict[str, str],
    BeforeValidator(program.parse_env),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
Devices = Annotated[
    values.Devices,
    BeforeValidator(values.parse_devices),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "cuda"]},
                {"type": "string", "pattern": "^cpu:[0-9]+$"},
                {
                    "type": "array",
                    "items": {"type": "string", "pattern": values.DEVICE_PATTERN},
                    "minItems": 1,
                },
            ]
        }
    ),
]
Split = Annotated[
    values.Split,
    BeforeValidator(values.parse_split),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["even", "balanced"]},
                {"type": "string", "pattern": values.RATIO_PATTERN},
                {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
            ]
        }
    ),
]
Duration = Annotated[
    float,
    BeforeValidator(values.parse_duration),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?(s|m|h)$"},
                {"type": "number", "exclusiveMinimum": 0},
            ]
        }
    ),
]
Count = Annotated[int, Field(ge=1, le=values.MAX_COUNT)]
GlobalBatch = Annotated[
    int,
    Field(ge=1, le=values.MAX_COUNT),
    BeforeValidator(values.parse_global_batch),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": values.MAX_COUNT}),
]
if TYPE_CHECKING:
    GlobalBatchOrMax = int | Literal["max"]
else:  # as a union, a mistake would be told twice: what is wrong with the number, and that it isn't `max`
    GlobalBatchOrMax = Annotated[
        int,
        Field(ge=1, le=values.MAX_COUNT),
        WrapValidator(values.parse_global_batch_or_max),
        WithJsonSchema(
            {"anyOf": [{"const": "max"}, {"type": "integer", "minimum": 1, "maximum": values.MAX_COUNT}]}
        ),
    ]
DeviceCount = Annotated[int, Field(ge=1, le=values.MAX_DEVICES)]
Accumulate = Annotated[int, Field(ge=1, le=4096)]
Threads = Annotated[
    int | Literal["auto"],
    BeforeValidator(values.parse_threads),
    WithJsonSchema(
        {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": values.MAX_THREADS}]}
    ),
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Params = dict[str, Any]

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

Several = Field(default=(), min_length=1, max_length=100, strict=False)
"""A list under `compare`; lax only in that a list may become a tuple."""


class _Section(BaseModel):
    # The docstrings beneath the fields become the schema's text in `launcher.spec.schema`: pydantic's own way
    # (`use_attribute_docstrings`) reads them at every start, which costs 30 ms.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


class Compare(_Section):
    """What varies: every combination of the listed values is one variant."""

    workload: tuple[Workload, ...] = Several
    """Workloads to run, each by itself: they do different work, so none is called faster. A built-in that has
    a batch of its own takes that where the job gives none."""
    strategy: tuple[Strategy, ...] = Several
    """Strategies to compare: `single`, `dp`, `ddp`."""
    device_count: tuple[DeviceCount, ...] = Several
    """Numbers of devices to compare; each takes the first ones of `devices`."""
    split: Annotated[tuple[Split, ...], BeforeValidator(values.check_split_list)] = Several
    """Splits to compare. Each item is one split, so samples per device are a list in the list:
    `[even, [48, 16]]`."""
    global_batch: tuple[GlobalBatch, ...] = Several
    """Global batch sizes to compare, in samples; they take the place of the one at the top."""
    precision: tuple[Precision, ...] = Several
    """Precisions to compare."""
    compile: tuple[bool, ...] = Several
    """`[false, true]` compares the model as it is with the compiled one."""
    channels_last: tuple[bool, ...] = Several
    """Memory layouts of images to compare."""
    threads: tuple[Threads, ...] = Several
    """Numbers of threads of a CPU device to compare."""
    accumulate: tuple[Accumulate, ...] = Several
    """Numbers of micro-batches to compare."""
    params: tuple[Params, ...] = Several
    """Parameters of the workload to compare: a list of mappings, each laid over the `params` at the top."""
    args: Annotated[tuple[Args, ...], BeforeValidator(program.check_args_list)] = Several
    """Arguments of the program to compare: a list of lists, each put behind the `args` at the top."""
    env: tuple[Env, ...] = Several
    """Environments of the program to compare: a list of mappings, each laid over the `env` at the top."""
    seed: tuple[Seed, ...] = Several
    """Seeds to compare."""


class Baseline(_Section):
    """Which variant the others are compared with. Without it: the first one."""

    strategy: Strategy | None = None
    """The baseline's strategy."""
    device_count: DeviceCount | None = None
    """The baseline's number of devices. If several variants match, it is the one with most devices."""
    split: Split | None = None
    """The baseline's split, or another that comes to the same samples."""
    global_batch: Count | None = None
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


class Steps(_Section):
    """How much is measured."""

    warmup: Annotated[int, Field(ge=0, le=100_000)] = 10
    """Steps before timing begins, at least; a variant that is not steady yet takes more."""
    rounds: Annotated[int, Field(ge=1, le=100_000)] = 28
    """Rounds at the most. In a round every variant runs once, for at least 200 ms, in a random order."""
    early_stop: bool = True
    """Whether to stop as soon as every comparison is decided. The error rate stays the same: looking early
    costs some precision, which the intervals show."""
    launches: Annotated[int, Field(ge=1, le=100)] | None = None
    """How often each group of processes is launched. By default 1 where only splits are compared, and 6 where
    several strategies, precisions or device counts are: their times come from different processes, and those
    scatter."""


class Profile(_Section):
    """The trace of each variant and rank, taken after the timed steps so that it costs them nothing."""

    steps: Annotated[int, Field(ge=0, le=1000)] = 3
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
    ranks: tuple[Annotated[int, Field(ge=0, lt=values.MAX_DEVICES)], ...] | None = Field(
        default=None, min_length=1, strict=False
    )
    """Ranks to record; by default all. Without the others, waiting can't be told from transfer."""


class JobSpec(_Section):
    """A job for gpurun: a workload and the ways of splitting its batch to compare, or a program as it is."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [key]} for key in ("workload", "script", "module")]}
    )

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
    env: Env = Field(default_factory=dict)
    """Environment variables of the program: `{NCCL_DEBUG: INFO}`."""
    params: Params = Field(default_factory=dict)
    """Arguments of the workload's function, by name."""
    devices: Devices = "auto"
    """Devices to use. `auto`: all GPUs that nobody else uses, or two CPU devices where there is none.
    `cpu:4`: four devices that share this machine's cores. `cuda`: all GPUs. A list names them, GPUs also by
    the UUID of a GPU or of a MIG instance; a GPU that stands in it twice is shared by two ranks. Numbers
    count what CUDA_VISIBLE_DEVICES leaves."""
    nodes: Annotated[int, Field(ge=1, le=values.MAX_NODES)] = 1
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
    min_local_batch: Annotated[int, Field(ge=0, le=1)] = 1
    """The fewest samples that `balanced` gives a device; 0 lets it do without devices that would not help."""
    accumulate: Accumulate = 1
    """Micro-batches per optimizer step: every device cuts its samples into this many, to save memory."""
    seed: Seed = 0
    """Seed of the weights and of the data. The same samples are drawn whatever the split. A program's random
    numbers are seeded only where the job states this."""
    compare: Compare = Field(default_factory=Compare)
    """What varies: every combination of the listed values is one variant."""
    baseline: Baseline | None = None
    """Which variant the others are compared with: values of the keys that vary. By default the first one."""
    steps: Steps = Field(default_factory=Steps)
    """How much is measured."""
    profile: Profile = Field(default_factory=Profile)
    """The trace of each variant and rank, taken after the timed steps so that it costs them nothing."""
    timeout_s: Duration = Field(default=600.0, alias="timeout", json_schema_extra={"default": "10m"})
    """The most that a variant may take: `90s`, `10m`, `1h`, or plain seconds. Starting processes and building
    the model, which comes before any variant, may take as long, and always a minute. A program has all the
    time that it needs unless the job states this."""
    hang_timeout_s: Duration | None = Field(default=None, alias="hang_timeout")
    """How long no step may end before the job counts as hanging: then it is said which rank the others wait
    for. By default only `timeout` counts."""
    on_hang: Literal["stop", "continue"] = "stop"
    """What then: `stop` gives the variant up, `continue` only tells of it."""
    grace_s: Duration = Field(default=5.0, alias="grace", json_schema_extra={"default": "5s"})
    """How long ranks may take to end after SIGTERM, before SIGKILL: what handlers of the program need to
    save. A second Ctrl-C doesn't wait."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often each launch may start again after a failure that can pass: a signal, the kernel's OOM
    killer, a lost connection, a hang, most exceptions and exit codes; not after a `SyntaxError`,
    `ImportError`, `NameError`, `TypeError`, `AttributeError` or exit code 2. The pause before is 1 s, and
    doubles each time."""
    bind: Literal["none", "numa", "cores"] = "none"
    """On which cores each rank runs. `numa`: those of its GPU's NUMA node; without GPUs, ranks are spread
    over the nodes. `cores`: its own share of those, by whole cores."""
    gradient_check: bool = True
    """Whether to compare, before the timing, each variant's gradient with that of the whole batch on one
    device."""

    _source: Source | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Keeps the source, which knows where everything stands, for mistakes that show only later."""
        self._source = context

    def _not_applicable(self) -> dict[str, Any]:
        """What means nothing for a program; empty for a workload."""
        if self.program is None:
            return {"script": True, "module": True, "args": True, "env": True}
        unset = {key for key in ("seed", "timeout_s") if key not in self.model_fields_set}
        return {**dict.fromkeys(OF_WORKLOADS | unset, True), "steps": set(ROUNDS)}

    @property
    def program(self) -> str | None:
        """What a program's job runs, in words: `train.py` or `-m package.train`; `None` for a workload's."""
        return f"-m {self.module}" if self.module else self.script

    @property
    def limit_s(self) -> float:
        """The most that a variant may take; a program, which may train for days, has no default."""
        is_endless = self.program is not None and "timeout_s" not in self.model_fields_set
        return float("inf") if is_endless else self.timeout_s

    def problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the value at `path`, with its place in the file."""
        return self._source.problem(path, message, hint) if self._source else Problem(message, hint)

    def key_problem(self, path: Path, message: str, hint: str | None = None) -> Problem:
        """A mistake in the key at the end of `path`, with its place in the file."""
        return self._source.key_problem(path, message, hint) if self._source else Problem(message, hint)

    def resolved(self) -> dict[str, Any]:
        """The whole job with its defaults, as plain data for JSON and YAML; loads again as the same job."""
        left_out = self._not_applicable()
        job = self.model_dump(mode="json", by_alias=True, exclude=left_out, exclude_none=True)
        job["compare"] = {key: value for key, value in job["compare"].items() if value}
        return job


SECTIONS: dict[str, type[BaseModel]] = {
    "compare": Compare,
    "baseline": Baseline,
    "steps": Steps,
    "profile": Profile,
}
"""Keys of a job that hold keys of their own."""


def keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """The keys of a section as they stand in the file."""
    return tuple(field.alias or name for name, field in model.model_fields.items())
