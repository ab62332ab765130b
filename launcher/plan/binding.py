"""On which cores the ranks of a launch run: pure."""

from collections.abc import Sequence

from gpurun.launcher.machine.topology import Topology

Cpus = tuple[int, ...]


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
