"""Finds the largest batch that one device holds, by training steps that may run out of memory."""

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpurun.launcher.errors import GpurunError, SpecError
from gpurun.launcher.rundir.files import append_lines, read_json
from gpurun.launcher.rundir.records import Attempt, LaunchConfig, MaxBatchConfig, VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import format_count
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.exit import finish, print_to_log
from gpurun.launcher.worker.base.failure import text_of
from gpurun.launcher.worker.training.balanced_split import check_memory, release
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.probes.base import Probe

NUM_STEPS = 2
"""The first makes the optimizer's state; the second needs memory for it and everything else."""
TOGETHER = next(name for name, strategy in STRATEGIES.items() if strategy.has_replicas)
"""The strategy of one process with several devices."""
MAX_STEP_S = 10.0
"""A batch whose step takes longer is large enough, whatever the memory."""
RESOLUTION = 32
"""The search ends when the failed size exceeds the fitting one by at most one part in so many."""
MAX_SAMPLES = 1 << 20
"""Samples per device; larger batches aren't limited by memory."""


def main(argv: Sequence[str]) -> None:
    """Searches as the file `argv[0]` says; writes its attempts to the file named there."""
    order = read_json(Path(argv[0]), MaxBatchConfig)
    try:
        search(order)
    except Exception as error:
        message = (
            str(error) if isinstance(error, GpurunError) else f"{type(error).__name__}: {text_of(error)}"
        )
        note(order, "failed", message=message)
        print_to_log(message)
        finish(1)
    finish(0)


def search(order: MaxBatchConfig) -> None:
    """Doubles, then halves the gap; every attempt is recorded before it begins."""
    fits, fails = order.fits, order.fails
    limit_memory(order.limit_bytes)
    try:
        trainer = trainer_of(order)
    except (RuntimeError, MemoryError) as error:
        check_memory(error)
        note(order, "fails", 1)
        note(order, "done")
        return
    dataset = trainer.workload.dataset
    if dataset is not None:
        fails = min(fails or len(dataset) + 1, len(dataset) // order.num_devices + 1)
    while (batch := next_attempt(fits, fails)) is not None:
        note(order, "begins", batch)
        start = time.monotonic()
        try:
            has_room = attempt(trainer, order, batch)
        except RuntimeError as error:
            if not fits or isinstance(error, GpurunError):
                raise
            # Too large for something else than memory; after such an error a GPU takes no more work here.
            note(order, "fails", batch, text_of(error).strip().partition("\n")[0])
            return
        if has_room:
            fits = batch
            note(order, "fits", batch)
            if time.monotonic() - start > NUM_STEPS * MAX_STEP_S:
                note(
                    order, "done", message=f"a step of {format_count(batch)} takes more than {MAX_STEP_S:g} s"
                )
                return
        else:
            fails = batch
            note(order, "fails", batch)
    note(order, "done", message="" if fails else f"no more than {format_count(fits)} are tried")


def next_attempt(fits: int, fails: int | None) -> int | None:
    """The batch to try next: doubled until one fails, then halfway; `None` when close enough.

    Args:
        fits: the largest that fitted; 0 before the first.
        fails: the smallest that didn't, if there is one.
    """
    if fails is None:
        return max(1, 2 * fits) if fits < MAX_SAMPLES else None
    return None if fails - fits <= max(1, fits // RESOLUTION) else (fits + fails) // 2


def attempt(trainer: Trainer, order: MaxBatchConfig, batch: int) -> bool:
    """Whether training steps with so many samples on each device fit in memory."""
    variant = VariantConfig("fit", split_of(order, batch), order.accumulate)
    try:
        buckets = buckets_like(trainer.model) if order.keeps_gradients else []
        for step in range(NUM_STEPS):
            if buckets and order.gradients_are_views:
                give_gradients(trainer.model, buckets)
            trainer.step(trainer.prepare(variant, step), NoClock())
        for device in devices_of(order):
            runtime_of(device).synchronize(device)
        return True
    except (RuntimeError, MemoryError) as error:
        check_memory(error)
    release(trainer)
    return False


def split_of(order: MaxBatchConfig, batch: int) -> tuple[int, ...]:
    """As many samples on each device of this process, and none on those before."""
    return (0,) * order.index + (batch,) * len(order.devices)


def devices_of(order: MaxBatchConfig) -> list[torch.device]:
    return [torch.device(name) for name in order.devices]


def buckets_like(model: torch.nn.Module) -> list[torch.Tensor]:
    """Memory as DDP's buckets take it: a gradient of every parameter."""
    return [torch.zeros_like(parameter) for parameter in model.parameters() if parameter.requires_grad]


def give_gradients(model: torch.nn.Module, buckets: Sequence[torch.Tensor]) -> None:
    """Has the step add up its gradients in the buckets."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    for parameter, bucket in zip(trained, buckets, strict=True):
        parameter.grad = bucket


def trainer_of(order: MaxBatchConfig) -> Trainer:
    """A trainer for the process' devices alone, at their place among the job's."""
    torch.set_num_threads(order.threads)
    torch.manual_seed(order.seed)
    workload = load_workload(order.workload, dict(order.params), Path(order.job_dir))
    if isinstance(workload, Probe):
        raise SpecError(f"{order.workload} is a micro-benchmark: it has no batch to find")
    launch = LaunchConfig(
        launch="fit",
        run_dir="",
        workload=order.workload,
        job_dir=order.job_dir,
        params=order.params,
        strategy="single" if len(order.devices) == 1 else TOGETHER,
        devices=(order.devices[0],) * order.index + order.devices,
        backend=None,
        precision=order.precision,
        seed=order.seed,
        threads=order.threads,
        variants=(VariantConfig("fit", split_of(order, 1), order.accumulate),),
        baseline=None,
        warmup=0,
        rounds=0,
        looks=(),
    )
    return Trainer(workload, launch, order.index)


def limit_memory(limit_bytes: int | None) -> None:
    """Lets this process grow by so many bytes: it runs out of memory before the machine does."""
    if limit_bytes is None:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = size + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))


def note(order: MaxBatchConfig, outcome: str, batch: int = 0, message: str = "") -> None:
    append_lines(Path(order.attempts), [Attempt(outcome, batch, message)])
