"""Times the variants of a launch: warm-up until steady, then rounds of interleaved blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from gpurun.launcher.machine.gpu import EnergyMeter
from gpurun.launcher.rundir.records import Kind, LaunchConfig, VariantConfig
from gpurun.launcher.stats.schedule import (
    ablation_steps,
    block_steps,
    is_steady,
    shuffled,
    unsteady_text,
)
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.accelerators.clock import Clock, StepTiming, no_garbage_collection
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.peers import Peers
from gpurun.launcher.worker.meters.noise import NoiseMeter, noise_meter
from gpurun.launcher.worker.training.traces import TraceRequests
from gpurun.launcher.worker.training.trainer import Trainer

MAX_WARMUP_STEPS = 30
WARMUP_CHUNK = 5
"""Steps between two checks whether the warm-up is steady; the medians compared are of as many."""
CONTROL = "~control"
"""After the baseline's id: the id of its second variant."""
PREFETCH_BYTES = 256 << 20
MAX_PREFETCH_STEPS = 64


@dataclass
class Bench:
    """Measures all variants of one launch on one rank; every rank runs the same sequence of blocks."""

    order: LaunchConfig
    trainer: Trainer
    clock: Clock
    peers: Peers
    journal: Journal
    device: torch.device
    requests: TraceRequests
    meter: EnergyMeter = field(default_factory=EnergyMeter)
    next_step: dict[str, int] = field(default_factory=dict)
    prefetch: dict[str, int] = field(default_factory=dict)
    block_steps: dict[str, int] = field(default_factory=dict)
    noise: NoiseMeter = field(init=False)

    def __post_init__(self) -> None:
        self.noise = noise_meter(self.device)
        self.measured = with_control(self.order)

    def run(self) -> None:
        """Warms up and measures; results are in the journal."""
        for variant in self.measured:
            self.journal.enter("warmup", self.named(variant))
            self.warm_up(variant)
        for round_ in range(1, self.order.rounds + 1):
            self.run_round(round_)

    def named(self, variant: VariantConfig) -> str:
        """The variant whose results these are: the control's are the baseline's."""
        return variant.id.removesuffix(CONTROL)

    def warm_up(self, variant: VariantConfig) -> None:
        """At least `warmup` steps, until two medians of 5 agree; sets how many steps a block has."""
        steps_ns: list[int] = []
        minimum = max(self.order.warmup, 2 * WARMUP_CHUNK)
        while not is_steady(steps_ns, minimum) and len(steps_ns) < max(MAX_WARMUP_STEPS, minimum):
            timings = self.run_steps(variant, WARMUP_CHUNK)
            self.journal.add_steps(self.named(variant), "warmup", timings)
            over_ranks = self.slowest([float(timing.step_ns) for timing in timings], variant)
            steps_ns += [round(step_ns) for step_ns in over_ranks]
        if not is_steady(steps_ns, minimum):
            self.journal.add_facts(self.named(variant), unsteady=unsteady_text(len(steps_ns)))
        self.block_steps[variant.id] = block_steps(steps_ns, self.order.block_ms)

    def run_round(self, round_: int) -> None:
        """A block of each variant that has as many rounds, in a fresh order."""
        active = [variant for variant in self.measured if round_ <= (variant.rounds or self.order.rounds)]
        blocks = shuffled(active, f"{self.order.draw}/{self.order.launch}/{round_}")
        for order, variant in enumerate(blocks):
            self.run_block(variant, round_, order)
        self.slowest([], blocks[-1])
        if round_ <= self.order.ablation_rounds:
            self.ablate(round_, active, len(blocks))

    def slowest(self, values: list[float], variant: VariantConfig) -> list[float]:
        """Element by element, the largest value over ranks; then the requested traces of `variant`.

        The ranks agree on the requests in the same exchange, so that they cost none of their own.
        """
        *largest, newest = self.peers.maximum([*values, self.requests.newest])
        self.requests.answer(newest, self.trainer, variant, self.peers)
        return largest

    def ablate(self, round_: int, active: Sequence[VariantConfig], first_order: int) -> None:
        """A block of each variant in which the ranks don't communicate; weights are as before afterwards.

        It comes after the round's timed blocks, which it must not affect.
        """
        state = self.trainer.save_state()
        chosen = [variant for variant in self.order.variants if variant in active]
        for order, variant in enumerate(chosen, first_order):
            self.journal.enter("round", variant.id, round_)
            timings = self.run_steps(variant, ablation_steps(self.block_steps[variant.id]), sync=False)
            self.journal.add_steps(variant.id, "ablation", timings, round_, order)
        self.trainer.restore_state(state)

    def run_block(self, variant: VariantConfig, round_: int, order: int) -> None:
        """Runs and records one block."""
        name = self.named(variant)
        self.journal.enter("round", name, round_)
        runtime = runtime_of(self.device)
        runtime.reset_peak(self.device)
        self.noise.clear()
        before_mj = self.meter.read_mj()
        timings = self.run_steps(variant, self.block_steps[variant.id])
        energy_mj = energy_between_mj(before_mj, self.meter.read_mj())
        peak, noise = runtime.peak_bytes(self.device), self.noise.per_step(len(timings))
        kind: Kind = "timed" if name == variant.id else "aa"
        self.journal.add_steps(name, kind, timings, round_, order, peak, noise, energy_mj)

    def run_steps(self, variant: VariantConfig, num_steps: int, sync: bool = True) -> list[StepTiming]:
        """Steps in portions, each from a start that all ranks share; inputs are drawn between portions.

        Without `sync` the ranks don't exchange gradients.
        """
        timings: list[StepTiming] = []
        first = self.next_step.get(variant.id, 0)
        self.next_step[variant.id] = first + num_steps
        while len(timings) < num_steps:
            portion = min(num_steps - len(timings), self.portion_steps(variant))
            start = first + len(timings)
            inputs = [self.trainer.prepare(variant, step) for step in range(start, start + portion)]
            with no_garbage_collection(), self.noise.counting():
                self.peers.barrier()
                self.clock.start()
                for step_input in inputs:
                    self.trainer.step(step_input, self.clock, sync)
                    self.clock.end_step()
                    self.requests.count_step()
                timings += self.clock.read()
        return timings

    def portion_steps(self, variant: VariantConfig) -> int:
        """Steps whose inputs fit in memory at once; the same number on all ranks."""
        if variant.id not in self.prefetch:
            nbytes = max(1, self.trainer.prepare(variant, 0).nbytes)
            (largest,) = self.peers.maximum([float(nbytes)])
            self.prefetch[variant.id] = max(1, min(MAX_PREFETCH_STEPS, int(PREFETCH_BYTES // largest)))
        return self.prefetch[variant.id]


def with_control(order: LaunchConfig) -> tuple[VariantConfig, ...]:
    """The variants, and the baseline once more as a variant of its own, with its own warm-up and inputs.

    What differs between the two is noise.
    """
    controls = (replace(v, id=v.id + CONTROL) for v in order.variants if v.id == order.baseline)
    return (*order.variants, *controls)


def energy_between_mj(before_mj: float | None, after_mj: float | None) -> float | None:
    """Millijoules between two readings; `None` where one is missing, or the driver was reloaded."""
    if before_mj is None or after_mj is None or after_mj < before_mj:
        return None
    return after_mj - before_mj


def meter_for(order: LaunchConfig, rank: int) -> EnergyMeter:
    """The energy meter of a rank's own devices."""
    positions = STRATEGIES[order.strategy].positions_of(rank, len(order.devices))
    names = [order.devices[position] for position in positions]
    devices = [torch.device(name) for name in names]
    return runtime_of(devices[0]).energy_meter(devices)
