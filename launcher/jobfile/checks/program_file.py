"""Mistakes in `script` and `module`, found without running any of the program's code."""

import importlib.machinery
import importlib.util
import os
import pkgutil
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from gpurun.launcher.errors import Problem
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.yaml.describe import nearest, shorten

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
    if is_dir:
        yield spec.problem(("script",), f"{shorten(script)} is a directory", "name a Python file in it")
    elif not is_file:
        hint = _command_line(spec, script, job_dir) or near_file(script, job_dir)
        yield spec.problem(("script",), no_file(script), hint)
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


def near_file(name: str, job_dir: Path) -> str:
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
            hint = _near_module(name, places) or _how_to_find(spec, module)
            yield spec.problem(("module",), no_module(name), hint)
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


def _how_to_find(spec: JobSpec, module: str) -> str:
    """The advice about a module that isn't there; `gpurun run -m` has no job file to put it next to."""
    if _has_job_file(spec):
        return INSTALL_IT
    return f"install it, or go to the directory that contains it: cd DIRECTORY && gpurun run -m {module}"


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
    if not (fault := syntax_fault(source)):
        return
    first = source.partition(b"\n")[0].decode("utf-8", "replace")
    if first.startswith("#!") and "python" not in first:
        message = f"{shorten(name)} is no Python program: it begins with `{shorten(first)}`"
        yield spec.problem((key,), message, "name the Python program that it starts")
        return
    place = ":".join(map(str, (name[:200], *fault.place)))
    yield spec.problem((key,), f"{place}: invalid Python: {fault.what}", fault.line)


@dataclass(frozen=True)
class SyntaxFault:
    """The first mistake of a file in Python."""

    what: str
    place: tuple[int, ...] = ()
    """Line and column, from 1, as far as they are known."""
    line: str | None = None
    """The line's text, of which a long one is cut."""


def syntax_fault(source: bytes) -> SyntaxFault | None:
    """The first mistake; `None` where there is none. Compiles, runs nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes: the run will show them
            compile(source, "<program>", "exec", dont_inherit=True)
    except SyntaxError as error:
        place = tuple(number for number in (error.lineno, error.offset) if number)
        return SyntaxFault(error.msg, place, shorten((error.text or "").strip()) or None)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nesting without end
        return SyntaxFault(str(error) or type(error).__name__)
    return None


def no_file(name: str) -> str:
    """The message about a file that a job names."""
    return f"there is no file {shorten(name)}"


def no_module(name: str) -> str:
    """The message about a module that a job names."""
    return f"there is no module `{shorten(name)}`"
