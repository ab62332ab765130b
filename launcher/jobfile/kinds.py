"""The kinds of job: one table of what each has and does; and what is known of the built-in workloads.

A job trains a workload, runs a program as it is, or measures a micro-benchmark. Whatever depends on that
looks up a property here. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import gpurun
from gpurun.launcher.jobfile.yaml.describe import did_you_mean, shorten
from gpurun.launcher.strategies import PROGRAM as PROGRAM_STRATEGY
from gpurun.workloads.registry import BUILTINS, Builtin


@dataclass(frozen=True)
class JobKind:
    """The properties of all jobs of a kind."""

    name: str
    title: str
    """Over a list of its workloads."""
    trains: bool
    """Whether gpurun makes its training steps: it needs a batch, and can check gradients and leave
    communication out."""
    is_ranked: bool
    """Whether its variants are compared, so that one of them can be the fastest."""
    runs_program: bool
    """Whether its processes run a program of the user's, not gpurun's worker: then variants share none, have
    no rounds whose length gpurun knows, and no timeout unless the job gives one."""
    refusal: str
    """The message for a key that it doesn't have."""
    example: str
    """A line of its job file that makes a second variant."""


TRAINING = JobKind(
    "training",
    "Training",
    trains=True,
    is_ranked=True,
    runs_program=False,
    refusal="applies to programs only (`script`, `module`)",
    example='compare: {split: [even, "3:1"]}',
)
PROGRAM = JobKind(
    "program",
    "Programs",
    trains=False,
    is_ranked=True,
    runs_program=True,
    refusal="applies to workloads only",
    example='compare: {args: [[--batch, "64"], [--batch, "128"]]}',
)
MICRO_BENCHMARK = JobKind(
    "micro-benchmark",
    "Micro-benchmarks",
    trains=False,
    is_ranked=False,
    runs_program=False,
    refusal="doesn't apply to micro-benchmarks",
    example="compare: {precision: [fp32, bf16]}",
)

JOB_KINDS: Mapping[str, JobKind] = MappingProxyType(
    {kind.name: kind for kind in (TRAINING, PROGRAM, MICRO_BENCHMARK)}
)

WORKLOADS = frozenset({TRAINING, MICRO_BENCHMARK})
"""Kinds of job that name a workload."""
EVERY_KIND = frozenset(JOB_KINDS.values())

PROGRAM_KEYS = ("script", "module")
KIND_KEYS = ("workload", *PROGRAM_KEYS)
"""The keys of which a job has exactly one."""


def workload_kind(workload: str | None) -> JobKind:
    """The kind of a job with this workload; functions of the user's all train."""
    builtin = BUILTINS.get(workload or "")
    return JOB_KINDS[builtin.kind] if builtin else TRAINING


def variant_kind(strategy: str, workload: str) -> JobKind:
    """The kind of job that a variant belongs to."""
    return PROGRAM if strategy == PROGRAM_STRATEGY else workload_kind(workload)


_PACKAGES = Path(gpurun.__file__).parents[1]


def no_such_builtin(name: str) -> tuple[str, str]:
    """The message and the hint for a name that no built-in workload has."""
    hint = did_you_mean(name, BUILTINS) or f"built-in workloads: {', '.join(BUILTINS)}"
    return f"there is no built-in workload `{shorten(name)}`", hint


def builtin_file(name: str) -> Path:
    """The source file of a built-in workload."""
    return _PACKAGES.joinpath(*BUILTINS[name].module.split(".")).with_suffix(".py")


def is_workload(name: str) -> bool:
    """Whether it may be one: a built-in, or a function of the user's, wherever that is."""
    return ":" in name or name in BUILTINS


def builtin_named(name: str | None) -> Builtin | None:
    """The built-in workload of that name; `None` for a program and for functions of the user's."""
    return BUILTINS.get(name or "")


def default_batch(name: str | None) -> int | None:
    """The global batch that a workload has where the job gives none; most have none."""
    builtin = builtin_named(name)
    batch = builtin.global_batch if builtin else None
    return batch if workload_kind(name).trains else 1


def default_strategy(name: str) -> str | None:
    """The strategy of a micro-benchmark where the job names none."""
    builtin = builtin_named(name)
    return builtin.strategies[0] if builtin and builtin.strategies else None
