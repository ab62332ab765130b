"""How a search goes on from what its runs say; the runs are stand-ins with known times."""

import json
import math
import os
import re
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.commands.improve import (
    apply,
    check_change,
    given_by,
    improve,
    noted_written,
    search_to_resume,
)
from gpurun.launcher.cli.commands.report import report
from gpurun.launcher.compare.model import Difference
from gpurun.launcher.errors import Interrupted, SpecError
from gpurun.launcher.improve.improve import (
    changes_to_write,
    check_code,
    gain_of,
    not_shown,
    notes_on,
    run_improve,
    shares_of,
)
from gpurun.launcher.improve.remedies import REMEDIES, Candidate
from gpurun.launcher.improve.stages import BETWEEN_S, LONGER, RemedySearch, Stage
from gpurun.launcher.improve.trials import RemedyTrials, fitting, num_likely, place_of
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.report.terminal.improve import answer, improve_lines, time_text
from gpurun.launcher.run.find import find_run
from gpurun.launcher.run.job import Output
from gpurun.launcher.run.open import Invocation, StoredInvocation, load_invocation
from gpurun.launcher.rundir.files import write_json
from gpurun.launcher.rundir.improvement import (
    LOADED_BEFORE,
    NO_TIME,
    SCHEMA,
    CallChange,
    Gain,
    Improvement,
    RemedyResult,
    RemedyVerdict,
)
from gpurun.launcher.rundir.records import CallSite, Event
from tests.unit.improve.stand_in import (
    FILE,
    FUSED,
    JOB,
    LOSSES,
    OTHERS,
    UNUSED,
    WORKERS,
    StandIn,
    searched,
    searched_job,
)

COMPILE = "model.compile()"
HOOK = "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"


def row_of(found: Improvement, code: str) -> RemedyResult:
    return next(each for each in found.remedies if each.code == code)


def verdict(found: Improvement, code: str) -> RemedyVerdict:
    return row_of(found, code).verdict


def test_what_helps_is_kept_with_what_it_gains_over_the_rest(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.7, FUSED: 0.9}), tmp_path)
    assert [each.code for each in found.kept] == [WORKERS, FUSED]
    assert found.gain is not None
    assert found.gain.percent == pytest.approx(-37.0)
    assert [each.percent for each in found.kept] == pytest.approx([-30.0, -10.0])
    assert "+loader = DataLoader(data, num_workers=2, persistent_workers=True)" in found.diff
    assert "+optimizer = AdamW(model.parameters(), fused=True)" in found.diff
    assert found.complete
    assert any("; then computing takes 55 % of a traced step" in line for line in improve_lines(found, "x"))


def test_the_change_of_a_librarys_call_is_an_option_of_the_command_line(tmp_path: Path) -> None:
    """Of a program that takes a Trainer's options; no file changes."""
    unused = "--ddp_find_unused_parameters False"
    trainer = StandIn(times={unused: 0.8}, library="transformers", args=("--output-dir=x", "--do_train"))
    found = searched(trainer, tmp_path)
    assert [each.code for each in found.kept] == [unused]
    assert (found.options, found.diff, found.changes) == ({"ddp_find_unused_parameters": "False"}, "", ())
    assert f"Next     start with {unused}; then" in improve_lines(found, "x")[2]
    assert not searched(replace(trainer, args=()), tmp_path).tried


def test_where_nothing_helps_nothing_is_compared(tmp_path: Path) -> None:
    program = StandIn()
    found = searched(program, tmp_path)
    assert (found.kept, found.gain, found.diff) == ([], None, "")
    assert not any(name.startswith("3") for name, _ in program.stages)


def test_a_remedy_without_which_the_rest_is_as_fast_is_dropped_and_the_rest_compared_anew(
    tmp_path: Path,
) -> None:
    program = StandIn(times={WORKERS: 0.7, FUSED: 0.97}, verdicts={FUSED: "same"})
    found = searched(program, tmp_path)
    assert [each.code for each in found.kept] == [WORKERS]
    assert verdict(found, FUSED) == "same"
    assert program.stages[-2:] == [("3-together-2", [(WORKERS,), ()]), ("4-kept", [(WORKERS,)])]
    assert "fused" not in found.diff


def test_where_what_seemed_best_is_dropped_the_next_is_compared_once(tmp_path: Path) -> None:
    times = {WORKERS: 0.92, FUSED: 0.95, UNUSED: 0.94}
    program = StandIn(times, verdicts={WORKERS: "inconclusive", UNUSED: "inconclusive"})
    found = searched(program, tmp_path, budget_s=140.0)
    assert found.kept == []
    assert [sets[0] for name, sets in program.stages if name.startswith("3")] == [(WORKERS,), (UNUSED,)]


@pytest.mark.parametrize("budget_s", [60.0, 90.0, 120.0, 300.0, 900.0])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_budget_is_kept_and_is_enough_for_the_best(tmp_path: Path, budget_s: float, num: int) -> None:
    times = dict([(WORKERS, 0.7), (UNUSED, 0.8), (FUSED, 0.9)][:num])
    program = StandIn(times)
    found = searched(program, tmp_path, budget_s)
    assert program.spent_s <= budget_s
    assert len(found.kept) == num if budget_s >= 300 else found.kept


def test_two_large_gains_are_proven_together_in_two_minutes(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.5, FUSED: 0.75}, scatter=0.03, launch_s=2.3)
    found = searched(program, tmp_path, budget_s=120.0)
    assert {each.code for each in found.kept} == {WORKERS, FUSED}
    assert program.spent_s <= 120


class OneSlowLaunch(Random):
    """Of all launches of a search, one takes 1.4 times as long."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        self.left -= 1
        return math.log(1.4) if self.left == -1 else 0.0


@pytest.mark.parametrize("number", range(2, 10))
def test_what_helps_is_found_whichever_launch_takes_longer(tmp_path: Path, number: int) -> None:
    program = StandIn({FUSED: 0.75}, rng=OneSlowLaunch(number), launch_s=2.9)
    assert [each.code for each in searched(program, tmp_path, budget_s=108.0).kept] == [FUSED]


@pytest.mark.parametrize("launch_s", [2.0, 2.2, 2.5, 2.9])
def test_counting_steps_leaves_time_for_a_proof(tmp_path: Path, launch_s: float) -> None:
    program = StandIn({FUSED: 0.7, COMPILE: 0.9}, starts_s={COMPILE: 8.0}, launch_s=launch_s)
    assert FUSED in {each.code for each in searched(program, tmp_path, budget_s=108.0).kept}


def test_where_a_remedy_shortens_its_launches_more_of_them_fit(tmp_path: Path) -> None:
    """12 launches of 2.5 s don't fit in the 27.5 s that are left, but 6 of 2.5 s and 6 of 1.7 s do."""
    cases: list[tuple[dict[str, float], list[str]]] = [({}, []), ({UNUSED: 0.8}, [UNUSED])]
    for saved_s, kept in cases:
        program = StandIn({UNUSED: 0.5}, saved_s=saved_s, launch_s=2.5)
        found = searched(program, tmp_path, budget_s=40.0)
        assert [each.code for each in found.kept] == kept
        assert program.spent_s <= 40


