"""Mistakes in `workload` and `params`, found without running any of the workload's code."""

import ast
import importlib.machinery
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.builtins import (
    builtin_file,
    builtin_function,
    builtin_workloads,
    default_strategy,
    is_probe,
)
from gpurun.launcher.jobfile.checks.builtin_values import missing_files, why_refused, why_refused_together
from gpurun.launcher.jobfile.checks.signature import Param, Signature, names_of, read_module, signature_of
from gpurun.launcher.jobfile.draft import Draft
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.yaml.describe import describe, did_you_mean, shorten
from gpurun.launcher.jobfile.yaml.tree import Path as KeyPath
from gpurun.launcher.jobfile.yaml.tree import Unreadable

_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("text", (str,)),
    "bool": ("true or false", (bool,)),
    "None": ("nothing", (type(None),)),
}
"""What a simple annotation allows, in words and as the types of a job's values."""

_TRAINING_KEYS = ("global_batch", "split", "accumulate", "compile", "channels_last")
"""Keys that say how training steps are made."""

_WITHOUT_PRECISION = {"allreduce": "its sums are of float32", "h2d": "it copies bytes"}
"""Micro-benchmarks that compute nothing in the job's precision, and why."""


def find_workload_mistakes(draft: Draft, job_dir: Path) -> Iterator[Problem]:
    """A workload that is not there, and params that it doesn't take."""
    for place, workload in draft.placed("workload"):
        if workload is None:  # the job runs a program
            continue
        # Rules beneath speak of one workload: a job that compares several is checked as one job for each.
        one = replace(draft, spec=replace(draft.spec, workload=workload))
        yield from _mistakes_of(one, job_dir, place)


def _mistakes_of(draft: Draft, job_dir: Path, place: KeyPath) -> Iterator[Problem]:
    """Mistakes in the draft's one workload, which stands at `place`, and in its params."""
    spec = draft.spec
    assert spec.workload is not None
    source, colon, function = spec.workload.rpartition(":")
    if not colon and spec.workload in builtin_workloads():
        module = read_module(builtin_file(spec.workload))
        yield from _wrong_params(draft, module, builtin_function(spec.workload))
        yield from _wrong_for_probes(draft, place)
    elif not colon:
        known = builtin_workloads()
        hint = did_you_mean(spec.workload, known) or f"built in are {', '.join(known)}"
        message = f"there is no built-in workload `{shorten(spec.workload)}`"
        yield spec.problem(place, message, hint)
    elif not source.endswith(".py"):
        yield from _missing_module(spec, job_dir, source.partition(".")[0], place)
    elif not _is_file(job_dir / source):
        hint = "it is looked for beside the job file"
        yield spec.problem(place, f"there is no file {source[:200]}", hint)
    else:
        module = read_module(job_dir / source)
        yield from _missing_function(spec, module, function, place)
        yield from _wrong_params(draft, module, function)


def _wrong_for_probes(draft: Draft, place: KeyPath) -> Iterator[Problem]:
    """Keys of training steps in the job of a micro-benchmark, which has none."""
    spec = draft.spec
    if not is_probe(spec.workload):
        return
    if place != ("workload",):
        message = f"{spec.workload} is a micro-benchmark: it has a job of its own"
        yield spec.problem(place, message, f"workload: {spec.workload}, and nothing under `compare.workload`")
    own = default_strategy(spec.workload)
    for path, strategy in draft.placed("strategy"):
        if strategy not in (own, "single" if own == "dp" else own):
            yield spec.problem(path, f"{spec.workload} runs as {own}, not as {strategy}", "leave it out")
    foreign = {key: f"{spec.workload} is a micro-benchmark: it has no `{key}`" for key in _TRAINING_KEYS}
    if reason := _WITHOUT_PRECISION.get(str(spec.workload)):
        foreign["precision"] = f"{spec.workload} has no `precision`: {reason}"
    for key, message in foreign.items():
        is_default = getattr(spec, key) == getattr(JobSpec, key)
        is_varied = bool(getattr(spec.compare, key))
        if (not is_default or is_varied) and draft.knows((key,)):
            path = ("compare", key) if is_varied else (key,)
            yield spec.key_problem(path, message, "leave it out")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _missing_module(spec: JobSpec, job_dir: Path, package: str, place: KeyPath) -> Iterator[Problem]:
    """Only a top-level name can be looked for: finding one inside of a package would import the package."""
    beside = [str(job_dir.resolve()), str(Path.cwd())]
    try:
        is_there = importlib.util.find_spec(package) or importlib.machinery.PathFinder.find_spec(
            package, beside
        )
    except (ImportError, ValueError):  # such as a module that runs without a spec of its own
        return
    if not is_there:
        message = f"there is no module `{shorten(package)}`"
        yield spec.problem(place, message, "it must be installed, or lie beside the job file")


def _missing_function(
    spec: JobSpec, module: ast.Module | None, function: str, place: KeyPath
) -> Iterator[Problem]:
    names = names_of(module) if module else None
    if names and names.is_complete and not names.bound[function]:
        listed = ", ".join(names.functions[:8])
        hint = did_you_mean(function, names.functions) or (f"its functions are {listed}" if listed else None)
        file = str(spec.workload).rpartition(":")[0]
        message = f"{file[:200]} has no function `{shorten(function)}`"
        yield spec.problem(place, message, hint)


def _wrong_params(draft: Draft, module: ast.Module | None, function: str) -> Iterator[Problem]:
    signature = signature_of(module, function) if module else None
    if signature is None:
        return
    for place, given in given_params(draft):
        found = [
            *_wrong_names(draft.spec, signature, place, given),
            *_wrong_values(draft.spec, signature, place, given),
        ]
        yield from found or _wrong_together(draft.spec, place, given)
    yield from _missing_params(draft, signature)


