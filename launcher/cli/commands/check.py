"""`gpurun check`: what a job would do."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.options import job_argument, json_option, set_option
from gpurun.launcher.cli.output import show_json, width

if TYPE_CHECKING:
    from gpurun.launcher.plan.estimate import Earlier


@click.command()
@job_argument
@json_option
@set_option
def check(job: Path, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Check a job file and print its plan, without running anything.

    Example: gpurun check job.yaml --set global_batch=128
    """
    from gpurun.launcher.jobfile.checks.workload import check_files
    from gpurun.launcher.jobfile.load import load_job
    from gpurun.launcher.machine.host import inspect_machine
    from gpurun.launcher.plan.build import build_plan
    from gpurun.launcher.plan.spread import assumed_nodes

    spec = load_job(job, overrides)
    check_files(spec, job.parent)
    machine = inspect_machine()
    plan = build_plan(spec, machine, assumed_nodes(machine, spec.nodes))
    if as_json:
        show_json(plan)
        return
    from gpurun.launcher.report.terminal.plan import render_plan

    earlier = earlier_run(spec.name, machine.hostname)
    click.echo(render_plan(plan, spec, width(), plain=not sys.stdout.isatty(), earlier=earlier))


def earlier_run(job: str, hostname: str) -> "Earlier | None":
    """One that shows what can be detected; without any, the modules that read it aren't loaded."""
    if not Path("runs").is_dir():
        return None
    from gpurun.launcher.run.open import find_earlier

    return find_earlier(job, hostname)
