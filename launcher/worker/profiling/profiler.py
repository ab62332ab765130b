"""A trace of a few steps of one variant, by `torch.profiler`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.records import ProfileConfig
from gpurun.launcher.worker.accelerators.runtime import available_runtime

MAX_ALLOCATIONS = 1_000_000
"""Of a snapshot; older ones are forgotten."""


def capture(
    run_one_step: Callable[[], None],
    order: ProfileConfig,
    path: Path,
    *,
    align: Callable[[], None] = lambda: None,
    all_threads: bool = False,
    snapshot: Path | None = None,
) -> None:
    """Writes a gzipped Kineto trace of `order.steps` steps to `path`, each marked as `ProfilerStep#N`.

    Before them it runs one more step, in which the profiler starts.

    Args:
        run_one_step: one optimizer step; its work on a GPU may still be under way when it returns.
        order: what to record.
        path: replaced in one step when the trace is complete.
        align: called before the first step that is recorded. The profiler takes longer to start on some ranks
            than on others: without a barrier the first step would show that as waiting.
        all_threads: also what Python threads do, as `dp` on the CPU needs it: else only those of autograd.
        snapshot: where to keep each allocation of the recorded steps, on CUDA.

    Raises:
        MachineError: the trace can't be written.
    """
    profiler = new_profiler(order, all_threads)
    profiler.prepare_trace()
    run_one_step()
    synchronize()
    profiler.start_trace()
    align()
    # By hand rather than by the profiler's schedule: its first step begins before the ranks are aligned.
    with memory_history(snapshot):
        for number in range(1, order.steps + 1):
            with record_function(f"ProfilerStep#{number}"):
                run_one_step()
        synchronize()  # not after each step: the host runs ahead of the GPU here as it does in timed steps
    profiler.stop_trace()
    export(profiler.export_chrome_trace, path)


def run_unrecorded(run_one_step: Callable[[], None], steps: int, align: Callable[[], None]) -> None:
    """The same steps on a rank that isn't recorded: the others need it in their collectives."""
    run_one_step()
    align()
    for _ in range(steps):
        run_one_step()


def new_profiler(order: ProfileConfig, all_threads: bool) -> profile:
    return profile(
        activities=available_runtime().activities,
        record_shapes=order.shapes,
        profile_memory=order.memory,
        with_stack=order.stacks or order.modules,  # modules are recorded as a part of Python's stacks
        with_modules=order.modules,
        experimental_config=_ExperimentalConfig(profile_all_threads=all_threads),
    )


def synchronize() -> None:
    """Waits for every GPU that this process uses; a program need not have made its own the current one."""
    runtime = available_runtime()
    for device in runtime.used_devices():
        runtime.synchronize(device)


@contextmanager
def memory_history(snapshot: Path | None) -> Iterator[None]:
    """Keeps what is allocated and freed within it, with stacks, in `snapshot`; does nothing on the CPU."""
    if snapshot is None:
        yield
        return
    with available_runtime().memory_history(MAX_ALLOCATIONS) as dump:
        yield
        if dump is not None:
            export(dump, snapshot)


def export(write: Callable[[str], object], path: Path) -> None:
    """Has `write` make a file next to `path`, then renames it: a reader never sees half of one."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(temporary))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise MachineError(f"can't write the trace {path}: {error.strerror}; free some space") from error
