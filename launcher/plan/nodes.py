"""The nodes of a job, as the plan keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.topology import Topology


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of a node."""

    uuid: str
    name: str
    busy_with: str | None = None
    numa_node: int | None = None
    kind: str = CUDA.name


@dataclass(frozen=True)
class Node:
    """What planning has to know of one node; its position in the plan is its node rank."""

    host: str
    address: str
    """IP address at which the other nodes reach it."""
    interface: str
    """Network interface that has this address, or the one that the person chose: gloo's and NCCL's."""
    cpu_cores: int
    gpus: tuple[NodeGpu, ...]
    topology: Topology = field(default_factory=lambda: Topology({}, ()))


def node_of_device(name: str) -> int:
    """The node rank in a device's name; 0 where there is one node only."""
    return int(name.partition("@")[2] or 0)


def device_of_node(name: str) -> str:
    """The device as its own node calls it."""
    return name.partition("@")[0]


@dataclass(frozen=True)
class Place:
    """Where a rank stands among all ranks, and among those of its node."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int


def places(nodes: Sequence[int]) -> list[Place]:
    """The places of the ranks whose nodes are given, in their order."""
    return [
        Place(rank, len(nodes), node, nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
    ]
