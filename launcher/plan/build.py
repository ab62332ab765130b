"""The whole run as data: launches in ABBA order, and every process of every launch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import SpecError
from launcher.paths import RunPaths
from launcher.plan.binding import bind_ranks
from launcher.plan.devices import MachineLike, gpu_index, is_cuda, job_devices, visible_gpus
from launcher.plan.estimate import estimate_s
from launcher.plan.expand import expand, processes_of
from launcher.plan.ids import group_id, make_unique
from launcher.plan.model import Launch, Plan, Process, Variant
from launcher.plan.program import program_processes
from launcher.spec.builtins import is_probe
from launcher.spec.model import JobSpec

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


def build_plan(spec: JobSpec, machine: MachineLike) -> Plan:
    """All that a run of this job on this machine will do.

    Raises:
        SpecError: the job makes no sense on these devices, or its plan would be too large.
        MachineError: the machine lacks what the job asks for.
    """
    assumed, notes = assume_batch(spec, machine)
    expansion = expand(assumed, machine)
    groups = _groups(expansion.variants)
    is_compared = len(groups) > 1 and not is_probe(spec.workload)
    repetitions = spec.steps.launches or (LAUNCHES_TO_COMPARE if is_compared else 1)
    _check_size(spec, groups, repetitions)
    _check_ranks(spec, expansion.variants)
    return Plan(
        name=spec.name,
        workload=str(spec.program or spec.workload),
        baseline=expansion.baseline,
        variants=expansion.variants,
        left_out=expansion.left_out,
        launches=_launches(spec, groups, repetitions, machine),
        notes=(*notes, *expansion.notes),
    )


def assume_batch(spec: JobSpec, machine: MachineLike) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with a batch to plan with where nobody has looked yet what `max` comes to, and a note of it."""
    if spec.global_batch != "max" or spec.compare.global_batch:
        return spec, ()
    batch = ASSUMED_SAMPLES * len(job_devices(spec, machine))
    note = f"`global_batch: max` is found when the run begins; {batch} samples stand in for it here"
    return replace(spec, global_batch=batch), (note,)


def _groups(variants: tuple[Variant, ...]) -> tuple[Group, ...]:
    members: dict[str, list[Variant]] = {}
    for variant in variants:
        key = variant.id if variant.is_program else json.dumps(processes_of(variant), sort_keys=True)
        members.setdefault(key, []).append(variant)
    firsts = [group[0] for group in members.values()]
    names = make_unique([_group_name(first) for first in firsts])
    return tuple(Group(name, tuple(group)) for name, group in zip(names, members.values(), strict=True))


def _group_name(first: Variant) -> str:
    """Of a program the variant's own: no other can share its processes."""
    return first.id if first.is_program else group_id(first.strategy, len(first.devices), first.varied)


def _launches(
    spec: JobSpec, groups: tuple[Group, ...], repetitions: int, machine: MachineLike
) -> tuple[Launch, ...]:
    """ABBA: every other repetition runs the groups backwards, so that a steady drift cancels between them."""
    rounds = 1 if spec.program else math.ceil(spec.steps.rounds / repetitions)
    order = [
        (repetition, group)
        for repetition in range(repetitions)
        for group in (groups if repetition % 2 == 0 else groups[::-1])
    ]
    launches = (
        _launch(spec, f"{position:02d}-{group.name}", group, repetition, rounds, machine)
        for position, (repetition, group) in enumerate(order, start=1)
    )
    return tuple(_bound(launch, spec.bind, machine) for launch in launches)


def _launch(
    spec: JobSpec, launch_id: str, group: Group, repetition: int, rounds: int, machine: MachineLike
) -> Launch:
    first = group.variants[0]
    if first.is_program:
        processes = program_processes(spec, launch_id, first, machine)
    else:
        processes = _processes(launch_id, first, machine)
    return Launch(
        id=launch_id,
        group=group.name,
        repetition=repetition,
        variants=tuple(variant.id for variant in group.variants),
        rounds=rounds,
        processes=processes,
    )


def _processes(launch_id: str, first: Variant, machine: MachineLike) -> tuple[Process, ...]:
    owned = [(device,) for device in first.devices] if first.strategy == "ddp" else [first.devices]
    return tuple(
        _process(launch_id, rank, devices, len(owned), first, machine) for rank, devices in enumerate(owned)
    )


def _process(
    launch_id: str,
    rank: int,
    devices: tuple[str, ...],
    world_size: int,
    variant: Variant,
    machine: MachineLike,
) -> Process:
    order = _HERE.order(launch_id).as_posix()
    return Process(
        rank=rank,
        argv=("python", "-m", "launcher.worker", order, str(rank)),
        env={**_rank_env(rank, world_size, variant.strategy), **visible_gpus(devices, machine)},
        devices=devices,
        log=_HERE.log(launch_id, rank).as_posix(),
    )


def device_env(device: str, rank: int, machine: MachineLike) -> Mapping[str, str]:
    """The environment of a process that has one device to itself, and no peers."""
    return {**_rank_env(rank, 1, "single"), **visible_gpus((device,), machine)}


def _bound(launch: Launch, bind: str, machine: MachineLike) -> Launch:
    """The launch with the cores of its ranks."""
    if bind == "none":
        return launch
    firsts = [process.devices[0] for process in launch.processes]
    nodes = [machine.gpus[gpu_index(name)].numa_node if is_cuda([name]) else None for name in firsts]
    cpus = bind_ranks(bind, nodes, machine.topology)
    processes = zip(launch.processes, cpus, strict=True)
    return replace(launch, processes=tuple(replace(process, cpus=its) for process, its in processes))


def _rank_env(rank: int, world_size: int, strategy: str) -> Mapping[str, str]:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    # All ranks are on this machine; a host name that resolves to an outer address makes gloo time out.
    return {**env, "GLOO_SOCKET_IFNAME": "lo"} if strategy == "ddp" else env


def _check_size(spec: JobSpec, groups: tuple[Group, ...], repetitions: int) -> None:
    per_repetition = sum(group.variants[0].world_size for group in groups)
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
