"""`gpurun selftest`: whether devices, links, driver and gpurun work together on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import devices_option, json_option, out_option
from gpurun.launcher.cli.output import show_json, width
from gpurun.launcher.errors import MachineError

NAME_CELLS = 16
STATUS_CELLS = 7


@click.command()
@devices_option
@out_option
@json_option
def selftest(devices: str, out: Path | None, as_json: bool) -> None:
    """Check that this machine's devices and links work, and that gpurun measures them right.

    Runs small jobs of known outcome, in a minute or two: matrix products, all-reduces, DP and DDP, traces,
    and ranks that run out of memory, are killed or sleep. Shows a line per check, and what to do where one
    fails. The result is kept in RUN/selftest.json; later self-tests name a device that has become slower.

    Example: gpurun selftest --devices cpu:2

    Exit codes: 0 no check failed, 2 the command line is wrong, 3 a check failed or the result can't be kept,
    130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.rundir.paths import check_writable

    quit_on_interrupt()
    check_writable(out or Path("runs"))
    columns = width()

    def show(finding: Any) -> None:
        if not as_json:
            click.echo(line(finding, columns))

    result, directory, not_kept = run(devices, out, show)
    if as_json:
        show_json(result)
    elif not not_kept:
        click.echo(f"{result.summary}; kept in {directory}")
    failures = [f"{result.num_failed} of {len(result.checks)} checks failed"] if result.num_failed else []
    if failures or not_kept:
        raise MachineError("; ".join([*failures, *([not_kept] if not_kept else [])]))


def run(devices: str, out: Path | None, show: Callable[[Any], None]) -> tuple[Any, Path, str | None]:
    """What `run_selftest` returns; no process of it is left."""
    from gpurun.launcher.processes.guard import split_process

    with split_process() as guard:  # forks: nothing heavy may be imported before
        from gpurun.launcher.processes.pool_per_env import early_servers

        with early_servers(guard) as pools:
            from gpurun.launcher.selftest.self_test import run_selftest

            return run_selftest(pools, devices, out, show, progress)


def progress(title: str, number: int, count: int) -> None:
    """What is done next."""
    click.echo(f"{number} of {count}: {title} …", err=True)


def line(finding: Any, columns: int) -> str:
    """`ok       device clocks    within 0.1 % …`; the remedy of a check that failed is below."""
    from gpurun.launcher.report.terminal.grid import wrap

    status = finding.status.upper() if finding.status == "failed" else finding.status
    indent = STATUS_CELLS + NAME_CELLS + 4
    lines = wrap(f"{status:{STATUS_CELLS}}  {finding.name:{NAME_CELLS}}  {finding.found}", columns, indent)
    if finding.remedy:
        lines += wrap(f"{' ' * indent}{finding.remedy}", columns, indent)
    return "\n".join(lines)
