"""A session with ranks that follow a script and a clock that never waits: starts, budgets, resumed runs."""

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.load_findings import load_so_far
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.compare.notes import quiet_notes
from gpurun.launcher.errors import Interrupted, MachineError, NodesError, ParamsError, SpecError
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.inspect.stacks import file_hash
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Node, NodeGpu, Plan
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run import job, session
from gpurun.launcher.run.attempts import has_ended, let_run_again, resumption_text
from gpurun.launcher.run.budget import Outlook
from gpurun.launcher.run.job import Output, Prepared, attended, carry_out, check_store, finish
from gpurun.launcher.run.open import (
    Invocation,
    as_planned_for,
    load_invocation,
    open_run,
    plan_difference,
    run_to_resume,
)
from gpurun.launcher.run.running_attempt import RunningAttempt
from gpurun.launcher.rundir import store
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.claim import read as read_claim
from gpurun.launcher.rundir.files import RunDir, append_lines, keep_lines, read_json, write_json
from gpurun.launcher.rundir.paths import Url
from gpurun.launcher.rundir.records import (
    Event,
    Look,
    MemoryPeak,
    QuietWait,
    Stall,
    StepRecord,
    VariantFacts,
)
from gpurun.launcher.rundir.store import Store, keep_at
from tests.known import known
from tests.said import notes_of
from tests.unit.plan.machines import FakeMachine
from tests.unit.run.fake_ranks import FakeClock, OfRank, Removed, Script
from tests.unit.run.session_case import (
    CTRL_C,
    EVEN,
    KILLED,
    SPLIT,
    SPLITS,
    STRATEGIES,
    WELL,
    Case,
    exits,
    record,
    stage,
)
from tests.whole import first
from tests.wording import Wording


def test_a_launch_that_ends_well_leaves_its_variants_measured(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [WELL]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.statuses() == ["ok", "ok"]
    assert case.run.comparison.exists()
    assert not case.run.control("01-ddp-2").exists()


def test_a_run_names_its_launch_until_the_ranks_have_ended(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [])
    named: list[str | None] = []

    def look() -> None:
        named.append(known(read_claim(case.run)).launch)

    case.ranks.scripts = [[(0.5, look), *WELL]]
    with claimed(case.run):
        case.done()
        look()
    assert named == ["01-ddp-2", None]


@pytest.mark.parametrize("code", [-9, -6, 9])
def test_a_rank_that_dies_silently_costs_the_variant_that_it_ran(tmp_path: Path, code: int) -> None:
    """Without communication rank 0 is in the next variant's block by then."""
    script: Script = [
        (1.0, OfRank(1, stage("round", EVEN))),
        (1.0, stage("round", EVEN)),
        (2.0, stage("round", SPLIT)),
        *exits(0, code)[1:],
    ]
    case = Case(tmp_path, SPLITS, [script, WELL]).done()
    assert case.statuses() == ["failed", "ok"]
    assert f"during round of {EVEN}" in "\n".join(case.said)


def test_the_traceback_of_a_rank_that_takes_its_time_to_end_is_shown_once(tmp_path: Path) -> None:
    """By the explanation: a rank records its failure, prints it, and then closes what it has open."""
    case = Case(tmp_path, "script: train.py\n", [])
    failure = replace(record(0, "ValueError", "run"), traceback="Traceback: no luck\n")
    log = case.run.log("01-script-2", 0)

    def prints() -> None:
        log.parent.mkdir(parents=True)
        log.write_text(failure.traceback)

    case.ranks.scripts = [[(1.0, failure), (1.0, prints), *exits(1, 0)]]
    case.done()
    assert "\n".join(case.said).count("Traceback: no luck") == 1


def test_what_is_left_is_shown_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, "script: train.py\n", [exits(0, 0)])
    log = case.run.log("01-script-2", 0)
    log.parent.mkdir(parents=True)
    seen: list[bool] = []

    def has_settled(*_: Any) -> bool:
        with log.open("a") as file:
            file.write("uploading\n")
        seen.append("[rank 0] uploading" in case.said)
        return len(seen) == 3

    monkeypatch.setattr(case.ranks, "has_settled", has_settled)
    case.done()
    assert seen == [False, False, True]


USAGE = "usage: train.py [-h] [--batch BATCH]\n"
COMPARED = "script: train.py\ncompare: {options: [{batch: 8}, {batch: x}, {batch: 9}]}\nprofile: {steps: 0}\n"


