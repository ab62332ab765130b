"""A job as a plain batch script for Slurm: one `gpurun` per node, which starts the ranks there itself."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun import __version__
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.schedulers.slurm_environment import FIRST_SLURM_PORT, NUM_SLURM_PORTS

_VALUE = re.compile(r"[\w.,:;@/%+=\[\]()*&|!-]+", re.ASCII)
"""What stands in options of sbatch; no space or quote, which would begin something else in the script."""


@dataclass(frozen=True)
class SlurmOptions:
    """What the command line asks of Slurm; `None` leaves it to the cluster's default."""

    nodes: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    further: tuple[str, ...] = ()
    """Other options of sbatch as they are: `--constraint=a100`."""


@dataclass(frozen=True)
class Submission:
    """What the script is about."""

    spec: JobSpec
    job_file: Path
    """Absolute."""
    folder: Path
    """Absolute; where the command was given, and `runs/` is."""
    overrides: tuple[str, ...]
    gpurun: tuple[str, ...]
    """How this gpurun is called: absolute, since a batch script has an environment of its own."""


def batch_script(wanted: Submission, options: SlurmOptions) -> str:
    """The script; the same for the same arguments.

    Raises:
        SpecError: an option's value can't stand in a script.
    """
    nodes = options.nodes or wanted.spec.nodes
    overrides = [*wanted.overrides, *([f"nodes={nodes}"] if nodes != wanted.spec.nodes else [])]
    command = [*wanted.gpurun, str(wanted.job_file), *(word for o in overrides for word in ("--set", o))]
    srun = ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1"]
    if options.cpus_per_task:
        srun.append(f"--cpus-per-task={options.cpus_per_task}")  # srun doesn't take it over from sbatch
    lines = [
        "#!/bin/bash",
        f"# Written by gpurun {__version__}; to submit it again: sbatch THIS_FILE",
        *(f"#SBATCH {option}" for option in _directives(wanted.spec, nodes, options)),
        "set -eu",
        f"cd {shlex.quote(str(wanted.folder))}",
        "",
        "# A job that was preempted begins anew, perhaps on other nodes: its results are a run of their own.",
        f'out="runs/{wanted.spec.name}/slurm-$SLURM_JOB_ID${{SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}}"',
        "",
        "# One gpurun per node starts all ranks there. The nodes meet on the first one, at port",
        f"# {FIRST_SLURM_PORT} + job id % {NUM_SLURM_PORTS}.",
        f'exec {shlex.join(srun)} \\\n    {shlex.join(command)} --out "$out"',
    ]
    return "\n".join(lines) + "\n"


def submit(script: Path, runner: Sequence[str] = ("sbatch",)) -> int:
    """Hands the script to Slurm; the job's id.

    Raises:
        MachineError: there is no Slurm here, or it refuses the job.
    """
    if shutil.which(runner[0]) is None:
        raise MachineError(
            f"there is no {runner[0]} here: submit from a machine of the Slurm cluster\n"
            "    --dry-run prints the script, to be copied there"
        )
    done = subprocess.run(
        [*runner, "--parsable", str(script)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    job_id = done.stdout.strip().partition(";")[0]
    if done.returncode != 0 or not job_id.isdecimal():
        reason = done.stderr.strip() or f"it answered {done.stdout.strip()!r}"
        raise MachineError(f"Slurm refuses the job: {reason}\n    the script is {script}")
    return int(job_id)


def next_commands(job_id: int, folder: Path) -> str:
    """How to look after the job, by Slurm's own commands."""
    return (
        f"status:  squeue --job {job_id}\n"
        f"output:  tail -F {shlex.quote(str(folder / f'slurm-{job_id}.out'))}\n"
        f"cancel:  scancel {job_id}"
    )


def _directives(spec: JobSpec, nodes: int, options: SlurmOptions) -> list[str]:
    """Options of sbatch, as lines of the script."""
    gpus = options.gpus_per_node or _named_gpus(spec)
    values = {
        "job-name": spec.name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-node": gpus,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": "slurm-%j.out",
        "open-mode": "append",
    }
    lines = [f"--{key}={_checked(key, str(value))}" for key, value in values.items() if value is not None]
    for option in options.further:
        if not option.startswith("-"):
            raise SpecError(f"--sbatch {option!r} is no option of sbatch, such as --sbatch=--constraint=a100")
        lines.append(_checked("sbatch", option))
    return [*lines, "--requeue"]


def _named_gpus(spec: JobSpec) -> int | None:
    """How many GPUs a node needs at least, where the job names them."""
    if not isinstance(spec.devices, tuple) or accelerator_of(spec.devices[0]).is_host:
        return None
    indices = [int(name.partition(":")[2]) for name in spec.devices if ":" in name]  # others are UUIDs
    return 1 + max(indices) if len(indices) == len(spec.devices) else None


def _checked(key: str, value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise SpecError(f"--{key}: {value!r} can't stand in a batch script")
    return value
