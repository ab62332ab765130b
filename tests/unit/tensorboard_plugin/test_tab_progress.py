"""A run while it goes on, as the tab shows it."""

import os
import platform
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.launcher.compare.figures.size_curves import Balanced, DeviceCost, SplitCost
from gpurun.launcher.errors import MachineError
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.rundir.claim import claimed, read
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.paths import stamp_of
from gpurun.launcher.rundir.records import Event, StepRecord
from gpurun.launcher.tensorboard_plugin import logdir
from gpurun.launcher.tensorboard_plugin.answers import live
from gpurun.launcher.tensorboard_plugin.answers.live import LiveDevices, progress_answer
from gpurun.launcher.tensorboard_plugin.answers.operators import KINDS, Kind, operators_answer
from gpurun.launcher.tensorboard_plugin.answers.runs import run_answer, steps_answer
from gpurun.launcher.tensorboard_plugin.answers.sentences import cost_sentences
from gpurun.launcher.tensorboard_plugin.html import without_host
from gpurun.launcher.tensorboard_plugin.logdir import Kept, Listed, Listing, choose, own, status
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TraceReport
from tests.known import known
from tests.sample import COMPARISON
from tests.unit.trace.trace_files import Event as TraceEvent
from tests.unit.trace.trace_files import kernel, launch, rank_info, span, step, write
from tests.wording import Wording