@pytest.mark.parametrize("budget_s", [200.0, 300.0, 400.0])
def test_what_costs_much_at_each_start_is_compared_only_where_the_budget_has_time(
    tmp_path: Path, budget_s: float
) -> None:
    program = StandIn({WORKERS: 0.7, COMPILE: 0.6}, starts_s={COMPILE: 15.0}, launch_s=2.3)
    found = searched(program, tmp_path, budget_s)
    assert program.spent_s <= budget_s
    assert WORKERS in {each.code for each in found.kept}


def test_what_compiles_is_compared_first_where_the_others_hardly_gain(tmp_path: Path) -> None:
    """There is time for one proof."""
    cases = [(0.97, 8.0, COMPILE), (0.9, 8.0, FUSED), (0.97, 25.0, FUSED)]
    for fused, start_s, kept in cases:
        program = StandIn({FUSED: fused, COMPILE: 0.8}, starts_s={COMPILE: start_s}, launch_s=6.0)
        found = searched(program, tmp_path, budget_s=400.0)
        assert [each.code for each in found.kept] == [kept]
        assert program.spent_s <= 400


def test_what_compiles_for_long_leaves_time_to_prove_what_others_gain(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.7}, starts_s={COMPILE: 1000.0}, launch_s=3.0)
    found = searched(program, tmp_path, budget_s=120.0)
    assert program.spent_s <= 120
    assert {each.code: each.verdict for each in found.remedies if each.code in (WORKERS, COMPILE)} == {
        WORKERS: "kept", COMPILE: "undecided"
    }  # fmt: skip


@pytest.mark.parametrize(("launch_s", "start_s"), [(1.8, 10.0), (2.0, 9.0), (2.2, 6.0), (2.4, 12.0)])
def test_what_compiles_is_tried_again_only_where_that_leaves_time_for_a_proof(
    tmp_path: Path, launch_s: float, start_s: float
) -> None:
    times = {WORKERS: 0.68, FUSED: 0.95, COMPILE: 0.9}
    program = StandIn(times, starts_s={COMPILE: start_s}, launch_s=launch_s)
    found = searched(program, tmp_path, budget_s=120.0)
    assert program.spent_s <= 120
    assert WORKERS in [each.code for each in found.kept]


@pytest.mark.parametrize(
    ("percents", "num"), [([], 0), ([-2.0], 0), ([-12.0], 1), ([-60.0, -25.0, -12.0, -4.0], 2)]
)
def test_large_gains_are_hardly_noise(percents: list[float], num: int) -> None:
    assert num_likely(percents) == num


def test_where_launches_are_shorter_than_expected_more_is_tried(tmp_path: Path) -> None:
    program = StandIn(times={WORKERS: 0.7}, launch_s=1.0)
    found = searched(program, tmp_path, budget_s=38.0)
    assert [name for name, _ in program.stages][1:3] == ["2-alone", "2-alone-1"]
    assert [each.code for each in found.kept] == [WORKERS]


def test_where_there_was_no_time_for_all_a_larger_budget_is_proposed(tmp_path: Path) -> None:
    found = searched(StandIn(launch_s=4.0), tmp_path, budget_s=30.0)
    assert any(each.why == NO_TIME for each in found.remedies)
    assert any("begin again with --budget 1m" in line for line in improve_lines(found, "found"))


@pytest.mark.parametrize(("context", "is_shown"), [("plain", True), ("a\u202b", False), ("a\r", False)])
def test_a_diff_that_a_terminal_cant_show_whole_names_its_file(
    context: str, is_shown: bool, tmp_path: Path
) -> None:
    search = cast(Any, SimpleNamespace(path=tmp_path))
    notes = list(not_shown(f" {context}\n-b\n+c\n".encode(), search))
    assert any(str(tmp_path / "change.diff") in note for note in notes) is not is_shown


def test_a_search_that_has_only_begun_says_nothing_of_remedies() -> None:
    assert dict(answer(Improvement(1, "train.py", 60.0), "my search"))["Next"] == (
        "gpurun improve --resume 'my search'"
    )
    assert improve_lines(Improvement(1, "train.py", 60.0), "found") == [
        "Answer   nothing is proven to make train.py faster yet",
        "Next     gpurun improve --resume found",
    ]


def test_without_a_cause_the_largest_part_of_a_step_is_said(tmp_path: Path) -> None:
    assert searched(StandIn(), tmp_path).why == "computing takes 55 % of a traced step"


@pytest.mark.parametrize(("num_steps", "expected"), [(200, "slower"), (10_000, "kept")])
def test_what_costs_more_at_the_start_than_the_programs_steps_gain_is_not_kept(
    tmp_path: Path, num_steps: int, expected: str
) -> None:
    """18 s pay at 50 ms a step from 360 steps on."""
    program = StandIn(times={COMPILE: 0.5}, starts_s={COMPILE: 17.98}, num_steps=num_steps)
    found = searched(program, tmp_path, budget_s=900.0)
    row = row_of(found, COMPILE)
    assert (row.verdict, row.start_s, row.pays_from_steps) == (expected, 18.0, 360)
    more = ", more than train.py makes" if expected == "slower" else ""
    assert row.why == f"costs 18 s at each start: pays from 360 steps on{more}"


def test_where_counting_its_steps_takes_too_long_what_pays_later_is_still_compared(tmp_path: Path) -> None:
    program = StandIn({COMPILE: 0.5}, starts_s={COMPILE: 17.98}, num_steps=200, counting_s=500.0)
    found = searched(program, tmp_path, budget_s=900.0)
    assert verdict(found, COMPILE) == "kept"
    assert "2-length" in dict(program.stages)


def test_ctrl_c_while_steps_are_counted_keeps_the_trials(tmp_path: Path) -> None:
    kept = list[Improvement]()
    program = StandIn({COMPILE: 0.5}, starts_s={COMPILE: 17.98}, interrupted_at="2-length")
    with pytest.raises(Interrupted):
        searched(program, tmp_path, budget_s=900.0, keep=kept.append)
    assert len(kept[-1].tried) > 2


def test_what_the_job_cant_have_is_not_tried(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.7, COMPILE: 0.5}, refusals={frozenset({COMPILE}): "FSDP2 can't"})
    found = searched(program, tmp_path)
    row = row_of(found, COMPILE)
    assert (row.verdict, row.why) == ("not tried", "FSDP2 can't")
    assert [each.code for each in found.kept] == [WORKERS]


def test_what_the_job_cant_have_together_is_a_conflict(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.7, FUSED: 0.8}, refusals={frozenset({WORKERS, FUSED}): "one of the two"})
    found = searched(program, tmp_path)
    row = row_of(found, FUSED)
    assert (row.verdict, row.why) == ("failed", "together with the others: one of the two")
    assert [each.code for each in found.kept] == [WORKERS]


def test_the_rules_of_jobs_say_what_a_job_cant_have(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "strategy: fsdp\n")
    search = object.__new__(RemedySearch)
    search.spec, search.machine = load_invocation(Invocation(tmp_path / "job.yaml", ())), inspect_machine()
    rows = {row.name: Candidate(row, keys=cast(Any, row.keys)) for row in REMEDIES}
    assert "FSDP2 needs its blocks compiled one by one" in search.refusal((rows["compile"],))
    assert not search.refusal((rows["workers"],))


