"""Reading trace files: every block boundary, exact times, and what is wrong with files."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.tables import nest
from gpurun.launcher.trace.kineto import trace_file
from gpurun.launcher.trace.kineto.columns import Spans, needs_text, time_texts, to_ns
from gpurun.launcher.trace.kineto.read_trace import read_trace
from gpurun.launcher.trace.kineto.trace_file import find_events, scan_events
from tests.unit.trace.trace_files import kernel, launch, span, write

AWKWARD = ["}, {", '"}, {"', "\\", '\\"', "]}", '{"traceEvents": [', "\u2028\x07", "名前", "<script>", ""]

NESTED = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(AWKWARD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(AWKWARD), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(AWKWARD), NESTED, max_size=3), max_size=6),
    st.booleans(),
    st.sampled_from([1, 2, 3, 7, trace_file.PIECE_BYTES]),
)
def test_scan_finds_every_event_whatever_strings_hold(events: list[str], spaced: bool, piece: int) -> None:
    text = json.dumps(events, indent=1 if spaced else None)[1:].encode() + b', "x": [{}]}'
    with patch.object(trace_file, "PIECE_BYTES", piece):
        scan = scan_events(text)
    cut = [text[start:end] for start, end in zip(scan.starts.tolist(), scan.ends.tolist(), strict=True)]
    assert [json.loads(each) for each in cut] == events
    assert scan.close is not None
    assert text[scan.close :] == b'], "x": [{}]}'


@given(st.dictionaries(st.sampled_from([*AWKWARD, "traceEvent"]), NESTED, max_size=3))
def test_the_head_ends_at_the_top_level_key(header: dict[str, Any]) -> None:
    inner = {"inner": {"traceEvents": [1]}, "traceEvents ": "traceEvents"}
    head = json.dumps({**header, **inner})[:-1] + ', "traceEvents" : ['
    assert find_events(head.encode() + b"{}]}") == len(head.encode())
    assert find_events(head[:-1].encode()) is None


@pytest.mark.parametrize("size", [64, 100, 333, 1000])
def test_blocks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    events = [
        span("cpu_op", AWKWARD[i % len(AWKWARD)] * 3, i, 1, Shapes=[{"a": [{}, {}]}, {"b": "}, {"}])
        for i in range(40)
    ]
    path = write(tmp_path / "trace.json", events, before="x" * 200)
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", size)
    trace = read_trace(path)
    assert len(trace.ops) == 40
    assert [trace.op_names[i] for i in trace.ops.name] == [event["name"] for event in events]
    assert trace.ops.start.tolist() == [1000 * i for i in range(40)]


def test_plain_gzip_and_bare_arrays_say_the_same(tmp_path: Path) -> None:
    events = [kernel("k", 5, 2)]
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(events))
    byte_order_mark = tmp_path / "bom.json"
    byte_order_mark.write_bytes(b"\xef\xbb\xbf" + json.dumps({"traceEvents": events}).encode())
    files = [write(tmp_path / "a.json", events), write(tmp_path / "b.json.gz", events), bare, byte_order_mark]
    assert {analyse_paths([file]).ranks[0].total.compute_us for file in files} == {2.0}


def test_keys_after_the_events_count(tmp_path: Path) -> None:
    text = '{"traceEvents": [%s], "baseTimeNanoseconds": 1700000000000000000, "distributedInfo": {"rank": 5}}'
    (tmp_path / "late.json").write_text(text % json.dumps(kernel("k", 1.5, 2.25)))
    report = analyse_paths([tmp_path])
    assert (report.ranks[0].rank, report.base_time_ns) == (5, 1700000000000001000)


@given(st.lists(st.integers(0, (1 << 43) * 1000 - 1), min_size=1, max_size=5))
def test_doubles_give_back_every_nanosecond_of_new_files(times_ns: list[int]) -> None:
    texts = [f"{time // 1000}.{time % 1000:03d}" for time in times_ns]
    times_us = msgspec.json.decode(f"[{','.join(texts)}]".encode(), type=list[float])
    base_us = int(times_us[0])
    assert not needs_text(times_us)
    assert to_ns(times_us, base_us).tolist() == [time - base_us * 1000 for time in times_ns]


@given(st.integers(0, 1 << 61))
def test_large_times_are_read_from_their_text(time_ns: int) -> None:
    text = f"{time_ns // 1000}.{time_ns % 1000:03d}"
    (found,) = time_texts(f'[{{"ts": {text}, "dur": 1e3}}]'.encode())
    assert found == (time_ns, 1_000_000)


@pytest.mark.parametrize("base_us", [0, 1_694_128_201_435_418, (1 << 53) + 1, (1 << 62) + 3])
def test_absolute_times_keep_their_nanoseconds(tmp_path: Path, base_us: int) -> None:
    event = json.dumps(kernel("k", 0, 0)).replace('"ts": 0, "dur": 0', '"ts": %s, "dur": %s')
    events = [
        event % (f"{base_us}.001", "1.5"),
        event % (f"{base_us + 1}.502", "0.001"),
        event % (base_us + 9, 1),
    ]
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + ",".join(events) + "]}")
    total = analyse_paths([path]).ranks[0].total
    assert round(total.span_us * 1000) == 9999
    assert round(total.compute_us * 1000) == 1500 + 1 + 1000
    assert msgspec.json.encode(analyse_paths([path]))


def test_whole_microseconds_beyond_doubles(tmp_path: Path) -> None:
    base_us = (1 << 53) + 1
    path = write(tmp_path / "t.json", [kernel("k", base_us, 1), kernel("k", base_us + 3, 1)])
    assert analyse_paths([path]).ranks[0].total.span_us == 4.0


def test_spellings_of_old_and_foreign_profilers(tmp_path: Path) -> None:
    events = [
        span("Kernel", "gemm", 0, 10, "stream 7", stream="7", device="0"),
        span("Memcpy", "Memcpy HtoD", 10, 5, "stream 7"),
        span("Memset", "Memset", 15, 1, "stream 7"),
        span("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 4),
        span("gpu_memcpy", "hipMemcpyDtoD allreduce", 30, 2),
        span("kernel", "deep_ep::intranode::dispatch<8>", 40, 3),
        span("kernel", "void cross_device_reduce_1stage<half, 2>", 50, 3),
        span("kernel", "void one_shot_all_reduce_kernel<float>", 60, 3),
        span("cpu_op", "aten::add", 0, 5, stream=7),
    ]
    total = analyse_paths([write(tmp_path / "t.json", events)]).ranks[0].total
    assert (total.compute_us, total.comm_us, total.memcpy_us, total.memset_us) == (10, 4 + 3 + 3 + 3, 8, 1)


# What is wrong with files.


def test_annotations_of_any_name_are_kept_and_are_no_operators(tmp_path: Path) -> None:
    write(
        tmp_path / "a.json",
        [
            span("user_annotation", "forward", 0, 60),
            span("user_annotation", "aten::mine", 5, 40),
            span("cpu_op", "aten::mm", 10, 20),
        ],
    )
    trace = read_trace(tmp_path / "a.json")
    assert [trace.annotation_names[name] for name in trace.annotations.name] == ["forward", "aten::mine"]
    assert (trace.annotations.end - trace.annotations.start).tolist() == [60_000, 40_000]
    assert [trace.op_names[name] for name in trace.ops.name] == ["aten::mm"]


RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(0, 2)), min_size=1, max_size=10
)


def nested(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those of the ranges that nest with all kept before; ends and starts may touch."""
    kept: list[tuple[int, int, int]] = []
    for start, length, thread in ranges:
        end = start + max(length, 1)
        others = [(s, s + max(d, 1)) for s, d, t in kept if t == thread]
        if all(
            e <= start or end <= s or (s <= start and end <= e) or (start <= s and e <= end)
            for s, e in others
        ):
            kept.append((start, length, thread))
    return kept


