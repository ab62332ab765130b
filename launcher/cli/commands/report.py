"""`gpurun report`, `view`, `metrics`, `diff` and `trace`: what runs and traces show; they run nothing."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpurun.launcher.cli.options import (
    READ,
    WholeNumber,
    json_option,
    parse_percent,
    parse_steps,
    parse_tables,
    run_argument,
)
from gpurun.launcher.cli.output import check_gate, line_width, print_comparison, show_json, width
from gpurun.launcher.errors import MachineError, SpecError

if TYPE_CHECKING:
    from gpurun.launcher.trace.requested_tables import Table


def print_table(comparison: Any, run: Any) -> None:
    """The table, and the lines that put the fastest uneven split into a training script, if there is one."""
    from gpurun.launcher.report.snippet import lines_to_paste

    print_comparison(comparison, run, as_json=False)
    if text := lines_to_paste(comparison):
        click.echo(f"\n{text}")


def print_json(comparison: Any, run: Any) -> None:
    """The whole comparison, for a program."""
    print_comparison(comparison, run, as_json=True)


def write_for_tensorboard(comparison: Any, run: Any) -> None:
    """TensorBoard's files in the run directory."""
    from gpurun.launcher.report.tensorboard.event_files import write_tensorboard
    from gpurun.launcher.rundir.store import source_of

    write_tensorboard(comparison, run)
    source = source_of(run.path)
    click.echo(f"TensorBoard files are in {run.path}; to view them: gpurun view {source}", err=True)


def write_page(comparison: Any, run: Any, with_host: bool = False) -> None:
    """One HTML file with everything in it."""
    from gpurun.launcher.tensorboard_plugin.html import write_html

    click.echo(f"wrote {write_html(comparison, run, with_host)}; open it in a browser", err=True)


def log_to(name: str, comparison: Any, run: Any, with_host: bool = False) -> None:
    """A run of an experiment tracker, and one per variant."""
    from gpurun.launcher.report.tensorboard.event_files import run_name
    from gpurun.launcher.report.trackers import Logged, log_comparison
    from gpurun.launcher.tensorboard_plugin.html import comparison_without_host, render_html

    def logged() -> Logged:
        shown = comparison if with_host else comparison_without_host(comparison, run)
        return Logged(shown, run_name(run), render_html(comparison, run, with_host))

    click.echo(log_comparison(name, logged), err=True)


FORMATS: dict[str, Callable[..., None]] = {
    "table": print_table,
    "json": print_json,
    "tensorboard": write_for_tensorboard,
    "html": write_page,
    "mlflow": partial(log_to, "mlflow"),
    "wandb": partial(log_to, "wandb"),
}
"""Values of `--format`."""
FOR_OTHERS = ("html", "mlflow", "wandb")
"""Formats without host names, unless `--with-host` is given."""


@dataclass(frozen=True)
class Concluded:
    """The part of a stored comparison that shows which version of gpurun made it."""

    conclusions: int = 0


def keep_if_other(comparison: Any, run: Any) -> None:
    """Writes `comparison.json` of an own run again where another gpurun wrote it, as the tab shows it."""
    from gpurun.launcher.rundir.control import write_in
    from gpurun.launcher.rundir.files import as_json

    with suppress(MachineError):  # there is none yet, or it can't be written: what is shown needs none
        if run.read(run.comparison, Concluded).conclusions != comparison.conclusions:
            write_in(run, run.comparison, as_json(comparison).encode(), is_asked=False)


@click.command()
@run_argument
@click.option(
    "--format",
    "formats",
    default="table",
    metavar="LIST",
    help=f"{', '.join(FORMATS)}: one or several, separated by commas.",
)
@json_option
@click.option(
    "--with-host",
    is_flag=True,
    help="Keep host names, addresses, GPU UUIDs and other processes in html, mlflow and wandb.",
)
def report(run: Path, formats: str, as_json: bool, with_host: bool) -> None:
    """Show the results of a run again, without running anything. If an uneven split is ahead, also print
    the code to use it in a training script.

    The format html writes RUN/report.html, a single file that opens offline in any browser. It has no host
    names, GPU UUIDs or other users' processes unless --with-host is given.

    The formats mlflow and wandb log the comparison to MLflow or Weights & Biases, if that is installed: a run
    with the report, and one per variant. Their own variables say where to: MLFLOW_TRACKING_URI, WANDB_PROJECT
    and so on. W&B is offline unless WANDB_MODE=online.

    Example: gpurun report runs/gpt-splits/latest --format table,html
    """
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.jobfile.yaml.describe import near_or_all
    from gpurun.launcher.run.open import find_run

    names = ["json"] if as_json else [name.strip() for name in formats.split(",")]
    for name in names:
        if name not in FORMATS:
            raise SpecError(f"--format {name}: {near_or_all(name, FORMATS, 'formats')}")
    found = find_run(run)
    say_if_large(found)
    comparison = compare_run(found)
    keep_if_other(comparison, found)
    for name in names:
        keep = {"with_host": with_host} if name in FOR_OTHERS else {}
        FORMATS[name](comparison, found, **keep)