def test_a_failure_alone_is_none_together_with_others(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.7})
    program.fails = lambda codes: bool(codes) and program.stages[-1:] == [("3-together-1", [(WORKERS,), ()])]
    found = searched(program, tmp_path)
    row = row_of(found, WORKERS)
    assert (row.verdict, row.why) == ("failed", "it hung")


def test_without_a_loss_every_remedy_has_that_as_its_reason(tmp_path: Path) -> None:
    found = searched(StandIn(begins={"1-original": ()}), tmp_path)
    assert found.complete
    assert {each.why for each in found.remedies if each.code in (WORKERS, FUSED)} == {"no loss was seen"}
    assert not any("not tried yet" in line for line in improve_lines(found, "x"))


def test_where_losses_soon_are_no_numbers_nothing_is_tried(tmp_path: Path) -> None:
    begins = {"1-original": cast(Any, (2.0, None, None, None))}
    found = searched(program := StandIn({WORKERS: 0.7}, begins=begins), tmp_path)
    assert [name for name, _ in program.stages] == ["1-original"]
    assert row_of(found, WORKERS).why == "too few finite losses were seen to know whether it trains the same"


def test_where_the_program_begins_otherwise_each_time_no_loss_condemns_a_remedy(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.7, FUSED: 0.8}, dict.fromkeys((WORKERS, FUSED), OTHERS))
    program = replace(program, drifts={"1-original": 0.01}, seeded={WORKERS: OTHERS})
    found = searched(program, tmp_path)
    for row in (row_of(found, WORKERS), row_of(found, FUSED)):
        assert (row.verdict, row.why) == ("undecided", "two runs as it is begin with other losses")
    assert found.kept == []
    assert not any(name.startswith("3") for name, _ in program.stages)
    assert dict(answer(found, "x"))["Next"].startswith(
        "make runs of train.py begin with the same loss, by seeds that don't change and without an earlier "
        "checkpoint, and begin again"
    )


def test_what_is_proven_stands_where_the_last_trace_fails(tmp_path: Path) -> None:
    found = searched(StandIn({WORKERS: 0.7}, changed_at="4-kept"), tmp_path)
    assert ([each.code for each in found.kept], found.then, found.complete) == ([WORKERS], "", True)


def test_a_remedy_whose_model_is_compiled_already_is_not_tried(tmp_path: Path) -> None:
    found = searched(StandIn({COMPILE: 0.5}, skips=("compile",)), tmp_path)
    row = row_of(found, COMPILE)
    assert (row.verdict, row.why) == ("not tried", "the model is compiled")


def test_workers_that_may_repeat_samples_are_not_kept(tmp_path: Path) -> None:
    found = searched(StandIn({WORKERS: 0.5, FUSED: 0.8}, repeats="Lines"), tmp_path)
    row = row_of(found, WORKERS)
    assert (row.verdict, row.why) == (
        "not tried", "workers of Lines weren't seen to ask which they are: each may yield all samples"
    )  # fmt: skip
    assert [each.code for each in found.kept] == [FUSED]


@pytest.mark.parametrize("stage", ["2-", "3-"])
@pytest.mark.parametrize(("drained", "is_kept"), [(2, True), (3, False)])
def test_steps_on_batches_that_were_loaded_before_prove_nothing(
    tmp_path: Path, stage: str, drained: int, is_kept: bool
) -> None:
    """Of 16 workers, each with 8 batches, those of the whole epoch are loaded before a step counts."""
    found = searched(StandIn({WORKERS: 0.5, FUSED: 0.8}, drained={stage: drained}), tmp_path)
    row = row_of(found, WORKERS)
    assert (row.verdict, row.why == LOADED_BEFORE) == (("kept", False) if is_kept else ("undecided", True))
    assert {each.code for each in found.kept} == {FUSED, *([WORKERS] if is_kept else ())}


def test_no_budget_proves_a_gain_on_batches_that_were_loaded_before(tmp_path: Path) -> None:
    found = searched(StandIn({WORKERS: 0.5}, drained={"2-": 12}), tmp_path)
    assert (found.kept, found.is_open) == ([], False)


@pytest.mark.parametrize(("batches", "is_limited"), [(None, False), (10, False), (5000, True)])
def test_a_gain_in_reading_data_is_limited_to_the_first_epoch_where_no_other_was_seen(
    tmp_path: Path, batches: int | None, is_limited: bool
) -> None:
    """A dataset may keep what it has read: otherwise the gain is said to be one of the first epoch."""
    found, steps = searched(StandIn({WORKERS: 0.7}, batches=batches), tmp_path), 30
    within = f"in its first {steps} steps, before an epoch ends"
    (kept,) = found.kept
    assert kept.why.startswith(f"{within}: workers" if is_limited else f"tried in {steps} steps: workers")
    assert (f"), {within}: 1 of" in improve_lines(found, "x")[0]) is is_limited
    assert found.first_steps == (steps if is_limited else None)


def test_a_variable_that_the_job_states_is_for_its_user_to_change(tmp_path: Path) -> None:
    stated = {"OMP_NUM_THREADS": "1"}
    found = searched(StandIn({"OMP_NUM_THREADS=2": 0.7}, env=stated, cores=4), tmp_path)
    assert (len(found.kept), found.env) == (1, {})
    assert "write it yourself: env.OMP_NUM_THREADS=2, which the job states" in found.notes


@pytest.mark.parametrize("name", ["lib/late.py", "train.py/data.py"])
def test_a_call_in_a_file_that_was_not_measured_is_for_its_user_to_change(tmp_path: Path, name: str) -> None:
    """As where a file is imported after the first steps, or is part of an archive."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/late.py").write_text("x = DataLoader(a)\n")
    more = (CallSite("DataLoader", name, 1, True),)
    found = searched(StandIn(times={WORKERS: 0.7}, more_calls=more), tmp_path)
    assert (
        f"write it yourself at {name}:1: DataLoader(…, num_workers=2, persistent_workers=True)" in found.notes
    )
    assert not any("changed since" in note for note in found.notes)
    assert "+loader = DataLoader(data, num_workers=2" in found.diff


def test_what_takes_time_at_each_start_needs_more_of_the_budget_to_be_tried() -> None:
    search = SimpleNamespace(launch_s=30.0, spent_s=200.0, budget_s=60.0)
    trials = RemedyTrials(cast(Any, search), cast(Any, None), {}, 20, 10.0)
    rows = {row.name: Candidate(row) for row in REMEDIES}
    assert trials.needed(rows["workers"]) == "`--budget 11m`"  # 200 + 3 * 30 + 12 * 30
    assert trials.needed(rows["compile"]) == "`--budget 13m`"  # 200 + 5 * 30 + 30 + 12 * 30


def test_a_conflict_is_a_failure_of_what_gains_least_alone(tmp_path: Path) -> None:
    program = StandIn(times={WORKERS: 0.7, FUSED: 0.9}, fails=lambda codes: {WORKERS, FUSED} <= {*codes})
    found = searched(program, tmp_path)
    assert [each.code for each in found.kept] == [WORKERS]
    assert verdict(found, FUSED) == "failed"


def test_a_file_that_is_edited_while_the_search_runs_is_left_to_its_editor(tmp_path: Path) -> None:
    """The lines of calls are those of the file that was measured."""

    def edits(codes: tuple[str, ...]) -> bool:
        if codes:
            (tmp_path / "train.py").write_text(f"import torch\n{FILE}")
        return False

    found = searched(StandIn(times={WORKERS: 0.7}, fails=edits), tmp_path)
    assert [each.code for each in found.kept] == [WORKERS]
    assert (found.diff, found.changes) == ("", ())
    assert "train.py has changed since it was measured" in found.notes


def test_a_job_that_is_edited_while_the_search_runs_is_left_to_its_editor(tmp_path: Path) -> None:
    def edits(codes: tuple[str, ...]) -> bool:
        if codes:
            (tmp_path / "job.yaml").write_text(f"# new\n{JOB}")
        return False

    found = searched_job(StandIn(times={"workers: 2": 0.7}, fails=edits), tmp_path)
    assert ([each.code for each in found.kept], found.diff, found.keys) == (["workers: 2"], "", {})
    assert "job.yaml has changed since it was measured" in found.notes


def test_what_isnt_decided_is_not_kept(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.9}, verdicts={WORKERS: "inconclusive"}), tmp_path)
    assert (verdict(found, WORKERS), found.gain) == ("undecided", None)


def test_what_was_compared_had_its_time(tmp_path: Path) -> None:
    """Two of three are compared; each seems to help the other, but both together don't."""
    times, verdicts = dict.fromkeys((WORKERS, FUSED, UNUSED), 0.8), {"": "inconclusive"}
    found = searched(StandIn(times=times, verdicts=verdicts), tmp_path, budget_s=100.0)
    whys = [row_of(found, code).why for code in times]
    assert sorted(whys) == ["its launches don't decide", "its launches don't decide", NO_TIME]


