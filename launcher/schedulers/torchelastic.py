"""`PET_*`, the variables of torchrun: Kubeflow and other operators on Kubernetes set them for every node."""

from gpurun.launcher.schedulers.base import Environ, Scheduler, number, number_if_plain


def rendezvous(environ: Environ) -> str | None:
    """`PET_RDZV_ENDPOINT`, or `PET_MASTER_ADDR` with its port."""
    if environ.get("PET_RDZV_ENDPOINT"):
        return environ["PET_RDZV_ENDPOINT"]
    host, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT")
    bracketed = f"[{host}]" if host and ":" in host else host
    return f"{bracketed}:{port}" if bracketed and port else bracketed or None


TORCHELASTIC = Scheduler(
    name="PET_NNODES",
    start_hint="PET_NODE_RANK and PET_MASTER_ADDR, as Kubeflow sets them",
    node_rank=lambda environ: number(environ, "PET_NODE_RANK"),
    rendezvous=rendezvous,
    num_nodes=lambda environ: number_if_plain(environ, "PET_NNODES"),
    preemption="as the operator does it",
    names_resolve_late=True,
)