@pytest.mark.parametrize(
    ("job", "said", "made_step", "refused"),
    [
        (
            COMPARED,
            f"Seed 1\n{USAGE}train.py: error: argument --batch: invalid int value: 'x'\n",
            False,
            True,
        ),
        (COMPARED, "Usage: train.py [OPTIONS]\n\nError: No such option: --batch\n", False, True),
        (COMPARED, USAGE, True, False),
        (COMPARED, "no luck\n", False, False),
        ("script: train.py\nargs: [--batch, x]\n", f"{USAGE}train.py: error: no\n", False, False),
    ],
    ids=["argparse", "click", "after-a-step", "another-end", "no-comparison"],
)
def test_arguments_that_a_program_refuses_end_the_comparison(
    tmp_path: Path, job: str, said: str, made_step: bool, refused: bool, wording: Wording
) -> None:
    case = Case(tmp_path, job, [])
    variant, launch = case.plan.variants[0].id, case.plan.launches[0].id
    log = case.run.log(launch, 0)

    def prints() -> None:
        if made_step:
            case.run.variant(variant).mkdir(parents=True)
            step = StepRecord(launch, 1, 0, 1, "timed", 10**8, {}, None)
            append_lines(case.run.steps(variant, 0), [step])
        log.parent.mkdir(parents=True)
        log.write_text(said)

    failure = replace(record(0, "SystemExit", "run"), kind="exit", message="exit code 2")
    well = exits(0, 0)
    case.ranks.scripts = [[(1.0, prints), (1.0, failure), *exits(2, 2)], well, well]
    if not refused:
        assert case.done().statuses()[0] == "failed"
        return
    error = case.fails()
    wording(str(error))
    assert error.exit_code == 2
    assert len(case.ranks.log) == 2
    assert case.said == []
    assert case.statuses() == [None] * 3


@pytest.mark.parametrize("found", [[True, False], [None, None]], ids=["counted", "not counted"])
def test_launches_wait_for_a_quiet_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording, found: list[bool | None]
) -> None:
    """Two strategies, each in launches of its own: the second waits in vain."""
    left = iter(found)

    def becomes_quiet(limit_s: float, now_s: object, pause: Callable[[float], None]) -> bool | None:
        pause(limit_s / 2)
        return next(left)

    monkeypatch.setattr(session, "becomes_quiet", becomes_quiet)
    case = Case(tmp_path, f"{STRATEGIES}wait_for_quiet: 30s\n", [WELL] * 9).done()
    found_waits = case.run.read_lines(case.run.waits, QuietWait)
    waits = [(wait.launch, wait.waited_s, wait.is_quiet) for wait in found_waits]
    launches = [launch.id for launch in case.plan.launches]
    assert waits == [(launches[0], 15, True), (launches[1], 15, False)][: 2 * (found[0] is not None)]
    for text in (*case.said, *quiet_notes(case.run)):
        wording(text)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, SPLITS, [])


@pytest.mark.parametrize("is_part", [False, True])
def test_other_load_is_reported_once_while_the_run_goes_on(
    tmp_path: Path, wording: Wording, is_part: bool
) -> None:
    """At the end it is too late to stop what else runs; a command of several runs advises on none of them."""
    case = Case(tmp_path, SPLITS, [], is_part=is_part)

    def blocks() -> None:
        records = [
            StepRecord("01-ddp-2", number, 0, number, "timed", 10**8, {}, None, 28_100_000, others_ns=10**8)
            for number in (1, 2, 3)
        ]
        append_lines(case.run.steps(EVEN, 1), records)

    def ended() -> None:
        wording(*case.said)

    round_ = replace(stage("round", EVEN), round=3)
    events: Script = [(1.0, round_), (2.0, blocks), (5.0, round_), (9.0, ended), (9.0, round_)]
    case.ranks.scripts = [[*events, (9.5, stage("done")), *exits(0, 0)]]
    case.done()
    assert sum("free core" in text for text in case.said) == (0 if is_part else 1)


def test_a_short_burst_of_other_load_is_not_reported(case: Case) -> None:
    launch = case.plan.launches[0]
    found: list[bool] = []
    for number in (1, 2, 3):
        step = StepRecord(launch.id, number, 0, number, "timed", 10**8, {}, None, 28_100_000, others_ns=10**8)
        append_lines(case.run.steps(EVEN, 1), [step])
        found.append(load_so_far(case.run, case.plan, launch, 8) is not None)
    assert found == [False, False, True]


