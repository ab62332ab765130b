"""Remedies that make training faster and compute the same: their table, and which of them fit.

A program's calls get other arguments, a workload's job other keys.

Sources: torch's documentation of `DataLoader`, `DistributedDataParallel`, `torch.optim` and
`torch.nn.Module.compile`; its performance tuning guide.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.rundir.improvement import CHANGES_NUMERICS
from gpurun.launcher.rundir.records import AT_DDP, WORKLOAD, CallSite
from gpurun.launcher.units import format_number

Part = Literal["input", "transfer", "work"]
"""The parts of a step that remedies act on: waiting for data, exposed communication, and what computes."""
PARTS: Mapping[Part, str] = MappingProxyType(
    {"input": "waiting for data", "transfer": "communication", "work": "computing"}
)
Settings = Mapping[str, Any]
"""Values of a job's settings by name: `{"calls": {"DataLoader": {"num_workers": 2}}}`."""
LEAST_GAIN_PERCENT = 2.0
"""A remedy whose ceiling is lower isn't tried."""
DDP, LOADER, OPTIMIZER = "DistributedDataParallel", "DataLoader", "Optimizer"
OF_PROGRAM = ("cudnn", "env", "matmul")
"""Changes that belong to no call."""


@dataclass(frozen=True)
class Surroundings:
    """Facts that remedies depend on, besides the call."""

    device_type: str
    """torch's name of the devices' kind: `cpu`, `cuda`."""
    spare_cores: int
    """Cores of the machine for each rank, its own one left out; at least 1."""
    threads: int | None
    """`OMP_NUM_THREADS` of a rank, where the shell or the job states it."""
    share: int
    """A rank's share of the cores."""
    numerics: bool = False
    """Whether what changes numerics is tried, too."""
    stated: frozenset[str] = frozenset()
    """The keys that a workload's job states."""
    trainer_options: frozenset[str] = frozenset()
    """The options of a Hugging Face Trainer that the program takes on its command line."""


Fits = Callable[[Mapping[str, str], Surroundings], bool]


@dataclass(frozen=True)
class Remedy:
    """A row of the table."""

    name: str
    """Distinguishes the rows; of those of one group, the best is kept."""
    call: str
    """The changed place: a constructor, `compile`, `cudnn`; `env`: a variable; `WORKLOAD`: keys only."""
    arguments: Mapping[str, Any] | Callable[[Surroundings], Mapping[str, Any]]
    part: Part
    """Where its gain comes from, so that it can't gain more than this takes of a step."""
    keys: Settings | Callable[[Surroundings], Settings] = field(default_factory=dict)
    """Keys of the job that apply it to a workload, `None` for one to remove; empty: it's for programs."""
    group: str = ""
    """Remedies that exclude each other; empty: none does."""
    fits: Fits = lambda given, around: True
    """Whether it would change anything, by the arguments of the call as the program writes them; of a
    workload by the job's keys, each of which has an effect and another value."""
    on: Literal["all", "CPUs", "GPUs"] = "all"
    """Devices on which it has an effect."""
    draws_otherwise: bool = False
    """Whether random numbers may be drawn in another order, so that losses differ though the training is the
    same."""
    rounds: bool = True
    """Whether it may add numbers in another order, so that losses differ by rounding."""
    changes_numerics: bool = False
    """Whether it computes with less precision: tried only where that is asked for."""
    write: tuple[str, str] = ("", "")
    """Where it changes no argument: a statement before the call, in which `{0}` is its first argument, and
    another one after it, in which `{0}` is its result, for where the first has no place."""
    cost: str = ""
    """What takes time at each start, which steps don't show."""
    caveat: str = ""
    """What its launches can't show of later steps; `{steps}` is the number of steps that they had, `{tried}`
    also says whether an epoch ended in them."""
    source: str = ""

    def is_of(self, site: CallSite) -> bool:
        """Whether it changes calls of this kind."""
        if self.call == OPTIMIZER:
            return site.name not in (LOADER, DDP, WORKLOAD)
        return site.name == (DDP if self.call in AT_DDP else self.call)


def _is(keyword: str, *values: str) -> Fits:
    """Whether the call gives `keyword` one of these values, as Python writes them."""
    return lambda given, around: given.get(keyword) in values


def _isnt(keyword: str, *values: str) -> Fits:
    return lambda given, around: given.get(keyword) not in values


def _workers(given: Mapping[str, str]) -> str:
    return given.get("workers") or given.get("num_workers", "0")


def _reads_by_itself(given: Mapping[str, str], around: Surroundings) -> bool:
    """Whether the ranks read data themselves."""
    return _workers(given) == "0"


