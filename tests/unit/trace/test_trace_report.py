"""What comes out: JSON, tables, the difference of two captures, one merged trace."""

import errno
import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import MachineError, SpecError, TraceError
from gpurun.launcher.report.terminal.changes import render_trace_diff
from gpurun.launcher.report.terminal.trace import render_tables, render_trace
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.discover import is_merged, mark_of_merged
from gpurun.launcher.trace.diff import Change, TraceDiff, diff_traces
from gpurun.launcher.trace.merge import merge_traces
from gpurun.launcher.trace.model import TraceReport
from gpurun.launcher.units import MINUS
from tests.said import trace_notes
from tests.unit.cli.click_runner import runner
from tests.unit.trace.trace_files import REAL, kernel, launch, load, rank_info, span, step, write
from tests.wording import Wording

RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Two ranks, 20 ms apart by their clocks; the second comes 4 µs late."""
    directory = tmp_path / "capture"
    directory.mkdir()
    for rank, (late_us, ahead_us) in enumerate(((0, 0), (4, 20_000))):
        events = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
            step(1, ahead_us, 60),
            span("cpu_op", "aten::mm", ahead_us + 1, 3),
            launch(ahead_us + 2, 1, 1),
            {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 10, "tid": 1, "ts": ahead_us + 2},
            kernel("gemm <b>\x1b[31m", ahead_us + 10, 10, 1),
            launch(ahead_us + 4, 1, 2),
            kernel(RING, ahead_us + 30 + late_us, 20.125 - late_us, 2),
            {"ph": "i", "name": "no time", "pid": "Spans"},
        ]
        write(
            directory / f"r{rank}.json",
            events,
            baseTimeNanoseconds=1_700_000_000_000_000_000,
            **rank_info(rank, 2),
        )
    return directory


def test_json_has_the_fields_of_the_design(capture: Path) -> None:
    content = msgspec.json.decode(msgspec.json.encode(analyse_paths([capture])))
    assert list(content) == [
        "schema",
        "base_time_ns",
        "clock_offsets_us",
        "clock_offset_bounds_us",
        "clock_drift_ppm",
        "clock_drift_bounds_ppm",
        "ranks",
        "groups",
        "collectives",
        "stragglers",
        "parallelism",
        "pipeline",
        "savings",
        "unreplayed",
        "kernels_by_shape",
        "shapes",
        "shapes_in_steps",
        "operators",
        "operators_in_steps",
        "collective_totals",
        "copies",
        "launches",
        "critical_path",
        "findings",
    ]
    assert content["schema"] == 4
    assert content["base_time_ns"] == 1_700_000_000_000_000_000
    assert content["clock_offsets_us"] == {"0": 0.0, "1": 20_000.0}
    rank = content["ranks"][0]
    assert {"rank", "world_size", "device", "files", "total", "steps"} <= rank.keys()
    names = "span compute comm comm_compute_overlap exposed_comm memcpy exposed_memcpy idle wait transfer"
    fields = {f"{name}_us" for name in f"{names} exposed_wait exposed_transfer".split()}
    assert fields <= rank["total"].keys()
    assert fields | {"step", "idle_by_cause_us"} <= rank["steps"][0].keys()
    assert rank["steps"][0]["idle_by_cause_us"].keys() == {
        *("host", "unrecorded", "launching", "latency", "one_off", "comm_wait", "data"),
        *("allocating", "loading", "blocked", "other", "unknown"),
    }
    (each,) = content["collectives"]
    assert {"group", "seq", "kind", "bytes", "last_rank", "ranks"} <= each.keys()
    assert each["ranks"] == [
        {"rank": 0, "start_us": 30.0, "wait_us": 4.0, "transfer_us": 16.125},
        {"rank": 1, "start_us": 34.0, "wait_us": 0.0, "transfer_us": 16.125},
    ]
    assert content["stragglers"][0] == {
        "rank": 1,
        "collectives": 1,
        "last_arrivals": 1,
        "wait_caused_us": 4.0,
    }


def test_a_note_is_a_finding_with_its_figures(capture: Path) -> None:
    (capture / "r1.json").unlink()
    content = msgspec.json.decode(msgspec.json.encode(analyse_paths([capture])))
    (note,) = (each for each in content["findings"] if each["level"] == "detail")
    assert note["code"] == "noticed"
    assert note["figures"] == {"of": "", "case": "one-rank-present", "num_present": 1, "num_ranks": 2}
    assert note["text"] == "1 of 2 ranks are present: waiting for the others counts as transfer"


def test_tables_fit_and_hold_no_control_characters(capture: Path) -> None:
    for width in (60, 100, 160):
        text = render_trace(analyse_paths([capture]), width)
        assert max(map(len, text.splitlines())) <= width
        assert not set(text) & set(map(chr, range(32))) - {"\n"}
    assert "gemm <b>\N{REPLACEMENT CHARACTER}[31m" in text
    assert "▇" in text


def test_a_call_that_issues_a_collective_counts_with_its_kernel(tmp_path: Path) -> None:
    events = [span("cpu_op", "nccl:all_reduce", 0, 9), launch(1, 1, 1), kernel(RING, 20, 5, 1)]
    (row,) = analyse_paths([write(tmp_path / "a.json", events)]).ranks[0].ops
    assert (row.name, row.count, row.device_us, row.host_us) == ("nccl:all_reduce", 1, 5.0, 0.0)


def test_the_bar_is_as_long_as_it_should_be(capture: Path) -> None:
    text = render_trace(analyse_paths([capture]), 160)
    bars = [line.split()[-1] for line in text.splitlines() if "▇" in line and "compute ▇" not in line]
    assert bars
    assert {len(bar) for bar in bars} == {20}


def test_the_difference_of_two_captures(tmp_path: Path) -> None:
    def record(name: str, gemm_us: float, steps: int) -> TraceReport:
        events = []
        for number in range(steps):
            begin = 1000 * number
            events += [
                step(number, begin, 500),
                span("cpu_op", "aten::mm", begin, 50),
                launch(begin + 1, 1, number + 1),
            ]
            events.append(kernel("gemm", begin + 10, gemm_us, number + 1))
        return analyse_paths([write(tmp_path / name, events)])

    a, b = record("a.json", 100, 2), record("b.json", 130, 4)
    diff = diff_traces(a, b)
    assert (diff.num_ranks, diff.num_steps) == ((1, 1), (2, 4))
    assert [(each.name, each.a_us, each.b_us, each.change_us) for each in diff.kernels] == [
        ("gemm", 100, 130, 30)
    ]
    assert diff.kernels[0].percent == pytest.approx(30)
    assert diff.ops[0].name == "aten::mm"
    classes = {each.name: each.change_us for each in diff.classes}
    assert (classes["span"], classes["compute"], classes["idle_host"]) == (0, 30, -30)
    assert diff.findings[0].text == "in B a step takes about as long, within 1 % (0.500 ms)"
    assert diff.findings[1].text == (
        "compute takes 0.130 instead of 0.100 ms of it, offset by waiting for the CPU (−0.030 ms)"
    )
    assert "+30.0" in render_trace_diff(diff, 100)
    assert "exposed wait" not in render_trace_diff(diff, 100)  # neither has any
    assert "× 12" in render_trace_diff(diff_traces(a, record("c.json", 1200, 2)), 100)
    assert all(each.change_us == 0 for each in diff_traces(a, a).kernels + diff_traces(a, a).classes)


def test_captures_of_other_devices_or_ranks_say_so() -> None:
    v100, h100 = (analyse_paths([REAL / name]) for name in ("dlrm_8xV100", "vit_H100"))
    said = diff_traces(v100, h100).findings[0].text
    assert (
        "; A has 8 ranks, B 1; A ran on Tesla V100-SXM2-32GB, B on NVIDIA H100 80GB HBM3; a step of" in said
    )
    assert ";" not in diff_traces(h100, h100).findings[0].text


def test_some_ranks_of_a_capture_are_compared_with_the_same_ranks() -> None:
    """Means over other ranks would differ, though nothing has changed."""
    files = sorted((REAL / "dlrm_8xV100").glob("worker*"))
    whole, some = (analyse_paths(paths, None, {"operators", "shapes"}) for paths in (files, files[:4]))
    for diff in (diff_traces(whole, some), diff_traces(some, whole)):
        assert diff.findings[0].text == (
            "in B a step takes about as long, within 1 % (16.2 ms); compared by ranks 0–3, which both have, "
            "without shapes and callers of operators"
        )
        assert all(each.change_us == pytest.approx(0, abs=1e-6) for each in (*diff.classes, *diff.kernels))
        assert (diff.shapes, diff.operators) == ((), None)


def test_what_only_a_rank_of_one_capture_has_is_not_missing_in_the_other(tmp_path: Path) -> None:
    """Rank 1 alone has operators and launches, and B lacks it."""
    works = [step(1, 0, 400), kernel("gemm", 30, 300, 1)]
    calls = [launch(5, 5, 1), span("cpu_op", "aten::mm", 0, 20)]
    paths = [
        write(tmp_path / f"rank{rank}.json", [*works, *calls * rank], **rank_info(rank, 2)) for rank in (0, 1)
    ]
    a, b = analyse_paths(paths), analyse_paths(paths[:1])
    for diff in (diff_traces(a, b), diff_traces(b, a)):
        assert diff.findings[0].text.endswith(
            "compared by rank 0, which both have, without shapes and callers of operators"
        )


def test_of_captures_that_call_operators_unequally_often_only_the_others_are_compared(
    tmp_path: Path,
) -> None:
    """B copies on the CPU, too: a call takes less on the GPU, though its copies take longer."""

    def record(name: str, num_copies: int, copy_us: int) -> TraceReport:
        events = []
        for turn in range(3):
            at, number = 1000 * turn, 10 * turn
            events += [span("cpu_op", "aten::mm", at, 20), launch(at + 5, 5, number + 1)]
            events += [
                kernel("gemm", at + 30, copy_us, number + 1),
                span("cpu_op", "aten::copy_", at + 40, 20),
            ]
            events += [launch(at + 45, 5, number + 2), kernel("Memcpy", at + 240, copy_us, number + 2)]
        events += [span("cpu_op", "aten::copy_", 3000 + 10 * i, 5) for i in range(num_copies)]
        return analyse_paths([write(tmp_path / name, events)], show=frozenset({"operators"}))

    diff = diff_traces(record("a.json", 0, 100), record("b.json", 300, 200))
    assert [each.name for each in diff.ops] == ["aten::mm"]
    assert [each.name for each in diff.operators or ()] == ["aten::mm"]
    assert diff.findings[0].text.endswith("; not compared, as A and B call them unequally often: aten::copy_")


def test_a_capture_without_the_cpu_says_so_and_compares_no_operators(tmp_path: Path) -> None:
    work = [launch(5, 5, 1), kernel("gemm", 30, 100, 1), kernel("gemm", 230, 100, 2)]
    calls = [launch(200, 5, 2), span("cpu_op", "aten::mm", 0, 20)]
    with_cpu = analyse_paths([write(tmp_path / "a.json", [*work, *calls])])
    alone = analyse_paths([write(tmp_path / "b.json", [each for each in work if each["cat"] == "kernel"])])
    diff = diff_traces(with_cpu, alone)
    assert (diff.per, diff.ops, diff.operators) == ("capture", (), None)
    assert [each.name for each in diff.classes if each.a_us] == ["compute", "idle"]
    lacks = "; B has no operators, so they aren't compared"
    assert diff.findings[0].text.endswith(f"{lacks}; B lacks launches, so idle time isn't compared by cause")
    longer = [kernel("gemm", 30, 190, 1), launch(5, 5, 1), launch(200, 5, 2), kernel("gemm", 230, 100, 2)]
    sides = {"a.json": [*work, *calls], "b.json": longer}
    a, b = (analyse_paths([write(tmp_path / name, [step(1, 0, 400), *sides[name]])]) for name in sides)
    answer, cause, note, *_ = diff_traces(a, b).findings
    assert (answer.text.endswith(lacks), cause.level, note.level) == (True, "cause", "detail")


def test_where_a_capture_lacks_launches_operators_are_compared_by_their_time_on_the_cpu(
    tmp_path: Path,
) -> None:
    """They haven't gone, though no work on the GPU is known to be theirs."""

    def record(name: str, has_launches: bool) -> TraceReport:
        events = [step(1, 0, 400), span("cpu_op", "aten::mm", 0, 20), kernel("gemm", 30, 300, 1)]
        events += [launch(5, 5, 1)] * has_launches
        return analyse_paths([write(tmp_path / name, events)], show=frozenset({"operators"}))

    whole, without = record("a.json", True), record("b.json", False)
    for diff, side in ((diff_traces(whole, without), "B"), (diff_traces(without, whole), "A")):
        assert [(each.name, each.a_us, each.b_us) for each in diff.ops] == [("aten::mm", 20, 20)]
        assert diff.operators is None
        said = f"{side} lacks launches, so operators are compared by their time on the CPU"
        assert said in diff.findings[0].text
    assert diff_traces(whole, whole).ops[0].a_us == 300