@pytest.mark.parametrize("is_part", [False, True])
def test_what_interrupted_ranks_write_is_shown_unless_the_run_is_a_part(
    tmp_path: Path, is_part: bool
) -> None:
    case = Case(tmp_path, SPLITS, [], is_part=is_part)

    def writes() -> None:
        path = case.run.log(case.session.attempt.name, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("KeyboardInterrupt\n")

    case.ranks.scripts = [[(1.0, writes), (1.0, CTRL_C)]]
    with pytest.raises(Interrupted):
        case.session.execute()
    assert any("KeyboardInterrupt" in text for text in case.said) == (not is_part)


def test_a_run_whose_directory_is_removed_ends_with_a_sentence(tmp_path: Path, wording: Wording) -> None:
    removed: Script = [(1.0, Removed(tmp_path / "run")), (2.0, stage("round", SPLIT))]
    case = Case(tmp_path, SPLITS, [removed])
    wording(str(case.fails()))
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_events_that_someone_removes_and_damaged_lines_end_no_run(case: Case) -> None:
    attempt = RunningAttempt(case.session.starter, case.plan.launches[0], 1, case.ranks, case.session.relay)
    path = case.run.events(attempt.name)
    append_lines(path, [stage("build"), stage("round", EVEN)])
    assert len(attempt.new_events()) == 2
    path.unlink()
    assert attempt.new_events() == ()
    path.write_bytes(b'{"time_ns": 1, "sta')
    append_lines(path, [stage("round", EVEN), stage("round", SPLIT)])
    assert [event.variant for event in attempt.new_events()] == [EVEN, SPLIT]


def test_of_a_file_of_events_that_a_rank_has_thinned_out_only_the_new_ones_are_read(case: Case) -> None:
    attempt = RunningAttempt(case.session.starter, case.plan.launches[0], 1, case.ranks, case.session.relay)
    path = case.run.events(attempt.name)
    append_lines(path, [Event.now("round", EVEN, number) for number in range(1, 9)])
    assert len(attempt.new_events()) == 8
    keep_lines(path, Event, lambda event: event.round % 2 == 0)
    append_lines(path, [Event.now("round", SPLIT, number) for number in range(9, 19)])
    assert [event.round for event in attempt.new_events()] == [*range(9, 19)]


def test_what_only_later_ranks_need_is_imported_for_them(tmp_path: Path) -> None:
    """While the first ones build, which are not kept waiting; a single launch needs nothing more."""
    assert Case(tmp_path / "one", SPLITS, [WELL]).done().ranks.preloads == []
    assert Case(tmp_path / "two", STRATEGIES, [WELL, WELL[:-1]]).done().ranks.preloads == ["after 01-ddp-2"]
    assert Case(tmp_path / "again", SPLITS, [KILLED, WELL]).done().ranks.preloads == ["after 01-ddp-2"]


def test_an_error_before_the_first_launch_has_nothing_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise Interrupted

    case = Case(tmp_path, SPLITS, [])
    monkeypatch.setattr(session, "remaining", interrupted)
    with pytest.raises(Interrupted):
        case.session.execute()
    assert case.ranks.log == []


def test_a_failure_costs_only_the_variant_that_caused_it(tmp_path: Path, wording: Wording) -> None:
    case = Case(tmp_path, SPLITS, [KILLED, WELL]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2", "start 01-ddp-2~2", "stop 01-ddp-2~2"]
    assert case.statuses() == ["ok", "failed"]
    wording(case.status(SPLIT).reason)
    assert case.status(SPLIT).log == "launches/01-ddp-2/log/rank1.log"
    assert case.clock.passed_s == pytest.approx(3 + 0.6 + 3, abs=0.5)


LATE: Script = [(1.0, stage("round", SPLIT))]
WRONG: Script = [(2.0, record(1, "NameError", "round", SPLIT)), *exits(1, 1)]
NOT_BUILT: Script = [(1.0, stage("build")), (2.0, record(0, "RuntimeError", "build")), *exits(1, 1)]


@pytest.mark.parametrize(
    ("job", "scripts", "statuses", "slept_s"),
    [
        (f"{SPLITS}restarts: 1\n", [KILLED, KILLED, WELL], ["ok", "failed"], [1]),
        (f"{SPLITS}restarts: 9\ntimeout: 5\n", [LATE, WRONG, WELL], ["ok", "failed"], [1]),
        (STRATEGIES, [NOT_BUILT, WELL[:-1]], ["failed", "ok"], []),  # `dp` is one process
        ("script: train.py\n", [[*exits(0), (500.0, Exit(1, 0, 0))]], ["ok"], []),
        (
            f"{SPLITS}hang_timeout: 10\n",
            [[(at_s + 50.0, what) for at_s, what in WELL]],
            ["ok", "ok"],
            [],
        ),
    ],
    ids=[
        "after the last restart it is given up",
        "a timeout is tried again, a mistake in the program is not",
        "other failures are no reason to skip other launches",
        "the last rank of a program may take its time",
        "nothing hangs before the ranks exist",
    ],
)
def test_what_becomes_of_variants(
    tmp_path: Path, job: str, scripts: list[Script], statuses: list[str], slept_s: list[float]
) -> None:
    case = Case(tmp_path, job, scripts).done()
    assert (case.statuses(), case.clock.slept_s) == (statuses, slept_s)


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path: Path, wording: Wording) -> None:
    script: Script = [
        (2.0, stage("round", SPLIT)),
        (2.9, record(1, "ValueError", "round", SPLIT)),
        *exits(1, 1),
    ]
    lost = replace(record(0, "RuntimeError", "round", SPLIT), secondary=True)
    case = Case(tmp_path, SPLITS, [[*script[:1], (2.8, lost), *script[1:]], WELL]).done()
    wording(case.status(SPLIT).reason)


def test_a_rank_that_is_killed_while_devices_are_measured_ended_there(tmp_path: Path) -> None:
    """All ranks measure at once; in other stages the killed one may have been elsewhere."""
    for at, shown in (("balance", True), ("round", False)):
        case = Case(tmp_path / at, SPLITS, [[(1.0, stage(at, SPLIT)), *exits(0, -9)[1:]], WELL]).done()
        assert (f"during balance of {SPLIT}" in case.said[0]) is shown
        assert case.statuses() == ["ok", "failed"]


def test_a_variant_that_takes_too_long_is_stopped(tmp_path: Path, wording: Wording) -> None:
    case = Case(tmp_path, f"{SPLITS}timeout: 5\n", [[(1.0, stage("round", SPLIT))], WELL]).done()
    assert case.statuses() == ["ok", "timeout"]
    wording(case.status(SPLIT).reason)
    assert case.said == [
        f"{SPLIT}: took longer than 5 s\nstacks of all ranks: {case.run.hang('01-ddp-2')}\n"
        f"log: {case.run.log('01-ddp-2', 0)}"
    ]
    assert case.clock.passed_s == pytest.approx(1 + 5 + 3, abs=0.5)


def test_a_variants_time_is_that_of_all_its_rounds(tmp_path: Path) -> None:
    rounds = [(float(at), stage("round", (EVEN, SPLIT)[at % 2])) for at in range(20)]
    case = Case(tmp_path, f"{SPLITS}timeout: 5\n", [rounds, WELL, WELL]).done()
    assert "timeout" in case.statuses()
    assert case.clock.passed_s < 9.5 + 6.5


def test_a_start_has_a_minute_whatever_a_variant_may_take(tmp_path: Path, wording: Wording) -> None:
    case = Case(tmp_path, f"{SPLITS}timeout: 5\n", [[(1.0, stage("build"))]]).done()
    assert case.statuses() == ["timeout", "timeout"]
    wording(case.status(EVEN).reason)


@pytest.mark.parametrize(
    "script", [[(1.0, stage("round", SPLIT)), (2.0, (4, 4))], [(1.0, stage("balance", SPLIT)), (2.0, (0, 0))]]
)
def test_ranks_that_complete_no_step_are_stopped(tmp_path: Path, script: Script, wording: Wording) -> None:
    case = Case(tmp_path, f"{SPLITS}hang_timeout: 30\n", [script, WELL]).done()
    assert case.status(SPLIT).status == "hung"
    wording(case.status(SPLIT).reason)
    assert case.clock.passed_s == pytest.approx(2 + 30 + 3, abs=1.5)


def test_ranks_that_are_all_idle_are_reported_then_stopped(tmp_path: Path, wording: Wording) -> None:
    """Without any limit that the job states for a hang; the time that a variant may take is longer."""
    script: Script = [(1.0, stage("round", SPLIT)), (2.0, (4, 4))]
    case = Case(tmp_path, f"{SPLITS}timeout: 1h\n", [script, WELL])
    case.ranks.seen = (RankSnapshot(0, 7, 4, (), ()), RankSnapshot(1, 8, 4, (), ()))
    assert case.done().statuses() == ["ok", "hung"]
    assert case.clock.passed_s == pytest.approx(2 + 60 + 600 + 3, abs=65)
    wording(case.said, case.status(SPLIT).reason)
    (stall,) = case.run.read_lines(case.run.stalls, Stall)
    wording(stall.launch, stall.reason)
    assert f"1 stall: {stall.reason}." in notes_of(compare_run(case.run))


def test_a_hang_that_is_only_reported_is_reported_once_until_a_step_is_completed(
    tmp_path: Path, wording: Wording
) -> None:
    steps = [(2.0, (4, 4)), (50.0, (5, 5))]
    script: Script = [(1.0, stage("round", SPLIT)), *steps, (100.0, stage("done")), (100.0, Exit(0, 0, 0)),
              (100.0, Exit(1, 0, 0))]  # fmt: skip
    case = Case(tmp_path, f"{SPLITS}hang_timeout: 20\non_hang: continue\n", [script]).done()
    assert case.statuses() == ["ok", "ok"]
    wording([text.partition("\n")[0] for text in case.said])


def test_transient_failures_are_tried_again_after_pauses_that_double(
    tmp_path: Path, wording: Wording
) -> None:
    case = Case(tmp_path, f"{SPLITS}restarts: 3\n", [KILLED, KILLED, KILLED, WELL]).done()
    assert case.clock.slept_s == [1, 2, 4]
    assert case.statuses() == ["ok", "ok"]
    assert [restart.launch for restart in case.run.read_restarts()] == [
        "01-ddp-2", "01-ddp-2~2", "01-ddp-2~3",
    ]  # fmt: skip
    wording(case.said, hide=r"(?<=happened on )\S+")


def test_the_same_failure_in_building_the_model_is_not_tried_by_other_launches(
    tmp_path: Path, wording: Wording
) -> None:
    wrong: Script = [(1.0, stage("build")), (2.0, record(0, "NameError", "build")), *exits(1, 1)]
    case = Case(tmp_path, STRATEGIES, [wrong]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.statuses() == ["failed", "failed"]
    wording(case.said[-1])
    assert case.session.mistake is None


def test_a_mistake_in_the_job_that_only_building_shows_is_the_outcome(tmp_path: Path) -> None:
    wrong: Script = [(1.0, stage("build")), (2.0, record(0, ParamsError.__name__, "build")), *exits(1, 1)]
    case = Case(tmp_path, STRATEGIES, [wrong])
    error = finish(case.session).error
    assert isinstance(error, ParamsError)
    assert str(error) == "no luck"


def test_a_rank_that_leaves_early_is_waited_for_no_longer_than_seconds(
    tmp_path: Path, wording: Wording
) -> None:
    case = Case(tmp_path, SPLITS, [[(1.0, stage("round", SPLIT)), *exits(0)], WELL]).done()
    wording(case.status(SPLIT).reason)
    assert case.clock.passed_s == pytest.approx(3 + 8 + 3, abs=0.5)


def test_a_program_that_saves_and_leaves_when_it_is_late_is_not_done(tmp_path: Path) -> None:
    case = Case(tmp_path, "script: train.py\ntimeout: 20\n", [[]])
    case.ranks.stop = lambda *_: case.ranks._exits.extend(e for _, e in exits(0, 0))  # type: ignore[method-assign]
    assert case.done().statuses() == ["timeout"]
    assert [event.stage for event in case.run.read_events("01-script-2")] == ["start"]


@pytest.mark.parametrize("steps", [(0, 0), (0, 3)])
def test_a_program_without_a_step_is_reported_once(
    tmp_path: Path, steps: tuple[int, ...], wording: Wording
) -> None:
    """And runs on: it may need none, or load its data."""
    script: Script = [(5.0, steps), *((at_s + 300.0, what) for at_s, what in exits(0, 0))]
    case = Case(tmp_path, "script: train.py\n", [script]).done()
    assert case.statuses() == ["ok"]
    wording(case.said)


def test_a_full_disk_ends_the_run(tmp_path: Path, wording: Wording) -> None:
    case = Case(tmp_path, STRATEGIES, [[(1.0, stage("round", EVEN)), *exits(0, 74)[1:]]])
    error = case.fails()
    assert isinstance(error, MachineError)
    wording(str(error))
    assert f"log: {case.run.log('01-ddp-2', 1)}" in str(error)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_program_may_end_with_the_code_of_a_full_disk(tmp_path: Path, is_recorded: bool) -> None:
    """`os._exit`, and a command of `--no-python`, leave no record."""
    failure = replace(record(0, "SystemExit", "run"), kind="exit", message="exit code 74")
    ends: Script = [*([(1.0, failure)] if is_recorded else []), *exits(74)]
    case = Case(tmp_path, "script: train.py\nrestarts: 1\n", [ends, exits(0, 0)]).done()
    assert (case.statuses(), case.clock.slept_s) == (["ok"], [1])


def test_a_program_that_finds_no_room_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Path) -> None:
        raise MachineError(f"can't write {directory}")

    monkeypatch.setattr(session, "check_writable", full)
    case = Case(tmp_path, "script: train.py\nrestarts: 1\n", [exits(74)])
    assert str(case.fails()).startswith("the workers can't write to")


# A run with a budget: when it ends, what it measures next, and what it leaves open


FOUR = "profile: {steps: 0}\ncompare: {strategy: [ddp, dp], split: [even, [6, 2]]}\n"
MS = 1_000_000


def ranks_that_take(run: RunDir, step_ms: Mapping[str, float]) -> Callable[[LaunchConfig], Script]:
    """Ranks that measure each variant with about this step, in blocks of 0.2 s, after 1 s of building.

    Launches scatter by 1 %, rounds by 1 %.
    """
    noise = random.Random(1)
    shifts: dict[tuple[str, str], float] = {}

    def measure(config: LaunchConfig, variant: str, round_: int, world: int) -> Callable[[], None]:
        def write() -> None:
            drift = shifts[config.launch, variant] + noise.gauss(0, 0.01)
            kinds: list[Any] = ["timed", *(["aa"] if variant == config.baseline else [])]
            for kind, rank in product(kinds, range(world)):
                ns = round(step_ms[variant] * MS * (1 + drift + noise.gauss(0, 0.01)))
                record = StepRecord(config.launch, round_, 0, round_, kind, ns, {}, None)
                append_lines(run.steps(variant, rank), [record])

        return write

    def script(config: LaunchConfig) -> Script:
        world = config.world_size
        variants = [(part, variant) for part in config.parts for variant in part.variants]
        shifts.update({(config.launch, variant.id): noise.gauss(0, 0.01) for _, variant in variants})
        lines: list[Any] = [(0.0, stage("build"))]
        at_s = 1.0
        for round_ in range(1, config.rounds + 1):
            for part, variant in variants:
                if round_ <= (variant.rounds or config.rounds):
                    lines += [
                        (at_s, stage("round", variant.id)),
                        (at_s, measure(part, variant.id, round_, part.world_size)),
                    ]
                    at_s += 0.2
        ends = [(at_s, Exit(rank, 0, 0)) for rank in range(world)]
        return [*lines, (at_s, stage("done")), *ends]

    return script


def with_budget(
    directory: Path, step_ms: Mapping[str, float], budget_s: int = 100, together: str = "never"
) -> Case:
    job = f"budget: {budget_s}s\n{FOUR}steps: {{together: {together}}}\n"
    return Case(directory, job, ranks_that_take(RunDir(directory / "run"), step_ms))


CLEAR = {"ddp-2-even": 100.0, "ddp-2-6-2": 110.0, "dp-2-even": 200.0, "dp-2-6-2": 300.0}
CLOSE = {**CLEAR, "ddp-2-6-2": 100.2}


def configs(case: Case) -> list[LaunchConfig]:
    paths = sorted(case.run.path.glob("launches/*/launch.json"))
    return [read_json(path, LaunchConfig) for path in paths]


def test_a_run_ends_when_all_is_decided(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLEAR).done()
    assert [look.launches for look in case.run.read_looks()] == [6]
    assert len(configs(case)) == 2 * 6
    comparison = read_json(case.run.comparison, Comparison)
    assert comparison.fastest == EVEN
    assert comparison.complete
    assert case.clock.passed_s < 60


@pytest.mark.slow
def test_strategies_that_take_turns_are_dropped_from_their_launches_too(tmp_path: Path) -> None:
    """The last ones have the ranks that they need, the first ones don't count."""
    case = with_budget(tmp_path, CLOSE, budget_s=70, together="auto")
    host = {"memory_available_gib": 8.0, "gpus": []}
    write_json(case.run.host, host)
    for variant in case.plan.variants:
        write_json(case.run.memory(variant.id, 0), MemoryPeak(parameters=1 << 20))
    case.done()
    found = configs(case)
    assert [[part.strategy for part in config.parts] for config in found[:3]] == [
        ["ddp"],
        ["dp"],
        ["ddp", "dp"],
    ]
    assert found[2].takes_turns
    assert [part.strategy for part in found[-1].parts] == ["ddp"]
    assert 55 < case.clock.passed_s <= 70
    comparison = read_json(case.run.comparison, Comparison)
    verdicts = {each.id: each.vs_baseline.verdict for each in comparison.variants if each.vs_baseline}
    assert verdicts["dp-2-even"] == verdicts["dp-2-6-2"] == "slower"
    assert {each.launches for each in comparison.variants if each.strategy == "ddp"} == {len(found) - 2}


@pytest.mark.slow
def test_clear_losers_get_fewer_rounds_and_leave_when_that_is_established(tmp_path: Path) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=70).done()
    first, *_, last = configs(case)
    assert [variant.rounds for variant in first.variants] == [None, None]
    dp = [config for config in configs(case) if config.strategy == "dp"]
    assert [(dp[0].rounds, len(dp[0].variants)), (dp[-1].rounds, len(dp))] == [(3, 2), (1, 6)]
    assert last.strategy == "ddp"
    assert len(configs(case)) > 2 * 6


