"""Working through a trace in stretches changes its memory, and no figure."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.trace.analysis import tables
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.kineto.columns import Timed
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, span, step, write

RANGES = st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 12)), max_size=12)
SIZES = (1, 3, 50)


def timed(ranges: list[tuple[int, int]]) -> Timed:
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    return Timed(starts, np.array([length for _, length in ranges], dtype=np.int64))


@given(RANGES, RANGES, st.integers(1, 4))
def test_stretches_follow_each_other_and_cut_no_range(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "SIZE", size)
        found = list(tables.stretches(timed(ranges), timed(others)))
    assert [each.end_ns for each in found[:-1]] == [each.begin_ns for each in found[1:]]
    for start, length in ranges + others:
        (mine,) = (each for each in found if each.holds(np.array([start])).all())
        assert start + max(length, 1) <= mine.end_ns


def test_a_long_trace_is_cut() -> None:
    apart = timed([(10 * i, 5) for i in range(40)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "SIZE", 10)
        found = list(tables.stretches(apart))
    assert [each.begin_ns for each in found[1:]] == [100, 200, 300]


def assert_same_in_stretches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = msgspec.json.encode(analyse_paths([path]))
    for size in SIZES:
        monkeypatch.setattr(tables, "SIZE", size)
        assert msgspec.json.encode(analyse_paths([path])) == whole


def made_events() -> list[Event]:
    """Two steps with modules around operators, gaps that a late launch explains, work on two streams."""
    events: list[Event] = []
    for i in range(12):
        at = 100 * i
        events += [
            span("python_function", "nn.Module: Linear_0", at, 60),
            span("cpu_op", "aten::linear", at + 1, 50),
            span("cpu_op", "aten::addmm", at + 2, 30),
            span("cpu_op", "AddmmBackward0", at + 5, 20, tid=2),
            launch(at + 5, 2, 2 * i + 1),
            launch(at + 70, 2, 2 * i + 2),
            kernel("gemm", at + 20 + i, 20, 2 * i + 1),
            kernel("ncclDevKernel_AllReduce_Sum_f32", at + 30, 30 + 5 * i, 2 * i + 2, stream=9),
        ]
    return [*events, step(1, 0, 590), step(2, 600, 590)]


def test_a_made_trace_says_the_same_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_in_stretches(write(tmp_path / "rank0.json", made_events()), monkeypatch)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces next to the repository")
@pytest.mark.parametrize("directory", ["nccl_args_A100", "vit_H100"])
def test_a_real_trace_says_the_same_in_stretches(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SIZE", 1 << 30)
    path = min((REAL / directory).glob("*.json.gz"))
    whole = msgspec.json.encode(analyse_paths([path]))
    monkeypatch.setattr(tables, "SIZE", 500)
    assert msgspec.json.encode(analyse_paths([path])) == whole
