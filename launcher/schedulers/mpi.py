"""MPI: `mpirun` starts one gpurun per node and numbers them; `--rendezvous` says where they meet.

Sources: Open MPI's documentation, "Environment variables set for MPI applications"; the standard of PMIx; of
Hydra, the launcher of MPICH and Intel MPI, what its version 4.0.2 sets.
"""

import re
import shlex
from collections.abc import Sequence

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
    several_on_one_node,
)
from gpurun.launcher.schedulers.slurm import FIRST_JOB_PORT, MAKE_SECRET, NUM_JOB_PORTS

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
HYDRA = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE")


def node_rank(environ: Environ) -> int | None:
    """The MPI rank of this process, which is alone on its node.

    Raises:
        SpecError: several processes were started here, or variables are missing or contradictory.
    """
    _check_open_mpi(environ)
    names = _names(environ)
    if names is None:
        return None if "SLURM_STEP_ID" in environ else number(environ, "PMIX_RANK")
    rank, local_rank, _ = names
    if number(environ, local_rank):
        remedy = "mpirun --map-by ppr:1:node (Open MPI), mpirun -ppn 1 (MPICH)"
        raise several_on_one_node("mpirun", remedy)
    return number(environ, rank)


def num_nodes(environ: Environ) -> int | None:
    """The number of processes that `mpirun` has started."""
    names = _names(environ)
    return number(environ, names[2]) if names else None


def _check_open_mpi(environ: Environ) -> None:
    """Returns if Open MPI's variables are all there, or none, and give the rank that PMIx gives."""
    missing = [name for name in OPEN_MPI if name not in environ]
    if len(missing) == len(OPEN_MPI):
        return
    if missing:
        given = " and ".join(name for name in OPEN_MPI if name in environ)
        raise SpecError(f"{given} is set without {' and '.join(missing)}: mpirun of Open MPI sets all three")
    rank, other = number(environ, OPEN_MPI[0]), number(environ, "PMIX_RANK")
    if other not in (None, rank):
        raise SpecError(f"{OPEN_MPI[0]} is {rank}, but PMIX_RANK is {other}: unset the one that is wrong")


def _names(environ: Environ) -> tuple[str, str, str] | None:
    """The variables of the launcher; `srun --mpi=pmi2` sets PMI_RANK too, but no local rank."""
    known = (OPEN_MPI, HYDRA)
    return next((names for names in known if names[0] in environ and names[1] in environ), None)


def script(wanted: Submission, options: SubmitOptions) -> str:
    """The script that calls `mpirun`, of whichever MPI there is."""
    nodes, kept = wanted.num_nodes(options), wanted.store_in_bash(options, "${out##*/}")
    lines = [
        "#!/bin/bash",
        f"# {WRITTEN_BY}; to run it again: bash THIS_FILE [OPTIONS OF mpirun]",
        "set -eu",
        f"cd {shlex.quote(str(wanted.directory))}",
        f'out="runs/{wanted.spec.name}/mpi-$(date +%Y%m%d-%H%M%S)"',
        *([f'set -- {shlex.join(in_two_words(options.further))} "$@"'] if options.further else []),
        "",
        *MAKE_SECRET,
        *_OPTIONS,
        *(_NODE_0 if nodes > 1 else ()),
        f'exec mpirun "$@" -np {nodes} \\',
        f'    {shlex.join(wanted.command(options))}{_PLACE if nodes > 1 else ""} --out "$out"{kept}',
    ]
    return "\n".join(lines) + "\n"


def in_two_words(options: Sequence[str]) -> list[str]:
    """Options as Open MPI and MPICH both take them: `--hostfile hosts`, not `--hostfile=hosts`."""
    return [
        word for option in options for word in (option.split("=", 1) if _LONG.match(option) else (option,))
    ]


_LONG = re.compile(r"--[A-Za-z][\w-]*=")
_OPTIONS = (
    "# Open MPI by itself binds gpurun, and all of its ranks, to one core, and hands no variable on.",
    'case "$(mpirun --version)" in',
    f'    *"Open MPI"* | *OpenRTE*) set -- "$@" --map-by ppr:1:node --bind-to none -x {SECRET_VARIABLE} ;;',
    '    *) set -- "$@" -ppn 1 ;;',
    "esac",
    "",
)
_NODE_0 = (
    "# Rank 0 runs on the first host, where the nodes meet; two jobs there hardly draw the same port.",
    f'node0="$(mpirun "$@" -np 1 hostname):$(({FIRST_JOB_PORT} + RANDOM % {NUM_JOB_PORTS}))"',
)
_PLACE = ' --rendezvous "$node0"'

MPI = Scheduler(
    name="mpirun",
    node_rank=node_rank,
    num_nodes=num_nodes,
    preemption="depends on the scheduler that allocated the hosts; mpirun restarts nothing",
    queue=Queue(
        command="mpirun",
        option_example="--hostfile=hosts",
        script_name="submit-mpi.sh",
        takes=frozenset({"out"}),
        script=script,
        call=lambda wanted, options, path, secret: SubmitCommand(("bash", str(path))),
        next_commands=lambda wanted, options, job_id: {},
        is_foreground=True,
    ),
)
