"""Times the variants of a launch: warm-up until steady, then rounds of interleaved blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import torch

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.rundir.records import Kind, LaunchConfig, RoundTime, VariantConfig
from gpurun.launcher.stats.looks import decided_variants
from gpurun.launcher.stats.schedule import (
    Block,
    ablation_steps,
    block_steps,
    is_steady,
    round_blocks,
    unsteady_text,
)
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.accelerators.clock import Clock, StepTiming, no_garbage_collection
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter, load_meter
from gpurun.launcher.worker.training.batches import StepInput
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.traces import TraceRequests
from gpurun.launcher.worker.training.trainer import Trainer

MAX_WARMUP_STEPS = 30
WARMUP_CHUNK = 5
"""Steps between two checks whether the warm-up is steady; the medians compared are of as many."""
PREFETCH_BYTES = 256 << 20
MAX_PREFETCH_STEPS = 64


@dataclass
class TimedRounds:
    """Measures all variants of one launch on one rank; every rank runs the same sequence of blocks."""

    order: LaunchConfig
    trainer: Trainer
    clock: Clock
    peers: Peers
    journal: Journal
    device: torch.device
    requests: TraceRequests
    load: LoadMeter
    noise: NoiseMeter = field(default_factory=NoiseMeter)
    next_step: dict[str, int] = field(default_factory=dict)
    prefetch: dict[str, int] = field(default_factory=dict)
    pools: dict[str, list[StepInput]] = field(default_factory=dict)
    block_steps: dict[str, int] = field(default_factory=dict)
    previous: str = ""
    """The variant of the step before."""

    @property
    def runs_ahead(self) -> bool:
        """Whether the host submits steps while the device still does earlier ones."""
        return not accelerator_of(self.device.type).is_host

    def run(self) -> None:
        """Warms up and measures; results are in the journal."""
        for variant in self.order.variants:
            self.journal.enter("warmup", variant.id)
            self.warm_up(variant)
        self.run_rounds()

    def warm_up(self, variant: VariantConfig) -> None:
        """At least `warmup` steps, until two medians of 5 agree; sets how many steps a block has."""
        steps_ns: list[int] = []
        minimum = max(self.order.warmup, 2 * WARMUP_CHUNK)
        while not is_steady(steps_ns, minimum) and len(steps_ns) < max(MAX_WARMUP_STEPS, minimum):
            timings = self.run_steps(variant, WARMUP_CHUNK)
            self.journal.add_steps(variant.id, "warmup", timings)
            over_ranks = self.slowest([float(timing.step_ns) for timing in timings], variant)
            steps_ns += [round(step_ns) for step_ns in over_ranks]
        if not is_steady(steps_ns, minimum):
            self.journal.add_facts(variant.id, unsteady=unsteady_text(len(steps_ns)))
        self.block_steps[variant.id] = block_steps(steps_ns, self.order.block_ms)

    def run_rounds(self) -> None:
        """Every round runs each undecided variant once, in a fresh order, and the baseline twice."""
        done: dict[str, list[RoundTime]] = {key: list(times) for key, times in self.order.prior.items()}
        samples = {variant.id: sum(variant.split) for variant in self.order.variants}
        decided: set[str] = set()
        for round_ in range(1, self.order.rounds + 1):
            active = [variant.id for variant in self.order.variants if variant.id not in decided]
            for variant_id, step_ns in self.run_round(round_, active).items():
                done.setdefault(variant_id, []).append(RoundTime(self.order.launch, round_, step_ns))
            decided |= decided_variants(done, self.order.baseline, self.order.looks, samples)
            if self.all_decided(decided):
                return

    def all_decided(self, decided: set[str]) -> bool:
        """Whether early stopping leaves nothing to measure; a variant alone is measured to the end."""
        others = {variant.id for variant in self.order.variants} - {self.order.baseline}
        return bool(others) and others <= decided

    def run_round(self, round_: int, active: list[str]) -> Mapping[str, float]:
        """Step time of each variant in this round: the slowest rank's mean over its block, in ns."""
        by_id = {variant.id: variant for variant in self.order.variants}
        seed = f"{self.order.draw}/{self.order.launch}/{round_}"
        blocks = round_blocks(active, self.order.baseline, seed)
        means_ns = [self.run_block(by_id[block.variant], block, round_) for block in blocks]
        slowest_ns = self.slowest(means_ns, by_id[blocks[-1].variant])
        if round_ <= self.order.ablation_rounds:
            self.ablate(round_, active, len(blocks))
        return {b.variant: ns for b, ns in zip(blocks, slowest_ns, strict=True) if b.kind == "timed"}

    def slowest(self, values: list[float], variant: VariantConfig) -> list[float]:
        """Element by element, the largest value over ranks; then the requested traces of `variant`.

        The ranks agree on the requests in the same exchange, so that they cost none of their own.
        """
        *largest, newest = self.peers.maximum([*values, self.requests.newest])
        self.requests.answer(newest, self.trainer, variant, self.peers)
        return largest

    def ablate(self, round_: int, active: list[str], first_order: int) -> None:
        """A block of each variant in which the ranks don't communicate; weights are as before afterwards.

        It comes after the round's timed blocks, which it must not affect.
        """
        state = self.trainer.save_state()
        chosen = [variant for variant in self.order.variants if variant.id in active]
        for order, variant in enumerate(chosen, first_order):
            self.journal.enter("round", variant.id, round_)
            timings = self.run_steps(variant, ablation_steps(self.block_steps[variant.id]), sync=False)
            self.journal.add_steps(variant.id, "ablation", timings, round_, order)
        self.trainer.restore_state(state)

    def run_block(self, variant: VariantConfig, block: Block, round_: int) -> float:
        """Runs and records one block; this rank's mean step in ns."""
        self.journal.enter("round", variant.id, round_)
        self.load.clear()
        self.noise.clear()
        timings = self.run_steps(variant, self.block_steps[variant.id])
        noise = self.noise.per_step(len(timings))
        kind: Kind = block.kind
        self.journal.add_steps(variant.id, kind, timings, round_, block.order, noise, self.load)
        return sum(timing.step_ns for timing in timings) / len(timings)

    def run_steps(self, variant: VariantConfig, num_steps: int, sync: bool = True) -> list[StepTiming]:
        """Steps in portions, each from a start that all ranks share; inputs are drawn between portions.

        On a GPU all steps are one portion, whose inputs are a pool that was drawn once: it never idles.
        Without `sync` the ranks don't exchange gradients.
        """
        if self.runs_ahead:
            return self.run_ahead(variant, num_steps, sync)
        timings: list[StepTiming] = []
        while len(timings) < num_steps:
            portion = min(num_steps - len(timings), self.portion_steps(variant))
            timings += self.run_portion(self.drawn(variant, portion), sync)
        return timings

    def run_ahead(self, variant: VariantConfig, num_steps: int, sync: bool) -> list[StepTiming]:
        """All steps as one portion, after one that fits the allocator's cache to this variant's shapes."""
        settling = int(self.previous != variant.id)
        self.previous = variant.id
        inputs = self.inputs(variant, settling + num_steps)
        for step_input in inputs[:settling]:
            self.trainer.step(step_input, NoClock(), sync)
        return self.run_portion(inputs[settling:], sync)

    def run_portion(self, inputs: Sequence[StepInput], sync: bool) -> list[StepTiming]:
        """Times one step after the other; only at the end anything waits for the device, or asks about it."""
        with no_garbage_collection(), self.noise.counting(), self.load.counting():
            self.peers.barrier()
            self.clock.start()
            for step_input in inputs:
                self.trainer.step(step_input, self.clock, sync)
                self.clock.end_step()
                self.requests.count_step()
            self.load.sample()
            return self.clock.read()

    def inputs(self, variant: VariantConfig, num_steps: int) -> list[StepInput]:
        """Inputs of so many steps from a pool that is drawn once, unless they are read from a dataset."""
        if self.trainer.workload.dataset is not None:
            return self.drawn(variant, num_steps)
        if variant.id not in self.pools:
            self.pools[variant.id] = self.drawn(variant, self.portion_steps(variant))
        return list(islice(cycle(self.pools[variant.id]), num_steps))

    def drawn(self, variant: VariantConfig, num_steps: int) -> list[StepInput]:
        """Inputs of the next steps."""
        first = self.next_step.get(variant.id, 0)
        self.next_step[variant.id] = first + num_steps
        return [self.trainer.prepare(variant, step) for step in range(first, first + num_steps)]

    def portion_steps(self, variant: VariantConfig) -> int:
        """Steps whose inputs fit in memory at once; the same number on all ranks."""
        if variant.id not in self.prefetch:
            nbytes = max(1, self.trainer.prepare(variant, 0).nbytes)
            (largest,) = self.peers.maximum([float(nbytes)])
            room = PREFETCH_BYTES // len(self.order.variants) if self.runs_ahead else PREFETCH_BYTES
            self.prefetch[variant.id] = max(1, min(MAX_PREFETCH_STEPS, int(room // largest)))
        return self.prefetch[variant.id]


def load_of(order: LaunchConfig, rank: int) -> LoadMeter:
    """The meter of a rank's own devices."""
    positions = STRATEGIES[order.strategy].positions_of(rank, len(order.devices))
    return load_meter([torch.device(order.devices[position]) for position in positions])