@given(RANGES, st.integers(-1, 45), st.integers(0, 2))
def test_the_innermost_range_and_times_without_inner_ranges(
    ranges: list[tuple[int, int, int]], time: int, thread: int
) -> None:
    kept = nested(ranges)
    columns = [np.array(column) for column in zip(*kept, strict=True)]
    start, duration, threads = (
        columns[0].astype(np.int64),
        columns[1].astype(np.int64),
        columns[2].astype(np.int32),
    )
    nesting = nest(Spans(start, duration, np.zeros(len(kept), np.int32), threads))
    assert nesting is not None
    (found,) = nesting.innermost(np.array([thread], dtype=np.int32), np.array([time])).tolist()
    around = [(s, max(d, 1)) for s, d, t in kept if t == thread and s <= time < s + max(d, 1)]
    if not around:
        assert found == -1
    else:
        assert (kept[found][0], max(kept[found][1], 1)) == max(around, key=lambda each: (each[0], -each[1]))
        assert kept[found][2] == thread
    # Times without inner ranges add up to what the outermost ranges cover.
    for each in range(3):
        mine = {p for s, d, t in kept if t == each for p in range(s, s + d)}
        assert nesting.self_ns()[threads == each].sum() == len(mine)


def test_work_is_found_under_the_operator_and_module_that_launched_it(tmp_path: Path) -> None:
    events = [
        span("python_function", "nn.Module: Linear_0", 0, 50),
        span("cpu_op", "aten::linear", 1, 40),
        span("cpu_op", "aten::addmm", 2, 30),
        launch(5, 2, 1),
        kernel("gemm", 100, 20, 1),
        launch(60, 2, 2),
        kernel("lost", 130, 7, 2),
        kernel("unknown", 140, 7, 99),
    ]
    rank = analyse_paths([write(tmp_path / "t.json", events)]).ranks[0]
    assert [(row.name, row.device_us, row.host_us) for row in rank.ops] == [
        ("aten::addmm", 20.0, 30.0),
        ("aten::linear", 0.0, 10.0),
    ]
    assert [(row.name, row.device_us, row.host_us) for row in rank.modules] == [("Linear_0", 20.0, 40.0)]
    assert rank.total.launch_delay_us is not None
    assert rank.total.launch_delay_us.max == 95.0
