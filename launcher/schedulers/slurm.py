"""Slurm: its environment (host names, node ranks, a port per job), and a job as a plain batch script.

The script starts one `gpurun` per node, which starts the ranks there itself.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping

from gpurun.launcher.errors import SpecError
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.base import (
    WRITTEN_BY,
    Environ,
    Queue,
    Scheduler,
    Submission,
    SubmitCommand,
    SubmitOptions,
    number,
    number_if_plain,
    several_on_one_node,
)

FIRST_JOB_PORT, NUM_JOB_PORTS = 20_000, 10_000
"""The range of ports at which nodes meet: below Linux's range for outgoing connections, 32768 and up."""
MAX_HOSTS = 100_000
NOTICE_S = 120
"""How long before the time limit ranks get SIGUSR1; Slurm may send it up to a minute earlier."""
_PART = re.compile(r"\[([^\][]*)\]|([^\][]+)")
_RANGE = re.compile(r"^(\d{1,18})(?:-(\d{1,18}))?$")


def slurm_port(job_id: int) -> int:
    """A port that two jobs on one node are unlikely to share."""
    return FIRST_JOB_PORT + job_id % NUM_JOB_PORTS


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
    """The parts of the text between commas outside brackets."""
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
"""The characters that options of sbatch may contain; no space or quote, which would begin something else."""


CHOOSE_RUN = """\
# Queued again, after a preemption, the job continues its run; on other nodes, whose times would be mixed with
# those that it has, it begins another one.
id="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}"
out="runs/{name}/slurm-$id" resume=
if [ -n "${{SLURM_RESTART_COUNT:-}}" ]; then
    if [ -f "$out/plan.json" ] && [ "$(cat "$out.nodes")" = "$SLURM_JOB_NODELIST" ]; then
        resume=--resume
    else
        out="$out-restart$SLURM_RESTART_COUNT"
    fi
fi
mkdir -p "runs/{name}"
echo "$SLURM_JOB_NODELIST" > "$out.nodes"
"""
MAKE_SECRET = (
    "# The nodes accept only each other: they know a secret, which is made when the job runs.",
    f'export {SECRET_VARIABLE}="$(head -c 32 /dev/urandom | base64 -w 0)"',
    "",
)


def batch_script(wanted: Submission, options: SubmitOptions) -> str:
    """The script; the same for the same arguments.

    Raises:
        SpecError: an option's value can't be written to a script.
    """
    nodes, command = wanted.num_nodes(options), wanted.command(options, wanted.nodes(options))
    kept = wanted.store_in_bash(options, "${out##*/}")
    srun = ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1"]
    if options.cpus_per_task:
        srun.append(f"--cpus-per-task={options.cpus_per_task}")  # srun doesn't take it over from sbatch
    lines = [
        "#!/bin/bash",
        f"# {WRITTEN_BY}; to submit it again: sbatch THIS_FILE",
        *(f"#SBATCH {option}" for option in _directives(wanted, options)),
        "set -eu",
        f"cd {shlex.quote(str(wanted.directory))}",
        "",
        CHOOSE_RUN.format(name=wanted.spec.name),
        *(MAKE_SECRET if nodes > 1 else ()),
        "# One gpurun per node starts all ranks there. The nodes meet on the first one, at port",
        f"# {FIRST_JOB_PORT} + job id % {NUM_JOB_PORTS}.",
        f'exec {shlex.join(srun)} \\\n    {shlex.join(command)} --out "$out"{kept} $resume',
    ]
    return "\n".join(lines) + "\n"


def next_commands(wanted: Submission, options: SubmitOptions, job_id: str) -> Mapping[str, str]:
    """How to look after the job, by Slurm's own commands."""
    name, runs = f"slurm-{job_id}", shlex.quote(options.out or f"runs/{wanted.spec.name}")
    return {
        "state": f"squeue --job {job_id}",
        "logs": f"tail -F {shlex.quote(str(wanted.directory))}/{name}{'_*' if is_array(options) else ''}.out",
        "results": f"gpurun view {runs}" if is_array(options) else wanted.report(options, name),
        "cancel": f"scancel {job_id}",
    }


