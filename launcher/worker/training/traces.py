"""Traces of a workload's variants, in untimed steps of their own in which all ranks take part."""

from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.control import ControlBlock
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import LaunchConfig, ProfileConfig, VariantConfig
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.base.exit import print_to_log
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.profiling import capture, profile_config, read_request, run_unrecorded
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
    all_threads: bool,
    snapshot: Path | None = None,
) -> None:
    """One trace at `path`; inputs are drawn before it begins. A rank that isn't recorded runs the same steps.

    Raises:
        MachineError: the trace can't be written.
    """
    inputs = iter([trainer.prepare(variant, step) for step in range(wanted.steps + 1)])

    def run_one_step() -> None:
        trainer.step(next(inputs), NoClock())

    if wanted.ranks is None or rank in wanted.ranks:
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
        all_threads = STRATEGIES[self.config.strategy].has_replicas
        wanted = profile_config(request)
        trace_steps(trainer, variant, wanted, peers, path, rank=self.rank, all_threads=all_threads)


def profile(trainer: Trainer, config: LaunchConfig, journal: Journal, peers: Peers) -> None:
    """A trace per variant, in steps of their own after all timing."""
    if config.profile is None or config.profile.steps == 0:
        return
    for variant in config.variants:
        journal.enter("profile", variant.id)
        profile_variant(trainer, config, journal, variant, peers)
        peers.barrier()


def profile_variant(
    trainer: Trainer, config: LaunchConfig, journal: Journal, variant: VariantConfig, peers: Peers
) -> None:
    """One trace per rank that is to be recorded."""
    rank, run = journal.rank, journal.run
    wanted = config.profile
    assert wanted is not None
    trace_steps(
        trainer,
        variant,
        wanted,
        peers,
        run.trace(variant.id, rank),
        rank=rank,
        all_threads=STRATEGIES[config.strategy].has_replicas,
        snapshot=run.memory_snapshot(variant.id, rank) if wanted.memory else None,
    )
