"""Mistakes in `workload`, `params`, `script` and `module`, found without running any of their code."""

import ast
import importlib.machinery
import importlib.util
import os
import pkgutil
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.kinds import no_such_builtin, workload_kind
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.params import (
    Param,
    Signature,
    TopLevelNames,
    names_of,
    needs,
    own_nodes,
    read_module,
    refused,
    returned_by,
    signature_of,
    signature_of_builtin,
    takes,
    wrong_params,
)
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.jobfile.yaml.describe import describe, did_you_mean, nearest, shorten
from gpurun.launcher.jobfile.yaml.tree import Path as KeyPath
from gpurun.launcher.jobfile.yaml.tree import Unreadable
from gpurun.launcher.rundir.paths import holds_main, is_file
from gpurun.workloads.limits import PRESETS, not_there, path_of, refusal, shape_of
from gpurun.workloads.registry import BUILTINS, Builtin

INSTALL_IT = "install it, or put it next to the job file"
"""The advice about a module that isn't there."""

MAX_BYTES = 2_000_000
"""A longer file takes seconds to compile and is no program that a person wrote."""


def find_program_mistakes(draft: Draft, job_dir: Path) -> Iterator[Problem]:
    """A program that is not there, is not Python, or has a syntax error."""
    spec = draft.spec
    if spec.script is not None and draft.knows(("script",)):
        yield from _script_mistakes(spec, job_dir)
    if spec.module is not None and draft.knows(("module",)):
        yield from _module_mistakes(spec, spec.module, job_dir)


def _script_mistakes(spec: JobSpec, job_dir: Path) -> Iterator[Problem]:
    script = spec.script or ""
    path = job_dir / script
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except OSError:  # a name that is too long
        is_file = is_dir = False
    if is_dir and holds_main(path):
        yield from _not_python(spec, "script", path / "__main__.py", f"{script}/__main__.py")
    elif is_dir:
        message = f"{shorten(script)} is a directory without `__main__.py`"
        yield spec.problem(("script",), message, "name a Python file in it")
    elif not is_file and os.path.exists(path):
        yield spec.problem(("script",), f"{shorten(script)} is a pipe or a device", "name a Python file")
    elif not is_file:
        hint = _command_line(spec, script, job_dir) or _near_file(script, job_dir)
        yield spec.problem(("script",), _no_file(script), hint)
    elif path.suffix == ".ipynb":  # JSON is Python too, and does nothing
        hint = f"make one of it: jupyter nbconvert --to script {shlex.quote(script)}"
        yield spec.problem(("script",), f"{shorten(script)} is a notebook, not a program", hint)
    elif path.suffix in (".yaml", ".yml"):  # a short one may be Python too: `workload: mlp` is an annotation
        message = f"{shorten(script)} is a job file, not a program"
        yield spec.problem(("script",), message, f"to run it: gpurun {shlex.quote(script)}")
    else:
        yield from _not_python(spec, "script", path, script)


def _command_line(spec: JobSpec, text: str, job_dir: Path) -> str | None:
    """How to write a whole command line, `python train.py --epochs 3`, of a program that is there."""
    words = text.split()
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if at is None or len(words) < 2 or not (job_dir / words[at]).is_file():
        return None
    if not _has_job_file(spec):
        return f"to pass arguments: gpurun run {words[at]} -- {' '.join(words[at + 1 :])}".rstrip(" -")[:120]
    args = f" and `args: [{', '.join(words[at + 1 :])}]`" if words[at + 1 :] else ""
    return f"write `script: {words[at]}`{args}"[:120]


