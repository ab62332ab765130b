"""Makes a model of the job's `workload` and `params`: finds `build`, calls it, checks what it returns."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gpurun.launcher.errors import ParamsError, Problem
from gpurun.launcher.jobfile.params import needs, refused, signature_of_function, takes, wrong_params
from gpurun.launcher.jobfile.yaml.describe import nearest
from gpurun.launcher.worker.base.failure import SourceLine, UserError, place_of, users_code
from gpurun.workloads.base import Workload
from gpurun.workloads.micro_benchmarks import Probe
from gpurun.workloads.registry import BUILTINS

Build = Callable[..., Any]
WRAPPERS: Mapping[str, str] = {
    "DataParallel": "dp",
    "DistributedDataParallel": "ddp",
    "FullyShardedDataParallel": "fsdp",
    "fully_shard": "fsdp",
}
"""Classes and functions of torch that spread a model over devices, each with the strategy that does it."""


@dataclass(frozen=True)
class LoadedWorkload(Workload):
    """A workload with every attribute, and where it comes from."""

    built_at: SourceLine | None = None
    """The function that built it."""


def place_in(workload: Workload, *objects: Any) -> SourceLine | None:
    """The place at which the first object that is the user's own is defined; else, the workload's.

    A line of torch's, or of a batch that is right, would help no one.
    """
    built_at = workload.built_at if isinstance(workload, LoadedWorkload) else None
    return place_of(*objects, users_only=True) or built_at


def load_workload(name: str, params: Mapping[str, Any], job_dir: str | Path) -> Workload | Probe:
    """The workload, or micro-benchmark, that `name` builds from `params`, on the CPU.

    Args:
        name: a built-in workload, `train.py:build` or `package.module:build`.
        params: the job's `params`, arguments of the build function.
        job_dir: directory of the job file. Relative file names start there, and it is added to the end of
            `sys.path`, so that nothing in it hides an installed module.

    Raises:
        UserError: the workload can't be found or built, or is none.
        ParamsError: it doesn't take the params.
    """
    build = find_build(name, Path(job_dir))
    place = place_of(build)
    if name not in BUILTINS:  # the job was checked against those before it ran
        check_params(name, build, params, place)
    with users_code(f"{name} failed to build the workload", "a Workload", place):
        built = (
            build_builtin(name, build, params)
            if name in BUILTINS
            else users_build(name, build, params, place)
        )
    if isinstance(built, Probe):
        return built
    workload = as_workload(name, built, place)
    refuse_wrapped(name, (owner for module in workload.model.modules() for owner in torchs(module)), place)
    return workload


def build_builtin(name: str, build: Build, params: Mapping[str, Any]) -> Any:
    """Builds a built-in workload from the params.

    Raises:
        ParamsError: it refuses one of them.
    """
    try:
        return build(**params)
    except ValueError as error:
        raise ParamsError(refused(name, error)) from None


def users_build(name: str, build: Build, params: Mapping[str, Any], place: SourceLine | None) -> Any:
    """Builds a workload of the user's from the params.

    Raises:
        UserError: the function wraps the model, and fails at that, since there is no process group.
    """
    try:
        return build(**params)
    except Exception as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            is_torchs = frame.f_globals.get("__name__", "").startswith("torch.")
            called = [frame.f_code.co_name] if is_torchs else []
            refuse_wrapped(name, (*called, *torchs(frame.f_locals.get("self"))), place)
        raise


def torchs(value: Any) -> Iterator[str]:
    """The classes of torch's that an object is of; of those of `fully_shard` that function's name."""
    for owner in type(value).__mro__:
        if owner.__module__.startswith("torch."):
            yield "fully_shard" if owner.__name__ == "FSDPModule" else owner.__name__


def refuse_wrapped(name: str, called: Iterable[str], place: SourceLine | None) -> None:
    """Returns if nothing of torch's that was called spreads a model over devices: the job's strategy does.

    Raises:
        UserError: something does.
    """
    for wrapper in called:
        if strategy := WRAPPERS.get(wrapper):
            raise UserError(
                f"the workload of {name} wraps its model, which is up to the job",
                expected=f"the model alone; the job says `strategy: {strategy}` in place of {wrapper}",
                got=f"{wrapper}(model)",
                place=place,
            )


def find_build(name: str, job_dir: Path) -> Build:
    """The function that `name` refers to.

    Raises:
        UserError: there is no such workload, file, module or function.
    """
    source, colon, function = name.rpartition(":")
    if not colon:
        if name not in BUILTINS:
            expected = f"{', '.join(BUILTINS)}, file.py:function or package.module:function"
            raise UserError(f"no workload is called {name!r}", expected=expected, got=name, place=None)
        return BUILTINS[name].load()
    directory = str(job_dir.resolve())
    if directory not in sys.path:
        sys.path.append(directory)
    module = load_file(job_dir / source) if source.endswith(".py") else load_module(source, directory)
    return build_of(module, function)


def load_file(path: Path) -> ModuleType:
    """The module in a file, under a name of its own: a user's `random.py` must not replace Python's."""
    path = path.resolve()
    if not path.is_file():
        near = suggestion(path.name, (file.name for file in path.parent.glob("*.py")))
        got = f"no such file{near}"
        raise UserError(f"the workload's file is missing: {path}", expected=str(path), got=got, place=None)
    name = f"gpurun_job_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    with _importing(path.name):
        spec.loader.exec_module(module)
    return module


def _importing(name: str) -> AbstractContextManager[None]:
    return users_code(f"{name} can't be imported", "a module that imports without an error", None)


def load_module(name: str, directory: str) -> ModuleType:
    """The module of that full name.

    Raises:
        UserError: there is none, or it raises while it is imported.
    """
    try:
        with _importing(name):
            return importlib.import_module(name)
    except UserError as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) and cause.name else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise
        expected = f"{name}, installed or in {directory}"
        raise UserError(
            f"there is no module {missing!r}", expected=expected, got=str(cause), place=None
        ) from cause


def build_of(module: ModuleType, function: str) -> Build:
    """The module's function of that name.

    Raises:
        UserError: the module has no such name, or it can't be called.
    """
    build = getattr(module, function, None)
    if callable(build):
        return build  # type: ignore[no-any-return]
    place = SourceLine(str(module.__file__), 1)
    own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    got = (
        f"{function} = {build!r}" if hasattr(module, function) else f"no such name{suggestion(function, own)}"
    )
    expected = f"a function {function}(...) that returns a Workload"
    raise UserError(
        f"the workload's function {function!r} is missing", expected=expected, got=got, place=place
    )


def check_params(name: str, build: Build, params: Mapping[str, Any], place: SourceLine | None) -> None:
    """Checks the job's `params` where reading its source may not have shown what the function takes.

    Raises:
        ParamsError: the function doesn't take them, or lacks some.
    """
    signature = signature_of_function(build)
    found = [(wrong.message, wrong.hint) for wrong in wrong_params(name, signature, params)]
    if missing := signature.required - params.keys():
        found.append((needs(name, signature, missing), takes(signature)))
    if found:
        at = (place.file, place.line) if place else ()
        raise ParamsError(*(Problem(message, hint, *at) for message, hint in found))


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing when no known word is near."""
    near = nearest(word, known)
    return f" (did you mean {near}?)" if near else ""


