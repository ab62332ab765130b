"""A trace of a few steps of an unchanged program."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.records import ProfileConfig
from gpurun.launcher.worker.base.exit import print_to_log
from gpurun.launcher.worker.profiling.profiler import export, new_profiler, stop, synchronize


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
