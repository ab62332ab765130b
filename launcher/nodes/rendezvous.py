"""Which node this is and where the nodes meet: from flags, or from the environment of a scheduler."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from gpurun.launcher.errors import SpecError
from gpurun.launcher.schedulers import SCHEDULERS

T = TypeVar("T")

DEFAULT_PORT = 29400
"""That of torchrun: firewalls may be open for it."""
DEFAULT_JOIN_TIMEOUT_S = 600.0

_WAYS = "\n    ".join(
    (
        "set the node rank and the rendezvous address in one of these ways:",
        "gpurun JOB.yaml --node-rank 0 --rendezvous HOST:PORT    (HOST is node 0; the same on every node)",
        *(scheduler.start_hint for scheduler in SCHEDULERS.values()),
    )
)


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
            one is not None for one in (self.node_rank, self.rendezvous, self.interface)
        )


@dataclass(frozen=True)
class Facts:
    """This node's place among the nodes."""

    rank: int
    host: str
    """The rendezvous host, which is node 0."""
    port: int


def find_facts(num_nodes: int, flags: NodeFlags, environ: Mapping[str, str]) -> Facts:
    """Flags have precedence over the schedulers' environments, for each fact by itself.

    Raises:
        SpecError: a fact is missing, is not a number, or contradicts the job's number of nodes.
    """
    rank, endpoint = _place(flags, environ)
    if rank is None or endpoint is None:
        missing = "the rank of this node" if rank is None else "the rendezvous address"
        raise SpecError(f"the job has {num_nodes} nodes, but {missing} is not set\n    {_WAYS}")
    _check_count(num_nodes, flags, environ)
    if not 0 <= rank < num_nodes:
        raise SpecError(
            f"node rank {rank} is out of range: the job has `nodes: {num_nodes}`, so its ranks are 0 to "
            f"{num_nodes - 1}"
        )
    host, port = parse_endpoint(endpoint)
    return Facts(rank, host, port)


def facts_without_job(flags: NodeFlags, environ: Mapping[str, str]) -> tuple[Facts, int | None] | None:
    """This node's place, and the number of nodes if a scheduler gives it; `None`: it is the only node.

    Raises:
        SpecError: a fact is not what it should be.
    """
    rank, endpoint = _place(flags, environ)
    counts = (each.num_nodes(environ) for each in SCHEDULERS.values())
    num_nodes = None if flags.node_rank is not None else _first(None, counts)
    if rank is None or endpoint is None or num_nodes == 1:
        return None
    return Facts(rank, *parse_endpoint(endpoint)), num_nodes


def _place(flags: NodeFlags, environ: Mapping[str, str]) -> tuple[int | None, str | None]:
    known = SCHEDULERS.values()
    rank = _first(flags.node_rank, (each.node_rank(environ) for each in known))
    return rank, _first(flags.rendezvous or None, (each.rendezvous(environ) for each in known))


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


def _first(flag: T | None, from_schedulers: Iterable[T | None]) -> T | None:
    """What the flag says, or the first scheduler that says something; the others are not asked."""
    return next((value for value in chain((flag,), from_schedulers) if value is not None), None)


def _check_count(num_nodes: int, flags: NodeFlags, environ: Mapping[str, str]) -> None:
    """The environment may have been made for another number of nodes; flags say nothing about it."""
    if flags.node_rank is not None:
        return
    for scheduler in SCHEDULERS.values():
        given = scheduler.num_nodes(environ)
        if given is not None and given != num_nodes:
            raise SpecError(
                f"the job has `nodes: {num_nodes}`, but {scheduler.name} specifies {given}\n"
                f"    make them equal: --set nodes={given}, or start {num_nodes} nodes"
            )
