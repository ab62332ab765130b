"""Traces of a few steps by `torch.profiler`: of a variant, of a program, on request (`gpurun capture`)."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.snapshot import FlightRecord, RecordedCall
from gpurun.launcher.rundir.claim import boot_id
from gpurun.launcher.rundir.control import ControlBlock, ControlDir, capture_name
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.records import CaptureRequest, ProfileConfig
from gpurun.launcher.trace.added_by_ranks import (
    CALLS_KEY,
    CLOCK_KEY,
    RANK_KEY,
    STEP_MARK,
    CallRecord,
    RankFacts,
)
from gpurun.launcher.worker.accelerators.runtime import used_runtime
from gpurun.launcher.worker.base.exit import print_to_log
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
    """Writes a gzipped Kineto trace of `config.steps` steps to `path`, each with its mark.

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
            with step_mark(number):
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


def step_mark(number: int) -> ExitStack:
    """Marks the current range as a step in the trace, until it is closed: for gpurun, and for other tools."""
    marks = ExitStack()
    for name in (STEP_MARK, "ProfilerStep#"):
        marks.enter_context(record_function(f"{name}{number}"))
    return marks


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


def abandon(profiler: profile, mark: ExitStack | None) -> None:
    """Ends a trace that isn't written, in the step that `mark` marks, if one is recorded yet."""
    if mark is None:  # only prepared: torch can't take that back otherwise
        profiler.start_trace()
    else:
        mark.close()
    stop(profiler.stop_trace)


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


class CallProfile(profile):
    """A profiler whose traces also name their clock and hold the calls of gloo's collectives and messages.

    The events of a trace don't say of which group a collective of gloo is. Torch's flight recorder has the
    collectives, also those that C++ issues as DDP does, but no messages.
    """

    def prepare_trace(self) -> None:
        # torch 2.11 warns at each trace that it has the events of no other one: they aren't needed.
        with without_warning("Warning: Profiler clears events"):
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


