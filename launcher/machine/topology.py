"""Which hardware threads share a core and a NUMA node, and which node a GPU is nearest to: from sysfs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """The part of the machine that this process may use. Empty where sysfs has no answer."""

    nodes: Mapping[int, tuple[int, ...]]
    """NUMA node → its hardware threads, as Linux numbers them."""
    cores: tuple[tuple[int, ...], ...]
    """Hardware threads by physical core."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for cpus in self.nodes.values() for cpu in cpus))


def inspect_topology(allowed: Sequence[int] | None = None, root: Path = Path("/")) -> Topology:
    """The topology that the kernel reports.

    Args:
        allowed: hardware threads that may be used; by default those of this process's affinity.
        root: under which `sys` is looked up.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {
        int(node.name.removeprefix("node")): parse_cpus(_read(node / "cpulist"))
        for node in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    reachable = {node: tuple(cpu for cpu in cpus if cpu in usable) for node, cpus in sorted(nodes.items())}
    cores = {_siblings(root, cpu, usable) for cpu in usable}
    return Topology(
        nodes={node: cpus for node, cpus in reachable.items() if cpus} or {0: tuple(usable)},
        cores=tuple(sorted(cores)),
    )


def gpu_node(bus: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device, `0000:1b:00.0`; `None` where there is one node only, or it isn't known.

    Source: Documentation/ABI/testing/sysfs-bus-pci, numa_node; −1 means that the firmware didn't say.
    """
    text = _read(root / "sys/bus/pci/devices" / bus / "numa_node") if bus else ""
    return int(text) if text.isdecimal() else None


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8` as 0, 1, 2, 3, 8.

    Source: Documentation/admin-guide/cputopology.rst.
    """
    cpus: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _siblings(root: Path, cpu: int, usable: Sequence[int]) -> tuple[int, ...]:
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return tuple(sibling for sibling in parse_cpus(text) if sibling in usable) or (cpu,)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
