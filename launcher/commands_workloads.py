"""`gpurun workloads`: what is built in, and what others have published of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.arguments import json_option
from launcher.errors import SpecError
from launcher.printing import show_json, width

if TYPE_CHECKING:
    from launcher.report.published import Ours


@click.command("workloads")
@click.argument("runs", type=click.Path(path_type=Path), metavar="[RUN...]", nargs=-1)
@click.option("--published", is_flag=True, help="The times that Shi et al. published in 2016 instead.")
@json_option
def workloads_command(runs: tuple[Path, ...], published: bool, as_json: bool) -> None:
    """List the built-in workloads: what they do, what bounds them, and their parameters.

    With --published, what each RUN has measured of the classics stands beside the published times.

    Example: gpurun workloads --published runs/shi2016/latest runs/shi2016-gpu/latest
    """
    if runs and not published:
        raise SpecError("runs are set beside published times: gpurun workloads --published RUN")
    if published:
        from launcher.published.shi2016 import SOURCE, scaling, table7
        from launcher.report.published import render_published

        ours = _ours_of_runs(runs)
        if as_json:
            found = {"cells": table7(), "scaling": scaling(), "ours": ours}
            show_json({"schema": 1, "source": SOURCE, **found})
        else:
            click.echo(render_published(ours))
    else:
        from launcher.spec.catalogue import catalogue, render_catalogue

        if as_json:
            show_json({"schema": 1, "workloads": catalogue()})
        else:
            click.echo(render_catalogue(width()))


def _ours_of_runs(runs: tuple[Path, ...]) -> "list[Ours]":
    """What all the runs have measured of the classics.

    Raises:
        SpecError: one of them has measured none, or is no run.
    """
    from launcher.compare.build import compare_run
    from launcher.run.open import find_run

    return [one for run in runs for one in _ours_of(compare_run(find_run(run)))]


def _ours_of(comparison: Any) -> "list[Ours]":
    from launcher.published.shi2016 import NETWORKS
    from launcher.report.published import ours_of

    ours = ours_of(comparison)
    if not ours:
        listed = ", ".join(NETWORKS)
        raise SpecError(f"{comparison.name} has measured none of {listed}; see examples/shi2016.yaml")
    return ours


def print_beside_published(comparison: Any) -> None:
    """The classics of a run beside the published times.

    Raises:
        SpecError: the run has measured none of them.
    """
    from launcher.report.published import render_published

    click.echo(render_published(_ours_of(comparison)))