def test_what_has_no_time_to_be_compared_again_has_that_as_its_reason(tmp_path: Path) -> None:
    """Where the first of three drops out, there is time for one of the others."""
    times, verdicts = {WORKERS: 0.6, FUSED: 0.7, UNUSED: 0.69}, {WORKERS: "inconclusive"}
    program = StandIn(times=times, verdicts=verdicts)
    found = searched(program, tmp_path, budget_s=175.0)
    assert [len(sets[0]) for name, sets in program.stages if name.startswith("3")] == [3, 1]
    assert (verdict(found, UNUSED), row_of(found, FUSED).why) == ("kept", NO_TIME)


@pytest.mark.parametrize("other", [0.6, 0.8])
def test_of_two_that_were_compared_one_is_kept_without_more_launches(tmp_path: Path, other: float) -> None:
    """There is no time for others, and these have shown it alone beside the program as it is."""
    times, verdicts = {WORKERS: 0.7, UNUSED: other}, {UNUSED: "inconclusive"}
    program = StandIn(times=times, verdicts=verdicts)
    found = searched(program, tmp_path, budget_s=128.0)
    assert [sorted(map(len, sets)) for name, sets in program.stages if name.startswith("3")] == [[0, 1, 1, 2]]
    assert [each.code for each in found.kept] == [WORKERS]
    assert found.gain is not None
    assert [found.gain.percent, found.kept[0].percent] == pytest.approx([-30, -30])
    assert verdict(found, UNUSED) == "undecided"


def test_a_remedy_that_trains_otherwise_is_never_kept(tmp_path: Path) -> None:
    found = searched(StandIn(times={FUSED: 0.5}, losses={FUSED: OTHERS}), tmp_path)
    assert (verdict(found, FUSED), found.kept) == ("changes numerics", [])


@pytest.mark.parametrize(
    ("code", "step", "expected"),
    [(WORKERS, 1, "changes numerics"), (FUSED, 1, "kept"), (WORKERS, 5, "changes numerics")],
)
def test_only_what_computes_otherwise_may_round(tmp_path: Path, code: str, step: int, expected: str) -> None:
    losses = tuple(loss * (1 + 1e-6 * (number == step)) for number, loss in enumerate(LOSSES))
    program = StandIn(times={code: 0.5}, losses={code: losses}, seeded={code: losses})
    assert verdict(searched(program, tmp_path), code) == expected


def test_what_later_steps_may_break_is_said_with_the_number_of_steps_that_were_seen(tmp_path: Path) -> None:
    found = searched(StandIn(times={UNUSED: 0.7}), tmp_path)
    (kept,) = found.kept
    steps = found.remedies[0].why.partition(" in ")[2].partition(" ")[0]
    assert int(steps) >= 15
    assert kept.why == f"no parameter was unused in {steps} steps: a later step that leaves some out fails"
    assert found.notes == (f"{UNUSED}: {kept.why}",)
    (kept,) = searched_job(StandIn(times={"workers: 2": 0.7}), tmp_path).kept
    assert re.match(r"tried in \d+ steps: workers don't see ", kept.why)


def test_what_the_launches_leave_open_has_a_reason(tmp_path: Path) -> None:
    program = StandIn(times={UNUSED: 0.9}, verdicts={UNUSED: "inconclusive"})
    (row,) = (each for each in searched(program, tmp_path).remedies if each.code == UNUSED)
    assert (row.verdict, row.why) == ("undecided", "its launches don't decide")


@pytest.mark.parametrize("stage", ["2-alone", "3-together-1"])
def test_a_program_that_goes_on_from_an_earlier_launch_ends_the_search(tmp_path: Path, stage: str) -> None:
    program = StandIn(times={FUSED: 0.7}, begins={stage: (1.2e-13, *LOSSES[1:])})
    with pytest.raises(SpecError, match=r"began with a loss of 2 at first, and later with 1.2e-13") as ended:
        searched(program, tmp_path)
    assert "\n" not in str(ended.value)
    assert program.stages[-1][0] == stage


def test_it_ends_also_where_only_the_launches_after_the_programs_end_go_on_from_it(tmp_path: Path) -> None:
    """The first launch of the trials is that of the program as it is."""
    program = StandIn(losses=Resumed())
    with pytest.raises(SpecError, match=r"began with a loss of 2 at first, and later with 0.1"):
        searched(program, tmp_path)


class Resumed(dict[str, tuple[float, ...]]):
    """Every remedy has the losses of a program that goes on."""

    def __contains__(self, code: object) -> bool:
        return True

    def __getitem__(self, code: str) -> tuple[float, ...]:
        return (0.1, *LOSSES[1:])


ROUNDED = tuple(loss * 1.002 for loss in LOSSES)


@pytest.mark.parametrize(
    ("losses", "numerics", "expected"),
    [(ROUNDED, True, "kept"), (OTHERS, True, "changes numerics"), (ROUNDED, False, "not tried")],
)
def test_less_precision_is_kept_where_it_is_asked_for(
    tmp_path: Path, losses: tuple[float, ...], numerics: bool, expected: str
) -> None:
    program = StandIn(times={HOOK: 0.7}, losses={HOOK: losses})
    found = searched(program, tmp_path, numerics=numerics)
    assert verdict(found, HOOK) == expected
    assert ("+model.register_comm_hook(None, default_hooks.fp16_compress_hook)" in found.diff) == (
        expected == "kept"
    )
    assert any("--numerics also tries" in line for line in improve_lines(found, "found")) != numerics


def test_remedies_that_are_not_tried_have_a_line_for_each_reason(tmp_path: Path) -> None:
    lines = improve_lines(searched(StandIn(times={WORKERS: 0.7}), tmp_path), "found")
    (only,) = (line for line in lines if line.startswith("not tried (for GPUs only): "))
    assert {"DataLoader(pin_memory=True)", "torch.backends.cudnn.benchmark = True"} < set(
        only.partition(": ")[2].split(", ")
    )
    assert sum("pin_memory" in line for line in lines) == 1


