"""Finds the samples of `split: balanced` before anything is timed: measures this launch's devices."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Protocol

from gpurun.launcher.balance import (
    BLOCK_MS,
    MAX_BLOCK_STEPS,
    Calibration,
    MeasureSplit,
    Split,
    balance_of,
    predict,
)
from gpurun.launcher.errors import SpecError
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.accelerators.clock import Clock, StepTiming
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import if_it_fits
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.training.batches import StepInput
from gpurun.launcher.worker.training.trainer import Trainer

OVERHEAD_ROUNDS = 4
UNBOUNDED = 1 << 60


class TimedDevices(Protocol):
    """The devices of a launch, measured all at once; every rank calls the same, and gets the same."""

    def own_ms(self, split: Split, num_steps: int) -> list[float]:
        """Mean milliseconds of each device's own work in a step; infinite where memory runs out."""

    def whole_ms(self, split: Split, num_steps: int) -> float:
        """Mean milliseconds of a step in which they work together."""


def resolve_balanced(
    config: LaunchConfig, trainer: Trainer, clock: Clock, peers: Peers, journal: Journal
) -> LaunchConfig:
    """The config with every `balanced` split as samples; how they were found is kept in the run directory.

    Weights and optimizer are as before afterwards.

    Raises:
        MemoryError: the devices can't hold the batch.
        SpecError: the host can't hold the copies of the model that this takes.
    """
    if all(variant.balance is None for variant in config.variants):
        return config
    if any(peers.maximum([float(trainer.lacks_room())])):
        raise SpecError(
            "finding a balanced split takes a copy of the model of each rank, for which the host "
            "lacks memory: state the split, as `3:1`"
        )
    state = trainer.save_state()
    variants = tuple(resolve(variant, config, trainer, clock, peers, journal) for variant in config.variants)
    trainer.restore_state(state)
    return replace(config, variants=variants)


def resolve(
    variant: VariantConfig,
    config: LaunchConfig,
    trainer: Trainer,
    clock: Clock,
    peers: Peers,
    journal: Journal,
) -> VariantConfig:
    """One variant with its samples."""
    if variant.balance is None:
        return variant
    devices: TimedDevices = (
        TimedReplicas(variant, trainer, clock)
        if STRATEGIES[config.strategy].has_replicas
        else TimedRanks(variant, trainer, clock, peers)
    )
    dataset = trainer.workload.dataset
    calibration = Calibration(
        measure=with_progress(devices.own_ms, journal, variant.id),
        batch=sum(variant.split),
        minimum=variant.balance.minimum,
        caps=variant.balance.caps,
        most=UNBOUNDED if dataset is None else len(dataset),
        seed=f"{config.draw}/{config.launch}/{variant.id}",
    )
    curves, split = calibration.run()
    overhead_ms = measure_overhead_ms(devices, split, predict(curves, split).compute_ms)
    journal.add_balance(variant.id, balance_of(curves, split, overhead_ms))
    return replace(variant, split=split, balance=None)


def with_progress(measure: MeasureSplit, journal: Journal, variant: str) -> MeasureSplit:
    """`measure` with a progress event before each block: no step is counted meanwhile."""

    def measure_with_progress(split: Split, num_steps: int) -> Sequence[float]:
        journal.enter("balance", variant)
        return measure(split, num_steps)

    return measure_with_progress


def measure_overhead_ms(devices: TimedDevices, split: Split, expected_ms: float) -> float:
    """The time that a step takes beyond its slowest device, in neighbouring blocks of both."""
    num_steps = min(MAX_BLOCK_STEPS, max(1, math.ceil(BLOCK_MS / max(expected_ms, 1e-3))))
    devices.whole_ms(split, 1)
    rounds = [
        devices.whole_ms(split, num_steps) - max(devices.own_ms(split, num_steps))
        for _ in range(OVERHEAD_ROUNDS)
    ]
    return max(0.0, median(rounds))


class TimedRanks:
    """The devices of `ddp`: each rank times its own steps, without communication."""

    def __init__(self, variant: VariantConfig, trainer: Trainer, clock: Clock, peers: Peers) -> None:
        self.variant, self.trainer, self.clock, self.peers = variant, trainer, clock, peers

    def own_ms(self, split: Split, num_steps: int) -> list[float]:
        return self.peers.gather(self.timed_ms(split, num_steps, sync=False))

    def whole_ms(self, split: Split, num_steps: int) -> float:
        """The time of a split that every rank has held without the others; a lack of memory is an error.

        A rank that skipped the step would leave the others waiting for its part of a collective.
        """
        return max(self.peers.gather(self.timed_ms(split, num_steps, sync=True)))

    def timed_ms(self, split: Split, num_steps: int, sync: bool) -> float:
        """This rank's mean step, from a start that all ranks share.

        With `sync` after one step more, since in training a rank begins where its own last step ended.
        Memory that runs out must not keep a rank from the barrier, nor, without `sync`, from anything else.
        """
        lead, attempt = int(sync), operator.call if sync else if_it_fits
        variant = replace(self.variant, split=split)
        inputs = attempt(partial(step_inputs, self.trainer, variant, lead + num_steps)) or ()
        self.peers.barrier()
        timings = attempt(partial(timed_steps, self.trainer, self.clock, inputs, sync))
        if timings is None:
            release(self.trainer)
        return mean_ms(timings[lead:]) if timings else math.inf


class TimedReplicas:
    """The devices of `dp`, all of one process: each replica's forward and backward."""

    def __init__(self, variant: VariantConfig, trainer: Trainer, clock: Clock) -> None:
        self.variant, self.trainer, self.clock = variant, trainer, clock

    def own_ms(self, split: Split, num_steps: int) -> list[float]:
        variant = replace(self.variant, split=split)
        inputs = step_inputs(self.trainer, variant, num_steps)
        steps_ms = [self.trainer.apply_times_ms(step_input) for step_input in inputs]
        if any(math.isinf(ms) for step_ms in steps_ms for ms in step_ms):
            release(self.trainer)
        return [fmean(device_ms) for device_ms in zip(*steps_ms, strict=True)]

    def whole_ms(self, split: Split, num_steps: int) -> float:
        inputs = step_inputs(self.trainer, replace(self.variant, split=split), num_steps)
        return mean_ms(timed_steps(self.trainer, self.clock, inputs, sync=True))


def step_inputs(trainer: Trainer, variant: VariantConfig, num_steps: int) -> Sequence[StepInput]:
    """Inputs of so many steps: one batch again and again, but a dataset is read on."""
    first = trainer.prepare(variant, 0)
    if first.nbytes:
        return [first] * num_steps
    return [first, *(trainer.prepare(variant, step) for step in range(1, num_steps))]


def timed_steps(trainer: Trainer, clock: Clock, inputs: Sequence[StepInput], sync: bool) -> list[StepTiming]:
    clock.start()
    for step_input in inputs:
        trainer.step(step_input, clock, sync)
        clock.end_step()
    return clock.read()


def mean_ms(timings: Sequence[StepTiming]) -> float:
    return fmean(timing.step_ns for timing in timings) / 1e6


def release(trainer: Trainer) -> None:
    """Frees what a step that ran out of memory left behind."""
    trainer.abandon_step()
    runtime_of(trainer.device).release_memory()
