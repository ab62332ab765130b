"""`gpurun diff`: compares two runs, or two directories of traces."""

from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import json_option, parse_percent
from gpurun.launcher.cli.output import show_json, width
from gpurun.launcher.errors import GateError, SpecError


@click.command()
@click.argument("a", type=click.Path(path_type=Path), metavar="A")
@click.argument("b", type=click.Path(path_type=Path), metavar="B")
@click.option(
    "--fail-slower",
    "fail_slower_percent",
    callback=parse_percent,
    metavar="PERCENT",
    help="Exit with code 5 if a variant of B is clearly slower by more than this, such as 3%.",
)
@json_option
def diff(a: Path, b: Path, fail_slower_percent: float | None, as_json: bool) -> None:
    """Compare run B with run A, variant by variant (a gate for CI), or two directories of traces.

    Example: gpurun diff runs/gpt/before runs/gpt/latest --fail-slower 3%

    Exit codes: 0 ok, 2 the command line is wrong, or --fail-slower could not be decided (a variant has no
    interval: both runs need several launches, `steps: {launches: 6}`), 5 a variant is slower than
    --fail-slower allows.
    """
    from gpurun.launcher.run.open import are_runs

    if are_runs(a, b):
        diff_two_runs(a, b, fail_slower_percent, as_json)
    elif fail_slower_percent is not None:
        raise SpecError(
            "--fail-slower compares runs: a trace has too few steps to distinguish a change from noise"
        )
    else:
        diff_two_captures(a, b, as_json)


def diff_two_runs(a: Path, b: Path, fail_slower_percent: float | None, as_json: bool) -> None:
    """How run B differs from run A, and whether that is too much."""
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.compare.diff import diff_runs, gated
    from gpurun.launcher.run.open import find_run

    difference = diff_runs(compare_run(find_run(a)), compare_run(find_run(b)))
    if fail_slower_percent is not None:
        difference = gated(difference, fail_slower_percent)
    if as_json:
        show_json(difference)
    else:
        from gpurun.launcher.report.terminal.changes import render_diff

        click.echo(render_diff(difference, width()))
    check_gate(difference)


def check_gate(difference: Any) -> None:
    """Ends the command by what its gate found; a gate that could not be decided doesn't pass.

    Raises:
        GateError: a variant is slower by more than the threshold.
        SpecError: none is, but of some (or all) nothing can be said.
    """
    from gpurun.launcher.compare.diff import why_undecided

    gate = difference.gate
    if gate is None:
        return
    reasons = why_undecided(difference)
    undecided = "\n    ".join((f"--fail-slower {gate.threshold_percent:g}% could not be decided", *reasons))
    if gate.tripped:
        names = ", ".join(one.label for one in difference.variants if one.id in gate.tripped)
        found = f"slower by more than {gate.threshold_percent:g} %, beyond doubt: {names}"
        raise GateError("\n".join([found, *([undecided] if reasons else [])]))
    if reasons:
        raise SpecError(undecided)


def diff_two_captures(a: Path, b: Path, as_json: bool) -> None:
    """What grew from the traces in A to those in B."""
    from gpurun.launcher.run.open import traces_of
    from gpurun.launcher.trace.analysis.analyse import analyse_paths
    from gpurun.launcher.trace.diff import diff_traces

    difference = diff_traces(analyse_paths(traces_of(a)), analyse_paths(traces_of(b)))
    if as_json:
        show_json(difference)
        return
    from gpurun.launcher.report.terminal.changes import render_trace_diff

    click.echo(render_trace_diff(difference, width()), nl=False)
