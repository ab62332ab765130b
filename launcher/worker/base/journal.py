"""What one rank writes into the run directory while it works."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import (
    Balance,
    Event,
    Kind,
    LaunchConfig,
    MemoryPeak,
    Stage,
    StepRecord,
    VariantFacts,
)
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
    steps_written: dict[str, int] = field(default_factory=dict)

    @property
    def run(self) -> RunDir:
        return RunDir(Path(self.config.run_dir))

    def enter(self, stage: Stage, variant: str | None = None, round_: int = 0) -> None:
        """Sets what this rank does from now on, and writes it down: a failure is attributed to it, also where
        the rank is left no time for a record."""
        self.stage, self.variant = stage, variant
        event = Event.now(stage, variant, round_, self.config.rounds)
        append_lines(self.run.events(self.config.launch, self.rank), [event])

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
        """Appends one line per step of a block; they share its energy."""
        energy_mj = load.energy_mj() if load else None
        share_mj = energy_mj / len(timings) if energy_mj is not None and timings else None
        peak, gpus = (load.peak_bytes(), load.loads()) if load else (None, ())
        throttled = next((gpu.throttled for gpu in gpus if gpu.throttled), None)
        first = self.steps_written.get(variant, 0)
        self.steps_written[variant] = first + len(timings)
        launch = self.config.launch
        records = [
            StepRecord(
                launch,
                round_,
                order,
                first + i,
                kind,
                t.step_ns,
                t.phases_ns,
                peak,
                noise.queue_ns,
                throttled,
                share_mj,
                noise.others_ns,
                () if i else gpus,
                noise.cpu_ns,
            )
            for i, t in enumerate(timings)
        ]
        append_lines(self.run.steps(variant, self.rank), records)
