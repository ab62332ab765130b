"""Files that end early, hold nonsense, or aren't traces."""

import errno
import gzip
import inspect
import json
import os
import random
import re
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpurun.launcher.errors import GpurunError, TraceError
from gpurun.launcher.report.terminal.trace import render_tables, render_trace
from gpurun.launcher.rundir.paths import real_path
from gpurun.launcher.trace import parallel
from gpurun.launcher.trace.analysis import discover
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.discover import find_traces
from gpurun.launcher.trace.kineto import columns as trace_events
from gpurun.launcher.trace.kineto import trace_file
from gpurun.launcher.trace.kineto.read_trace import read_trace
from gpurun.launcher.trace.model import TABLES
from tests.damage.content import damaged
from tests.said import trace_notes
from tests.unit.trace.several_ranks.generated_job import Job
from tests.unit.trace.trace_files import REAL, kernel, launch, rank_info, span, step, write
from tests.whole import first
from tests.wording import Wording


def message(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        analyse_paths([path])
    return str(caught.value)


@pytest.mark.parametrize("block_bytes", first(1, [100, trace_file.BLOCK_BYTES]))
def test_a_truncated_file_is_read_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Wherever it ends: every event that is whole counts, and the note says where it ends."""
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", block_bytes)
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
        (note,) = trace_notes(report)
        assert note.startswith(f"{path}: cut off at byte {size}: ")


def test_keys_after_the_events_may_be_missing(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel("k", 0, 1)], "distributedInfo": {"rank": 3}, "traceName": "x"})
    path = tmp_path / "cut.json"
    path.write_text(text[:-9])
    report = analyse_paths([path])
    assert [rank.rank for rank in report.ranks] == [0]
    assert any(f"cut off at byte {len(text) - 9}" in warning for warning in trace_notes(report))


def test_a_truncated_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", [kernel("k", i, 1) for i in range(2000)])
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    report = analyse_paths([path])
    assert 500 < report.ranks[0].total.num_kernels < 1500
    (text,) = (text for text in trace_notes(report) if "cut off" in text)
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
    assert left_out in trace_notes(report)[-1]


def test_times_that_are_all_large_still_differ_exactly(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("k", 1 << 60, 5), kernel("k", (1 << 60) + 10, 5)])
    assert analyse_paths([path]).ranks[0].total.span_us == 15.0


def test_garbage_between_events_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    good = '{"traceEvents": [{"ph": "X", "name": "a"}'
    path.write_text(good + ' x, {"ph": "X"}]}')
    assert f"damaged at byte {len(good)}" in message(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"null",
        b" 42",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b'{"traceEvents": []} {"traceEvents": []}',
        b'{"traceEvents": []}end',
        b'  {"a": 1}',
        b'{"a": {"traceEvents": []}}',
        b'{"traceEvents": {}}',
        b'{"schema": "1.1", "pid": 1, "nodes": [{"id": 1}]}',
        b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}',
        b'{"a": 1, "b": {"c": 2}}',
        b"SQLite format 3\x00",
        b'{"data": []}\n{"Type": 80, "CudaEvent": {"startNs": "1"}}\n',
        b'{"a": 1}\r\n{"b": {"c": 2}, "a": 3}\n',
        b"[[1, 2], [[3, 4], [5, 6]]]",
        b" [\n [1, 2, ",
        '{"traceEvents": []}'.encode("utf-16"),
        b"\n\x05\x40\x81\x01\x50\x01\n\x82\x01\x52" + bytes(129),
        b"\n\xff\xff\x01" + b"\x12\x01" * 5000,
        b"\n" + b"9" * 80,
        b"\n\n{",
        b'[{"cat" : "Session","pid" :1,"tid" :1,"dur" :9,"ts" :1,"ph" : "X","name" :"model_loading_uri"},'
        b'{"cat" : "Kernel","pid" :1,"tid" :1,"dur" :8,"ts" :4,"ph" : "X","name" :"gemm","args" : {}}]',
        b'{"schemaVersion": "1.0.1", "span_indx": "0", "traceEvents": [{"name": "conv2d", "pid": 12,'
        b' "tid": "1(C++)", "ts": 1, "dur": 2, "ph": "X", "cat": "Operator", "args": {}}]}',
        b'[{"ph": "X", "name": "f", "ts": 1, "dur": 2}]',
        b'[{"ph": "B", "cat": "v8", "name": "f", "ts": 1}]',
        b'{"traceEvents": [{"ph": "X", "name": "f", "ts": 1, "dur": 2}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "f", "ts": 1}]}',
        b'{"metadata": {"highres-ticks": true}, "traceEvents": [{"ph": "X", "name": "f", "ts": 1}]}',
        b'{"traceEvents": [{}, {"ph": "M", "name": "process_name", "args": {"name": "CPU HIP API"}},'
        b' {"ph": "X", "name": "f", "ts": "1", "dur": "5"}], "otherData": {}}',
        b'{"traceEvents": [{"ph": "M", "name": "process_name", "args": {"name": "/job:x/gpu:7 Compute"}},'
        b' {"ph": "X", "cat": "Op", "name": "f", "ts": 1}]}',
        b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "overhead", "name": "f", "ts": 1}]}',
        b'{"CudaEvent": {"startNs": "1"}, "Type": 48}',
        b"\n\x0d\x12\x09/host:CPU\x1a\x00",
        b"trace.json".ljust(257, b"\0") + b"ustar\x0000",
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, wording: Wording) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(content)
    wording(message(path))


@pytest.mark.parametrize(
    ("category", "device"),
    [
        ("mtia_runtime", "CPU (MTIA not read)"),
        ("mtia_ccp_events", "CPU (MTIA not read)"),
        ("hpu_op", "CPU (HPU not read)"),
        ("npu_kernel", "CPU"),
    ],
)
def test_work_of_unknown_devices_is_mentioned(
    tmp_path: Path, category: str, device: str, wording: Wording
) -> None:
    events = [span("cpu_op", "aten::mm", 0, 5), span(category, "work", 5, 50)]
    report = analyse_paths([write(tmp_path / "rank0.json", events, **rank_info(0, 1))])
    assert [rank.device for rank in report.ranks] == [device]
    wording(trace_notes(report))


@pytest.mark.parametrize(
    "category", ["xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver"]
)
def test_every_api_of_a_device_launches(tmp_path: Path, category: str) -> None:
    events = [step(1, 0, 9), span(category, "launch", 1, 1, correlation=4), kernel("k", 12, 3, 4)]
    report = analyse_paths([write(tmp_path / "rank0.json", events, **rank_info(0, 1))])
    assert (report.ranks[0].steps[0].compute_us, trace_notes(report)) == (3, ())


def test_a_trace_that_lost_its_gpu_work_is_not_taken_for_one_of_a_cpu(
    tmp_path: Path, wording: Wording
) -> None:
    """Kineto writes GPU work last, so of a truncated file it is what is missing."""
    events = [step(1, 0, 9), span("cpu_op", "aten::mm", 0, 5), launch(1, 1, 1)]
    path = write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    report = analyse_paths([path])
    assert report.ranks[0].device == "CPU (GPU not recorded)"
    wording(trace_notes(report))


def test_one_bad_file_costs_the_others_nothing(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "rank0.json").write_text('{"traceEvents": [')
    write(tmp_path / "rank1.json", [kernel("k", 1, 1)])
    report = analyse_paths([tmp_path])
    assert [rank.rank for rank in report.ranks] == [1]
    wording(trace_notes(report))


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "UNPACKED_FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20) + b"]}"))
    assert "gzip bomb" in message(path)


def test_a_link_that_leads_nowhere_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "t.json").symlink_to("gone.json")
    with pytest.raises(TraceError, match=r"t\.json: no such file or directory; it is a link to gone\.json$"):
        analyse_paths([tmp_path / "t.json"])


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path, wording: Wording) -> None:
    secret = write(tmp_path / "secret.json", [kernel("k", 1, 1)])
    directory = tmp_path / "traces"
    directory.mkdir()
    write(directory / "rank0.json", [kernel("k", 1, 1)])
    (directory / "rank1.json").symlink_to(secret)
    (directory / "rank2.json").symlink_to(directory / "rank0.json")
    (directory / "rank3.json").symlink_to(directory / "nowhere.json")
    (tmp_path / "elsewhere").mkdir()
    (directory / "node1").symlink_to(tmp_path / "elsewhere")
    (directory / "node2").symlink_to(directory)
    (directory / "node3").symlink_to(directory / "node3")
    os.mkfifo(directory / "rank4.json")
    report = analyse_paths([directory])
    assert [rank.rank for rank in report.ranks] == [0]
    wording(trace_notes(report))


def test_a_path_that_cannot_be_read_is_no_link_out_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def place_of(path: Path) -> Path:
        if path.name == "rank2.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real_path(path)

    write(tmp_path / "rank0.json", [kernel("k", 1, 1)])
    (tmp_path / "rank1.json").symlink_to("rank1.json")
    write(tmp_path / "rank2.json", [kernel("k", 1, 1)])
    monkeypatch.setattr(discover, "real_path", place_of)
    report = analyse_paths([tmp_path])
    assert [rank.rank for rank in report.ranks] == [0]
    wording([each.replace(str(tmp_path), "TMP") for each in trace_notes(report)])


def test_a_subdirectory_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, entries_of = tmp_path / "node1", os.scandir

    def entries(place: Any = ".") -> Any:
        if place == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return entries_of(place)

    closed.mkdir()
    write(tmp_path / "rank0.json", [kernel("k", 1, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", entries)
        report = analyse_paths([tmp_path])
    assert f"{closed}: Permission denied" in trace_notes(report)


def test_directories_may_be_deeper_than_python_recurses(tmp_path: Path) -> None:
    deepest = tmp_path.joinpath(*["d"] * 120)
    deepest.mkdir(parents=True)
    for place in (deepest, tmp_path):
        write(place / "rank0.json", [step(1, 0, 100)])
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 80)
    try:
        found = find_traces([tmp_path])
    finally:
        sys.setrecursionlimit(before)
    assert found.files == (deepest / "rank0.json", tmp_path / "rank0.json")


def test_a_directory_without_traces(tmp_path: Path, wording: Wording) -> None:
    assert "no traces here" in message(tmp_path)
    wording(message(tmp_path / "missing"))
    write(tmp_path / "rank0.json", [step(1, 0, 100)])
    wording(message(tmp_path / "rank1.json"))


def test_events_that_are_none_are_left_out_and_counted(tmp_path: Path, wording: Wording) -> None:
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
    wording(trace_notes(report)[-2:])


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [kernel("a, nan, b", 1, 2, rate="NAN"), kernel("k", 4, 1)]})
    path = tmp_path / "t.json"
    path.write_text(text.replace('"NAN"', "-nan"))
    assert analyse_paths([path]).ranks[0].total.compute_us == 3


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-inf", "null"])
def test_times_that_are_no_numbers_are_left_out_and_counted(
    tmp_path: Path, number: str, wording: Wording
) -> None:
    odd = [kernel("k", 1, 2) | {"ts": "HERE"}, kernel("k", 4, 1) | {"dur": "HERE"}, kernel("k", 6, 1)]
    path = write(tmp_path / "t.json", odd)
    path.write_text(path.read_text().replace('"HERE"', number))
    report = analyse_paths([path])
    assert report.ranks[0].total.span_us == 1
    wording(trace_notes(report)[-1])


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


@pytest.mark.parametrize("depth", [4, 500, 900])
@pytest.mark.parametrize("key", ["Input Dims", "Input type", "Concrete Inputs", "Input Strides"])
def test_arguments_that_are_nested_too_deep_are_none(tmp_path: Path, key: str, depth: int) -> None:
    """JSON may be: as deep as Python's functions can't recurse."""
    args: dict[str, Any] = {
        "Input Dims": [[4, 4, 4, 4]] * 9,
        "Input type": ["float"] * 9,
        "Concrete Inputs": ["[1, 1]"] * 9,
        "Input Strides": [[0, 1, 1, 1]] * 9,
    }
    names = ("aten::addmm", "aten::convolution", "gloo:all_reduce")
    events = [span("cpu_op", name, 10 * i, 5, i, **args | {key: "deep"}) for i, name in enumerate(names)]
    path = write(tmp_path / "t.json", events)
    deep = "[" * depth + "]" * depth
    path.write_text(path.read_text().replace('"deep"', f"[{', '.join([deep] * 9)}]"))
    assert analyse_paths([path], None, frozenset(TABLES)).ranks


@pytest.mark.parametrize("start", ['{"a": "', '{"traceEvents": [], "a": "', '{"traceEvents": [{"name": "'])
def test_a_string_without_an_end_takes_no_longer_than_its_length(tmp_path: Path, start: str) -> None:
    """Tried again from each of its escaped quotes, this one would take hours."""
    (tmp_path / "t.json").write_text(start + '\\"' * 1_000_000)
    assert "t.json" in message(tmp_path / "t.json")


STRIDED = {"Global rank stride": 1, "Group size": (1 << 16) - 1}
GREEDY = {
    "brackets": '{"ph": "X", "args": {"x": [' + "[]," * 200_000 + "[]]}}",
    "brackets without an end": '{"ph": "X", "args": {"x": [' + "[]," * 200_000,
    "events after a long one": '{"name": "' + "x" * 300_000 + '"}' + ',{"ph":"X"}' * 50_000,
    "no numbers": '{"ph": "X", "args": {"x": [' + "nan," * 100_000 + "nan]}}",
    "escapes": '{"ph": "X", "name": "' + r"\n" * 200_000 + r'\ud800"}',
    "inputs": json.dumps(span("user_annotation", "c10d::send", 0, 1, **{"Concrete Inputs": [[]] * 200_000})),
    "groups": ",".join(
        json.dumps(kernel("ncclDevKernel_AllReduce", i, 1, **{"Global rank start": i, **STRIDED}))
        for i in range(5)
    ),
}


@pytest.mark.parametrize("events", GREEDY.values(), ids=GREEDY.keys())
def test_what_a_trace_holds_takes_no_more_than_a_few_times_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: str
) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(trace_file, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(trace_file, "MAX_PART_BYTES", 1 << 20)
    monkeypatch.setattr(trace_events, "MAX_RANKS", 1 << 16)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + events + "]}")
    tracemalloc.start()
    try:
        with suppress(TraceError):
            read_trace(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5e6  # the texts have at most 0.85 MB


@pytest.mark.parametrize("least_bytes", first(1, [parallel.PARALLEL_FROM_BYTES, 0]))
def test_all_traces_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_bytes: int
) -> None:
    """Each of these may unpack to what it does, but not all: neither in this process nor in several."""
    monkeypatch.setattr(parallel, "PARALLEL_FROM_BYTES", least_bytes)
    for rank in range(8):
        events = [kernel("k", 10 * i, 1) for i in range(1000)]
        content = write(tmp_path / "t.json", events, **rank_info(rank, 8)).read_bytes()
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(content))
    (tmp_path / "t.json").unlink()
    assert len(analyse_paths([tmp_path]).ranks) == 8
    monkeypatch.setattr(trace_file, "UNPACKED_RATIO", 1)
    monkeypatch.setattr(trace_file, "UNPACKED_FREE_BYTES", 4 * len(content) + 100)
    report = analyse_paths([tmp_path])
    left_out = [text for text in trace_notes(report) if "unpack to more than gpurun reads at once" in text]
    assert len(report.ranks) == 4
    assert len(left_out) == 4
    assert all(re.search(r"rank\d\.json\.gz: left out", text) for text in left_out)


def test_traces_that_are_some_of_many_get_their_share(tmp_path: Path) -> None:
    for name, size in (("a", 100), ("b", 300)):
        (tmp_path / name).write_bytes(b"x" * size)
    a, b = tmp_path / "a", tmp_path / "b"
    assert trace_file.allowed_bytes([a, b]) == trace_file.UNPACKED_FREE_BYTES
    assert trace_file.allowed_bytes([a], [a, b]) == trace_file.UNPACKED_FREE_BYTES // 4
    with b.open("ab") as file:
        file.truncate(1 << 40)  # a hole holds no trace
    assert trace_file.allowed_bytes([a, b]) < trace_file.MAX_UNPACKED_BYTES


@pytest.mark.slow
def test_a_group_of_many_ranks_is_read_once_for_all_its_events(tmp_path: Path) -> None:
    """Gone over for each of them, the ranks of these 8,000 would take a minute."""
    group = {"Process Group Name": "0", "Global rank start": 0, **STRIDED}
    events = [kernel("ncclDevKernel_AllReduce", 10 * i, 5, **group) for i in range(4000)]
    for rank in (0, 1):
        steps = [step(1, 0, 40_000)] if rank else []
        write(tmp_path / f"rank{rank}.json", [*steps, *events], **rank_info(rank, 1 << 16))
    assert len(analyse_paths([tmp_path]).collectives) == 4000


def test_broken_text_in_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("NAME", 1, 2)])
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\xff\x07\x1b[31m"))
    (row,) = analyse_paths([path]).ranks[0].kernels
    assert row.name.startswith("\ufffd")


def test_groups_are_listed_once_however_large(tmp_path: Path) -> None:
    """A million ranks in a few bytes; of two large groups of a name only ranks in the middle differ."""
    job = Job(2)
    large: dict[str, object] = {"Process Group Ranks": None, "Global rank start": 0, "Global rank stride": 1}
    for turn in range(20):
        job.all_reduce(
            "a",
            [0, 1],
            [100 * turn + 10, 100 * turn + 15],
            100 * turn + 20,
            args=large | {"Group size": 250_000},
        )
    middle = [[0, 1, *range(2, 20), number, 99] for number in (50, 60)]
    for turn, ranks in enumerate(middle):
        at = 3000 + 100 * turn
        job.all_reduce("b", [0, 1], [at + 10, at + 15], at + 20, args={"Process Group Ranks": str(ranks)})
    report = job.report(tmp_path)
    names = ["a", "b of ranks 0, 1, 2, 3, 4, 5, 6, …, 99", "b of ranks 0, 1, 2, 3, 4, 5, 6, …, 99 (2)"]
    assert [*report.groups] == names
    assert [report.groups[name] for name in names] == [tuple(range(250_000)), *map(tuple, middle)]
    assert len(msgspec.json.encode(report)) < 2 * 7 * 250_000


# Damaged trace files: where the damage is, and what a slip of a writer costs


@pytest.mark.parametrize("block_bytes", [100, trace_file.BLOCK_BYTES])
@pytest.mark.parametrize("header_last", [False, True])
def test_damage_is_reported_where_it_is_and_not_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, header_last: bool
) -> None:
    """Every bracket, quote, colon and comma of the third of ten events in turn is lost, or doubled."""
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", block_bytes)
    events = [json.dumps(kernel("k", 10 * i, 1)).encode() for i in range(10)]
    header = b'"device": {"name": "x"}'
    head, tail = (b"{", b"," + header + b"}") if header_last else (b"{" + header + b",", b"}")
    text = head + b'"traceEvents": [' + b", ".join(events) + b"]" + tail
    begin = text.index(events[2])
    path = tmp_path / "t.json"
    for at in range(begin, begin + len(events[2])):
        for wrong in (b"", text[at : at + 1] * 2):
            if text[at : at + 1] in b'{}":,':
                path.write_bytes(text[:at] + wrong + text[at + 1 :])
                found = re.search(r"damaged at byte (\d+)", message(path))
                assert found is not None, text[at - 9 : at + 9]
                assert begin - 2 <= int(found[1]) <= begin + len(events[2]) + len(wrong) + 4


def test_damage_around_the_events_is_reported_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for text, place in (
        ('{"a" 1, "traceEvents": []}', 5),
        ('{"traceEvents": [] , "b": x}', 26),
        ('{"a: 1, "b": 2, "c": [3]}', 9),
        ('\ufeff{"a" 1, "traceEvents": []}', 8),
    ):
        path.write_text(text)
        assert f"damaged at byte {place}" in message(path)


def test_half_a_surrogate_pair_costs_only_its_letter(tmp_path: Path) -> None:
    events = json.dumps([kernel(name, 10 * i, 1) for i, name in enumerate(("a1b", "a2b", "a3b", "a4b", "c"))])
    for mark, escape in (("a1", r"\ud800"), ("a2", r"\uDC00"), ("a3", r"\ud83d\ude00"), ("a4", r"\\ud800")):
        events = events.replace(mark, escape)
    path = tmp_path / "t.json"
    path.write_text(f'{{"by": "\\udbff", "traceEvents": {events}}}')
    trace = read_trace(path)
    assert trace.gpu_names == ("\ufffdb", "\U0001f600b", "\\ud800b", "c")
    assert not trace.skipped


def test_numbers_in_quotes_are_numbers(tmp_path: Path) -> None:
    def analysed(name: str, spell: Callable[[int], Any]) -> tuple[Any, ...]:
        sizes = {"dtype": "Float", **{key: spell(4) for key in ("In msg nelems", "Group size", "Seq")}}
        ring = kernel("ncclDevKernel_AllReduce_RING", 30, 9, spell(3), **sizes)
        events = [step(1, 0, 9), launch(1, 1, spell(2)), kernel("k", 20, 5, spell(2)), ring]
        report = analyse_paths([write(tmp_path / name, events)])
        return report.ranks[0].steps, report.collectives, report.ranks[0].total

    assert analysed("text.json", str) == analysed("numbers.json", int)
    assert analysed("text.json", str)[0][0].num_kernels == 1
    nonsense = [launch(1, 1, "²"), kernel("k", 20, 5, "9" * 5000), kernel("k", 30, 5, "x")]
    assert analyse_paths([write(tmp_path / "x.json", nonsense)]).ranks[0].total.num_kernels == 2


def test_gigabytes_of_zeros_after_a_trace_are_not_read(tmp_path: Path) -> None:
    """`gzip` would look at each of them; a file without blocks on the disk is that long at no cost."""
    path = write(tmp_path / "rank0.json.gz", [step(1, 0, 10), launch(1, 2, 1), kernel("k", 2, 5, 1)])
    packed = path.read_bytes()
    whole = analyse_paths([path])
    path.write_bytes(packed + b"\0" * 1000)
    assert analyse_paths([path]) == whole
    os.truncate(path, 20 << 30)
    assert analyse_paths([path]).ranks == whole.ranks


def test_a_gzip_file_may_have_several_members(tmp_path: Path, wording: Wording) -> None:
    path = write(tmp_path / "rank0.json", [step(1, 0, 10), launch(1, 2, 1), kernel("k", 2, 5, 1)])
    whole, text = analyse_paths([path]).ranks, path.read_bytes()
    path.write_bytes(gzip.compress(text[:70]) + b"\0" * 9 + gzip.compress(text[70:]))
    assert analyse_paths([path]).ranks == whole
    path.write_bytes(gzip.compress(text[:70]) + b"no member")
    wording(message(path))


# Real files with bytes flipped and cut: a message or a report, never a traceback


pytestmark = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the directory of real traces next to the repository"
)
FILES = ("dlrm_8xV100/worker7_step_12.1694128201553.pt.trace.json.gz", "ddp_2of128/sampled_rank-0.json.gz")
ROUNDS = 10


@pytest.mark.parametrize("seed", first(4, range(ROUNDS)))
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_never_end_in_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 1 << 16)
    chance = random.Random(f"{name} {seed}")
    packed = (REAL / name).read_bytes()
    if seed % 5 == 0:
        path = tmp_path / "rank0.json.gz"
        path.write_bytes(damaged(packed, chance))
    else:
        path = tmp_path / "rank0.json"
        path.write_bytes(damaged(gzip.decompress(packed), chance))
    try:
        report = analyse_paths([tmp_path], None, frozenset(TABLES))
    except GpurunError as error:
        problem: str | None = str(error)
    else:
        problem = None
        assert render_trace(report, 100)
        assert render_tables(report, TABLES, 100)
        assert msgspec.json.decode(msgspec.json.encode(report))["schema"] == 4
    assert problem is None or ("rank0.json" in problem and "byte" in problem)
