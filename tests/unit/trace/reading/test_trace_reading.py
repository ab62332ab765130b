"""Reading trace files: every block boundary, exact times, and what is wrong with files."""

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import TraceError
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.nesting import nest
from gpurun.launcher.trace.kineto import file_blocks, trace_file
from gpurun.launcher.trace.kineto.columns import Spans
from gpurun.launcher.trace.kineto.events import needs_text, time_texts, to_ns
from gpurun.launcher.trace.kineto.read_trace import read_trace
from gpurun.launcher.trace.kineto.scan import find_events, scan_events
from tests.unit.trace.trace_files import kernel, launch, rank_info, span, step, write

AWKWARD = ["}, {", '"}, {"', "\\", '\\"', "]}", '{"traceEvents": [', "\u2028\x07", "名前", "<script>", ""]

NESTED = st.recursive(
    st.none() | st.integers(-5, 5) | st.sampled_from(AWKWARD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(AWKWARD), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.sampled_from(AWKWARD), NESTED, max_size=3), max_size=6), st.booleans())
def test_scan_finds_every_event_whatever_strings_hold(events: list[str], spaced: bool) -> None:
    text = json.dumps(events, indent=1 if spaced else None)[1:].encode() + b', "x": [{}]}'
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
    monkeypatch.setattr(file_blocks, "BLOCK_BYTES", size)
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