def job_id_in(wanted: Submission, output: str) -> str | None:
    """The id in `42;cluster`, as `sbatch --parsable` prints it."""
    job_id = output.partition(";")[0]
    return job_id if job_id.isdecimal() else None


def requeue(directory: str) -> str:
    """`scontrol requeue 42_1` of `slurm-42_1`, as `CHOOSE_RUN` names a run's directory."""
    job = re.fullmatch(r"slurm-(\d+(?:_\d+)?)", directory, re.ASCII)
    return f"scontrol requeue {job[1]}" if job else ""


def _directives(wanted: Submission, options: SubmitOptions) -> list[str]:
    """Options of sbatch, as lines of the script."""
    values = {
        "job-name": wanted.spec.name if wanted.spec.name.isascii() else wanted.label,
        "nodes": str(wanted.nodes(options)).replace("..", "-"),
        "ntasks-per-node": 1,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-node": wanted.num_gpus(options) or None,
        "time": clock(options.time) if options.time else None,
        "partition": options.partition,
        "account": options.account,
        "signal": f"USR1@{NOTICE_S}" if options.time else None,
        "output": f"slurm-{'%A_%a' if is_array(options) else '%j'}.out",
        "open-mode": "append",
    }
    lines = [f"--{key}={_checked(key, str(value))}" for key, value in values.items() if value is not None]
    for option in options.further:
        if not option.startswith("-"):
            raise SpecError(
                f"--sbatch {option!r} is not an option of sbatch; an example is --sbatch=--constraint=a100"
            )
        if _OURS.match(option):
            raise SpecError(f"--sbatch={option}: gpurun starts one task on each node; --nodes says how many")
        lines.append(_checked("sbatch", option))
    return [*lines, "--requeue"]


_OURS = re.compile(r"-[Nn]|--(nodes|ntasks|ntasks-per-node)(=|$)")
_ABOUT_GPUS = re.compile(r"--(gpus|gres|exclusive|tres)|-G")


def gpus_note(wanted: Submission, options: SubmitOptions) -> str | None:
    """The note that no GPU is requested, where the job may want some: a partition may give them unasked."""
    if wanted.num_gpus(options) is not None or any(map(_ABOUT_GPUS.match, options.further)):
        return None
    return (
        f"{wanted.leaves_gpus_open}; the script requests none\n"
        "    --gpus-per-node 8 requests them, where the partition doesn't give them anyway"
    )


def clock(limit_s: int) -> str:
    """Seconds as Slurm writes them: `1-12:00:00`, `2:00:00`."""
    days, rest_s = divmod(limit_s, 24 * 3600)
    time = f"{rest_s // 3600}:{rest_s // 60 % 60:02d}:{rest_s % 60:02d}"
    return f"{days}-{time}" if days else time


def is_array(options: SubmitOptions) -> bool:
    """Whether the job is an array: every element is a run."""
    return any(option.startswith(("--array=", "-a")) for option in options.further)


def _checked(key: str, value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise SpecError(f"--{key}: {value!r} is not allowed in a batch script")
    return value


SLURM = Scheduler(
    name="Slurm",
    node_rank=node_rank,
    rendezvous=rendezvous,
    num_nodes=lambda environ: number_if_plain(environ, "SLURM_STEP_NUM_NODES"),
    preemption=f"SIGUSR1 {NOTICE_S} s before --time is up, then SIGTERM; queued again, it continues its run",
    queue=Queue(
        command="sbatch",
        option_example="--exclusive",
        script_name="submit.sbatch",
        takes=frozenset({"out", "time", "partition", "account", "gpus_per_node", "cpus_per_task"}),
        script=batch_script,
        call=lambda wanted, options, path, secret: SubmitCommand(("sbatch", "--parsable", str(path))),
        next_commands=next_commands,
        note=gpus_note,
        job_id=job_id_in,
        requeue=requeue,
        fewer="2 to 4, as many as Slurm gives (`--nodes=2-4`)",
    ),
)