@pytest.mark.parametrize(
    ("rounds", "leader", "is_kept"),
    [
        ({EVEN: 1, SPLIT: 2, "dp-2-even": 3}, "dp-2-even", True),
        ({EVEN: 1, "dp-2-even": 3}, "dp-2-even", False),
        ({EVEN: 1, "dp-2-even": 3}, EVEN, True),
        ({EVEN: 1, "dp-2-even": 3}, None, True),
    ],
    ids=["runs with another", "is slower", "leads", "no leader"],
)
def test_a_slower_baseline_leaves_only_launches_that_would_be_its_own(
    rounds: dict[str, int], leader: str | None, is_kept: bool
) -> None:
    no_costs: Any = None
    outlook = Outlook(6, 50.0, 100.0, no_costs, rounds, EVEN, ((EVEN, SPLIT), ("dp-2-even",)))
    comparison: Any = SimpleNamespace(leader=leader, open=())
    assert (EVEN in outlook.without_lone_baseline(rounds, comparison)) is is_kept


def test_a_spent_budget_leaves_open_what_it_can_not_decide(tmp_path: Path, wording: Wording) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=45).done()
    assert case.run.read_looks()[-1].fraction == 1.0
    assert 35 < case.clock.passed_s <= 45
    comparison = read_json(case.run.comparison, Comparison)
    assert comparison.complete
    assert comparison.fastest is None
    (open_,) = comparison.open
    assert {open_.variant, comparison.leader} == {EVEN, SPLIT}
    (spent,) = (note for note in notes_of(comparison) if "of the budget" in note)
    wording(spent, notes_of(comparison)[-1])
    assert len(configs(case)) == 22


