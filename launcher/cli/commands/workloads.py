"""`gpurun workloads`: what is built in, and what others have published of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpurun.launcher.cli.options import json_option
from gpurun.launcher.cli.output import show_json, width
from gpurun.launcher.errors import Problem, SpecError

if TYPE_CHECKING:
    from gpurun.launcher.report.published import Ours


@click.command("workloads")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--published", is_flag=True, help="The times that Shi et al. published in 2016 instead.")
@json_option
def workloads_command(names: tuple[str, ...], published: bool, as_json: bool) -> None:
    """List the built-in workloads: what they do, what bounds them, and their parameters.

    With a NAME, show that one alone, and what each of its parameters means: gpurun workloads gpt

    With --published, each NAME is a run: what it has measured of the classics stands beside the published
    times.

    Example: gpurun workloads --published runs/shi2016/latest runs/shi2016-gpu/latest
    """
    if published:
        from gpurun.launcher.published.shi2016 import SOURCE, scaling, table7
        from gpurun.launcher.report.published import render_published

        ours = _ours_of_runs([Path(name) for name in names])
        if as_json:
            found = {"cells": table7(), "scaling": scaling(), "ours": ours}
            show_json({"schema": 1, "source": SOURCE, **found})
        else:
            click.echo(render_published(ours))
    else:
        from gpurun.launcher.jobfile.docs.catalogue import catalogue, render_catalogue, render_entry

        entries = [entry for entry in catalogue() if entry.name in _known(names)] if names else catalogue()
        if as_json:
            show_json({"schema": 1, "workloads": entries})
        elif names:
            click.echo("\n\n".join(render_entry(entry, width()) for entry in entries))
        else:
            click.echo(render_catalogue(width()))


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, all of which are built-in workloads.

    Raises:
        SpecError: one is not.
    """
    from gpurun.launcher.jobfile.builtins import builtin_workloads
    from gpurun.launcher.jobfile.yaml.describe import did_you_mean, shorten

    known = builtin_workloads()
    for name in names:
        if name in known:
            continue
        if Path(name).is_dir():
            raise SpecError(f"runs are set beside published times: gpurun workloads --published {name}")
        hint = did_you_mean(name, known) or f"built in are {', '.join(known)}"
        raise SpecError(Problem(f"there is no built-in workload `{shorten(name)}`", hint))
    return names


def _ours_of_runs(runs: Sequence[Path]) -> "list[Ours]":
    """What all the runs have measured of the classics.

    Raises:
        SpecError: one of them has measured none, or is no run.
    """
    from gpurun.launcher.compare.build import compare_run
    from gpurun.launcher.run.open import find_run

    return [one for run in runs for one in _ours_of(compare_run(find_run(run)))]


def _ours_of(comparison: Any) -> "list[Ours]":
    from gpurun.launcher.published.shi2016 import NETWORKS
    from gpurun.launcher.report.published import ours_of

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
    from gpurun.launcher.report.published import render_published

    click.echo(render_published(_ours_of(comparison)))
