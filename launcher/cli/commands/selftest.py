"""`gpurun selftest`: whether devices, links, driver and gpurun work together, on one machine or several."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import (
    WholeNumber,
    devices_option,
    json_option,
    node_flags,
    node_options,
    out_option,
)
from gpurun.launcher.cli.output import rank_starters, show_json, width
from gpurun.launcher.errors import MachineError, SpecError

NAME_CELLS = 16
STATUS_CELLS = 7


@click.command()
@devices_option
@out_option
@click.option(
    "--nodes", type=WholeNumber(1), default=1, help="Number of nodes, each of which runs this command."
)
@node_options
@json_option
def selftest(devices: str, out: Path | None, nodes: int, as_json: bool, **place: Any) -> None:
    """Check that this machine's devices and links work, and that gpurun measures them right.

    Runs small jobs of known outcome, in a minute or two: matrix products, all-reduces, DP and DDP, traces,
    and ranks that run out of memory, are killed or sleep. Shows a line per check, and what to do where one
    fails. The result is kept in RUN/selftest.json; later self-tests name a device that has become slower.
    With --nodes each node checks itself, then all of them measure the links between them; node 0 shows all.

    Example: gpurun selftest --devices cpu:2

    Exit codes: 0 no check failed, 2 the command line is wrong, 3 a check failed or the result can't be kept,
    4 a node was lost, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.rundir.paths import check_writable

    quit_on_interrupt()
    check_writable(out or Path("runs"))
    if nodes == 1 and any(value is not None and value is not False for value in place.values()):
        raise SpecError("--node-rank, --rendezvous and the like need several nodes: --nodes N")
    lines = Lines(width(), nodes > 1)
    try:
        ended = run(devices, out, (lambda finding: None) if as_json else lines.show, nodes, place)
    finally:
        lines.end()
    if ended is None:
        return  # node 0 has the results
    result, directory, not_kept = ended
    if as_json:
        show_json(result)
    else:
        from gpurun.launcher.findings.finding import screen_of
        from gpurun.launcher.report.terminal.layout import screen_lines

        click.echo("")
        for shown in screen_lines(screen_of(result.findings), width()):
            click.echo(shown.plain)
        if not not_kept:
            click.echo(f"Kept in {directory}")
    if problems := [each for each in (result.failures, not_kept) if each]:
        raise MachineError("; ".join(problems))


def run(
    devices: str, out: Path | None, show: Callable[[Any], None], nodes: int, place: Any
) -> tuple[Any, Path, str | None] | None:
    """Returns the result of `run_selftest` or `selftest_on_nodes`; no process of it is left."""
    with rank_starters() as pools:
        if nodes > 1:
            from gpurun.launcher.selftest.on_nodes import selftest_on_nodes

            flags = node_flags(**place)
            return selftest_on_nodes(pools, devices, nodes, out, flags, show, progress)
        from gpurun.launcher.selftest.self_test import run_selftest

        return run_selftest(pools, devices, out, show, progress)


def progress(title: str, number: int, count: int) -> None:
    """Prints the next stage."""
    click.echo(f"{number} of {count}: {title} …", err=True)


class Lines:
    """Prints results, under the node that they are of."""

    def __init__(self, columns: int, on_nodes: bool) -> None:
        self.columns = columns
        self.title = "" if on_nodes else None
        self.alike: list[Any] = []
        """Checks that were not run for one reason, which are shown as one."""

    def show(self, finding: Any) -> None:
        """Prints a result; of a check that was not run when the others of that reason are known."""
        if self.alike and not is_alike(self.alike[0], finding):
            self.end()
        self.alike.append(finding)
        if finding.figures[0]["case"] != "not-run":
            self.end()

    def end(self) -> None:
        """Prints what has not been shown yet."""
        alike, self.alike = self.alike, []
        if len(alike) > 1:
            names = ", ".join(each.name for each in alike)
            self.print(replace(alike[0], name=f"{len(alike)} checks", found=f"{alike[0].found} ({names})"))
        elif alike:
            self.print(alike[0])

    def print(self, finding: Any) -> None:
        """Prints a result, under a title where it is the first of a node."""
        title = "all nodes" if finding.node is None else f"node {finding.node} ({finding.host})"
        if self.title not in (None, title):
            click.echo(title)
            self.title = title
        click.echo(line(finding, self.columns))


def is_alike(check: Any, other: Any) -> bool:
    """Whether two checks have the same result in the same place."""
    return (check.node, check.status, check.found) == (other.node, other.status, other.found)


def line(finding: Any, columns: int) -> str:
    """`ok       device clocks    within 0.1 % …`; the remedy of a check that failed is below."""
    from gpurun.launcher.logs.lines import plain
    from gpurun.launcher.report.terminal.grid import wrap

    status = finding.status.upper() if finding.status == "failed" else finding.status
    indent = STATUS_CELLS + NAME_CELLS + 4
    lines = wrap(
        f"{status:{STATUS_CELLS}}  {finding.name:{NAME_CELLS}}  {plain(finding.found)}", columns, indent
    )
    if finding.remedy:
        lines += wrap(f"{' ' * indent}{plain(finding.remedy)}", columns, indent)
    return "\n".join(lines)
