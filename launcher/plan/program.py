"""Programs that run unchanged: their variants, and their processes with the environment of `torchrun`."""

from collections.abc import Mapping
from pathlib import Path

from launcher.paths import RunPaths
from launcher.plan.combination import Combination, ImpossibleError
from launcher.plan.devices import MachineLike, visible_gpus
from launcher.plan.model import PROGRAM, Process, Variant
from launcher.spec.model import JobSpec
from launcher.units import plural

_HERE = RunPaths(Path())
"""File names relative to the run directory."""


def program_variant(spec: JobSpec, wanted: Combination, devices: tuple[str, ...]) -> Variant:
    """The variant, still without an id. What only a workload has is `None` or empty.

    Raises:
        ImpossibleError: the job has fewer devices.
    """
    if wanted.device_count > len(devices):
        reason = f"the job has {plural(len(devices), 'device')}, not {wanted.device_count}"
        raise ImpossibleError("device_count", reason)
    is_seeded = "seed" in spec.stated or "seed" in wanted.stated
    return Variant(
        id="",
        strategy=PROGRAM,
        devices=devices[: wanted.device_count],
        split=(),
        split_name="-",
        global_batch=wanted.global_batch,
        precision=None,
        accumulate=None,
        params={},
        seed=wanted.seed if is_seeded else None,
        varied=wanted.stated,
        args=wanted.args,
        env=wanted.env,
    )


def program_processes(
    spec: JobSpec, launch_id: str, variant: Variant, machine: MachineLike
) -> tuple[Process, ...]:
    """One process per device; each sees all GPUs of the launch, of which its LOCAL_RANK names one."""
    head = ("-m", spec.module) if spec.module else (str(spec.script),)
    shared = {
        **variant.env,
        **visible_gpus(variant.devices, machine),
        **_shared_env(f"{spec.name}-{launch_id}", variant.world_size),
        "OMP_NUM_THREADS": variant.env.get("OMP_NUM_THREADS", str(threads_per_rank(variant, machine))),
    }
    return tuple(
        Process(
            rank=rank,
            argv=("python", *head, *variant.args),
            env={**shared, **_rank_env(rank)},
            devices=(device,),
            log=_HERE.log(launch_id, rank).as_posix(),
        )
        for rank, device in enumerate(variant.devices)
    )


def threads_per_rank(variant: Variant, machine: MachineLike) -> int:
    """A rank's fair share of the cores, not 1: a lone rank may use them all."""
    return max(1, machine.cpu_cores // variant.world_size)


def _shared_env(run_id: str, world_size: int) -> Mapping[str, str]:
    """What `torchrun` gives to every rank of one node. MASTER_PORT is known once the store has one."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _rank_env(rank: int) -> Mapping[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
