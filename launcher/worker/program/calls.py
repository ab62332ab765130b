"""The calls of torch in a program's own files: changed as the job says, and noted for whoever asks."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import typing
import weakref
from collections import Counter
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from gpurun.launcher.inspect.stacks import is_users
from gpurun.launcher.rundir.records import AT_DDP, NEEDS_WORKERS, CallSite
from gpurun.launcher.worker.accelerators.cuda import cudnn_flags, matmul_precision
from gpurun.launcher.worker.base.seeding import replaced

Value = bool | int | float | str
EXCLUSIVE = {"fused": "foreach", "foreach": "fused"}
"""Implementations of an optimizer, of which only one can be `True`."""
_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"
_PASSES_ON = (typing.__file__, __file__)
"""Files whose frames only pass a call on: `DataLoader[int](…)` is called by `typing`."""
_PLAIN = (bool, int, float, str, type(None))
MAX_SHOWN = 80
"""Characters of an argument that are noted."""
MAX_SITES = 1000
"""A program that makes optimizers from code that it generates has no end of them."""


@dataclass(frozen=True)
class Changed:
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    applied: dict[str, Value] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    """Keywords that mean nothing to this call."""


def change(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    wanted: Mapping[str, Value],
) -> Changed:
    """The arguments of a method without `self`: a wanted one replaces what is passed, also by position.

    Args:
        signature: of the method, with `self`.
    """
    names = list(signature.parameters)[1:]
    applied = {name: value for name, value in wanted.items() if name in names}
    values: dict[str, Any] = dict(applied)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name, other in EXCLUSIVE.items():
        if values.get(name) is True and given.get(other) is True and other not in values:
            values[other] = None
    if "num_workers" in names and not (given | values).get("num_workers"):
        applied = {name: value for name, value in applied.items() if name not in NEEDS_WORKERS}
        # Also what the program itself passes, whose own number of workers is replaced by none.
        is_replaced = "num_workers" in values
        values = {name: value for name, value in values.items() if name not in NEEDS_WORKERS}
        values |= {name: NEEDS_WORKERS[name] for name in NEEDS_WORKERS.keys() & given if is_replaced}
    by_position = tuple(values.pop(name, value) for name, value in zip(names, args, strict=False))
    skipped = tuple(name for name in wanted if name not in applied)
    return Changed((*by_position, *args[len(names) :]), {**kwargs, **values}, applied, skipped)


@dataclass
class ProgramCalls:
    """Changes the calls of a program, and has them by place."""

    wanted: Mapping[str, Mapping[str, Value]]
    notes: bool = False
    """Whether calls are noted."""
    sites: dict[tuple[str, str, int, int], CallSite] = field(default_factory=dict)
    _searching: dict[tuple[str, str, int, int], weakref.ref[DistributedDataParallel]] = field(
        default_factory=dict
    )
    """The models that look for unused parameters, by place."""
    _iterables: dict[tuple[str, str, int, int], set[str]] = field(default_factory=dict)
    """The classes of iterable datasets that several workers read, by place."""
    _loaders: weakref.WeakKeyDictionary[DataLoader[Any], tuple[str, str, int, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """The place of each DataLoader."""
    _epochs: Counter[tuple[tuple[str, str, int, int], int | None]] = field(default_factory=Counter)
    """How often DataLoaders with so many batches were begun, by place."""
    _reading: dict[tuple[str, str, int, int], weakref.ref[Any]] = field(default_factory=dict)
    """The iterators of DataLoaders that were begun last, by place."""
    _ready: dict[tuple[str, str, int, int], tuple[int, int]] = field(default_factory=dict)
    """The batches that these had ready after the first steps, and now."""
    _models: list[weakref.ref[DistributedDataParallel]] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)
    """The objects whose constructors run: an outer class calls that of its base for the same object."""

    def watch(self) -> ExitStack:
        """Changes and notes calls from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        if self.notes:
            hooks.callback(replaced(DataLoader, "__iter__", self._iterate))
        hooks.enter_context(cudnn_flags(self.wanted.get("cudnn", {})))
        precision = self.wanted.get("matmul", {}).get("precision")
        hooks.enter_context(matmul_precision(None if precision is None else str(precision)))
        for kind in (DataLoader, DistributedDataParallel, *optimizers()):
            keys = (_key_of(kind), *(AT_DDP if kind is DistributedDataParallel else ()))
            if self.notes or any(key in self.wanted for key in keys):
                hooks.callback(self._wrap(kind))
        return hooks

    def _wrap(self, kind: Any) -> Callable[[], None]:
        """Has calls of the constructor changed; returns what undoes that."""
        original = kind.__init__
        signature = functools.cache(lambda: inspect.signature(original))

        @functools.wraps(original)
        def construct(made: Any, /, *args: Any, **kwargs: Any) -> None:
            if id(made) in self._begun:
                original(made, *args, **kwargs)
                return
            self._begun.add(id(made))
            try:
                caller = caller_of(sys._getframe(1))
                changed = Changed(args, kwargs)
                if is_own_code(caller):
                    changed = self.changed(kind, signature(), changed)
                original(made, *changed.args, **changed.kwargs)
                if compress := changed.applied.get("comm_hook"):
                    made.register_comm_hook(None, getattr(default_hooks, f"{compress}_compress_hook"))
                if self.notes:
                    self.note(kind.__name__, made, caller, signature().bind(made, *args, **kwargs), changed)
            finally:
                self._begun.discard(id(made))

        kind.__init__ = construct
        return lambda: setattr(kind, "__init__", original)

    def _iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        reading = original(loader)
        if (key := self._loaders.get(loader)) is not None:
            self._epochs[key, num_batches(loader)] += 1
            self._ready.pop(key, None)
            self._reading[key] = weakref.ref(reading)
        return reading

    def note_ready(self, is_first: bool) -> None:
        """Notes how many batches DataLoaders with workers have ready.

        Args:
            is_first: whether the first steps have just ended.
        """
        for key, reading in self._reading.items():
            if (num := num_ready(reading())) is not None and (is_first or key in self._ready):
                self._ready[key] = (num if is_first else self._ready[key][0], num)

    def changed(self, kind: type, signature: inspect.Signature, given: Changed) -> Changed:
        """The arguments of a call from the user's own files."""
        changed = change(signature, given.args, given.kwargs, self.wanted.get(_key_of(kind), {}))
        wanted = {key: self.wanted[key] for key in AT_DDP if key in self.wanted}
        if kind is not DistributedDataParallel or not wanted:
            return changed
        module = signature.bind_partial(None, *changed.args, **changed.kwargs).arguments.get("module")
        applied = changed_module(module, wanted) if isinstance(module, torch.nn.Module) else {}
        skipped = (*changed.skipped, *(key for key in wanted if key not in applied))
        return replace(changed, applied={**changed.applied, **applied}, skipped=skipped)

    def note(
        self,
        name: str,
        made: Any,
        caller: FrameType,
        given: inspect.BoundArguments,
        changed: Changed,
    ) -> None:
        """Notes a call, or that the one at this place was made again."""
        if isinstance(made, DistributedDataParallel) and len(self._models) < MAX_SITES:
            self._models.append(weakref.ref(made))
        key = (name, caller.f_code.co_filename, caller.f_lineno, caller.f_lasti)
        if isinstance(made, DataLoader):
            self._loaders[made] = key
            if made.num_workers > 1 and isinstance(made.dataset, IterableDataset):
                self._iterables.setdefault(key, set()).add(type(made.dataset).__qualname__)
        arguments = {each: shown(value) for each, value in given.arguments.items() if each != "self"}
        if (known := self.sites.get(key)) is not None:
            later = replace(known, given=arguments, others=(), applied=changed.applied, count=1)
            self.sites[key] = known.with_later(later)
        elif len(self.sites) < MAX_SITES:
            if getattr(made, "find_unused_parameters", False):
                self._searching[key] = weakref.ref(made)
            is_own = is_own_code(caller)
            self.sites[key] = CallSite(
                name=name,
                file=os.path.realpath(caller.f_code.co_filename),
                line=caller.f_lineno,
                end_column=end_column_of(caller),
                is_users=is_own,
                library="" if is_own else library_of(caller),
                given=arguments,
                parameters=tuple(arguments)[: max(1, len(changed.args))],
                applied=changed.applied,
                skipped=changed.skipped,
            )

    def noted(self, asking: Container[str]) -> tuple[CallSite, ...]:
        """All calls by place.

        Args:
            asking: the classes of iterable datasets whose workers were seen to ask which they are.
        """
        repeats = {
            key: next((each for each in sorted(names) if each not in asking), "")
            for key, names in self._iterables.items()
        }
        by_length = sorted(self._epochs.items(), key=lambda each: _length(each[0][1]))
        longest = {key: (num, batches) for (key, batches), num in by_length}
        found = []
        for key, site in self.sites.items():
            epochs, batches = longest.get(key, (0, None))
            before, now = self._ready.get(key, (0, 0))
            site = replace(site, repeats=repeats.get(key, ""), drained=max(0, before - now))
            found.append(replace(site, epochs=epochs, batches=batches))
        return tuple(found)

    def models(self) -> list[DistributedDataParallel]:
        """The program's models that average gradients, if calls are noted."""
        return [model for each in self._models if (model := each()) is not None]

    def note_unused(self) -> None:
        """Notes what the last backward passes left unused."""
        for key, model in self._searching.items():
            with suppress(Exception):  # torch's own record is no public interface
                num_bytes = model()._get_ddp_logging_data()["unused_parameter_size"]  # type: ignore[union-attr]
                most = max(num_bytes, self.sites[key].unused_bytes or 0)
                self.sites[key] = replace(self.sites[key], unused_bytes=most)


