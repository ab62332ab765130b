"""A trace of a few steps of one variant, by `torch.profiler`."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.claim import boot_id
from gpurun.launcher.rundir.records import ProfileConfig
from gpurun.launcher.trace.analysis.collectives.calls import CALLS_KEY, CLOCK_KEY, CallRecord
from gpurun.launcher.trace.model import RANK_KEY, RankFacts
from gpurun.launcher.worker.accelerators.runtime import used_runtime
from gpurun.launcher.worker.meters.cpu_time import thread_waited_ns

EARLIER_NS = 1_000_000_000
"""Collectives that were called this long before a trace may still be waiting when it begins."""
_BACKEND = "gloo:"
_METHODS = {"send": "gloo:send", "recv": "gloo:recv"}


MAX_ALLOCATIONS = 1_000_000
"""The limit of a snapshot; older ones are forgotten."""


def capture(
    run_one_step: Callable[[], None],
    config: ProfileConfig,
    path: Path,
    *,
    align: Callable[[], None] = lambda: None,
    all_threads: bool = False,
    snapshot: Path | None = None,
    samples: int | None = None,
) -> None:
    """Writes a gzipped Kineto trace of `config.steps` steps to `path`, each marked as `ProfilerStep#N`.

    Before them it runs one more step, in which the profiler starts.

    Args:
        run_one_step: one optimizer step; its work on a GPU may still be under way when it returns.
        config: what to record.
        path: replaced in one step when the trace is complete.
        align: called before the first step that is recorded. The profiler takes longer to start on some ranks
            than on others: without a barrier the first step would show that as waiting.
        all_threads: also what Python threads do, as `dp` on the CPU needs it: else only those of autograd.
        samples: of this rank in a step, for the trace's header; `None`: a step isn't one rank's.
        snapshot: where to keep each allocation of the recorded steps, on CUDA.

    Raises:
        MachineError: the trace can't be written.
    """
    profiler = new_profiler(config, all_threads)
    profiler.prepare_trace()
    run_one_step()
    synchronize()
    profiler.start_trace()
    align()
    # By hand rather than by the profiler's schedule: its first step begins before the ranks are aligned.
    begun_ns, waited_ns = time.thread_time_ns(), thread_waited_ns()
    with memory_history(snapshot):
        for number in range(1, config.steps + 1):
            with record_function(f"ProfilerStep#{number}"):
                run_one_step()
        synchronize()  # not after each step: the host runs ahead of the GPU here as it does in timed steps
        if samples is not None:
            taken_ns = (time.thread_time_ns() - begun_ns, thread_waited_ns() - waited_ns)
            facts = RankFacts(samples, *(total_ns // config.steps for total_ns in taken_ns))
            profiler.add_metadata_json(RANK_KEY, json.dumps(asdict(facts)))
    stop(profiler.stop_trace)
    export(profiler.export_chrome_trace, path)


def run_unrecorded(run_one_step: Callable[[], None], steps: int, align: Callable[[], None]) -> None:
    """Runs the recorded steps on a rank that isn't recorded: the others need it in their collectives."""
    run_one_step()
    align()
    for _ in range(steps):
        run_one_step()


def new_profiler(config: ProfileConfig, all_threads: bool) -> profile:
    return CallProfile(
        activities=used_runtime().activities,
        record_shapes=config.shapes,
        profile_memory=config.memory,
        with_stack=config.stacks or config.modules,  # modules are recorded as a part of Python's stacks
        with_modules=config.modules,
        experimental_config=_experimental_config(all_threads),
    )


def _experimental_config(all_threads: bool) -> _ExperimentalConfig:
    """An older torch records the threads that torch itself starts, whatever is asked."""
    try:
        return _ExperimentalConfig(profile_all_threads=all_threads)
    except TypeError:
        return _ExperimentalConfig()


def synchronize() -> None:
    """Waits for every GPU that this process uses; a program need not have made its own the current one."""
    runtime = used_runtime()
    for device in runtime.used_devices():
        runtime.synchronize(device)


def stop(end: Callable[[], object]) -> None:
    """Ends a trace by `end`, with a device of this process as the current one.

    torch waits for the current device then. In a program that never called `set_device` that is the first
    GPU, on which every rank would get a context. Source: torch/autograd/profiler.py, `profile.__exit__`.
    """
    runtime = used_runtime()
    with ExitStack() as stack:
        for device in runtime.used_devices()[:1]:
            stack.enter_context(runtime.current(device))
        end()


@contextmanager
def memory_history(snapshot: Path | None) -> Iterator[None]:
    """Keeps what is allocated and freed within it, with stacks, in `snapshot`; does nothing on the CPU."""
    if snapshot is None:
        yield
        return
    with used_runtime().memory_history(MAX_ALLOCATIONS) as dump:
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


class _Entry(msgspec.Struct):
    profiling_name: str
    process_group: tuple[str, str]
    collective_seq_id: int
    time_created_ns: int
    is_p2p: bool = False


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


class CallProfile(profile):
    """A profiler whose traces also name their clock and hold the calls of gloo's collectives and messages.

    The events of a trace don't say of which group a collective of gloo is. Torch's flight recorder has the
    collectives, also those that C++ issues as DDP does, but no messages.
    """

    def prepare_trace(self) -> None:
        with warnings.catch_warnings():
            # torch 2.11 warns at each trace that it has the events of no other one: they aren't needed.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            super().prepare_trace()

    def start_trace(self) -> None:
        self._messages: list[CallRecord] = []
        self._since_ns = time.time_ns() - EARLIER_NS
        self._originals = _wrap_messages(self._messages) if dist.is_available() else {}
        super().start_trace()

    def stop_trace(self) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        calls = [*collective_calls(self._since_ns), *self._messages] if self._originals else []
        if calls:
            self.add_metadata_json(CALLS_KEY, json.dumps(calls))
        self.add_metadata_json(CLOCK_KEY, json.dumps(boot_id()))
        super().stop_trace()


def collective_calls(since_ns: int) -> list[CallRecord]:
    """The collectives of gloo called since then, as far as the flight recorder goes back."""
    entries: list[_Entry] = []
    with suppress(AttributeError, ImportError, RuntimeError, msgspec.MsgspecError):
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        entries = msgspec.json.decode(_dump_fr_trace_json(), type=_Dump).entries
    return [
        CallRecord(
            each.time_created_ns, each.profiling_name, each.process_group[0], each.collective_seq_id, None
        )
        for each in entries
        if each.profiling_name.startswith(_BACKEND) and not each.is_p2p and each.time_created_ns >= since_ns
    ]


def _wrap_messages(calls: list[CallRecord]) -> dict[str, Any]:
    """Has sends and receives add themselves to `calls`; the methods as they were."""
    # From the class's own dictionary: what `getattr` returns would not bind to a group when it is put back.
    originals = {name: vars(dist.ProcessGroup)[name] for name in _METHODS}
    for name in originals:
        bound = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, _recording(bound, _METHODS[name], calls))
    return originals


def _recording(original: Callable[..., Any], name: str, calls: list[CallRecord]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # observing a program must not end it
            ranks = dist.get_process_group_ranks(group)
            calls.append(CallRecord(time.time_ns(), name, group.group_name, None, ranks[peer]))
        return original(group, tensors, peer, *args, **kwargs)

    return call