def test_after_the_change_is_written_a_new_search_is_next(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.7}), tmp_path)
    offered, asked, written = (
        dict(each)["Next"]
        for each in (answer(found, "x"), answer(found, "x", True), answer(replace(found, written=True), "x"))
    )
    assert "gpurun improve --resume x --write applies the change" in offered
    assert "--write" not in asked
    assert written.startswith("improve train.py again; ")


def test_what_was_measured_before_ctrl_c_is_counted(tmp_path: Path) -> None:
    """Of a stage that it ends, the launches that have ended."""
    kept = list[Improvement]()
    program = StandIn(times={WORKERS: 0.7}, interrupted_at="2-alone", measured_before=3)
    with pytest.raises(Interrupted):
        searched(program, tmp_path, keep=kept.append)
    assert len(kept[-1].tried) == 2  # the program as it is comes first
    num = len(kept[-1].tried) + len(kept[-1].untried[""])
    assert improve_lines(kept[-1], "x")[0].endswith(f"faster yet: 2 of {num} remedies tried")


@pytest.mark.parametrize(
    ("seeded", "allows", "expected"),
    [(LOSSES, False, "other random numbers"), (LOSSES, True, "kept"), (OTHERS, True, "changes numerics")],
)
def test_other_random_numbers_are_shown_by_seeded_steps(
    tmp_path: Path, seeded: tuple[float, ...], allows: bool, expected: str
) -> None:
    program = StandIn(times={WORKERS: 0.7}, losses={WORKERS: OTHERS}, seeded={WORKERS: seeded})
    found = searched(program, tmp_path, allows=allows)
    assert verdict(found, WORKERS) == expected
    assert all(each.why.startswith("it draws other random numbers; tried in ") for each in found.kept)


@pytest.mark.parametrize("allows", [True, False])
def test_what_draws_otherwise_and_gains_nothing_is_no_next_step(tmp_path: Path, allows: bool) -> None:
    program = StandIn(losses={WORKERS: OTHERS}, seeded={WORKERS: LOSSES})
    found = searched(program, tmp_path, allows=allows)
    row = row_of(found, WORKERS)
    assert (row.verdict, row.why) == ("undecided", "no gain in its trials")
    assert "begin again" not in dict(answer(found, "x"))["Next"]


def test_what_compiling_costs_counts_also_where_random_numbers_differ(tmp_path: Path) -> None:
    costs = StandIn({COMPILE: 0.5}, {COMPILE: OTHERS}, seeded={COMPILE: LOSSES}, starts_s={COMPILE: 17.98})
    found = searched(replace(costs, num_steps=200), tmp_path, allows=True)
    row = row_of(found, COMPILE)
    assert (row.verdict, row.start_s, row.why) == (
        "slower",
        18.0,
        "it draws other random numbers; costs 18 s at each start: pays from 360 steps on, more than "
        "train.py makes",
    )


def test_other_gradients_are_no_other_random_numbers(tmp_path: Path) -> None:
    program = StandIn({COMPILE: 0.5}, seeded={COMPILE: LOSSES}, warns=(COMPILE,))
    found = searched(program, tmp_path, allows=True)
    row = row_of(found, COMPILE)
    assert (row.verdict, row.why) == ("changes numerics", "its gradients differ")


def test_without_time_to_prove_anything_the_budget_that_would_do_is_named(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.7}, launch_s=4.0), tmp_path, budget_s=75.0)
    assert (verdict(found, WORKERS), found.gain) == ("undecided", None)
    assert found.needs_s is not None
    assert found.needs_s > 75.0
    with pytest.raises(SpecError, match="too short to try anything"):
        searched(StandIn(), tmp_path, budget_s=2.0)


def test_a_gain_is_the_inverse_of_how_much_slower_the_program_is() -> None:
    gain = gain_of(Difference(100.0, (60.0, 150.0), "slower"))
    assert gain is not None
    assert gain.percent == pytest.approx(-50.0)
    assert gain.ci == pytest.approx((-60.0, -37.5))


def test_the_parts_of_a_step_are_those_of_the_rank_that_spends_most_on_each() -> None:
    ranks = [
        SimpleNamespace(span_ms=100.0, input_ms=50.0, exposed_transfer_ms=1.0, exposed_wait_ms=0.0),
        SimpleNamespace(span_ms=100.0, input_ms=0.0, exposed_transfer_ms=1.0, exposed_wait_ms=50.0),
        SimpleNamespace(span_ms=None),
    ]
    shares = shares_of(cast(Any, SimpleNamespace(ranks=ranks)))
    assert shares == {"input": 50.0, "transfer": 51.0, "work": 49.0}


def test_of_a_workload_the_keys_of_its_job_are_changed(tmp_path: Path) -> None:
    times = {"workers: 2": 0.7, "bucket_mb: 25": 0.9, "bucket_mb: 100": 0.95}
    found = searched_job(StandIn(times=times), tmp_path)
    assert [(each.code, each.applied_to, each.place) for each in found.kept] == [
        ("workers: 2", "workers", "job.yaml"),
        ("bucket_mb: 25", "bucket_mb", "job.yaml:4"),
    ]
    assert found.name == "job.yaml"
    assert found.keys == {"workers": 2, "bucket_mb": 25}
    written = JOB.replace("bucket_mb: 1", "bucket_mb: 25\nworkers: 2")
    (after,) = (after for _, after in changes_to_write(found, tmp_path).values())
    assert after.decode() == written
    (tmp_path / "job.yaml").write_text(JOB + "# later\n")
    with pytest.raises(SpecError, match="has changed since it was measured"):
        changes_to_write(found, tmp_path)


def test_what_the_job_states_otherwise_is_tried_first(tmp_path: Path) -> None:
    """Communication takes least of a step."""
    program = StandIn()
    searched_job(program, tmp_path)
    assert program.stages[1][1][:3] == [(), ("bucket_mb: 100",), ("bucket_mb: 25",)]


def test_a_key_that_the_command_line_states_is_not_written_into_the_job(tmp_path: Path) -> None:
    found = searched_job(StandIn(times={"bucket_mb: 25": 0.9}), tmp_path, "bucket_mb=1")
    assert [each.code for each in found.kept] == ["bucket_mb: 25"]
    assert (found.diff, found.keys) == ("", {})
    assert found.notes == ("write it yourself: bucket_mb: 25, which --set states",)


def test_keys_that_train_otherwise_are_never_kept(tmp_path: Path) -> None:
    losses = {"optimizer: fused": OTHERS, "workers: 2": OTHERS}
    program = StandIn(times=dict.fromkeys(losses, 0.5), losses=losses, seeded={"workers: 2": OTHERS})
    found = searched_job(program, tmp_path)
    assert {code: verdict(found, code) for code in losses} == dict.fromkeys(losses, "changes numerics")
    assert (found.kept, found.diff) == ([], "")


@pytest.mark.parametrize("numerics", [True, False])
def test_keys_with_less_precision_are_tried_where_it_is_asked_for(tmp_path: Path, numerics: bool) -> None:
    found = searched_job(StandIn(times={"precision: bf16": 0.5}), tmp_path, numerics=numerics)
    assert verdict(found, "precision: bf16") == ("kept" if numerics else "not tried")
    assert found.keys == ({"precision": "bf16"} if numerics else {})


