"""`gpurun submit`: a job for a scheduler."""

import re
import secrets
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpurun.launcher.cli.options import WholeNumber, if_given, in_turn, job_argument, nodes_option, set_option
from gpurun.launcher.errors import SpecError
from gpurun.launcher.schedulers import SCHEDULERS
from gpurun.launcher.schedulers.base import Queue, Submission, SubmitOptions, range_note, time_limit
from gpurun.launcher.units import first_of

if TYPE_CHECKING:
    from gpurun.launcher.jobfile.values import Nodes

QUEUES = {name: scheduler.queue for name, scheduler in SCHEDULERS.items() if scheduler.queue}
COMMANDS = {queue.command: queue.option_example for queue in QUEUES.values()}
"""The scheduler's command → an option of it."""
MOST_NAMED = 5
MAX_LABEL = 36
"""Characters that a scheduler's name for a job may take of the job's own: Pods append to it, up to 63."""


further_options = in_turn(
    *(
        click.option(
            f"--{name}",
            multiple=True,
            metavar="OPTION",
            help=f"Any other option of {name}: --{name}={example}.",
        )
        for name, example in COMMANDS.items()
    )
)
"""An option for any other option of each command that submits."""


def taken_by(field: str) -> str:
    """` (slurm, kubernetes)`: the schedulers that obey an option."""
    return f"({', '.join(name for name, queue in QUEUES.items() if field in queue.takes)})"


