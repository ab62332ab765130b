"""`gpurun submit`: a job for a batch system."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpurun.launcher.cli.options import job_argument, set_option
from gpurun.launcher.errors import SpecError
from gpurun.launcher.schedulers import SCHEDULERS
from gpurun.launcher.schedulers.base import BatchQueue, SubmitOptions

F = TypeVar("F", bound=Callable[..., Any])
QUEUES = {name: scheduler.queue for name, scheduler in SCHEDULERS.items() if scheduler.queue}


def queue_options(command: F) -> F:
    """A flag for every batch system that takes jobs."""
    for name in QUEUES:
        text = f"Submit to {SCHEDULERS[name].name}."
        command = click.option(f"--{name}", "queue", flag_value=name, help=text)(command)
    return command


@click.command()
@job_argument
@queue_options
@click.option("--nodes", type=click.IntRange(1), help="Number of nodes; default: the job's `nodes`.")
@click.option("--time", help="Time limit in Slurm's format: 2:00:00.")
@click.option("--partition", help="Partition of the cluster.")
@click.option("--account", help="Account to charge.")
@click.option("--gpus-per-node", type=click.IntRange(1), help="GPUs to request on every node.")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Cores to request on every node.")
@click.option(
    "--sbatch", "further", multiple=True, metavar="OPTION", help="Any other option: --sbatch=--exclusive."
)
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the script; default: runs/NAME/submit.sbatch.",
)
@click.option("--dry-run", is_flag=True, help="Print the script; write and submit nothing.")
@set_option
def submit(
    job: Path,
    queue: str | None,
    script: Path | None,
    dry_run: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Write a plain batch script for JOB.yaml and submit it: one gpurun per node.

    Example: gpurun submit job.yaml --slurm --nodes 2 --time 1:00:00 --dry-run

    Exit codes: 0 submitted, 2 the job file or the command line is wrong, 3 the batch system is not installed
    here or rejects the job.
    """
    from gpurun.launcher.jobfile.load import load_job
    from gpurun.launcher.schedulers.base import Submission

    chosen, wanted = QUEUES[required(queue)], SubmitOptions(**options)
    load_job(job, (*overrides, *([f"nodes={wanted.nodes}"] if wanted.nodes else [])))
    spec = load_job(job, overrides)
    submission = Submission(spec, job.absolute(), Path.cwd(), overrides, own_command())
    text = chosen.script(submission, wanted)
    if dry_run:
        click.echo(text, nl=False)
    else:
        hand_over(
            chosen, text, (script or Path("runs") / spec.name / chosen.script_name).absolute(), spec.name
        )


def required(queue: str | None) -> str:
    """The name of the batch system.

    Raises:
        SpecError: there is none.
    """
    if queue is None:
        flags = " or ".join(f"--{name}" for name in QUEUES)
        raise SpecError(
            f"missing option {flags}: the batch system to submit to; for Kubernetes see docs/clusters.md"
        )
    return queue


def hand_over(queue: BatchQueue, text: str, path: Path, name: str) -> None:
    """Writes the script and submits it."""
    from gpurun.launcher.rundir.files import write_bytes

    write_bytes(path, text.encode())
    job_id = queue.submit(path)
    click.echo(f"submitted {name} as job {job_id}; its script is {path}")
    click.echo(queue.next_commands(job_id, Path.cwd()))


def own_command() -> tuple[str, ...]:
    """How to call this very gpurun from anywhere."""
    installed = Path(sys.executable).with_name("gpurun")
    return (str(installed),) if installed.is_file() else (sys.executable, "-P", "-m", "gpurun")
