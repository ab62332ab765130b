"""The losses of a training loop, seen where `backward` is called."""

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.seeding import replaced

MAX_LOSSES = 2000
"""As many as a launch has steps in which remedies are compared, or several for each."""


@dataclass
class Losses:
    """The values on which `backward` is called, the first ones.

    They are copied to the host without waiting for the device: what it has not computed yet isn't a number.
    """

    dtype: str = ""
    count: int = 0
    _values: torch.Tensor | None = None
    _is_inside: bool = False
    """Whether a backward pass runs; one that it begins itself, as checkpointing does, is a part of it."""

    def watch(self) -> ExitStack:
        """Takes losses from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        for owner in (torch.Tensor, torch.autograd):
            hooks.callback(replaced(owner, "backward", self._backward))
        return hooks

    @property
    def values(self) -> tuple[float | None, ...]:
        """The losses that are known by now; `None`: not yet, or no finite number."""
        found = [] if self._values is None else self._values[: self.count].tolist()
        return tuple(value if math.isfinite(value) else None for value in found)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside or self.count >= MAX_LOSSES:
            return original(*args, **kwargs)
        self._is_inside = True
        try:
            with suppress(Exception):  # of a tensor that can't be copied; the program goes on
                self._add(args[0] if args else kwargs["tensors"])
            return original(*args, **kwargs)
        finally:
            self._is_inside = False

    def _add(self, tensors: Any) -> None:
        for each in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if (
                each.numel() != 1
                or self.count >= MAX_LOSSES
                or runtime_of(each.device).is_capturing(each.device)
            ):
                continue
            if self._values is None:
                is_host = accelerator_of(each.device.type).is_host
                self._values = torch.full(
                    (MAX_LOSSES,), math.nan, dtype=torch.float64, device="cpu", pin_memory=not is_host
                )
                self.dtype = str(each.dtype).removeprefix("torch.")
            self._values[self.count].copy_(each.detach().reshape(()), non_blocking=True)
            self.count += 1
