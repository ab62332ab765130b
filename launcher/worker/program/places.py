"""Places in a program's own files at which a rank waits for its GPU or for a copy, or sends gradients."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gpurun.launcher.machine.accelerators import gpu_kinds
from gpurun.launcher.rundir.records import Place, PlaceKind
from gpurun.launcher.worker.base.seeding import replaced
from gpurun.launcher.worker.program.calls import is_own_code

READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")
"""Methods of a tensor that return what it holds, once its device has computed it."""
_OWN = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"
_GPUS = tuple(row.name for row in gpu_kinds())
COPIES = ("to", *_GPUS)
MAX_PLACES = 100


@dataclass
class Places:
    """Counts such calls by place."""

    models: Callable[[], Iterable[DistributedDataParallel]]
    """The program's models that average gradients."""
    counts: Counter[tuple[PlaceKind, str, str, int]] = field(default_factory=Counter)

    def watch(self) -> ExitStack:
        """Counts from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        for name in READS:
            hooks.callback(replaced(torch.Tensor, name, self._reading(name)))
        for name in COPIES:
            hooks.callback(replaced(torch.Tensor, name, self._copying(name)))
        hooks.callback(replaced(torch.Tensor, "backward", self._backward))
        return hooks

    @property
    def found(self) -> tuple[Place, ...]:
        return tuple(Place(*place, count) for place, count in self.counts.items())

    def _reading(self, name: str) -> Callable[..., Any]:
        def read(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and is_on_gpu(tensor):
                self._add("wait", name)
            return original(tensor, *args, **kwargs)

        return read

    def _copying(self, name: str) -> Callable[..., Any]:
        def copy(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(tensor, *args, **kwargs)
            is_upload = not torch.compiler.is_compiling() and is_on_gpu(made) and not is_on_gpu(tensor)
            if is_upload and not (kwargs.get("non_blocking") and tensor.is_pinned()):
                self._add("copy", name)
            return made

        return copy

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(model.require_backward_grad_sync for model in self.models()):
            self._add("gradients", "backward")
        return original(*args, **kwargs)

    def _add(self, kind: PlaceKind, name: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        if frame is None or not is_own_code(frame):
            return
        place = (kind, name, os.path.abspath(frame.f_code.co_filename), frame.f_lineno)
        if place in self.counts or len(self.counts) < MAX_PLACES:
            self.counts[place] += 1


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type in _GPUS
