"""A merged trace against the rules of the Chrome trace format that Perfetto's importer goes by.

Source: "Trace Event Format" (Google, 2016): complete events, flow events, metadata events.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.merge import merge_traces
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, load, rank_info, span, step, write

RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def arrow(phase: str, identity: int, ts: float, tid: int = 1, pid: int = 10) -> Event:
    return {"ph": phase, "id": identity, "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": tid, "ts": ts}


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """Three steps of 100 µs on two ranks; the GPU does a step's work while the CPU is at the next."""
    directory = tmp_path / "capture"
    directory.mkdir()
    for rank in (0, 1):
        events: list[Event] = [
            {"ph": "M", "name": "process_sort_index", "pid": 10, "args": {"sort_index": 5}}
        ]
        for i in range(3):
            begin = 100 * i
            events += [step(i, begin, 100), span("cpu_op", f"aten::op{i}", begin + 5, 20)]
            events += [launch(begin + 10, 1, i + 1), arrow("s", i + 1, begin + 10)]
            events += [kernel(f"{RING}{i}", begin + 60, 80, i + 1), arrow("f", i + 1, begin + 60, 7, 0)]
        write(directory / f"r{rank}.json", events, **rank_info(rank, 2))
    return directory


def check(events: list[Event]) -> None:
    """Every rule that has to hold whatever was recorded."""
    slices = defaultdict(list)
    for event in events:
        assert isinstance(event["ph"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], str(event["tid"])].append((event["ts"], event["ts"] + event["dur"]))
    labels = Counter(
        (e["name"], e["pid"]) for e in events if e["ph"] == "M" and e["name"].startswith("process_")
    )
    for pid in {event["pid"] for event in events}:
        assert labels["process_name", pid] == labels["process_sort_index", pid] == 1
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf" and event["cat"] == "collective":
            arrows[event["id"]].append(event)
            around = slices[event["pid"], str(event["tid"])]
            assert any(begin <= event["ts"] <= end for begin, end in around), event
    for ends in arrows.values():
        assert [each["ph"] for each in ends] == ["s", *"t" * (len(ends) - 2), "f"]
        assert len({each["name"] for each in ends}) == 1
        assert [each["ts"] for each in ends] == sorted(each["ts"] for each in ends)
        assert len({each["pid"] // 10_000 for each in ends}) == len(ends)  # from rank to rank
    assert arrows


def test_a_merged_trace_keeps_the_rules(capture: Path, tmp_path: Path) -> None:
    merge_traces([capture], tmp_path / "all.json.gz")
    check(load(tmp_path / "all.json.gz")["traceEvents"])


def test_ranks_are_any_number_that_is_in_a_name(capture: Path, tmp_path: Path) -> None:
    """Ids of 2^40 for each rank before it would need more than 64 bits."""
    for rank in (0, 1):
        header = json.loads((path := capture / f"r{rank}.json").read_bytes())
        path.unlink()
        write(capture / f"rank99999999{rank}.json", header["traceEvents"])
    merge_traces([capture], tmp_path / "all.json.gz")
    events = load(tmp_path / "all.json.gz")["traceEvents"]
    check(events)
    assert max(event.get("id", 0) for event in events) < 1 << 53


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm_8xV100", "ddp_2of128"])
@pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces next to the repository")
def test_real_captures_keep_the_rules(tmp_path: Path, name: str) -> None:
    merge_traces([REAL / name], tmp_path / "all.json")
    check(json.loads((tmp_path / "all.json").read_bytes())["traceEvents"])


def test_only_the_steps_that_were_asked_for(capture: Path, tmp_path: Path) -> None:
    merge_traces([capture], tmp_path / "all.json.gz", slice(1, 2))
    events = load(tmp_path / "all.json.gz")["traceEvents"]
    check(events)
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert names["ProfilerStep#1"] == names["aten::op1"] == names[f"{RING}1"] == 2
    assert not {"ProfilerStep#0", "aten::op0", f"{RING}0", f"{RING}2"} & names.keys()
    ends = Counter((event["ph"], event["id"]) for event in events if event.get("cat") == "ac2g")
    assert sorted(phase for phase, _ in ends) == ["f", "f", "s", "s"]  # none without its other end
    whole = analyse_paths([capture], slice(1, 2))
    assert [rank.steps[0].step for rank in whole.ranks] == [1, 1]


@pytest.mark.parametrize("time", ['"1e400"', f'"{"9" * 5000}"', "1e300"])
def test_events_at_times_that_no_clock_shows_are_left_out(capture: Path, tmp_path: Path, time: str) -> None:
    """As they are in the analysis."""
    path = capture / "r0.json"
    begin, event = '"traceEvents": [', json.dumps(span("cpu_op", "f", 0, 1))
    text = path.read_text().replace(begin, f"{begin}{event}, ")
    path.write_text(text.replace('"ts": 0, "dur": 1,', f'"ts": {time}, "dur": 1,'))
    merge_traces([capture], tmp_path / "all.json.gz")
    events = load(tmp_path / "all.json.gz")["traceEvents"]
    check(events)
    assert "f" not in {event["name"] for event in events}
