"""What makes a job one of its kind, and keys that belong to another kind."""

from collections.abc import Iterator

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.kinds import KIND_KEYS, PROGRAM_KEYS, JobKind
from gpurun.launcher.jobfile.model import JobSpec, Steps, key_settings
from gpurun.launcher.jobfile.program_values import MODULE_NAME, SCRIPT_PATH
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.section import Section, Setting
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.jobfile.values import WORKLOAD_NAME
from gpurun.launcher.jobfile.yaml.tree import REMOVE_ONE
from gpurun.launcher.machine.accelerators import accelerator_of

_HINTS = {
    "workload": "add `workload: gpt` (built in), `workload: train.py:build` (a function of yours) or "
    "`script: train.py` (a program)",
}


def find_kind_mistakes(draft: Draft) -> Iterator[Problem]:
    """None or several of `workload`, `script` and `module`, and keys that belong to another kind of job."""
    spec = draft.spec
    yield from _empty(draft)
    stated = [key for key in KIND_KEYS if getattr(spec, key) is not None]
    if not stated:
        if all(draft.knows((key,)) and key not in spec.stated for key in KIND_KEYS):
            yield spec.problem(("workload",), "missing key `workload`", _HINTS["workload"])
    elif len(stated) > 1:
        message = f"`{stated[1]}` and `{stated[0]}` are mutually exclusive: a job runs only one of them"
        yield spec.key_problem((stated[1],), message, REMOVE_ONE)
    if len({key in PROGRAM_KEYS for key in stated}) == 1:
        yield from _foreign(spec, spec.kind)
        if spec.kind.runs_program:
            yield from _max_of_program(spec)
            yield from _shared_gpu(draft)


def _empty(draft: Draft) -> Iterator[Problem]:
    """Keys without a value, which isn't the same as no key."""
    expected = {
        "workload": WORKLOAD_NAME,
        "script": SCRIPT_PATH,
        "module": MODULE_NAME,
        "global_batch": "a whole number",
    }
    for key, what in expected.items():
        if key in draft.spec.stated and getattr(draft.spec, key) is None and draft.knows((key,)):
            yield draft.spec.problem((key,), f"`{key}`: expected {what}, got null")


def _foreign(spec: JobSpec, kind: JobKind) -> Iterator[Problem]:
    """Keys that the job states and that its kind doesn't have."""
    for path, setting in _stated(spec):
        is_compared = path[0] in ("compare", "baseline")
        if kind not in setting.kinds or (is_compared and kind not in setting.varies_for):
            yield spec.key_problem(path, f"`{'.'.join(path)}` {kind.refusal}", setting.instead or None)


def _stated(spec: JobSpec) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """The places of keys that the job states and that not every kind of job has."""
    sections: tuple[tuple[tuple[str, ...], Section | None, dict[str, Setting]], ...] = (
        ((), spec, {key: one for key, one in key_settings(JobSpec).items() if key not in KIND_KEYS}),
        (("compare",), spec.compare, dict(SETTINGS)),
        (("baseline",), spec.baseline, dict(SETTINGS)),
        (("steps",), spec.steps, key_settings(Steps)),
    )
    for place, section, settings in sections:
        stated = section.stated if section else frozenset()
        yield from (((*place, key), one) for key, one in settings.items() if key in stated)


def _max_of_program(spec: JobSpec) -> Iterator[Problem]:
    if spec.global_batch == "max":
        message = "`global_batch: max` needs a workload: gpurun can't change a program's batch"
        yield spec.problem(("global_batch",), message, "set a number, or remove the key")


def _shared_gpu(draft: Draft) -> Iterator[Problem]:
    """Rank r of a program takes the GPU `cuda:r` of those that it sees: there must be one of its own."""
    devices = draft.spec.devices
    if not isinstance(devices, tuple) or not draft.knows(("devices",)) or accelerator_of(devices[0]).is_host:
        return
    if twice := [name for name in dict.fromkeys(devices) if devices.count(name) > 1]:
        message = f"{twice[0]} is listed twice, but each rank of a program needs its own GPU"
        yield draft.spec.problem(("devices",), message, "list each GPU once")
