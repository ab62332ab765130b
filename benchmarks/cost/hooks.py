"""The cost of observing a program's steps: a step of an optimizer with and without our hooks."""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.timing import record, table
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import ProgramConfig, VariantRef
from gpurun.launcher.worker.program.program_rank import StepRecorder, watch_steps

STEPS = 5_000


def step_us(optimizer: torch.optim.Optimizer) -> float:
    """Mean microseconds of a nearly empty step."""
    start = time.perf_counter_ns()
    for _ in range(STEPS):
        optimizer.step()
    return (time.perf_counter_ns() - start) / STEPS / 1e3


def observed_us(optimizer: torch.optim.Optimizer, directory: Path) -> float:
    """The same while observed, including the time to write records."""
    config = ProgramConfig(
        "01-script-1",
        str(directory),
        str(directory),
        "x.py",
        None,
        (),
        None,
        1,
        10,
        (VariantRef("script-1"),),
    )
    recorder = StepRecorder(config, 0, RunDir(directory))
    with watch_steps(recorder):
        mean_us = step_us(optimizer)
    recorder.close(wait=True)
    return mean_us


def main(pairs: int = 9) -> None:
    """Writes the section "Step hook"."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], 0.1)
    step_us(optimizer)
    with tempfile.TemporaryDirectory() as name:
        costs = [observed_us(optimizer, Path(name)) - step_us(optimizer) for _ in range(pairs)]
    row = [f"{statistics.median(costs):.1f}", f"{max(costs):.1f}", "≤ 20"]
    record(
        "Step hook",
        f"How much longer a step of an unchanged program takes because it is recorded, over {pairs} pairs "
        f"of {STEPS:,} steps on the CPU.\n\n" + table(["median µs", "largest µs", "goal"], [row]),
    )
