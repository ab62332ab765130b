"""Slurm: its environment (host names, node ranks, a port per job), and a job as a plain batch script.

The script starts one `gpurun` per node, which starts the ranks there itself.
"""

import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpurun.launcher import __version__
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.base import (
    BatchQueue,
    Environ,
    Scheduler,
    Submission,
    SubmitOptions,
    number,
    number_if_plain,
    several_on_one_node,
)

FIRST_SLURM_PORT, NUM_SLURM_PORTS = 20_000, 10_000
"""Below Linux's range of ports for outgoing connections, 32768 and up."""
MAX_HOSTS = 100_000
_PART = re.compile(r"\[([^\][]*)\]|([^\][]+)")
_RANGE = re.compile(r"^(\d{1,18})(?:-(\d{1,18}))?$")


def slurm_port(job_id: int) -> int:
    """A port that two jobs on one node are unlikely to share."""
    return FIRST_SLURM_PORT + job_id % NUM_SLURM_PORTS


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names in `gpu[01-03,7],login`, in order: gpu01, gpu02, gpu03, gpu7, login.

    Source: `man scontrol`, "show hostlist".

    Raises:
        SpecError: it is not such a list, or has too many names.
    """
    names = list(itertools.islice(_all_names(text), MAX_HOSTS + 1))
    if not names or len(names) > MAX_HOSTS:
        raise _unreadable(text)
    return tuple(names)


def _all_names(text: str) -> Iterator[str]:
    for item in _split(text):
        parts = [
            _numbers(found[1], text) if found[1] is not None else (found[2],)
            for found in _PART.finditer(item)
        ]
        if sum(len(found[0]) for found in _PART.finditer(item)) != len(item) or not item:
            raise _unreadable(text)
        yield from map("".join, itertools.product(*parts))


def _unreadable(text: str) -> SpecError:
    return SpecError(f"Slurm's list of nodes can't be read: {text[:200]!r}")


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _numbers(text: str, whole: str) -> tuple[str, ...]:
    """`01-03,7` as 01, 02, 03, 7: as wide as the first number of a range."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise _unreadable(whole)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise _unreadable(whole)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return tuple(found)


def is_task(environ: Environ) -> bool:
    """Whether `srun` started this process; a batch script by itself is not yet one per node."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def node_rank(environ: Environ) -> int | None:
    """Which node of the step this is.

    Raises:
        SpecError: several tasks were started on this node.
    """
    if not is_task(environ):
        return None
    if number(environ, "SLURM_LOCALID"):
        raise several_on_one_node("Slurm", "srun --ntasks-per-node=1")
    return number(environ, "SLURM_NODEID")


def rendezvous(environ: Environ) -> str | None:
    """The first host of the step, and a port of the job's own."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job_id = number(environ, "SLURM_JOB_ID")
    if not is_task(environ) or not hosts or job_id is None:
        return None
    return f"{expand_hosts(hosts)[0]}:{slurm_port(job_id)}"


_VALUE = re.compile(r"[\w.,:;@/%+=\[\]()*&|!-]+", re.ASCII)
"""What options of sbatch may contain; no space or quote, which would begin something else in the script."""


_SECRET = (
    "# The nodes accept only each other: they know a secret, which is made when the job runs.",
    f'export {SECRET_VARIABLE}="$(head -c 32 /dev/urandom | base64 -w 0)"',
    "",
)


def batch_script(wanted: Submission, options: SubmitOptions) -> str:
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
        f"cd {shlex.quote(str(wanted.directory))}",
        "",
        "# A preempted job starts again, possibly on other nodes, and writes to a run directory of its own.",
        f'out="runs/{wanted.spec.name}/slurm-$SLURM_JOB_ID${{SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}}"',
        "",
        *(_SECRET if nodes > 1 else ()),
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
            f"{runner[0]} was not found; submit from a machine of the Slurm cluster\n"
            "    --dry-run prints the script, which you can copy there"
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
        raise MachineError(f"Slurm rejected the job: {reason}\n    the script is {script}")
    return int(job_id)


def next_commands(job_id: int, directory: Path) -> str:
    """How to look after the job, by Slurm's own commands."""
    return (
        f"status:  squeue --job {job_id}\n"
        f"output:  tail -F {shlex.quote(str(directory / f'slurm-{job_id}.out'))}\n"
        f"cancel:  scancel {job_id}"
    )


def _directives(spec: JobSpec, nodes: int, options: SubmitOptions) -> list[str]:
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
            raise SpecError(
                f"--sbatch {option!r} is not an option of sbatch; an example is --sbatch=--constraint=a100"
            )
        lines.append(_checked("sbatch", option))
    return [*lines, "--requeue"]


def _named_gpus(spec: JobSpec) -> int | None:
    """How many GPUs a node needs at least, where the job names them."""
    if not isinstance(spec.devices, tuple) or accelerator_of(spec.devices[0]).is_host:
        return None
    names = [name.partition("@")[0] for name in spec.devices]
    indices = [int(name.partition(":")[2]) for name in names if ":" in name]  # others are UUIDs
    return 1 + max(indices) if len(indices) == len(spec.devices) else None


def _checked(key: str, value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise SpecError(f"--{key}: {value!r} is not allowed in a batch script")
    return value


SLURM = Scheduler(
    name="Slurm",
    start_hint="one task per node under Slurm: gpurun submit JOB.yaml --slurm",
    node_rank=node_rank,
    rendezvous=rendezvous,
    num_nodes=lambda environ: number_if_plain(environ, "SLURM_STEP_NUM_NODES"),
    queue=BatchQueue(
        "sbatch", "--exclusive", "2:00:00", "submit.sbatch", batch_script, submit, next_commands
    ),
)
