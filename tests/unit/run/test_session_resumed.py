"""Runs that are interrupted, and those that go on with one."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.errors import Interrupted, MachineError, NodesError, SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.run import job
from gpurun.launcher.run.attempts import let_run_again, resumption_text
from gpurun.launcher.run.job import Output, Prepared, attended, carry_out, check_store, finish
from gpurun.launcher.run.open import Invocation, as_planned_for, open_run, plan_difference, run_to_resume
from gpurun.launcher.rundir import store
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.paths import Url
from gpurun.launcher.rundir.records import Event, StepRecord
from gpurun.launcher.rundir.store import Store, keep_at
from tests.said import notes_of
from tests.unit.run.fake_ranks import FakeClock, OfRank, Script
from tests.unit.run.session_case import (
    CTRL_C,
    EVEN,
    KILLED,
    SPLIT,
    SPLITS,
    STRATEGIES,
    WELL,
    Case,
    FakeMachine,
    exits,
    record,
    stage,
)
from tests.wording import Wording


@pytest.mark.parametrize(
    "job",
    [
        SPLITS,
        "script: train.py\ncompare: {args: [[--width, 64], [--width, 128]]}\n",
        "script: train.py\ncompare: {env: [{A: 1}, {A: 2}]}\n",
        "compare: {split: [even, [6, 2]], params: [{layers: 1}, {layers: 2}]}\n",
    ],
)
def test_a_run_is_resumed_by_the_job_that_it_was_made_from(tmp_path: Path, job: str) -> None:
    case = Case(tmp_path, job, [])
    assert run_to_resume(case.run.path, case.plan).path == case.run.path


def test_a_run_that_goes_on_keeps_its_threads(tmp_path: Path) -> None:
    """The cores that were free when it began are those of `host.json`, whatever is free now."""
    spec = load_text("workload: gpt\nglobal_batch: 8\ndevices: cpu:1\n", "", (), tmp_path)
    machine = replace(inspect_machine(), cpu_cores=4, free_cores=2)
    given = Invocation(Path("gpurun run"), (), tmp_path, "")
    run = open_run(given, spec, build_plan(spec, machine), machine, tmp_path / "run")
    again = as_planned_for(spec, replace(machine, free_cores=None), run.path)
    assert again == machine
    assert run_to_resume(run.path, build_plan(spec, again)).path == run.path
    run.host.unlink()
    assert as_planned_for(spec, machine, run.path).free_cores is None, "of a run before this was kept"


TORCH = ({"torch": "2.7.0", "Python": "3.11.9"}, {"torch": "2.8.0", "Python": "3.11.9"})


def with_step(launch: LaunchConfig, run: RunDir) -> Script:
    """The launch ends well, with a step of each of its variants."""

    def steps() -> None:
        for variant in launch.variants:
            record = StepRecord(launch.launch, 1, 0, 1, "timed", 10**8, {}, None, 0)
            append_lines(run.steps(variant.id, 0), [record])

    return [(1.0, steps), (3.0, stage("done")), *exits(*[0] * launch.world_size)]


def test_an_incomplete_pair_of_launches_is_measured_again_with_other_software(
    tmp_path: Path, wording: Wording
) -> None:
    """The second pair, `03-dp-2` and `04-ddp-2`, which was interrupted in its second half."""
    cases = [
        Case(tmp_path, f"{STRATEGIES}steps: {{rounds: 3, launches: 2, together: never}}\n", []) for _ in TORCH
    ]
    ended = iter((True, True, True, False))
    first, second = cases
    first.ranks.scripts = lambda one: with_step(one, first.run) if next(ended) else [(1.0, CTRL_C)]
    second.ranks.scripts = lambda one: with_step(one, second.run)
    for case, software in zip(cases, TORCH, strict=True):
        case.session.starter = replace(case.session.starter, software=software)
    with pytest.raises(Interrupted):
        first.session.execute()
    found = [let_run_again(first.run, first.plan, one) for one in (*TORCH, TORCH[1])]
    assert [one.replaced for one in found] == [(), ("03-dp-2", "04-ddp-2"), ()]
    wording(*map(resumption_text, found))
    comparison = second.session.execute()
    assert [step.launch for step in second.run.read_steps("dp-2-even")[0]] == ["02-dp-2", "03-dp-2~2"]
    said = "The software has changed during this run: 2 launches with torch 2.7.0 and 2 launches with torch"
    assert any(note.startswith(said) for note in notes_of(comparison))


def test_of_what_ran_out_of_memory_only_what_the_kernel_killed_is_tried_again(
    tmp_path: Path, wording: Wording
) -> None:
    killed = replace(exits(0, -9)[1][1], oom_killed=True)
    script: Script = [(1.0, stage("round", SPLIT)), (1.0, OfRank(1, stage("round", SPLIT))), (2.0, killed)]
    too_large = replace(record(0, "OutOfMemoryError", "round", EVEN), kind="oom")
    case = Case(tmp_path, SPLITS, [script, [(1.0, too_large), *exits(1, 1)]]).done()
    assert case.statuses() == ["oom", "oom"]
    found = let_run_again(case.run, case.plan, {})
    assert case.statuses() == ["oom", None]
    wording(resumption_text(found))


@pytest.mark.parametrize("at", ["build", "round", "done"])
def test_ctrl_c_stops_the_ranks_and_keeps_what_was_measured(
    tmp_path: Path, at: str, wording: Wording
) -> None:
    before = [line for line in WELL if isinstance(line[1], Event) and line[1].stage != at]
    case = Case(tmp_path, STRATEGIES, [[*before, (3.0, CTRL_C)]])
    finished = finish(case.session)
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    wording(str(finished.error))
    wording(case.said[0])
    assert case.run.comparison.exists()
    assert not case.run.control("01-ddp-2").exists()


@pytest.mark.parametrize("last", [None, CTRL_C])
def test_a_run_whose_results_never_reach_the_store_ends_with_an_error(
    tmp_path: Path,
    last: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    def away(*_: object) -> None:
        raise OSError("connection refused")

    monkeypatch.setattr(Store, "put", away)
    monkeypatch.setattr(store, "FIRST_PAUSE_S", 100.0)  # too long for another try
    case = Case(tmp_path, STRATEGIES, [[*WELL[:-1], (3.0, last)] if last else WELL] * 2)
    keep_at(case.run.path, Url("memory://bucket/run"))
    finished = attended(case.run, lambda _: finish(case.session))
    assert isinstance(finished.error, Interrupted if last else MachineError)
    assert finished.comparison.variants
    said = re.findall(r".*memory:.*(?:\n    .*)*", capsys.readouterr().err)
    wording(*said, str(finished.error), hide=r"\b\d+(?= (of|files))")


@pytest.mark.parametrize(
    ("cause", "limit_s", "answers"),
    [
        ("Ctrl-C", 0.0, False),
        ("SIGTERM", store.INTERRUPTED_S, False),
        ("SIGTERM", store.INTERRUPTED_S, True),
    ],
)
def test_a_signal_during_the_last_copy_loses_no_results(
    tmp_path: Path,
    cause: str,
    limit_s: float,
    answers: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    may_answer, waited_s, join = threading.Event(), list[float](), threading.Thread.join

    def join_interrupted(thread: threading.Thread, timeout: float) -> None:
        waited_s.append(timeout)
        if len(waited_s) == 1:
            raise Interrupted(cause)
        if answers:
            may_answer.set()
            join(thread)

    monkeypatch.setattr(Store, "put", lambda *_: may_answer.wait())
    case = Case(tmp_path, STRATEGIES, [WELL] * 2)
    keep_at(case.run.path, Url("memory://bucket/run"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", join_interrupted)
        finished = attended(case.run, lambda _: finish(case.session))
    may_answer.set()
    assert waited_s == [store.FINAL_S, limit_s]
    assert finished.comparison.variants
    said = re.findall(r".*memory:.*(?:\n    .*)*", capsys.readouterr().err)
    wording(*said, str(finished.error), hide=r"\b\d+(?= (of|files))")


def test_only_the_node_that_copies_a_run_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, url = Case(tmp_path, STRATEGIES, [WELL] * 2), f"memory://bucket/{tmp_path.name}"
    on_other_nodes: list[str] = []
    starter, machine = case.session.starter, replace(inspect_machine(), gpus=())
    keep_at(case.run.path, Url(url))
    monkeypatch.setattr(job, "Session", lambda **_: case.session)
    ready = Prepared(case.plan, starter.spec, case.run, tmp_path, machine)
    carry_out(ready, case.ranks, Output(quiet=True), on_other_nodes.append)
    assert f"the run is also at {url}" in capsys.readouterr().err
    assert on_other_nodes == []


def test_a_run_is_kept_where_it_was_before_and_over_no_other(tmp_path: Path, wording: Wording) -> None:
    before, other = (Url(f"memory://bucket/{tmp_path.name}/{name}") for name in ("before", "other"))
    case, latest = Case(tmp_path, STRATEGIES, []), tmp_path / "latest"
    latest.write_text("run\n")
    for url in (before, other):
        Store(url).put(case.run.plan, "plan.json")
    keep_at(case.run.path, before)
    for wanted in (None, before, Url(f"{other}-new")):
        check_store(wanted, latest)
    with wording.raises(SpecError, hide=r"(?<=bucket/)\w+"):
        check_store(other, latest)


def test_ctrl_c_while_ranks_are_started_stops_them(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [], broken={"breaks_start": CTRL_C})
    assert case.fails() is CTRL_C
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_ctrl_c_in_the_pause_before_a_restart_has_nothing_to_stop(tmp_path: Path) -> None:
    clock = FakeClock(breaks_sleep=CTRL_C)
    case = Case(tmp_path, f"{SPLITS}restarts: 3\n", [KILLED], clock=clock)
    assert case.fails() is CTRL_C
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.said[-1].startswith("restart 1 of 3")


def test_ctrl_c_while_ranks_are_stopped_is_not_lost(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [WELL], broken={"breaks_stop": CTRL_C})
    assert case.fails() is CTRL_C
    assert not case.run.control("01-ddp-2").exists()


def test_the_loss_of_a_node_that_shows_while_ranks_are_stopped_is_the_error(tmp_path: Path) -> None:
    lost = NodesError("node 1 is gone")
    case = Case(tmp_path, SPLITS, [[(1.0, MachineError("odd"))]], broken={"breaks_stop": lost})
    assert case.fails() is lost


def test_a_bug_of_ours_stops_the_ranks_too(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [[(1.0, ZeroDivisionError())]])
    with pytest.raises(ZeroDivisionError):
        case.session.execute()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_a_resumed_run_does_only_what_is_missing(tmp_path: Path, wording: Wording) -> None:
    first = Case(tmp_path, STRATEGIES, [WELL, [(1.0, CTRL_C)]])
    assert first.fails() is CTRL_C
    wording(resumption_text(let_run_again(first.run, first.plan, {})))
    second = Case(tmp_path, STRATEGIES, [[*WELL[:-1]]]).done()
    assert second.ranks.log == ["start 02-dp-2~2", "stop 02-dp-2~2"]
    assert second.statuses() == ["ok", "ok"]
    third = Case(tmp_path, STRATEGIES, [])
    wording(resumption_text(let_run_again(third.run, third.plan, {})))
    assert third.done().ranks.log == []


def test_a_resumption_says_why_a_variant_is_measured_again(tmp_path: Path, wording: Wording) -> None:
    """And that its baseline is, in the rounds that are paired; JSON has the same."""
    job = f"{SPLITS}steps: {{rounds: 6, launches: 2}}\n"
    case = Case(tmp_path, job, [KILLED, WELL, [(1.0, CTRL_C)]])
    assert case.fails() is CTRL_C
    again = Case(tmp_path, job, [WELL, WELL])
    again.session.resumed = found = let_run_again(case.run, case.plan, {})
    wording(resumption_text(found))
    assert again.session.execute().resumed == found
    assert Case(tmp_path, job, []).session.execute().resumed is None


def test_a_run_keeps_its_budget(tmp_path: Path, wording: Wording) -> None:
    """A look has spent error by its share of the budget, which may not depend on the results."""
    case, longer = (Case(tmp_path / "x", f"budget: {s}s\n{SPLITS}", []) for s in (60, 90))
    write_json(case.run.plan, case.plan)
    with pytest.raises(SpecError) as refused:
        run_to_resume(case.run.path, longer.plan)
    wording(refused.value)


def test_a_run_of_another_job_is_refused_with_what_differs(wording: Wording) -> None:
    def plan_of(text: str) -> Plan:
        machine: Any = FakeMachine()
        text = f"workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n{text}"
        return build_plan(load_text(text, "job.yaml", (), Path()), machine)

    before = plan_of("seed: 1\n")
    wording(plan_difference(before, plan_of("seed: 2\n")))
    other = "the job no longer has ddp-2-even"
    assert plan_difference(before, plan_of("seed: 1\nsplit: [6, 2]\n")) == other
    wording(plan_difference(before, replace(before, notes=("new",))))
