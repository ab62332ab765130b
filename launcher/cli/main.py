"""The command line: parses, calls one function, prints, exits. Only it and its `commands_*.py` print."""

import gc
import sys
from pathlib import Path
from typing import Any

import click

from gpurun import __version__
from gpurun.launcher.cli.commands.diff import diff
from gpurun.launcher.cli.commands.job_file import register_job_file
from gpurun.launcher.cli.commands.run import run_command
from gpurun.launcher.cli.commands.running import register_running
from gpurun.launcher.cli.commands.submit import submit
from gpurun.launcher.cli.commands.workloads import workloads_command
from gpurun.launcher.cli.options import (
    JobGroup,
    json_option,
    node_flags,
    node_options,
    only_rank_option,
    parse_steps,
    quiet_option,
    set_option,
)
from gpurun.launcher.cli.output import print_comparison, show_json, width
from gpurun.launcher.errors import GpurunError, Interrupted, SpecError
from gpurun.launcher.rundir.writable import check_writable

job_argument = click.argument("job", type=click.Path(path_type=Path), metavar="JOB.yaml")
run_argument = click.argument("run", type=click.Path(path_type=Path), metavar="RUN")


@click.group(
    cls=JobGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: gpurun init && gpurun job.yaml",
)
@click.version_option(__version__, prog_name="gpurun")
def cli() -> None:
    """Run a training workload on every way of splitting its batch over this machine's devices; compare them.

    \b
    gpurun JOB.yaml [--out RUN] [--json] [--resume [RUN]] [--set KEY=VALUE]
        runs the job; `gpurun job --help` tells more
    gpurun run TRAIN.py [--devices cpu:2] [-- ARGS...]
        runs a program unchanged, without a job file
    """


@cli.command("job", short_help="Run a job file; the word `job` may be left out.")
@click.argument("job", type=click.Path(path_type=Path), metavar="[JOB.yaml]", required=False)
@click.option(
    "--out", type=click.Path(path_type=Path), help="The run directory itself; default runs/NAME/TIME."
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value="latest",
    metavar="[RUN]",
    help="Go on with a run, by default the newest of this job: only what is missing is measured.",
)
@node_options
@only_rank_option
@quiet_option
@json_option
@set_option
def job_command(
    job: Path | None,
    out: Path | None,
    resume: Path | None,
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    overrides: tuple[str, ...],
    **place: Any,
) -> None:
    """Run every variant of JOB.yaml, measure and compare them.

    Example: gpurun examples/quickstart.yaml --set steps.rounds=12

    Exit codes: 0 ok (also with variants that are oom, skipped or unsteady), 2 the job file or the command
    line is wrong, 3 the machine lacks what the job asks, 4 a variant failed or timed out, or all of them ran
    out of memory, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt

    quit_on_interrupt()  # until `run_job` listens itself; the supervisor tidies up whatever there is by then
    from gpurun.launcher.processes.guard import split_process

    if job is None and resume is not None and resume.is_file() and resume.name != "latest":
        job, resume = resume, Path("latest")  # `gpurun --resume job.yaml`; runs/NAME/latest is a file, too
    if job is None and resume is None:
        raise SpecError("which job? gpurun JOB.yaml; `gpurun init` writes one to start from")
    if resume is None:
        check_writable(out or Path("runs"))
    with split_process() as guard:  # forks: nothing heavy may be imported before
        from gpurun.launcher.processes.pools import early_servers

        with early_servers(guard) as pools:
            from gpurun.launcher.run.job import Output
            from gpurun.launcher.start import invocation_of, run_job

            given, output = invocation_of(job, overrides), Output(quiet, only_rank)
            finished = run_job(guard, pools, given, out, resume, output, node_flags(**place))
    if finished is None:
        return  # node 0 has the results
    print_comparison(finished.comparison, finished.run.path, as_json)
    if finished.error is not None:
        raise finished.error


def print_lines_to_paste(comparison: Any) -> None:
    """What takes the fastest uneven split home, if there is one."""
    from gpurun.launcher.report.snippet import lines_to_paste

    if text := lines_to_paste(comparison):
        click.echo(f"\n{text}")


@cli.command()
@job_argument
@json_option
@set_option
def check(job: Path, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Validate a job file and print its plan without running anything.

    Example: gpurun check job.yaml --set global_batch=128
    """
    from gpurun.launcher.jobfile.checks.workload import check_files
    from gpurun.launcher.jobfile.load import load_job
    from gpurun.launcher.machine.host import inspect_machine
    from gpurun.launcher.plan.build import build_plan
    from gpurun.launcher.plan.spread import assumed_nodes

    spec = load_job(job, overrides)
    check_files(spec, job.parent)
    machine = inspect_machine()
    plan = build_plan(spec, machine, assumed_nodes(machine, spec.nodes))
    if as_json:
        show_json(plan)
        return
    from gpurun.launcher.report.terminal.plan import render_plan

    click.echo(render_plan(plan, spec, width(), plain=not sys.stdout.isatty()))


