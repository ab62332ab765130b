"""A job trains a workload or runs a program; which keys belong to which."""

from collections.abc import Iterator

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.draft import Draft
from gpurun.launcher.jobfile.model import (
    OF_PROGRAMS,
    OF_WORKLOADS,
    ROUNDS,
    VARIED_BY_PROGRAMS,
    Compare,
    JobSpec,
)
from gpurun.launcher.jobfile.yaml.tree import Path
from gpurun.launcher.machine.accelerators import accelerator_of

KINDS = ("workload", "script", "module")
"""Of these keys a job has exactly one."""

_HINTS = {
    "workload": "`workload: gpt` trains a small GPT, `train.py:build` is your own; `script: train.py` runs a "
    "program as it is",
}


def find_kind_mistakes(draft: Draft) -> Iterator[Problem]:
    """None or several of `workload`, `script` and `module`, and keys that belong to another kind of job."""
    spec = draft.spec
    yield from _empty(draft)
    stated = [key for key in KINDS if getattr(spec, key) is not None]
    if not stated:
        if all(draft.knows((key,)) and key not in spec.stated for key in KINDS):
            yield spec.problem(("workload",), "the key `workload` is missing", _HINTS["workload"])
    elif len(stated) > 1:
        message = f"`{stated[1]}` and `{stated[0]}` exclude each other: a job runs one thing"
        yield spec.key_problem((stated[1],), message, "delete one of them")
    if stated == ["workload"] or not stated:
        yield from _foreign_to_workloads(draft)
    elif "workload" not in stated:
        yield from _foreign_to_programs(spec)
        yield from _shared_gpu(draft)


def _empty(draft: Draft) -> Iterator[Problem]:
    """Keys without a value, which isn't the same as no key."""
    expected = {
        "workload": "the name of a workload",
        "script": "the path of a Python file",
        "module": "the name of a module",
        "global_batch": "a whole number",
    }
    for key, what in expected.items():
        if key in draft.spec.stated and getattr(draft.spec, key) is None and draft.knows((key,)):
            yield draft.spec.problem((key,), f"`{key}`: expected {what}, got nothing")


def _foreign_to_workloads(draft: Draft) -> Iterator[Problem]:
    spec = draft.spec
    if spec.workload is None:
        return
    for path in _stated(spec, OF_PROGRAMS, OF_PROGRAMS, frozenset()):
        message = f"`{_dotted(path)}` is for programs (`script`, `module`), not for workloads"
        yield spec.key_problem(path, message, "a workload takes `params`")


def _foreign_to_programs(spec: JobSpec) -> Iterator[Problem]:
    if spec.global_batch == "max":
        message = "`global_batch: max` is for workloads: a program's batch isn't known"
        yield spec.problem(("global_batch",), message, "state the number, or leave it out")
    everything = frozenset(Compare.keys)
    for path in _stated(spec, OF_WORKLOADS, everything - VARIED_BY_PROGRAMS, ROUNDS):
        message = f"`{_dotted(path)}` is for workloads: a program decides that itself"
        yield spec.key_problem(path, message, _instead(str(path[-1])))


def _instead(key: str) -> str | None:
    if key in ROUNDS:
        return "all its steps count; `steps.launches` says how often it is run"
    return "vary `args`, `env` or `device_count`" if key != "gradient_check" else None


def _stated(
    spec: JobSpec, top: frozenset[str], varied: frozenset[str], steps: frozenset[str]
) -> Iterator[Path]:
    """The places of those of these keys that the job states."""
    yield from ((key,) for key in JobSpec.keys if key in top & spec.stated)
    yield from (("compare", key) for key in varied & spec.compare.stated)
    if spec.baseline is not None:
        yield from (("baseline", key) for key in varied & spec.baseline.stated)
    yield from (("steps", key) for key in steps & spec.steps.stated)


def _shared_gpu(draft: Draft) -> Iterator[Problem]:
    """Rank r of a program takes the GPU `cuda:r` of those that it sees: there must be one of its own."""
    devices = draft.spec.devices
    if not isinstance(devices, tuple) or not draft.knows(("devices",)) or accelerator_of(devices[0]).is_host:
        return
    if twice := [name for name in dict.fromkeys(devices) if devices.count(name) > 1]:
        message = f"{twice[0]} stands twice: every rank of a program takes a GPU of its own"
        yield draft.spec.problem(("devices",), message, "name each GPU once")


def _dotted(path: Path) -> str:
    return ".".join(str(step) for step in path)