def _near_file(name: str, job_dir: Path) -> str:
    """The hint for a Python file that isn't there: a name that is near, or the base of relative paths."""
    path, expanded = job_dir / name, os.path.expandvars(os.path.expanduser(name))
    if expanded != name:
        return f"a job file has neither `~` nor variables: write {shorten(expanded)}"
    try:
        stems = [file.stem for file in path.parent.glob("*.py")]
    except OSError:
        stems = []
    near = nearest(path.stem, stems)  # without the ending, which would make any two names alike
    if near is None and not path.parent.is_dir():
        return f"the directory {shorten(str(Path(name).parent))} is missing too"
    if near is not None:
        return f"did you mean `{shorten(str(Path(name).with_name(f'{near}.py')))}`?"
    return f"relative paths are resolved from {job_dir.resolve()}"


def _module_mistakes(spec: JobSpec, module: str, job_dir: Path) -> Iterator[Problem]:
    """Looks for the module as `python -m` does, but never imports the packages around it."""
    found: ModuleSpec | None = None
    places: Sequence[str] | None = [str(job_dir.resolve()), *sys.path]
    names = module.split(".")
    for end in range(1, len(names) + 1):
        name = ".".join(names[:end])
        found = _found_at(name, places) if places is not None else None
        if found is None:
            hint = _near_module(name, places) or _how_to_find(spec)
            yield spec.problem(("module",), _no_module(name), hint)
            return
        places = found.submodule_search_locations
    if found is not None and places is not None:
        main = importlib.machinery.PathFinder.find_spec(f"{module}.__main__", places)
        if main is None:
            message = f"`{shorten(module)}` is a package without `__main__.py`: it can't be run"
            yield spec.problem(("module",), message, "name a module in it")
            return
        found = main
    if found is not None and found.origin and found.origin.endswith(".py"):
        yield from _not_python(spec, "module", Path(found.origin), found.origin)


