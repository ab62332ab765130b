"""What the workers of a launch, or the ranks of its program, read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.jobfile.values import MAX_COUNT
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.devices import MachineLike, backend_for, job_devices
from gpurun.launcher.plan.estimate import ablation_rounds
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.rundir.records import (
    BalanceConfig,
    LaunchConfig,
    ProfileConfig,
    ProgramConfig,
    VariantConfig,
    VariantRef,
)
from gpurun.launcher.splits import split_near_even
from gpurun.launcher.strategies import STRATEGIES

COLLECTIVE_MARGIN_S = 300.0
"""By which torch's limit of one collective is above the command's of a variant, so that the command, which
can say who is missing, comes first. It is more than the least time that a start has."""


def launch_config_for(
    plan: Plan,
    spec: JobSpec,
    launch: Launch,
    *,
    run_dir: Path,
    job_dir: Path,
    machine: MachineLike,
    found: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    caps: tuple[int, ...] = (),
) -> LaunchConfig:
    """Everything that the workers of `launch` need.

    Gradients are checked, traces taken, memory looked at and steps timed without communication in the first
    launch of a group only: later ones repeat its work.

    Args:
        found: samples of balanced splits that an earlier launch has found, by variant.
        caps: the most samples of each device of the job, where they are known.
    """
    variants = [plan.variant(variant_id) for variant_id in launch.variants]
    first, is_first = variants[0], launch.repetition == 0
    return LaunchConfig(
        launch=launch.id,
        run_dir=str(run_dir),
        workload=first.workload or str(spec.workload),
        job_dir=str(job_dir),
        params=first.params,
        strategy=first.strategy,
        devices=worker_devices(first),
        backend=backend_for(first, plan.nodes or (machine,)),
        precision=str(first.precision),
        seed=first.seed or 0,
        compile=first.compile,
        checkpointing=first.checkpointing,
        optimizer=first.optimizer,
        workers=first.workers,
        prefetch=first.prefetch,
        channels_last=first.channels_last,
        cudnn_benchmark=first.cudnn_benchmark,
        threads=first.threads or max(1, machine.cpu_cores // len(job_devices(spec, machine))),
        variants=tuple(variant_config(item, found.get(item.id), spec, caps) for item in variants),
        # Both versions of a gate must do the same: neither is measured twice.
        baseline=plan.baseline if plan.baseline in launch.variants and plan.gate is None else None,
        warmup=spec.steps.warmup,
        rounds=launch.rounds,
        gradient_check=spec.gradient_check and is_first,
        profile=_profile(spec) if is_first else None,
        memory=is_first and not first.compile,
        ablation_rounds=ablation_rounds(spec, launch),
        draw=str(run_dir),
        collective_timeout_s=spec.timeout_s + COLLECTIVE_MARGIN_S,
        address=plan.address,
        options=strategy_options(first),
        nccl=first.nccl,
        device_names=first.devices,
        block_ms=accelerator_of(first.devices[0]).block_ms,
    )


def strategy_options(variant: Variant) -> dict[str, Any]:
    """Settings that the variant's strategy takes as keyword arguments."""
    return {
        name: getattr(variant, name)
        for name, setting in SETTINGS.items()
        if setting.option and variant.has(name)
    }


def program_config(
    spec: JobSpec, variant: Variant, launch_id: str, *, run_dir: Path, job_dir: Path, is_first: bool
) -> ProgramConfig:
    """What the ranks of a launch read. Traces are taken in a variant's first launch only."""
    return ProgramConfig(
        launch=launch_id,
        run_dir=str(run_dir),
        job_dir=str(job_dir),
        script=variant.script,
        module=variant.module,
        args=variant.args,
        seed=variant.seed,
        world_size=variant.world_size,
        warmup=spec.steps.warmup,
        variants=(VariantRef(variant.id),),
        profile=_profile(spec) if is_first else None,
    )


def variant_config(
    variant: Variant, found: tuple[int, ...] | None, spec: JobSpec, caps: tuple[int, ...]
) -> VariantConfig:
    """The variant with its samples; a balanced split that is not found yet begins at the even one."""
    accumulate = variant.accumulate or 1
    if variant.split or found:
        samples = variant.split or found or ()
        return VariantConfig(variant.id, samples, accumulate, sync_every=variant.sync_every)
    num_devices = len(variant.devices)
    start = split_near_even(variant.global_batch or 1, num_devices)
    minimum = max(spec.min_local_batch, accumulate if accumulate > 1 else 0)
    balance = BalanceConfig(minimum, caps[:num_devices] or (MAX_COUNT,) * num_devices)
    return VariantConfig(variant.id, start, accumulate, balance, sync_every=variant.sync_every)


def worker_devices(variant: Variant) -> tuple[str, ...]:
    """torch device of each rank or replica, as its process sees them: only its own are visible."""
    owned = STRATEGIES[variant.strategy].devices_by_process(variant.devices)
    return tuple(name for own in owned for name in visible_names(own))


def visible_names(devices: Sequence[str]) -> tuple[str, ...]:
    """What torch calls the devices in a process that sees no others."""
    kind, visible = accelerator_of(devices[0]), list(dict.fromkeys(devices))
    return tuple(kind.name if kind.is_host else kind.device(visible.index(name)) for name in devices)


def _profile(spec: JobSpec) -> ProfileConfig | None:
    wanted = spec.profile
    if not wanted.steps:
        return None
    return ProfileConfig(
        wanted.steps, wanted.shapes, wanted.memory, wanted.stacks, wanted.modules, wanted.ranks
    )