@pytest.mark.parametrize(
    ("late_s", "launches"),
    first(
        2,
        [
            ({"01-ddp-2": 20.0}, 2),  # another one may take as long
            ({"07-ddp-2": 30.0}, 7),  # the other launch of its repetition isn't begun
            ({"01-ddp-2": 10.0}, 18),  # what the first launch takes is a part of the budget
            ({"04-ddp-2": 5.0}, 21),
        ],
    ),
)
def test_no_launch_begins_that_does_not_fit_in_the_budget(
    tmp_path: Path, late_s: dict[str, float], launches: int
) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=45)
    play = case.ranks.scripts
    assert callable(play)

    def late(config: LaunchConfig) -> Script:
        (at_s, first), *rest = play(config)
        return [(at_s, first), *((at_s + late_s.get(config.launch, 0.0), what) for at_s, what in rest)]

    case.ranks.scripts = late
    comparison = read_json(case.done().run.comparison, Comparison)
    assert (len(configs(case)), case.clock.passed_s <= 45) == (launches, True)
    assert comparison.complete
    (spent,) = (note for note in notes_of(comparison) if "of the budget" in note)
    assert spent.startswith(f"{launches} launches took ")


def test_a_budget_for_less_than_two_launches_measures_every_variant_once(
    tmp_path: Path, wording: Wording
) -> None:
    case = with_budget(tmp_path, CLOSE, budget_s=2).done()
    wording("\n".join(notes_of(read_json(case.run.comparison, Comparison))))
    assert len(configs(case)) == 2
    assert case.run.read_looks() == (Look(1, 1.0),)
    assert case.statuses() == ["ok"] * 4