def _has_workers(given: Mapping[str, str], around: Surroundings) -> bool:
    return not _reads_by_itself(given, around)


def _buckets_are_smaller(given: Mapping[str, str], around: Surroundings) -> bool:
    try:
        return float(given.get("bucket_mb") or given.get("bucket_cap_mb", "25")) < 100
    except ValueError:
        return True


def _may_be_fused(given: Mapping[str, str], around: Surroundings) -> bool:
    """Whether the optimizer isn't fused yet; of a workload, also whether its optimizer has that option."""
    return given.get("fused") != "True" and ("optimizer" not in given or "fused" in given)


def _averages_often(given: Mapping[str, str], around: Surroundings) -> bool:
    """Whether ranks average gradients before the last micro-batch."""
    return int(given.get("sync_every", "1")) < int(given.get("accumulate", "1"))


_DATA = "https://docs.pytorch.org/docs/stable/data.html"
_DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
_OPTIM = "https://docs.pytorch.org/docs/stable/optim.html"

_COPIES = "{tried}: workers don't see what the program changes in its dataset later"
_TUNING = "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html"

REMEDIES: tuple[Remedy, ...] = (
    Remedy(
        "workers",
        LOADER,
        {"num_workers": 2, "persistent_workers": True},
        "input",
        group="workers",
        fits=lambda given, around: _workers(given) in ("0", "1"),
        draws_otherwise=True,
        keys={"workers": 2},
        caveat=_COPIES,
        rounds=False,
        source=_DATA,
    ),
    Remedy(
        "more workers",
        LOADER,
        lambda around: {"num_workers": min(8, around.spare_cores), "persistent_workers": True},
        "input",
        group="workers",
        fits=lambda given, around: around.spare_cores > 2 and _workers(given) in ("0", "1", "2"),
        draws_otherwise=True,
        keys=lambda around: {"workers": min(8, around.spare_cores)},
        caveat=_COPIES,
        rounds=False,
        source=_DATA,
    ),
    Remedy(
        "persistent workers",
        LOADER,
        {"persistent_workers": True},
        "input",
        fits=lambda given, around: _has_workers(given, around) and given.get("persistent_workers") != "True",
        caveat=_COPIES,
        rounds=False,
        source=_DATA,
    ),
    Remedy(
        "prefetch",
        LOADER,
        {"prefetch_factor": 8},
        "input",
        fits=lambda given, around: _has_workers(given, around) and given.get("prefetch_factor") != "8",
        keys={"prefetch": 8},
        rounds=False,
        source=_DATA,
    ),
    Remedy(
        "pinned memory",
        LOADER,
        {"pin_memory": True},
        "work",
        fits=_isnt("pin_memory", "True"),
        on="GPUs",
        rounds=False,
        source=_DATA,
    ),
    Remedy(
        "large buckets",
        DDP,
        {"bucket_cap_mb": 100},
        "transfer",
        group="buckets",
        fits=_buckets_are_smaller,
        keys={"bucket_mb": 100},
        source=_DDP,
    ),
    Remedy(
        "default buckets",
        DDP,
        {"bucket_cap_mb": 25},
        "transfer",
        group="buckets",
        fits=lambda given, around: (
            given.get("bucket_cap_mb", "25") not in ("25", "25.0", "None") or "bucket_mb" in given
        ),
        keys={"bucket_mb": 25},
        source=_DDP,
    ),
    Remedy(
        "no search for unused parameters",
        DDP,
        {"find_unused_parameters": False},
        "work",
        group="graph",
        fits=_is("find_unused_parameters", "True"),
        caveat="no parameter was unused in {steps} steps: a later step that leaves some out fails",
        source=_DDP,
    ),
    Remedy(
        "static graph",
        DDP,
        {"static_graph": True},
        "work",
        group="graph",
        fits=_isnt("static_graph", "True"),
        caveat="used parameters were the same in {steps} steps: they may not change later",
        keys={"static_graph": True},
        source=_DDP,
    ),
    Remedy(
        "fused optimizer",
        OPTIMIZER,
        {"fused": True, "foreach": False},
        "work",
        group="optimizer",
        fits=_may_be_fused,
        keys={"optimizer": "fused"},
        source=_OPTIM,
    ),
    Remedy(
        "optimizer for many tensors at once",
        OPTIMIZER,
        {"foreach": True, "fused": False},
        "work",
        group="optimizer",
        fits=_isnt("foreach", "True"),
        keys={"optimizer": "foreach"},
        source=_OPTIM,
    ),
    Remedy(
        "gradients in buckets",
        DDP,
        {"gradient_as_bucket_view": True},
        "work",
        fits=_isnt("gradient_as_bucket_view", "True"),
        keys={"gradient_as_bucket_view": True},
        rounds=False,
        source=_DDP,
    ),
    Remedy(
        "compile",
        "compile",
        {},
        "work",
        draws_otherwise=True,
        write=("{0}.compile()", "{0}.module.compile()"),
        cost="compiling",
        keys={"compile": True},
        source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html",
    ),
    Remedy(
        "search for convolutions",
        "cudnn",
        {"benchmark": True},
        "work",
        on="GPUs",
        cost="trying algorithms for each new shape",
        keys={"cudnn_benchmark": True},
        source="https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.benchmark",
    ),
    Remedy(
        "threads",
        "env",
        lambda around: {"OMP_NUM_THREADS": str(around.share)},
        "work",
        fits=lambda given, around: around.threads is not None and around.threads < around.share,
        on="CPUs",
        keys={"threads": "auto"},
        source=_TUNING,
    ),
    Remedy(
        "pixel by pixel",
        WORKLOAD,
        {},
        "work",
        keys={"channels_last": True},
        source="https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
    ),
    Remedy(
        "activations are kept",
        WORKLOAD,
        {},
        "work",
        keys={"checkpointing": "none"},
        source="https://docs.pytorch.org/docs/stable/checkpoint.html",
    ),
    Remedy(
        "balanced split",
        WORKLOAD,
        {},
        "transfer",
        keys={"split": "balanced"},
        draws_otherwise=True,
        cost="timing the devices",
        source=_DDP,
    ),
    Remedy(
        "one average of the gradients",
        WORKLOAD,
        {},
        "transfer",
        keys={"sync_every": None},
        fits=_averages_often,
        source=_DDP,
    ),
    Remedy(
        "bf16",
        "autocast",
        {"dtype": "bfloat16"},
        "work",
        keys={"precision": "bf16"},
        fits=lambda given, around: given.get("precision", "'fp32'") in ("'fp32'", "'tf32'"),
        changes_numerics=True,
        source="https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Remedy(
        "TF32",
        "matmul",
        {"precision": "high"},
        "work",
        keys={"precision": "tf32"},
        fits=lambda given, around: given.get("precision", "'fp32'") == "'fp32'",
        on="GPUs",
        changes_numerics=True,
        source="https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html",
    ),
    *(
        Remedy(
            f"gradients in {kind}",
            "comm_hook",
            {"compress": kind},
            "transfer",
            keys={"comm_hook": kind},
            fits=lambda given, around: given.get("comm_hook", "'none'") == "'none'",
            group="compression",
            on="GPUs" if kind == "bf16" else "all",  # it takes NCCL or XCCL
            changes_numerics=True,
            write=(
                "",
                "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
                f"{{0}}.register_comm_hook(None, default_hooks.{kind}_compress_hook)",
            ),
            source="https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html",
        )
        for kind in ("bf16", "fp16")
    ),
)
"""All remedies, in the order in which they are shown before anything is measured."""