def test_communication_whose_waiting_is_unknown_is_no_transfer_that_grew(tmp_path: Path) -> None:
    """One of two ranks, whose all-reduce takes 40 and then 400 µs."""

    def record(name: str, length_us: int) -> TraceReport:
        facts = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Collective name": "allreduce"}
        events = [step(1, 0, 55 + length_us), launch(0, 1, 1), kernel("gemm", 5, 50, 1), launch(10, 1, 2)]
        events.append(kernel(RING, 55, length_us, 2, **facts))
        return analyse_paths([write(tmp_path / name, events, **rank_info(0, 2))])

    diff = diff_traces(record("a.json", 40), record("b.json", 400))
    said = [each.text for each in diff.findings]
    assert "communication or waiting for it takes 0.400 instead of 0.040 ms of it" in said
    assert {"exposed_transfer", "exposed_wait"}.isdisjoint(each.name for each in diff.classes)


def test_captures_without_steps_are_compared_by_their_time(tmp_path: Path, wording: Wording) -> None:
    """The same loop, recorded for one turn and for ten: nothing has changed."""

    def record(name: str, turns: int, is_marked: bool) -> TraceReport:
        events = [step(1, 0, 100)] if is_marked else []
        for turn in range(turns):
            events += [launch(100 * turn, 1, turn + 1), kernel("gemm", 100 * turn, 50, turn + 1)]
        events.append(kernel("end", 100 * turns - 10, 10))
        return analyse_paths([write(tmp_path / name, events)])

    short, long = record("short.json", 1, False), record("long.json", 10, False)
    diff = diff_traces(short, long)
    assert (diff.per, diff.num_steps) == ("second", (0, 0))
    assert {each.name: (each.a_us, each.b_us) for each in diff.kernels} == {
        "gemm": (50, 50),
        "end": (10, 10),
    }
    assert sum(each.b_us for each in diff.classes) == pytest.approx(1e6)
    wording(render_trace_diff(diff, 100).partition("\nnote: ")[0])
    mixed = diff_traces(record("marked.json", 1, True), long)
    assert mixed.per == "second"
    wording(render_trace_diff(mixed, 100).partition("\nnote: ")[0])


