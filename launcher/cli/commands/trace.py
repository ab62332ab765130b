"""`gpurun trace`: where the time goes in Kineto traces."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.options import READ, json_option, parse_steps, parse_tables
from gpurun.launcher.cli.output import show_json, width

if TYPE_CHECKING:
    from gpurun.launcher.trace.requested_tables import Table


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
    from gpurun.launcher.run.open import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths
    from gpurun.launcher.trace.requested_tables import TABLES

    files = [found for path in paths for found in traces_of(path)]
    if merge is not None:
        from gpurun.launcher.trace.analysis.discover import find_traces, place_for

        place_for(merge, find_traces(files).files)  # before the traces are read, which may take minutes
    tables = show or (TABLES if as_json else ())
    report = analyse_paths(files, steps, frozenset(tables))
    if merge is not None:
        from gpurun.launcher.trace.merge import merge_traces

        merge_traces(files, merge, steps)
        click.echo(f"wrote {merge}; open it in https://ui.perfetto.dev", err=True)
    if as_json:
        show_json(report)
        return
    if show:
        from gpurun.launcher.report.terminal.trace import render_tables

        click.echo(render_tables(report, show, width()), nl=False)
        return
    from gpurun.launcher.compare.build import diagnosis
    from gpurun.launcher.report.terminal.trace import render_trace

    places = {file if file.is_dir() else file.parent for file in map(Path.resolve, files)}
    known = diagnosis(*places) if len(places) == 1 and steps is None else None
    click.echo(render_trace(report, width(), known), nl=False)
