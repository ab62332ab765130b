"""The interval algebra against the plainest reference there is: sets of whole nanoseconds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.trace.analysis.digest import Waits, gpu_activity, measure
from gpurun.launcher.trace.intervals import EMPTY, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind

RANGES = st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 12)), max_size=12)


def build(ranges: list[tuple[int, int]]) -> Intervals:
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    return union(starts, starts + np.array([length for _, length in ranges], dtype=np.int64))


def points(ranges: list[tuple[int, int]]) -> set[int]:
    return {point for start, length in ranges for point in range(start, start + length)}


def covered(intervals: Intervals) -> set[int]:
    pairs = zip(intervals.starts.tolist(), intervals.ends.tolist(), strict=True)
    return {point for start, end in pairs for point in range(start, end)}


def assert_is(intervals: Intervals, expected: set[int]) -> None:
    """The set is right, and in the form that all other functions rely on."""
    assert covered(intervals) == expected
    assert intervals.length_ns == len(expected)
    assert (intervals.starts < intervals.ends).all()
    assert (intervals.ends[:-1] <= intervals.starts[1:]).all()


@given(RANGES)
def test_union(ranges: list[tuple[int, int]]) -> None:
    merged = build(ranges)
    assert_is(merged, points(ranges))
    assert (merged.ends[:-1] < merged.starts[1:]).all()


@given(RANGES, RANGES)
def test_intersect_subtract_and_join(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = build(one), build(other)
    assert_is(a.intersect(b), points(one) & points(other))
    assert_is(a.subtract(b), points(one) - points(other))
    assert_is(a.join(b), points(one) | points(other))
    assert_is(a.subtract(b).subtract(a), set())


@given(RANGES, st.integers(-25, 70), st.integers(0, 50))
def test_clip_and_gaps(ranges: list[tuple[int, int]], start: int, length: int) -> None:
    window = set(range(start, start + length))
    assert_is(build(ranges).clip(start, start + length), points(ranges) & window)
    assert_is(build(ranges).gaps(start, start + length), window - points(ranges))


WORK = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12), st.sampled_from(list(GpuKind))), min_size=1, max_size=15
)


@given(WORK, RANGES, RANGES, RANGES, st.integers(-5, 30), st.integers(0, 60))
def test_the_parts_of_a_window_add_up(
    work: list[tuple[int, int, GpuKind]],
    others: list[tuple[int, int]],
    data: list[tuple[int, int]],
    comm: list[tuple[int, int]],
    start: int,
    length: int,
) -> None:
    starts = np.array([each[0] for each in work], dtype=np.int64)
    ends = starts + np.array([each[1] for each in work], dtype=np.int64)
    kinds = np.array([each[2] for each in work], dtype=np.int8)
    waits = Waits(data=build(data), comm=build(comm), runtime=EMPTY, ops=EMPTY)
    activity = gpu_activity(starts, ends, kinds, build(others))
    found = measure(activity, start, start + length, waits, None)

    window = set(range(start, start + length))
    by_kind = {kind: points([each[:2] for each in work if each[2] is kind]) & window for kind in GpuKind}
    copies = by_kind[GpuKind.MEMCPY] | by_kind[GpuKind.MEMSET]
    compute, collectives = by_kind[GpuKind.COMPUTE], by_kind[GpuKind.COMM]
    other_steps = (points(others) & window) - compute - collectives - copies
    idle = window - compute - collectives - copies - other_steps
    assert (found.compute, found.comm, found.copy) == (len(compute), len(collectives), len(copies))
    assert found.overlap == len(compute & collectives)
    assert covered(found.exposed_comm) == collectives - compute
    assert found.exposed_copy == len(copies - compute - collectives)
    assert (found.other_steps, found.idle) == (len(other_steps), len(idle))
    exposed = found.exposed_comm.length_ns + found.exposed_copy
    assert found.compute + exposed + found.other_steps + found.idle == length
    causes, doing = found.idle_by_cause, found.idle_by_host
    assert causes.data == len(idle & points(data))
    assert causes.comm_wait == len(idle & points(comm) - points(data))
    assert causes.host + causes.comm_wait + causes.data + causes.other == len(idle)
    assert doing.runtime + doing.data + doing.op + doing.other == len(idle)