def num_batches(loader: DataLoader[Any]) -> int | None:
    """The batches of an epoch, where torch's own samplers have them: others may draw when they are asked."""
    samplers = (loader.sampler, *([loader.batch_sampler] if loader.batch_sampler is not None else []))
    is_known = all(type(each).__module__.startswith("torch.") for each in samplers)
    if is_known and not isinstance(loader.dataset, IterableDataset):
        with suppress(Exception):  # of the program's own dataset
            return len(loader)
    return None


def num_ready(reading: Any) -> int | None:
    """The batches that workers have loaded and an iterator hasn't returned; `None`: it isn't known.

    Source: torch/utils/data/dataloader.py, `_MultiProcessingDataLoaderIter`.
    """
    with suppress(Exception):  # of one without workers, or another torch
        queues = {reading._worker_result_queue, reading._data_queue}
        early = sum(len(each) == 2 for each in reading._task_info.values())
        return early + sum(int(each.qsize()) for each in queues)
    return None


def _length(batches: int | None) -> float:
    return math.inf if batches is None else batches


@dataclass
class AskingWorkers:
    """The classes of the datasets whose DataLoader workers ask which of them they are."""

    told: str
    """The file by which workers, which are forked, tell the rank."""
    _has_told: bool = False

    def watch(self) -> Callable[[], None]:
        """Notes them from now on; returns what ends it."""
        return replaced(WorkerInfo, "__getattribute__", self._read)

    @property
    def found(self) -> set[str]:
        with suppress(OSError), open(self.told, encoding="utf-8") as file:
            return set(file.read().splitlines())
        return set()

    def _read(self, original: Callable[..., Any], info: WorkerInfo, name: str) -> Any:
        value = original(info, name)
        if name in ("id", "num_workers", "dataset") and not self._has_told:
            self._has_told = True
            with suppress(OSError), open(self.told, "a", encoding="utf-8") as file:
                file.write(f"{type(original(info, 'dataset')).__qualname__}\n")
        return value


