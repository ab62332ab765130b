"""Times the steps of an unchanged program."""

import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, ParamSpec

import torch
from msgspec.structs import replace

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.accelerators import CPU, accelerator_of, gpu_kinds
from gpurun.launcher.rundir.files import RunDir, append_lines, keep_lines
from gpurun.launcher.rundir.records import Event, Kind, ProgramConfig, StepRecord
from gpurun.launcher.worker.accelerators.clock import Stamps
from gpurun.launcher.worker.accelerators.runtime import runtime_of, used_runtime
from gpurun.launcher.worker.base.exit import print_to_log
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.profiling.step_traces import StepCapture, StepTracer
from gpurun.launcher.worker.program.step_rules import Classifier, KeptSteps, StepBoundary

P = ParamSpec("P")

FLUSH_NS = 500_000_000
"""Records are written this often: seldom enough to cost nothing, often enough to show progress."""
PROGRESS_PARTS = 2000
"""Progress is reported once in this part of the time so far."""
MAX_PROGRESS = 2 * PROGRESS_PARTS
"""Reports of progress in the file; of more, every second is removed."""


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """The method of a `StepRecorder`; an error in it ends the recording, not the program that it observes."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            recorder: Any = args[0]
            recorder.stop(error)

    return guarded


def never_release(*values: object) -> None:
    """Keeps objects until the process ends, without their destructors being called even then.

    In a forked process CUDA can't be used, and the destructor of an event makes its device the current one:
    the error that this throws ends the process. Source: torch/include/c10/cuda/CUDAEvent.h, `~CUDAEvent`.
    """
    for value in values:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@dataclass
class StepRecorder:
    """One rank's steps, from its optimizers' calls or, once it uses them, from its `gpurun.step()` blocks.

    Every call of a method is a few µs of the program's time; what takes longer waits for `flush`.
    """

    config: ProgramConfig
    rank: int
    run: RunDir
    tracer: StepTracer | None = None
    capture: StepCapture | None = None
    """Counts the steps for observers, and takes the traces that they request."""
    stamps: Stamps | None = None
    """Chosen at the first step, when it is known whether the program uses CUDA."""
    calls: int = 0
    """The calls of any optimizer."""
    noise: NoiseMeter = field(default_factory=NoiseMeter)
    classifier: Classifier = field(init=False)
    kept: KeptSteps = field(init=False)
    _boundary: StepBoundary = field(default_factory=StepBoundary)
    _device: torch.device | None = None
    """The device of the first optimizer whose weights are on a GPU."""
    _is_marked: bool = False
    """Whether the program marks its steps itself."""
    _depth: int = 0
    _start: Any = None
    _is_captured: bool = False
    _steps_ns: tuple[int, int] | None = None
    """When the first step began and the last one ended, on the clock of the events."""
    _is_slowed: bool = False
    """Whether the current step is traced or next to a traced one, or slow since others were traced."""
    _ended: "deque[tuple[Any, Any, Kind]]" = field(default_factory=deque)
    _num_ended: int = 0
    _began_ns: int = field(default_factory=time.perf_counter_ns)
    _flushed_ns: int = field(default_factory=time.perf_counter_ns)
    _reported_ns: int = 0
    _num_reports: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self._read = self.noise.read()
        self.classifier = Classifier(self.config.launch, self.config.warmup)
        self.kept = KeptSteps(self.config.launch)

    @harmless
    def optimizer_stepped(self, optimizer: object, skipped: bool = False) -> None:
        """An optimizer has updated its weights, or a GradScaler has skipped that."""
        self.calls += 1
        if self._device is None:
            self._device = device_of(optimizer)
        if self._is_marked or self._closed or self._is_capturing():
            return
        answer = self._boundary.call(optimizer)
        if answer == "inside":
            return
        now = self._now()
        if answer == "end":
            self._end(now, "skipped" if skipped else "timed")
        self._begin(now)

    @harmless
    def enter_step(self) -> None:
        """The program marks the beginning of a step; ignored within another one.

        What lies between two steps belongs to the second, as with optimizers: a loop waits for data there.
        """
        self._depth += 1
        is_first, self._is_marked = not self._is_marked, True
        if self._depth > 1 or self._closed:
            return
        if self._is_capturing():
            self._begin(None)
        elif is_first or self._start is None:
            self._begin(self._now())

    @harmless
    def leave_step(self, completed: bool) -> None:
        """The program marks the end of the step."""
        self._depth -= 1
        if self._depth or self._closed:
            return
        now = self._now() if completed and not self._is_capturing() else None
        if now is not None:
            self._end(now, "timed")
        self._begin(now)

    def flush(self) -> None:
        """Writes the steps whose times are known by now; of a long program a sample of them."""
        records = self._with_noise(self._records())
        if not records:
            return
        try:
            self.keep(records)
            if self._flushed_ns - self._reported_ns >= (self._flushed_ns - self._began_ns) / PROGRESS_PARTS:
                self.report_progress()
        except MachineError as error:
            self.stop(error)

    def keep(self, records: list[StepRecord]) -> None:
        """Writes steps, as far as they are kept."""
        path, level = self.run.steps(self.config.variant, self.rank), self.kept.sample.level
        lines = self.kept.add(records)
        if self.kept.sample.level > level:
            keep_lines(path, StepRecord, self.kept.has)
        if lines:
            append_lines(path, lines)

    def _with_noise(self, records: list[StepRecord]) -> list[StepRecord]:
        """The steps since the last flush, with what of their time the rank waited for a core."""
        lasted_ns, self._flushed_ns = (now := time.perf_counter_ns()) - self._flushed_ns, now
        before, self._read = self._read, self.noise.read()
        self.noise.clear()
        self.noise.add(before, self._read)
        found = self.noise.per_step(1)

        def of_step(total_ns: int | None, step_ns: int) -> int | None:
            return None if total_ns is None else round(total_ns * step_ns / max(lasted_ns, 1))

        return [
            replace(
                record,
                queue_ns=of_step(found.queue_ns, record.step_ns),
                others_ns=of_step(found.others_ns, record.step_ns),
                cpu_ns=of_step(found.cpu_ns, record.step_ns),
                thread_cpu_ns=of_step(found.thread_cpu_ns, record.step_ns),
                children_ns=of_step(found.children_ns, record.step_ns),
            )
            for record in records
        ]

    def stop(self, error: Exception) -> None:
        """Records nothing more; the program continues, since its results matter more."""
        if not self._closed:
            print_to_log(f"gpurun: no more steps are recorded: {error}")
        self._closed = True

    def report_progress(self) -> None:
        """Rank 0 writes how many steps have ended."""
        self._reported_ns = time.perf_counter_ns()
        if self.rank == 0:
            variant, num = self.config.variant, self._num_ended
            self.add_progress(Event.now("run", variant, num, steps_ns=self._steps_ns if num else None))

    def add_progress(self, event: Event) -> None:
        """Appends to the reports of progress, which thin out where there are many."""
        path = self.run.events(self.config.launch)
        if self._num_reports >= MAX_PROGRESS:
            stays = cycle((True, False))
            keep_lines(path, Event, lambda report: report.stage != "run" or next(stays))
            self._num_reports //= 2
        append_lines(path, [event])
        self._num_reports += 1

    def close(self, wait: bool) -> None:
        """Writes the remaining steps; in any case the last, which has their number and the peak of memory.

        Args:
            wait: for the GPU, and for a trace that is being written; not after a failure, when it may hang.
        """
        self._write_rest(wait)
        self._closed = True
        if self.tracer is not None and wait:
            self.tracer.close()

    @harmless
    def _write_rest(self, wait: bool) -> None:
        if wait and self.stamps is not None:
            self.stamps.wait()
        self.flush()
        if lines := self.kept.rest():
            append_lines(self.run.steps(self.config.variant, self.rank), lines)
        self.report_progress()

    def abandon(self) -> None:
        """Records nothing more: in a process that the program forked, whose steps aren't this rank's."""
        self._closed = True
        never_release(self._ended, self._start, self.tracer, self.capture)
        self._ended, self._start, self.tracer, self.capture = deque(), None, None, None

    def _is_capturing(self) -> bool:
        """Whether the program records a CUDA graph: an event in it has no time, and asking for one fails."""
        device = self.stamps.device if self.stamps else self._device
        return device is not None and runtime_of(device).is_capturing(device)

    def _now(self) -> Any:
        if self.stamps is None:
            device = self._device or next(iter(used_runtime().used_devices()), torch.device(CPU.name))
            self.stamps = runtime_of(device).stamps(device)
        return self.stamps.now()

    def _begin(self, now: Any) -> None:
        self._start = now
        if self._steps_ns is None and now is not None:
            self._steps_ns = (time.monotonic_ns(),) * 2

    def _end(self, now: Any, kind: Kind) -> None:
        if self._start is None or self._steps_ns is None:
            return  # it began while a graph was recorded
        self._ended.append((self._start, now, "profile" if self._is_slowed else kind))
        self._num_ended += 1
        self._steps_ns = (self._steps_ns[0], time.monotonic_ns())
        if time.perf_counter_ns() - self._flushed_ns > FLUSH_NS:
            self.flush()
        self._is_slowed = self._trace()

    def _trace(self) -> bool:
        """Whether tracing slows the step that begins now; only one profiler can run."""
        was_captured, tracer = self._is_captured, self.tracer
        if self.capture is not None:
            self._is_captured = self.capture.between_steps(waits=tracer is not None and tracer.is_tracing)
        if self._is_captured and tracer is not None:
            tracer.postpone(self._num_ended)
        is_traced = tracer is not None and tracer.before(self._num_ended)
        if self._is_slowed and self.stamps is not None:
            is_traced |= accelerator_of(self.stamps.device.type).is_slow_after_trace
        return was_captured or self._is_captured or is_traced  # a capture is written in the step after it

    def _records(self) -> list[StepRecord]:
        if self.stamps is None or not self._ended:
            return []
        peak = runtime_of(self.stamps.device).peak_bytes(self.stamps.device)
        records = []
        while self._ended:
            start, end, kind = self._ended[0]
            step_ns = self.stamps.elapsed_ns(start, end)
            if step_ns is None:
                break  # the GPU has not finished this step, nor those after it
            self._ended.popleft()
            records.append(self.classifier.add(step_ns, kind, peak))
        return records


def device_of(optimizer: object) -> torch.device | None:
    """The device of an optimizer's weights, of which a program need not have made it the current one."""
    groups = getattr(optimizer, "param_groups", ())
    weights = (weight for group in groups for weight in group["params"])
    kinds = {kind.name for kind in gpu_kinds()}
    return next((weight.device for weight in weights if weight.device.type in kinds), None)
