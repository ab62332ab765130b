"""`gpurun report`, `view`, `metrics`: a run in several formats, in TensorBoard, and for Prometheus."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import WholeNumber, json_option, run_argument
from gpurun.launcher.cli.output import print_comparison
from gpurun.launcher.errors import MachineError, SpecError


def print_table(comparison: Any, run: Any) -> None:
    """The table, and the lines that put the fastest uneven split into a training script, if there is one."""
    from gpurun.launcher.report.snippet import lines_to_paste

    print_comparison(comparison, run.path, as_json=False)
    if text := lines_to_paste(comparison):
        click.echo(f"\n{text}")


def print_json(comparison: Any, run: Any) -> None:
    """The whole comparison, for a program."""
    print_comparison(comparison, run.path, as_json=True)


def write_for_tensorboard(comparison: Any, run: Any) -> None:
    """TensorBoard's files in the run directory."""
    from gpurun.launcher.report.tensorboard.event_files import write_tensorboard

    write_tensorboard(comparison, run)
    click.echo(f"TensorBoard files are in {run.path}; to view them: gpurun view {run.path}", err=True)


def write_page(comparison: Any, run: Any, with_host: bool = False) -> None:
    """One HTML file with everything in it."""
    from gpurun.launcher.tensorboard_plugin.html import write_html

    click.echo(f"wrote {write_html(comparison, run, with_host)}; open it in a browser", err=True)


FORMATS = {
    "table": print_table,
    "json": print_json,
    "tensorboard": write_for_tensorboard,
    "html": write_page,
}
"""What `--format` may list."""


def keep_if_other(comparison: Any, run: Any) -> None:
    """Writes `comparison.json` of an own run anew where another gpurun wrote it, as the tab shows it."""
    from gpurun.launcher.rundir.files import read_json, write_json
    from gpurun.launcher.rundir.paths import is_own

    if not is_own(run.path):
        return
    with suppress(MachineError):  # there is none yet, or it can't be written: what is shown needs none
        if read_json(run.comparison, dict[str, Any]).get("conclusions", 0) != comparison.conclusions:
            write_json(run.comparison, comparison)


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
    help="Keep host names, addresses, GPU UUIDs and other processes in the HTML file.",
)
def report(run: Path, formats: str, as_json: bool, with_host: bool) -> None:
    """Show the results of a run again, without running anything. If the fastest split is uneven, also print
    the code to use it in a training script.

    The format html writes RUN/report.html, a single file that opens offline in any browser. It has no host
    names, GPU UUIDs or other users' processes unless --with-host is given.

    Example: gpurun report runs/gpt-splits/latest --format table,html
    """
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.run.open import find_run

    names = ["json"] if as_json else [name.strip() for name in formats.split(",")]
    if unknown := set(names) - FORMATS.keys():
        raise SpecError(f"--format {sorted(unknown)[0]}: the formats are {', '.join(FORMATS)}")
    found = find_run(run)
    comparison = compare_run(found)
    keep_if_other(comparison, found)
    writers: dict[str, Callable[[Any, Any], None]]
    writers = {**FORMATS, "html": partial(write_page, with_host=with_host)}
    for name in names:
        writers[name](comparison, found)


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
    from gpurun.launcher.tensorboard_plugin.view import is_empty, open_view

    with open_view(run, port=port) as server:
        click.echo(f"TensorBoard: {server.tab}  (Ctrl-C ends it)")
        if is_empty(run):
            click.echo(
                f"gpurun: {run} has no run, trace or event file yet; the page fills in when one is written:"
                f" gpurun JOB.yaml --out {run / 'NAME'}",
                err=True,
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
    from gpurun.launcher.tensorboard_plugin.openmetrics import PATH, metrics_server

    with metrics_server(run, port) as server:
        click.echo(f"OpenMetrics: http://127.0.0.1:{server.server_port}{PATH}  (Ctrl-C ends it)")
        server.serve_forever()