def _found_at(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """The module in those places; a top-level one also where an editable installation has it.

    Those have finders of their own, which `PathFinder` doesn't ask. To find a top-level name imports nothing.
    """
    found = importlib.machinery.PathFinder.find_spec(name, places)
    if found is None and "." not in name:
        with suppress(ImportError, ValueError):  # such as a module that runs without a spec of its own
            found = importlib.util.find_spec(name)
    return found


def _has_job_file(spec: JobSpec) -> bool:
    return spec.source is None or bool(spec.source.root.mark.file)


def _how_to_find(spec: JobSpec) -> str:
    """The advice about a module that isn't there; with `-m` there's no job file to put it next to."""
    if _has_job_file(spec):
        return INSTALL_IT
    return "install it, or go to the directory that contains it: cd DIRECTORY"


def _near_module(name: str, places: Sequence[str] | None) -> str | None:
    """The module of the job's directory, or of that package, that may be meant."""
    package, dot, last = name.rpartition(".")
    near_ones = (places or ()) if package else (places or ())[:1]
    near = nearest(last, (module.name for module in pkgutil.iter_modules(near_ones)))
    if near:
        return f"did you mean `{package}{dot}{near}`?"
    if package:
        return f"`{shorten(package)}` has no module of that name"
    return None


def _not_python(spec: JobSpec, key: str, path: Path, name: str) -> Iterator[Problem]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return
        source = path.read_bytes()
    except OSError as error:
        yield spec.problem((key,), f"{shorten(name)} can't be read: {error.strerror}")
        return
    if not (fault := _syntax_error(source)) or holds_main(path):
        return
    first = source.partition(b"\n")[0].decode("utf-8", "replace")
    if first.startswith("#!") and "python" not in first:
        message = f"{shorten(name)} is no Python program: it begins with `{shorten(first)}`"
        yield spec.problem((key,), message, "name the Python program that it starts")
        return
    what, place = str(fault) or type(fault).__name__, [name[:200]]
    line: str | None = None
    if isinstance(fault, SyntaxError):
        what, line = fault.msg, shorten((fault.text or "").strip()) or None
        place += [str(number) for number in (fault.lineno, fault.offset) if number]
    yield spec.problem((key,), f"{':'.join(place)}: invalid Python: {what}", line)


def _syntax_error(source: bytes) -> Exception | None:
    """The error of the first mistake in a program; `None` where there is none. Compiles, runs nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes: the run will show them
            compile(source, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # null bytes; endless nesting
        return error
    return None


def _no_file(name: str) -> str:
    """The message about a file that a job names."""
    return f"there is no file {shorten(name)}"


def _no_module(name: str) -> str:
    """The message about a module that a job names."""
    return f"there is no module `{shorten(name)}`"


_GPT_SIZES = ("layers", "width", "heads", "context", "vocabulary")

_FILES: Mapping[str, str] = {"text": "text", "images": "image directory"}
"""Parameters that name a file or directory, and what to call it."""


def find_workload_mistakes(draft: Draft, job_dir: Path) -> Iterator[Problem]:
    """A workload that is not there, and params that it doesn't take."""
    for place, workload in draft.placed("workload"):
        if workload is None:  # the job runs a program
            continue
        # Rules beneath speak of one workload: a job that compares several is checked as one job for each.
        single = replace(draft, spec=replace(draft.spec, workload=workload))
        yield from _mistakes_of(single, job_dir, place)


def _mistakes_of(draft: Draft, job_dir: Path, place: KeyPath) -> Iterator[Problem]:
    """Mistakes in the draft's one workload, at `place`, and in its params."""
    spec = draft.spec
    assert spec.workload is not None
    yield from function_mistakes(spec, job_dir, place)
    yield from _wrong_params(draft, _signature(spec.workload, job_dir))
    if spec.workload in BUILTINS and not workload_kind(spec.workload).trains:
        yield from _wrong_for_micro_benchmarks(draft, BUILTINS[spec.workload], place)


def function_mistakes(spec: JobSpec, job_dir: Path, place: KeyPath) -> Iterator[Problem]:
    """A workload that isn't there, by its source; nothing is said of its params."""
    source, colon, function = str(spec.workload).rpartition(":")
    if not colon and spec.workload not in BUILTINS:
        yield spec.problem(place, *no_such_builtin(str(spec.workload)))
    elif source.endswith(".py") and not is_file(job_dir / source):
        yield spec.problem(place, _no_file(source), _near_file(source, job_dir))
    elif colon:
        if not source.endswith(".py"):
            yield from _missing_module(spec, job_dir, source.partition(".")[0], place)
        module = _module_of(source, job_dir)
        if module is not None and (names := names_of(module)).is_complete:
            yield from _missing_function(spec, module, names, function, place)
            yield from _iterable_dataset(spec, module, names, function, place)


def params_taken(workload: str | None, job_dir: Path) -> Sequence[str]:
    """The parameters that a workload takes under `params`, as far as its source shows them."""
    signature = _signature(workload or "", job_dir)
    return signature.names if signature else ()


def _signature(workload: str, job_dir: Path) -> Signature | None:
    source, _, function = workload.rpartition(":")
    if function in BUILTINS and not source:
        return signature_of_builtin(function)
    module = _module_of(source, job_dir) if source else None
    return signature_of(module, function) if module else None


def _module_of(source: str, job_dir: Path) -> ast.Module | None:
    """The source of a workload's file or module; `None` where it can't be read, or may be another one."""
    file = job_dir / source if source.endswith(".py") else _file_of_module(source, job_dir)
    return read_module(file) if file else None


def _file_of_module(name: str, job_dir: Path) -> Path | None:
    """The file that a rank would import, found without importing anything.

    Where the job's directory, this one and the installed packages have different ones, the ranks' `sys.path`
    decides; a package may decide by its `__path__` what is in it.
    """
    top, *inner = name.split(".")
    specs = _specs_of(top, job_dir)
    found = specs[0] if len({spec.origin for spec in specs}) == 1 else None
    for depth in range(len(inner)):
        places = found.submodule_search_locations if found else None
        if found is None or places is None or not _has_usual_path(found):
            return None
        found = importlib.machinery.PathFinder.find_spec(".".join((top, *inner[: depth + 1])), places)
    origin = found.origin if found else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _specs_of(package: str, job_dir: Path) -> list[ModuleSpec]:
    """A top-level name in each of the places where it may be found."""
    found = [
        importlib.machinery.PathFinder.find_spec(package, [str(place)])
        for place in (job_dir.resolve(), Path.cwd())
    ]
    with suppress(ImportError, ValueError):  # such as a module that runs without a spec of its own
        found.append(importlib.util.find_spec(package))
    return [spec for spec in found if spec is not None]


def _has_usual_path(package: ModuleSpec) -> bool:
    """Whether a package's own code leaves it to Python where its modules are."""
    init = read_module(Path(package.origin)) if package.origin else None
    if init is None:
        return False
    names = {node.id for node in ast.walk(init) if isinstance(node, ast.Name)}
    return "__path__" not in names and names_of(init).is_complete


def _wrong_for_micro_benchmarks(draft: Draft, builtin: Builtin, place: KeyPath) -> Iterator[Problem]:
    """Keys of training steps in the job of a micro-benchmark, which has none."""
    spec, name = draft.spec, draft.spec.workload
    if place != ("workload",):
        message = f"{name} is a micro-benchmark, which can't be compared with other workloads"
        yield spec.problem(place, message, f"run it in a job of its own: `workload: {name}`")
        return
    for path, strategy in draft.placed("strategy"):
        if strategy not in builtin.strategies:
            message = f"{name} runs as {builtin.strategies[0]}, not as {strategy}"
            key = ".".join(part for part in path if isinstance(part, str))
            which = f"`{key}`" if path == ("strategy",) else f"`{strategy}` from `{key}`"
            yield spec.problem(path, message, f"remove {which}")
    foreign = {
        key: f"{name} is a micro-benchmark: it has no `{key}`"
        for key, setting in SETTINGS.items()
        if setting.for_training
    }
    foreign |= {key: f"{name} has no `{key}`: {reason}" for key, reason in builtin.without.items()}
    for key, message in foreign.items():
        is_default = getattr(spec, key) == getattr(JobSpec, key)
        path = spec.place_of(key)
        if (not is_default or path != (key,)) and draft.knows((key,)):
            yield spec.key_problem(path, message, f"remove `{'.'.join(path)}`")


def _missing_module(spec: JobSpec, job_dir: Path, package: str, place: KeyPath) -> Iterator[Problem]:
    """Only a top-level name is looked for: what a package has inside, its own code may decide."""
    if not _specs_of(package, job_dir) and package not in sys.modules:
        yield spec.problem(place, _no_module(package), INSTALL_IT)


def _missing_function(
    spec: JobSpec, module: ast.Module, names: TopLevelNames, function: str, place: KeyPath
) -> Iterator[Problem]:
    file = str(spec.workload).rpartition(":")[0]
    listed = ", ".join(names.functions[:8])
    hint = did_you_mean(function, names.functions) or (f"its functions are {listed}" if listed else None)
    if not names.bound[function]:
        yield spec.problem(place, f"{file[:200]} has no function `{shorten(function)}`", hint)
    elif names.bound[function] == 1 and (line := _line_of_value(module, function)):
        message = f"`{shorten(function)}` in {file[:200]} is no function, but a value (line {line})"
        yield spec.problem(place, message, hint)
    elif names.bound[function] == 1 and (kind := _gives_no_workload(module, function)):
        message = f"`{shorten(function)}` in {file[:200]} {kind}, so calling it gives no workload"
        yield spec.problem(place, message, f"write it as a plain function: `def {shorten(function)}(…)`")


def _gives_no_workload(module: ast.Module, name: str) -> str | None:
    """The kind of a function that runs only when its result is awaited or iterated over."""
    found = next((node for node in module.body if getattr(node, "name", None) == name), None)
    if isinstance(found, ast.AsyncFunctionDef):
        return None if found.decorator_list else "is an `async def`"
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    has_yield = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in own_nodes(found))
    return "has a `yield`" if has_yield else None


