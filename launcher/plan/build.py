"""The whole run as data: launches in random order, and every process of every launch, also of programs."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gpurun.launcher.errors import MachineError, Problem, SpecError
from gpurun.launcher.grouping import grouped
from gpurun.launcher.jobfile.load import JobError, in_order
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.read import Draft
from gpurun.launcher.jobfile.section import Setting
from gpurun.launcher.jobfile.values import node_bounds
from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.combination import group_id, make_unique, too_large
from gpurun.launcher.plan.devices import (
    MachineLike,
    assumed_nodes,
    crowding,
    gpu_of,
    interface_env,
    is_part,
    share_of_cores,
    visible_gpus,
)
from gpurun.launcher.plan.estimate import LAUNCHES_TO_COMPARE, unused_budget
from gpurun.launcher.plan.expand import (
    Expansion,
    assume_batch,
    expand,
    file_of,
    judge,
    processes_in_turns,
    processes_of,
)
from gpurun.launcher.plan.model import (
    MAX_PROCESSES,
    GatePlan,
    Launch,
    Node,
    Plan,
    Process,
    RankPlace,
    SideName,
    Variant,
    bind_ranks,
    device_of_node,
    devices_of_node,
    node_of_device,
    rank_places,
    ranks_there,
)
from gpurun.launcher.stats.schedule import MOST_REPETITIONS, ROUNDS, shuffled
from gpurun.launcher.strategies import STRATEGIES

SHORTEST_LAUNCH_S = 1.0
"""The shortest launch without its warm-up: a budget can't be enough for more."""

TOGETHER = "together"
"""Name of a group of several strategies."""


@dataclass(frozen=True)
class Group:
    """Variants that share processes: only their batches differ, or their strategies take turns."""

    name: str
    variants: tuple[Variant, ...]

    @property
    def largest(self) -> Variant:
        """The first one with the most processes; others need only the first of these."""
        return max(self.variants, key=lambda variant: variant.world_size)


