"""Reading trace files: every block boundary, exact times, and what is wrong with files."""

import copy
import gzip
import json
from collections.abc import Sequence
from itertools import pairwise
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
from gpurun.launcher.trace.model import Breakdown, StepBreakdown, TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import H100, REAL, kernel, launch, load, span, write

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
    assert rank.total.launch_delay_us.max == 93.0


# Traces that gpurun took on an H100 with torch 2.11, against a reading of their events not by gpurun


NAMES = sorted(str(path.relative_to(H100)) for path in H100.rglob("*.gz"))
GPU_LIMITS = ["gpt-compiled.rank0.pt.trace.json.gz", "gpt-fp32.rank0.pt.trace.json.gz"]


def events_of(name: str) -> list[dict[str, Any]]:
    with gzip.open(H100 / name) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def steps_of(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The GPU work that was launched in each step, by the moment of its launch."""
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched_us = {event["args"]["correlation"]: event["ts"] for event in calls}
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return [
        [event for event in work if begin <= launched_us[event["args"]["correlation"]] < end]
        for begin, end in marks
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_is_counted_in_the_step_that_launched_it(name: str) -> None:
    (rank,) = analyse_paths([H100 / name]).ranks
    expected = [sum(event["cat"] == "kernel" for event in step) for step in steps_of(events_of(name))]
    assert [step.num_kernels for step in rank.steps] == expected
    assert rank.total.num_kernels == sum(expected) > 0


@pytest.mark.parametrize("name", GPU_LIMITS)
def test_where_the_gpu_limits_a_step_lasts_from_the_end_of_its_work_to_that_of_the_next(name: str) -> None:
    """The host runs ahead: its annotations last less than half as long here."""
    (rank,) = analyse_paths([H100 / name]).ranks
    ends_us = [max(event["ts"] + event["dur"] for event in step) for step in steps_of(events_of(name))]
    lasted_us = [after - before for before, after in pairwise(ends_us)]
    assert [step.span_us for step in rank.steps[1:]] == pytest.approx(lasted_us, abs=0.002)


def test_two_ranks_on_one_gpu_are_two_ranks() -> None:
    report = analyse_paths([H100 / "ddp"])
    assert [rank.total.num_kernels for rank in report.ranks] == [292, 292]
    assert trace_notes(report) == ()


# Real traces of many GPUs, with answers that others computed (see `traces/README.md` next to them)


pytestmark = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the directory of real traces next to the repository"
)

DLRM = {  # span, idle, compute, comm, comm ∩ compute, exposed comm, memcpy, wait
    0: (13009, 6419, 1034, 5798, 261, 5537, 19, 5581),
    1: (18749, 6428, 1246, 11336, 280, 11056, 19, 11119),
    2: (11350, 7046, 1068, 3492, 275, 3217, 19, 3275),
    3: (18853, 8145, 1240, 9774, 324, 9450, 28, 9557),
    4: (16589, 8887, 1126, 6587, 37, 6550, 26, 6370),
    5: (16392, 9121, 1041, 6251, 40, 6211, 19, 6034),
    6: (11410, 7051, 1051, 3558, 269, 3289, 19, 3341),
    7: (10967, 8308, 1059, 1746, 166, 1580, 20, 1529),
}


def figures(total: Breakdown) -> tuple[float, ...]:
    return (
        total.span_us,
        total.idle_us,
        total.compute_us,
        total.comm_us,
        total.comm_compute_overlap_us,
        total.exposed_comm_us,
        total.memcpy_us,
    )


def assert_bars_add_up(report: TraceReport) -> None:
    """In whole nanoseconds, for every stretch of every rank."""
    for each in (each for rank in report.ranks for each in (rank.total, *rank.steps)):
        parts = (
            each.compute_us,
            each.exposed_transfer_us,
            each.exposed_wait_us,
            each.exposed_memcpy_us,
            each.other_steps_us,
            each.idle_us,
        )
        assert sum(round(part * 1000) for part in parts) == round(each.span_us * 1000)
        assert round(sum(vars(each.idle_by_cause_us).values()) * 1000) == round(each.idle_us * 1000)
        assert round(sum(vars(each.host_while_idle_us).values()) * 1000) == round(each.idle_us * 1000)


def assert_is_dlrm(report: TraceReport) -> None:
    assert {rank.rank: (*figures(rank.total), rank.total.wait_us) for rank in report.ranks} == DLRM
    assert {rank.total.transfer_us for rank in report.ranks} == {217.0}
    assert {row.rank: row.last_arrivals for row in report.stragglers} == dict(
        enumerate([0, 0, 0, 0, 1, 2, 0, 5])
    )
    assert report.stragglers[0].rank == 7
    caused_us = sum(row.wait_caused_us for row in report.stragglers)
    assert caused_us == sum(rank.total.wait_us or 0 for rank in report.ranks)
    assert [len(each.ranks) for each in report.collectives] == [8] * 8
    assert_bars_add_up(report)


def test_dlrm_on_eight_gpus() -> None:
    report = analyse_paths([REAL / "dlrm_8xV100"])
    assert_is_dlrm(report)
    assert trace_notes(report) == ()
    assert all(abs(offset_us) <= 7 for offset_us in report.clock_offsets_us.values())
    kinds = [each.kind for each in report.collectives]
    assert (kinds.count("all_to_all"), kinds.count("all_reduce")) == (5, 3)
    assert {each.bytes for each in report.collectives if each.kind == "all_reduce"} == {1576964, 448, 907840}


def test_dlrm_with_the_clock_of_one_rank_ahead_and_new_kernel_names(tmp_path: Path) -> None:
    for path in sorted((REAL / "dlrm_8xV100").iterdir()):
        trace = load(path)
        ahead_us = 20_000 if trace["distributedInfo"]["rank"] == 3 else 0
        for event in trace["traceEvents"]:
            event["name"] = event["name"].replace("ncclKernel_", "ncclDevKernel_")
            event["ts"] += ahead_us
        write(tmp_path / path.name, trace.pop("traceEvents"), **trace)
    report = analyse_paths([tmp_path])
    assert_is_dlrm(report)
    assert report.clock_offsets_us["3"] == pytest.approx(20_000, abs=7)
    starts_us = [[part.start_us for part in each.ranks] for each in report.collectives]
    assert all(max(starts) - min(starts) < 10_000 for starts in starts_us)


def test_ddp_two_ranks_of_many() -> None:
    report = analyse_paths([REAL / "ddp_2of128"])
    assert [figures(rank.total) for rank in report.ranks] == [
        (1222847, 675191, 210320, 396199, 59216, 336983, 1325),
        (1231186, 651136, 271973, 379053, 75530, 303523, 16504),
    ]
    assert any("2 of 128 ranks" in warning for warning in trace_notes(report))
    # Five collectives end within 0.4 ms on both; the others are in only one of the sampled files.
    assert sum(each.last_rank is not None for each in report.collectives) == 5
    assert_bars_add_up(report)


def test_ddp_without_the_last_step_as_hta_has_it() -> None:
    report = analyse_paths([REAL / "ddp_2of128"], slice(551, 552))
    totals = [rank.total for rank in report.ranks]
    assert [(total.idle_us, total.compute_us, total.span_us) for total in totals] == [
        (321378, 106252, 600058),
        (328671, 135548, 600674),
    ]
    overlaps = [100 * total.comm_compute_overlap_us / total.comm_us for total in totals]
    assert [round(overlap, 2) for overlap in overlaps] == [11.81, 20.05]


def test_collective_arguments_on_a100() -> None:
    report = analyse_paths([REAL / "nccl_args_A100"])
    total = report.ranks[0].total
    nanoseconds = (660551005, 503050991, 115655847, 46876493, 7317025, 39559468, 2653498)
    assert tuple(round(each * 1000) for each in figures(total)) == nanoseconds
    assert len(report.collectives) == 21
    # One rank alone can't separate waiting from transfer.
    assert (total.wait_us, total.transfer_us, report.stragglers) == (None, None, ())
    assert total.exposed_transfer_us == total.exposed_comm_us
    first = report.collectives[0]
    assert (first.group, first.kind, first.bytes) == ("0", "broadcast", 53120 * 4)
    assert report.ranks[0].device == "NVIDIA A100-PG509-200"
    assert_bars_add_up(report)


def test_vit_on_h100() -> None:
    total = analyse_paths([REAL / "vit_H100"]).ranks[0].total
    nanoseconds = [
        round(us * 1000) for us in (total.compute_us, total.memcpy_us, total.idle_us, total.span_us)
    ]
    assert nanoseconds == [1220926, 4384, 6334534, 7559844]
    modules = {row.name: row for row in analyse_paths([REAL / "vit_H100"]).ranks[0].modules}
    assert modules["Linear_0"].device_us > 0


def test_resnet_steps_as_the_profilers_own_test_has_them() -> None:
    report = analyse_paths([REAL / "resnet50_V100" / "num_workers_0.pt.trace.json.gz"])
    steps = report.ranks[0].steps
    first, host = steps[0], steps[0].host_while_idle_us
    assert (first.step, first.span_us, first.compute_us) == (5, 187948, 98598)
    assert (first.memcpy_us - first.memset_us, first.memset_us) == (1941, 90)
    assert (host.runtime, host.data, host.op, host.other) == (2796, 69317, 14091, 1115)
    assert first.idle_by_cause_us.data == 69317
    assert_averages(steps, 177592, 33.37, 55.51)
    assert_bars_add_up(report)


def test_resnet_with_workers() -> None:
    report = analyse_paths([REAL / "resnet50_V100" / "num_workers_4.pt.trace.json.gz"])
    assert_averages(report.ranks[0].steps, 141068, 0.84, 70.27)


def assert_averages(
    steps: Sequence[StepBreakdown], span_us: float, data_percent: float, busy_percent: float
) -> None:
    total_us = sum(each.span_us for each in steps)
    assert round(total_us / len(steps)) == span_us
    assert round(100 * sum(each.idle_by_cause_us.data for each in steps) / total_us, 2) == data_percent
    # Its share of busy time is that of kernels, from the start of the first step to the end of the last.
    through_us = steps[-1].start_us + steps[-1].span_us - steps[0].start_us
    assert round(100 * sum(each.compute_us for each in steps) / through_us, 2) == busy_percent


def test_whatever_the_order_of_events(tmp_path: Path) -> None:
    path = next((REAL / "vit_H100").glob("*.json.gz"))
    trace = load(path)
    events = trace.pop("traceEvents")
    backwards = write(tmp_path / "backwards.json", copy.deepcopy(events)[::-1], **trace)
    analysis, other = analyse_paths([path]), analyse_paths([backwards])
    assert (analysis.ranks[0].total, analysis.ranks[0].steps) == (other.ranks[0].total, other.ranks[0].steps)
    assert analysis.base_time_ns == other.base_time_ns
