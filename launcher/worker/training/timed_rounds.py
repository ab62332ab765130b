"""Times the variants of a launch: warm-up until steady, then rounds of interleaved blocks.

Traces are taken in untimed steps of their own, in which all ranks take part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path

import torch

from gpurun.launcher.errors import MachineError
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.control import ControlBlock
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import Kind, ProfileConfig, VariantConfig, VariantFacts
from gpurun.launcher.stats.schedule import (
    NEXT_WINDOW_STEPS,
    WINDOW_STEPS,
    ablation_steps,
    block_steps,
    shuffled,
    unsteady_text,
    warmup_maximum,
    warmup_minimum,
)
from gpurun.launcher.stats.warmup import is_steady
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.accelerators.clock import Clock, StepTiming, no_garbage_collection
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.exit import print_to_log
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.meters.cpu_time import NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter, load_meter
from gpurun.launcher.worker.profiling import capture, profile_config, read_request, run_unrecorded
from gpurun.launcher.worker.training.batches import StepInput
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.trainer import Trainer


def trace_steps(
    trainer: Trainer,
    variant: VariantConfig,
    wanted: ProfileConfig,
    peers: Peers,
    path: Path,
    *,
    rank: int,
    snapshot: Path | None = None,
) -> None:
    """One trace at `path`; inputs are drawn before it begins. A rank that isn't recorded runs the same steps.

    Raises:
        MachineError: the trace can't be written.
    """
    trainer.set_process_state()
    inputs = iter([trainer.prepare(variant, step) for step in range(wanted.steps + 1)])

    def run_one_step() -> None:
        trainer.step(next(inputs), NoClock())

    if wanted.ranks is None or rank in wanted.ranks:
        all_threads = STRATEGIES[trainer.config.strategy].has_replicas
        capture(
            run_one_step,
            wanted,
            path,
            align=peers.barrier,
            all_threads=all_threads,
            snapshot=snapshot,
            samples=None if all_threads else variant.split[rank],
        )
    else:
        run_unrecorded(run_one_step, wanted.steps, align=peers.barrier)


@dataclass
class TraceRequests:
    """Traces of a workload on request: between two blocks, when all ranks know of the request."""

    config: LaunchConfig
    rank: int
    block: ControlBlock | None
    answers: bool = True
    """Whether this strategy's ranks take the traces: all have to take part."""
    answered: int = 0

    def count_step(self) -> None:
        if self.block is not None:
            self.block.count_step()

    @property
    def newest(self) -> float:
        """Number of the newest request that this rank knows of; the ranks take the highest of theirs."""
        return float(self.block.bell) if self.block is not None and self.answers else 0.0

    def answer(self, up_to: float, trainer: Trainer, variant: VariantConfig, peers: Peers) -> None:
        """Takes the traces of the requests that have not been answered yet, in steps of their own."""
        run = RunDir(Path(self.config.run_dir))
        while self.answered < up_to:
            self.answered += 1
            try:
                self.take(run, trainer, variant, peers)
            except MachineError as error:  # observing a job must not end it
                print_to_log(str(error))

    def take(self, run: RunDir, trainer: Trainer, variant: VariantConfig, peers: Peers) -> None:
        """One request's trace."""
        request = read_request(run, self.config.launch, self.answered)
        path = run.captured_trace(self.config.launch, self.answered, self.rank)
        trace_steps(trainer, variant, profile_config(request), peers, path, rank=self.rank)


def profile(trainer: Trainer, config: LaunchConfig, journal: Journal, peers: Peers) -> None:
    """A trace per variant, in steps of their own after all timing."""
    wanted, rank, run = config.profile, journal.rank, journal.run
    if wanted is None or wanted.steps == 0:
        return
    for variant in config.variants:
        journal.enter("profile", variant.id)
        snapshot = run.memory_snapshot(variant.id, rank) if wanted.memory else None
        path = run.trace(variant.id, rank)
        trace_steps(trainer, variant, wanted, peers, path, rank=rank, snapshot=snapshot)
        peers.barrier()