IDS = ("ddp-2-even", "ddp-2-48-16")
VARIANTS = tuple(
    Variant(
        id=name,
        devices=("cpu:0", "cpu:1"),
        split=split,
        split_name="",
        global_batch=64,
        precision="fp32",
        accumulate=1,
        seed=0,
        varied={},
    )
    for name, split in zip(IDS, ((32, 32), (48, 16)), strict=True)
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """Two launches of 10 rounds each, of which the first is through and the second in round 6."""
    run = begun(tmp_path / "run")
    with claimed(run):
        yield run


def begun(path: Path) -> RunDir:
    """The run's files; no command works on it."""
    launches = tuple(Launch(name, "ddp-2", n, IDS, 10, ()) for n, name in enumerate(("01-ddp-2", "02-ddp-2")))
    run = RunDir(path)
    write_json(run.plan, Plan("gpt-splits", "gpt", IDS[0], VARIANTS, (), launches, ()))
    write_json(run.host, {"hostname": platform.node()})
    began_ns = time.time_ns() - 30 * 10**9
    append_lines(
        run.events("01-ddp-2"), [Event(began_ns, "start"), Event(began_ns + 1, "done", None, 10, 10)]
    )
    append_lines(run.events("02-ddp-2"), [Event(time.time_ns(), "round", IDS[1], 6, 10)])
    for rank in (0, 1):
        phases = {"data": 7, "forward": 10**6, "backward": 2 * 10**6, "optimizer": 10**6}
        steps = [StepRecord("02-ddp-2", 5, 0, n, "timed", 5 * 10**6, phases, 1 << 30) for n in range(300)]
        append_lines(
            run.steps(IDS[1], rank), [StepRecord("02-ddp-2", 0, 0, 0, "warmup", 1, {}, None), *steps]
        )
    return run


def answer(run: RunDir) -> dict[str, Any]:
    return progress_answer(own(run), LiveDevices())


def test_it_says_what_runs_and_how_long_it_takes(run: RunDir) -> None:
    found = progress_answer(own(run), LiveDevices())
    assert found["status"] == "running"
    assert found["stage"]["label"] == "ddp 48/16"
    assert (found["stage"]["round"], found["stage"]["rounds"]) == (6, 10)
    assert found["done"] == pytest.approx(15 / 20)
    began_s = run.read_events("01-ddp-2")[0].time_ns / 1e9
    assert found["seconds_left"] == pytest.approx((found["time_s"] - began_s) / 3)
    assert [each["status"] for each in found["variants"]] == ["planned", "running"]
    assert found["live"]


@pytest.mark.parametrize(("ended", "done"), [(0, None), (1, 0.5), (2, 1.0)])
def test_of_a_program_launches_that_have_ended_are_done(run: RunDir, ended: int, done: float | None) -> None:
    """How many steps it will make isn't known."""
    plan = run.read(run.plan, Plan)
    programs = tuple(replace(each, strategy="script") for each in plan.variants)
    launches = tuple(replace(each, rounds=1) for each in plan.launches)
    write_json(run.plan, replace(plan, variants=programs, launches=launches))
    for number, planned in enumerate(launches):
        run.events(planned.id).unlink()
        steps = [Event(time.time_ns(), "run", IDS[0], 280)]
        more = [Event(time.time_ns(), "done", IDS[0])] if number < ended else []
        append_lines(run.events(planned.id), [*steps, *more])
    found = progress_answer(own(run), LiveDevices())
    assert found["done"] == done
    assert (found["seconds_left"] is None) == (done is None)


def test_a_launch_that_started_again_is_followed(run: RunDir) -> None:
    for name in ("02-ddp-2", "02-ddp-2~2"):
        write_json(run.launch_config(name), {})
    append_lines(run.events("02-ddp-2~2"), [Event(time.time_ns(), "round", IDS[0], 2, 4)])
    found = progress_answer(own(run), LiveDevices())
    assert (found["stage"]["variant"], found["stage"]["round"]) == (IDS[0], 2)
    assert found["done"] == pytest.approx(15 / 20)


def test_a_process_that_lives_keeps_a_silent_run_running_and_one_that_died_ends_it(
    tmp_path: Path,
    wording: Wording,
) -> None:
    run = begun(tmp_path / "run")
    assert status(own(run)) == "stopped"  # interrupted a moment ago
    long_ago_s = time.time() - 3600
    for path in (run.plan, *run.path.rglob("events.jsonl")):
        os.utime(path, (long_ago_s, long_ago_s))
    wording(answer(run)["headline"])
    with claimed(run):
        assert status(own(run)) == "running"
        wording(answer(run)["headline"])
        killed = replace(known(read(run)), start_ticks=1)
        write_json(run.running, killed)
        run.plan.touch()
        assert status(own(run)) == "stopped"


def test_it_has_the_latest_steps_of_each_rank(run: RunDir) -> None:
    found = progress_answer(own(run), LiveDevices())
    ranks = found["variants"][1]["ranks"]
    assert [(each["rank"], each["device"], each["local_batch"]) for each in ranks] == [
        (0, "cpu:0", 48),
        (1, "cpu:1", 16),
    ]
    assert ranks[0]["steps"] == 300
    assert ranks[0]["step"] == list(range(60, 300))
    assert set(ranks[0]["step_ms"]) == {5.0}
    assert set(ranks[0]["forward_ms"]) == {1.0}
    assert ranks[0]["peak_gib"] == 1.0


def test_the_steps_of_many_ranks_take_no_more_memory_than_those_of_few(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps_answer(own(run), [IDS[1]])["variants"][IDS[1]]["total"] == 300
    num_bytes = run.steps(IDS[1], 0).stat().st_size
    monkeypatch.setattr(logdir, "MAX_VARIANT_BYTES", num_bytes)
    found = steps_answer(own(run), [IDS[1]])["variants"][IDS[1]]
    assert (found["ranks"], found["total"]) == ([0, 1], pytest.approx(150, abs=5))


def test_the_tab_gets_each_gpus_device(run: RunDir) -> None:
    """Older records know one kind only."""
    write_json(run.host, {"gpus": [{"index": 1, "kind": "xpu"}, {"index": 0}, 7]})
    assert [gpu["device"] for gpu in run_answer(own(run))["host"]["gpus"]] == ["xpu:1", "cuda:0"]


def test_it_changes_with_what_is_written(run: RunDir) -> None:
    elsewhere = {"hostname": "another machine"}
    write_json(run.host, elsewhere)
    before = answer(run)
    assert before["live"] == []
    assert answer(run)["version"] == before["version"]
    append_lines(run.steps(IDS[0], 0), [StepRecord("02-ddp-2", 6, 0, 0, "timed", 7, {}, None)])
    assert answer(run)["version"] != before["version"]


def test_it_changes_with_what_a_run_elsewhere_comes_to(run: RunDir) -> None:
    """Nothing is known of its devices."""
    write_json(run.host, {"hostname": "another machine"})
    shown = [answer(run)]
    append_lines(run.events("02-ddp-2"), [Event(time.time_ns(), "round", IDS[1], 6, 10)])
    results = tuple(replace(COMPARISON.variants[0], id=name) for name in IDS)
    write_json(run.comparison, replace(COMPARISON, complete=False, variants=results))
    shown.append(answer(run))
    assert [each["status"] for each in shown] == ["running", "running"]
    assert shown[0]["stage"] == shown[1]["stage"]
    assert [each["headline"] is None for each in shown] == [False, True]
    assert [each["variants"][0]["status"] for each in shown] == ["planned", "ok"]
    assert shown[0]["version"] != shown[1]["version"]


def test_the_share_that_is_done_changes_it(run: RunDir) -> None:
    write_json(run.host, {"hostname": "another machine"})
    shown = [answer(run)]
    plan = run.read(run.plan, Plan)
    write_json(run.plan, replace(plan, launches=tuple(replace(each, rounds=20) for each in plan.launches)))
    shown.append(answer(run))
    assert shown[0]["done"] != shown[1]["done"]
    assert shown[0]["version"] != shown[1]["version"]


def test_before_the_first_variant_is_done_the_plan_is_shown(run: RunDir) -> None:
    listed: Listed = own(run)
    found = run_answer(listed)
    assert found["comparison"] is None
    assert [(each["id"], each["status"], each["label"]) for each in found["variants"]] == [
        (IDS[0], "planned", "ddp 32/32"),
        (IDS[1], "planned", "ddp 48/16"),
    ]
    assert all(each["process_per_device"] for each in found["variants"])


def test_the_use_of_the_cpu_is_unknown_at_first_and_then_what_it_was_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_times = namedtuple("cpu_times", "user idle")
    times = iter([cpu_times(10.0, 90.0), cpu_times(13.0, 91.0)])
    monkeypatch.setattr("psutil.cpu_times", lambda: next(times))
    monkeypatch.setattr(live, "FRESH_S", -1.0)
    monkeypatch.setattr(live, "inspect_gpus", lambda *_: SimpleNamespace(gpus=()))
    devices = LiveDevices()
    found = [devices.of({"hostname": platform.node()})[0]["utilisation_percent"] for _ in range(2)]
    assert found == [None, 75.0]


def test_what_is_kept_of_a_run_that_goes_on_does_not_grow_with_time(tmp_path: Path) -> None:
    kept, path = Kept(10_000), tmp_path / "events.jsonl"
    for number in range(1, 200):
        path.write_bytes(b"x" * number)
        assert kept.get(path, stamp_of(path), partial(int, number)) == number
        assert kept.get(path, stamp_of(path), partial(int, -1)) == number
    assert kept.num_bytes < 10_000
    for number in range(100):
        kept.get(number, (4_000, number), lambda: "one of many files")
        assert kept.num_bytes <= 10_000


def test_a_report_to_send_names_neither_the_host_nor_its_directories() -> None:
    host = {"hostname": "node7.cluster.example", "nodes": [{"host": "node8.example", "address": "10.0.0.1"}]}
    code = {"root": "/home/ada/thesis", "commit": "1234567", "is_changed": True}
    said = "node7 waits for node8 (10.0.0.1): see /home/ada/thesis/train.py; 10 steps, node70"
    shown = without_host({"run": {"code": code, "host": host, "notes": [said]}}, host)
    assert shown["run"]["notes"] == ["… waits for … (…): see …/train.py; 10 steps, node70"]
    assert shown["run"]["code"] == {"root": None, "commit": "1234567", "is_changed": True}
    assert not [word for word in ("node7.", "node8", "ada", "10.0.0") if word in str(shown)]
    ranks = ({"host": "node9", "notes": ("node9 is late",)}, {"host": ("node9", "node8")})
    assert without_host({"savings_ms": {"host": 1.5}}, host) == {"savings_ms": {"host": 1.5}}
    assert without_host({"ranks": ranks}, host) == {
        "ranks": [{"host": None, "notes": ["… is late"]}, {"host": []}]
    }
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(MachineError, match="nested more deeply"):
        without_host({"deep": deep}, host)


# The tab's operators: rows, rest and overlap add up to the step, and the rest is never less than nothing


SIDE_BY_SIDE = {
    "streams": [launch(0, 1, 1), launch(2, 1, 2), kernel("a", 5, 80, 1), kernel("b", 5, 90, 2, stream=8)],
    "threads": [span("cpu_op", "aten::a", 5, 80), span("cpu_op", "aten::b", 5, 90, tid=2)],
    "outside": [launch(150, 1, 1), kernel("a", 155, 300, 1)],
}


def header_of(report: TraceReport) -> Header:
    """As much of an index as the table of operators is made from."""
    return cast(Header, SimpleNamespace(ranks=report.ranks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("events", SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_the_rest_is_never_negative(tmp_path: Path, events: list[TraceEvent], kind: Kind) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *events])])
    answer = operators_answer(header_of(report), None, kind)
    rows_ms = sum(row["self_ms"] for row in answer["rows"])
    assert answer["rest_ms"] >= report.ranks[0].steps[0].idle_us / 1000
    assert answer["overlap_ms"] >= 0
    assert rows_ms + answer["rest_ms"] - answer["overlap_ms"] == pytest.approx(answer["step_ms"])


RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
BY_HAND = [
    span("cpu_op", "aten::mm", 0, 5),
    *(launch(1, 1, 1), kernel("gemm", 10, 50, 1)),
    span("cpu_op", "aten::copy_", 6, 5),
    *(launch(7, 1, 2), kernel("Memcpy HtoD", 60, 10, 2) | {"cat": "gpu_memcpy"}),
    *(launch(20, 1, 3), kernel(RING, 70, 20, 3, stream=20)),
    *(launch(22, 1, 4), kernel("triton_mm", 90, 7, 4)),
]


def test_what_no_operator_launched_has_rows_of_its_class(tmp_path: Path) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *BY_HAND])])
    shown = {kind: operators_answer(header_of(report), None, kind) for kind in KINDS}
    rows = {kind: {row["name"]: row for row in answer["rows"]} for kind, answer in shown.items()}
    assert {name: (row["class"], row["self_ms"], row["named"]) for name, row in rows["ops"].items()} == {
        "aten::mm": ("compute", 0.05, True),
        "aten::copy_": ("copy", 0.01, True),
        "collectives that no operator launched": ("transfer", 0.02, False),
        "compute that no operator launched": ("compute", 0.007, False),
    }
    assert {(row["class"], row["self_ms"]) for row in rows["modules"].values()} == {
        ("compute", 0.057), ("transfer", 0.02), ("copy", 0.01),
    }  # fmt: skip
    assert all(answer["rest_ms"] == pytest.approx(0.013) for answer in shown.values())
    assert all(answer["overlap_ms"] == pytest.approx(0) for answer in shown.values())