def _line_of_value(module: ast.Module, name: str) -> int | None:
    """The line at which the module gives a name a value that can't be called: a number, a text, a list."""
    for node in module.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=found)],
                value=ast.Constant() | ast.List() | ast.Dict() | ast.Tuple() | ast.Set(),
            ) if found == name:
                return node.lineno
    return None


def _iterable_dataset(
    spec: JobSpec, module: ast.Module, names: TopLevelNames, function: str, place: KeyPath
) -> Iterator[Problem]:
    """A workload whose one `return` gives it an iterable dataset of a class in the same file.

    Whatever the source doesn't show, the worker finds when it builds the workload.
    """
    streams = {node.name for node in module.body if isinstance(node, ast.ClassDef) and _is_stream(node)}
    builds = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == function]
    returned = [given for build in builds for given in returned_by(build) if not build.decorator_list]
    call = returned[0] if len(returned) == 1 else None
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("Workload"):
        return
    for word in call.keywords:
        made = word.value.func if word.arg == "dataset" and isinstance(word.value, ast.Call) else None
        if isinstance(made, ast.Name) and made.id in streams and names.bound[made.id] == 1:
            line = f"{str(spec.workload).rpartition(':')[0][:200]}:{word.lineno}"
            message = f"{line}: {shorten(made.id)} is an iterable dataset, which can't be indexed"
            yield spec.problem(place, message, "give a list of its first ones: list(itertools.islice(…))")


