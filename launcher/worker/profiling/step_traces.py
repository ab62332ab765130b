"""Traces of a few steps of a job that runs: of an unchanged program, and on request (`gpurun capture`)."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.control import ControlBlock, ControlDir, capture_name
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.records import CaptureRequest, ProfileConfig
from gpurun.launcher.worker.base.exit import print_to_log
from gpurun.launcher.worker.profiling.profiler import export, new_profiler, stop, synchronize


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
    _mark: record_function | None = None
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

    def _begin(self, request: CaptureRequest) -> None:
        assert self.block is not None
        if request.ranks is not None and self.rank not in request.ranks:
            self._request = None
        elif self.block.steps >= request.first_step:
            self._profiler = new_profiler(profile_config(request), all_threads=False)
            self._profiler.start()
            self._recorded = 0
            self._enter_step()

    def _go_on(self, profiler: profile) -> None:
        assert self._request is not None
        assert self._mark is not None
        self._mark.__exit__(None, None, None)
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
        self._mark = record_function(f"ProfilerStep#{self._recorded}")
        self._mark.__enter__()  # type: ignore[no-untyped-call]


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
    _annotation: Any = None
    _writer: threading.Thread | None = None
    done: bool = False
    written: bool = False

    @property
    def is_tracing(self) -> bool:
        """Whether its profiler is in use."""
        return self._profiler is not None

    def postpone(self, step: int) -> None:
        """Another trace is being taken in step number `step`: its own begins two steps later, if not yet."""
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
        elif position > 0:
            self._annotation.__exit__(None, None, None)
        if 0 <= position < self.config.steps:
            self._annotation = record_function(f"ProfilerStep#{position + 1}")
            self._annotation.__enter__()
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
