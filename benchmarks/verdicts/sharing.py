"""Do `dp` and `ddp` scatter less against each other in one set of processes than in launches of their own?

In a shared launch a third process holds the replicas of `dp`. While one strategy runs, the other waits at a
barrier.
"""

import math
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.timing import machine_facts, record, table

LAUNCHES = 8
ROUNDS = 5
STEPS = 6
"""Of a block."""
WARM_UP = 15
SPLIT = (4, 4)
PARAMS: dict[str, Any] = {"layers": 2, "width": 64, "context": 64}
TOGETHER, DDP, DP = ("ddp", "dp"), ("ddp",), ("dp",)

Logs = dict[str, list[float]]
"""ln(seconds per step) of each round, by strategy."""


def main() -> None:
    """Writes the section "One set of processes for several strategies"."""
    import torch

    torch.set_num_threads(1)
    facts, shared, apart, seconds = machine_facts(), [], [], {TOGETHER: 0.0, DDP: 0.0, DP: 0.0}
    for number in range(LAUNCHES):
        found: Logs = {}
        for strategies in (TOGETHER, DDP, DP) if number % 2 else (DP, DDP, TOGETHER):
            began_s = time.monotonic()
            logs = launch(strategies, number)
            seconds[strategies] += (time.monotonic() - began_s) / LAUNCHES
            if strategies == TOGETHER:
                shared.append(difference(logs))
            else:
                found |= logs
        apart.append(difference(found))
    rows = [
        row("one set of processes", shared, seconds[TOGETHER]),
        row("launches of their own", apart, seconds[DDP] + seconds[DP]),
    ]
    header = ["dp against ddp in", "difference", "SD over launches", "95 % interval", "seconds for both"]
    text = (
        f"{LAUNCHES} launches of each kind in ABBA order, {ROUNDS} rounds of {STEPS} steps a launch, "
        "on two gloo ranks and two replicas.\n\n"
    )
    record("One set of processes for several strategies", text + table(header, rows), facts)


def difference(logs: Logs) -> float:
    """ln(dp / ddp) of a launch, or of two neighbours."""
    return fmean(logs["dp"]) - fmean(logs["ddp"])


def row(name: str, differences: Sequence[float], seconds: float) -> list[str]:
    from scipy.stats import chi2

    degrees, sd = len(differences) - 1, stdev(differences)
    low, high = (100 * sd * math.sqrt(degrees / chi2.ppf(p, degrees)) for p in (0.975, 0.025))
    percent = 100 * math.expm1(fmean(differences))
    return [name, f"{percent:+.1f} %", f"{100 * sd:.1f} %", f"{low:.1f} to {high:.1f} %", f"{seconds:.1f}"]


def launch(strategies: Sequence[str], number: int) -> Logs:
    """Runs the rounds of these strategies in fresh processes."""
    fork = multiprocessing.get_context("fork")
    bodies = [(strategy, rank) for strategy in strategies for rank in range(2 if strategy == "ddp" else 1)]
    barrier, queue = fork.Barrier(len(bodies)), fork.Queue()
    with TemporaryDirectory() as directory:
        processes = [
            fork.Process(target=measure, args=(strategy, rank, strategies, number, directory, barrier, queue))
            for strategy, rank in bodies
        ]
        for process in processes:
            process.start()
        logs: Logs = dict(queue.get() for _ in strategies)
        for process in processes:
            process.join()
    return logs


def measure(
    strategy: str, rank: int, strategies: Sequence[str], number: int, directory: str, barrier: Any, queue: Any
) -> None:
    """The body of a process: its blocks, and waiting while it is another strategy's turn."""
    import torch
    import torch.distributed as dist

    from gpurun.launcher.rundir.records import LaunchConfig, VariantConfig
    from gpurun.launcher.worker.training.forward_backward import NoClock
    from gpurun.launcher.worker.training.trainer import Trainer
    from gpurun.workloads.gpt import build

    if strategy == "ddp":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    variant = VariantConfig("v", SPLIT, 1)
    config = LaunchConfig(
        launch="l", run_dir=directory, workload="gpt", job_dir=directory, params=PARAMS, strategy=strategy,
        devices=("cpu", "cpu"), backend="gloo" if strategy == "ddp" else None, precision="fp32", seed=0,
        threads=1, variants=(variant,), baseline=None, warmup=0, rounds=1,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(build(**PARAMS), config, rank)

    def block_s(num_steps: int, first: int) -> float:
        inputs = [trainer.prepare(variant, step) for step in range(first, first + num_steps)]
        began_s = time.perf_counter()
        for one in inputs:
            trainer.step(one, NoClock())
        return (time.perf_counter() - began_s) / num_steps

    logs = []
    for round_ in range(ROUNDS + 1):
        turns = random.Random(f"{number}/{round_}").sample(list(strategies), len(strategies))
        for turn in turns:
            barrier.wait()
            if turn == strategy:
                taken_s = block_s(STEPS if round_ else WARM_UP, 100 * round_)
                logs += [math.log(taken_s)] if round_ else []
    barrier.wait()
    if rank == 0:
        queue.put((strategy, logs))
    trainer.close()
    if strategy == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    assert Path.cwd().joinpath("benchmarks").is_dir()
    main()
