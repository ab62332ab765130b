"""Clocks that time the phases of steps without slowing them: nothing is synchronised before `read`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

STEP_END = ""
"""The mark that ends a step; every other mark is a phase's name."""


@dataclass(frozen=True)
class StepTiming:
    """One step, from the end of the step before it (or the block's start) to its own end, in nanoseconds."""

    step_ns: int
    phases_ns: dict[str, int]


class Clock(Protocol):
    """What a block of steps is timed with."""

    def start(self) -> None:
        """Begins a block: the next step starts now."""

    def mark(self, phase: str) -> None:
        """`phase` ends now; it began at the mark before."""

    def end_step(self) -> None:
        """The step ends now, and the next one begins."""

    def read(self) -> list[StepTiming]:
        """The steps since `start`; on a GPU this is the one place that waits for it."""


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used; tests put fakes in its place."""

    def record(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> Any:
        """Milliseconds, as float, from this event to `end_event`."""


@dataclass
class CpuClock:
    """`time.perf_counter_ns`: monotonic, with a resolution of tens of nanoseconds."""

    now_ns: Callable[[], int] = time.perf_counter_ns
    marks: list[tuple[str, int]] = field(default_factory=list)

    def start(self) -> None:
        self.marks = [(STEP_END, self.now_ns())]

    def mark(self, phase: str) -> None:
        self.marks.append((phase, self.now_ns()))

    def end_step(self) -> None:
        self.mark(STEP_END)

    def read(self) -> list[StepTiming]:
        return step_timings(self.marks)


@dataclass
class CudaClock:
    """CUDA events on the current stream; the host runs ahead of them as it does without a profiler.

    Events are reused from block to block, since creating one costs as much as recording it.
    """

    new_event: Callable[[], Event]
    synchronize: Callable[[], None]
    events: list[Event] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.synchronize()
        self.phases = []
        self.mark(STEP_END)

    def mark(self, phase: str) -> None:
        if len(self.phases) == len(self.events):
            self.events.append(self.new_event())
        self.events[len(self.phases)].record()
        self.phases.append(phase)

    def end_step(self) -> None:
        self.mark(STEP_END)

    def read(self) -> list[StepTiming]:
        self.synchronize()
        first = self.events[0]
        ends_ns = [round(first.elapsed_time(event) * 1e6) for event in self.events[: len(self.phases)]]
        return step_timings(list(zip(self.phases, ends_ns, strict=True)))


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


def clock_for(device: torch.device) -> Clock:
    """The clock that tells when work on `device` is done, not when it was submitted."""
    if device.type != "cuda":
        return CpuClock()
    return CudaClock(
        new_event=lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        synchronize=lambda: torch.cuda.synchronize(device),
    )
