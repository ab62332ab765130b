"""Which node this is and where the nodes meet: from flags, from `PET_*`, or from Slurm's environment."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpurun.launcher.errors import SpecError
from gpurun.launcher.schedulers.slurm_environment import expand_hosts, slurm_port

DEFAULT_PORT = 29400
"""Source: torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.DEFAULT_PORT."""
DEFAULT_JOIN_TIMEOUT_S = 600.0

_WAYS = (
    "say which node this is and where the nodes meet, one of:\n"
    "    gpurun JOB.yaml --node-rank 0 --rendezvous HOST:PORT    (HOST is node 0; the same on every node)\n"
    "    PET_NODE_RANK and PET_MASTER_ADDR, as Kubeflow sets them\n"
    "    one task per node under Slurm: gpurun submit JOB.yaml --slurm"
)


@dataclass(frozen=True)
class NodeFlags:
    """What the command line says about nodes."""

    node_rank: int | None = None
    rendezvous: str | None = None
    interface: str | None = None
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.node_rank, self.rendezvous, self.interface))


@dataclass(frozen=True)
class Facts:
    """This node's place."""

    rank: int
    host: str
    """The rendezvous host, which is node 0."""
    port: int
    run_id: str


def find_facts(num_nodes: int, flags: NodeFlags, environ: Mapping[str, str]) -> Facts:
    """Flags go before `PET_*`, and those before Slurm's variables, for each fact by itself.

    Raises:
        SpecError: a fact is missing, is no number, or contradicts the job's number of nodes.
    """
    rank = _rank(flags, environ)
    endpoint = flags.rendezvous or _pet_endpoint(environ) or _slurm_endpoint(environ)
    if rank is None or endpoint is None:
        missing = "which node this is" if rank is None else "where the nodes meet"
        raise SpecError(f"the job has {num_nodes} nodes, and nothing says {missing}\n    {_WAYS}")
    _check_count(num_nodes, flags, environ)
    if not 0 <= rank < num_nodes:
        raise SpecError(
            f"there is no node {rank}: the job has `nodes: {num_nodes}`, so they are 0 to {num_nodes - 1}"
        )
    host, port = parse_endpoint(endpoint)
    run_id = environ.get("PET_RDZV_ID") or environ.get("SLURM_JOB_ID") or "gpurun"
    return Facts(rank, host, port, run_id)


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host`, `host:port`, `10.0.0.1:29400`, `[fd00::1]:29400` as host and port.

    Raises:
        SpecError: it is something else.
    """
    host, port = text.strip(), str(DEFAULT_PORT)
    if host.startswith("[") and "]" in host:
        host, _, rest = host[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif host.count(":") == 1:
        host, _, port = host.partition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise SpecError(f"the rendezvous {text!r} is no HOST[:PORT], such as node0.example.org:29400")
    return host, int(port)


def _rank(flags: NodeFlags, environ: Mapping[str, str]) -> int | None:
    if flags.node_rank is not None:
        return flags.node_rank
    pet = _number(environ, "PET_NODE_RANK")
    if pet is not None or not _is_slurm_task(environ):
        return pet
    if _number(environ, "SLURM_LOCALID"):
        raise SpecError(
            "Slurm started several tasks on this node; gpurun starts the ranks itself: "
            "srun --ntasks-per-node=1"
        )
    return _number(environ, "SLURM_NODEID")


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; a batch script by itself is not yet one per node."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def _pet_endpoint(environ: Mapping[str, str]) -> str | None:
    if environ.get("PET_RDZV_ENDPOINT"):
        return environ["PET_RDZV_ENDPOINT"]
    host = environ.get("PET_MASTER_ADDR")
    bracketed = f"[{host}]" if host and ":" in host else host
    return f"{bracketed}:{environ.get('PET_MASTER_PORT') or DEFAULT_PORT}" if host else None


def _slurm_endpoint(environ: Mapping[str, str]) -> str | None:
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job_id = _number(environ, "SLURM_JOB_ID")
    if not _is_slurm_task(environ) or not hosts or job_id is None:
        return None
    return f"{expand_hosts(hosts)[0]}:{slurm_port(job_id)}"


def _check_count(num_nodes: int, flags: NodeFlags, environ: Mapping[str, str]) -> None:
    """Whoever set the environment up may have another number in mind; flags say nothing about it."""
    if flags.node_rank is not None:
        return
    for key, giver in (("PET_NNODES", "PET_NNODES"), ("SLURM_STEP_NUM_NODES", "Slurm")):
        given = environ.get(key, "")
        if given.isdecimal() and int(given) != num_nodes:
            raise SpecError(
                f"the job has `nodes: {num_nodes}`, and {giver} says {given}\n"
                f"    make them equal: --set nodes={given}, or start {num_nodes} nodes"
            )


def _number(environ: Mapping[str, str], key: str) -> int | None:
    text = environ.get(key)
    if text is None or text == "":
        return None
    if not text.isdecimal():
        raise SpecError(f"the environment variable {key} should be a number, not {text!r}")
    return int(text)
