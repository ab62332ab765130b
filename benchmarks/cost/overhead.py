"""The cost of measuring: steps run by gpurun against a bare DDP loop, in the same processes."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import BIN, centre_and_interval, record, table

ROUNDS = 300
STEPS = 4
"""Steps of a block: few, so that both blocks of a round run under the same load."""
RANKS = 2
WORKLOADS = {
    "mlp": {"width": 512},
    "gpt": {"layers": 2, "width": 64, "context": 64},
}
GLOBAL_BATCH = 32


def main() -> None:
    """Writes the section "Cost of measuring"."""
    rows = []
    for workload, params in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "rounds.json"
            argv = [
                str(BIN / "torchrun"),
                "--standalone",
                f"--nproc-per-node={RANKS}",
                "-m",
                "benchmarks.cost.overhead",
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*argv, workload, json.dumps(params), str(out)], check=True, env=environment)
            rows.append(row(workload, json.loads(out.read_text())))
    header = ["workload", "bare ms", "gpurun ms", "ratio", "95 % interval", "goal"]
    text = (
        f"Step time of DDP on {RANKS} gloo ranks, global batch {GLOBAL_BATCH}: the trainer with clock and "
        f"phases against a bare hand-written loop over the same model. {ROUNDS} rounds, each with {STEPS} "
        "steps of both in random order; Hodges–Lehmann ratio with its exact Wilcoxon interval.\n\n"
    )
    record("Cost of measuring", text + table(header, rows))


def row(workload: str, rounds: list[list[float]]) -> list[str]:
    centre, interval = centre_and_interval([math.log(ours / bare) for bare, ours in rounds])
    bare_ms, ours_ms = (statistics.median(values) / 1e6 for values in zip(*rounds, strict=True))
    low, high = (math.exp(end) for end in interval)
    figures = [f"{bare_ms:.2f}", f"{ours_ms:.2f}", f"{math.exp(centre):.3f}", f"{low:.3f} to {high:.3f}"]
    return [workload, *figures, "upper end ≤ 1.02"]


def rank_main(workload_name: str, params: dict[str, int], out: Path) -> None:
    """One rank: writes, per round, the slowest rank's mean step in ns, bare and by gpurun."""
    import time

    import torch
    import torch.distributed as dist

    from gpurun.launcher.rundir.records import VariantConfig
    from gpurun.launcher.worker.accelerators.clock import no_garbage_collection
    from gpurun.launcher.worker.accelerators.runtime import runtime_of
    from gpurun.launcher.worker.base.journal import Journal
    from gpurun.launcher.worker.base.process_group import GroupPeers
    from gpurun.launcher.worker.training.load_workload import load_workload
    from gpurun.launcher.worker.training.timed_rounds import TimedRounds, TraceRequests, load_of
    from gpurun.launcher.worker.training.trainer import Trainer
    from gpurun.workloads.base import Workload
    from tests.launches import launch_config

    def built() -> Workload:
        """What the worker would train, which here is no micro-benchmark."""
        workload = load_workload(workload_name, params, out.parent)
        assert isinstance(workload, Workload)
        return workload

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    half = GLOBAL_BATCH // RANKS
    variant = VariantConfig("ddp-2-even", (half,) * RANKS, 1)
    config = launch_config(
        variant,
        run_dir=str(out.parent),
        workload=workload_name,
        job_dir=str(out.parent),
        params=params,
        strategy="ddp",
        backend="gloo",
        warmup=10,
        rounds=ROUNDS,
    )
    torch.manual_seed(0)
    workload = built()
    trainer = Trainer(workload, config, rank)
    cpu = torch.device("cpu")
    requests = TraceRequests(config, rank, None)
    clock, journal = runtime_of(cpu).clock(cpu), Journal(config, rank)
    ours = TimedRounds(config, trainer, clock, GroupPeers(), journal, cpu, requests, load_of(config, rank))

    torch.manual_seed(0)
    bare = built()
    assert bare.batch is not None
    draw_batch = bare.batch
    model = torch.nn.parallel.DistributedDataParallel(bare.model)
    make_optimizer = bare.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    optimizer = make_optimizer(model.parameters())

    def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = draw_batch(GLOBAL_BATCH, generator)
        mine = slice(rank * half, (rank + 1) * half)
        return inputs[mine].clone(), targets[mine].clone()

    assert bare.loss is not None
    loss_function = bare.loss

    def bare_ns(num_steps: int, first: int) -> float:
        batches = [draw(step) for step in range(first, first + num_steps)]
        with no_garbage_collection():
            ours.peers.barrier()
            start = time.perf_counter_ns()
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = loss_function(model(inputs), targets)
                loss.backward()
                optimizer.step()
            return (time.perf_counter_ns() - start) / num_steps

    def ours_ns(num_steps: int, first: int) -> float:
        timings = ours.run_steps(variant, num_steps)
        return sum(timing.step_ns for timing in timings) / num_steps

    ours.warm_up(variant)
    bare_ns(20, 0)
    rounds = []
    for round_ in range(ROUNDS):
        blocks = [("bare", bare_ns), ("ours", ours_ns)]
        random.Random(round_).shuffle(blocks)
        times = {name: run(STEPS, round_ * STEPS) for name, run in blocks}
        rounds.append(ours.peers.maximum([times["bare"], times["ours"]]))
    if rank == 0:
        out.write_text(json.dumps(rounds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        rank_main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