def test_an_interrupted_run_with_a_budget_goes_on_where_it_was(tmp_path: Path) -> None:
    first = with_budget(tmp_path, CLEAR)
    play = first.ranks.scripts
    assert callable(play)

    def until_third(config: LaunchConfig) -> Script:
        return [(1.0, CTRL_C)] if config.launch == "03-dp-2" else play(config)

    first.ranks.scripts = until_third
    assert first.fails() is CTRL_C
    assert read_json(first.run.comparison, Comparison).complete is False
    second = with_budget(tmp_path, CLEAR).done()
    assert second.ranks.log[0] == "start 03-dp-2~2"
    assert [look.launches for look in second.run.read_looks()] == [6]
    assert read_json(second.run.comparison, Comparison).fastest == EVEN
    assert with_budget(tmp_path, CLEAR).done().ranks.log == []


def test_a_run_whose_budget_is_spent_begins_no_launch(tmp_path: Path) -> None:
    """The last look has spent the error, so what is measured after it would only widen the intervals."""
    case = with_budget(tmp_path, CLEAR)
    append_lines(case.run.looks, [Look(1, 1.0)])
    case.done()
    assert case.ranks.log[::2] == ["start 01-ddp-2", "start 02-dp-2"]
    assert len(configs(case)) == 2
    assert has_ended(case.run, case.plan)


