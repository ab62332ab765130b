"""A gate's run: hand-made run directories with known answers, and what is launched next."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.gate import still_open
from gpurun.launcher.compare.model import Gate
from gpurun.launcher.plan.model import GatePlan, Plan, Side, Variant
from gpurun.launcher.report.markdown import gate_markdown, junit_xml
from gpurun.launcher.report.snippet import lines_to_paste
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.run.attempts import untried_with_same_model
from gpurun.launcher.run.budget import Costs, next_rounds
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, write_json
from gpurun.launcher.rundir.records import Look, VariantFacts
from tests.known import known
from tests.unit.compare import hand_made
from tests.unit.compare.hand_made import DP, EVEN, UNEVEN, Files, launch, plan, wobble
from tests.wording import Wording

A = Side("main", "/tmp/gate/code", "/tmp/gate/code", "", "1a2b3c4d5e")
B = Side("working copy", "/home/me/repo", "/home/me/repo", "", "1a2b3c4d5e with uncommitted changes")


def versions(variant: Variant) -> tuple[Variant, Variant]:
    return (
        replace(variant, id=f"{variant.id}-a", side="a", varied={"code": A.name}),
        replace(variant, id=f"{variant.id}-b", side="b", varied={"code": B.name}),
    )


def gate_plan(*variants: Variant, repetitions: int) -> Plan:
    groups = [version for variant in variants for version in versions(variant)]
    launches = [
        launch(f"{repetition}-{version.id}", version.id, repetition, [version])
        for repetition in range(repetitions)
        for version in (groups if repetition % 2 == 0 else groups[::-1])
    ]
    pairs = tuple((a.id, b.id) for a, b in map(versions, variants))
    gate = GatePlan(3.0, A, B, pairs=pairs)
    return plan(groups, launches, groups[0].id, gate=gate, budget_s=60.0)


def measured(
    directory: Path,
    *ratios: tuple[Variant, float],
    repetitions: int = 8,
    spent: float = 1.0,
    scatter: float = 1.0,
) -> Files:
    """Each variant at 100 ms before, and at `ratio` of it after; the machine gets slower all the time."""
    files = Files(RunDir(directory))
    planned = gate_plan(*(variant for variant, _ in ratios), repetitions=repetitions)
    write_json(files.run.plan, planned)
    for variant, ratio in ratios:
        for version in versions(variant):
            for repetition in range(repetitions):
                ms = (100 + repetition) * (ratio if version.side == "b" else 1.0)
                noisy = ms * (1 + scatter * wobble(repetition + 3 * (version.side == "b")))
                files.rounds(version, f"{repetition}-{version.id}", [noisy] * 3)
            files.close(version)
    append_lines(files.run.looks, [Look(repetitions, spent)])
    return files


def with_load(files: Files) -> Files:
    """The same, with ranks of ddp 32/32 that waited for a core for 12 ms of each step."""
    for version in versions(EVEN):
        hand_made.add_load(files, version, 12.0)
    return files


def gate_of(files: Files) -> Gate:
    return known(compare_run(files.run).gate)


def said_of(files: Files) -> list[str]:
    """What a gate says, the answer first."""
    return [each.sentence for each in compare_run(files.run).findings]


@pytest.mark.parametrize(
    ("ratio", "outcome"), [(1.10, "slower"), (1.0, "not slower"), (0.9, "not slower"), (1.03, "undecided")]
)
def test_a_gate_has_three_outcomes(tmp_path: Path, ratio: float, outcome: str) -> None:
    found = compare_run(measured(tmp_path, (EVEN, ratio)).run)
    gate = known(found.gate)
    (row,) = gate.rows
    assert (gate.outcome, row.label, row.launches) == (outcome, "ddp 32/32", 8)
    assert row.percent == pytest.approx(100 * ratio - 100, abs=0.5)
    begins = {"slower": "Failed: ddp", "not slower": "Passed: ddp", "undecided": "Undecided whether ddp"}
    assert found.headline.startswith(begins[outcome])
    assert found.complete
    assert (found.fastest, found.leader, found.open) == (None, None, ())


def test_one_slower_variant_is_enough(tmp_path: Path) -> None:
    files = measured(tmp_path, (EVEN, 1.0), (DP, 1.10))
    assert [row.outcome for row in gate_of(files).rows] == ["not slower", "slower"]
    assert said_of(files)[0].startswith("Failed: dp 32/32 is 10")
    assert "slower than at main" in said_of(files)[0]


def test_steps_of_both_versions_differ_by_what_is_said_of_them(tmp_path: Path) -> None:
    """The first variant has left after 6 pairs; the machine was faster then."""
    files = measured(tmp_path, (EVEN, 1.0), (DP, 1.03), repetitions=12)
    a, b = versions(EVEN)
    for version in (a, b):
        for rank in range(2):
            path = files.run.steps(version.id, rank)
            path.write_text("".join(path.read_text().splitlines(True)[: 6 * 3 * 2]))
    steps = files.run.steps(versions(DP)[1].id, 0)
    steps.write_text("".join(line for line in steps.read_text().splitlines(True) if '"3-' not in line))
    for row in gate_of(files).rows:
        assert known(row.b_ms) / known(row.a_ms) - 1 == pytest.approx(known(row.percent) / 100)


def test_what_is_undecided_is_launched_again_in_both_versions(tmp_path: Path) -> None:
    files = measured(tmp_path, (EVEN, 1.0), (DP, 1.03), spent=0.2)
    found, costs = compare_run(files.run), (lambda _: Costs(start_s=2.0, block_s=0.2))
    assert not found.complete
    rounds = next_rounds(found, 8, costs, 48.0)
    assert set(rounds) == set(still_open(known(found.gate))) == {f"{DP.id}-a", f"{DP.id}-b"}
    assert len(set(rounds.values())) == 1


def test_nothing_is_launched_once_the_outcome_is_known(tmp_path: Path) -> None:
    found = compare_run(measured(tmp_path, (EVEN, 1.10), (DP, 1.03), spent=0.2).run)
    assert next_rounds(found, 8, lambda _: Costs(2.0, 0.2), 48.0) == {}
    assert found.complete


def test_the_report_says_how_long_it_would_take(tmp_path: Path, wording: Wording) -> None:
    near = compare_run(measured(tmp_path / "near", (EVEN, 1.038), scatter=4.0).run)
    (longer,) = (each for each in near.findings if each.code == "measure-longer")
    assert longer.figures["decides_minutes"] > 1  # that has been spent
    wording(said_of(measured(tmp_path / "equal", (EVEN, 1.03), scatter=8.0)))
    wording(said_of(measured(tmp_path / "close", (EVEN, 1.0299), scatter=0.5)))
    wording(said_of(measured(tmp_path / "few", (EVEN, 1.0), repetitions=3)))


@pytest.mark.parametrize("outcome", ["slower", "not slower"])
def test_load_is_said_and_widens_no_bound(tmp_path: Path, outcome: str, wording: Wording) -> None:
    files = measured(tmp_path, (EVEN, 1.3 if outcome == "slower" else 0.8))
    quiet, loaded = gate_of(files), gate_of(with_load(files))
    assert quiet.outcome == loaded.outcome == outcome
    assert [row.ci for row in quiet.rows] == [row.ci for row in loaded.rows]
    wording(said_of(with_load(files)))


@pytest.mark.parametrize(("cpu_ms", "outcome"), [(57.5, "slower"), (50.0, "not slower"), (51.5, "undecided")])
def test_cpu_time_decides_where_the_time_of_a_step_does_not(
    tmp_path: Path, cpu_ms: float, outcome: str, wording: Wording
) -> None:
    files = with_load(measured(tmp_path, (EVEN, 1.0), scatter=80.0))
    wording(said_of(files))
    for version, ms in zip(versions(EVEN), (50.0, cpu_ms), strict=True):
        hand_made.add_cpu_time(files, version, ms)
    plan = read_json(files.run.plan, Plan)
    write_json(files.run.plan, replace(plan, gate=replace(known(plan.gate), metric="cpu")))
    comparison = compare_run(files.run)
    gate = known(comparison.gate)
    (row,) = gate.rows
    assert (gate.outcome, row.a_ms) == (outcome, pytest.approx(100, rel=0.01))  # two ranks
    wording(said_of(files))
    assert "A: CPU ms" in gate_markdown(comparison, gate, "")
    assert [variant.vs_baseline for variant in comparison.variants] == [
        None,
        None,
    ]  # the table has the time of a step


def test_a_gate_proposes_no_split(tmp_path: Path) -> None:
    assert lines_to_paste(compare_run(measured(tmp_path, (UNEVEN, 1.1)).run)) is None


def test_a_version_that_failed_leaves_it_undecided_at_once(tmp_path: Path, wording: Wording) -> None:
    files = measured(tmp_path, (EVEN, 1.0), repetitions=2, spent=0.1)
    files.close(versions(EVEN)[1], status="failed", reason="ValueError")
    found = compare_run(files.run)
    wording(found.headline)
    assert found.complete  # starting it again would find the same
    assert next_rounds(found, 2, lambda _: Costs(2.0, 0.2), 48.0) == {}


def test_nothing_is_launched_where_a_failed_variant_leaves_the_gate_undecided(tmp_path: Path) -> None:
    files = measured(tmp_path, (EVEN, 1.0), (DP, 1.03), spent=0.2)
    files.close(versions(EVEN)[1], status="failed", reason="ValueError")
    gate = gate_of(files)
    assert [(row.outcome, row.is_open) for row in gate.rows] == [("undecided", False), ("undecided", True)]
    assert still_open(gate) == ()


def test_a_failure_of_one_version_is_none_of_the_other(tmp_path: Path, wording: Wording) -> None:
    """They build what may be different models: the other one is started, too."""
    files = measured(tmp_path, (EVEN, 1.0), repetitions=1, spent=0.1)
    plan = read_json(files.run.plan, Plan)
    before, after = (version.id for version in versions(EVEN))
    for rank in range(2):
        files.run.steps(after, rank).unlink()
    assert untried_with_same_model(files.run, plan, [before]) == ()
    files.close(versions(EVEN)[0], status="failed", reason="FileNotFoundError")
    wording(said_of(files))


def test_files_of_the_other_version_void_it(tmp_path: Path, wording: Wording) -> None:
    files = measured(tmp_path, (EVEN, 1.2))
    stray = {"train.py": "1", "../../../home/me/repo/library/x.py": "2"}
    write_json(files.run.facts(versions(EVEN)[0].id), VariantFacts(code=stray))
    write_json(
        files.run.facts(versions(EVEN)[1].id), VariantFacts(code={"train.py": "1", "library/x.py": "2"})
    )
    assert gate_of(files).outcome == "undecided"
    wording(said_of(files))


def test_a_file_of_the_version_before_voids_the_new_one_too(tmp_path: Path) -> None:
    files = measured(tmp_path, (EVEN, 1.2))
    stray = os.path.relpath(f"{A.root}/library/x.py", B.job_dir)
    write_json(files.run.facts(versions(EVEN)[1].id), VariantFacts(code={"train.py": "1", stray: "2"}))
    (row,) = gate_of(files).rows
    assert row.outcome == "undecided"
    assert "library/x.py" in known(row.why)


def test_equal_code_is_said(tmp_path: Path, wording: Wording) -> None:
    files = measured(tmp_path, (EVEN, 1.0))
    for version in versions(EVEN):
        write_json(files.run.facts(version.id), VariantFacts(code={"train.py": "1"}))
    wording(said_of(files))


def test_every_report_gives_the_same_answer(tmp_path: Path, wording: Wording) -> None:
    found = compare_run(measured(tmp_path, (EVEN, 1.10), (DP, 1.0)).run)
    gate, where = known(found.gate), "A: main   B: working copy"
    table = render_table(found, 200, plain=True)
    assert found.findings[0].text in table
    assert "slower" in table.splitlines()[0]
    assert "| slower |" in gate_markdown(found, gate, where)
    xml = junit_xml(found, gate, where)
    assert xml.count("<testcase ") == 2
    assert xml.count("<failure ") == 1
    wording(xml)
    wording(gate_markdown(found, gate, where))
    open_ = compare_run(measured(tmp_path / "few", (EVEN, 1.0), repetitions=3).run)
    wording(junit_xml(open_, known(open_.gate), where))
    assert "over all looks" not in gate_markdown(open_, known(open_.gate), where)


def test_a_gate_that_was_stopped_is_to_be_started_again(tmp_path: Path, wording: Wording) -> None:
    files = measured(tmp_path, (EVEN, 1.03), spent=0.2)
    shown = render_table(compare_run(files.run), 100, plain=True, run_path="runs/x")
    wording(shown)
    assert "--resume" not in shown
