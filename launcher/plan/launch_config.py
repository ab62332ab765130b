"""The configuration that the workers of a launch, or the ranks of its program, read."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpurun.launcher.grouping import grouped
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.settings import SETTINGS, settings_of
from gpurun.launcher.jobfile.values import MAX_COUNT
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.devices import MachineLike, backend_for, job_devices, share_of_cores
from gpurun.launcher.plan.estimate import ablation_rounds
from gpurun.launcher.plan.expand import processes_of
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import (
    BalanceConfig,
    MemoryPeak,
    ProfileConfig,
    ProgramConfig,
    VariantConfig,
    VariantRef,
)
from gpurun.launcher.splits import split_near_even
from gpurun.launcher.stats.schedule import first_traced_step
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import GIB

COLLECTIVE_MARGIN_S = 300.0
"""How far torch's limit of one collective is above the command's of a variant, so that the command, which
can say who is missing, comes first. It is more than the least time that a start has."""

SHARE_OF_MEMORY = 0.8
"""Share of the memory that several strategies may fill: libraries and fragments take more than tensors."""


def turns_of(plan: Plan, launch: Launch, variants: Collection[str]) -> tuple[Launch, ...]:
    """The launch as each strategy that takes turns in it has it; of those with most processes comes first.

    Args:
        variants: that are to be measured; the others are left out.
    """
    members = grouped((plan.variant(name) for name in launch.variants if name in variants), processes_of)
    in_order = sorted(members.values(), key=lambda group: -group[0].world_size)
    return tuple(
        replace(
            launch,
            variants=tuple(variant.id for variant in group),
            processes=launch.processes[: group[0].world_size],
        )
        for group in in_order
    )


def fit_at_once(
    turns: Sequence[Launch], peaks: Mapping[str, Mapping[int, MemoryPeak]], host: Mapping[str, Any]
) -> bool:
    """Whether the memory holds the models of all strategies at once, by what each has needed alone.

    Args:
        turns: the launch as each of them has it.
        peaks: by variant and rank; without them nothing is known, and no more than one is held at a time.
        host: `host.json`, which has the memory that was free before the run, of each GPU as well.
    """
    if any(not peaks.get(variant) for turn in turns for variant in turn.variants):
        return False
    devices = {device for turn in turns for process in turn.processes for device in process.devices}
    if accelerator_of(next(iter(devices))).is_host:
        return bool(_need(turns, peaks, devices) <= SHARE_OF_MEMORY * host["memory_available_gib"] * GIB)
    free_gib = {}
    for device in devices:
        gpu = host["gpus"][int(device.rpartition(":")[2])]
        free_gib[device] = (gpu["memory_gib"] or 0.0) - (gpu.get("used_gib") or 0.0)
    return all(
        _need(turns, peaks, {device}) <= SHARE_OF_MEMORY * free * GIB for device, free in free_gib.items()
    )


def _need(
    turns: Sequence[Launch], peaks: Mapping[str, Mapping[int, MemoryPeak]], devices: Collection[str]
) -> int:
    """The bytes of all models at once on these devices, which share their memory."""
    needed = 0
    for turn in turns:
        num_own = (
            1 if len(turn.processes) > 1 else None
        )  # the first process has other strategies' devices, too
        owned = {process.rank: set(process.devices[:num_own]) for process in turn.processes}
        ranks = [rank for rank, own in owned.items() if own & set(devices)]
        of_variants = ([peaks[v][rank] for rank in ranks if rank in peaks[v]] for v in turn.variants)
        needed += max(sum(peak.reserved or peak.total for peak in found) for found in of_variants)
    return needed


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
    shared = {
        name: value for name, value in settings_of(first).items() if not SETTINGS[name].shares_processes
    }
    resolved = {
        "workload": first.workload or str(spec.workload),
        "seed": first.seed or 0,
        "threads": first.threads or share_of_cores(len(job_devices(spec, machine)), machine),
    }
    return LaunchConfig(
        **(shared | resolved),
        launch=launch.id,
        run_dir=str(run_dir),
        job_dir=str(job_dir),
        devices=worker_devices(first),
        backend=backend_for(first.strategy, first.devices, plan.nodes or (machine,)),
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
        observe=plan.observe,
        seeds_steps=plan.seeds_steps,
        address=plan.address,
        device_names=first.devices,
        block_ms=accelerator_of(first.devices[0]).block_ms,
    )


def program_config(
    spec: JobSpec,
    variant: Variant,
    launch_id: str,
    *,
    run_dir: Path,
    job_dir: Path,
    is_first: bool,
    observe: bool = False,
    seeds_steps: bool = False,
) -> ProgramConfig:
    """The configuration that the ranks of a launch read. Traces are taken in a variant's first launch.

    Args:
        observe: as in `Plan`, as `seeds_steps` is.
    """
    return ProgramConfig(
        launch=launch_id,
        run_dir=str(run_dir),
        job_dir=str(job_dir),
        script=variant.script,
        module=variant.module,
        args=variant.line,
        calls=variant.calls,
        observe=observe,
        seeds_steps=seeds_steps,
        seed=variant.seed,
        world_size=variant.world_size,
        warmup=spec.steps.warmup,
        variants=(VariantRef(variant.id),),
        profile=_profile(spec) if is_first else None,
        first_traced_step=first_traced_step(
            spec.steps.warmup, accelerator_of(variant.devices[0]).timed_before_trace
        ),
        limit=spec.steps.limit,
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
    """torch's names for the devices in a process that sees no others."""
    kind, visible = accelerator_of(devices[0]), list(dict.fromkeys(devices))
    return tuple(kind.name if kind.is_host else kind.device(visible.index(name)) for name in devices)


def _profile(spec: JobSpec) -> ProfileConfig | None:
    wanted = spec.profile
    if not wanted.steps:
        return None
    return ProfileConfig(
        wanted.steps, wanted.shapes, wanted.memory, wanted.stacks, wanted.modules, wanted.ranks
    )