# Runs that are interrupted, and those that go on with one


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


def test_a_run_goes_on_whatever_other_processes_use_now(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [])
    busy = NodeGpu("GPU-a", "H200", busy_with="python (7) uses 2.0 GiB")
    node = Node("a", "10.0.0.1", "eth0", 4, (busy,))
    write_json(case.run.plan, replace(case.plan, notes=("cuda:0 is also used",), nodes=(node,)))
    now = replace(case.plan, nodes=(replace(node, gpus=(replace(busy, busy_with=None),)),))
    assert run_to_resume(case.run.path, now).path == case.run.path


def test_the_job_of_a_pipe_is_kept_as_it_is_written(tmp_path: Path) -> None:
    """As of `gpurun <(cat job.yaml)`: it can be read once."""
    text = "\ufeffworkload: gpt  # ours\r\nglobal_batch: 8\r\ndevices: cpu:1\r\n".encode()
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    try:
        given, machine = Invocation(Path(f"/dev/fd/{reader}"), ()), inspect_machine()
        spec = load_invocation(given)
        run = open_run(given, spec, build_plan(spec, machine), machine, tmp_path / "run")
    finally:
        os.close(reader)
    assert run.job.read_bytes() == text
    assert run.plan.exists()


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
    first.ranks.scripts = lambda launch: with_step(launch, first.run) if next(ended) else [(1.0, CTRL_C)]
    second.ranks.scripts = lambda launch: with_step(launch, second.run)
    for case, software in zip(cases, TORCH, strict=True):
        case.session.starter = replace(case.session.starter, software=software)
    with pytest.raises(Interrupted):
        first.session.execute()
    found = [let_run_again(first.run, first.plan, software) for software in (*TORCH, TORCH[1])]
    assert [resumed.replaced for resumed in found] == [(), ("03-dp-2", "04-ddp-2"), ()]
    wording(*map(resumption_text, found))
    comparison = second.session.execute()
    assert [step.launch for step in second.run.read_steps("dp-2-even")[0]] == ["02-dp-2", "03-dp-2~2"]
    said = "The software has changed during this run: 2 launches with torch 2.7.0 and 2 launches with torch"
    assert any(note.startswith(said) for note in notes_of(comparison))