def warn(text: str) -> None:
    """Says on stderr what doesn't end the command."""
    click.echo(f"gpurun: {text}", err=True)


SAID_FROM_BYTES = 500_000_000
"""A terminal is warned of more steps; to read so many takes some seconds."""


def say_if_large(*runs: Any) -> None:
    """Says on a terminal why nothing is shown for a while."""
    from gpurun.launcher.rundir.paths import num_bytes

    num = sum(num_bytes(file) for run in runs for file in run.path.glob("variants/*/rank*.jsonl"))
    if num >= SAID_FROM_BYTES and sys.stderr.isatty():
        warn(f"reading {num / 1e9:.1f} GB of recorded steps … (Ctrl-C ends it)")


port_option = click.option(
    "--port", type=WholeNumber(0, 65535), default=0, help="Port on 127.0.0.1; default: a free one."
)


@click.command()
@run_argument
@port_option
def view(run: Path, port: int) -> None:
    """Open TensorBoard for a run, or a directory of runs or Kineto traces, on 127.0.0.1 until Ctrl-C.

    Example: gpurun view runs/gpt-splits/latest
    """
    from gpurun.launcher.rundir.store import refreshed, source_of
    from gpurun.launcher.tensorboard_plugin.view import is_empty, open_view

    with refreshed(run, warn), open_view(run, port=port) as server:
        click.echo(f"TensorBoard: {server.tab}  (Ctrl-C ends it)")
        if is_empty(run):
            place = source_of(run)
            warn(
                f"{place} has no run, trace or event file yet; the page fills in when one is written:"
                f" gpurun JOB.yaml --out {place}/NAME"
            )
        server.wait()


@click.command()
@run_argument
@port_option
def metrics(run: Path, port: int) -> None:
    """Serve the live figures of a run as OpenMetrics, for Prometheus, on 127.0.0.1 until Ctrl-C.

    Of runs/NAME/latest, each scrape gets the newest run.

    Example: gpurun metrics runs/gpt-splits/latest --port 9400
    """
    from gpurun.launcher.rundir.store import refreshed
    from gpurun.launcher.tensorboard_plugin.openmetrics import PATH, metrics_server

    with refreshed(run, warn), metrics_server(run, port) as server:
        click.echo(f"OpenMetrics: http://127.0.0.1:{server.port}{PATH}  (Ctrl-C ends it)")
        server.serve_forever()


@click.command()
@click.argument("a", type=READ, metavar="A")
@click.argument("b", type=READ, metavar="B")
@click.option(
    "--fail-slower",
    "fail_slower_percent",
    callback=parse_percent,
    metavar="PERCENT",
    help="Exit with 5 if a variant of B is slower by more than this, such as 3%, with 6 if that is unclear.",
)
@click.option(
    "--allow",
    "may_differ",
    multiple=True,
    metavar="KEY",
    help="Compare variants although they differ in this setting: params.",
)
@click.option(
    "--show",
    type=click.Choice(["operators"]),
    help="Of traces, show the tree of modules and operators instead: "
    "what is new, gone, slower or faster, and what calls it.",
)
@json_option
def diff(
    a: Path,
    b: Path,
    fail_slower_percent: float | None,
    may_differ: tuple[str, ...],
    show: str | None,
    as_json: bool,
) -> None:
    """Compare run B with run A, variant by variant, or two directories of traces.

    Two past runs can't show whether the code or the machine changed: for a gate in CI see `gpurun gate`.

    Example: gpurun diff runs/gpt/before runs/gpt/latest --fail-slower 3%

    Example: gpurun diff traces/before traces/after --show operators

    Exit codes: 0 ok, 2 the command line is wrong; with --fail-slower: 5 a variant is slower than it allows, 6
    undecided.
    """
    from gpurun.launcher.cli.named import are_runs

    if are_runs(a, b):
        if show:
            raise SpecError(f"--show {show} compares traces; name their directories: RUN/variants/ID")
        diff_two_runs(a, b, fail_slower_percent, may_differ, as_json)
    elif fail_slower_percent is not None:
        raise SpecError(
            "--fail-slower applies to runs: a trace has too few steps to distinguish a change from noise"
        )
    elif may_differ:
        raise SpecError("--allow applies to runs; traces of different work can always be compared")
    else:
        diff_two_captures(a, b, show is not None, as_json)