def test_captures_of_as_many_calls_are_compared_as_they_are(tmp_path: Path) -> None:
    """Compute takes as long in both; only the second waits for another 2 ms."""

    def record(name: str, pause_us: int) -> TraceReport:
        events = [launch(0, 1, 1), kernel("gemm", 5, 995, 1), launch(1000 + pause_us, 1, 2)]
        return analyse_paths([write(tmp_path / name, [*events, kernel("gemm", 1005 + pause_us, 995, 2)])])

    diff = diff_traces(record("a.json", 1000), record("b.json", 3000))
    assert diff.per == "capture"
    changes = {each.name: (each.a_us, each.b_us, each.change_us) for each in diff.classes}
    assert changes["compute"] == (1990, 1990, 0)
    assert sum(change for _, _, change in changes.values()) == 2000
    assert "so ms in all of each rank's trace" in render_trace_diff(diff, 200)


@pytest.mark.parametrize(("num_more", "per"), [(1, "capture"), (3, "second"), (20, "second")])
def test_captures_of_nearly_as_many_calls_are_compared_as_they_are(
    tmp_path: Path, num_more: int, per: str
) -> None:
    def record(name: str, num: int) -> TraceReport:
        calls = [span("cpu_op", "aten::mm", 100 * i, 20) for i in range(num)]
        work = [(launch(100 * i, 1, i + 1), kernel("gemm", 100 * i + 5, 50, i + 1)) for i in range(num)]
        return analyse_paths([write(tmp_path / name, [*calls, *(each for pair in work for each in pair)])])

    diff = diff_traces(record("a.json", 20), record("b.json", 20 + num_more))
    assert diff.per == per
    doubt = f"A calls 20 operators, B {20 + num_more}"
    assert (doubt in diff.findings[0].text) == (per == "second")