OF_LIBRARIES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (
            "transformers",
            LOADER,
        ): "TrainingArguments(dataloader_num_workers=…, dataloader_persistent_workers=True)",
        ("transformers", DDP): "TrainingArguments(ddp_bucket_cap_mb=…, ddp_find_unused_parameters=False)",
        ("transformers", OPTIMIZER): 'TrainingArguments(optim="adamw_torch_fused")',
        ("transformers", "compile"): "TrainingArguments(torch_compile=True)",
        ("accelerate", DDP): "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(…)])",
        ("lightning.pytorch", DDP): "Trainer(strategy=DDPStrategy(…))",
        ("pytorch_lightning", DDP): "Trainer(strategy=DDPStrategy(…))",
        ("lightning.fabric", DDP): "Fabric(strategy=DDPStrategy(…))",
        ("lightning_fabric", DDP): "Fabric(strategy=DDPStrategy(…))",
        ("timm", LOADER): "create_loader(num_workers=…, persistent_workers=True)",
        ("timm", OPTIMIZER): "create_optimizer_v2(foreach=True)",
    }
)
"""A library's own option, where it makes the call itself."""
OF_TRAINERS = ("per_device_train_batch_size", "num_train_epochs", "do_train", "output_dir")
"""Options of a program from which it is seen that it takes those of transformers' `TrainingArguments`."""
TRAINER_OPTIONS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (LOADER, "num_workers"): "dataloader_num_workers",
        (LOADER, "persistent_workers"): "dataloader_persistent_workers",
        (LOADER, "prefetch_factor"): "dataloader_prefetch_factor",
        (LOADER, "pin_memory"): "dataloader_pin_memory",
        (DDP, "bucket_cap_mb"): "ddp_bucket_cap_mb",
        (DDP, "find_unused_parameters"): "ddp_find_unused_parameters",
        (DDP, "static_graph"): "ddp_static_graph",
        ("matmul", "precision"): "tf32",
        ("autocast", "dtype"): "bf16",
        ("compile", ""): "torch_compile",
    }
)
"""Options of transformers' `TrainingArguments` by the argument that they set, also through accelerate.

Not every version has all of them, as `ddp_static_graph`.

Source: https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments
"""