def diff_two_runs(
    a: Path, b: Path, fail_slower_percent: float | None, may_differ: tuple[str, ...], as_json: bool
) -> None:
    """How run B differs from run A, and whether that is too much."""
    from dataclasses import replace

    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.compare.diff import diff_runs, gated
    from gpurun.launcher.run.open import find_run
    from gpurun.launcher.rundir.store import source_of

    check_settings(may_differ)
    found = find_run(a), find_run(b)
    if found[0].path.resolve() == found[1].path.resolve():
        click.echo(f"A and B are the same run: {source_of(found[0].path)}", err=True)
    say_if_large(*found)
    runs = compare_run(found[0]), compare_run(found[1])
    name_a, name_b = (str(source_of(one.path)) for one in found)
    difference = replace(diff_runs(*runs, may_differ=may_differ), name_a=name_a, name_b=name_b)
    if fail_slower_percent is not None:
        difference = gated(difference, *runs, fail_slower_percent)
    if as_json:
        show_json(difference)
    else:
        from gpurun.launcher.report.terminal.changes import render_diff

        click.echo(render_diff(difference, line_width()))
    if difference.gate is not None:
        check_gate(difference.gate)


def check_settings(names: tuple[str, ...]) -> None:
    """Whether runs can differ in these settings.

    Raises:
        SpecError: one is no setting, or never keeps variants from being compared.
    """
    from gpurun.launcher.jobfile.settings import SETTINGS
    from gpurun.launcher.jobfile.yaml.describe import near_or_all

    known = [name for name, one in SETTINGS.items() if not one.same_work]
    for name in names:
        if name not in known:
            raise SpecError(f"--allow {name}: {near_or_all(name, known, 'settings')}")


def diff_two_captures(a: Path, b: Path, as_tree: bool, as_json: bool) -> None:
    """Operators and kernels that grew from the traces in A to those in B; `as_tree`: by what calls them."""
    from gpurun.launcher.cli.named import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths
    from gpurun.launcher.trace.diff import diff_traces

    own: tuple[Table, ...] = ("operators",) if as_tree else ("shapes",)
    tables: tuple[Table, ...] = ("shapes", "operators") if as_json else own
    named = (traces_of(a), traces_of(b))
    reports = [analyse_paths(one.paths, show=frozenset(tables), within=one.within) for one in named]
    difference = diff_traces(*reports)
    if as_json:
        show_json(difference)
        return
    from gpurun.launcher.report.terminal.changes import render_operator_changes, render_trace_diff

    render = render_operator_changes if as_tree else render_trace_diff
    click.echo(render(difference, width()), nl=False)


@click.command()
@click.argument("paths", type=READ, metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--steps", callback=parse_steps, metavar="A:B", help="Analyse only steps A to B (B excluded): 10:20."
)
@click.option(
    "--show",
    callback=parse_tables,
    metavar="TABLES",
    help="Show these tables instead, or have only these in the JSON: kernels, shapes, operators, "
    "collectives, copies, launches, critical-path, or all.",
)
@click.option(
    "--merge",
    type=click.Path(path_type=Path),
    metavar="OUT.json.gz",
    help="Also write one trace of all ranks, on one clock, for Perfetto.",
)
@json_option
def trace(
    paths: tuple[Path, ...],
    steps: slice | None,
    show: "tuple[Table, ...] | None",
    merge: Path | None,
    as_json: bool,
) -> None:
    """Show where the time goes in Kineto traces of gpurun or any other program.

    PATH is a trace (*.json, *.json.gz), or a directory with the traces of all ranks of one job.

    Example: gpurun trace traces/before --show critical-path

    Example: gpurun trace traces/before --show operators --steps 8
    """
    from gpurun.launcher.cli.named import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths
    from gpurun.launcher.trace.requested_tables import TABLES

    found = traces_of(*paths)
    if merge is not None:
        from gpurun.launcher.trace.merge import merge_traces

        merge_traces(found.paths, merge, steps, found.within)
        click.echo(f"wrote {merge}; open it in https://ui.perfetto.dev", err=True)
    tables = show or (TABLES if as_json else ())
    analysis = analyse_paths(found.paths, steps, frozenset(tables), found.within)
    if as_json:
        show_json(analysis)
        return
    if show:
        from gpurun.launcher.report.terminal.trace import render_tables

        click.echo(render_tables(analysis, show, width()), nl=False)
        return
    from gpurun.launcher.compare.build import diagnosis
    from gpurun.launcher.report.terminal.trace import render_trace

    places = {file if file.is_dir() else file.parent for file in map(Path.resolve, found.paths)}
    known = diagnosis(*places) if len(places) == 1 and steps is None else None
    click.echo(render_trace(analysis, width(), known), nl=False)
