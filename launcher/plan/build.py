"""The whole run as data: launches in ABBA order, and every process of every launch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.devices import MachineLike, gpu_of, visible_gpus
from gpurun.launcher.plan.estimate import estimate_s
from gpurun.launcher.plan.expand import expand, processes_of
from gpurun.launcher.plan.ids import group_id, make_unique
from gpurun.launcher.plan.model import Launch, Plan, Process, Variant
from gpurun.launcher.plan.nodes import Node, Place, bind_ranks, device_of_node, node_of_device, places
from gpurun.launcher.plan.program_processes import program_processes
from gpurun.launcher.plan.spread import all_devices, interface_env
from gpurun.launcher.rundir.paths import RunPaths
from gpurun.launcher.strategies import STRATEGIES

__all__ = ["Group", "build_plan", "estimate_s"]

LAUNCHES_TO_COMPARE = 6
"""With fewer pairs of launches a comparison across launches stays inconclusive."""

ASSUMED_SAMPLES = 64
"""On each device, in a plan that is made before the largest batch is known."""

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
    assumed, notes = assume_batch(spec, machine, nodes)
    expansion = expand(assumed, machine, nodes)
    groups = _groups(expansion.variants)
    is_compared = len(groups) > 1 and spec.kind.is_ranked
    repetitions = spec.steps.launches or (LAUNCHES_TO_COMPARE if is_compared else 1)
    _check_size(spec, groups, repetitions)
    _check_ranks(spec, expansion.variants)
    return Plan(
        name=spec.name,
        workload=str(spec.program or spec.workload),
        baseline=expansion.baseline,
        variants=expansion.variants,
        left_out=expansion.left_out,
        launches=_launches(spec, groups, repetitions, tuple(nodes) or (machine,)),
        notes=(*notes, *expansion.notes),
        nodes=tuple(nodes),
    )


def assume_batch(
    spec: JobSpec, machine: MachineLike, nodes: Sequence[Node] = ()
) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with a batch to plan with where the largest one isn't found yet, and a note of it."""
    if spec.global_batch != "max" or spec.compare.global_batch:
        return spec, ()
    batch = ASSUMED_SAMPLES * len(all_devices(spec, machine, nodes))
    note = f"`global_batch: max` is found when the run begins; {batch} samples are assumed here"
    return replace(spec, global_batch=batch), (note,)


def _groups(variants: tuple[Variant, ...]) -> tuple[Group, ...]:
    members: dict[str, list[Variant]] = {}
    for variant in variants:
        key = processes_of(variant) if variant.kind.shares_processes else variant.id
        members.setdefault(key, []).append(variant)
    firsts = [group[0] for group in members.values()]
    names = make_unique([_group_name(first) for first in firsts])
    return tuple(Group(name, tuple(group)) for name, group in zip(names, members.values(), strict=True))


def _group_name(first: Variant) -> str:
    """Of a program the variant's own: no other can share its processes."""
    if not first.kind.shares_processes:
        return first.id
    return group_id(first.strategy, len(first.devices), first.varied)


def _launches(
    spec: JobSpec, groups: tuple[Group, ...], repetitions: int, machines: Sequence[MachineLike]
) -> tuple[Launch, ...]:
    """ABBA: every other repetition runs the groups backwards, so that a steady drift cancels between them."""
    rounds = math.ceil(spec.steps.rounds / repetitions) if spec.kind.has_rounds else 1
    order = [
        (repetition, group)
        for repetition in range(repetitions)
        for group in (groups if repetition % 2 == 0 else groups[::-1])
    ]
    launches = (
        _launch(spec, f"{position:02d}-{group.name}", group, repetition, rounds, machines)
        for position, (repetition, group) in enumerate(order, start=1)
    )
    return tuple(_bound(launch, spec.bind, machines) for launch in launches)


def _launch(
    spec: JobSpec,
    launch_id: str,
    group: Group,
    repetition: int,
    rounds: int,
    machines: Sequence[MachineLike],
) -> Launch:
    first = group.variants[0]
    if first.kind.runs_program:
        processes = program_processes(spec, launch_id, first, machines)
    else:
        processes = _processes(launch_id, first, machines)
    return Launch(
        id=launch_id,
        group=group.name,
        repetition=repetition,
        variants=tuple(variant.id for variant in group.variants),
        rounds=rounds,
        processes=processes,
    )


def _processes(launch_id: str, first: Variant, machines: Sequence[MachineLike]) -> tuple[Process, ...]:
    owned = STRATEGIES[first.strategy].devices_by_process(first.devices)
    found = places([node_of_device(devices[0]) for devices in owned])
    return tuple(
        _process(launch_id, place, devices, first, machines)
        for place, devices in zip(found, owned, strict=True)
    )


def _process(
    launch_id: str,
    place: Place,
    devices: tuple[str, ...],
    variant: Variant,
    machines: Sequence[MachineLike],
) -> Process:
    order = _HERE.launch_config(launch_id).as_posix()
    machine = machines[place.node]
    return Process(
        rank=place.rank,
        argv=("python", "-m", "gpurun.launcher.worker", order, str(place.rank)),
        env={
            **_rank_env(place),
            **(interface_env(machine) if STRATEGIES[variant.strategy].has_backend else {}),
            **visible_gpus(tuple(map(device_of_node, devices)), machine),
        },
        devices=devices,
        log=_HERE.log(launch_id, place.rank).as_posix(),
        node=place.node,
    )


def device_env(devices: tuple[str, ...], rank: int, machine: MachineLike) -> Mapping[str, str]:
    """The environment of a process that has these devices to itself, and no peers."""
    alone = Place(rank, 1, node=0, local_rank=rank, local_world_size=1)
    return {**_rank_env(alone), **visible_gpus(devices, machine)}


def _bound(launch: Launch, bind: str, machines: Sequence[MachineLike]) -> Launch:
    """The launch with the cores of its ranks, of each on its own node."""
    if bind == "none":
        return launch
    cpus: dict[int, tuple[int, ...]] = {}
    for node, machine in enumerate(machines):
        its = [process for process in launch.processes if process.node == node]
        numa = [_numa_node(process.devices[0], machine) for process in its]
        cpus |= zip((process.rank for process in its), bind_ranks(bind, numa, machine.topology), strict=True)
    return replace(
        launch, processes=tuple(replace(process, cpus=cpus[process.rank]) for process in launch.processes)
    )


def _numa_node(device: str, machine: MachineLike) -> int | None:
    return None if accelerator_of(device).is_host else gpu_of(device, machine).numa_node


def _rank_env(place: Place) -> Mapping[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
    }


def _check_size(spec: JobSpec, groups: tuple[Group, ...], repetitions: int) -> None:
    per_repetition = sum(group.variants[0].world_size for group in groups)
    if per_repetition * repetitions > MAX_PROCESSES:
        message = (
            f"the plan would start {per_repetition * repetitions:,} processes; "
            f"at most {MAX_PROCESSES:,} are allowed"
        )
        raise SpecError(spec.problem(("compare",), message, "vary fewer keys, or lower `steps.launches`"))


def _check_ranks(spec: JobSpec, variants: tuple[Variant, ...]) -> None:
    """Every rank to be recorded is there in some variant."""
    num_ranks = max(variant.world_size for variant in variants)
    beyond = [rank for rank in spec.profile.ranks or () if rank >= num_ranks]
    if beyond:
        message = f"no variant has a rank {beyond[0]}: the ranks are 0 to {num_ranks - 1}"
        raise SpecError(
            spec.problem(("profile", "ranks"), message, "a strategy with one process has only rank 0")
        )