@pytest.mark.parametrize(
    ("left_s", "first_s", "expected"), [(60.0, 5.0, 30.0), (60.0, 20.0, 60.0), (1800.0, 5.0, 450.0)]
)
def test_a_launch_is_waited_for_as_long_as_the_budget_has_time(
    left_s: float, first_s: float, expected: float
) -> None:
    search = object.__new__(RemedySearch)
    search.budget_s, search.spent_s, search.first_s = left_s + 40, 40.0, first_s
    assert search.hang_s == expected


def test_a_launch_that_compiles_makes_no_other_seem_longer() -> None:
    search = object.__new__(RemedySearch)
    search.first_s, search.launch_s, search.lengths_s, search.saved_s = 4.0, None, [], {}
    rows = {name: SimpleNamespace(remedy=SimpleNamespace(cost=name)) for name in ("", "compiles")}
    stage = SimpleNamespace(plan=SimpleNamespace(seeds_steps=False), length_s=(3.0, 12.0).__getitem__)
    search.note(cast(Any, stage), cast(Any, [(rows[""],), (rows["compiles"],)]))
    assert search.launch_s == LONGER * 3.0 + BETWEEN_S
    search.note(cast(Any, stage), cast(Any, [(rows["compiles"],)]))
    assert search.launch_s == LONGER * 3.0 + BETWEEN_S


def test_the_first_launch_of_a_later_stage_which_is_longer_makes_no_other_seem_longer() -> None:
    """It warms up, and measures the program as it is twice."""
    search = object.__new__(RemedySearch)
    search.first_s, search.launch_s, search.lengths_s, search.saved_s = 4.0, None, [], {}
    rows = {name: SimpleNamespace(code=name, remedy=SimpleNamespace(cost=name)) for name in ("", "compiles")}
    for lengths, sets in (
        ([4.2, 2.7, 2.3, 2.7], [(), (rows[""],), (rows[""],), (rows[""],)]),
        ([4.3, 35.0], [(), (rows["compiles"],)]),
    ):
        stage = SimpleNamespace(plan=SimpleNamespace(seeds_steps=False), length_s=lengths.__getitem__)
        search.note(cast(Any, stage), cast(Any, sets))
    assert search.launch_s == LONGER * 2.7 + BETWEEN_S


def test_what_only_a_set_costs_is_no_time_of_another_in_the_same_launch() -> None:
    events = [
        Event(0, "start"), Event(10**9, "balance", "b"), Event(9 * 10**9, "round", "a"),
        Event(11 * 10**9, "round", "b"), Event(14 * 10**9, "done"),
    ]  # fmt: skip
    plan = SimpleNamespace(launches=(SimpleNamespace(id="01", variants=("a", "b")),))
    run = SimpleNamespace(read_all_events=lambda: {"01~2": events})
    stage = Stage(cast(Any, run), cast(Any, plan), cast(Any, None), {0: "a", 1: "b"})
    assert (stage.length_s(0), stage.length_s(1)) == (2.5, 11.5)


def test_what_a_key_costs_at_each_start_is_seen_by_its_launches(tmp_path: Path) -> None:
    program = StandIn({"bucket_mb: 25": 0.9, "compile: true": 0.7}, starts_s={"compile: true": 8.0})
    found = searched_job(program, tmp_path)
    assert program.spent_s <= 600
    assert next(each.start_s for each in found.remedies if each.code == "compile: true") == 8.0


@pytest.mark.parametrize(("launches", "fit"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_a_trial_that_compiles_counts_as_several_launches(launches: int, fit: int) -> None:
    rows = [SimpleNamespace(remedy=SimpleNamespace(cost=cost)) for cost in ("", "compiles once", "")]
    assert len(fitting(cast(Any, rows), launches)) == fit


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([(2.0, 1.0), (2.0, 1.0)], ""),
        ([(2.0, 1.0), (2.0, 1.5)], "have other losses"),
        ([(2.0, 1.0), (0.1, 0.1)], "goes on from its own checkpoint"),
        ([(2.0, None, None)] * 2, "from loss 2 on, losses of the program as it is are NaN or infinite"),
    ],
)
def test_a_program_that_begins_otherwise_each_time_is_told_so(losses: list[Any], said: str) -> None:
    notes = notes_on(cast(Any, SimpleNamespace(losses=lambda position: losses)))
    assert said in "".join(notes)
    assert bool(notes) == bool(said)


