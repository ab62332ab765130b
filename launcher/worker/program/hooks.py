"""How a rank observes its program's steps: torch's own hooks, and one that torch lacks."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpurun.launcher import stepping
from gpurun.launcher.worker.program.recorder import StepRecorder


def watch_steps(recorder: StepRecorder) -> ExitStack:
    """Passes every step of every optimizer to `recorder` from now on, and every `gpurun.step()`.

    Closing the returned stack ends it.
    """
    hooks = ExitStack()
    handle = register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: recorder.optimizer_stepped(optimizer)
    )
    hooks.callback(handle.remove)
    hooks.callback(watch_skipped_steps(recorder))
    stepping.observe(recorder)
    hooks.callback(stepping.stop_observing)
    return hooks


def keep_groups_alive() -> Callable[[], bool]:
    """Keeps gloo's process groups from being destructed before the process ends.

    Returns whether there has been a group, as a function to call at the end.

    A DDP model that outlives `destroy_process_group` holds the last reference. Its end destructs the group
    with the GIL held, which joins a thread of gloo that may be waiting for the GIL: the rank hangs forever
    (torch 2.13; in one of ten runs, under any launcher). The group's threads sleep, so that keeping it is
    cheap; NCCL's resources are released by `destroy_process_group` itself.
    """
    original = distributed_c10d.destroy_process_group
    kept: list[Any] = []

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        original(group)

    for module in (distributed_c10d, torch.distributed):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    return lambda: bool(kept) or distributed_c10d.is_initialized()


def watch_skipped_steps(recorder: StepRecorder) -> Callable[[], None]:
    """Reports steps that a GradScaler skips because a gradient overflowed: no optimizer is called then.

    Returns a function that undoes it.

    torch has no hook for that, so that the method itself is wrapped, for all its subclasses. A fused
    optimizer is called all the same and skips by itself: that is a step like any other.
    """
    scaler = torch.amp.GradScaler
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        calls = recorder.calls
        result = original(self, optimizer, *args, **kwargs)
        if recorder.calls == calls and self.is_enabled():
            recorder.optimizer_stepped(optimizer, skipped=True)
        return result

    scaler.step = step  # type: ignore[method-assign]
    return lambda: setattr(scaler, "step", original)
