"""Writes what the pages take from the program: `make docs`, or `python docs/make_pages.py`.

Whole pages: the job file's reference, the workloads, the commands; and `comparison.json` of the recorded
runs. In the others: the floors, limits of the self-test, with how many nodes of a range each engine begins,
and what `gpurun report` prints of a recorded run,
in each code block below a comment `<!-- report of docs/runs/NAME, N columns: COMMAND -->`, or `piped`.
"""

import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

from gpurun.launcher import FLOORS
from gpurun.launcher.cli.main import FURTHER, GROUPS, cli
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.findings.finding_kinds import findings_page
from gpurun.launcher.jobfile.params import workload_reference
from gpurun.launcher.jobfile.schema import job_reference
from gpurun.launcher.nodes.rendezvous import LAST_CALL_S
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.rundir.files import RunDir, as_json
from gpurun.launcher.schedulers import SCHEDULERS
from gpurun.launcher.selftest.machine_checks import LEAST_OF_EARLIER
from gpurun.launcher.selftest.self_test import MOST_EARLIER, RUNS
from gpurun.launcher.units import format_percent

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
_REPORT = re.compile(
    r"(<!-- report of (?P<run>docs/runs/\S+), (?P<width>\d+ columns|piped): (?P<command>.+) -->\n```\n)"
    r".*?(?=^```$)",
    re.DOTALL | re.MULTILINE,
)
_FLOORS = re.compile(r"(?<=<!-- floors -->\n\n).*?(?=\n\n)", re.DOTALL)
_EARLIER = re.compile(r"(?<=<!-- speed as before -->\n\n).*?(?=\n\n)", re.DOTALL)
_ENGINE = re.compile(
    r"(?P<row>^\| (?:`(?P<name>[a-z]+)`|by hand) \|)[^|]*(?=(?: \|[^|]+){3}\|$)", re.MULTILINE
)
"""A row of the table of engines, its name and its second cell."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COMMANDS_HEAD = """\
# Commands

Made by `make docs` from what `gpurun COMMAND --help` prints.

`gpurun JOB.yaml` runs a job file; the word `job` may be left out. `--json` prints JSON on stdout; messages
go to stderr. Every RUN may be a run directory, `runs/NAME` or `runs/NAME/latest` (both mean the newest run of
that name), or, but for `stacks` and `capture`, [the URL of a run in a store](clusters.md#in-a-store).

Exit codes:

| code | meaning |
|---|---|
| 0 | ok, also with variants that ran out of memory, were skipped or stayed unsteady |
| 1 | a bug in gpurun, with its traceback |
| 2 | the job file or the command line is wrong |
| 3 | the machine lacks what the job asks for, a run can't be read or written, or a self-test failed |
| 4 | a variant failed, timed out or hung, all variants ran out of memory, or a node was lost |
| 5 | a gate fails: a variant is slower than `--fail-slower` allows |
| 6 | a gate is undecided: whether a variant is that slow could not be shown |
| 130 | interrupted |
"""


def main() -> None:
    """Writes every page that differs, and names it."""
    for path, text in pages():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def pages() -> Iterator[tuple[Path, str]]:
    """Every page with something made in it, as it should read."""
    made = {
        "docs/job-file.md": job_reference,
        "docs/workloads.md": workload_reference,
        "docs/commands.md": command_reference,
        "docs/findings.md": findings_page,
    }
    for name, make in made.items():
        yield ROOT / name, make()
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        if name not in made:
            text = _FLOORS.sub(floors(), _EARLIER.sub(earlier_limits(), _ENGINE.sub(_with_range, text)))
            yield ROOT / name, _REPORT.sub(_with_report, text)
    for run in sorted((ROOT / "docs" / "runs").iterdir()):
        yield RunDir(run).comparison, as_json(compared(run))


def _with_report(match: re.Match[str]) -> str:
    run, width, command = match["run"], match["width"], match["command"]
    return f"{match[1]}$ {command}\n{report(ROOT / run, None if width == 'piped' else int(width.split()[0]))}"


def _with_range(row: re.Match[str]) -> str:
    """With how many nodes a job with a range of them begins."""
    if row["name"] is None:
        return (
            f"{row['row']} those that have come when {LAST_CALL_S:g} s pass without another one, at least 2"
        )
    queue = SCHEDULERS[row["name"]].queue
    assert queue is not None
    return f"{row['row']} {queue.fewer or 'all 4, when they are there'}"


def floors() -> str:
    """The packages in the order in which they may import each other, from the bottom."""
    rows = (", ".join(f"`{name}`" for name in packages.split()) for packages in FLOORS)
    return textwrap.fill(" · ".join(rows), 130, break_on_hyphens=False)


def earlier_limits() -> str:
    """From where on a device is called slower than before, by the constants of the self-test."""
    of_gpu, of_cpu = (format_percent(100 * LEAST_OF_EARLIER[is_host]) for is_host in (False, True))
    return textwrap.fill(
        "`speed as before` compares a device's rate of float32 products with the fastest of its newest "
        f"{MOST_EARLIER} results in `{RUNS}` (with `--out`, also next to that directory). It fails below "
        f"{of_gpu} of that for a GPU, which is known by its UUID, and below {of_cpu} for a CPU device, which "
        "is known by the machine, its cores and its place among the devices.",
        140,
        break_on_hyphens=False,
    )


def report(run: Path, width: int | None) -> str:
    """The run's table in a terminal of `width` columns, or piped."""
    text = render_table(compared(run), width or 80, width is None, f"runs/{run.name}/latest")
    lines = _COLOUR.sub("", text).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


@cache
def compared(run: Path) -> Comparison:
    """What this gpurun concludes from the files of a recorded run."""
    with tempfile.TemporaryDirectory() as directory:  # what is found in traces is kept with them
        copy = Path(directory) / run.name
        shutil.copytree(run, copy)
        return compare_run(RunDir(copy))


def command_reference() -> str:
    """`docs/commands.md`: every command with its arguments and options, in the groups of `gpurun --help`."""
    context = click.Context(cli, info_name="gpurun")
    parts = [_COMMANDS_HEAD]
    for title, group in {**GROUPS, "Further": FURTHER}.items():
        parts.append(f"## {title}\n")
        for name in group:
            command = cli.get_command(context, name)
            if command is not None and not command.hidden:
                parts.append(_command(name, command, context))
    return "\n".join(parts)


def _command(name: str, command: click.Command, parent: click.Context) -> str:
    context = click.Context(command, info_name=name, parent=parent, terminal_width=1000)
    usage = command.get_usage(context).removeprefix("Usage: ").rstrip()
    lines = [f"### gpurun {name}", "", "```", usage, "```", ""]
    lines += [_prose(part) for part in (command.help or "").replace("\b", "").strip().split("\n\n")]
    options = [
        record
        for each in command.params
        if isinstance(each, click.Option) and (record := each.get_help_record(context))
    ]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in options]
    return "\n".join(lines).rstrip() + "\n"


def _prose(paragraph: str) -> str:
    """A paragraph of a docstring on one line; an example as code."""
    text = " ".join(paragraph.split())
    if text.startswith("Example: "):
        return f"Example: `{text.removeprefix('Example: ')}`\n"
    return text.replace("[", "\\[").replace("*", "\\*") + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
