"""A stranger's run or directory that changes while it is read: nothing elsewhere is read or written."""

import gzip
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.commands.report import keep_if_other
from gpurun.launcher.cli.main import cli
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.ranks import read_traced
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import MachineError
from gpurun.launcher.report.tensorboard import SUFFIX, write_tensorboard
from gpurun.launcher.run.find import checked_run, find_run
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.tensorboard_plugin.html import write_html
from gpurun.launcher.trace.analysis.analyse import analyse
from gpurun.launcher.trace.analysis.discover import FoundTraces, find_traces
from gpurun.launcher.trace.merge import merge_traces
from tests.whole import first


def swapped(place: Path, target: Path) -> None:
    place.rename(place.with_name("was"))
    place.symlink_to(target)


MINE = ("report.html", "trace.json", "comparison.json", f"events.out.tfevents.1{SUFFIX}")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A directory in which there is a file by each name that a report may write."""
    (tmp_path / "mine").mkdir()
    for name in MINE:
        (tmp_path / "mine" / name).write_text("mine")
    return tmp_path / "mine"


@pytest.fixture
def traced_run(tmp_path: Path) -> RunDir:
    shutil.copytree("docs/runs/gpt-splits", tmp_path / "traced")
    return find_run(tmp_path / "traced")


@pytest.mark.parametrize("place", first(1, [".", "variants/ddp-2-even"]))
@pytest.mark.parametrize("format", ["html", "tensorboard", "table"])
def test_no_report_is_written_to_where_a_link_leads_that_was_put_there_meanwhile(
    traced_run: RunDir, mine: Path, place: str, format: str
) -> None:
    for table in traced_run.path.glob("variants/*/trace.json"):
        table.unlink()
    comparison = compare_run(traced_run)
    (traced_run.path / "variants/ddp-2-even/trace.json").unlink()
    swapped(traced_run.path / place if place != "." else traced_run.path, mine)
    writers: dict[str, Callable[[Comparison, RunDir], object]] = {
        "html": write_html,
        "tensorboard": write_tensorboard,
        "table": keep_if_other,
    }
    with suppress(MachineError):
        writers[format](replace(comparison, conclusions=1000), traced_run)
    with suppress(MachineError):
        read_traced(traced_run, "ddp-2-even")
    assert {each.name: each.read_text() for each in mine.iterdir()} == dict.fromkeys(MINE, "mine")


def test_no_report_is_written_into_a_run_of_ones_own_that_was_put_in_the_place(
    traced_run: RunDir, tmp_path: Path
) -> None:
    shutil.copytree("docs/runs/balanced", tmp_path / "run")
    run = RunDir(tmp_path / "run")
    comparison = compare_run(traced_run)
    swapped(traced_run.path, run.path)
    with pytest.raises(MachineError, match="another directory was put in the place of the run"):
        write_html(comparison, traced_run)
    assert not (run.path / "report.html").exists()


def test_a_merged_trace_goes_where_its_directory_was_when_it_was_named(
    traced_run: RunDir, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()

    def analyse_and_swap(*arguments: Any, **named: Any) -> Any:
        swapped(tmp_path / "out", mine)
        return analyse(*arguments, **named)

    monkeypatch.setattr("gpurun.launcher.trace.merge.analyse", analyse_and_swap)
    merge_traces([traced_run.variant("ddp-2-even")], tmp_path / "out/trace.json")
    assert (mine / "trace.json").read_text() == "mine"
    assert (tmp_path / "was/trace.json").exists()


VARIANT = "variants/ddp-2-even"
PLACES = (".", "plan.json", "variants", VARIANT, f"{VARIANT}/status.json", "launches/02-ddp-2/log")
COMMANDS = (
    "report R --format json,html",
    "logs R",
    f"trace R/{VARIANT} --merge M",
    f"diff docs/runs/gpt-splits/{VARIANT} R/{VARIANT} --show operators",
)


SWAPS = [(COMMANDS[number % len(COMMANDS)], place) for number, place in enumerate(PLACES)]
SWAPS += [swap for swap in product(COMMANDS, PLACES) if swap not in SWAPS]


@pytest.fixture
def outside(traced_run: RunDir, tmp_path: Path) -> Path:
    """A run of the user's own, whose every name and sentence says so; the stranger's has the same files."""
    log = traced_run.log("02-ddp-2", 0)
    log.parent.mkdir()
    log.write_text("a line of a log\n")
    shutil.copytree(traced_run.path, tmp_path / "outside")
    for path in (each for each in (tmp_path / "outside").rglob("*") if each.is_file()):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for word in (b"gpt-splits", b"aten::addmm", b"a line"):
            text = text.replace(word, b"OUTSIDE")
        if path.name == "status.json":
            text = b'{"status": "failed", "reason": "OUTSIDE"}'
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return tmp_path / "outside"


def shown(command: str, run: Path) -> str:
    """All that a command prints and writes into the run."""
    merged = run.parent / "merged.json"
    words = command.replace("R", str(run)).replace("M", str(merged)).split()
    done = CliRunner().invoke(cli, words)
    made = [each.read_text() for each in (merged, run / "report.html") if each.exists()]
    return "".join([done.output, *made])


@pytest.mark.parametrize("command", first(1, COMMANDS[1:] + COMMANDS[:1]))
def test_the_exploit_would_show(outside: Path, command: str) -> None:
    assert "OUTSIDE" in shown(command, outside)


@pytest.mark.parametrize(("command", "place"), first(len(PLACES), SWAPS))
def test_nothing_is_read_through_a_link_that_was_put_there_after_the_check(
    traced_run: RunDir, outside: Path, place: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap comes as soon as the run has been checked, or the traces have been found."""
    for table in traced_run.path.glob("variants/*/trace.json"):
        table.unlink()
    left = [traced_run.path / place if place != "." else traced_run.path]

    def check_and_swap(directory: Path) -> RunDir:
        found = checked_run(directory)
        swap()
        return found

    def find_and_swap(paths: Any, within: Any) -> FoundTraces:
        found = find_traces(paths, within)
        if paths[0].is_relative_to(traced_run.path):
            swap()
        return found

    def swap() -> None:
        if left:
            swapped(victim := left.pop(), outside / victim.relative_to(traced_run.path))

    monkeypatch.setattr("gpurun.launcher.run.find.checked_run", check_and_swap)
    monkeypatch.setattr("gpurun.launcher.trace.analysis.analyse.find_traces", find_and_swap)
    assert "OUTSIDE" not in shown(command, traced_run.path)
    assert not left
