"""`gpurun diff` and `gpurun trace`: what changed between runs or traces, and where time goes in a trace."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.options import (
    READ,
    json_option,
    parse_percent,
    parse_steps,
    parse_tables,
)
from gpurun.launcher.cli.output import check_gate, line_width, say_if_large, show_json, width
from gpurun.launcher.errors import SpecError

if TYPE_CHECKING:
    from gpurun.launcher.trace.model import Table


_details = click.option("--details", is_flag=True, help="Show all that was found.")


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
@_details
@json_option
def diff(
    a: Path,
    b: Path,
    fail_slower_percent: float | None,
    may_differ: tuple[str, ...],
    show: str | None,
    details: bool,
    as_json: bool,
) -> None:
    """Compare run B with run A, variant by variant, or two directories of traces.

    Two past runs can't show whether the code or the machine changed: for a gate in CI see `gpurun gate`.

    Example: gpurun diff runs/gpt/before runs/gpt/latest --fail-slower 3%

    Example: gpurun diff traces/before traces/after --show operators

    Exit codes: 0 ok, 2 the command line is wrong; with --fail-slower: 5 a variant is slower than it allows, 6
    undecided.
    """
    from gpurun.launcher.run.find import are_runs

    if are_runs(a, b):
        if show:
            raise SpecError(f"--show {show} compares traces; name their directories: RUN/variants/ID")
        diff_two_runs(a, b, fail_slower_percent, may_differ, details, as_json)
    elif fail_slower_percent is not None:
        raise SpecError(
            "--fail-slower applies to runs: a trace has too few steps to distinguish a change from noise"
        )
    elif may_differ:
        raise SpecError("--allow applies to runs; traces of different work can always be compared")
    else:
        diff_two_captures(a, b, show is not None, details, as_json)


def diff_two_runs(
    a: Path,
    b: Path,
    fail_slower_percent: float | None,
    may_differ: tuple[str, ...],
    details: bool,
    as_json: bool,
) -> None:
    """How run B differs from run A, and whether that is too much."""

    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.compare.diff import diff_runs, gated
    from gpurun.launcher.run.find import find_run
    from gpurun.launcher.rundir.store import source_of

    check_settings(may_differ)
    found = find_run(a), find_run(b)
    if found[0].path.resolve() == found[1].path.resolve():
        click.echo(f"A and B are the same run: {source_of(found[0].path)}", err=True)
    say_if_large(*found)
    runs = compare_run(found[0]), compare_run(found[1])
    name_a, name_b = (str(source_of(run.path)) for run in found)
    difference = replace(diff_runs(*runs, may_differ=may_differ), name_a=name_a, name_b=name_b)
    if fail_slower_percent is not None:
        difference = gated(difference, *runs, fail_slower_percent)
    if as_json:
        show_json(difference)
    else:
        from gpurun.launcher.report.terminal.changes import render_diff

        click.echo(render_diff(difference, line_width(), details))
    if difference.gate is not None:
        check_gate(difference.gate)


def check_settings(names: tuple[str, ...]) -> None:
    """Whether runs can differ in these settings.

    Raises:
        SpecError: one is no setting, or never keeps variants from being compared.
    """
    from gpurun.launcher.jobfile.settings import SETTINGS
    from gpurun.launcher.jobfile.yaml.describe import near_or_all

    known = [name for name, setting in SETTINGS.items() if not setting.same_work]
    for name in names:
        if name not in known:
            raise SpecError(f"--allow {name}: {near_or_all(name, known, 'settings')}")


def diff_two_captures(a: Path, b: Path, as_tree: bool, details: bool, as_json: bool) -> None:
    """Operators and kernels that grew from the traces in A to those in B; `as_tree`: by what calls them."""
    from gpurun.launcher.run.find import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths
    from gpurun.launcher.trace.diff import diff_traces

    own: tuple[Table, ...] = ("operators",) if as_tree else ("shapes",)
    tables: tuple[Table, ...] = ("shapes", "operators") if as_json else own
    named = (traces_of(a), traces_of(b))
    reports = [analyse_paths(traces.paths, show=frozenset(tables), within=traces.within) for traces in named]
    difference = diff_traces(*reports)
    if as_json:
        show_json(difference)
        return
    from gpurun.launcher.report.terminal.changes import render_operator_changes, render_trace_diff

    render = render_operator_changes if as_tree else render_trace_diff
    click.echo(render(difference, width(), details), nl=False)


@click.command()
@click.argument("paths", type=READ, metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--steps", callback=parse_steps, metavar="A:B", help="Analyse only steps A to B (B excluded): 10:20."
)
@click.option(
    "--show",
    callback=parse_tables,
    metavar="TABLES",
    help="Show these tables instead, and add them to the JSON: kernels, shapes, operators, "
    "collectives, copies, launches, critical-path, or all.",
)
@click.option(
    "--merge",
    type=click.Path(path_type=Path),
    metavar="OUT.json.gz",
    help="Also write one trace of all ranks, on one clock, for Perfetto.",
)
@_details
@json_option
def trace(
    paths: tuple[Path, ...],
    steps: slice | None,
    show: "tuple[Table, ...] | None",
    merge: Path | None,
    details: bool,
    as_json: bool,
) -> None:
    """Show where the time goes in Kineto traces of gpurun or any other program.

    PATH is a trace (*.json, *.json.gz), or a directory with the traces of all ranks of one job.

    Example: gpurun trace traces/before --show critical-path

    Example: gpurun trace traces/before --show operators --steps 8
    """
    from gpurun.launcher.run.find import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths

    found, tables = traces_of(*paths), frozenset(show or ())
    if merge is None:
        analysis = analyse_paths(found.paths, steps, tables, found.within)
    else:
        from gpurun.launcher.trace.merge import merge_traces

        analysis = merge_traces(found.paths, merge, steps, tables, found.within)
        click.echo(f"wrote {merge}; open it in https://ui.perfetto.dev", err=True)
    if show and not as_json:
        from gpurun.launcher.report.terminal.trace import render_tables

        click.echo(render_tables(analysis, show, width(), details), nl=False)
        return
    if as_json:
        show_json(analysis)
        return
    from gpurun.launcher.report.terminal.trace import render_trace

    click.echo(render_trace(analysis, width(), details), nl=False)