@contextmanager
def without_warning(beginning: str) -> Iterator[None]:
    """Leaves out the warning that begins so.

    `warnings.catch_warnings` would show all others again that are shown once only.
    """
    entry = ("ignore", re.compile(beginning), Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with suppress(ValueError):
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


def collective_calls(since_ns: int) -> list[CallRecord]:
    """The collectives of gloo called since then, as far as the flight recorder goes back."""
    entries: list[RecordedCall] = []
    with suppress(AttributeError, ImportError, RuntimeError, msgspec.MsgspecError):
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        entries = msgspec.json.decode(_dump_fr_trace_json(), type=FlightRecord).entries
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


def open_block(run: RunDir, launch: str, rank: int) -> ControlBlock | None:
    """This rank's control block; `None` where the command didn't create one."""
    try:
        with ControlDir(run.control(launch)) as control:
            return control.block(rank)
    except OSError:
        return None


def read_request(run: RunDir, launch: str, number: int) -> CaptureRequest:
    """Request number `number`, which is written before the bell rings."""
    return read_json(run.control(launch) / capture_name(number), CaptureRequest)


def profile_config(request: CaptureRequest) -> ProfileConfig:
    return ProfileConfig(request.steps, ranks=request.ranks)


@dataclass
class StepCapture:
    """Traces of programs whose steps are only observed: a trace begins and ends between two of them.

    Not every rank sees the bell before the same step, so the request names the first one to be recorded.
    """

    run: RunDir
    launch: str
    rank: int
    block: ControlBlock | None
    answered: int = 0
    _request: CaptureRequest | None = None
    _profiler: profile | None = None
    _mark: ExitStack | None = None
    _recorded: int = 0

    def between_steps(self, waits: bool = False) -> bool:
        """Called after every step; returns whether the next one is recorded: its time doesn't count.

        Args:
            waits: because another trace is being taken.
        """
        if self.block is None:
            return False
        self.block.count_step()
        if self._profiler is not None:
            self._go_on(self._profiler)
        if self._request is None and self.block.bell > self.answered:
            self.answered += 1
            self._request = read_request(self.run, self.launch, self.answered)
        if self._profiler is None and self._request is not None and not waits:
            self._begin(self._request)
        return self._profiler is not None

    def give_up(self) -> None:
        """Ends a trace that is being taken without writing it: another profiler is to begin."""
        if self._profiler is not None:
            abandon(self._profiler, self._mark)
            print_to_log(
                "gpurun: the capture has ended without a trace: the program's own profiler has begun"
            )
            self._request = self._profiler = self._mark = None

    def _begin(self, request: CaptureRequest) -> None:
        assert self.block is not None
        if request.ranks is not None and self.rank not in request.ranks:
            self._request = None
        elif self.block.steps >= request.first_step - 1:
            # The step before warms the profiler up: CUPTI before 13.1 loses the first kernels of a session.
            # Source: https://github.com/pytorch/pytorch/issues/192021
            self._profiler = new_profiler(profile_config(request), all_threads=False)
            self._profiler.prepare_trace()
            self._recorded = 0

    def _go_on(self, profiler: profile) -> None:
        assert self._request is not None
        if self._mark is None:
            profiler.start_trace()
        else:
            self._mark.close()
        if self._recorded < self._request.steps:
            self._enter_step()
            return
        synchronize()  # the GPU may lag behind by several steps
        stop(profiler.stop)
        path = self.run.captured_trace(self.launch, self._request.number, self.rank)
        try:
            export(profiler.export_chrome_trace, path)
        except MachineError as error:  # observing a job must not end it
            print_to_log(str(error))
        self._request = self._profiler = self._mark = None

    def _enter_step(self) -> None:
        self._recorded += 1
        self._mark = step_mark(self._recorded)


@dataclass
class StepTracer:
    """Records `config.steps` steps from step number `first` on; called at the end of every step.

    The profiler starts up in the step before them, and the trace is written by a thread after them. None of
    these steps is timed.
    """

    config: ProfileConfig
    path: Path
    first: int
    new_profiler: Callable[[], Any] | None = None
    _profiler: Any = None
    _mark: ExitStack | None = None
    _writer: threading.Thread | None = None
    done: bool = False
    written: bool = False

    @property
    def is_tracing(self) -> bool:
        """Whether its profiler is in use."""
        return self._profiler is not None

    def give_up(self) -> None:
        """Ends a trace without writing it, and takes no other; waits for one that is being written."""
        if self._writer is not None:
            self._writer.join()
        elif self._profiler is not None:
            abandon(self._profiler, self._mark)
            self._profiler = None
        self.done = True

    def postpone(self, step: int) -> None:
        """Another profiler is in use in step number `step`: its own begins two steps later, if not yet."""
        if not self.is_tracing and not self.done:
            self.first = max(self.first, step + 2)

    def before(self, step: int) -> bool:
        """Gets ready for step number `step`, which begins now; whether tracing slows that one down."""
        if self.done or step < self.first - 1:
            return self._is_writing()
        position = step - self.first
        if self._profiler is None:
            self._prepare()
        if position == 0:
            self._profiler.start_trace()
        elif self._mark is not None:
            self._mark.close()
        if 0 <= position < self.config.steps:
            self._mark = step_mark(position + 1)
        elif position >= self.config.steps:
            self._finish()
        return True

    def close(self) -> None:
        """Waits for the trace to be written; one that lacks steps is dropped."""
        if self._writer is not None:
            self._writer.join()
        self.done = True

    def _prepare(self) -> None:
        self._profiler = self.new_profiler() if self.new_profiler else new_profiler(self.config, False)
        self._profiler.prepare_trace()
        synchronize()

    def _finish(self) -> None:
        synchronize()  # the GPU may lag behind by several steps
        stop(self._profiler.stop_trace)
        self.done = True
        self._writer = threading.Thread(target=self._write, name="gpurun-trace", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        try:
            export(self._profiler.export_chrome_trace, self.path)
            self.written = True
        except MachineError as error:
            print_to_log(str(error))
        self._profiler = None

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()
