"""MPI: `mpirun` starts one gpurun per node and numbers them; `--rendezvous` says where they meet.

Sources: Open MPI's documentation, "Environment variables set for MPI applications"; the standard of PMIx; of
Hydra, the launcher of MPICH and Intel MPI, what its version 4.0.2 sets.
"""

from gpurun.launcher.schedulers.base import Environ, Scheduler, number, several_on_one_node

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
HYDRA = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE")


def node_rank(environ: Environ) -> int | None:
    """The MPI rank of this process, which is alone on its node.

    Raises:
        SpecError: several processes were started on this node.
    """
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


def _names(environ: Environ) -> tuple[str, str, str] | None:
    """The variables of the launcher; `srun --mpi=pmi2` sets PMI_RANK too, but no local rank."""
    known = (OPEN_MPI, HYDRA)
    return next((names for names in known if names[0] in environ and names[1] in environ), None)


MPI = Scheduler(
    name="mpirun",
    start_hint="mpirun … gpurun JOB.yaml --rendezvous HOST:PORT, with one process per node",
    node_rank=node_rank,
    rendezvous=lambda environ: None,
    num_nodes=num_nodes,
)