def _is_stream(node: ast.ClassDef) -> bool:
    """Whether a class is derived from torch's IterableDataset alone, and has no samples by number."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    named = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in bases]
    own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    is_plain = not (node.decorator_list or node.keywords)
    return named == ["IterableDataset"] and is_plain and "__getitem__" not in own


def _wrong_params(draft: Draft, signature: Signature | None) -> Iterator[Problem]:
    if signature is None:
        return
    for place, given in given_params(draft):
        yield from _wrong_values(draft.spec, signature, place, given)
        yield from _wrong_together(draft.spec, place, given)
    yield from _missing_params(draft, signature)


def find_missing_files(draft: Draft, job_dir: Path) -> Iterator[Problem]:
    """Files and directories that params of built-in workloads name, and that aren't on this machine.

    A job for several nodes is left to them: each has its own, and this one may have none.
    """
    spec = draft.spec
    if spec.is_on_nodes or any(name not in BUILTINS for _, name in draft.placed("workload")):
        return
    for place, given in given_params(draft):
        for name, text in _missing_files(given, job_dir):
            yield spec.problem((*place, name), text)


def _missing_files(given: Mapping[str, Any], job_dir: Path) -> Iterator[tuple[str, str]]:
    """Parameters that name a file or directory that is not there, each with what to say of it."""
    for name, what in _FILES.items():
        place = given.get(name)
        if isinstance(place, str) and place and not os.path.exists(job_dir / path_of(place)):
            yield name, not_there(what, path_of(place))


def given_params(draft: Draft) -> list[tuple[KeyPath, Mapping[str, Any]]]:
    """All params in the job, with their places."""
    found: list[tuple[KeyPath, Mapping[str, Any] | None]] = [(("params",), draft.spec.params)]
    found += [(("compare", "params", at), given) for at, given in enumerate(draft.spec.compare.params)]
    found += [(("baseline", "params"), draft.spec.baseline.params if draft.spec.baseline else None)]
    return [(place, given) for place, given in found if given and draft.knows(place)]


def _wrong_values(
    spec: JobSpec, signature: Signature, place: KeyPath, given: Mapping[str, Any]
) -> Iterator[Problem]:
    """Names and values that break the rule, then values that a built-in workload refuses."""
    text = ".".join(str(step) for step in place if isinstance(step, str))
    wrong = [
        mistake
        for mistake in wrong_params(str(spec.workload), signature, given, text)
        if mistake.is_unknown or not isinstance(given[mistake.name], Unreadable)  # reported already
    ]
    for mistake in wrong:
        at_place = spec.key_problem if mistake.is_unknown else spec.problem
        yield at_place((*place, mistake.name), mistake.message, mistake.hint)
    if spec.workload in BUILTINS:
        known = given.keys() - {mistake.name for mistake in wrong}
        for param in signature.params:
            if param.name in known:
                yield from _refused_value(spec, param, (*place, param.name), given[param.name])


def _refused_value(spec: JobSpec, param: Param, path: KeyPath, value: Any) -> Iterator[Problem]:
    """A value of the right type that a built-in workload refuses all the same."""
    if param.is_per_device:
        yield from _wrong_per_device(spec, path, value)
    elif type(value) in (int, float):
        reason = refusal(param.name, value, is_count="int" in param.types)
        if reason:
            yield spec.problem(path, f"`{param.name}` of {spec.workload} {reason}")


def _wrong_per_device(spec: JobSpec, path: KeyPath, given: Any) -> Iterator[Problem]:
    """Problems with values that are no number, or below 0, for all devices or in a list with one for each."""
    values = given if isinstance(given, list | tuple) else [given]
    wrong = [value for value in values if not isinstance(value, Unreadable) and not _is_amount(value)]
    if wrong:
        name = ".".join(str(step) for step in path if isinstance(step, str))
        where = " in the list" if isinstance(given, list | tuple) else ""
        message = (
            f"`{name}`: expected a number of at least 0, or a list with one per device,"
            f" got {describe(wrong[0])}{where}"
        )
        yield spec.problem(path, message)


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _wrong_together(spec: JobSpec, place: KeyPath, given: Mapping[str, Any]) -> Iterator[Problem]:
    """Params of a built-in workload that don't go together, in a variant that has them all."""
    if place[0] == "baseline" or (place == ("params",) and spec.compare.params):
        return
    if reason := _why_refused_together(str(spec.workload), {**spec.params, **given}):
        named = [name for name in given if name in reason.replace(",", " ").split()]
        yield spec.problem((*place, *named[:1]), refused(str(spec.workload), reason))


