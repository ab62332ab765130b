"""Schedulers that start gpurun on several nodes, or take jobs for them: a line of the table for each."""

from gpurun.launcher.schedulers.base import Environ, Scheduler
from gpurun.launcher.schedulers.kubernetes import KUBERNETES, TORCHELASTIC, TRAINJOB
from gpurun.launcher.schedulers.mpi import MPI
from gpurun.launcher.schedulers.ray import RAY
from gpurun.launcher.schedulers.slurm import SLURM

SCHEDULERS: dict[str, Scheduler] = {
    "torchelastic": TORCHELASTIC,
    "mpi": MPI,  # before Slurm: below mpirun, Slurm's variables describe what mpirun itself has started
    "slurm": SLURM,
    "kubernetes": KUBERNETES,
    "trainjob": TRAINJOB,
    "ray": RAY,
}
"""All schedulers by name: `gpurun submit --to NAME`. Where several number this node, the first one counts."""


def scheduler_here(environ: Environ) -> Scheduler | None:
    """The scheduler that started this process as a node; `None`: none has.

    Raises:
        SpecError: its variables are not what they should be.
    """
    known = SCHEDULERS.values()
    return next((scheduler for scheduler in known if scheduler.node_rank(environ) is not None), None)


def how_to_requeue(directory: str) -> tuple[str, str] | None:
    """`scontrol requeue 42`, and who knows the job, `Slurm`, from the name of a run's directory."""
    queues = (
        (scheduler.name, scheduler.queue.requeue(directory))
        for scheduler in SCHEDULERS.values()
        if scheduler.queue
    )
    return next(((command, name) for name, command in queues if command), None)