def build_plan(
    spec: JobSpec,
    machine: MachineLike,
    nodes: Sequence[Node] = (),
    gate: GatePlan | None = None,
    chosen: Collection[str] = (),
    sets: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """All that a run of this job on this machine, or on these nodes, will do.

    With a gate, every variant is there twice, once for each version of the code; both are launched in turns.
    With `chosen`, ids of what a search has found, these are all variants; with `sets`, the job with these
    settings.

    Raises:
        SpecError: the job makes no sense on these devices, or its plan would be too large.
        MachineError: the machine lacks what the job asks for.
    """
    assumed, notes = assume_batch(spec, machine, nodes)
    expansion = expand(assumed, machine, nodes, with_own=bool(chosen), sets=sets)
    expansion = _only(expansion, chosen) if chosen else expansion
    groups = groups_of(expansion.variants, processes_of, lambda setting: not setting.shares_processes)
    baseline = expansion.baseline
    if gate is not None:
        ids = (variant.id for group in groups for variant in group.variants)
        gate = replace(gate, pairs=tuple((_side_id(name, "a"), _side_id(name, "b")) for name in ids))
        groups = tuple(_of_side(group, gate, side) for group in groups for side in SIDES)
        baseline = _side_id(baseline, "a")
    later = _in_turns(spec, groups) if gate is None and not nodes else groups
    size = _size(spec, groups, is_gate=gate is not None, has_turns=len(later) < len(groups))
    started = size.repetitions * sum(group.variants[0].world_size for group in groups)
    variants = tuple(variant for group in groups for variant in group.variants)
    if problems := [*too_large(spec, started, variants), *_missing_ranks(spec, variants)]:
        raise SpecError(*problems)
    return Plan(
        name=spec.name,
        workload=str(spec.program or spec.workload),
        baseline=baseline,
        variants=variants if gate else expansion.variants,
        left_out=expansion.left_out,
        launches=_launches(spec, groups, later, size, tuple(nodes) or (machine,)),
        notes=(
            *notes,
            *expansion.notes,
            *(gate.notes if gate else ()),
        ),
        unused_budget=unused_budget(spec, size.budget_s),
        nodes=tuple(nodes),
        budget_s=size.budget_s,
        crowding=crowding({name for variant in variants for name in variant.devices}, machine, nodes),
        gate=gate,
    )


def _only(expansion: Expansion, chosen: Collection[str]) -> Expansion:
    """The chosen variants; what else there is belongs to the search that chose them."""
    variants = tuple(variant for variant in expansion.variants if variant.id in chosen)
    baseline = expansion.baseline if expansion.baseline in chosen else variants[0].id
    return replace(expansion, variants=variants, left_out=(), baseline=baseline)


SIDES: tuple[SideName, SideName] = ("a", "b")
"""Both versions of a group are neighbours, so that they see the machine in the same state."""


def _side_id(name: str, side: SideName) -> str:
    return f"{name}-{side}"


def _of_side(group: Group, gate: GatePlan, side: SideName) -> Group:
    """The group as one version of the code has it."""
    code = {"code": gate.side(side).name}
    variants = (
        replace(variant, id=_side_id(variant.id, side), side=side, varied={**variant.varied, **code})
        for variant in group.variants
    )
    return Group(_side_id(group.name, side), tuple(variants))


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    repetitions: int
    """Launches of each group; the most there can be, with a budget."""
    rounds: int
    """The rounds of a launch."""
    budget_s: float | None
    """`None`: the size is fixed."""


def _size(spec: JobSpec, groups: tuple[Group, ...], is_gate: bool, has_turns: bool) -> Size:
    """A fixed size, or short launches that are repeated until all is decided.

    Where strategies take turns, one repetition more: the first one doesn't count.
    """
    variants = [variant for group in groups for variant in group.variants]
    is_compared = is_gate or (
        len(variants) > 1 and all(variant.same_task(variants[0]) for variant in variants)
    )
    if spec.has_fixed_size or not is_compared:
        is_across = len(groups) > 1 and spec.kind.is_ranked
        launches = spec.steps.launches or (LAUNCHES_TO_COMPARE if is_across else 1)
        rounds = 1 if spec.kind.runs_program else math.ceil(spec.steps.rounds / launches)
        return Size(launches + (has_turns and launches > 1), rounds, None)
    fit = math.ceil(spec.budget_s / (SHORTEST_LAUNCH_S * len(groups)))
    per_repetition = sum(group.variants[0].world_size for group in groups)
    most = min(MOST_REPETITIONS, fit, MAX_PROCESSES // per_repetition)
    rounds = 1 if spec.kind.runs_program else ROUNDS
    return Size(max(most, LAUNCHES_TO_COMPARE) + has_turns, rounds, spec.budget_s)


@contextmanager
def with_mistakes_of_plan(inspect: Callable[[], MachineLike]) -> Iterator[None]:
    """Joins a job's mistakes, where loading it raises them, with what can't be on this machine."""
    try:
        yield
    except JobError as error:
        if error.draft is None:
            raise
        more = _mistakes_of_plan(error.draft, inspect())
        raise SpecError(*in_order([*error.problems, *more], file_of(error.draft.spec))) from None


def _mistakes_of_plan(draft: Draft, machine: MachineLike) -> Sequence[Problem]:
    nodes = assumed_nodes(machine, node_bounds(draft.spec.nodes)[1])
    try:
        spec, _ = assume_batch(draft.spec, machine, nodes)
        judged = judge(replace(draft, spec=spec), machine, nodes)
        unknown = {str(path[0]) for path in draft.unknown} & JobSpec.keys.keys()
        if judged.lacking or judged.problems or judged.is_open or unknown - {"steps"}:
            return [*judged.lacking, *judged.problems]
        if unknown:
            return list(_missing_ranks(spec, [variant for _, variant in judged.built]))
        build_plan(draft.spec, machine, nodes)
    except (SpecError, MachineError) as error:
        return error.problems
    return ()


def groups_of(
    variants: Sequence[Variant], processes: Callable[[Variant], str], is_apart: Callable[[Setting], bool]
) -> tuple[Group, ...]:
    """The variants that share processes, by a key of these; a program shares them with no other.

    A group is named by its settings that set processes apart.
    """
    members = grouped(variants, lambda each: each.id if each.kind.runs_program else processes(each))
    names = make_unique([group_id(group[0], is_apart) for group in members.values()])
    return tuple(Group(name, tuple(group)) for name, group in zip(names, members.values(), strict=True))


def _in_turns(spec: JobSpec, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups of later launches: strategies that can take turns in the same processes are one group."""
    largest: dict[str, Variant] = {}
    for first in (group.variants[0] for group in groups):
        key = processes_in_turns(first)
        largest[key] = max(largest.get(key, first), first, key=lambda variant: variant.world_size)
    members: dict[str, list[Group]] = {}
    for group in groups:
        key = processes_in_turns(first := group.variants[0])
        members.setdefault(key if _fits_into(first, largest[key], spec) else group.name, []).append(group)
    found = [
        Group(
            TOGETHER if of_key[1:] else of_key[0].name, tuple(v for group in of_key for v in group.variants)
        )
        for of_key in members.values()
    ]
    names = make_unique([group.name for group in found])
    return tuple(replace(group, name=name) for group, name in zip(found, names, strict=True))


def _fits_into(variant: Variant, largest: Variant, spec: JobSpec) -> bool:
    """Whether a variant can run in the processes of another one: in all of them, or in the first one alone.

    Threads of one process that is bound to its share of the cores would have no more than that share.
    """
    together = spec.steps.together
    strategy, is_host = STRATEGIES[variant.strategy], accelerator_of(variant.devices[0]).is_host
    if not variant.kind.trains or not (is_host if together == "auto" else together == "always"):
        return False
    if variant.world_size > 1:
        return variant.devices == largest.devices
    is_bound = strategy.has_replicas and spec.bind != "none"
    return variant.devices[0] == largest.devices[0] and not is_bound and not strategy.has_backend


def _launches(
    spec: JobSpec,
    groups: tuple[Group, ...],
    later: tuple[Group, ...],
    size: Size,
    machines: Sequence[MachineLike],
) -> tuple[Launch, ...]:
    """The groups of each repetition, after the first one in an order drawn by itself.

    Other load that lasts longer than a launch then affects two groups alike on average, whatever its rhythm:
    the sign of a difference without a cause is a fair coin in each repetition. In ABBA order, a burst that
    is longer than a launch meets the same group twice.

    Args:
        groups: of the first repetition.
        later: those of all others.
    """
    order = [
        (repetition, group)
        for repetition in range(size.repetitions)
        for group in (_drawn(later, f"{spec.name}/{repetition}") if repetition else groups)
    ]
    processes = {group.name: _processes(spec, group, machines) for group in (*groups, *later)}
    return tuple(
        _launch(f"{position:02d}-{group.name}", group, repetition, size.rounds, processes[group.name])
        for position, (repetition, group) in enumerate(order, start=1)
    )


def _drawn(groups: Sequence[Group], seed: str) -> Iterator[Group]:
    """The groups in random order; both versions of one stay neighbours, in random order as well."""
    versions: dict[str, list[Group]] = {}
    for group in groups:
        side = group.variants[0].side
        versions.setdefault(group.name.removesuffix(f"-{side}") if side else group.name, []).append(group)
    for name in shuffled(tuple(versions), seed):
        yield from shuffled(versions[name], f"{seed}/{name}")


def build_launch(spec: JobSpec, group: Group, machine: MachineLike) -> Launch:
    """One launch of these variants on this machine, by the group's name."""
    return _launch(group.name, group, 0, 1, _processes(spec, group, (machine,)))


def _launch(
    launch_id: str, group: Group, repetition: int, rounds: int, processes: tuple[Process, ...]
) -> Launch:
    variants = tuple(variant.id for variant in group.variants)
    return Launch(launch_id, group.name, repetition, variants, rounds, processes)


def _processes(spec: JobSpec, group: Group, machines: Sequence[MachineLike]) -> tuple[Process, ...]:
    """The processes of each launch of a group, with their cores."""
    first = group.variants[0]
    is_program = first.kind.runs_program
    found = _program_processes(spec, first, machines) if is_program else _of_workload(group, machines)
    return _bound(found, spec.bind, machines)


def _of_workload(group: Group, machines: Sequence[MachineLike]) -> tuple[Process, ...]:
    """Each with its own devices; the first one also with those of variants that run in it alone."""
    largest = group.largest
    strategy = STRATEGIES[largest.strategy]
    first, *others = strategy.devices_by_process(largest.devices)
    alone = (device for variant in group.variants if variant.world_size == 1 for device in variant.devices)
    owned = [tuple(dict.fromkeys((*first, *alone))), *others]
    found = rank_places([node_of_device(devices[0]) for devices in owned])
    return tuple(
        Process(
            rank=place.rank,
            env={
                **place.env,
                **(interface_env(machines[place.node]) if strategy.has_backend else {}),
                **visible_gpus(tuple(map(device_of_node, devices)), machines[place.node]),
            },
            devices=devices,
            node=place.node,
        )
        for place, devices in zip(found, owned, strict=True)
    )


def device_env(devices: tuple[str, ...], rank: int, machine: MachineLike) -> Mapping[str, str]:
    """The environment of a process that has these devices to itself, and no peers."""
    alone = RankPlace(rank, 1, node=0, local_rank=rank, local_world_size=1)
    return {**alone.env, **visible_gpus(devices, machine)}


def _bound(processes: tuple[Process, ...], bind: str, machines: Sequence[MachineLike]) -> tuple[Process, ...]:
    """The processes with their cores, of each on its own node."""
    if bind == "none":
        return processes
    cpus: dict[int, tuple[int, ...]] = {}
    for node, machine in enumerate(machines):
        its = [process for process in processes if process.node == node]
        numa = [_numa_node(process.devices[0], machine) for process in its]
        cpus |= zip((process.rank for process in its), bind_ranks(bind, numa, machine.topology), strict=True)
    return tuple(replace(process, cpus=cpus[process.rank]) for process in processes)


def _numa_node(device: str, machine: MachineLike) -> int | None:
    return None if accelerator_of(device).is_host else gpu_of(device, machine).numa_node


def _missing_ranks(spec: JobSpec, variants: Sequence[Variant]) -> Iterator[Problem]:
    """Every rank to be recorded is there in some variant."""
    num_ranks = max(variant.world_size for variant in variants)
    beyond = [rank for rank in spec.profile.ranks or () if rank >= num_ranks]
    if beyond:
        message = f"no variant has a rank {beyond[0]}: {ranks_there(num_ranks)}"
        yield spec.problem(("profile", "ranks"), message, "a strategy with one process has only rank 0")


def _program_processes(
    spec: JobSpec, variant: Variant, machines: Sequence[MachineLike]
) -> tuple[Process, ...]:
    """One process per device; each sees the launch's GPUs on its node, of which its LOCAL_RANK names one.

    Of parts of GPUs each sees its own, as the first GPU: CUDA shows a process one part only.
    """
    found = rank_places([node_of_device(device) for device in variant.devices])
    first = machines[0] if isinstance(machines[0], Node) else None  # a lone rank knows its interface itself
    shared = {
        place.node: {
            **_ELASTIC_ENV,
            **(interface_env(machines[place.node]) if first else {}),
            **variant.env,
            **_node_env(variant, place, machines[place.node]),
            **_shared_env(place, found[-1].node + 1, first.address if first else LOOPBACK),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.restarts),
        }
        for place in found
    }
    return tuple(
        Process(
            rank=place.rank,
            env={
                **shared[place.node],
                "RANK": str(place.rank),
                "LOCAL_RANK": str(place.local_rank),
                "ROLE_RANK": str(place.rank),
                **_part_env(device, variant, machines),
            },
            devices=(device,),
            node=place.node,
        )
        for place, device in zip(found, variant.devices, strict=True)
    )


_ELASTIC_ENV = {
    "ROLE_NAME": "default",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Variables of ranks that options of `torchrun`, or a job, change."""


def _node_env(variant: Variant, place: RankPlace, machine: MachineLike) -> Mapping[str, str]:
    """The variables that depend on the node: its GPUs and its cores."""
    own = devices_of_node(place.node, variant.devices)
    threads = str(share_of_cores(place.local_world_size, machine))  # a lone rank may use all cores
    return {
        **visible_gpus(own, machine, only_present=True),
        "OMP_NUM_THREADS": variant.env.get("OMP_NUM_THREADS", threads),
    }


def _part_env(device: str, variant: Variant, machines: Sequence[MachineLike]) -> Mapping[str, str]:
    """The variable by which a process sees its own GPU alone, where the variant has parts of GPUs.

    Source: NVIDIA's MIG user guide: "CUDA can only enumerate a single compute instance".
    """
    gpus = [name for name in variant.devices if not accelerator_of(name).is_host]
    if not any(is_part(device_of_node(name), machines[node_of_device(name)]) for name in gpus):
        return {}
    return visible_gpus((device_of_node(device),), machines[node_of_device(device)])


def _shared_env(place: RankPlace, num_nodes: int, address: str) -> Mapping[str, str]:
    """Variables that `torchrun` gives every rank of one node. MASTER_PORT is known once the store has one.

    `address`: the store's, on the first node.
    """
    return {
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": address,
        "TORCHELASTIC_RESTART_COUNT": "0",  # of the first attempt
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