def as_workload(name: str, built: Any, place: SourceLine | None) -> Workload:
    """The result of `build`, as a `Workload` with every attribute.

    Raises:
        UserError: an attribute is missing, or isn't what it must be.
    """
    values: dict[str, Any] = {
        field.name: getattr(built, field.name, None if field.default is MISSING else field.default)
        for field in fields(Workload)
    }
    workload = LoadedWorkload(**values, built_at=place)
    for attribute, expected, is_right in requirements(workload):
        if not is_right:
            value = values[attribute]
            is_there = hasattr(built, attribute)
            got = shown(value) if is_there else missing(built)
            what = f"the workload of {name} has an invalid {attribute!r}"
            raise UserError(what, expected=expected, got=got, place=place)
    return workload


def shown(value: Any) -> str:
    """A value in a few words."""
    name = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it: write {value.__name__}(…)"
    if inspect.isroutine(value):
        return f"the {name} {value.__name__}"
    text = repr(value)
    return f"an object of {name}" if "\n" in text else f"{name} {text:.80}"


def missing(built: Any) -> str:
    """How to say that an attribute is not there."""
    if isinstance(built, nn.Module):
        return f"a {type(built).__name__} alone: return Workload(model, …)"
    if built is None:
        return "None: the function returned nothing"
    return f"a {type(built).__name__}: return Workload(model, …)"


def requirements(workload: Workload) -> Iterable[tuple[str, str, bool]]:
    """(attribute, what it must be, whether it is) for each attribute, in the order to report them."""
    w = workload
    trainable = isinstance(w.model, nn.Module) and any(p.requires_grad for p in w.model.parameters())
    optional = "or nothing"
    yield "model", "a torch.nn.Module", isinstance(w.model, nn.Module)
    yield "model", "a model with at least one parameter that requires a gradient", trainable
    # Whoever builds everything on meta looks at shapes only.
    is_trained = torch.get_default_device().type != "meta"
    on_meta = is_trained and isinstance(w.model, nn.Module) and any(p.is_meta for p in w.model.parameters())
    yield (
        "model",
        "a model with values on the CPU: of the meta device, model.to_empty(device='cpu')",
        not on_meta,
    )
    scalar = (
        "a function loss(outputs, targets) that returns a scalar, or nothing if the model returns its loss"
    )
    yield "loss", scalar, is_optional(w.loss)
    if w.dataset is None:
        what = "a function batch(size, generator); a dataset is given by name: Workload(…, dataset=…)"
        yield "batch", what, callable(w.batch)
    else:
        mapped = hasattr(w.dataset, "__getitem__") and hasattr(w.dataset, "__len__")
        listed = "; of an iterable one, a list of its first samples"
        yield "dataset", f"a map-style dataset, with __getitem__ and __len__{listed}", mapped
    maker = f"a function, as lambda parameters: torch.optim.SGD(parameters, lr=0.1), {optional}"
    yield "optimizer", maker, is_optional(w.optimizer)
    yield "reduction", "'mean' or 'sum'", w.reduction in ("mean", "sum")
    yield "count", f"a function count(targets) {optional}", is_optional(w.count)
    yield "blocks", "a tuple of classes of modules", is_classes(w.blocks)
    yield "num_workers", "a number of processes, at least 0", is_count(w.num_workers)
    yield (
        "notes",
        "a tuple of sentences",
        isinstance(w.notes, tuple | list) and all(isinstance(item, str) for item in w.notes),
    )


def is_optional(value: Any) -> bool:
    return value is None or callable(value)


def is_classes(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(item, type) and issubclass(item, nn.Module) for item in value
    )


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