def show_list(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Prints where jobs can be submitted to."""
    if not value or ctx.resilient_parsing:
        return
    for name, queue in QUEUES.items():
        found = shutil.which(queue.command) or f"{queue.command} is not on PATH"
        click.echo(f"{name:<12}{found}\n{'':<12}preemption: {SCHEDULERS[name].preemption}")
    click.echo(
        "\nwithout one  start gpurun on each node: --node-rank N --rendezvous HOST[:PORT], HOST is node 0"
    )
    ctx.exit()


@if_given
def store_url(value: str) -> str:
    """The URL below which the run is kept; the package of its store is needed only where the job runs.

    Raises:
        SpecError: it is no URL, one that can't keep a run, or one with credentials.
    """
    from gpurun.launcher.rundir.paths import as_url, to_write

    if (url := as_url(value, is_used_here=False)) is None:
        raise SpecError(f"--out {value}: name a URL, s3://BUCKET/PATH; the job's run directory is in runs/")
    if (found := re.match(r"[^/]+://[^/]*@", url)) is not None:
        bare = f"{url.partition('://')[0]}://{url[found.end() :]}"
        raise SpecError(
            "--out: the script would hold the credentials in this URL\n"
            f"    name {bare}; where the job runs, the store's package gets them from variables or files"
        )
    return to_write(url)


@click.command()
@job_argument
@click.option("--to", type=click.Choice(list(QUEUES)), metavar="NAME", help=f"{', '.join(QUEUES)}.")
@click.option("--slurm", is_flag=True, help="The same as --to slurm.")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=show_list, help="List the schedulers."
)
@nodes_option("default: the job's `nodes`.")
@click.option("--time", metavar="TIME", help=f"Time limit: 90m, 2:00:00 or 1-12:00:00 {taken_by('time')}.")
@click.option(
    "--image", metavar="IMAGE", help=f"Container image with gpurun and the job {taken_by('image')}."
)
@click.option(
    "--volume", metavar="CLAIM", help=f"PersistentVolumeClaim for run directories {taken_by('volume')}."
)
@click.option(
    "--out",
    metavar="URL",
    callback=store_url,
    help="Keep the run in a store too, below this URL: s3://BUCKET/PATH.",
)
@click.option("--gpu", metavar="KIND", help=f"Kind of GPU: nvidia.com/gpu, amd.com/gpu {taken_by('gpu')}.")
@click.option(
    "--gpus-per-node", type=WholeNumber(1), help=f"GPUs to request on every node {taken_by('gpus_per_node')}."
)
@click.option(
    "--cpus-per-task",
    type=WholeNumber(1),
    help=f"Cores to request on every node {taken_by('cpus_per_task')}.",
)
@click.option("--partition", metavar="NAME", help=f"Partition of the cluster {taken_by('partition')}.")
@click.option("--account", metavar="NAME", help=f"Account to charge {taken_by('account')}.")
@further_options
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the script; default: in runs/NAME/.",
)
@click.option("--dry-run", is_flag=True, help="Print the script; write and submit nothing.")
@set_option
def submit(
    job: Path,
    to: str | None,
    slurm: bool,
    script: Path | None,
    dry_run: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> int:
    """Write a batch script or manifest for JOB.yaml, and submit it: one gpurun per node.

    Example: gpurun submit job.yaml --to slurm --nodes 2 --dry-run

    Exit codes: 0 submitted, 2 the job file or the command line is wrong, 3 the scheduler's command is
    missing or rejects the job; with --to mpi, which runs it here, that of mpirun, or 130 interrupted.
    """
    from gpurun.launcher.jobfile.load import load_job

    name = scheduler_name(to, slurm)
    wanted = submit_options(name, options)
    spec = load_job(job, overrides)
    unfit = check_numbers_of_nodes(QUEUES[name], job, overrides, wanted.nodes or spec.nodes)
    refuse_secrets(overrides)
    refuse_own_disk(name, wanted.out)
    label = label_for(spec.name)
    submission = Submission(spec, absolute(job), Path.cwd(), overrides, own_command(), label)
    text = QUEUES[name].script(submission, wanted)
    notes = (unfit, range_note(name, QUEUES[name], submission, wanted), QUEUES[name].note(submission, wanted))
    for note in notes:
        if note is not None:
            click.echo(note, err=True)
    if dry_run:
        click.echo(text, nl=False)
        return 0
    file = QUEUES[name].script_name.replace("LABEL", label)
    path = (script or Path("runs") / spec.name / file).absolute()
    return hand_over(QUEUES[name], submission, wanted, text, path)


def check_numbers_of_nodes(queue: Queue, job: Path, overrides: tuple[str, ...], nodes: "Nodes") -> str | None:
    """A note on the numbers of nodes that the job may get and can't run on; `None`: it can on all.

    Raises:
        SpecError: it can't run on any.
    """
    from gpurun.launcher.jobfile.load import load_job
    from gpurun.launcher.jobfile.values import node_bounds

    least, most = node_bounds(nodes)
    problems, numbers = {}, range(least if queue.fewer else most, most + 1)
    for number in numbers:
        try:
            load_job(job, (*overrides, f"nodes={number}"))
        except SpecError as error:
            problems[number] = error
    if len(problems) == len(numbers):
        raise problems[most]
    if not problems:
        return None
    first = next(iter(problems))
    named = first_of(list(map(str, problems)), MOST_NAMED)
    return f"nodes: {nodes}: the job can't run on {named} nodes; on {first}: {problems[first]}"


def refuse_own_disk(name: str, out: str | None) -> None:
    """Returns if what the job measures outlasts the container that it runs in.

    Raises:
        SpecError: the URL is a directory there.
    """
    if out is not None and out.startswith(("file:", "local:")) and "image" in QUEUES[name].takes:
        raise SpecError(
            f"--out {out}: that is the disk of the job's own container, which ends with it\n"
            "    name a store, s3://BUCKET/PATH or gs://BUCKET/PATH, or leave --out away"
        )


def absolute(path: Path) -> Path:
    """The absolute path, without `..`, which would lead out of the directory that is copied."""
    return path.resolve() if ".." in path.parts else path.absolute()


def scheduler_name(to: str | None, slurm: bool) -> str:
    """The name of the scheduler that gets the job.

    Raises:
        SpecError: that isn't said, or said twice.
    """
    if slurm and to not in (None, "slurm"):
        raise SpecError(f"--slurm and --to {to}: choose one")
    if not slurm and to is None:
        raise SpecError(f"missing option --to: one of {', '.join(QUEUES)}")
    return to or "slurm"


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
            f"    set {name} where the job runs: a Slurm job inherits your shell's variables, "
            "a Pod gets them from a Secret"
        )


def submit_options(name: str, options: dict[str, Any]) -> SubmitOptions:
    """The scheduler's options from the command line; options that it doesn't take are an error.

    Raises:
        SpecError: there are some.
    """
    queue = QUEUES[name]
    further = {command: options.pop(command) for command in COMMANDS}
    mine = further.pop(queue.command)
    known = {field.name for field in fields(SubmitOptions)} & options.keys()
    unused = [option for option in known - queue.takes - {"nodes"} if options[option] is not None]
    for option in sorted([*unused, *(command for command, given in further.items() if given)]):
        taken = [f"--{key.replace('_', '-')}" for key in sorted(queue.takes)]
        raise SpecError(
            f"--{option.replace('_', '-')} is not for {name}\n"
            f"    it takes {', '.join(['--nodes', *taken, f'--{queue.command}=OPTION'])}"
        )
    if (empty := next((option for option in sorted(known) if options[option] == ""), None)) is not None:
        raise SpecError(f"--{empty.replace('_', '-')} has no value\n    give one, or leave the option out")
    limit_s = None if options["time"] is None else time_limit(options["time"])
    return SubmitOptions(**{**options, "time": limit_s}, further=mine)


def label_for(name: str) -> str:
    """A name for one submission that every scheduler accepts, as Kubernetes wants those of Services."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_LABEL].strip("-")
    return f"{plain if plain[:1].isalpha() else f'job-{plain}'.strip('-')}-{secrets.token_hex(3)}"


def hand_over(queue: Queue, submission: Submission, options: SubmitOptions, text: str, path: Path) -> int:
    """Writes the script and submits it; the exit code."""
    from gpurun.launcher.rundir.files import write_bytes
    from gpurun.launcher.schedulers.base import follow
    from gpurun.launcher.schedulers.base import submit as submit_to

    write_bytes(path, text.encode())
    call = queue.call(submission, options, path, secrets.token_urlsafe(32))
    if queue.is_foreground:
        return follow(queue, call)
    job_id = submit_to(queue, call, path, submission)
    click.echo(f"submitted {submission.spec.name} as job {job_id}; its script is {path}")
    for purpose, command in queue.next_commands(submission, options, job_id).items():
        click.echo(f"{purpose + ':':<9}{command}")
    return 0


def own_command() -> tuple[str, ...]:
    """How to call this very gpurun from anywhere."""
    installed = Path(sys.executable).with_name("gpurun")
    return (str(installed),) if installed.is_file() else (sys.executable, "-P", "-m", "gpurun")
