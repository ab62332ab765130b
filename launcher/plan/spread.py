"""The devices of all nodes together, and the environment of each."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from gpurun.launcher.errors import MachineError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.values import devices_on
from gpurun.launcher.machine.accelerators import ACCELERATORS, CPU, accelerator_of, gpu_kinds
from gpurun.launcher.plan.devices import (
    Devices,
    MachineLike,
    busy_notes,
    device_notes,
    job_devices,
    resolve_devices,
)
from gpurun.launcher.plan.nodes import Node, NodeGpu, device_of_node, node_of_device


def node_of(machine: MachineLike, host: str = "localhost", address: str = "", interface: str = "") -> Node:
    """The machine as a node."""
    known = [one.name for one in fields(NodeGpu)]
    gpus = tuple(NodeGpu(*(getattr(gpu, name) for name in known)) for gpu in machine.gpus)
    return Node(host, address, interface, machine.cpu_cores, gpus, machine.topology, tuple(machine.notes))


def assumed_nodes(machine: MachineLike, num_nodes: int) -> tuple[Node, ...]:
    """Nodes of which nothing is known yet: taken to be like this machine. None, if it is the only one."""
    return (node_of(machine),) * num_nodes if num_nodes > 1 else ()


def all_devices(spec: JobSpec, machine: MachineLike, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The devices of all nodes, node by node: `cuda:0@0`, `cuda:1@0`, `cuda:0@1`, …; without nodes, `cuda:0`.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
        MachineError: a node lacks a GPU that is asked for, or the nodes have devices of different kinds.
    """
    if not nodes:
        return job_devices(spec, machine)
    found = [_devices_of(spec, node, rank) for rank, node in enumerate(nodes)]
    kinds = {accelerator_of(names[0]).name for names in found}
    if len(kinds) > 1:
        listed = ", ".join(f"{names[0]} ({node.host})" for names, node in zip(found, nodes, strict=True))
        message = f"`devices: {spec.devices}` means GPUs on some nodes and CPUs on others: {listed}"
        hint = f"`devices: {gpu_kinds()[0].name}` or `devices: cpu:2` means the same everywhere"
        raise MachineError(str(spec.problem(("devices",), message, hint)))
    return tuple(f"{name}@{rank}" for rank, names in enumerate(found) for name in names)


def _devices_of(spec: JobSpec, node: Node, rank: int) -> tuple[str, ...]:
    try:
        return resolve_devices(devices_on(spec.devices, rank), node)
    except MachineError as error:
        message = f"node {rank} ({node.host}): {error}"
        raise MachineError(str(spec.problem(("devices",), message))) from error


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
        return (*device_notes(wish, devices, machine), *busy_notes(wish, devices, machine))
    notes: list[str] = []
    for rank, node in enumerate(nodes):
        own = tuple(device_of_node(name) for name in devices if node_of_device(name) == rank)
        notes += device_notes(wish, own, node)
        notes += (f"{node.host}: {note}" for note in busy_notes(wish, own, node))
    return tuple(dict.fromkeys(notes))


def interface_env(machine: MachineLike) -> Mapping[str, str]:
    """What gloo and NCCL speak through: else the first interface that the host's name resolves to."""
    if not isinstance(machine, Node):
        return {CPU.interface_variable: "lo"}
    return {kind.interface_variable: machine.interface for kind in ACCELERATORS.values()}
