"""Clocks that time steps without slowing them down: nothing is synchronized before the times are read."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

STEP_END = ""
"""The mark that ends a step; every other mark is a phase's name."""


@dataclass(frozen=True)
class StepTiming:
    """One step, from the end of the step before it (or the block's start) to its own end, in nanoseconds.

    Not a `StepRecord`: a clock doesn't know which round and launch the step belongs to.
    """

    step_ns: int
    phases_ns: dict[str, int]


class Clock(Protocol):
    """Times a block of steps and the phases in them."""

    def start(self) -> None:
        """Begins a block: the next step starts now."""

    def mark(self, phase: str) -> None:
        """`phase` ends now; it began at the mark before."""

    def end_step(self) -> None:
        """The step ends now, and the next one begins."""
        self.mark(STEP_END)

    def read(self) -> list[StepTiming]:
        """The steps since `start`; on a GPU only this method waits for it."""


class Stamps(Protocol):
    """Points in time that are compared later, when they are known: taking one costs next to nothing."""

    device: torch.device

    def now(self) -> Any:
        """A mark of this moment; on a GPU of when the work submitted so far will be done."""

    def elapsed_ns(self, start: Any, end: Any) -> int | None:
        """Nanoseconds between two moments; `None` while the later one is in the future."""

    def wait(self) -> None:
        """Returns when no moment is in the future."""


class TimingEvent(Protocol):
    """The part of a device's timing event (`torch.cuda.Event`) that is used; tests have fakes of it."""

    def elapsed_time(self, end_event: Any) -> Any:
        """Milliseconds, as float, from this event to `end_event`."""

    def query(self) -> bool:
        """Whether the work before the event is done."""


@dataclass
class HostClock(Clock):
    """`time.perf_counter_ns`: monotonic, with a resolution of tens of nanoseconds."""

    now_ns: Callable[[], int] = time.perf_counter_ns
    marks: list[tuple[str, int]] = field(default_factory=list)

    def start(self) -> None:
        self.marks = [(STEP_END, self.now_ns())]

    def mark(self, phase: str) -> None:
        self.marks.append((phase, self.now_ns()))

    def read(self) -> list[StepTiming]:
        return step_timings(self.marks)


@dataclass
class EventClock(Clock):
    """Events on the device's current stream; the host runs ahead of them as it does in training.

    Events are reused from block to block, since creating one costs as much as recording it.
    """

    new_event: Callable[[], TimingEvent]
    record: Callable[[Any], None]
    """Records an event on the device's own stream, whichever device is current."""
    synchronize: Callable[[], None]
    events: list[TimingEvent] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.synchronize()
        self.phases = []
        self.mark(STEP_END)

    def mark(self, phase: str) -> None:
        if len(self.phases) == len(self.events):
            self.events.append(self.new_event())
        self.record(self.events[len(self.phases)])
        self.phases.append(phase)

    def read(self) -> list[StepTiming]:
        # From mark to mark: torch gives a 32-bit float, whose last digit is 8 µs in a block of 100 s.
        # Source: torch/include/c10/cuda/CUDAEvent.h, `elapsed_time`.
        self.synchronize()
        pairs = pairwise(self.events[: len(self.phases)])
        gaps_ns = (round(start.elapsed_time(end) * 1e6) for start, end in pairs)
        return step_timings(list(zip(self.phases, accumulate(gaps_ns, initial=0), strict=True)))


def step_timings(marks: list[tuple[str, int]]) -> list[StepTiming]:
    """Steps from marks (phase, end in ns); a phase that is marked several times in a step is summed."""
    steps: list[StepTiming] = []
    phases: dict[str, int] = {}
    step_start = previous = marks[0][1]
    for phase, end_ns in marks[1:]:
        if phase == STEP_END:
            steps.append(StepTiming(end_ns - step_start, phases))
            phases, step_start = {}, end_ns
        else:
            phases[phase] = phases.get(phase, 0) + end_ns - previous
        previous = end_ns
    return steps


class EventStamps:
    """Events on the device's current stream; they are queried, not waited for."""

    def __init__(
        self,
        device: torch.device,
        new_event: Callable[[], TimingEvent],
        record: Callable[[Any], None],
        synchronize: Callable[[], None],
    ) -> None:
        self.device, self._new_event, self._record, self._synchronize = device, new_event, record, synchronize

    def now(self) -> TimingEvent:
        event = self._new_event()
        self._record(event)
        return event

    def elapsed_ns(self, start: TimingEvent, end: TimingEvent) -> int | None:
        # The first event may be on another stream, and be late: torch raises unless both are done.
        # Source: torch/include/c10/cuda/CUDAEvent.h, `elapsed_time`.
        if not (start.query() and end.query()):
            return None
        elapsed_ms: float = start.elapsed_time(end)
        return max(1, round(elapsed_ms * 1e6))  # 0 where nothing was submitted between them

    def wait(self) -> None:
        self._synchronize()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps Python's garbage collector out of timed steps: it would slow one rank and make the others wait.

    And out of large imports, which make objects and no garbage: a tenth of their time would go into looking.
    """
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