@dataclass(frozen=True)
class Candidate:
    """A remedy at a call of this program, or as keys of this workload's job."""

    remedy: Remedy
    sites: tuple[CallSite, ...] = ()
    """The calls that it may change; empty: it changes none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    """Why it isn't tried; empty: it is."""
    keys: Settings = field(default_factory=dict)
    """Keys of a workload's job; empty for a program."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the program's command line that have its library make the change."""
    device_type: str = ""
    """torch's name of the program's devices."""
    replaces: bool = False
    """Whether the program or job states another value, which is a more likely loss than a default is."""

    @property
    def site(self) -> CallSite | None:
        """The first of the calls."""
        return next(iter(self.sites), None)

    def change_at(self, site: CallSite) -> Mapping[str, Any]:
        """What the rank has changed at a call, by the name of the argument; empty: nothing."""
        if not self.remedy.is_of(site):
            return {}
        if self.remedy.call in AT_DDP:
            return dict.fromkeys(self.applied & {*site.applied}, True)
        return {
            name: value
            for name, value in self.arguments.items()
            if name in site.applied and any(given.get(name) != repr(value) for given in site.all_given)
            if value is not False or any(name in given for given in site.all_given)
        }

    @property
    def settings(self) -> Settings:
        """The job's settings that apply it."""
        if self.keys:
            return self.keys
        if self.options:
            return {"options": self.options}
        if self.remedy.call == "env":
            return {"env": self.arguments}
        return {"calls": {self.remedy.call: self.arguments}}

    @property
    def applied(self) -> frozenset[str]:
        """The names that the rank notes as applied at the call."""
        return frozenset({self.remedy.call} if self.remedy.call in AT_DDP else self.arguments)

    @property
    def code(self) -> str:
        """The change as one would write it: `DataLoader(num_workers=2, persistent_workers=True)`."""
        if self.keys:
            return ", ".join(
                f"{key}: {flow_text(value)}" if value is not None else f"no {key}"
                for key, value in self.keys.items()
            )
        if self.options:
            return options_text(self.options)
        value = next(iter(self.arguments.values()), "")
        match self.remedy.call:
            case "env":
                return " ".join(f"{name}={value}" for name, value in self.arguments.items())
            case "cudnn":
                return "torch.backends.cudnn.benchmark = True"
            case "matmul":
                return f'torch.set_float32_matmul_precision("{value}")'
            case "compile":
                return "model.compile()"
            case "autocast":
                return f'torch.autocast("{self.device_type}", dtype=torch.{value})'
            case "comm_hook":
                return f"model.register_comm_hook(None, default_hooks.{value}_compress_hook)"
        names = dict.fromkeys(site.name for site in self.sites) or {self.remedy.call: None}
        new = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        return ", ".join(f"{name}({new})" for name in names)


def candidates(
    sites: Sequence[CallSite],
    around: Surroundings,
    shares: Mapping[Part, float],
    remedies: Iterable[Remedy] = REMEDIES,
) -> Iterator[Candidate]:
    """The remedies that would change something in this program or workload, each with why it isn't tried.

    Args:
        sites: the calls that it makes.
        around: the device and its cores.
        shares: of the parts in a step, in percent; a part that is missing wasn't recorded.
    """
    workload = next((site for site in sites if site.name == WORKLOAD), None)
    if workload is not None:
        yield from _of_workload(workload, around, shares, remedies)
        return
    if any(site.library == "transformers" for site in sites):  # whose Trainer has accelerate make its model
        callers = {"accelerate": "transformers"}
        sites = [replace(site, library=callers.get(site.library, site.library)) for site in sites]
    for remedy in remedies:
        found = _sites_of(remedy, sites)
        if not found and remedy.call not in OF_PROGRAM:
            continue
        calls = [replace(site, given=given) for site in found for given in site.all_given]
        fits = [remedy.fits(given, around) for given in ([call.given for call in calls] or [{}])]
        stated = remedy.arguments(around) if callable(remedy.arguments) else remedy.arguments
        if not any(fits):
            continue
        given = {key for call in calls for key in call.given}
        # A keyword that is False only undoes what a call gives.
        arguments = {key: value for key, value in stated.items() if value is not False or key in given}
        replaces = remedy.call == "env" or any(key in given for key in arguments)
        is_users = any(site.is_users for site in found)
        if not is_users and (options := _trainer_options(remedy, arguments, sites, around)):
            refusal = _refusal(remedy, None, around, shares)
            yield Candidate(remedy, (), arguments, refusal, options=options, replaces=replaces)
            continue
        others = [call for call, is_fit in zip(calls, fits, strict=False) if not is_fit]
        refusal = _refusal(remedy, next(iter(found), None), around, shares) or _replaced(others, stated)
        yield Candidate(remedy, found, arguments, refusal, device_type=around.device_type, replaces=replaces)


