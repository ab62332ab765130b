"""A session with ranks that follow a script and a clock that never waits: what it starts, stops and keeps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.notes import quiet_notes
from gpurun.launcher.errors import Interrupted, MachineError, ParamsError
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run import session
from gpurun.launcher.run.job import finish
from gpurun.launcher.run.running_attempt import RunningAttempt
from gpurun.launcher.rundir.files import append_lines, keep_lines
from gpurun.launcher.rundir.records import Event, StepRecord
from tests.said import notes_of
from tests.unit.run.fake_ranks import OfRank, Removed, Script
from tests.unit.run.session_case import (
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
from tests.wording import Wording


def test_a_launch_that_ends_well_leaves_its_variants_measured(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [WELL]).done()
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]
    assert case.statuses() == ["ok", "ok"]
    assert case.run.comparison.exists()
    assert not case.run.control("01-ddp-2").exists()


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


USAGE = "usage: train.py [-h] [--batch BATCH]\n"
COMPARED = "script: train.py\ncompare: {options: [{batch: 8}, {batch: x}, {batch: 9}]}\nprofile: {steps: 0}\n"


@pytest.mark.parametrize(
    ("job", "said", "refused"),
    [
        (COMPARED, f"Seed 1\n{USAGE}train.py: error: argument --batch: invalid int value: 'x'\n", True),
        (COMPARED, "Usage: train.py [OPTIONS]\n\nError: No such option: --batch\n", True),
        (COMPARED, "no luck\n", False),
        ("script: train.py\nargs: [--batch, x]\n", f"{USAGE}train.py: error: no\n", False),
    ],
    ids=["argparse", "click", "another-end", "no-comparison"],
)
def test_arguments_that_a_program_refuses_end_the_comparison(
    tmp_path: Path, job: str, said: str, refused: bool, wording: Wording
) -> None:
    case = Case(tmp_path, job, [])
    log = case.run.log(case.plan.launches[0].id, 0)

    def prints() -> None:
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


def test_a_program_that_has_made_steps_doesnt_refuse_its_arguments(tmp_path: Path) -> None:
    case = Case(tmp_path, COMPARED, [])
    variant, launch = case.plan.variants[0].id, case.plan.launches[0].id

    def works() -> None:
        step = StepRecord(launch, 1, 0, 1, "timed", 10**8, {}, None)
        case.run.variant(variant).mkdir(parents=True)
        append_lines(case.run.steps(variant, 0), [step])
        case.run.log(launch, 0).parent.mkdir(parents=True)
        case.run.log(launch, 0).write_text(USAGE)

    failure = replace(record(0, "SystemExit", "run"), kind="exit", message="exit code 2")
    case.ranks.scripts = [[(1.0, works), (1.0, failure), *exits(2, 2)], exits(0, 0), exits(0, 0)]
    assert case.done().statuses()[0] == "failed"


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
    waits = [(wait.launch, wait.waited_s, wait.is_quiet) for wait in case.run.read_waits()]
    launches = [launch.id for launch in case.plan.launches]
    assert waits == [(launches[0], 15, True), (launches[1], 15, False)][: 2 * (found[0] is not None)]
    for text in (*case.said, *quiet_notes(case.run)):
        wording(text)


def test_other_load_is_reported_once_while_the_run_goes_on(tmp_path: Path, wording: Wording) -> None:
    """At the end it is too late to stop what else runs."""
    case = Case(tmp_path, SPLITS, [])

    def blocks() -> None:
        records = [
            StepRecord("01-ddp-2", number, 0, number, "timed", 10**8, {}, None, 28_100_000, others_ns=10**8)
            for number in (1, 2, 3)
        ]
        append_lines(case.run.steps(EVEN, 1), records)

    def ended() -> None:
        wording(case.said[-1])

    round_ = replace(stage("round", EVEN), round=3)
    events: Script = [(1.0, round_), (2.0, blocks), (5.0, round_), (9.0, ended), (9.0, round_)]
    case.ranks.scripts = [[*events, (9.5, stage("done")), *exits(0, 0)]]
    case.done()
    assert sum("free core" in text for text in case.said) == 1


def test_a_run_whose_directory_is_removed_ends_with_a_sentence(tmp_path: Path, wording: Wording) -> None:
    removed: Script = [(1.0, Removed(tmp_path / "run")), (2.0, stage("round", SPLIT))]
    case = Case(tmp_path, SPLITS, [removed])
    wording(str(case.fails()))
    assert case.ranks.log == ["start 01-ddp-2", "stop 01-ddp-2"]


def test_events_that_someone_removes_and_damaged_lines_end_no_run(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [])
    attempt = RunningAttempt(case.session.starter, case.plan.launches[0], 1, case.ranks, case.session.relay)
    path = case.run.events(attempt.name)
    append_lines(path, [stage("build"), stage("round", EVEN)])
    assert len(attempt.new_events()) == 2
    path.unlink()
    assert attempt.new_events() == ()
    path.write_bytes(b'{"time_ns": 1, "sta')
    append_lines(path, [stage("round", EVEN), stage("round", SPLIT)])
    assert [event.variant for event in attempt.new_events()] == [EVEN, SPLIT]


def test_of_a_file_of_events_that_a_rank_has_thinned_out_only_the_new_ones_are_read(tmp_path: Path) -> None:
    case = Case(tmp_path, SPLITS, [])
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
        ("script: train.py\n", [[*exits(0), (500.0, Exit(1, 2, 0, 0))]], ["ok"], []),
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
    (stall,) = case.run.read_stalls()
    wording(stall.launch, stall.reason)
    assert f"1 stall: {stall.reason}." in notes_of(compare_run(case.run))


def test_a_hang_that_is_only_reported_is_reported_once_until_a_step_is_completed(
    tmp_path: Path, wording: Wording
) -> None:
    steps = [(2.0, (4, 4)), (50.0, (5, 5))]
    script: Script = [(1.0, stage("round", SPLIT)), *steps, (100.0, stage("done")), (100.0, Exit(0, 1, 0, 0)),
              (100.0, Exit(1, 2, 0, 0))]  # fmt: skip
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
    case.ranks.stop = lambda grace_s: case.ranks._exits.extend(e for _, e in exits(0, 0))  # type: ignore[method-assign]
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
