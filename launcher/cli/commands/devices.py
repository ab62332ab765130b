"""`gpurun devices`: what this machine has."""

import click

from gpurun.launcher.cli.options import json_option
from gpurun.launcher.cli.output import show_json, width


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