def _replaced(sites: Iterable[CallSite], arguments: Mapping[str, Any]) -> str:
    """What a remedy, which changes all calls of its kind, would replace at these; empty: nothing."""
    for site in sites:
        for key, value in arguments.items():
            if (stated := site.given.get(key, repr(value))) != repr(value):
                return f"it would replace {key}={stated} at {Path(site.file).name}:{site.line}, too"
    return ""


def options_text(options: Mapping[str, str]) -> str:
    """They as a command line has them."""
    return " ".join(f"--{name} {value}" for name, value in options.items())


def _trainer_options(
    remedy: Remedy, arguments: Mapping[str, Any], sites: Sequence[CallSite], around: Surroundings
) -> dict[str, str]:
    """The options of a Trainer that make this change; empty: the program has none, or not for all of it."""
    if not any(site.library == "transformers" for site in sites):
        return {}
    found = {TRAINER_OPTIONS.get((remedy.call, name), ""): value for name, value in arguments.items()}
    if not arguments:
        found = {TRAINER_OPTIONS.get((remedy.call, ""), ""): True}
    is_switch = remedy.call in OF_PROGRAM or remedy.call in AT_DDP
    if not found.keys() <= around.trainer_options:
        return {}
    return {name: str(is_switch or value) for name, value in found.items()}


def _of_workload(
    site: CallSite, around: Surroundings, shares: Mapping[Part, float], remedies: Iterable[Remedy]
) -> Iterator[Candidate]:
    given = site.given
    for remedy in remedies:
        keys = remedy.keys(around) if callable(remedy.keys) else remedy.keys
        changes = all(key in given and given[key] != repr(value) for key, value in keys.items())
        if "comm_hook" in keys:  # gpurun's own in bf16 takes every backend
            remedy = replace(remedy, on="all")
        if keys and changes and remedy.fits(given, around):
            refusal = _refusal(remedy, None, around, shares)
            replaces = not around.stated.isdisjoint(keys)
            yield Candidate(remedy, refusal=refusal, keys=keys, replaces=replaces)


def _sites_of(remedy: Remedy, sites: Sequence[CallSite]) -> tuple[CallSite, ...]:
    """The calls that a remedy changes: the user's own, or else the first of a library's."""
    mine = tuple(site for site in sites if remedy.is_of(site))
    return tuple(site for site in mine if site.is_users) or mine[:1]


def _refusal(
    remedy: Remedy, site: CallSite | None, around: Surroundings, shares: Mapping[Part, float]
) -> str:
    here = "CPUs" if around.device_type == CPU.name else "GPUs"
    if remedy.on not in ("all", here):
        return f"for {remedy.on} only"
    if remedy.changes_numerics and not around.numerics:
        return CHANGES_NUMERICS
    if site is not None and not site.is_users:
        own = OF_LIBRARIES.get((site.library, remedy.call))
        return f"{site.library or 'a library'} makes the call{f'; {own}' if own else ''}"
    share = shares.get(remedy.part)
    if share is not None and share < LEAST_GAIN_PERCENT:
        return f"{PARTS[remedy.part]} takes {format_number(share, 1)} % of a step"
    return ""


def merged(chosen: Iterable[Candidate]) -> Settings:
    """The settings of several remedies at once."""
    found: dict[str, Any] = {}
    for candidate in chosen:
        for setting, value in candidate.settings.items():
            if candidate.keys:
                found[setting] = value
                continue
            own = found.setdefault(setting, {})
            if setting == "calls":
                for call, arguments in value.items():
                    own[call] = {**own.get(call, {}), **arguments}
            else:
                own.update(value)
    return found
