"""The command `gpurun submit`; like `cli.py` it parses, calls and prints, and nothing else."""

import sys
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import set_option
from gpurun.launcher.errors import SpecError


@click.command()
@click.argument("job", type=click.Path(path_type=Path), metavar="JOB.yaml")
@click.option("--slurm", is_flag=True, help="Submit to Slurm; required: the line says where the job goes.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes; default: the job's `nodes`.")
@click.option("--time", help="Time limit, as Slurm writes it: 2:00:00.")
@click.option("--partition", help="Slurm's partition.")
@click.option("--account", help="Slurm's account.")
@click.option("--gpus-per-node", type=click.IntRange(1), help="GPUs to ask for on every node.")
@click.option("--cpus-per-task", type=click.IntRange(1), help="Cores to ask for on every node.")
@click.option(
    "--sbatch", "further", multiple=True, metavar="OPTION", help="Any other option: --sbatch=--exclusive."
)
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the script; default runs/NAME/submit.sbatch.",
)
@click.option("--dry-run", is_flag=True, help="Print the script; write and submit nothing.")
@set_option
def submit(
    job: Path,
    slurm: bool,
    script: Path | None,
    dry_run: bool,
    overrides: tuple[str, ...],
    **asked: Any,
) -> None:
    """Write a plain sbatch script for JOB.yaml and submit it: one gpurun per node.

    Example: gpurun submit job.yaml --slurm --nodes 2 --time 1:00:00 --partition gpu --dry-run

    Exit codes: 0 submitted, 2 the job file or the command line is wrong, 3 Slurm isn't here or refuses.
    """
    from gpurun.launcher.jobfile.load import load_job
    from gpurun.launcher.rundir.files import write_bytes
    from gpurun.launcher.schedulers.slurm import SlurmOptions, Submission, batch_script, next_commands
    from gpurun.launcher.schedulers.slurm import submit as hand_over

    if not slurm:
        raise SpecError("submit to what? gpurun submit JOB.yaml --slurm; docs/cluster.md has Kubernetes, too")
    options = SlurmOptions(**asked)
    load_job(job, (*overrides, *([f"nodes={options.nodes}"] if options.nodes else [])))
    spec = load_job(job, overrides)
    wanted = Submission(spec, job.absolute(), Path.cwd(), overrides, own_command())
    text = batch_script(wanted, options)
    if dry_run:
        click.echo(text, nl=False)
        return
    path = (script or Path("runs") / spec.name / "submit.sbatch").absolute()
    write_bytes(path, text.encode())
    job_id = hand_over(path)
    click.echo(f"submitted {spec.name} as job {job_id}; its script is {path}")
    click.echo(next_commands(job_id, Path.cwd()))


def own_command() -> tuple[str, ...]:
    """How to call this very gpurun from anywhere."""
    beside = Path(sys.executable).with_name("gpurun")
    return (str(beside),) if beside.is_file() else (sys.executable, "-m", "gpurun")
