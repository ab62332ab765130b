"""Clocks against fakes at the event API: what is read was recorded, and nothing waits before it is read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.worker.accelerators.clock import (
    STEP_END,
    EventClock,
    HostClock,
    StepTiming,
    step_timings,
)


@dataclass
class FakeGpu:
    """A stream whose events happen at given times, known only after a synchronisation."""

    times_ms: Iterator[float]
    synchronized: int = 0
    created: int = 0
    recorded_since_sync: int = 0

    def synchronize(self) -> None:
        self.synchronized += 1
        self.recorded_since_sync = 0

    def new_event(self) -> "FakeEvent":
        self.created += 1
        return FakeEvent(self)


@dataclass
class FakeEvent:
    gpu: FakeGpu
    at_ms: float = field(default=float("nan"))

    def record(self) -> None:
        self.at_ms = next(self.gpu.times_ms)
        self.gpu.recorded_since_sync += 1

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert self.gpu.recorded_since_sync == 0, "read before the GPU was done"
        return end_event.at_ms - self.at_ms

    def query(self) -> bool:
        return self.gpu.recorded_since_sync == 0


def test_cuda_clock_times_steps_and_phases_by_events() -> None:
    gpu = FakeGpu(iter([100.0, 101.0, 103.5, 103.5, 104.0, 110.0, 111.0]))
    clock = EventClock(gpu.new_event, FakeEvent.record, gpu.synchronize)
    clock.start()
    for _ in range(2):
        clock.mark("forward")
        clock.mark("backward")
        clock.end_step()
    assert clock.read() == [
        StepTiming(3_500_000, {"forward": 1_000_000, "backward": 2_500_000}),
        StepTiming(7_500_000, {"forward": 500_000, "backward": 6_000_000}),
    ]


def test_cuda_clock_synchronizes_once_at_either_end_and_reuses_its_events() -> None:
    gpu = FakeGpu(iter(float(i) for i in range(100)))
    clock = EventClock(gpu.new_event, FakeEvent.record, gpu.synchronize)
    for _ in range(3):
        clock.start()
        for _ in range(4):
            clock.mark("forward")
            clock.end_step()
        assert gpu.synchronized % 2 == 1, "nothing may wait while steps run"
        clock.read()
    assert gpu.synchronized == 6
    assert gpu.created == 9


def test_cpu_clock_sums_a_phase_that_comes_twice() -> None:
    times = iter([0, 10, 30, 40, 70, 75])
    clock = HostClock(now_ns=lambda: next(times))
    clock.start()
    for phase in ("forward", "backward", "forward", "backward"):
        clock.mark(phase)
    clock.end_step()
    assert clock.read() == [StepTiming(75, {"forward": 20, "backward": 50})]


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=6), min_size=1, max_size=20))
def test_steps_add_up_to_the_block(gaps_by_step: list[list[int]]) -> None:
    marks, now = [(STEP_END, 7)], 7
    for gaps in gaps_by_step:
        for i, gap in enumerate(gaps):
            now += gap
            marks.append((f"phase{i % 3}", now))
        now += 1
        marks.append((STEP_END, now))
    steps = step_timings(marks)
    assert len(steps) == len(gaps_by_step)
    assert sum(step.step_ns for step in steps) == now - 7
    for step, gaps in zip(steps, gaps_by_step, strict=True):
        assert sum(step.phases_ns.values()) == sum(gaps) == step.step_ns - 1
