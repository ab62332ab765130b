"""`gpurun gate`: is the working copy slower than another version of the code?"""

from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import (
    job_argument,
    json_option,
    only_rank_option,
    out_option,
    parse_percent,
    parse_wait,
    quiet_option,
    set_option,
)
from gpurun.launcher.cli.output import check_gate, print_comparison, rank_starters

BUDGET_S = 600.0


@click.command()
@job_argument
@click.option(
    "--against",
    required=True,
    metavar="REF",
    help="The code before: a git ref, or a directory.",
)
@click.option(
    "--fail-slower",
    "threshold_percent",
    required=True,
    callback=parse_percent,
    metavar="PERCENT",
    help="How much slower a variant's step may become, such as 3%.",
)
@click.option(
    "--budget",
    "budget_s",
    callback=parse_wait,
    metavar="TIME",
    help="Time limit; default: 10m.",
)
@click.option(
    "--with",
    "shared",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Also give REF this file or directory of the working copy: data, or code that isn't committed.",
)
@click.option("--python-a", metavar="PYTHON", help="The interpreter for REF; default: this command's.")
@click.option("--python-b", metavar="PYTHON", help="The interpreter for the working copy.")
@click.option(
    "--metric",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    help="Compare the time of a step (wall), or its CPU time, without waiting for cores (cpu).",
)
@click.option("--require-decision", is_flag=True, help="Fail (exit code 5) where the gate is undecided.")
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Also write JUnit XML.")
@click.option("--markdown", type=click.Path(path_type=Path), metavar="FILE", help="Also write Markdown.")
@out_option
@only_rank_option
@quiet_option
@json_option
@set_option
def gate(
    job: Path,
    out: Path | None,
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    junit: Path | None,
    markdown: Path | None,
    budget_s: float | None,
    require_decision: bool,
    overrides: tuple[str, ...],
    **versions: Any,
) -> None:
    """Find out whether the code became slower: launch it and another version of it in turns until that is
    known.

    Both run the working copy's job file. REF is checked out into a temporary directory, which is removed
    afterwards; files that aren't committed are not in it, unless --with names them.

    Example: gpurun gate job.yaml --against main --fail-slower 3%

    Exit codes: 0 no variant is slower than --fail-slower allows, 2 the job file or the command line is wrong,
    3 the machine lacks what the job needs, 4 a variant failed, 5 a variant is slower, 6 undecided
    (5 with --require-decision), 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.rundir.paths import check_writable

    quit_on_interrupt()
    # A file that exists is written as it is: it may be a pipe, or /dev/stdout.
    files = [file.parent for file in (junit, markdown) if file is not None and not file.exists()]
    if missing := [directory for directory in files if not directory.is_dir()]:
        from gpurun.launcher.errors import no_directory

        raise click.UsageError(no_directory(missing[0]))
    for path in (out or Path("runs"), *files):
        check_writable(path)

    with rank_starters() as pools:
        from gpurun.launcher.run.job import Output
        from gpurun.launcher.run.open import Invocation
        from gpurun.launcher.start_gate import GateRequest, interpreter, run_gate

        a, b = (interpreter(f"--python-{side}", versions.pop(f"python_{side}")) for side in "ab")
        wanted, given = GateRequest(a=a, b=b, **versions), Invocation(job, overrides)
        finished = run_gate(pools, given, wanted, budget_s or BUDGET_S, out, Output(quiet, only_rank))
    print_comparison(finished.comparison, finished.run, as_json)
    write_files(finished, junit, markdown)
    if finished.error is not None:
        raise finished.error
    check_gate(finished.comparison.gate, require_decision)


def write_files(finished: Any, junit: Path | None, markdown: Path | None) -> None:
    """The files that the command line asks for."""
    if junit is None and markdown is None:
        return
    from gpurun.launcher.errors import unwritable
    from gpurun.launcher.plan.model import Plan
    from gpurun.launcher.report.markdown import gate_markdown, junit_xml
    from gpurun.launcher.report.terminal.plan import versions_text

    found, comparison = finished.comparison.gate, finished.comparison
    plan = finished.run.read(finished.run.plan, Plan)
    versions = versions_text(plan.gate) if plan.gate else ""
    for path, render in ((junit, junit_xml), (markdown, gate_markdown)):
        if path is not None:
            try:
                path.write_text(render(comparison, found, versions), encoding="utf-8")
            except OSError as error:
                raise unwritable(path, error) from error
