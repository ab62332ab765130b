"""`gpurun submit`: a job for a batch system."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gpurun.launcher.cli.options import WholeNumber, job_argument, set_option
from gpurun.launcher.errors import SpecError
from gpurun.launcher.schedulers import SCHEDULERS
from gpurun.launcher.schedulers.base import BatchQueue, SubmitOptions

F = TypeVar("F", bound=Callable[..., Any])
QUEUES = {name: scheduler.queue for name, scheduler in SCHEDULERS.items() if scheduler.queue}


TIMES = " or ".join(f"{queue.time_example} ({SCHEDULERS[name].name})" for name, queue in QUEUES.items())
SCRIPTS = " or ".join(f"runs/NAME/{queue.script_name}" for queue in QUEUES.values())


def queue_options(command: F) -> F:
    """For every batch system that takes jobs: a flag, and an option for any other of its options."""
    for name, queue in QUEUES.items():
        text = f"Any other option of {queue.command}: --{queue.command}={queue.option_example}."
        command = click.option(f"--{queue.command}", multiple=True, metavar="OPTION", help=text)(command)
        text = f"Submit to {SCHEDULERS[name].name}."
        command = click.option(f"--{name}", "queue", flag_value=name, help=text)(command)
    return command


@click.command()
@job_argument
@queue_options
@click.option("--nodes", type=WholeNumber(1), help="Number of nodes; default: the job's `nodes`.")
@click.option("--time", metavar="H:MM:SS", help=f"Time limit, such as {TIMES}.")
@click.option("--partition", metavar="NAME", help="Partition of the cluster.")
@click.option("--account", metavar="NAME", help="Account to charge.")
@click.option("--gpus-per-node", type=WholeNumber(1), help="GPUs to request on every node.")
@click.option("--cpus-per-task", type=WholeNumber(1), help="Cores to request on every node.")
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Where to write the script; default: {SCRIPTS}.",
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

    chosen = QUEUES[required(queue)]
    wanted = submit_options(chosen, options)
    load_job(job, (*overrides, *([f"nodes={wanted.nodes}"] if wanted.nodes else [])))
    spec = load_job(job, overrides)
    refuse_secrets(overrides)
    submission = Submission(spec, job.absolute(), Path.cwd(), overrides, own_command())
    text = chosen.script(submission, wanted)
    if dry_run:
        click.echo(text, nl=False)
    else:
        hand_over(
            chosen, text, (script or Path("runs") / spec.name / chosen.script_name).absolute(), spec.name
        )


def refuse_secrets(overrides: tuple[str, ...]) -> None:
    """Returns if the script, which repeats the overrides, holds no secret.

    Raises:
        SpecError: it would hold one.
    """
    from gpurun.launcher.jobfile.load import overrides_alone
    from gpurun.launcher.jobfile.model import secrets_in

    for name, _ in secrets_in(overrides_alone(overrides)):
        raise SpecError(
            f"--set: the batch script would hold the value of {name}, which looks like a secret\n"
            f"    export {name} in your shell instead: the job inherits it"
        )


def submit_options(chosen: BatchQueue, options: dict[str, Any]) -> SubmitOptions:
    """What the command line asks of the chosen batch system; options of another one are an error.

    Raises:
        SpecError: there are some.
    """
    further = {queue.command: options.pop(queue.command) for queue in QUEUES.values()}
    mine = further.pop(chosen.command)
    if others := [f"--{command}" for command, given in further.items() if given]:
        raise SpecError(f"{others[0]} is for another batch system; here it is --{chosen.command}")
    return SubmitOptions(**options, further=mine)


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
