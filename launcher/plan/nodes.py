"""The nodes of a job as the plan keeps them, and where on them each rank runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.host import Topology

Cpus = tuple[int, ...]
"""Hardware threads."""


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of a node."""

    uuid: str
    name: str
    busy_with: str | None = None
    numa_node: int | None = None
    kind: str = CUDA.name
    bus: str = ""
    capability: tuple[int, int] | None = None
    unusable: str | None = None


@dataclass(frozen=True)
class Node:
    """The properties of one node that planning needs; its position in the plan is its node rank."""

    host: str
    address: str
    """IP address at which the other nodes reach it."""
    interface: str
    """Network interface that has this address, or the one that the person chose: gloo's and NCCL's."""
    cpu_cores: int
    gpus: tuple[NodeGpu, ...]
    topology: Topology = field(default_factory=lambda: Topology({}, ()))
    notes: tuple[str, ...] = ()
    network_gb_per_s: float | None = None
    """The rate of the interface in one direction; `None` where it doesn't say."""

    @property
    def free_cores(self) -> None:
        """Not measured on several nodes: their plan has to be the same if a lost one is replaced."""
        return None


def node_of_device(name: str) -> int:
    """The node rank in a device's name; 0 where there is one node only."""
    return int(name.partition("@")[2] or 0)


def device_of_node(name: str) -> str:
    """The device as its own node calls it."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank among all ranks, and among those of its node."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables that `torch.distributed` reads."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
        }


def places(nodes: Sequence[int]) -> list[RankPlace]:
    """The places of the ranks whose nodes are given, in their order."""
    return [
        RankPlace(rank, len(nodes), node, nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
    ]


def bind_ranks(bind: str, gpu_nodes: Sequence[int | None], topology: Topology) -> tuple[Cpus, ...]:
    """The hardware threads of each rank; empty: all that there are.

    Args:
        bind: `none`, `numa` or `cores`.
        gpu_nodes: each rank's NUMA node by its GPU; `None` where it has none, or its node isn't known.
    """
    if bind == "none" or not topology.cpus:
        return ((),) * len(gpu_nodes)
    nodes = _nodes(gpu_nodes, topology)
    if bind == "numa":
        return tuple(topology.nodes[node] for node in nodes)
    return _share_cores(nodes, topology)


def _nodes(gpu_nodes: Sequence[int | None], topology: Topology) -> list[int]:
    """A node for every rank: its GPU's, else the nodes in turn by blocks, neighbours together."""
    numbers = list(topology.nodes)
    spread = [numbers[rank * len(numbers) // len(gpu_nodes)] for rank in range(len(gpu_nodes))]
    return [
        wanted if wanted is not None and wanted in topology.nodes else given
        for wanted, given in zip(gpu_nodes, spread, strict=True)
    ]


def _share_cores(nodes: Sequence[int], topology: Topology) -> tuple[Cpus, ...]:
    """Whole cores of its node for every rank, equally many or one more; with too few, ranks share a core."""
    given: list[Cpus] = []
    for rank, node in enumerate(nodes):
        cores = [core for core in topology.cores if core[0] in topology.nodes[node]]
        neighbours = [other for other, its in enumerate(nodes) if its == node]
        position, count = neighbours.index(rank), len(neighbours)
        first, last = position * len(cores) // count, (position + 1) * len(cores) // count
        mine = cores[first:last] or [cores[position % len(cores)]]
        given.append(tuple(cpu for core in mine for cpu in core))
    return tuple(given)


def ranks_there(num_ranks: int) -> str:
    """Which ranks a user may name."""
    return f"the ranks are 0 to {num_ranks - 1}" if num_ranks > 1 else "there is only rank 0"