def test_an_incomplete_pair_of_launches_is_measured_again_with_other_code(tmp_path: Path) -> None:
    case = Case(tmp_path, f"{STRATEGIES}steps: {{rounds: 3, launches: 2, together: never}}\n", [])
    ended = iter((True, True, True, False))
    case.ranks.scripts = lambda launch: with_step(launch, case.run) if next(ended) else [(1.0, CTRL_C)]
    with pytest.raises(Interrupted):
        case.session.execute()
    model = tmp_path / "model.py"
    model.write_text("lr = 0.1")
    for launch in ("01-ddp-2", "03-dp-2"):
        ran = VariantFacts(code={"model.py": known(file_hash(model))})
        write_json(case.run.launch_facts(launch), {"dp-2-even": ran})
    assert let_run_again(case.run, case.plan, {}, tmp_path).replaced == ()
    model.write_text("lr = 0.2")
    found = let_run_again(case.run, case.plan, {}, tmp_path)
    assert (found.replaced, found.changed) == (("03-dp-2",), ("model.py",))  # the first pair is complete


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


@pytest.mark.parametrize(
    ("job", "cause", "signals"),
    [
        ("script: train.py\n", CTRL_C.cause, (signal.SIGINT, signal.SIGTERM)),
        ("script: train.py\n", "SIGUSR1", (signal.SIGUSR1, signal.SIGTERM)),
        ("script: train.py\n", "SIGTERM", (signal.SIGTERM,)),
        (STRATEGIES, CTRL_C.cause, (signal.SIGTERM,)),
    ],
)
def test_a_program_gets_the_signal_of_the_command_before_sigterm(
    tmp_path: Path, job: str, cause: str, signals: tuple[int, ...]
) -> None:
    case = Case(tmp_path, job, [[(3.0, Interrupted(cause))]])
    finish(case.session)
    assert case.ranks.signals == signals


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


LOST = NodesError("node 1 is gone")


@pytest.mark.parametrize(
    ("scripts", "at", "error", "stops"),
    [
        ([], "breaks_start", CTRL_C, 1),
        ([WELL], "breaks_stop", CTRL_C, 2),
        ([[(1.0, MachineError("odd"))]], "breaks_stop", LOST, 1),
    ],
    ids=["Ctrl-C, starting", "Ctrl-C, stopping", "a lost node, stopping"],
)
def test_what_comes_while_ranks_are_started_or_stopped_is_the_error_and_stops_them(
    tmp_path: Path, scripts: list[Script], at: str, error: BaseException, stops: int
) -> None:
    case = Case(tmp_path, SPLITS, scripts, broken={at: error})
    assert case.fails() is error
    assert case.ranks.log == ["start 01-ddp-2", *["stop 01-ddp-2"] * stops]
    assert not case.run.control("01-ddp-2").exists()


def test_ctrl_c_in_the_pause_before_a_restart_has_nothing_to_stop(tmp_path: Path) -> None:
    clock = FakeClock(breaks_sleep=CTRL_C)
    case = Case(tmp_path, f"{SPLITS}restarts: 3\n", [KILLED], clock=clock)
    assert case.fails() is CTRL_C
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.said[-1].startswith("restart 1 of 3")


@pytest.mark.parametrize("waits_for", ["servers", "quiet"])
def test_ctrl_c_before_the_next_launch_has_ranks_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """The launch before it, which ended well, is not blamed."""
    case = Case(tmp_path, f"{COMPARED}wait_for_quiet: 30s\n", [exits(0, 0)])
    first = case.plan.launches[0].id
    ways = {"servers": (case.ranks, "get", case.ranks), "quiet": (session, "becomes_quiet", True)}
    where, name, found = ways[waits_for]

    def interrupted(*_: object) -> object:
        if case.ranks.log:
            raise CTRL_C
        return found

    monkeypatch.setattr(session, "becomes_quiet", lambda *_: True)
    monkeypatch.setattr(where, name, interrupted)
    assert case.fails() is CTRL_C
    assert case.ranks.log == [f"start {first}", f"stop {first}"]
    assert case.run.read_killed() == []
    assert not any("Ctrl-C" in text for text in case.said)


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
    with wording.raises(SpecError):
        run_to_resume(case.run.path, longer.plan)
    other = Case(tmp_path / "y", f"budget: 90s\n{SPLITS.replace('[6, 2]', '[5, 3]')}", [])
    with pytest.raises(SpecError, match="another job"):
        run_to_resume(case.run.path, other.plan)


def test_a_run_of_another_job_is_refused_with_what_differs(wording: Wording) -> None:
    def plan_of(text: str) -> Plan:
        machine: Any = FakeMachine(cpu_cores=8)
        text = f"workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n{text}"
        return build_plan(load_text(text, "job.yaml", (), Path()), machine)

    before = plan_of("seed: 1\n")
    wording(plan_difference(before, plan_of("seed: 2\n")))
    other = "the job no longer has ddp-2-even"
    assert plan_difference(before, plan_of("seed: 1\nsplit: [6, 2]\n")) == other
    wording(plan_difference(before, replace(before, notes=("new",))))