@cli.command()
@run_argument
@click.option(
    "--format",
    "formats",
    default="table",
    metavar="LIST",
    help="Of table, json, tensorboard, html; by commas.",
)
def report(run: Path, formats: str) -> None:
    """Render a run again, from its directory alone; for an uneven split also the lines to train with it.

    html is one file that opens anywhere, offline, and can be sent by mail: RUN/report.html.

    Example: gpurun report runs/gpt-splits/latest --format table,html
    """
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.run.open import find_run

    names = [name.strip() for name in formats.split(",")]
    if unknown := set(names) - {"table", "json", "tensorboard", "html"}:
        raise SpecError(f"--format {sorted(unknown)[0]}: there is table, json, tensorboard and html")
    found = find_run(run)
    comparison = compare_run(found)
    for name in names:
        if name == "tensorboard":
            from gpurun.launcher.report.tensorboard.event_files import write_tensorboard

            write_tensorboard(comparison, found)
            click.echo(f"TensorBoard files are in {found.path}; see them: gpurun view {found.path}", err=True)
        elif name == "html":
            from gpurun.launcher.tensorboard_plugin.html import write_html

            click.echo(f"wrote {write_html(comparison, found)}; open it in a browser", err=True)
        else:
            print_comparison(comparison, found.path, as_json=name == "json")
            if name == "table":
                print_lines_to_paste(comparison)


@cli.command()
@run_argument
@click.option("--port", default=0, help="Port on 127.0.0.1; default: a free one.")
def view(run: Path, port: int) -> None:
    """Open TensorBoard for a run, or a folder of runs or Kineto traces, on 127.0.0.1 until Ctrl-C.

    Example: gpurun view runs/gpt-splits/latest
    """
    from gpurun.launcher.tensorboard_plugin.view import open_view

    with open_view(run, port=port) as server:
        click.echo(f"TensorBoard: {server.tab}  (Ctrl-C ends it)")
        server.wait()


@cli.command()
@json_option
def devices(as_json: bool) -> None:
    """Show this machine's GPUs and CPU.

    Example: gpurun devices --json
    """
    from gpurun.launcher.machine.host import inspect_machine

    machine = inspect_machine()
    if as_json:
        show_json(machine)
        return
    from gpurun.launcher.report.terminal.hardware import render_devices

    click.echo(render_devices(machine, width()))


@cli.command()
@click.argument("paths", type=click.Path(path_type=Path), metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--steps", callback=parse_steps, metavar="A:B", help="Only steps A to B, the last one excluded: 10:20."
)
@click.option(
    "--merge",
    type=click.Path(path_type=Path),
    metavar="OUT.json.gz",
    help="Also write one trace of all ranks, on one clock, for Perfetto.",
)
@json_option
def trace(paths: tuple[Path, ...], steps: slice | None, merge: Path | None, as_json: bool) -> None:
    """Say where the time goes in Kineto traces, of gpurun or of any other program.

    PATH is a trace (*.json, *.json.gz) or a folder of them: the ranks of one capture.

    Example: gpurun trace runs/gpt/latest/variants/ddp-2-even --merge all.json.gz
    """
    from gpurun.launcher.run.open import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths

    files = [found for path in paths for found in traces_of(path)]
    if merge is not None:
        from gpurun.launcher.trace.kineto.discover import find_traces
        from gpurun.launcher.trace.merged_file import place_for

        place_for(merge, find_traces(files).files)  # before the traces are read, which may take minutes
    report = analyse_paths(files, steps)
    if steps is not None and not any(rank.steps for rank in report.ranks):
        raise SpecError("\n".join(["no trace has the steps that --steps asks for:", *report.warnings]))
    if merge is not None:
        from gpurun.launcher.trace.merge import merge_traces

        merge_traces(files, merge, steps)
        click.echo(f"wrote {merge}; open it in https://ui.perfetto.dev", err=True)
    if as_json:
        show_json(report)
        return
    from gpurun.launcher.report.terminal.trace import render_trace

    click.echo(render_trace(report, width()), nl=False)


for command in (diff, run_command, workloads_command, submit):
    cli.add_command(command)
register_running(cli)
register_job_file(cli)


def main() -> None:
    """Runs the command; users' mistakes become a message and an exit code, ours keep their traceback."""
    gc.disable()  # imports make many objects and no garbage: looking for some is a tenth of the start-up
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(Interrupted.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except GpurunError as error:
        click.echo(f"gpurun: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
