"""One rank's records in the run directory while it works."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import RoundSample, RunDir, append_lines, keep_lines, write_json
from gpurun.launcher.rundir.records import Balance, Event, Kind, MemoryPeak, Stage, StepRecord, VariantFacts
from gpurun.launcher.stats.schedule import MAX_KEPT_STEPS, MAX_LATE_EVENTS
from gpurun.launcher.worker.accelerators.clock import StepTiming
from gpurun.launcher.worker.meters.cpu_time import QUIET, BlockNoise
from gpurun.launcher.worker.meters.gpu_load import LoadMeter


@dataclass
class Journal:
    """Append-only step records and events of every rank; facts of rank 0 alone."""

    config: LaunchConfig
    rank: int
    stage: Stage = "start"
    variant: str | None = None
    facts: dict[str, VariantFacts] = field(default_factory=dict)
    steps_made: dict[str, int] = field(default_factory=dict)
    levels: dict[Path, int] = field(default_factory=dict)
    """The levels of the sample, when each file was last thinned out."""
    late_events: int = 0
    """Events since those of rounds that aren't kept were removed."""
    sample: RoundSample = field(init=False)

    def __post_init__(self) -> None:
        self.sample = RoundSample(self.config.launch)

    @property
    def run(self) -> RunDir:
        return RunDir(Path(self.config.run_dir))

    def enter(self, stage: Stage, variant: str | None = None, round_: int = 0) -> None:
        """Sets what this rank does from now on, and writes it down: a failure is attributed to it, also where
        the rank is left no time for a record."""
        self.stage, self.variant = stage, variant
        path = self.run.events(self.config.launch, self.rank)
        self.late_events += 1
        if self.late_events > MAX_LATE_EVENTS:
            keep_lines(path, Event, lambda event: event.stage != "round" or self.sample.keeps(event.round))
            self.late_events = 0
        append_lines(path, [Event.now(stage, variant, round_, self.config.rounds)])

    def add_facts(self, variant: str, **facts: Any) -> None:
        """Adds to what this launch found out about `variant`, and keeps it at once."""
        self.facts[variant] = replace(self.facts.get(variant, VariantFacts()), **facts)
        if self.rank == 0:
            write_json(self.run.launch_facts(self.config.launch), self.facts)

    def add_balance(self, variant: str, balance: Balance) -> None:
        """Keeps how a balanced split was found: later launches of the run take it from there."""
        if self.rank == 0:
            write_json(self.run.balance(variant), balance)

    def add_memory(self, variant: str, peak: MemoryPeak) -> None:
        """Keeps what this rank's memory held when it was fullest."""
        write_json(self.run.memory(variant, self.rank), peak)

    def add_steps(
        self,
        variant: str,
        kind: Kind,
        timings: Sequence[StepTiming],
        round_: int = 0,
        order: int = 0,
        noise: BlockNoise = QUIET,
        load: LoadMeter | None = None,
    ) -> None:
        """Appends one line per step of a block; they share its energy. Of a long launch a sample is kept."""
        energy_mj = load.energy_mj() if load else None
        share_mj = energy_mj / len(timings) if energy_mj is not None and timings else None
        peak, gpus = (load.peak_bytes(), load.loads()) if load else (None, ())
        if self.config.guests:  # others have their models in the same memory
            peak, gpus = None, tuple(replace(gpu, peak_bytes=None) for gpu in gpus)
        throttled = next((gpu.throttled for gpu in gpus if gpu.throttled), None)
        first = self.steps_made.get(variant, 0)
        self.steps_made[variant] = first + len(timings)
        launch, chosen, block_ns = self.config.launch, range(len(timings)), None
        if round_ and first >= MAX_KEPT_STEPS:
            place = random.Random(f"{launch}/{variant}/{first}").randrange(len(timings))
            chosen, block_ns = range(place, place + 1), fmean(t.step_ns for t in timings)
        records = [
            StepRecord(
                launch,
                round_,
                order,
                first + i,
                kind,
                timings[i].step_ns,
                timings[i].phases_ns,
                peak,
                noise.queue_ns,
                throttled,
                share_mj,
                noise.others_ns,
                gpus if i == chosen[0] else (),
                noise.cpu_ns,
                noise.thread_cpu_ns,
                block_ns,
                noise.children_ns,
            )
            for i in chosen
        ]
        self._keep(self.run.steps(variant, self.rank), records, round_)

    def _keep(self, path: Path, records: Sequence[StepRecord], round_: int) -> None:
        """Appends the records of a block, if its round is in the sample; others may have to leave it."""
        if round_:
            self.sample.add(round_)
        if self.sample.level > self.levels.get(path, 0):
            self.levels[path] = self.sample.level
            keep_lines(path, StepRecord, self._is_kept)
        append_lines(path, [record for record in records if self._is_kept(record)])

    def _is_kept(self, step: StepRecord) -> bool:
        """Whether a step's round is in the sample, or it is of another launch or of no round."""
        is_own = step.launch == self.config.launch and step.round > 0
        return not is_own or self.sample.keeps(step.round)
