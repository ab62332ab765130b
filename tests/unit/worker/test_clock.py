"""Clocks on a simulated stream: what is read was recorded, and nothing waits before it is read."""

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
from tests.sim.clock import Event, Host, Stream


@dataclass
class Gpu:
    """A simulated stream, of which an event that is not waited for has no time."""

    stream: Stream = field(default_factory=lambda: Stream(Host()))
    synchronized: int = 0
    created: int = 0

    def clock(self) -> EventClock:
        return EventClock(self.new_event, lambda event: event.record(self.stream), self.synchronize)

    def synchronize(self) -> None:
        self.synchronized += 1
        self.stream.synchronize()

    def new_event(self) -> Event:
        self.created += 1
        return Event()


def test_cuda_clock_times_steps_and_phases_by_events() -> None:
    gpu = Gpu()
    clock = gpu.clock()
    clock.start()
    for forward_ns, backward_ns in ((1_000_000, 2_500_000), (500_000, 6_000_000)):
        gpu.stream.submit(forward_ns)
        clock.mark("forward")
        gpu.stream.submit(backward_ns)
        clock.mark("backward")
        clock.end_step()
    assert clock.read() == [
        StepTiming(3_500_000, {"forward": 1_000_000, "backward": 2_500_000}),
        StepTiming(6_500_000, {"forward": 500_000, "backward": 6_000_000}),
    ]


def test_cuda_clock_synchronizes_once_at_either_end_and_reuses_its_events() -> None:
    gpu = Gpu()
    clock = gpu.clock()
    for _ in range(3):
        clock.start()
        for _ in range(4):
            gpu.stream.submit(7)
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
