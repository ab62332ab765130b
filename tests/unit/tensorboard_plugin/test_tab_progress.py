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

import pytest

from gpurun.launcher.errors import MachineError
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.rundir.claim import claimed, read
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Event, StepRecord
from gpurun.launcher.tensorboard_plugin import logdir
from gpurun.launcher.tensorboard_plugin.answers import live
from gpurun.launcher.tensorboard_plugin.answers.live import LiveDevices, progress_answer
from gpurun.launcher.tensorboard_plugin.answers.runs import own, run_answer, steps_answer
from gpurun.launcher.tensorboard_plugin.html import without_host
from gpurun.launcher.tensorboard_plugin.logdir import Kept, Listed, stamp_of, status
from tests.known import known
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


def answer(run: RunDir) -> dict[str, object]:
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
    for number, launch in enumerate(launches):
        run.events(launch.id).unlink()
        steps = [Event(time.time_ns(), "run", IDS[0], 280)]
        more = [Event(time.time_ns(), "done", IDS[0])] if number < ended else []
        append_lines(run.events(launch.id), [*steps, *more])
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
    assert steps_answer(run, [IDS[1]])["variants"][IDS[1]]["total"] == 300
    num_bytes = run.steps(IDS[1], 0).stat().st_size
    monkeypatch.setattr(logdir, "MAX_VARIANT_BYTES", num_bytes)
    found = steps_answer(run, [IDS[1]])["variants"][IDS[1]]
    assert (found["ranks"], found["total"]) == ([0, 1], pytest.approx(150, abs=5))


def test_the_tab_gets_each_gpus_device(run: RunDir) -> None:
    """Older records know one kind only."""
    write_json(run.host, {"gpus": [{"index": 1, "kind": "xpu"}, {"index": 0}, 7]})
    assert [gpu["device"] for gpu in run_answer(run)["host"]["gpus"]] == ["xpu:1", "cuda:0"]


def test_it_changes_with_what_is_written(run: RunDir) -> None:
    elsewhere = {"hostname": "another machine"}
    write_json(run.host, elsewhere)
    before = answer(run)
    assert before["live"] == []
    assert answer(run)["version"] == before["version"]
    append_lines(run.steps(IDS[0], 0), [StepRecord("02-ddp-2", 6, 0, 0, "timed", 7, {}, None)])
    assert answer(run)["version"] != before["version"]


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
    assert without_host({"ranks": ranks}, host) == {
        "ranks": [{"host": None, "notes": ["… is late"]}, {"host": []}]
    }
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(MachineError, match="nested more deeply"):
        without_host({"deep": deep}, host)
