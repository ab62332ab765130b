"""Traces of a few more steps of a variant, that nobody times; all ranks take part."""

from pathlib import Path

from gpurun.launcher.rundir.records import ProfileConfig, VariantConfig
from gpurun.launcher.worker.base.peers import Peers
from gpurun.launcher.worker.profiling.profiler import capture, run_unrecorded
from gpurun.launcher.worker.training.step import NoClock
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
        capture(run_one_step, wanted, path, align=peers.barrier, all_threads=all_threads, snapshot=snapshot)
    else:
        run_unrecorded(run_one_step, wanted.steps, align=peers.barrier)