def changed_module(module: torch.nn.Module, wanted: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Changes the module that is given to DDP; what has been applied, by the name of the call."""
    applied: dict[str, Value] = {}
    if (options := wanted.get("autocast")) is not None:
        applied["autocast"] = options.get("dtype", "bfloat16")
        device = next((each.device.type for each in module.parameters()), "cpu")
        cast = torch.autocast(device, getattr(torch, str(applied["autocast"])))
        module.forward = functools.partial(_in_fp32, cast(module.forward))
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
    if "compile" in wanted and not is_compiled:
        module.compile(**wanted["compile"])
        applied["compile"] = True
    if (options := wanted.get("comm_hook")) is not None:
        applied["comm_hook"] = options.get("compress", "bf16")
    return applied


def _in_fp32(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The outputs of a forward pass under autocast as its losses take them, which are computed in fp32."""
    return tree_map(_float, forward(*args, **kwargs))


def _float(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_low else value


def optimizers() -> list[type[torch.optim.Optimizer]]:
    """Every optimizer of `torch.optim` that has a constructor of its own."""
    found = (each for each in vars(torch.optim).values() if isinstance(each, type))
    return [
        each
        for each in found
        if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
        if "__init__" in vars(each)
    ]


def _key_of(kind: type) -> str:
    """The name by which a job changes calls of the class."""
    return "Optimizer" if issubclass(kind, torch.optim.Optimizer) else kind.__name__


def is_own_code(frame: FrameType) -> bool:
    """Whether a frame is in a file of the user's own."""
    return _is_users(frame.f_code.co_filename)


_is_users = functools.cache(is_users)


def caller_of(frame: FrameType) -> FrameType:
    """The frame that makes the call, of the one at which a constructor is entered."""
    while frame.f_code.co_filename in _PASSES_ON and frame.f_back is not None:
        frame = frame.f_back
    return frame


def end_column_of(frame: FrameType) -> int | None:
    """Where the expression ends that a frame is at, in bytes of its line."""
    at = frame.f_lasti // 2  # instructions have two bytes
    return next(islice(frame.f_code.co_positions(), at, None))[3] if at >= 0 else None


def library_of(frame: FrameType | None) -> str:
    """The package of the nearest caller outside of torch; `torch` where that is the user's own file.

    Of `lightning`, which holds two libraries, also the next part: `lightning.fabric`.
    """
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_PASSES_ON)):
        frame = frame.f_back
    if frame is None or is_own_code(frame):
        return "torch"
    names = str(frame.f_globals.get("__name__", "")).split(".")
    return ".".join(names[: 2 if names[0] == "lightning" else 1])


def shown(value: Any) -> str:
    """A plain value as Python has it, else a name: the text of a module or a dataset may be endless."""
    is_short = (
        isinstance(value, list | tuple) and len(value) <= 8 and all(isinstance(x, _PLAIN) for x in value)
    )
    if isinstance(value, (*_PLAIN, torch.device)) or is_short:
        text = repr(value)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return str(getattr(value, "__name__", type(value).__name__))
