"""Combinations that no job can run: each refusal names the key to change and the reason."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpurun.launcher.jobfile.kinds import builtin_named
from gpurun.launcher.jobfile.settings import Settings
from gpurun.launcher.machine.accelerators import CPU, accelerator_of, precision_problem
from gpurun.launcher.plan.combination import Combination, ImpossibleError
from gpurun.launcher.plan.devices import MachineLike, backend_for, gpu_of, is_part
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.plan.nodes import node_of_device
from gpurun.launcher.splits import Split
from gpurun.launcher.strategies import NCCL_ALGORITHMS, NCCL_ANY_PROTOCOL, STRATEGIES, Reach, Strategy
from gpurun.launcher.units import plural


def refuse(wanted: Combination, devices: tuple[str, ...], split: Split) -> None:
    """Refuses combinations that can't run on these devices.

    Raises:
        ImpossibleError: something of it is wanted.
    """
    strategy = wanted.runs_as
    if strategy.reach is Reach.NODE and node_of_device(devices[-1]) > 0:
        reason = f"{strategy.name} is one process, which can't use the devices of several nodes"
        raise ImpossibleError("strategy", reason)
    kind = accelerator_of(devices[0])
    if wanted.has("precision") and (problem := precision_problem(wanted.precision, kind)):
        raise ImpossibleError("precision", problem)
    if refusal := strategy.precision_refusals.get(wanted.precision):
        raise ImpossibleError("precision", f"{strategy.name} has no {wanted.precision}: {refusal}")
    if wanted.has("threads") and wanted.threads != "auto" and not kind.is_host:
        raise ImpossibleError("threads", "`threads` applies to CPU devices only")
    if wanted.compile and strategy.compile_refusal:
        raise ImpossibleError("compile", strategy.compile_refusal)
    if wanted.checkpointing != Settings.checkpointing and strategy.checkpointing_refusal:
        raise ImpossibleError("checkpointing", strategy.checkpointing_refusal)
    if wanted.first_bucket_mb and wanted.first_bucket_mb > wanted.bucket_mb:
        sizes = f"the first bucket of {wanted.first_bucket_mb} MiB is larger than {wanted.bucket_mb} MiB"
        reason = f"{sizes}, the size of the others"
        raise ImpossibleError("first_bucket_mb", reason)
    if wanted.has("accumulate"):
        _check_micro_batches(wanted, split)


def refuse_gpus(variant: Variant, machines: Sequence[MachineLike]) -> None:
    """Refuses combinations that can't run on these very GPUs.

    Raises:
        ImpossibleError: something of it is wanted.
    """
    kind = accelerator_of(variant.devices[0])
    if kind.is_host:
        return
    owners = [(name, machines[node_of_device(name)]) for name in variant.devices]
    capabilities = [gpu_of(name, owner).capability for name, owner in owners]
    if variant.precision and (problem := precision_problem(variant.precision, kind, capabilities)):
        raise ImpossibleError("precision", problem)
    if STRATEGIES[variant.strategy].has_replicas and len(owners) > 1 and any(is_part(*one) for one in owners):
        reason = f"{variant.strategy} is one process, and a process sees only one MIG instance"
        raise ImpossibleError("strategy", reason)


def refuse_backend(variant: Variant, machines: Sequence[MachineLike]) -> None:
    """Refuses combinations that the processes' backend doesn't support.

    Raises:
        ImpossibleError: something of it is wanted.
    """
    backend = backend_for(variant, machines)
    if variant.nccl and backend == CPU.backend:
        raise ImpossibleError("nccl", f"these processes communicate by {backend}, not by NCCL")
    if variant.nccl and (problem := _nccl_problem(STRATEGIES[variant.strategy], variant.nccl)):
        raise ImpossibleError("nccl", problem)
    if variant.comm_hook == "powersgd" and backend == CPU.backend:
        reason = f"torch's PowerSGD hook deadlocks with {CPU.backend}"
        why = "it waits for a collective in the thread that would run it"
        raise ImpossibleError("comm_hook", f"{reason}: {why}")


def _nccl_problem(strategy: Strategy, chosen: Mapping[str, Any]) -> str | None:
    """Why NCCL would fail with this choice, or it would change nothing."""
    algorithm = chosen.get("algorithm", "ring")
    if algorithm not in NCCL_ANY_PROTOCOL and chosen.get("protocol", "simple") != "simple":
        return f"NCCL's {algorithm} has no protocol but `simple`"
    if set(strategy.collectives).isdisjoint(NCCL_ALGORITHMS[algorithm]):
        used = " and ".join(strategy.collectives)
        return f"{strategy.name} communicates by {used}, which NCCL's {algorithm} can't do"
    return None


def _check_micro_batches(wanted: Combination, split: Split) -> None:
    # `balanced` may leave a device out, unless there are several micro-batches to be made of its samples.
    fewest_balanced = wanted.samples // wanted.device_count if wanted.accumulate > 1 else 1
    fewest_samples = min(split.samples, default=fewest_balanced)
    if fewest_samples < wanted.accumulate:
        fewest = plural(fewest_samples, "sample")
        reason = f"{fewest} on a device can't be divided into {plural(wanted.accumulate, 'micro-batch')}"
        raise ImpossibleError("accumulate", reason)
    if wanted.sync_every and wanted.sync_every > wanted.accumulate:
        reason = f"a step has {plural(wanted.accumulate, 'micro-batch')}, fewer than {wanted.sync_every}"
        raise ImpossibleError("sync_every", reason)


def check_count(wanted: Combination, num_devices: int) -> None:
    """Whether the strategy and the workload can use so many devices, and the job has them."""
    strategy, count = wanted.runs_as, wanted.device_count
    if strategy.reach is Reach.DEVICE and count != 1:
        raise ImpossibleError("device_count", f"{strategy.name} uses one device, not {count}")
    if count > num_devices:
        reason = f"the job has {plural(num_devices, 'device')}, not {count}"
        raise ImpossibleError("device_count", reason)
    if wanted.has("shard_size") and (count % wanted.shard_size or count == wanted.shard_size):
        needed = f"{strategy.name} needs at least two whole groups of {plural(wanted.shard_size, 'device')}"
        raise ImpossibleError("shard_size", f"{needed}, which {plural(count, 'device')} can't form")
    builtin = builtin_named(wanted.workload)
    if builtin and count < builtin.min_devices:
        key = "devices" if num_devices < builtin.min_devices else "device_count"
        raise ImpossibleError(key, f"{builtin.why_devices}, but there is only one")


def check_room(wanted: Combination, least: int) -> None:
    """Whether a balanced split can give every device what it must have.

    Raises:
        ImpossibleError: it can't.
    """
    if least == 0 and wanted.runs_as.shards_parameters:
        reason = f"{wanted.strategy} needs every device in every step, so `balanced` can't leave one out"
        raise ImpossibleError("split", f"{reason}; remove `min_local_batch: 0`")
    if least == 0 and wanted.static_graph:
        reason = "`balanced` may give a device no samples, which changes its graph"
        raise ImpossibleError("static_graph", f"{reason}; remove `min_local_batch: 0`")
    if wanted.samples < least * wanted.device_count:
        samples = plural(wanted.samples, "sample")
        reason = f"{samples} can't give {wanted.device_count} devices at least {least} each"
        raise ImpossibleError("split", f"{reason}; `min_local_batch: 0` lets `balanced` leave devices out")
