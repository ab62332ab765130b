"""`python -m benchmarks.shi2016 [RUN…]`: the published times, or the times of runs next to them."""

import sys
from pathlib import Path

import click

from benchmarks.shi2016 import record_runs
from benchmarks.shi2016.published import SOURCE, scaling, table7
from benchmarks.shi2016.report import ours_of_runs, render_published
from gpurun.launcher.cli.options import json_option
from gpurun.launcher.cli.output import show_json
from gpurun.launcher.cli.streams import prepare_streams
from gpurun.launcher.errors import GpurunError


@click.command(context_settings={"help_option_names": ["--help", "-h"]})
@click.argument("runs", metavar="[RUN...]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--record", is_flag=True, help="Also write the result into benchmarks/RESULTS.md.")
@json_option
def show(runs: tuple[Path, ...], record: bool, as_json: bool) -> None:
    """Show the times that Shi et al. published in 2016, next to what each RUN has measured of their networks.

    Without a RUN, show the published times alone.

    Example: python -m benchmarks.shi2016 runs/shi2016/latest runs/shi2016-gpu/latest
    """
    if record and (as_json or not runs):
        raise click.UsageError(
            "--record takes a RUN, and no --json; `python -m benchmarks shi2016` measures one and records it"
        )
    if record:
        record_runs(runs)
        return
    ours = ours_of_runs(runs)
    if as_json:
        show_json({"schema": 1, "source": SOURCE, "cells": table7(), "scaling": scaling(), "ours": ours})
    else:
        click.echo(render_published(ours))


def main() -> None:
    """The command; a user's mistake becomes a message and an exit code."""
    prepare_streams()
    try:
        show(prog_name="python -m benchmarks.shi2016")
    except GpurunError as error:
        click.echo(f"shi2016: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