def message(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        analyse_paths([path])
    return str(caught.value)


@pytest.mark.parametrize("block_bytes", [100, file_blocks.BLOCK_BYTES])
def test_a_truncated_file_is_read_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Wherever it ends: every event that is whole counts, and the note says where it ends."""
    monkeypatch.setattr(file_blocks, "BLOCK_BYTES", block_bytes)
    events = [kernel("k", 10 * i, 1) for i in range(3)]
    whole = write(tmp_path / "whole.json", events, **rank_info(0, 1)).read_bytes()
    ends = [whole.index(json.dumps(event).encode()) + len(json.dumps(event)) for event in events]
    path = tmp_path / "cut.json"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        num_kernels = sum(end <= size for end in ends)
        if not num_kernels:
            text = message(path)
            assert ("byte" in text, "cut.json" in text) == (True, True), text
            continue
        report = analyse_paths([path])
        assert report.ranks[0].total.num_kernels == num_kernels
        assert report.warnings == (
            f"{path}: cut off at byte {size}: what was to follow is missing, so times are too short",
        )


def test_keys_after_the_events_may_be_missing(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel("k", 0, 1)], "distributedInfo": {"rank": 3}, "traceName": "x"})
    path = tmp_path / "cut.json"
    path.write_text(text[:-9])
    report = analyse_paths([path])
    assert [rank.rank for rank in report.ranks] == [0]
    assert any(f"cut off at byte {len(text) - 9}" in warning for warning in report.warnings)


def test_a_truncated_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", [kernel("k", i, 1) for i in range(2000)])
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    report = analyse_paths([path])
    assert 500 < report.ranks[0].total.num_kernels < 1500
    (text,) = (text for text in report.warnings if "cut off" in text)
    found = re.search(r"cut off at byte (\d+)", text)
    assert found is not None
    assert int(found[1]) > len(content)  # of the text, of which about half could be read
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert "byte" in message(path)


@pytest.mark.parametrize(
    ("first", "left_out"),
    [
        ('{"ph": "X", "cat": "kernel", "name": "k", "ts": 1180591620717411303424, "dur": 1}', "1 event"),
        ('{"ph": "X", "cat": "kernel", "name": "k", "ts": -1e300, "dur": 1}', "1 event"),
        ('{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1e308}', "1 event"),
        ('{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e999, "dur": 1}', "1 malformed event"),
    ],
)
def test_times_that_no_clock_shows_are_left_out(tmp_path: Path, first: str, left_out: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{first}, {json.dumps(kernel("k", 5, 2))}]}}')
    report = analyse_paths([path])
    assert (report.ranks[0].total.span_us, report.ranks[0].total.compute_us) == (2.0, 2.0)
    assert left_out in report.warnings[-1]


def test_times_that_are_all_large_still_differ_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("k", 1 << 60, 5), kernel("k", (1 << 60) + 10, 5)])
    assert analyse_paths([path]).ranks[0].total.span_us == 15.0


def test_garbage_between_events_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    good = '{"traceEvents": [{"ph": "X", "name": "a"}'
    path.write_text(good + ' x, {"ph": "X"}]}')
    assert f"damaged at byte {len(good)}" in message(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty (byte 0)"),
        (b"hello", "not JSON at byte 0"),
        (b'  {"a": 1}', "no traceEvents"),
        (b'{"a": {"traceEvents": []}}', "no traceEvents"),
        (b'{"traceEvents": {}}', "no traceEvents"),
        (b'{"schema": "1.1", "pid": 1, "nodes": [{"id": 1}]}', "a PyTorch execution trace"),
        (b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "a result of rocprofv3"),
        (b'{"a": 1, "b": {"c": 2}}', "JSON with the keys 'a', 'b'"),
        (b"SQLite format 3\x00", "an SQLite database, such as Nsight Systems exports, not JSON"),
        (b'[{"ph": "X", "name": "f", "ts": 1, "dur": 2}]', "only events without a category"),
        (b'[{"ph": "X", "cat": "v8", "name": "f", "ts": 1}]', "only events of the categories 'v8'"),
        (
            b'{"metadata": {"highres-ticks": true}, "traceEvents": [{"ph": "X", "name": "f", "ts": 1}]}',
            "a trace of another tracer, such as XLA's",
        ),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    assert expected in message(path)


@pytest.mark.parametrize(
    ("category", "note", "device"),
    [
        ("mtia_ccp_events", "work on the MTIA isn't read", "CPU (MTIA not read)"),
        ("hpu_op", "work on the HPU isn't read", "CPU (HPU not read)"),
        ("npu_kernel", "events of unknown categories left out: 'npu_kernel'", "CPU"),
    ],
)
def test_work_of_unknown_devices_is_mentioned(tmp_path: Path, category: str, note: str, device: str) -> None:
    events = [span("cpu_op", "aten::mm", 0, 5), span(category, "work", 5, 50)]
    report = analyse_paths([write(tmp_path / "rank0.json", events, **rank_info(0, 1))])
    assert [rank.device for rank in report.ranks] == [device]
    assert report.warnings == (f"{tmp_path / 'rank0.json'}: {note}",)


@pytest.mark.parametrize(
    "category", ["xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver"]
)
def test_every_api_of_a_device_launches(tmp_path: Path, category: str) -> None:
    events = [step(1, 0, 9), span(category, "launch", 1, 1, correlation=4), kernel("k", 12, 3, 4)]
    report = analyse_paths([write(tmp_path / "rank0.json", events, **rank_info(0, 1))])
    assert (report.ranks[0].steps[0].compute_us, report.warnings) == (3, ())


def test_a_trace_that_lost_its_gpu_work_is_not_taken_for_one_of_a_cpu(tmp_path: Path) -> None:
    """Kineto writes GPU work last, so of a truncated file it is what is missing."""
    events = [step(1, 0, 9), span("cpu_op", "aten::mm", 0, 5), launch(1, 1, 1)]
    path = write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    report = analyse_paths([path])
    assert report.ranks[0].device == "CPU (GPU not recorded)"
    assert any("calls of the GPU's API but no GPU work" in text for text in report.warnings)


def test_one_bad_file_costs_the_others_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text('{"traceEvents": [')
    write(tmp_path / "rank1.json", [kernel("k", 1, 1)])
    report = analyse_paths([tmp_path])
    assert [rank.rank for rank in report.ranks] == [1]
    assert any("rank0.json: cut off at byte 17" in warning for warning in report.warnings)


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "UNPACKED_FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20) + b"]}"))
    assert "gzip bomb" in message(path)


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.json", [kernel("k", 1, 1)])
    directory = tmp_path / "traces"
    directory.mkdir()
    write(directory / "rank0.json", [kernel("k", 1, 1)])
    (directory / "rank1.json").symlink_to(secret)
    (directory / "rank2.json").symlink_to(directory / "rank0.json")
    (directory / "rank3.json").symlink_to(directory / "nowhere.json")
    os.mkfifo(directory / "rank4.json")
    report = analyse_paths([directory])
    assert [rank.rank for rank in report.ranks] == [0]
    assert any("rank1.json: symbolic link out of the directory" in warning for warning in report.warnings)


def test_a_directory_without_traces(tmp_path: Path) -> None:
    assert "no traces here" in message(tmp_path)
    assert "no such file or directory" in message(tmp_path / "missing")


def test_events_that_are_none_are_left_out_and_counted(tmp_path: Path) -> None:
    odd: list[Any] = [
        kernel("k", 0, 10),
        kernel("k", 20, 10) | {"ts": "soon"},
        kernel("k", 40, -5),
        kernel("k", 60, 0),
        {"ph": "X", "cat": "kernel"},
        [1, 2],
    ]
    report = analyse_paths([write(tmp_path / "t.json", odd)])
    assert report.ranks[0].total.compute_us == 10
    warning = report.warnings[-1]
    assert "2 malformed events, first at byte" in warning
    assert "1 event of negative length" in warning


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel("a, nan, b", 1, 2, rate="NAN"), kernel("k", 4, 1)]})
    path = tmp_path / "t.json"
    path.write_text(text.replace('"NAN"', "-nan"))
    assert analyse_paths([path]).ranks[0].total.compute_us == 3


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-inf", "null"])
def test_times_that_are_no_numbers_are_left_out_and_counted(tmp_path: Path, number: str) -> None:
    odd = [kernel("k", 1, 2) | {"ts": "HERE"}, kernel("k", 4, 1) | {"dur": "HERE"}, kernel("k", 6, 1)]
    path = write(tmp_path / "t.json", odd)
    path.write_text(path.read_text().replace('"HERE"', number))
    report = analyse_paths([path])
    assert report.ranks[0].total.span_us == 1
    assert "2 events whose time is not a number left out" in report.warnings[-1]


def test_absurd_numbers_and_depths(tmp_path: Path) -> None:
    sized: dict[str, Any] = {"In msg nelems": 1 << 62, "dtype": "Double"}
    events = [kernel("ncclDevKernel_AllReduce", 1, 2, **sized), step(10**14, 0, 5)]
    events.append({**step(1, 0, 5), "name": "ProfilerStep#" + "9" * 5000})
    report = analyse_paths([write(tmp_path / "t.json", events, distributedInfo={"rank": 1 << 62})])
    assert msgspec.json.encode(report)
    assert (report.ranks[0].rank, report.collectives[0].bytes) == (0, None)
    deep = "[" * 100_000 + "]" * 100_000
    for text in ('{"traceEvents": [{"ph": "X", "args": {"x": %s}}]}', '{"x": %s, "traceEvents": []}'):
        (tmp_path / "deep.json").write_text(text % deep)
        assert "damaged at byte" in message(tmp_path / "deep.json")


def test_broken_text_in_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("NAME", 1, 2)])
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\xff\x07\x1b[31m"))
    (row,) = analyse_paths([path]).ranks[0].kernels
    assert row.name.startswith("\ufffd")


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
