"""Whole pages, one file each in `tests/snapshots`; `pytest --update` writes them again."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.commands.runs import render_stacks
from gpurun.launcher.cli.main import cli
from gpurun.launcher.inspect.hang_diagnosis import RankView
from gpurun.launcher.inspect.stacks import activity, parse_threads
from gpurun.launcher.report.markdown import summary_markdown
from gpurun.launcher.report.terminal.changes import render_diff, render_trace_diff
from gpurun.launcher.report.terminal.hardware import render_devices
from gpurun.launcher.report.terminal.plan import render_plan
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.tensorboard_plugin.answers.runs import run_answer
from gpurun.launcher.tensorboard_plugin.html import report_data
from gpurun.launcher.tensorboard_plugin.logdir import own
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.diff import diff_traces
from tests.known import known
from tests.sample import COMPARISON
from tests.unit.inspect import test_stacks
from tests.unit.machine import test_host
from tests.unit.report import test_diff_report, test_plan_report
from tests.unit.trace import test_trace_report

Snapshot = Callable[[str, str], None]
RUN = "runs/gpt-splits/latest"
capture = test_trace_report.capture


def bare(text: str) -> str:
    """Without colours, and without spaces at the ends of lines."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(width: int, snapshot: Snapshot) -> None:
    snapshot(f"table-{width}.txt", bare(render_table(COMPARISON, width, plain=False, run_path=RUN)))


@pytest.mark.parametrize("width", [40, 80])
def test_the_table_in_a_pipe(width: int, snapshot: Snapshot) -> None:
    snapshot("table-pipe.txt", render_table(COMPARISON, width, plain=True, run_path=RUN) + "\n")


def test_markdown(snapshot: Snapshot) -> None:
    snapshot("summary.md", summary_markdown(COMPARISON) + "\n")


@pytest.mark.parametrize("width", [60, 80])
def test_the_plan(width: int, snapshot: Snapshot) -> None:
    plan = render_plan(test_plan_report.LONG, test_plan_report.SPEC, width)
    snapshot(f"plan-{width}.txt", re.sub(r"about \d+ \w+", "about DURATION", plan) + "\n")


@pytest.mark.parametrize("width", [60, 120])
def test_devices(width: int, snapshot: Snapshot) -> None:
    found = replace(
        test_host.machine(),
        hostname="node1",
        cpu_model="EPYC",
        cpu_cores=2,
        memory_gib=64.0,
        memory_available_gib=48.0,
    )
    process = replace(known(found.gpus[1].processes)[0], pid=4321, name="python train.py")
    gpus = tuple(replace(gpu, processes=(process,) if gpu.processes else ()) for gpu in found.gpus)
    snapshot(f"devices-{width}.txt", render_devices(replace(found, gpus=gpus), width) + "\n")


def test_diff(snapshot: Snapshot) -> None:
    snapshot("diff.txt", render_diff(test_diff_report.DIFF, 80, details=False) + "\n")


@pytest.mark.parametrize("width", [80, 120])
def test_a_trace(width: int, capture: Path, snapshot: Snapshot) -> None:
    snapshot(f"trace-{width}.txt", render_trace(analyse_paths([capture]), width, details=width > 80))


def test_a_diff_of_traces(capture: Path, snapshot: Snapshot) -> None:
    a, b = (analyse_paths([capture / f"r{rank}.json"]) for rank in (0, 1))
    snapshot("trace-diff.txt", render_trace_diff(diff_traces(a, b), 80))


def test_stacks_of_ranks(snapshot: Snapshot) -> None:
    texts = (test_stacks.IN_BARRIER, test_stacks.IN_FORWARD, test_stacks.IN_BACKWARD)
    views = tuple(
        RankView(rank, 4321 + rank, 7, f"is at {known(activity(threads)).frame}", (), tuple(threads))
        for rank, threads in enumerate(map(parse_threads, texts))
    )
    seen = replace(known(test_stacks.hang(*texts)), ranks=views)
    text = render_stacks("01-ddp-3", seen, {}).replace(test_stacks.LIBRARY, "LIBRARY")
    snapshot("stacks.txt", text.replace(test_stacks.LAUNCHER, "LAUNCHER") + "\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run directory with the comparison alone."""
    found = RunDir(tmp_path / "gpt-splits")
    found.path.mkdir()
    write_json(found.comparison, COMPARISON)
    return found


def test_what_the_tab_and_the_html_file_are_drawn_from(run: RunDir, snapshot: Snapshot) -> None:
    answer = run_answer(own(run))
    del answer["version"], answer["comparison"]
    snapshot("tab-run.json", json.dumps(msgspec.to_builtins(answer), indent=1, ensure_ascii=False) + "\n")
    data = report_data(COMPARISON, run)
    assert {key: data["run"][key] for key in answer} == {**answer, "status": "done"}


def pages(group: click.Group) -> Iterator[str]:
    """The help of all commands, at 80 columns."""
    context = click.Context(group)
    for words in ((), *((name,) for name in group.list_commands(context))):
        shown = CliRunner().invoke(cli, [*words, "--help"], prog_name="gpurun", terminal_width=80)
        yield f"$ {' '.join(('gpurun', *words))} --help\n{shown.output}"


def test_help(snapshot: Snapshot) -> None:
    """In a process of its own: a command is imported at its first use, maybe while a test changes a table."""
    code = f"from {__name__} import cli, pages; print('\\n'.join(pages(cli)), end='')"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    snapshot("help.txt", done.stdout)
