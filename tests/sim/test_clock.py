"""The virtual clock of simulated devices: streams are FIFOs, events in order, waiting never goes back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.clock import Event, Host, Stream

DURATIONS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30)
"""What the host takes before it submits a piece of work, and what that takes."""


@given(DURATIONS)
def test_a_stream_works_in_order_and_never_before_the_host_has_submitted(
    durations: list[tuple[int, int]],
) -> None:
    host = Host()
    stream = Stream(host)
    end_ns = 0
    for spent_ns, work_ns in durations:
        host.spend(spent_ns)
        assert stream.submit(work_ns) == max(end_ns, host.now_ns) + work_ns
        end_ns = stream.tail_ns
    stream.synchronize()
    assert host.now_ns == max(end_ns, sum(spent_ns for spent_ns, _ in durations))


@given(DURATIONS)
def test_events_are_in_order_and_their_differences_add_up(durations: list[tuple[int, int]]) -> None:
    host = Host()
    stream = Stream(host)
    events = []
    for spent_ns, work_ns in durations:
        host.spend(spent_ns)
        stream.submit(work_ns)
        events.append(Event())
        events[-1].record(stream)
        assert events[-1].query() == (stream.tail_ns <= host.now_ns)
    stream.synchronize()
    steps_ns = [round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(events)]
    assert all(step_ns >= 0 for step_ns in steps_ns)
    assert sum(steps_ns) == round(events[0].elapsed_time(events[-1]) * 1e6)


@given(DURATIONS, st.integers(1, 5))
def test_the_host_is_at_most_as_many_pieces_ahead_as_the_queue_holds(
    durations: list[tuple[int, int]], depth: int
) -> None:
    """A queue without end changes when work is done only where the host is slower than the device."""
    host, free = Host(), Host()
    stream, endless = Stream(host, depth=depth), Stream(free, depth=len(durations))
    for spent_ns, work_ns in durations:
        host.spend(spent_ns)
        free.spend(spent_ns)
        stream.submit(work_ns)
        endless.submit(work_ns)
        waiting = [end_ns for end_ns in stream.ends_ns if end_ns > host.now_ns]
        assert len(waiting) <= depth
        assert host.now_ns >= free.now_ns
    assert stream.tail_ns >= endless.tail_ns


@given(st.lists(st.integers(0, 100), min_size=1))
def test_waiting_is_monotonic(moments_ns: list[int]) -> None:
    host = Host()
    for index, at_ns in enumerate(moments_ns, 1):
        host.wait_until(at_ns)
        assert host.now_ns == max(moments_ns[:index])


def test_a_stream_that_waits_for_another_begins_after_it() -> None:
    host = Host()
    compute, comm = Stream(host), Stream(host)
    compute.submit(70)
    comm.submit(20, not_before_ns=compute.tail_ns)
    compute.submit(10)  # overlaps
    compute.wait_until(comm.tail_ns)
    assert (compute.tail_ns, comm.tail_ns, host.now_ns) == (90, 90, 0)


def test_no_time_between_events_that_it_is_not_known_for() -> None:
    host = Host()
    first, other = Stream(host, 0), Stream(host, 1)
    start, end, elsewhere = Event(), Event(), Event()
    assert start.query()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    start.record(first)
    first.submit(5)
    end.record(first)
    elsewhere.record(other)
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == 5e-6
    with pytest.raises(RuntimeError, match="two devices"):
        start.elapsed_time(elsewhere)
