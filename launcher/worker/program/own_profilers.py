"""Profilers that a program starts itself. Only one can run in a process, and the program's has precedence."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import emit_itt, emit_nvtx
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import ProfilerAction, _KinetoProfile, profile

from gpurun.launcher.machine.accelerators import Accelerator
from gpurun.launcher.worker.base.seeding import replaced
from gpurun.launcher.worker.profiling import CallProfile

BEGINS: tuple[tuple[type, str, str], ...] = (
    (profile, "start", "stop"),
    (_KinetoProfile, "start", "stop"),
    (autograd_profile, "__enter__", "__exit__"),
    (emit_nvtx, "__enter__", "__exit__"),
    (emit_itt, "__enter__", "__exit__"),
)
"""The methods by which a profiler begins and ends; one with a schedule may record much later."""


@dataclass
class OwnProfilers:
    """The profilers of the program: those that have begun, and where they write traces."""

    give_up: Callable[[], None]
    """Ends a trace of ours; called before one of the program's begins."""
    num_begun: int = 0
    num_steps: int = 0
    """The steps that they have slowed."""
    traces: list[str] = field(default_factory=list)
    """The absolute paths that `export_chrome_trace` got, also from `tensorboard_trace_handler`."""
    active: dict[int, object] = field(default_factory=dict)
    _has_recorded: bool = False
    """Whether one has, since a step was last asked about."""
    _has_recorded_gpu: bool = False
    """Whether one has recorded what a GPU does: what that takes stays attached to the process."""
    _inside: threading.local = field(default_factory=threading.local)
    """Whether this thread is in an export."""

    def are_in_use(self) -> bool:
        """Whether one records, or may at any time by its schedule."""
        return bool(self.active) or torch._C._autograd._profiler_enabled()

    def slow_the_step(self, kind: Accelerator) -> bool:
        """Whether one has recorded, or got ready to, in the step that ends now; called once for each.

        Args:
            kind: of the device that is timed: where traces slow later steps down, those count as well.
        """
        recording = [each for each in self.active.values() if _records(each)]
        self._has_recorded_gpu |= any(map(_records_gpu, recording))
        stays_slow = self._has_recorded_gpu and kind.is_slow_after_trace
        is_slow = self._has_recorded or bool(recording) or stays_slow
        self._has_recorded = bool(recording)
        self.num_steps += is_slow
        return is_slow

    def watch(self) -> ExitStack:
        """Notices them from now on; closing the returned stack ends it."""
        hooks = ExitStack()
        for owner, begin, end in BEGINS:
            hooks.callback(_wrapped(owner, begin, before=self._begins))
            hooks.callback(_wrapped(owner, end, after=self._ends))
        for owner in (_KinetoProfile, autograd_profile):
            hooks.callback(self._watch_exports(owner))
        return hooks

    def _begins(self, profiler: object, *_: object) -> None:
        if not getattr(profiler, "enabled", True):
            return  # `torch.autograd.profiler.profile(enabled=False)` records nothing
        if not self.active:
            self.num_begun += 1
            self.give_up()
        self.active[id(profiler)] = profiler
        self._has_recorded |= _records(profiler)
        self._has_recorded_gpu |= _records(profiler) and _records_gpu(profiler)

    def _ends(self, profiler: object, *_: object) -> None:
        self.active.pop(id(profiler), None)

    def _watch_exports(self, owner: Any) -> Callable[[], None]:
        """Notices where profilers of this class write; one of the first has one of the second for that."""

        def export(original: Callable[..., Any], profiler: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "is_exporting", False):
                return original(profiler, path, *args, **kwargs)
            if not isinstance(profiler, CallProfile):
                with suppress(OSError):  # there may be no working directory, as the original will say
                    self.traces.append(os.path.abspath(path))
            self._inside.is_exporting = True
            try:
                return original(profiler, path, *args, **kwargs)
            finally:
                self._inside.is_exporting = False

        return replaced(owner, "export_chrome_trace", export)


def _records(profiler: object) -> bool:
    """Whether one that has begun records now, or warms up to that: all the time without a schedule."""
    return getattr(profiler, "current_action", None) is not ProfilerAction.NONE


def _records_gpu(profiler: object) -> bool:
    """Whether it records more than the CPU's activities."""
    activities: Any = getattr(profiler, "activities", None) or getattr(profiler, "kineto_activities", ())
    return any(activity != ProfilerActivity.CPU for activity in activities)


def _wrapped(
    owner: type,
    name: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> Callable[[], None]:
    """Has a method call these around it, except on profilers of ours; returns what undoes that."""

    def method(original: Callable[..., Any], profiler: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(profiler, CallProfile):
            return original(profiler, *args, **kwargs)
        before(profiler, *args, *kwargs.values())
        try:
            return original(profiler, *args, **kwargs)
        finally:
            after(profiler)

    return replaced(owner, name, method)
