"""Whatever became of a run: every view reads it from the directory alone, and all say the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.launcher.cli.main import cli
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.findings.finding import screen_of
from gpurun.launcher.report.footnotes import with_next_step
from gpurun.launcher.report.markdown import summary_markdown
from gpurun.launcher.report.tensorboard import write_tensorboard
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.tensorboard_plugin.answers.runs import run_answer
from gpurun.launcher.tensorboard_plugin.html import report_data
from gpurun.launcher.tensorboard_plugin.logdir import own
from tests.integration.command import Result, ending
from tests.said import said_outside_the_table
from tests.unit.cli.click_runner import runner

Made = Callable[[str], Result]
STATUSES = {
    "splits": ["ok", "ok"],
    "strategies": ["ok"] * 4,
    "failed": ["ok", *["failed"] * 6, "ok"],
    "hang": ["ok", "timeout", "ok"],
    "out_of_memory": ["ok", "ok", "ok", "oom"],
    "interrupted": ["ok", "ok"],
    "program": [*["ok"] * 8, "failed", "failed"],
    "nodes": ["ok", "ok"],
    "gate": ["ok", "ok"],
    "search": ["ok"] * 3,
}
"""What became of the variants of each run."""
CODES = {"failed": 4, "hang": 4, "interrupted": 130, "program": 4, "gate": 5}
"""The command's exit code where it isn't 0."""


def said(*words: str, code: int = 0) -> str:
    """What `gpurun WORDS` prints."""
    done = runner().invoke(cli, words, terminal_width=200)
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.mark.parametrize("name", STATUSES)
def test_the_command_and_its_reports_say_what_became_of_each_variant(
    name: str, canonical_run: Made, tmp_path: Path
) -> None:
    made = canonical_run(name).ended(CODES.get(name, 0))
    measured = [ending(variant) for variant in made.comparison["variants"]]
    if name == "search":  # how many of the combinations are measured to the end is the machine's affair
        assert set(measured) == {"ok"}
    else:
        assert measured == STATUSES[name]
    run = RunDir(shutil.copytree(made.directory / "run", tmp_path / "run"))
    comparison = compare_run(run)
    assert comparison.findings[0].text == made.comparison["findings"][0]["text"]
    assert said_outside_the_table(comparison.findings) == set()
    write_tensorboard(comparison, run)
    for text in (render_table(comparison, 200, plain=True), summary_markdown(comparison).replace("\\", "")):
        assert words(comparison.headline).partition(": ")[2].removesuffix(".") in words(text)
        unnamed = [each.id for each in comparison.variants if not {*label_of(each)} <= {*text.split()}]
        assert not unnamed or name in ("gate", "search")  # whose tables shorten names
    screen = screen_of(comparison.findings)
    shown = render_table(comparison, 200, plain=True).partition("\n\n")[0].splitlines()
    if comparison.complete:  # else the next step is to go on
        assert [line.split("  ")[0] for line in shown[: len(screen.lines)]] == [x for x, _ in screen.lines]
        assert all(text in line for (_, text), line in zip(screen.lines, shown, strict=False))
    codes = [each["code"] for each in made.comparison["findings"]]
    assert codes == [each.code for each in comparison.findings]
    screen = screen_of(
        with_next_step(comparison, run.path.name).findings
    )  # of one that isn't complete, the next step is to go on
    for answer in (run_answer(own(run)), report_data(comparison, run)["run"]):
        assert answer["headline"] == comparison.headline
        assert all(text in answer["details"] for _, text in screen.lines[1:])
        assert str(tmp_path) not in answer["details"]  # the file may be given to others
        assert [ending(variant) for variant in answer["variants"]] == measured


def label_of(variant: VariantResult) -> list[str]:
    """The words of its label, which has several columns in a table."""
    return variant_label(variant).split()


def words(text: str) -> str:
    """The same text on one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", STATUSES)
def test_the_list_of_runs_has_its_answer(name: str, canonical_run: Made) -> None:
    made = canonical_run(name)
    (listed,) = json.loads(said("runs", str(made.directory / "run"), "--json"))
    assert made.comparison["findings"][0]["text"][1:] in listed["headline"]


@pytest.mark.parametrize("name", ["splits", "program", "nodes"])
def test_traces_are_read_rank_by_rank(name: str, canonical_run: Made) -> None:
    made = canonical_run(name)
    traced = [each for each in made.comparison["variants"] if any(rank["trace"] for rank in each["ranks"])]
    for variant in traced:
        directory = str(made.directory / "run" / "variants" / variant["id"])
        found = json.loads(said("trace", directory, "--json"))
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert bool(traced) == (name != "nodes")


@pytest.mark.parametrize("name", ["splits", "strategies", "out_of_memory", "interrupted"])
def test_a_run_differs_from_itself_by_nothing(name: str, canonical_run: Made) -> None:
    run = str(canonical_run(name).directory / "run")
    done = runner().invoke(cli, ["diff", run, run, "--json"])
    assert done.exit_code == 0, done.output
    assert "are the same run" in done.stderr


@pytest.mark.parametrize("name", ["failed", "out_of_memory"])
def test_logs_have_the_last_line_of_every_rank(name: str, canonical_run: Made) -> None:
    run = canonical_run(name).directory / "run"
    logs = [path for path in sorted(run.glob("launches/*/log/rank*.log")) if path.read_text().strip()]
    assert logs
    for path in logs:
        shown = said("logs", str(run), "--launch", path.parents[1].name)
        rank = path.stem.removeprefix("rank")
        assert f"[rank {rank}] {path.read_text().splitlines()[-1]}" in shown.splitlines()
