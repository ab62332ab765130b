"""`gpurun workloads` and `gpurun devices`: what is built in, and what this machine has."""

import click

from gpurun.launcher.cli.options import json_option
from gpurun.launcher.cli.output import show_json, width
from gpurun.launcher.errors import Problem, SpecError


@click.command("workloads")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@json_option
def workloads(names: tuple[str, ...], as_json: bool) -> None:
    """List the built-in workloads: what they do, what bounds them, and their parameters.

    With a NAME, show only that workload and what each of its parameters means.

    Example: gpurun workloads gpt
    """
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
    from gpurun.launcher.jobfile.kinds import builtin_workloads, no_such_builtin

    for name in names:
        if name not in builtin_workloads():
            raise SpecError(Problem(*no_such_builtin(name)))
    return names


@click.command()
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
