"""`Settings`: what makes a variant, said once.

Every field is a key of a job file. Its metadata, a `Setting`, says what follows from it: whether it may vary,
for which kinds of job and strategies it holds, whether variants that differ in it can share processes, if two
runs that differ in it do the same work, and how it is shown. The sections `compare` and `baseline` with their
schema and reference, combinations, variants, the merging of equal ones, launches, ids, labels, `gpurun diff`
and TensorBoard's table of hyperparameters all derive from these fields. A new one needs nothing but its lines
here, and the code that uses its value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

from gpurun.launcher.jobfile import values
from gpurun.launcher.jobfile.kinds import EVERY_KIND, PROGRAM, WORKLOADS, JobKind, variant_kind
from gpurun.launcher.jobfile.section import (
    ITEMS,
    MAPPING,
    NESTED,
    WORDS,
    Setting,
    ValueKind,
    by_other_names,
    keys_of,
    one_of,
    setting,
    whole,
)
from gpurun.launcher.strategies import IN_JOBS, STRATEGIES, strategy_named
from gpurun.workloads.limits import RANGES

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
_DTYPES = by_other_names(
    fp64="float64 double 64", fp32="float32 float 32",
    bf16="bfloat16 bf16-mixed", fp16="float16 half 16 16-mixed",
)  # fmt: skip
_MIXED = "mixed precision is `bf16`, or `fp16` with loss scaling"
_STRATEGIES_ELSEWHERE = by_other_names(
    ddp="distributeddataparallel distributed", dp="dataparallel data_parallel",
    fsdp="fullyshardeddataparallel zero3", zero1="zero",
)  # fmt: skip
"""Precisions and strategies by the names that torch and its trainers give them."""
_NOT_OPTIMIZERS = dict.fromkeys(
    ("adam", "adamw", "sgd", "lamb", "adafactor"),
    "the workload makes its optimizer; this key chooses the implementation",
)
_NOT_STRATEGIES = dict.fromkeys(
    ("zero2", "deepspeed", "tp", "pp"),
    "a program that uses it can be timed as it is: `gpurun run train.py`",
)
"""Values that are no choice, however near their name is to one."""
_OF_WORKLOADS = "use `params` for the arguments of a workload"


def _strategies_text() -> str:
    texts = [f"`{name}`: {STRATEGIES[name].summary}." for name in IN_JOBS]
    return " ".join(("How the model runs on the devices.", *texts))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that make a variant. Under `compare` the keys vary in this order, the last one fastest."""

    workload: Annotated[str, ValueKind(values.parse_workload, {"type": "string"})] | None = setting(
        None,
        compare="Workloads to run, each by itself: they do different work, so they are not ranked. A "
        "built-in with a default batch size uses that if the job gives none.",
        is_task=True,
        builds_model=True,
        absent="",
    )
    """Model to train: a built-in (`gpt`), a function in a file next to the job (`train.py:build`) or one in a
    module (`package.module:build`). A job has this, a `script` or a `module`."""
    script: Annotated[str, values.SCRIPT] | None = setting(None, kinds=frozenset({PROGRAM}), is_task=True)
    """A program to run unchanged, once per device, with the environment that `torchrun` gives: `train.py`.
    Its steps are those of its optimizer."""
    module: Annotated[str, values.MODULE] | None = setting(None, kinds=frozenset({PROGRAM}), is_task=True)
    """Like `script`, by its module's name as for `python -m`: `package.train`."""
    strategy: Annotated[str, one_of(IN_JOBS, _STRATEGIES_ELSEWHERE, _NOT_STRATEGIES)] = setting(
        "ddp",
        compare=f"Strategies to compare: {', '.join(f'`{name}`' for name in IN_JOBS)}.",
        same_work=True,
        names_variant=True,
        has_column=True,
        about=_strategies_text(),
        takes_turns=True,
    )
    """How the model runs on the devices."""
    device_count: Annotated[int, whole(1, values.MAX_DEVICES)] | None = setting(
        None,
        compare="Numbers of devices to compare; each takes the first ones of `devices`.",
        baseline="The baseline's number of devices. If several variants match, it is the one with most "
        "devices.",
        kinds=EVERY_KIND,
        same_work=True,
        names_variant=True,
        has_column=True,
        needs_processes=True,
        takes_turns=True,
    )
    """How many of the devices to use, the first ones; by default all. `single` always uses one."""
    split: Annotated[values.Split, values.SPLIT] = setting(
        "even",
        compare="Splits to compare. Each item is one split, so samples per device are a list in the list: "
        "`[even, [48, 16]]`.",
        baseline="The baseline's split, or another that comes to the same samples.",
        for_training=True,
        strategies=lambda strategy: strategy.has_split,
        absent=(),
        shares_processes=True,
        is_resolved=True,
        names_variant=True,
        has_column=True,
        check_list=values.check_split_list,
    )
    """Samples per device. `even`: as `torch.chunk` does it. `[48, 16]`: these; they must add up to the global
    batch. `"3:1"`: in this ratio, by largest remainder. `balanced`: measures the devices and picks the split
    with the lowest predicted step time."""
    global_batch: Annotated[int | Literal["max"], values.BATCH] | None = setting(
        None,
        compare="Global batch sizes to compare, in samples; they replace the one at the top.",
        kinds=EVERY_KIND,
        varies_for=WORKLOADS,
        for_training=True,
        shares_processes=True,
        builds_model=True,
        is_resolved=True,
        has_column=True,
        compared=values.ONE_BATCH,
        named=values.COUNT,
    )
    """Samples per optimizer step, over all devices. `max`: the most that every split of the job can hold;
    each device tries batches in a separate process, which may run out of memory, and keeps a margin; it stops
    at the first batch whose step takes more than 10 s, and where a dataset ends. On CPUs, time often ends it
    before memory does: a step may take no longer than leaves time in `budget` for comparing. Only a few
    built-ins have a default batch size; `gpurun workloads` lists them. For a program it is optional: with
    it, the report shows samples per second."""
    precision: Annotated[str, one_of(PRECISIONS, _DTYPES, {"mixed": _MIXED, "amp": _MIXED})] = setting(
        "fp32",
        compare="Precisions to compare.",
        is_resolved=True,
        builds_model=True,
        has_column=True,
        takes_turns=True,
    )
    """Number format of the computation: `bf16` and `fp16` by autocast, `tf32` on NVIDIA GPUs from Ampere on.
    All others compute float32 products in float32; torch's own default lets cuDNN use TF32."""
    compile: bool = setting(
        False,
        compare="`[false, true]` compares the model as it is with the compiled one.",
        for_training=True,
        absent=False,
    )
    """Whether `torch.compile` compiles the model, again for each split; not with `dp`, which copies it."""
    checkpointing: Annotated[int | Literal["none", "full"], values.CHECKPOINTING] = setting(
        "none",
        compare="Which layers compute their activations again, to compare.",
        for_training=True,
        absent="none",
        takes_turns=True,
    )
    """Which of the layers that repeat, or that the workload names as `blocks`, drop their activations and
    compute them again in the backward pass (`torch.utils.checkpoint`). `full`: all, `2`: every second one."""
    optimizer: Annotated[str, one_of(("default", "foreach", "fused"), remedies=_NOT_OPTIMIZERS)] = setting(
        "default",
        compare="Implementations of the optimizer to compare.",
        for_training=True,
        absent="default",
        takes_turns=True,
    )
    """Implementation of torch's optimizers: for several parameters at once (`foreach`), or also in one kernel
    (`fused`). `default`: as the workload's own optimizer chooses."""
    workers: Annotated[int, whole(0, RANGES["num_workers"][1])] | None = setting(
        None,
        compare="Numbers of processes that read the dataset, to compare.",
        for_training=True,
    )
    """Processes of each device that read the workload's `dataset`, as `num_workers` of a DataLoader. By
    default as many as the workload says."""
    prefetch: Annotated[int, whole(1, 1000)] | None = setting(
        None,
        compare="Numbers of batches that each of these processes reads ahead, to compare.",
        for_training=True,
        matters=lambda settings: settings.workers != 0,
        needs="`workers`",
    )
    """Micro-batches that each of these processes reads ahead, as `prefetch_factor` of a DataLoader. torch's
    default is 2."""
    channels_last: bool = setting(
        False,
        compare="Memory layouts of images to compare.",
        for_training=True,
        absent=False,
        takes_turns=True,
    )
    """Memory layout of images: channel by channel (`false`), or pixel by pixel (`true`), which convolutions
    on tensor cores prefer."""
    cudnn_benchmark: bool = setting(
        False,
        compare="`[false, true]` compares cuDNN's first choice of algorithms with the fastest ones.",
        for_training=True,
        absent=False,
    )
    """Whether convolutions on an NVIDIA GPU try cuDNN's algorithms for each new shape during the warm-up, and
    keep the fastest, as `torch.backends.cudnn.benchmark`. `false` is torch's default."""
    threads: Annotated[int | Literal["auto"], values.THREADS] = setting(
        "auto",
        compare="Numbers of threads of a CPU device to compare.",
        absent=0,
        needs_processes=True,
        takes_turns=True,
    )
    """Threads of a CPU device. `auto`: its share of the cores that other processes leave when the run begins,
    at least 1; on several nodes its share of all cores. All launches of a run have as many, also after
    `--resume`."""
    accumulate: Annotated[int, whole(1, 4096)] = setting(
        1,
        compare="Numbers of micro-batches to compare.",
        is_resolved=True,
        for_training=True,
        shares_processes=True,
    )
    """Micro-batches per optimizer step: every device cuts its samples into this many, to save memory."""
    sync_every: Annotated[int, whole(1, 4096)] | None = setting(
        None,
        compare="Numbers of micro-batches between two averages of the gradients.",
        for_training=True,
        strategies=lambda strategy: strategy.has_backend,
        matters=lambda settings: (settings.accumulate or 1) > 1,
        needs="`accumulate`",
        shares_processes=True,
    )
    """With `accumulate`, after how many micro-batches processes average gradients, and after the last one. By
    default only then, so all others run under `no_sync`. `1` costs a communication for each micro-batch; with
    `fsdp` and `hsdp` it saves the memory of whole gradients."""
    bucket_mb: Annotated[int, whole(1, 100_000)] = setting(
        25,
        compare="Bucket sizes to compare, in MiB.",
        for_training=True,
        strategies=lambda strategy: strategy.has_buckets,
        absent=0,
        option=True,
    )
    """MiB of gradients that `ddp` and `zero1` average in one all-reduce, as `bucket_cap_mb` of
    DistributedDataParallel: smaller buckets overlap more of the backward pass, larger ones cost fewer
    collectives. 25 is torch's default, with a first bucket of 1 MiB."""
    first_bucket_mb: Annotated[int, whole(1, 100_000)] | None = setting(
        None,
        compare="Sizes of the first bucket to compare, in MiB.",
        for_training=True,
        strategies=lambda strategy: strategy.has_buckets,
        option=True,
    )
    """MiB of the bucket that is averaged first, at most `bucket_mb`: a small one starts communication early.
    By default 1 next to torch's 25, else `bucket_mb`. Other pairs need a torch with `bucket_cap_mb_list`."""
    static_graph: bool = setting(
        False,
        compare="`[false, true]` compares a graph that may change with one that DDP takes to be the same.",
        for_training=True,
        strategies=lambda strategy: strategy.has_buckets,
        absent=False,
        option=True,
    )
    """Whether `ddp` and `zero1` take the model's graph to be the same in every step, as the option of this
    name of DistributedDataParallel: unused parameters are found once, not in each step."""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = setting(
        "none",
        compare="Compressions of gradients to compare.",
        for_training=True,
        strategies=lambda strategy: strategy.has_buckets,
        absent="none",
        option=True,
    )
    """How `ddp` and `zero1` compress gradients that they average, by torch's hooks: in half the bytes, or by
    PowerSGD of rank 1 from the third step on. The report shows how far they are from those of one device."""
    gradient_as_bucket_view: bool = setting(
        False,
        compare="`[false, true]` compares gradients of their own with views into the buckets.",
        for_training=True,
        strategies=lambda strategy: strategy.has_buckets,
        absent=False,
        option=True,
    )
    """Whether gradients of `ddp` and `zero1` are views into its buckets, as the option of this name of
    DistributedDataParallel: it saves a copy of all gradients. `false` is torch's default."""
    nccl: Annotated[Mapping[str, Any], values.NCCL] = setting(
        {},
        compare="Settings of NCCL to compare: a list of mappings, each merged into those at the top.",
        baseline="Settings of NCCL that the baseline has; others are ignored.",
        strategies=lambda strategy: strategy.has_backend,
        shape=ITEMS,
        absent={},
        needs_processes=True,
    )
    """Settings that override NCCL's choice: `{algorithm: ring, protocol: ll128, channels: 4}`. They become
    `NCCL_ALGO`, `NCCL_PROTO`, and `NCCL_MIN_NCHANNELS` with `NCCL_MAX_NCHANNELS`. An algorithm applies to the
    collectives that support it: `tree` to all-reduces. If it doesn't work on these GPUs, a run fails, but
    NCCL before 2.24 falls back to `ring`. `ll128` can corrupt data on links for which NCCL wouldn't choose
    it."""
    reshard: bool = setting(
        True,
        compare="`[false, true]` compares parameters that stay after the forward with those that are freed.",
        for_training=True,
        strategies=lambda strategy: strategy.shards_parameters,
        absent=False,
        option=True,
    )
    """Whether `fsdp` and `hsdp` free a block's parameters after its forward pass, and gather them again for
    its backward pass, like `reshard_after_forward` of `fully_shard`: that costs time and saves memory."""
    shard_size: Annotated[int, whole(2, values.MAX_DEVICES)] = setting(
        2,
        compare="Sizes of the groups of `hsdp` to compare.",
        for_training=True,
        strategies=lambda strategy: strategy.has_shard_groups,
        absent=0,
        option=True,
    )
    """Devices of each group within which `hsdp` divides parameters, in their order; it must divide the number
    of devices. On several nodes, the number of devices of a node keeps all but the gradients within it."""
    params: Annotated[Mapping[str, Any], MAPPING] = setting(
        {},
        compare="Parameters of the workload to compare: a list of mappings, each merged into the `params` at "
        "the top.",
        baseline="Parameters that the baseline has; other parameters are ignored.",
        shape=ITEMS,
        absent={},
        builds_model=True,
        decides=False,
    )
    """Arguments of the workload's function, by name."""
    args: Annotated[tuple[str, ...], values.ARGS] = setting(
        (),
        compare="Arguments of the program to compare: a list of lists, each appended to the `args` at the "
        "top.",
        baseline="The baseline's arguments, as they are under `compare`.",
        kinds=frozenset({PROGRAM}),
        instead=_OF_WORKLOADS,
        shape=WORDS,
        absent=(),
        check_list=values.check_args_list,
    )
    """Arguments of the program: `[--epochs, "1"]`; `{launch_dir}` is replaced by its launch's directory."""
    options: Annotated[Mapping[str, str], values.OPTIONS] = setting(
        {},
        compare="Options of the program to compare: a list of mappings, each merged into the `options` at "
        "the top.",
        baseline="Options that the baseline has; others are ignored.",
        kinds=frozenset({PROGRAM}),
        instead=_OF_WORKLOADS,
        shape=ITEMS,
        absent={},
        decides=False,
    )
    """Options that are set in `args`, in the form that they have there; others are added. `{workers: 2}` is
    `--workers 2`, `{amp: on}` is the flag `--amp`, which `{amp: off}` removes, and `{+model.width: 64}` is
    Hydra's `model.width=64`."""
    calls: Annotated[Mapping[str, Mapping[str, bool | int | float | str]], values.CHANGED_CALLS] = setting(
        {},
        compare="Changed calls of the program to compare: a list of mappings, each merged into the `calls` "
        "at the top.",
        baseline="Changed calls that the baseline has; others are ignored.",
        kinds=frozenset({PROGRAM}),
        instead=_OF_WORKLOADS,
        shape=NESTED,
        absent={},
        decides=False,
        same_work=True,
    )
    """Keyword arguments that calls of torch in the program's own files get instead of those written there:
    `{DataLoader: {num_workers: 2}}`, and likewise `DistributedDataParallel` and `Optimizer`, which is every
    class of `torch.optim`. A keyword that a class doesn't have is left out. `{compile: {}}` compiles the
    module that is given to DistributedDataParallel, `{autocast: {dtype: bfloat16}}` runs its forward pass
    under autocast, with outputs in float32, and `{comm_hook: {compress: bf16}}` has gradients compressed.
    `{cudnn: {benchmark: true}}` sets the flag of `torch.backends.cudnn` before the program begins, and
    `{matmul: {precision: high}}` the precision of matrix products. Calls that libraries make stay as they
    are."""
    env: Annotated[Mapping[str, str], values.ENV] = setting(
        {},
        compare="Environments of the program to compare: a list of mappings, each merged into the `env` at "
        "the top.",
        baseline="Environment variables that the baseline has; other variables are ignored.",
        kinds=frozenset({PROGRAM}),
        instead=_OF_WORKLOADS,
        shape=ITEMS,
        absent={},
        builds_model=True,
        same_work=True,
    )
    """Environment variables of the program: `{NCCL_DEBUG: INFO}`. Values of names such as `HF_TOKEN`,
    `WANDB_API_KEY` or `DB_PASSWORD` are masked in every record, report and message of gpurun."""
    seed: Annotated[int, whole(0, below=2**63)] = setting(
        0,
        compare="Seeds to compare.",
        kinds=EVERY_KIND,
        optional_for=frozenset({PROGRAM}),
        builds_model=True,
        decides=False,
        takes_turns=True,
    )
    """Seed of the weights and of the data. The same samples are drawn whatever the split. A program's random
    numbers are seeded only where the job states this."""

    @cached_property
    def kind(self) -> JobKind:
        """The kind of job that it belongs to."""
        return variant_kind(self.strategy, self.workload or "")

    def has(self, name: str) -> bool:
        """Whether the setting means anything for it."""
        row = SETTINGS[name]
        is_held = name in settings_for(self.kind, self.strategy)
        return is_held and (row.matters is None or row.matters(self))


def _completed(name: str, rule: Any, row: Setting) -> Setting:
    """The setting with its rule, and its description under `baseline` where it can name the baseline."""
    text = row.baseline or f"The baseline's `{name}`."
    named = text if row.compare and not row.is_task else row.baseline
    return replace(row, rule=rule, baseline=named)


_KEYS = keys_of(Settings)
SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        each.name: _completed(each.name, _KEYS[each.name].kind, each.metadata["setting"])
        for each in fields(Settings)
    }
)
"""All settings by name, in the order in which they vary."""

ADDED_TO_THE_TOP = frozenset({"args", "options", "calls", "env", "params"})
"""Settings whose values under `compare` are added to the one at the top, which all variants have, too."""

TASK_SETTINGS = tuple(name for name, row in SETTINGS.items() if row.is_task)


@cache
def settings_for(kind: JobKind, strategy: str) -> frozenset[str]:
    """The settings that variants of that kind and strategy have."""
    named = strategy_named(strategy)
    return frozenset(name for name, row in SETTINGS.items() if kind in row.kinds and row.strategies(named))


def settings_of(settings: Settings) -> dict[str, Any]:
    """The value of every setting by name, of a combination or a variant."""
    return {name: getattr(settings, name) for name in SETTINGS}