def test_thousands_are_separated_as_in_every_report() -> None:
    changes = (Change("gemm", 2e6, 1.5e6, -5e5, -25.0), Change("copy", 1e3, 2e6, 1.999e6, 199900.0))
    said = render_trace_diff(TraceDiff(1, (1, 1), (2, 2), "step", changes, (), (), (), ()), 100)
    shown = said.replace(",", "_").replace(MINUS, "-")
    for text in ("2_000.000", "1_500.000", "-500.000", "-25.0", "+1_999.000", "× 2_000"):
        assert text in shown


def test_a_merged_trace_keeps_every_event_on_one_clock(capture: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "merged.json.gz"
    out.parent.mkdir()
    merge_traces([capture], out)
    events = load(out)["traceEvents"]
    rings = [event for event in events if event["name"] == RING]
    assert [(event["ts"], event["dur"]) for event in rings] == [(30.0, 20.125), (34.0, 16.125)]
    assert len({event["pid"] for event in rings}) == 2
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    others = [f"rank {rank}: process {pid}" for rank in (0, 1) for pid in ("10", "Spans")]
    assert sorted(names) == sorted(["rank 0: python", "rank 1: python", *others])
    links = [event for event in events if event.get("cat") == "collective"]
    places = [(event["ph"], event["ts"], event["pid"], event["tid"]) for event in links]
    assert places == [
        (ph, ring["ts"], ring["pid"], ring["tid"]) for ph, ring in zip("sf", rings, strict=True)
    ]
    assert len({event["id"] for event in events if event.get("cat") == "ac2g"}) == 2
    assert sum(event["name"] == "no time" for event in events) == 2
    assert [path.name for path in out.parent.iterdir()] == ["merged.json.gz"]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces next to the repository")
def test_a_real_capture_merged(tmp_path: Path) -> None:
    out = tmp_path / "merged.json"
    merge_traces([REAL / "dlrm_8xV100"], out)
    merged = json.loads(out.read_bytes())
    single = sum(len(load(path)["traceEvents"]) for path in (REAL / "dlrm_8xV100").iterdir())
    extra = [e for e in merged["traceEvents"] if e.get("cat") == "collective"]
    assert len(extra) == 8 * 8
    begun = [event["id"] for event in merged["traceEvents"] if event["ph"] == "s"]
    assert len(set(begun)) == len(begun)
    assert len(merged["traceEvents"]) - len(extra) >= single
    assert len({event["pid"] for event in merged["traceEvents"]}) > 8 * 2
    kernels = [e for e in merged["traceEvents"] if e.get("cat") == "kernel" and e["pid"] // 10_000 == 7]
    assert sum("nccl" in event["name"] for event in kernels) == 8


def test_a_place_that_cannot_be_written(capture: Path, tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "file").write_text("")
    for directory in ("file", "missing"):
        with wording.raises(SpecError):
            merge_traces([capture], tmp_path / directory / "merged.json")
    assert not (tmp_path / "missing").exists()


def test_only_a_full_disk_asks_for_space(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> str:
        def replace(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("gpurun.launcher.trace.merge.os.replace", replace)
        with pytest.raises(MachineError) as caught:
            merge_traces([capture], tmp_path / "merged.json")
        return str(caught.value)

    assert "free some space" in fail(errno.ENOSPC)
    assert "free some space" not in fail(errno.EACCES)
    assert list(tmp_path.iterdir()) == [capture]


def test_only_a_regular_file_is_replaced(capture: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "to_fifo").symlink_to(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.iterdir())
    for name in ("fifo", "directory", "nowhere", "to_fifo", "loop"):
        with pytest.raises(SpecError, match="can't write"):
            merge_traces([capture], tmp_path / name)
    with pytest.raises(SpecError, match="it is a directory"):
        merge_traces([capture], Path(""))
    assert sorted(tmp_path.iterdir()) == before
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_a_link_is_not_written_through(capture: Path, tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "target.json").write_text("old")
    out = tmp_path / "out.json"
    out.symlink_to("target.json")
    with wording.raises(SpecError):
        merge_traces([capture], out)
    assert (tmp_path / "target.json").read_text() == "old"


def test_a_trace_is_not_merged_over_itself(capture: Path, tmp_path: Path, wording: Wording) -> None:
    rank = capture / "r0.json"
    before = rank.read_bytes()
    os.link(rank, tmp_path / "hard.json")
    for out in (rank, tmp_path / "hard.json"):
        with wording.raises(SpecError):
            merge_traces([capture], out)
    assert rank.read_bytes() == before


@pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
def test_a_merged_trace_next_to_the_ranks_is_passed_over(capture: Path, name: str, wording: Wording) -> None:
    alone = analyse_paths([capture])
    merge_traces([capture], capture / name)
    first = (capture / name).read_bytes()
    report = analyse_paths([capture])
    wording(trace_notes(report))
    assert report.ranks == alone.ranks
    merge_traces([capture], capture / name)  # once more, over the older one
    assert (capture / name).read_bytes() == first


@pytest.mark.parametrize("num_ranks", [2, 1000, 4000])
def test_a_merged_trace_by_itself_names_those_of_the_ranks(
    tmp_path: Path, num_ranks: int, wording: Wording
) -> None:
    """Not where they are too many for its header."""
    (tmp_path / "new").mkdir()
    files = [tmp_path / f"node{rank}" / "rank.json" for rank in range(num_ranks)]
    mark = mark_of_merged(files)
    write(tmp_path / "new" / "all.json.gz", [], **mark)
    for path in (tmp_path / "new" / "all.json.gz", tmp_path / "new"):
        with wording.raises(TraceError):
            analyse_paths([path])


@pytest.mark.parametrize("show", [[], ["--show", "kernels"], ["--json", "--show", "all"]])
def test_traces_are_merged_as_they_are_reported(capture: Path, show: list[str]) -> None:
    """They are read once, before the merged file is next to them."""
    alone = runner().invoke(cli, ["trace", str(capture), *show])
    merged = runner().invoke(cli, ["trace", str(capture), *show, "--merge", str(capture / "all.json.gz")])
    assert (merged.exit_code, merged.stdout) == (0, alone.stdout)
    assert is_merged(capture / "all.json.gz")


@pytest.mark.parametrize(
    "text",
    [
        '{"gpurun": {"merged": false}, "traceEvents": []}',
        '{"gpurun": 1, "traceEvents": []}',
        '{"traceEvents": [{"name": "gpurun", "args": {"merged": true}}]}',
        '{"a":' * 600 + '"traceEvents"',
        "",
    ],
)
def test_other_files_are_no_merged_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    assert not is_merged(tmp_path / "file.json")


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_the_columns_of_a_step_add_up_at_every_width(tmp_path: Path, width: int) -> None:
    """Step 1 holds the end of a kernel of step 0, on another stream, and a copy that nothing overlaps."""
    work = [kernel("k", 10, 80, 1), kernel("k", 110, 20, 2, stream=9), kernel("k", 103, 5, 4)]
    copy = kernel("Memcpy HtoD (Pageable -> Device)", 210, 1_001, 3) | {"cat": "gpu_memcpy"}
    calls = [launch(1, 1, 1), launch(2, 1, 2), launch(101, 1, 4), launch(102, 1, 3)]
    events = [step(0, 0, 100), step(1, 100, 1_200), *calls, *work, copy]
    text = render_trace(analyse_paths([write(tmp_path / "rank0.json", events)]), width)
    rows = [line.split() for line in text.splitlines() if line.startswith(("step ", "   1 ", "mean "))]
    names, second, mean = rows
    assert {"copies", "other"} <= set(names)
    for figures in (
        dict(zip(names, second, strict=False)),
        dict(zip(names[:1] + names[2:], mean, strict=False)),
    ):
        span_ms, *parts = (
            0.0 if figures[name] == "-" else float(figures[name].replace(",", ""))
            for name in ("span", "compute", "exposed", "copies", "other", "idle")
        )
        assert sum(parts) == pytest.approx(span_ms, abs=0.0025)


def test_a_span_of_half_a_microsecond_is_rounded_as_its_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "rank0.json", [span("cpu_op", "aten::mm", 0, 2.5)])
    report = analyse_paths([path], None, frozenset({"critical-path"}))
    (row,) = (line.split() for line in render_trace(report, 100).splitlines() if line.startswith("   0 "))
    assert row[:3] == ["0", "0.002", "0.002"]
    shown = [line.split() for line in render_tables(report, ("critical-path",), 100).splitlines()]
    parts = [line[0] for line in shown if line[1:] and line[-1] in ("compute", "all")]
    assert parts == ["0.002", "0.002"]


def test_a_part_of_idle_time_is_rounded_as_that(tmp_path: Path) -> None:
    events = [launch(-2, 1, 1), kernel("k", 0, 1, 1), launch(3, 0.5, 2), kernel("k", 3.5, 1, 2)]
    text = render_trace(analyse_paths([write(tmp_path / "rank0.json", events)]), 100)
    names, row = (line.split() for line in text.splitlines() if line.startswith(("rank ", "   0 ")))
    figures = dict(zip(names, row, strict=False))
    assert (figures["span"], figures["compute"], figures["idle"], figures["host"]) == (
        "0.004",
        "0.002",
        "0.002",
        "0.002",
    )


def test_parts_of_idle_time_are_not_more_than_that(tmp_path: Path) -> None:
    """The CPU loads data for 1.5 of 3 µs."""
    loads = span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2, 1.5)
    events = [launch(0, 1, 1), kernel("k", 1, 1, 1), loads, launch(4.5, 0.5, 2), kernel("k", 5, 1, 2)]
    text = render_trace(analyse_paths([write(tmp_path / "rank0.json", events)]), 100)
    names, row = (line.split() for line in text.splitlines() if line.startswith(("rank ", "   0 ")))
    figures = dict(zip(names, row, strict=False))
    assert (figures["idle"], figures["host"], figures["input"]) == ("0.003", "0.002", "0.001")


@pytest.mark.parametrize(("alone", "rate"), [(0, "0.80"), (1, "0.80"), (9, "-")])
def test_a_rate_of_several_sizes_is_their_bytes_over_their_time(
    tmp_path: Path, alone: int, rate: str
) -> None:
    """40 bytes take 4 µs, 7,960 bytes 6 µs: the mean of rates is 0.67. Of others nothing is known."""
    for rank in (0, 1):
        events = []
        sizes = [(10, 4), (1990, 6), *([(1990, 5)] * alone if rank == 0 else [])]
        for number, (size, length_us) in enumerate(sizes):
            facts = {"Collective name": "allreduce", "In msg nelems": size, "Out msg nelems": size}
            group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
            begin_us = 100 * number + 10
            events += [
                launch(begin_us - 5, 1, number),
                kernel(RING, begin_us, length_us, number, dtype="Float", **facts, **group),
            ]
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    table = render_trace(analyse_paths([tmp_path]), width=100)
    (row,) = (line.split() for line in table.splitlines() if " all_reduce " in line)
    assert row[4] == rate


def test_a_comparison_leaves_out_the_steps_that_causes_are_without() -> None:
    """As `gpurun trace` says of the same file: 125 ms in a usual step, 21.0 of them waiting for the CPU."""
    report = analyse_paths([REAL / "resnet50_V100" / "num_workers_4.pt.trace.json.gz"])
    diff = diff_traces(report, report)
    noted = [each.text for each in diff.findings if each.figures.get("case") == "outlying-step"]
    steps = [f"{side}: step {number}" for side in "AB" for number in (5, 9)]
    assert [each.partition(" takes")[0] for each in noted] == steps
    assert all(each.endswith("; parts of a step are without it") for each in noted)
    assert "without steps 5, 9 of B, far longer than the others" in diff.findings[0].text
    assert "ms per step and rank; of kernels and operators, of all steps\n" in render_trace_diff(diff, 200)
    classes = {each.name: each.a_us for each in diff.classes}
    usual = [each for each in report.ranks[0].steps if each.step not in (5, 9)]
    assert classes["span"] == pytest.approx(sum(each.span_us for each in usual) / 4)
    assert classes["idle_host"] == pytest.approx(20_991, abs=1)


def test_a_part_that_grew_in_a_step_as_long_says_what_offset_it(tmp_path: Path) -> None:
    def record(name: str, compute_us: int) -> TraceReport:
        copy = span(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", compute_us, 1000 - compute_us, 7, correlation=2
        )
        events = [
            step(1, 0, 1000),
            launch(0, 1, 1),
            kernel("gemm", 1, compute_us - 1, 1),
            launch(2, 1, 2),
            copy,
        ]
        return analyse_paths([write(tmp_path / name, events)])

    a, b = record("a.json", 200), record("b.json", 600)
    (said,) = (each.text for each in diff_traces(a, b).findings if each.level == "cause")
    assert said == ("compute takes 0.599 instead of 0.199 ms of it, offset by exposed memcpy (−0.400 ms)")