CONTROL = "~control"
"""The ending of the baseline's id that makes the id of its second variant."""
NO_ROOM = (
    "exposed communication wasn't measured by disabling it: the host has no memory for copies of the model "
    "and its optimizer"
)
PREFETCH_BYTES = 256 << 20
MAX_PREFETCH_STEPS = 64


@dataclass
class TimedRounds:
    """Measures variants of one strategy on one rank; all its ranks run the same sequence of blocks."""

    config: LaunchConfig
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

    def __post_init__(self) -> None:
        self.measured = with_control(self.config)

    @property
    def runs_ahead(self) -> bool:
        """Whether the host submits steps while the device still does earlier ones."""
        return not accelerator_of(self.device.type).is_host

    def named(self, variant: VariantConfig) -> str:
        """The variant whose results these are: the control's are the baseline's."""
        return variant.id.removesuffix(CONTROL)

    def warm_up(self, variant: VariantConfig) -> None:
        """At least `warmup` steps, until two medians agree; sets how many steps a block has.

        Windows are shorter after the first variant, which has warmed up the model for all.
        """
        self.journal.enter("warmup", self.named(variant))
        steps_ns: list[int] = []
        window = WINDOW_STEPS if variant is self.measured[0] else NEXT_WINDOW_STEPS
        minimum, maximum = warmup_minimum(self.config.warmup, window), warmup_maximum(self.config.warmup)
        while not is_steady(steps_ns, minimum, window) and len(steps_ns) < maximum:
            timings = self.run_steps(variant, window)
            self.journal.add_steps(self.named(variant), "warmup", timings)
            over_ranks = self.slowest([float(timing.step_ns) for timing in timings], variant)
            steps_ns += [round(step_ns) for step_ns in over_ranks]
        if not is_steady(steps_ns, minimum, window):
            self.journal.add_facts(self.named(variant), unsteady=unsteady_text(len(steps_ns)))
        self.block_steps[variant.id] = block_steps(steps_ns, self.config.block_ms)

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
        if round_ > self.config.ablation_rounds:
            return
        chosen = [variant for variant in self.config.variants if variant in active]
        if any(self.peers.maximum([float(self.trainer.lacks_room())])):
            for variant in chosen:
                known = self.journal.facts.get(variant.id, VariantFacts()).warnings
                self.journal.add_facts(variant.id, warnings=tuple(dict.fromkeys((*known, NO_ROOM))))
            return
        state = self.trainer.save_state()
        for order, variant in enumerate(chosen, first_order):
            self.journal.enter("round", variant.id, round_)
            timings = self.run_steps(variant, ablation_steps(self.block_steps[variant.id]), sync=False)
            self.journal.add_steps(variant.id, "ablation", timings, round_, order)
        self.trainer.restore_state(state)

    def run_block(self, variant: VariantConfig, round_: int, order: int, is_slowed: bool = False) -> None:
        """Runs and records one block; one that a trace slows down isn't timed."""
        name = self.named(variant)
        self.journal.enter("round", name, round_)
        self.load.clear()
        self.noise.clear()
        timings = self.run_steps(variant, self.block_steps[variant.id])
        noise = self.noise.per_step(len(timings))
        kind: Kind = "profile" if is_slowed else "timed" if name == variant.id else "aa"
        self.journal.add_steps(name, kind, timings, round_, order, noise, self.load)

    def run_steps(self, variant: VariantConfig, num_steps: int, sync: bool = True) -> list[StepTiming]:
        """Steps in portions, each from a start that all ranks share; inputs are drawn between portions.

        On a GPU all steps are one portion, whose inputs are a pool that was drawn once: it never idles.
        Without `sync` the ranks don't exchange gradients.
        """
        self.trainer.set_process_state()
        if self.runs_ahead:
            return self.run_ahead(variant, num_steps, sync)
        timings: list[StepTiming] = []
        while len(timings) < num_steps:
            portion = min(num_steps - len(timings), self.portion_steps(variant))
            timings += self.run_portion(self.drawn(variant, portion), sync)
        return timings

    def run_ahead(self, variant: VariantConfig, num_steps: int, sync: bool) -> list[StepTiming]:
        """All steps as one portion, after an untimed one that fits the allocator's cache to their shapes.

        Each rank begins where its own untimed step ended, as in training. If all began together, ranks that
        do unlike work after the last all-reduce would have a first step unlike the others.
        """
        settling, *inputs = self.inputs(variant, 1 + num_steps)
        self.peers.barrier()
        self.trainer.step(settling, NoClock(), sync)
        runtime_of(self.device).synchronize(self.device)  # the energy is that of the timed steps
        return self.run_portion(inputs, sync)

    def run_portion(self, inputs: Sequence[StepInput], sync: bool) -> list[StepTiming]:
        """Times one step after the other; only at the end anything waits for the device, or asks about it."""
        with no_garbage_collection(), self.noise.counting(), self.load.counting():
            if not self.runs_ahead:
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
            room = PREFETCH_BYTES // len(self.measured) if self.runs_ahead else PREFETCH_BYTES
            self.prefetch[variant.id] = max(1, min(MAX_PREFETCH_STEPS, int(room // largest)))
        return self.prefetch[variant.id]


@dataclass(frozen=True)
class Turn:
    """One of the strategies that take turns in a launch, on this rank."""

    config: LaunchConfig
    timed: TimedRounds | None = None
    """`None`: the strategy doesn't need this rank, which waits."""

    def active(self, round_: int) -> list[VariantConfig]:
        """Variants that have as many rounds."""
        return [
            variant
            for variant in with_control(self.config)
            if round_ <= (variant.rounds or self.config.rounds)
        ]


def run_in_turns(turns: Sequence[Turn], peers: Peers) -> None:
    """Warms up and measures the variants of all strategies; results are in the journal.

    Every rank runs the same sequence of blocks. Where a strategy doesn't need a rank, or has been quicker on
    it than on others, the rank waits for all `peers`, so that no two strategies work at the same time.
    """
    for turn in turns:
        for variant in with_control(turn.config):
            peers.barrier()
            if turn.timed is not None:
                turn.timed.warm_up(variant)
    warmed_up = num_traces(turns)  # before all rounds: they are slowed alike
    for round_ in range(1, turns[0].config.rounds + 1):
        run_round(turns, peers, round_, num_traces(turns) > warmed_up)


def num_traces(turns: Sequence[Turn]) -> int:
    """The traces on request that slow down what comes after them; the same on all ranks of the launch."""
    timed = [turn.timed for turn in turns if turn.timed is not None]
    slowed = (each for each in timed if accelerator_of(each.device.type).is_slow_after_trace)
    return sum(each.requests.answered for each in slowed)


def run_round(turns: Sequence[Turn], peers: Peers, round_: int, is_slowed: bool = False) -> None:
    """A block of each variant that has as many rounds, in a fresh order."""
    config = turns[0].config
    active = [(turn, variant) for turn in turns for variant in turn.active(round_)]
    blocks = shuffled(active, f"{config.draw}/{config.launch}/{round_}")
    for order, (turn, variant) in enumerate(blocks):
        peers.barrier()
        if turn.timed is not None:
            turn.timed.run_block(variant, round_, order, is_slowed)
    for turn in turns:
        own = [variant for of_turn, variant in blocks if of_turn is turn]
        peers.barrier()
        if turn.timed is not None and own:
            turn.timed.slowest([], own[-1])
            turn.timed.ablate(round_, own, len(blocks))


def with_control(config: LaunchConfig) -> tuple[VariantConfig, ...]:
    """The variants, and the baseline once more as a variant of its own, with its own warm-up and inputs.

    What differs between the two is noise.
    """
    controls = (replace(v, id=v.id + CONTROL) for v in config.variants if v.id == config.baseline)
    return (*config.variants, *controls)


def load_of(config: LaunchConfig, rank: int) -> LoadMeter:
    """The meter of a rank's own devices."""
    positions = STRATEGIES[config.strategy].positions_of(rank, len(config.devices))
    return load_meter([torch.device(config.devices[position]) for position in positions])
