"""Which node this is and where the nodes meet: from flags, or from the environment of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.values import Nodes, node_bounds
from gpurun.launcher.schedulers import SCHEDULERS, scheduler_here

DEFAULT_PORT = 29400
"""The port of torchrun: firewalls may be open for it."""
DEFAULT_JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0
"""How long node 0 waits for one more, once enough nodes are there; as torchrun does by default."""

_QUEUES = "|".join(name for name, scheduler in SCHEDULERS.items() if scheduler.queue)
_WAYS = f"""\
on every node, give its own rank and the address of node 0: --node-rank 0 --rendezvous HOST[:PORT]
    or let a scheduler start the nodes of a job: gpurun submit JOB.yaml --to {_QUEUES}"""


@dataclass(frozen=True)
class NodeFlags:
    """The command line's flags about nodes."""

    node_rank: int | None = None
    rendezvous: str | None = None
    interface: str | None = None
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    insecure: bool = False
    """Whether the nodes talk to each other without a secret, and without encryption."""

    @property
    def given(self) -> bool:
        return self.insecure or any(
            flag is not None for flag in (self.node_rank, self.rendezvous, self.interface)
        )


@dataclass(frozen=True)
class Facts:
    """This node's place among the nodes."""

    rank: int
    host: str
    """The rendezvous host, which is node 0."""
    port: int
    resolves_late: bool = False
    """Whether the host's name may not be known yet."""


class RankOutOfRange(SpecError):
    """The job has fewer nodes."""


def find_facts(nodes: Nodes, flags: NodeFlags, environ: Mapping[str, str]) -> Facts:
    """Flags have precedence over the scheduler's environment, for each fact by itself.

    Raises:
        SpecError: a fact is missing, is not a number, or contradicts the job's number of nodes.
    """
    rank, facts = _place(flags, environ)
    if rank is None or facts is None:
        missing = "the rank of this node" if rank is None else "the rendezvous address"
        raise SpecError(f"with {nodes} nodes, {missing} must be set\n    {_WAYS}")
    _, most = bounds_here(nodes, flags, environ)
    if not 0 <= rank < most:
        raise RankOutOfRange(
            f"node rank {rank} is out of range: with {nodes} nodes, ranks are 0 to {most - 1}"
        )
    return facts


def facts_without_job(flags: NodeFlags, environ: Mapping[str, str]) -> tuple[Facts, int | None] | None:
    """This node's place, and the number of nodes if a scheduler gives it; `None`: it is the only node.

    Raises:
        SpecError: a fact is not what it should be.
    """
    _, facts = _place(flags, environ)
    scheduler = scheduler_here(environ) if flags.node_rank is None else None
    num_nodes = scheduler.num_nodes(environ) if scheduler else None
    return None if facts is None or num_nodes == 1 else (facts, num_nodes)


def _place(flags: NodeFlags, environ: Mapping[str, str]) -> tuple[int | None, Facts | None]:
    """The rank of this node if it is known, and all facts if all are."""
    rank, endpoint = flags.node_rank, flags.rendezvous
    try:
        scheduler = scheduler_here(environ)
    except SpecError:
        if rank is None or not endpoint:
            raise
        scheduler = None  # flags say all
    if scheduler is not None:
        rank = scheduler.node_rank(environ) if rank is None else rank
        endpoint = endpoint or scheduler.rendezvous(environ)
    if rank is None or not endpoint:
        return rank, None
    late = scheduler is not None and scheduler.names_resolve_late
    return rank, Facts(rank, *parse_endpoint(endpoint), late)


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
        raise SpecError(f"the rendezvous {text!r} is not HOST[:PORT], such as node0.example.org:29400")
    return host, int(port)


def bounds_here(nodes: Nodes, flags: NodeFlags, environ: Mapping[str, str]) -> tuple[int, int]:
    """The least and the most nodes that may come; flags say nothing about it, a scheduler may.

    Raises:
        SpecError: the environment was made for another number of nodes.
    """
    least, most = node_bounds(nodes)
    scheduler = scheduler_here(environ) if flags.node_rank is None else None
    given = scheduler.num_nodes(environ) if scheduler else None
    if scheduler is None or given is None:
        return least, most
    if not least <= given <= most:
        raise SpecError(
            f"the job has `nodes: {nodes}`, but {scheduler.name} specifies {given}\n"
            f"    make them equal: --set nodes={given}, or start {nodes} nodes"
        )
    return given, given
