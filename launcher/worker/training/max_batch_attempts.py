"""Finds the largest batch that one device holds, by training steps that may run out of memory."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from gpurun.launcher.errors import GpurunError, SpecError
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import append_lines, read_json
from gpurun.launcher.rundir.records import MAX_STEP_S, Attempt, MaxBatchConfig, VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import format_count, plural
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.exit import finish, print_to_log
from gpurun.launcher.worker.base.failure import if_it_fits, is_out_of_memory, text_of
from gpurun.launcher.worker.training.balanced_split import release
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.micro_benchmarks import Probe

NUM_STEPS = 2
"""The first makes the optimizer's state; the second needs memory for it and everything else."""
TOGETHER = next(name for name, strategy in STRATEGIES.items() if strategy.has_replicas)
"""The strategy of one process with several devices."""
RESOLUTION = 32
"""The search ends when the failed size exceeds the fitting one by at most one part in so many."""
MAX_SAMPLES = 1 << 20
"""Samples per device; larger batches aren't limited by memory."""


def main(argv: Sequence[str]) -> None:
    """Searches as the file `argv[0]` says; writes its attempts to the file named there."""
    config = read_json(Path(argv[0]), MaxBatchConfig)
    try:
        search(config)
    except Exception as error:
        message = (
            str(error) if isinstance(error, GpurunError) else f"{type(error).__name__}: {text_of(error)}"
        )
        note(config, "failed", message=message)
        print_to_log(message)
        finish(1)
    finish(0)


def search(config: MaxBatchConfig) -> None:
    """Doubles, then halves the gap; every attempt is recorded before it begins."""
    fits, fails = config.fits, config.fails
    if config.limit_bytes is not None:
        device = devices_of(config)[0]
        runtime_of(device).limit_memory(device, config.limit_bytes)
    trainer = if_it_fits(partial(trainer_of, config))
    if trainer is None:
        note(config, "fails", 1)
        note(config, "done")
        return
    dataset = trainer.workload.dataset
    most = MAX_SAMPLES if dataset is None else max(1, len(dataset) // config.num_devices)
    while (batch := next_attempt(fits, fails, most)) is not None:
        note(config, "begins", batch)
        start = time.monotonic()
        try:
            has_room = attempt(trainer, config, batch)
        except RuntimeError as error:
            if not fits or isinstance(error, GpurunError):
                raise
            # Too large for something else than memory; after such an error a GPU takes no more work here.
            note(config, "fails", batch, text_of(error).strip().partition("\n")[0])
            return
        if has_room:
            fits = batch
            step_s = (time.monotonic() - start) / NUM_STEPS
            note(config, "fits", batch, step_s=step_s)
            if step_s > config.max_step_s:
                note(config, "done", message=too_long(batch, config.max_step_s))
                return
        else:
            fails = batch
            note(config, "fails", batch)
    if fails is not None:
        note(config, "done")
    elif dataset is None:
        note(config, "done", message=f"no more than {format_count(fits)} are tried")
    else:
        note(config, "done", fits, f"the dataset has {plural(len(dataset), 'sample')}")


def too_long(batch: int, max_step_s: float) -> str:
    """Why no larger batch is tried."""
    why = ", too long for the budget" if max_step_s < MAX_STEP_S else ""
    return f"a step of {format_count(batch)} takes more than {max_step_s:.2g} s{why}"


def next_attempt(fits: int, fails: int | None, most: int = MAX_SAMPLES) -> int | None:
    """The batch to try next: doubled until one fails, then halfway; `None` when close enough.

    Args:
        fits: the largest that fitted; 0 before the first.
        fails: the smallest that didn't, if there is one.
        most: none is larger.
    """
    if fails is None:
        return min(max(1, 2 * fits), most) if fits < most else None
    return None if fails - fits <= max(1, fits // RESOLUTION) else (fits + fails) // 2


def attempt(trainer: Trainer, config: MaxBatchConfig, batch: int) -> bool:
    """Whether training steps with so many samples on each device fit in memory."""
    variant = VariantConfig("fit", split_of(config, batch), config.accumulate)
    try:
        buckets = buckets_like(trainer.model) if config.keeps_gradients else []
        _reserved = reserved_memory(config)
        for step in range(NUM_STEPS):
            if buckets and config.gradients_are_views:
                give_gradients(trainer.model, buckets)
            trainer.step(trainer.prepare(variant, step), NoClock())
        for device in devices_of(config):
            runtime_of(device).synchronize(device)
        return True
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release(trainer)
    return False


def split_of(config: MaxBatchConfig, batch: int) -> tuple[int, ...]:
    """A split of as many samples on each device of this process, and none on the devices before."""
    return (0,) * config.index + (batch,) * len(config.devices)


def devices_of(config: MaxBatchConfig) -> list[torch.device]:
    return [torch.device(name) for name in config.devices]


def buckets_like(model: torch.nn.Module) -> list[torch.Tensor]:
    """Memory as DDP's buckets take it: a gradient of every parameter."""
    return [torch.zeros_like(parameter) for parameter in model.parameters() if parameter.requires_grad]


def reserved_memory(config: MaxBatchConfig) -> list[torch.Tensor]:
    """The memory that communication takes on each device besides torch's own, however small the batch."""
    if not config.keeps_gradients:
        return []
    sizes = [(device, accelerator_of(device.type).backend_bytes) for device in devices_of(config)]
    return [torch.empty(size, dtype=torch.uint8, device=device) for device, size in sizes if size]


def give_gradients(model: torch.nn.Module, buckets: Sequence[torch.Tensor]) -> None:
    """Has the step add up its gradients in the buckets."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    for parameter, bucket in zip(trained, buckets, strict=True):
        parameter.grad = bucket


def trainer_of(config: MaxBatchConfig) -> Trainer:
    """A trainer for the process' devices alone, at their place among the job's."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    workload = load_workload(config.workload, dict(config.settings["params"]), Path(config.job_dir))
    if isinstance(workload, Probe):
        raise SpecError(f"{config.workload} is a micro-benchmark: it has no batch to find")
    launch = LaunchConfig(
        **config.settings,
        launch="fit",
        run_dir="",
        workload=config.workload,
        job_dir=config.job_dir,
        strategy="single" if len(config.devices) == 1 else TOGETHER,
        devices=(config.devices[0],) * config.index + config.devices,
        backend=None,
        seed=config.seed,
        threads=config.threads,
        variants=(VariantConfig("fit", split_of(config, 1), config.accumulate),),
        baseline=None,
        warmup=0,
        rounds=0,
    )
    return Trainer(workload, launch, config.index)


def note(
    config: MaxBatchConfig, outcome: str, batch: int = 0, message: str = "", step_s: float = 0.0
) -> None:
    append_lines(Path(config.attempts), [Attempt(outcome, batch, message, step_s)])
