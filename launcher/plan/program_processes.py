"""Programs that run unchanged: their processes, with the environment of `torchrun`."""

from collections.abc import Mapping, Sequence

from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine import LOOPBACK
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.devices import MachineLike, interface_env, is_part, share_of_cores, visible_gpus
from gpurun.launcher.plan.model import (
    Node,
    Process,
    RankPlace,
    Variant,
    device_of_node,
    node_of_device,
    places,
)


def program_processes(
    spec: JobSpec, variant: Variant, machines: Sequence[MachineLike]
) -> tuple[Process, ...]:
    """One process per device; each sees the launch's GPUs on its node, of which its LOCAL_RANK names one.

    Of parts of GPUs each sees its own, as the first GPU: CUDA shows a process one part only.
    """
    found = places([node_of_device(device) for device in variant.devices])
    shared = {
        place.node: {
            **_interface_env(machines[place.node]),
            **variant.env,
            **_node_env(variant, place, machines[place.node]),
            **_shared_env(place, found[-1].node + 1, store_address(machines[0])),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.restarts),
        }
        for place in found
    }
    return tuple(
        Process(
            rank=place.rank,
            env={**shared[place.node], **_rank_env(place), **_part_env(device, variant, machines)},
            devices=(device,),
            node=place.node,
        )
        for place, device in zip(found, variant.devices, strict=True)
    )


def store_address(first: MachineLike) -> str:
    """The address at which a program's ranks find each other: on the first node, if there are others."""
    return first.address if isinstance(first, Node) else LOOPBACK


def _interface_env(machine: MachineLike) -> Mapping[str, str]:
    """Which way a node reaches the others; on a lone one the rank itself knows."""
    return interface_env(machine) if isinstance(machine, Node) else {}


def _node_env(variant: Variant, place: RankPlace, machine: MachineLike) -> Mapping[str, str]:
    """The variables that depend on the node: its GPUs and its cores."""
    own = tuple(device_of_node(name) for name in variant.devices if node_of_device(name) == place.node)
    threads = str(share_of_cores(place.local_world_size, machine))  # a lone rank may use all cores
    return {
        **visible_gpus(own, machine),
        "OMP_NUM_THREADS": variant.env.get("OMP_NUM_THREADS", threads),
    }


def _part_env(device: str, variant: Variant, machines: Sequence[MachineLike]) -> Mapping[str, str]:
    """Source: NVIDIA's MIG user guide: "CUDA can only enumerate a single compute instance"."""
    gpus = [name for name in variant.devices if not accelerator_of(name).is_host]
    if not any(is_part(device_of_node(name), machines[node_of_device(name)]) for name in gpus):
        return {}
    return visible_gpus((device_of_node(device),), machines[node_of_device(device)])


def part_notes(devices: Sequence[str], machines: Sequence[MachineLike]) -> tuple[str, ...]:
    """The note that ranks which get parts of GPUs see one GPU each, whatever their LOCAL_RANK."""
    kind, has_several = accelerator_of(devices[0]), False
    for node, machine in enumerate(machines if not kind.is_host else ()):
        own = [device_of_node(name) for name in devices if node_of_device(name) == node]
        has_several |= len(own) > 1 and any(is_part(name, machine) for name in own)
    if not has_several:
        return ()
    own_rank, first = f"{kind.name}:LOCAL_RANK", kind.device(0)
    return (f"each rank sees its own MIG instance alone, as {first}: a program that takes {own_rank} fails",)


def _shared_env(place: RankPlace, num_nodes: int, address: str) -> Mapping[str, str]:
    """Variables that `torchrun` gives every rank of one node. MASTER_PORT is known once the store has one."""
    return {
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": address,
        "TORCHELASTIC_RESTART_COUNT": "0",  # of the first attempt
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _rank_env(place: RankPlace) -> Mapping[str, str]:
    return {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank), "ROLE_RANK": str(place.rank)}
