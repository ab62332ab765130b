"""A trace of a few steps of one variant, by `torch.profiler`."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from launcher.errors import MachineError
from launcher.records import ProfileOrder


def capture(
    run_one_step: Callable[[], None], order: ProfileOrder, path: Path, all_threads: bool = False
) -> None:
    """Writes a gzipped Kineto trace of `order.steps` steps to `path`, each marked as `ProfilerStep#N`.

    Runs one step more than that before them, in which the profiler starts up.

    Args:
        run_one_step: one optimizer step; its work on a GPU may still be under way when it returns.
        order: what to record.
        path: replaced in one step when the trace is complete.
        all_threads: also what Python threads do, as `dp` on the CPU needs it: else only those of autograd.

    Raises:
        MachineError: the trace can't be written.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=order.steps, repeat=1),
        on_trace_ready=lambda profiler: export(profiler, path),
        record_shapes=order.shapes,
        profile_memory=order.memory,
        with_stack=order.stacks,
        experimental_config=_ExperimentalConfig(profile_all_threads=all_threads),
    ) as profiler:
        for _ in range(order.steps + 1):
            run_one_step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # else the last kernels of a step fall behind its annotation
            profiler.step()


def export(profiler: profile, path: Path) -> None:
    """Writes beside `path`, then replaces it: a reader never sees half a trace."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise MachineError(f"can't write the trace {path}: {error.strerror}; free some space") from error