def test_on_the_cpu_what_ran_outside_of_modules_is_no_idle_time(tmp_path: Path) -> None:
    events = [span("cpu_op", "aten::a", 5, 80), span("cpu_op", "gloo:all_reduce", 85, 10, tid=2)]
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *events])])
    answer = operators_answer(header_of(report), None, "modules")
    assert {row["name"]: (row["class"], row["self_ms"]) for row in answer["rows"]} == {
        "compute outside of modules": ("compute", 0.08),
        "collectives": ("transfer", 0.01),
    }
    assert answer["rest_ms"] == pytest.approx(0.01)


def test_a_collectives_row_says_how_much_of_it_is_waiting(tmp_path: Path) -> None:
    for rank, start in enumerate((10, 40)):
        events = [step(1, 0, 60), span("cpu_op", "nccl:all_reduce", 1, 5), launch(2, 1, 1)]
        events.append(kernel(RING, start, 50 - start, 1, stream=20))
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    (row,) = operators_answer(header_of(replace(report, ranks=report.ranks[:1])), None, "ops")["rows"]
    assert (row["self_ms"], row["wait_ms"]) == (pytest.approx(0.04), pytest.approx(0.03))


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_other_steps_alone_is_no_idle_time(tmp_path: Path, kind: Kind) -> None:
    events = [step(1, 0, 50), launch(1, 1, 1), kernel("a", 10, 20, 1), kernel("lost", 32, 8)]
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    answer = operators_answer(header_of(report), None, kind)
    (other,) = (row for row in answer["rows"] if row["class"] == "other_steps")
    assert (other["name"], other["named"], other["self_ms"]) == ("only work of other steps", False, 0.008)
    assert (answer["rest_ms"], answer["overlap_ms"]) == (pytest.approx(0.022), pytest.approx(0))