def _why_refused_together(workload: str, params: Mapping[str, Any]) -> str | None:
    """Why no model can have these sizes, though each may be right by itself."""
    if workload != "gpt":
        return None
    preset = params.get("preset", "tiny")
    own = {name: params.get(name) for name in _GPT_SIZES}
    wrong = {name for name, size in own.items() if size is not None and not _is_size(name, size)}
    if preset not in PRESETS or wrong & {"width", "heads"}:
        return None  # that one is a mistake by itself
    try:
        shape_of(preset, **{name: None if name in wrong else size for name, size in own.items()})
    except ValueError as error:
        return str(error)
    return None


def _is_size(name: str, value: Any) -> bool:
    return type(value) is int and not refusal(name, value, is_count=True)


def _missing_params(draft: Draft, signature: Signature) -> Iterator[Problem]:
    """Params without a default, once where no variant has them, else at the items that lack them."""
    spec, several = draft.spec, draft.values("params")
    if several is None or not draft.knows(("params",)):
        return
    needed = signature.required - spec.params.keys()
    nowhere = needed - {name for given in several for name in given}
    place = ("params",) if "params" in spec.stated else ("workload",)
    lacking: list[tuple[KeyPath, set[str]]] = [(place, nowhere)]
    for position, given in enumerate(spec.compare.params):
        lacking.append((("compare", "params", position), needed - nowhere - given.keys()))
    for path, names in lacking:
        if names:
            yield spec.problem(path, needs(str(spec.workload), signature, names), takes(signature))
