"""`gpurun diff`: compares two runs, or two directories of traces."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.options import READ, json_option, parse_percent
from gpurun.launcher.cli.output import check_gate, show_json, width
from gpurun.launcher.errors import SpecError

if TYPE_CHECKING:
    from gpurun.launcher.trace.requested_tables import Table


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

    Two past runs can't tell a change of the code from one of the machine: for a gate in CI see `gpurun gate`.

    Example: gpurun diff runs/gpt/before runs/gpt/latest --fail-slower 3%

    Example: gpurun diff traces/before traces/after --show operators

    Exit codes: 0 ok, 2 the command line is wrong; with --fail-slower: 5 a variant is slower than it allows, 6
    undecided.
    """
    from gpurun.launcher.run.open import are_runs

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
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.compare.diff import diff_runs, gated
    from gpurun.launcher.run.open import find_run

    check_settings(may_differ)
    runs = compare_run(find_run(a)), compare_run(find_run(b))
    difference = diff_runs(*runs, may_differ=may_differ)
    if fail_slower_percent is not None:
        difference = gated(difference, *runs, fail_slower_percent)
    if as_json:
        show_json(difference)
    else:
        from gpurun.launcher.report.terminal.changes import render_diff

        click.echo(render_diff(difference, width()))
    if difference.gate is not None:
        check_gate(difference.gate)


def check_settings(names: tuple[str, ...]) -> None:
    """Whether runs can differ in these settings.

    Raises:
        SpecError: one is no setting, or never keeps variants from being compared.
    """
    from gpurun.launcher.jobfile.settings import SETTINGS

    known = [name for name, one in SETTINGS.items() if not one.same_work]
    for name in names:
        if name not in known:
            raise SpecError(f"--allow {name}: the settings are {', '.join(known)}")


def diff_two_captures(a: Path, b: Path, as_tree: bool, as_json: bool) -> None:
    """What grew from the traces in A to those in B; `as_tree`: by what calls it."""
    from gpurun.launcher.run.open import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths
    from gpurun.launcher.trace.diff import diff_traces

    own: tuple[Table, ...] = ("operators",) if as_tree else ("shapes",)
    tables: tuple[Table, ...] = ("shapes", "operators") if as_json else own
    reports = [analyse_paths(traces_of(path), show=frozenset(tables)) for path in (a, b)]
    difference = diff_traces(*reports)
    if as_json:
        show_json(difference)
        return
    from gpurun.launcher.report.terminal.changes import render_operator_changes, render_trace_diff

    render = render_operator_changes if as_tree else render_trace_diff
    click.echo(render(difference, width()), nl=False)