def check_files(spec: JobSpec, job_dir: Path) -> None:
    """Looks for the files and folders that params of built-in workloads name, on the machine of the run.

    A job for several nodes is left to them: each has its own, and this one may have none.

    Raises:
        SpecError: they are not all there.
    """
    draft = Draft(spec)
    if spec.nodes > 1 or any(name not in builtin_workloads() for _, name in draft.placed("workload")):
        return
    problems = [
        spec.problem((*place, name), text)
        for place, given in given_params(draft)
        for name, text in missing_files(given, job_dir)
    ]
    if problems:
        raise SpecError(*problems)


def given_params(draft: Draft) -> list[tuple[KeyPath, Mapping[str, Any]]]:
    """All params that stand in the job, with their places."""
    found: list[tuple[KeyPath, Mapping[str, Any] | None]] = [(("params",), draft.spec.params)]
    found += [(("compare", "params", at), given) for at, given in enumerate(draft.spec.compare.params)]
    found += [(("baseline", "params"), draft.spec.baseline.params if draft.spec.baseline else None)]
    return [(place, given) for place, given in found if given and draft.knows(place)]


def _wrong_names(
    spec: JobSpec, signature: Signature, place: KeyPath, given: Mapping[str, Any]
) -> Iterator[Problem]:
    known = [param.name for param in signature.params]
    for name in given:
        if name not in known and not signature.is_open:
            message = f"{shorten(str(spec.workload))} has no parameter `{shorten(name)}`"
            hint = "; ".join(text for text in (did_you_mean(name, known), _takes(known)) if text)
            yield spec.key_problem((*place, name), message, hint)


def _wrong_values(
    spec: JobSpec, signature: Signature, place: KeyPath, given: Mapping[str, Any]
) -> Iterator[Problem]:
    is_builtin = spec.workload in builtin_workloads()
    for param in signature.params:
        if param.name in given and not _is_allowed(given[param.name], param):
            path = ".".join([*(str(step) for step in place if isinstance(step, str)), param.name])
            message = f"`{path}`: expected {_expected(param)}, got {describe(given[param.name])}"
            hint = did_you_mean(str(given[param.name]), param.choices) if param.choices else None
            yield spec.problem((*place, param.name), message, hint)
        elif is_builtin and (refusal := why_refused(param, given.get(param.name))):
            message = f"`{param.name}` of {spec.workload} {refusal}, but it is {given[param.name]}"
            yield spec.problem((*place, param.name), message)
        elif param.name in given and param.is_per_device and spec.workload in builtin_workloads():
            yield from _wrong_per_device(spec, (*place, param.name), given[param.name])


def _wrong_per_device(spec: JobSpec, path: KeyPath, given: Any) -> Iterator[Problem]:
    """What is no number, or below 0, where there is one for all devices or a list with one for each."""
    values = given if isinstance(given, list | tuple) else [given]
    wrong = [value for value in values if not isinstance(value, Unreadable) and not _is_amount(value)]
    if wrong:
        name = ".".join(str(step) for step in path if isinstance(step, str))
        where = " in the list" if isinstance(given, list | tuple) else ""
        message = (
            f"`{name}`: expected a number, 0 or more, or a list with one for each device,"
            f" got {describe(wrong[0])}{where}"
        )
        yield spec.problem(path, message)


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _wrong_together(spec: JobSpec, place: KeyPath, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Params of a built-in workload that don't go together, in a variant that has them all."""
    if place[0] == "baseline" or (place == ("params",) and spec.compare.params):
        return
    if refusal := why_refused_together(str(spec.workload), {**spec.params, **given}):
        named = [name for name in given if name in refusal.replace(",", " ").split()]
        yield spec.problem((*place, *named[:1]), f"params of {spec.workload}: {refusal}")


def _expected(param: Param) -> str:
    """What a parameter takes, in words."""
    if param.choices:
        return " or ".join(param.choices)
    return " or ".join(words for name, (words, _) in _TYPES.items() if name in param.types)


def _is_allowed(value: Any, param: Param) -> bool:
    """A whole number may stand for any number, but `true` for none, though Python counts it as one."""
    if isinstance(value, Unreadable) or not param.types:
        return True
    if param.choices and isinstance(value, str):
        return value in param.choices
    return any(type(value) in _TYPES[name][1] for name in param.types)


def _missing_params(draft: Draft, signature: Signature) -> Iterator[Problem]:
    """Params without a default, once where no variant has them, else at the items that lack them."""
    spec, several = draft.spec, draft.values("params")
    if several is None or not draft.knows(("params",)):
        return
    needed = {param.name for param in signature.params if param.is_required} - spec.params.keys()
    nowhere = needed - {name for given in several for name in given}
    place = ("params",) if "params" in spec.stated else ("workload",)
    lacking: list[tuple[KeyPath, set[str]]] = [(place, nowhere)]
    for position, given in enumerate(spec.compare.params):
        lacking.append((("compare", "params", position), needed - nowhere - given.keys()))
    known = [param.name for param in signature.params]
    for path, names in lacking:
        if names:
            listed = ", ".join(f"`{name}`" for name in known if name in names)
            yield spec.problem(
                path, f"{shorten(str(spec.workload))} needs {listed} under `params`", _takes(known)
            )


def _takes(known: list[str]) -> str:
    return f"it takes {', '.join(known)}" if known else "it takes none"
