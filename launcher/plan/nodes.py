"""The nodes of a job, and the devices of all of them together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.errors import MachineError
from launcher.plan.devices import Devices, MachineLike, busy_notes, device_notes, resolve_devices
from launcher.topology import Topology


@dataclass(frozen=True)
class NodeGpu:
    """A GPU of a node."""

    uuid: str
    name: str
    busy_with: str | None = None
    numa_node: int | None = None


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


def node_of(machine: MachineLike, host: str = "localhost", address: str = "", interface: str = "") -> Node:
    """The machine as a node."""
    gpus = tuple(NodeGpu(gpu.uuid, gpu.name, gpu.busy_with, gpu.numa_node) for gpu in machine.gpus)
    return Node(host, address, interface, machine.cpu_cores, gpus, machine.topology)


def assumed_nodes(machine: MachineLike, num_nodes: int) -> tuple[Node, ...]:
    """Nodes of which nothing is known yet: taken to be like this machine. None, if it is the only one."""
    return (node_of(machine),) * num_nodes if num_nodes > 1 else ()


def all_devices(devices: Devices, machine: MachineLike, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The devices of all nodes, node by node: `cuda:0@0`, `cuda:1@0`, `cuda:0@1`, …; without nodes, `cuda:0`.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
        MachineError: a node lacks a GPU that is asked for, or the nodes have devices of different kinds.
    """
    if not nodes:
        return resolve_devices(devices, machine)
    found = [_devices_of(devices, node, rank) for rank, node in enumerate(nodes)]
    kinds = {names[0].partition(":")[0] for names in found}
    if len(kinds) > 1:
        listed = ", ".join(f"{names[0]} ({node.host})" for names, node in zip(found, nodes, strict=True))
        raise MachineError(
            f"`devices: {devices}` means GPUs on some nodes and CPUs on others: {listed}\n"
            "    `devices: cuda` or `devices: cpu:2` means the same everywhere"
        )
    return tuple(f"{name}@{rank}" for rank, names in enumerate(found) for name in names)


def _devices_of(devices: Devices, node: Node, rank: int) -> tuple[str, ...]:
    try:
        return resolve_devices(devices, node)
    except MachineError as error:
        raise MachineError(f"node {rank} ({node.host}): {error}") from error


def node_of_device(name: str) -> int:
    """The node rank in a device's name; 0 where there is one node only."""
    return int(name.partition("@")[2] or 0)


def device_of_node(name: str) -> str:
    """The device as its own node calls it."""
    return name.partition("@")[0]


def cores_per_device(devices: tuple[str, ...], machine: MachineLike, nodes: Sequence[Node]) -> int:
    """A CPU device's share of its node's cores; where the nodes differ, the smallest, for all of them."""
    return min(
        max(1, each.cpu_cores // max(1, sum(node_of_device(name) == rank for name in devices)))
        for rank, each in enumerate(nodes or (machine,))
    )


def notes_on(
    wish: Devices, devices: tuple[str, ...], machine: MachineLike, nodes: Sequence[Node]
) -> tuple[str, ...]:
    """What a person should know about these devices; what is true of several nodes is said once."""
    if not nodes:
        return (*device_notes(devices, machine), *busy_notes(wish, devices, machine))
    notes: list[str] = []
    for rank, node in enumerate(nodes):
        own = tuple(device_of_node(name) for name in devices if node_of_device(name) == rank)
        notes += device_notes(own, node)
        notes += (f"{node.host}: {note}" for note in busy_notes(wish, own, node))
    return tuple(dict.fromkeys(notes))


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


def interface_env(machine: MachineLike) -> Mapping[str, str]:
    """What gloo and NCCL speak through: else the first interface that the host's name resolves to."""
    if not isinstance(machine, Node):
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {"GLOO_SOCKET_IFNAME": machine.interface, "NCCL_SOCKET_IFNAME": machine.interface}