# What the tab says of balanced splits and of batches: as the terminal does


COSTS = tuple(
    DeviceCost(5.0, None, 1.0, None, True, ((8, 13.0), (16, 21.0)), device=f"cuda:{rank}")
    for rank in range(2)
)
FOUND = Balanced(COSTS, 37.0, 0.5, 37.5, 38.0, 37 / 38, SplitCost((32, 32), 37.5), None, ("ddp-2-even",))


def test_of_a_balanced_split_it_says_what_the_terminal_says(wording: Wording) -> None:
    even = replace(COMPARISON.variants[0], id="ddp-2-even")
    balanced = replace(even, id="ddp-2-balanced", split_name="balanced", balanced=FOUND)
    other = replace(balanced, id="ddp-2-other")
    wording(cost_sentences(balanced, (even, balanced, other)))
    assert cost_sentences(even, (even, balanced)) == []


# Which runs a tab lists of a directory that holds much else


def files(directory: Path, count: int) -> None:
    directory.mkdir(parents=True)
    for number in range(count):
        (directory / f"{number}.jpg").touch()


def test_neither_data_nor_a_virtual_environment_hides_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logdir, "MAX_ENTRIES", 40)
    files(tmp_path / "data", 100)
    files(tmp_path / "datasets/a", 100)
    files(tmp_path / "env/lib/python3.11/site-packages/a", 100)
    (tmp_path / "env/pyvenv.cfg").touch()
    run = tmp_path / "runs/gpt/2026-11-21_14-02-11"
    run.mkdir(parents=True)
    (run / "plan.json").write_text("{}")
    assert list(Listing(str(tmp_path)).all()) == ["runs/gpt/2026-11-21_14-02-11"]


def test_steps_are_thinned_out_but_the_slowest_stay() -> None:
    values = [float(i % 97) for i in range(5000)]
    values[1234] = 1e9
    chosen = choose(values, 300)
    assert len(chosen) <= 300
    assert 1234 in chosen
    assert chosen == sorted(set(chosen))
    assert choose(values, 5000) == list(range(5000))
