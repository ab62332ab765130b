"""`gpurun init` and `gpurun schema`: writing job files."""

import shlex
from pathlib import Path

import click

from gpurun.launcher.cli.output import show_json
from gpurun.launcher.errors import SpecError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="job.yaml", metavar="[JOB.yaml]")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(path: Path, force: bool) -> None:
    """Write a commented job file to start from.

    Example: gpurun init job.yaml
    """
    from gpurun.launcher.jobfile.docs.template import job_template
    from gpurun.launcher.rundir.files import no_directory, write_bytes

    if path.exists() and not force:
        raise SpecError(f"{path} exists; --force overwrites it")
    if not path.parent.exists():
        command = f"mkdir -p {shlex.quote(str(path.parent))}"
        raise SpecError(f"{no_directory(path.parent)} first: {command}")
    write_bytes(path, job_template().encode())
    click.echo(f"wrote {path}; next: gpurun check {path}, then: gpurun {path}")


@click.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors.

    Example: gpurun schema > job.schema.json
    """
    from gpurun.launcher.jobfile.docs.schema import job_schema

    show_json(job_schema())