def test_a_change_is_written_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the project, the original would be changed."""
    for name in ("project", "copy"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    with pytest.raises(SpecError, match=r"was measured in .*/project: --write works there only"):
        check_change(SimpleNamespace(name="train.py"), tmp_path / "project")


def test_a_change_is_written_also_where_a_link_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    given = Invocation(tmp_path / "link/job.yaml", ())
    found = Improvement(SCHEMA, "job.yaml", 60.0)
    check_change(found, given.directory)
    assert not apply(found, given, yes=True, force=True)
    assert "nothing is proven to help" in capsys.readouterr().err


def test_where_nothing_is_kept_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Improvement(SCHEMA, "train.py", 60.0, complete=True)
    assert not apply(found, SimpleNamespace(directory=tmp_path), yes=False, force=False)
    assert capsys.readouterr().err == "no file is changed: nothing is proven to help\n"


def test_a_change_that_is_written_already_or_is_for_its_user_changes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = searched(StandIn(times={WORKERS: 0.7}), tmp_path)
    given = SimpleNamespace(directory=tmp_path)
    assert apply(found, given, yes=True, force=True)
    (tmp_path / "noted").mkdir()
    written = noted_written(found, tmp_path / "noted", tmp_path)
    assert not apply(written, given, yes=True, force=True)
    assert "the change has been written already" in capsys.readouterr().err
    (tmp_path / "train.py").write_text(f"{FILE}# newer\n")  # undone, and then edited
    for each in (found, written):
        with pytest.raises(SpecError, match="has changed since it was measured"):
            apply(each, given, yes=True, force=True)
    (tmp_path / "train.py").write_text(FILE)
    unknown = replace(found, changes=(replace(found.changes[0], line=3),))
    assert not apply(unknown, given, yes=True, force=True)
    assert "what is kept is for you to write or set" in capsys.readouterr().err


def test_a_diff_that_isnt_utf8_is_a_file_that_git_takes(tmp_path: Path) -> None:
    data = b"# coding: latin-1\nname = 'Gr\xf6\xdfe'; x = DataLoader(a)\n"
    (tmp_path / "data.py").write_bytes(data)
    more = (CallSite("DataLoader", "data.py", 2, True),)
    found = searched(StandIn(times={WORKERS: 0.7}, more_calls=more), tmp_path)
    path = tmp_path / "found/change.diff"
    assert f"the diff has bytes that can't be shown: what `git apply` takes is {path}" in found.notes
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "found/change.diff"], cwd=tmp_path, check=True)
    workers = b", num_workers=2, persistent_workers=True)"
    assert (tmp_path / "data.py").read_bytes() == data.replace(b"DataLoader(a)", b"DataLoader(a" + workers)


def test_the_name_of_a_repository_may_end_with_a_blank(tmp_path: Path) -> None:
    (project := tmp_path / "project ").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    found = searched(StandIn(times={WORKERS: 0.7}), project)
    assert found.diff.startswith("diff --git a/train.py b/train.py\n")


def test_lines_of_the_diff_end_as_those_of_the_file() -> None:
    found = Improvement(1, "train.py", 60.0, diff="--- a\n+x\r\n+y\x0cz\n")
    assert improve_lines(found, "x")[-3:] == ["--- a", "+x\r", "+y\x0cz"]


def test_a_change_without_a_place_is_a_next_step(tmp_path: Path) -> None:
    more = (CallSite("DataLoader", "data.py", 1, True, end_column=20),)
    (tmp_path / "data.py").write_text("x = DataLoader(**kw)\n")
    found = searched(StandIn(times={WORKERS: 0.7}, more_calls=more), tmp_path)
    assert "make 1 change yourself, see the last lines" in dict(answer(found, "x"))["Next"]
    assert (
        "write it yourself at data.py:1: num_workers=2, persistent_workers=True in DataLoader(**kw)"
        in found.notes
    )


def test_places_and_reasons_of_others_are_shortened(tmp_path: Path) -> None:
    call = CallSite("DataLoader", "/opt/lib/python3/site-packages/trainer/data.py", 7, False)
    assert place_of(call, tmp_path) == "trainer/data.py:7"
    row = RemedyResult(FUSED, "AdamW", "train.py:3", "failed", why="C++ " * 200)
    assert len(improve_lines(Improvement(1, "train.py", 60.0, remedies=(row,)), "x")[-1]) < 200


def test_a_search_whose_program_has_changed_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FILE)
    search = SimpleNamespace(given=SimpleNamespace(directory=tmp_path))
    first = SimpleNamespace(of=lambda position: SimpleNamespace(code={"train.py": "of another"}))
    with pytest.raises(SpecError, match=r"train.py has changed since the search began: begin anew"):
        check_code(cast(Any, first), cast(Any, search))


def test_all_time_since_the_search_began_is_spent() -> None:
    """Also what is spent between launches, and by earlier commands."""
    search = object.__new__(RemedySearch)
    search.began_s = time.monotonic() - 100.0
    assert search.clock_s >= 100.0


def test_a_search_that_has_ended_takes_no_other_options(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    write_json(tmp_path / "improve.json", Improvement(SCHEMA, "job.yaml", 60.0, complete=True))
    given = Invocation(tmp_path / "job.yaml", ())
    pools: Any = None
    for allows, numerics in ((False, False), (True, False), (False, True)):
        ends = pytest.raises(SpecError, match="goes on as it began") if allows or numerics else nullcontext()
        with ends:
            found, _ = run_improve(pools, given, None, tmp_path, Output(True, None), print, allows, numerics)
            assert found.complete


@pytest.mark.parametrize("allows", [True, False])
def test_a_search_is_resumed_with_what_it_may_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allows: bool
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    known = Improvement(SCHEMA, "job.yaml", 60.0, other_random_numbers=True)
    write_json(tmp_path / "improve.json", known)
    begun = list[RemedySearch]()

    def improved(search: RemedySearch, start: Improvement, keep: object) -> Improvement:
        begun.append(search)
        return start

    monkeypatch.setattr("gpurun.launcher.improve.improve.improved", improved)
    given, pools = Invocation(tmp_path / "job.yaml", ()), cast(Any, SimpleNamespace(know=lambda spec: None))
    run_improve(pools, given, None, tmp_path, Output(True, None), print, allows)
    assert begun[0].allows_other_random_numbers


def test_a_search_whose_budget_is_spent_begins_anew_with_more(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    write_json(tmp_path / "improve.json", Improvement(SCHEMA, "job.yaml", 60.0, spent_s=55.0))
    given, pools = Invocation(tmp_path / "job.yaml", ()), cast(Any, None)
    with pytest.raises(SpecError, match="the budget is spent: begin anew with `--budget 2m`"):
        run_improve(pools, given, None, tmp_path, Output(True, None), print)


@pytest.mark.parametrize(("budget_s", "numerics"), [(120.0, False), (None, True)])
def test_a_search_that_is_resumed_has_the_options_that_it_began_with(
    tmp_path: Path, budget_s: float | None, numerics: bool
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    write_json(tmp_path / "improve.json", Improvement(SCHEMA, "job.yaml", 60.0))
    given, pools = Invocation(tmp_path / "job.yaml", ()), cast(Any, None)
    with pytest.raises(SpecError, match="goes on as it began"):
        run_improve(pools, given, budget_s, tmp_path, Output(True, None), print, numerics=numerics)


def test_every_call_that_was_changed_when_it_was_measured_is_changed_by_the_diff(tmp_path: Path) -> None:
    """Also in other files, and where a line has two of them."""
    (tmp_path / "data.py").write_text("first = DataLoader(a, 4)\nx, y = DataLoader(b), DataLoader(c)\n")
    more = (
        CallSite("DataLoader", "data.py", 1, True, parameters=("dataset", "batch_size")),
        CallSite("DataLoader", "data.py", 2, True, end_column=20),
        CallSite("DataLoader", "data.py", 2, True, end_column=35),
    )
    found = searched(StandIn(times={WORKERS: 0.7}, more_calls=more), tmp_path)
    (kept,) = found.kept
    assert (kept.code, kept.place) == (WORKERS, "data.py:1, 2, train.py:1")
    workers = "num_workers=2, persistent_workers=True"
    added = [line for line in found.diff.splitlines() if line.startswith("+") and "+++" not in line]
    assert added == [
        f"+first = DataLoader(a, 4, {workers})",
        f"+x, y = DataLoader(b, {workers}), DataLoader(c, {workers})",
        f"+loader = DataLoader(data, {workers})",
    ]
    assert len(found.changes) == 4


def test_a_call_that_the_remedy_did_not_change_is_left(tmp_path: Path) -> None:
    """It has the value already."""
    given = {"num_workers": "2", "persistent_workers": "True"}
    more = (CallSite("DataLoader", "data.py", 1, True, given=given),)
    (tmp_path / "data.py").write_text("first = DataLoader(a, num_workers=2, persistent_workers=True)\n")
    found = searched(StandIn(times={WORKERS: 0.7}, more_calls=more), tmp_path)
    assert [(each.code, each.place) for each in found.kept] == [(WORKERS, "train.py:1")]
    assert "data.py" not in found.diff


def test_the_time_column_has_intervals_only_and_every_undecided_row_a_reason(tmp_path: Path) -> None:
    """Also of remedies that exclude each other, and of those without time."""
    foreach = "AdamW(foreach=True)"
    program = StandIn({FUSED: 0.8, foreach: 0.85, UNUSED: 0.9, "x": 1.0}, scatter=0.01, launch_s=4.0)
    for budget_s in (60.0, 120.0, 400.0):
        found = searched(program, tmp_path, budget_s)
        assert all(each.why for each in found.remedies if each.verdict == "undecided")
        assert all(bool(time_text(each)) == (each.ci is not None) for each in found.remedies)
    assert next(each.why for each in found.remedies if each.code == foreach) == (
        f"{FUSED} gained more in its trials"
    )
    assert any(each.percent is not None and each.ci is None for each in found.remedies)


@pytest.mark.parametrize("hang_timeout_s", [None, 1000.0])
def test_what_compiles_for_too_long_is_undecided(tmp_path: Path, hang_timeout_s: float | None) -> None:
    starts_s = {COMPILE: 1000.0}
    program = StandIn({WORKERS: 0.7}, starts_s=starts_s, launch_s=3.0, hang_timeout_s=hang_timeout_s)
    row = next(each for each in searched(program, tmp_path, 120.0).remedies if each.code == COMPILE)
    assert row.verdict == "undecided"
    took = re.fullmatch(r"compiling took longer than (\d+) s", row.why)
    assert program.limits_s["2-alone"] == math.inf
    assert took is not None
    # A step now and then makes it no shorter.
    assert 30 <= int(took[1]) < program.limits_s["2-alone-1"] < 120


def test_an_interval_is_printed_in_one_way(tmp_path: Path) -> None:
    row = RemedyResult(FUSED, "AdamW", "train.py:3", "kept", -46.0, (-55.0, -35.0))
    found = Improvement(1, "train.py", 60.0, Gain(-46.0, (-55.0, -35.0)), (row,), complete=True)
    lines = improve_lines(found, "x")
    assert lines[0].startswith("Faster   46 % less time per step than train.py as it is (35 to 55): ")
    assert "−46 % (−55 to −35)" in lines[-1]
    assert time_text(replace(row, percent=-40.0, ci=(-69.0, 1.0))) == "−40 % (−69 to +1)"
    assert time_text(replace(row, percent=173.0, ci=(62.0, 384.0))) == "+173 % (+62 to +384)"


@pytest.mark.parametrize(("more", "overrides"), [("", ()), ("budget: 60s\n", ()), ("", ("budget=60s",))])
def test_a_job_with_a_budget_of_its_own_is_measured_in_the_time_of_the_search(
    tmp_path: Path, more: str, overrides: tuple[str, ...]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB + more)
    search = object.__new__(RemedySearch)
    given = Invocation(tmp_path / "job.yaml", overrides)
    search.spec = load_invocation(given)
    given = replace(given, overrides=(*overrides, *search.size(2, 20)))
    assert load_invocation(given).steps.launches == 2


def test_a_report_of_a_search_is_its_answer(tmp_path: Path) -> None:
    """Also by `latest`; of what else it might be asked for, its runs are named."""
    place = tmp_path / "runs/1"
    found = Improvement(SCHEMA, "train.py", 60.0, why="it computes", complete=True)
    write_json(place / "improve.json", found)
    (place.parent / "latest").write_text("1\n")
    for path in (place, place.parent, place.parent / "latest"):
        shown = CliRunner().invoke(report, [str(path)])
        assert shown.stdout.splitlines() == improve_lines(found, str(place))
        read = json.loads(CliRunner().invoke(report, [str(path), "--json"]).stdout)["improve"]
        assert (read["why"], read["schema"]) == ("it computes", SCHEMA)
    (place / "1-original").mkdir()
    (place / "1-original/plan.json").write_text("{}")
    with pytest.raises(SpecError, match=r"is a search, not a run: .*; its runs are in it: 1-original"):
        find_run(place)


def test_where_no_search_is_none_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"no search of `gpurun improve` is in {tmp_path}"):
        search_to_resume((), None, tmp_path)
    (search := tmp_path / "1").mkdir()
    (search / "improve.json").write_text("{}")
    (latest := tmp_path / "latest").write_text("1\n")
    assert search_to_resume((), None, latest) == search
    with pytest.raises(SpecError, match="ended before its first launch"):
        given_by((), None, "auto", (), search)()


def test_a_search_of_a_project_that_has_moved_names_its_old_place(tmp_path: Path) -> None:
    for gone in (
        StoredInvocation(f"{tmp_path}/old/job.yaml", ()),
        StoredInvocation("a", (), f"{tmp_path}/old"),
    ):
        for name, content in (("plan.json", {}), ("invocation.json", gone)):
            write_json(tmp_path / "1-original" / name, content)
        with pytest.raises(
            SpecError, match=f"was made in {tmp_path}/old: --resume and --write work there only"
        ):
            given_by((), None, "auto", (), tmp_path)()


def test_a_pipe_in_place_of_a_measured_file_is_not_waited_for(tmp_path: Path) -> None:
    found = searched(StandIn(times={WORKERS: 0.7}), tmp_path)
    (tmp_path / "train.py").unlink()
    os.mkfifo(tmp_path / "train.py")
    with pytest.raises(SpecError, match="has changed since it was measured"):
        changes_to_write(found, tmp_path)


def test_an_argument_of_a_module_may_be_a_python_file() -> None:
    assert search_to_resume(("configs/a.py",), "package.train", None) is None


@pytest.mark.parametrize(("devices", "out"), [("cpu:4", None), ("auto", Path("elsewhere"))])
def test_a_search_is_resumed_where_it_is_and_on_its_devices(
    tmp_path: Path, devices: str, out: Path | None
) -> None:
    (tmp_path / "improve.json").write_text("{}")
    with pytest.raises(SpecError, match="leave --out and --devices out"):
        search_to_resume((), None, tmp_path, devices, out)


def test_json_says_that_the_change_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another directory, where the command line names the program or job there."""
    for name in ("project", "elsewhere"):
        (tmp_path / name).mkdir()
    project = tmp_path / "project"
    found = searched(StandIn(times={WORKERS: 0.7}), project)
    module = "gpurun.launcher.cli.commands.improve"
    monkeypatch.setattr("gpurun.launcher.cli.interrupt.quit_on_interrupt", lambda: None)
    monkeypatch.setattr(f"{module}.finished", lambda *_: (found, project / "found", None))
    monkeypatch.setattr(f"{module}.given_by", lambda *_: lambda: SimpleNamespace(directory=project))
    monkeypatch.chdir(tmp_path / "elsewhere")
    shown = CliRunner().invoke(improve, ["train.py", "--write", "--yes", "--force", "--json"])
    assert json.loads(shown.stdout)["improve"]["written"]
    assert "num_workers=2" in (project / "train.py").read_text()


