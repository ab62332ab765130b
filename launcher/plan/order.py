"""A launch of the plan as the order that its workers read."""

from collections.abc import Mapping
from pathlib import Path

from launcher.plan.ablation import ablation_rounds
from launcher.plan.devices import MachineLike, is_cuda, resolve_devices
from launcher.plan.model import Launch, Plan, Variant
from launcher.records import LOOPBACK, LaunchOrder, ProfileOrder, RoundTime, VariantOrder
from launcher.spec.model import JobSpec


def order_for(
    plan: Plan,
    spec: JobSpec,
    launch: Launch,
    *,
    run_dir: Path,
    job_dir: Path,
    machine: MachineLike,
    looks: tuple[tuple[int, float], ...],
    prior: Mapping[str, tuple[RoundTime, ...]],
) -> LaunchOrder:
    """Everything that the workers of `launch` need.

    Gradients are checked, traces taken and steps timed without communication in the first launch of a group
    only: later ones repeat its work.

    Args:
        looks: (rounds so far, α of one comparison): when to look, at which level.
        prior: rounds of earlier launches that the looks count as well, by variant.
    """
    variants = [plan.variant(variant_id) for variant_id in launch.variants]
    first, is_first = variants[0], launch.repetition == 0
    return LaunchOrder(
        launch=launch.id,
        run_dir=str(run_dir),
        workload=spec.workload,
        job_dir=str(job_dir),
        params=first.params,
        strategy=first.strategy,
        devices=worker_devices(first),
        backend=backend_for(first),
        precision=first.precision,
        seed=first.seed,
        threads=max(1, machine.cpu_cores // len(resolve_devices(spec.devices, machine))),
        variants=tuple(VariantOrder(item.id, item.split, item.accumulate) for item in variants),
        baseline=plan.baseline if plan.baseline in launch.variants else None,
        warmup=spec.steps.warmup,
        rounds=launch.rounds,
        looks=looks,
        prior=prior,
        gradient_check=spec.gradient_check and is_first,
        profile=_profile(spec) if is_first else None,
        ablation_rounds=ablation_rounds(spec, launch),
        draw=str(run_dir),
        address=plan.nodes[0].address if plan.nodes else LOOPBACK,
    )


def worker_devices(variant: Variant) -> tuple[str, ...]:
    """torch device of each rank or replica, as its process sees them through CUDA_VISIBLE_DEVICES."""
    if not is_cuda(variant.devices):
        return ("cpu",) * len(variant.devices)
    if variant.strategy == "ddp":
        return ("cuda:0",) * len(variant.devices)  # every rank sees its own GPU only
    visible = list(dict.fromkeys(variant.devices))
    return tuple(f"cuda:{visible.index(device)}" for device in variant.devices)


def backend_for(variant: Variant) -> str | None:
    """`nccl` between GPUs of their own, `gloo` on CPU and where ranks share a GPU; `None` for one process."""
    if variant.strategy != "ddp":
        return None
    has_own_gpus = is_cuda(variant.devices) and len(set(variant.devices)) == len(variant.devices)
    return "nccl" if has_own_gpus else "gloo"


def _profile(spec: JobSpec) -> ProfileOrder | None:
    wanted = spec.profile
    if not wanted.steps:
        return None
    return ProfileOrder(**wanted.model_dump())
