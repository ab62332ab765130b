"""`gpurun runs` lists what other commands take, and deletes only what is named."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from gpurun.launcher.cli.main import cli
from gpurun.launcher.cli.output import check_steps
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import SpecError, VariantError
from gpurun.launcher.run.open import check_free
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.records import Status
from tests.unit.cli.click_runner import runner

DOCS = Path(__file__).parents[3] / "docs/runs"
OLD, NEW = "runs/gpt/2026-11-20_10-00-00", "runs/gpt/2026-11-21_10-00-00"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`gpurun runs` where `runs/` has two runs of a job."""
    monkeypatch.chdir(tmp_path)
    for at, (path, source) in enumerate(((OLD, "gpt-splits"), (NEW, "balanced"))):
        shutil.copytree(DOCS / source, path)
        os.utime(Path(path) / "comparison.json", (at, at))
    Path("runs/gpt/latest").write_text(f"{Path(NEW).name}\n")

    def called(*words: str) -> Result:
        return runner().invoke(cli, ["runs", *words])

    return called


def test_the_newest_run_is_first_with_its_conclusion(call: Callable[..., Result]) -> None:
    lines = call().stdout.splitlines()
    assert [line.split()[0] for line in lines[1::2]] == [NEW, OLD]
    assert lines[2::2] == [
        f"    {read_json(Path(path, 'comparison.json'), Comparison).headline}" for path in (NEW, OLD)
    ]
    assert call(OLD).stdout.splitlines()[1].split()[0] == OLD
    assert call("runs/gpt/latest", "runs").stdout.count(NEW) == 1


def test_a_run_of_which_all_failed_says_so_and_why(call: Callable[..., Result]) -> None:
    path = Path(NEW, "comparison.json")
    found = json.loads(path.read_text())
    for one in found["variants"]:
        one |= {"status": "timeout", "reason": "rank 1 hangs\n    more", "step_ms": None}
    path.write_text(json.dumps(found))
    row, headline, *_ = call(NEW).stdout.splitlines()[1:]
    assert " failed " in row
    assert headline.endswith("rank 1 hangs")
    found["variants"][0]["status"] = "unsteady"
    path.write_text(json.dumps(found))
    assert " done " in call(NEW).stdout.splitlines()[1]


def test_the_runs_of_a_self_test_are_not_listed(call: Callable[..., Result]) -> None:
    shutil.copytree(DOCS / "balanced", "runs/selftest/2026-11-22_10-00-00/measuring")
    Path("runs/selftest/2026-11-22_10-00-00/selftest.json").write_text("{}")
    assert "selftest" not in call().stdout


def test_the_list_for_a_program_has_exact_figures(call: Callable[..., Result]) -> None:
    newest, _ = json.loads(call("--json").stdout)
    files = [path for path in Path(NEW).rglob("*") if path.is_file()]
    assert newest["run"] == NEW
    assert newest["status"] == "done"
    assert newest["changed_s"] == 1
    assert newest["num_bytes"] == sum(path.stat().st_size for path in files)


def test_a_run_that_is_measured_now_is_said_to_run_and_is_not_deleted(call: Callable[..., Result]) -> None:
    Path(NEW, "comparison.json").unlink()
    assert json.loads(call(NEW, "--json").stdout)[0]["status"] == "stopped"
    with claimed(RunDir(Path(NEW))):
        assert json.loads(call(NEW, "--json").stdout)[0]["status"] == "running"
        refused = call("--delete", NEW)
        assert isinstance(refused.exception, SpecError)
        assert "in use by process" in str(refused.exception)
    assert Path(NEW, "plan.json").exists()


def test_latest_names_a_run_that_is_there(call: Callable[..., Result]) -> None:
    assert "deleted" in call("--delete", "runs/gpt/latest").stderr
    assert not Path(NEW).exists()
    assert Path("runs/gpt/latest").read_text() == f"{Path(OLD).name}\n"
    assert call("--delete", OLD).exit_code == 0
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize("wrong", ["runs/gpt", "runs", "nothing", "runs/link", f"file://{{}}/{OLD}"])
def test_nothing_is_deleted_but_the_runs_that_are_named(
    wrong: str, call: Callable[..., Result], tmp_path: Path
) -> None:
    Path("runs/link").symlink_to(Path(NEW).absolute())
    assert isinstance(call("--delete", OLD, wrong.format(tmp_path)).exception, SpecError)
    assert isinstance(call("--delete").exception, SystemExit)
    assert Path(OLD, "plan.json").exists()
    assert Path(NEW, "plan.json").exists()


def test_a_directory_with_a_plan_of_another_program_is_no_run(
    call: Callable[..., Result], tmp_path: Path
) -> None:
    """Neither is it deleted, nor does it keep runs from being made below it."""
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "mine.py").write_text("pass")
    for words in ((".",), (str(tmp_path),), ("runs/latest/..",)):
        assert isinstance(call("--delete", *words).exception, SpecError), words
    assert (tmp_path / "mine.py").exists()
    check_free(Path("runs/gpt/new"))
    with pytest.raises(SpecError, match="lies inside of the run"):
        check_free(Path(OLD) / "new")


def test_what_a_run_links_to_is_not_deleted(call: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.pt").write_text("weights")
    Path(OLD, "launches/link").symlink_to(tmp_path / "mine")
    call("--delete", OLD)
    assert not Path(OLD).exists()
    assert (tmp_path / "mine/model.pt").exists()


def test_where_there_is_no_run_the_list_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = runner().invoke(cli, ["runs"])
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "gpurun JOB.yaml" in shown.stderr


@pytest.mark.parametrize(
    ("status", "fails"), [("ok", True), ("unsteady", True), ("failed", False), ("timeout", False)]
)
def test_a_program_without_timed_steps_fails_on_request(status: Status, fails: bool) -> None:
    comparison: Any = compare_run(RunDir(DOCS / "balanced"))
    workloads = comparison.variants
    check_steps(replace(comparison, variants=tuple(replace(each, step_ms=None) for each in workloads)))
    program = replace(workloads[0], strategy="script", status=status, step_ms=None)
    found = replace(comparison, variants=(*workloads, program))
    if not fails:  # the failure itself is the error
        check_steps(found)
        return
    with pytest.raises(VariantError, match="no step was timed"):
        check_steps(found)


def test_a_share_is_not_taken_for_a_percentage(call: Callable[..., Result]) -> None:
    said = runner().invoke(cli, ["diff", OLD, NEW, "--fail-slower", "0.03"]).stderr
    assert "'0.03' may be a share or a percentage; write 3% or 0.03%" in said
    for percent in ("0.03%", "1", "0", "0.5"):
        assert "a percentage" not in runner().invoke(cli, ["diff", OLD, NEW, "--fail-slower", percent]).stderr
