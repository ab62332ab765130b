"""The whole run as data: launches in ABBA order, and every process of every launch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import SpecError
from launcher.paths import RunPaths
from launcher.plan.devices import MachineLike, gpu_index, is_cuda
from launcher.plan.estimate import estimate_s
from launcher.plan.expand import expand
from launcher.plan.ids import group_id, make_unique
from launcher.plan.model import Launch, Plan, Process, Variant
from launcher.plan.nodes import Node, device_of_node, node_of_device
from launcher.spec.model import JobSpec

__all__ = ["Group", "build_plan", "estimate_s"]

LAUNCHES_TO_COMPARE = 6
"""With fewer pairs of launches a comparison across launches stays inconclusive."""

MAX_PROCESSES = 20_000
"""A run that starts more would take days; keeps a slip in the job file from filling the memory."""

_HERE = RunPaths(Path())
"""File names relative to the run directory."""


@dataclass(frozen=True)
class Group:
    """Variants that can share processes: only their batches differ."""

    name: str
    variants: tuple[Variant, ...]


def build_plan(spec: JobSpec, machine: MachineLike, nodes: Sequence[Node] = ()) -> Plan:
    """All that a run of this job on this machine, or on these nodes, will do.

    Raises:
        SpecError: the job makes no sense on these devices, or its plan would be too large.
        MachineError: the machine lacks what the job asks for.
    """
    expansion = expand(spec, machine, nodes)
    machines = tuple(nodes) or (machine,)
    groups = _groups(expansion.variants)
    repetitions = spec.steps.launches or (1 if len(groups) == 1 else LAUNCHES_TO_COMPARE)
    _check_size(spec, groups, repetitions)
    _check_ranks(spec, expansion.variants)
    return Plan(
        name=spec.name,
        workload=spec.workload,
        baseline=expansion.baseline,
        variants=expansion.variants,
        left_out=expansion.left_out,
        launches=_launches(groups, repetitions, math.ceil(spec.steps.rounds / repetitions), machines),
        notes=expansion.notes,
        nodes=tuple(nodes),
    )


def _groups(variants: tuple[Variant, ...]) -> tuple[Group, ...]:
    members: dict[str, list[Variant]] = {}
    for variant in variants:
        shared = (variant.strategy, variant.devices, variant.precision, variant.params, variant.seed)
        members.setdefault(json.dumps(shared, sort_keys=True), []).append(variant)
    firsts = [group[0] for group in members.values()]
    names = make_unique([group_id(first.strategy, len(first.devices), first.varied) for first in firsts])
    return tuple(Group(name, tuple(group)) for name, group in zip(names, members.values(), strict=True))


def _launches(
    groups: tuple[Group, ...], repetitions: int, rounds: int, machines: Sequence[MachineLike]
) -> tuple[Launch, ...]:
    """ABBA: every other repetition runs the groups backwards, so that a steady drift cancels between them."""
    order = [
        (repetition, group)
        for repetition in range(repetitions)
        for group in (groups if repetition % 2 == 0 else groups[::-1])
    ]
    return tuple(
        _launch(f"{position:02d}-{group.name}", group, repetition, rounds, machines)
        for position, (repetition, group) in enumerate(order, start=1)
    )


def _launch(
    launch_id: str, group: Group, repetition: int, rounds: int, machines: Sequence[MachineLike]
) -> Launch:
    first = group.variants[0]
    owned = [(device,) for device in first.devices] if first.strategy == "ddp" else [first.devices]
    places = _places([node_of_device(devices[0]) for devices in owned])
    processes = [
        _process(launch_id, place, devices, first, machines)
        for place, devices in zip(places, owned, strict=True)
    ]
    return Launch(
        id=launch_id,
        group=group.name,
        repetition=repetition,
        variants=tuple(variant.id for variant in group.variants),
        rounds=rounds,
        processes=tuple(processes),
    )


@dataclass(frozen=True)
class _Place:
    """Where a rank stands among all ranks, and among those of its node."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int


def _places(nodes: Sequence[int]) -> list[_Place]:
    """The places of the ranks whose nodes are given, in their order."""
    return [
        _Place(rank, len(nodes), node, nodes[:rank].count(node), nodes.count(node))
        for rank, node in enumerate(nodes)
    ]


def _process(
    launch_id: str,
    place: _Place,
    devices: tuple[str, ...],
    variant: Variant,
    machines: Sequence[MachineLike],
) -> Process:
    order = _HERE.order(launch_id).as_posix()
    machine = machines[place.node]
    return Process(
        rank=place.rank,
        argv=("python", "-m", "launcher.worker", order, str(place.rank)),
        env={
            **_rank_env(place),
            **(_interface_env(machine) if variant.strategy == "ddp" else {}),
            **_visible_gpus(tuple(map(device_of_node, devices)), machine),
        },
        devices=devices,
        log=_HERE.log(launch_id, place.rank).as_posix(),
        node=place.node,
    )


def _rank_env(place: _Place) -> Mapping[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
    }


def _interface_env(machine: MachineLike) -> Mapping[str, str]:
    """What gloo and NCCL speak through: else the first interface that the host's name resolves to."""
    if not isinstance(machine, Node):
        return {"GLOO_SOCKET_IFNAME": "lo"}
    return {"GLOO_SOCKET_IFNAME": machine.interface, "NCCL_SOCKET_IFNAME": machine.interface}


def _visible_gpus(devices: tuple[str, ...], machine: MachineLike) -> Mapping[str, str]:
    """UUIDs mean the same GPUs whatever order CUDA or an outer CUDA_VISIBLE_DEVICES counts in."""
    if not is_cuda(devices):
        return {"CUDA_VISIBLE_DEVICES": ""}
    distinct = dict.fromkeys(devices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[gpu_index(name)].uuid for name in distinct)}


def _check_size(spec: JobSpec, groups: tuple[Group, ...], repetitions: int) -> None:
    per_repetition = sum(
        len(group.variants[0].devices) if group.variants[0].strategy == "ddp" else 1 for group in groups
    )
    if per_repetition * repetitions > MAX_PROCESSES:
        message = (
            f"the plan would start {per_repetition * repetitions:,} processes; {MAX_PROCESSES:,} is the most"
        )
        raise SpecError(spec.problem(("compare",), message, "vary fewer keys, or lower `steps.launches`"))


def _check_ranks(spec: JobSpec, variants: tuple[Variant, ...]) -> None:
    """Every rank to be recorded is there in some variant."""
    num_ranks = max(variant.world_size for variant in variants)
    beyond = [rank for rank in spec.profile.ranks or () if rank >= num_ranks]
    if beyond:
        message = f"no variant has a rank {beyond[0]}: the ranks are 0 to {num_ranks - 1}"
        raise SpecError(spec.problem(("profile", "ranks"), message, "`dp` and `single` have rank 0 alone"))
