"""What a resumed run keeps and measures again, in a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Launch
from gpurun.launcher.run.attempts import (
    Begun,
    Remaining,
    is_tried_again,
    merged_facts,
    resumption,
    resumption_text,
    rounds_done,
    status_of,
)
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import LaunchHead, StepRecord, VariantFacts, VariantRef, VariantStatus
from tests.unit.plan.machines import FakeMachine
from tests.unit.run.session_case import EVEN, SPLIT
from tests.wording import Wording

THIRD = "ddp-2-7-1"
MACHINE: Any = FakeMachine(cpu_cores=8)
PLAN = build_plan(
    load_text(
        "workload: gpt\nglobal_batch: 8\ndevices: cpu:2\ncompare: {split: [even, [6, 2], [7, 1]]}\n"
        "steps: {rounds: 6, launches: 4}\n",
        "job.yaml",
        (),
        Path(),
    ),
    MACHINE,
)
ALL = frozenset((EVEN, SPLIT, THIRD))
COMPLETE = [Begun(launch, ALL, Remaining(())) for launch in PLAN.launches]
KILLED = VariantStatus("oom", "rank 1 was killed by the kernel's OOM killer")
TOO_LARGE = VariantStatus("oom", "rank 0 raised OutOfMemoryError: tried to allocate 2 GiB")
LATE = VariantStatus("timeout", "took longer than 5 s: rank 1 is in `forward` (model.py:3)")


def without(*variants: str, done: int = 0) -> Begun:
    """The first launch, in which some are still to be measured, next to the baseline."""
    rounds = dict.fromkeys((*variants, EVEN), 6 - done)
    return Begun(PLAN.launches[0], ALL - {*variants}, Remaining(variants, rounds, 1, done))


def test_each_kind_of_what_is_left_has_its_words(wording: Wording) -> None:
    rest = COMPLETE[1:]
    for lost, again, replaced, begun in (
        ({}, (), {}, COMPLETE),
        ({}, (), {}, []),
        ({}, (), {}, [without(SPLIT, THIRD, done=2)]),
        ({SPLIT: KILLED}, (SPLIT,), {}, [without(SPLIT), *rest]),
        ({SPLIT: LATE, THIRD: LATE}, (SPLIT, THIRD), {}, [without(SPLIT, THIRD), *rest]),
        ({THIRD: TOO_LARGE}, (), {}, COMPLETE),
        ({SPLIT: LATE, THIRD: TOO_LARGE}, (SPLIT,), {}, [without(SPLIT), *rest[:1]]),
        ({}, (), {"01-ddp-2": "the software"}, [replace(without(*ALL), finished=frozenset()), *rest]),
        ({}, (), {"01-ddp-2": "train.py"}, [replace(without(*ALL), finished=frozenset()), *rest]),
    ):
        wording(resumption_text(resumption(PLAN, lost, again, replaced, begun)))


def test_what_a_budget_begins_later_is_not_known() -> None:
    found = resumption(replace(PLAN, budget_s=60.0), {}, (), {}, COMPLETE[:1])
    assert found.not_begun is None
    assert "begins" not in resumption_text(found)


def cause(code: int | None) -> Failure:
    return Failure(1, None, "exit", "", "", "", None, (), False, code=code)


@pytest.mark.parametrize(
    ("status", "code", "again"),
    [
        ("oom", -9, True),
        ("oom", 1, False),
        ("oom", None, False),
        ("failed", 1, True),
        ("timeout", None, True),
        ("hung", None, True),
        ("skipped", None, True),
    ],
)
def test_only_what_ran_out_of_memory_by_itself_is_left_out(
    status: Any, code: int | None, again: bool
) -> None:
    assert is_tried_again(VariantStatus(status), cause(code)) is again
    assert is_tried_again(VariantStatus(status), None) is (status != "oom")


@given(st.dictionaries(st.sampled_from(sorted(ALL)), st.sampled_from([KILLED, TOO_LARGE, LATE])), st.data())
def test_every_lost_variant_is_named_once(lost: dict[str, VariantStatus], data: st.DataObject) -> None:
    again = data.draw(st.sets(st.sampled_from(sorted(lost)))) if lost else set()
    found = resumption(PLAN, lost, again, {}, COMPLETE)
    assert found.again.keys() == again
    assert {*found.left_out} == lost.keys() - again
    text = resumption_text(found)
    assert all(text.count(name) == 1 for name in lost)


def begin(run: RunDir, launch: Launch) -> None:
    write_json(run.launch_config(launch.id), LaunchHead(tuple(VariantRef(v, None) for v in launch.variants)))


@pytest.mark.parametrize(("num_unsteady", "status"), [(2, "ok"), (3, "unsteady")])
def test_a_variant_is_unsteady_if_it_was_in_more_than_half_of_its_launches(
    tmp_path: Path, num_unsteady: int, status: str
) -> None:
    run = RunDir(tmp_path)
    for number, launch in enumerate(PLAN.launches):
        begin(run, launch)
        facts = VariantFacts(unsteady="60 steps were too few" if number < num_unsteady else None)
        write_json(run.launch_facts(launch.id), {EVEN: facts})
    assert status_of(merged_facts(run, PLAN, EVEN)).status == status


def test_a_launch_goes_on_after_the_rounds_that_all_of_its_variants_have(tmp_path: Path) -> None:
    run, launch = RunDir(tmp_path), PLAN.launches[0]
    begin(run, launch)
    for variant, rounds in ((EVEN, 3), (SPLIT, 2), (THIRD, 2)):
        steps = [
            StepRecord(launch.id, number + 1, 0, number, "timed", 10**8, {}, None) for number in range(rounds)
        ]
        for rank in (0, 1):
            append_lines(run.steps(variant, rank), steps)
    assert rounds_done(run, PLAN, launch, (EVEN, SPLIT, THIRD)) == 2
    assert rounds_done(run, PLAN, launch, (EVEN,)) == 3