def test_the_question_names_files_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "val/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = DataLoader(a)\n")
    changes = tuple(
        CallChange(name, 1, "DataLoader", {"num_workers": 2}) for name in ("train.py", "val/train.py")
    )
    asked = list[str]()
    monkeypatch.setattr("click.confirm", lambda text, **_: asked.append(text))
    found = Improvement(SCHEMA, "train.py", 60.0, changes=changes)
    assert not apply(found, SimpleNamespace(directory=tmp_path), yes=False, force=True)
    assert asked == ["Change train.py, val/train.py?"]


def test_next_begins_with_what_draws_other_random_numbers_and_how_much_it_may_gain(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.5}, {WORKERS: OTHERS}, seeded={WORKERS: LOSSES})
    following = answer(searched(program, tmp_path), "found")[2][1]
    assert following.startswith(
        f"{WORKERS} may take 40 % less time per step, with other random numbers: begin"
    )


def test_next_says_for_how_many_remedies_there_was_no_time(tmp_path: Path) -> None:
    program = StandIn({WORKERS: 0.7, COMPILE: 0.6}, starts_s={COMPILE: 15.0}, launch_s=2.3)
    found = searched(program, tmp_path, 200.0)
    assert [each.code for each in found.kept] == [WORKERS]
    assert "; --budget 7m has time for 1 more remedy; " in answer(found, "found")[2][1]
