"""Ranks of which one sleeps: what `gpurun trace` says of them, beside the programs' own clock.

`python -m benchmarks sleeping` draws sets of two and three ranks, starts each by torchrun, traces eight
steps, and then times blocks with and without the sleep in turns, without a profiler.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.timing import BIN, record, table
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.explain import trace_causes

SEED, SETS = 20261201, 20
WITHIN = 0.15
BLOCKS, BLOCK_STEPS = 12, 8


def main() -> None:
    """Writes the section "Ranks that sleep"."""
    draw, rows = random.Random(SEED), []
    for _ in range(SETS):
        num_ranks, late_at = draw.choice([2, 3]), draw.random()
        sleep_ms, bucket_mb = draw.choice([15, 30, 60]), draw.choice([0.1, 0.2, 25])
        rows.append(row(num_ranks, int(late_at * num_ranks), sleep_ms, bucket_mb))
    right, close = (sum(each[at] == "yes" for each in rows) for at in (6, 9))
    header = [
        "ranks",
        "sleeps",
        "ms",
        "bucket MB",
        "cause",
        "by rank",
        "right",
        "saves ms",
        "clock ms",
        "close",
    ]
    text = (
        f"Cause and rank right in {right} of {SETS} (goal: all), saving within {WITHIN:.0%} of what the "
        f"programs' clock says in {close} (goal: all), on {os.cpu_count()} cores. The model is so small that "
        "ranks hardly share cores: a replay doesn't know that a rank that sleeps leaves its core to others."
    )
    record("Ranks that sleep", f"{text}\n\n{table(header, rows)}")


def row(num_ranks: int, late: int, sleep_ms: int, bucket_mb: float) -> list[str]:
    """One set."""
    with tempfile.TemporaryDirectory() as directory:
        argv = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
        own = [str(late), str(sleep_ms), str(bucket_mb), directory]
        done = subprocess.run(
            [*argv, "benchmarks.traces.sleeping", *own], capture_output=True, text=True, check=True
        )
        slept_ms, awake_ms = map(float, done.stdout.split()[-2:])
        report = analyse_paths([Path(directory)])
    first, saved_ms = trace_causes(report)[0], slept_ms - awake_ms
    said_ms = next(each.saved_us / 1e3 for each in report.savings if (each.part, each.rank) == ("rank", late))
    is_right, is_close = first.ranks == (late,), abs(said_ms / saved_ms - 1) <= WITHIN
    figures = [str(num_ranks), f"rank {late}", str(sleep_ms), str(bucket_mb), first.code]
    ranks = ", ".join(map(str, first.ranks))
    return [*figures, ranks, _yes(is_right), f"{said_ms:.1f}", f"{saved_ms:.1f}", _yes(is_close)]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def rank_main(late: int, sleep_ms: float, bucket_mb: float, directory: Path) -> None:
    """One rank: a trace of its own; rank 0 prints the median step in ms, with the sleep and without."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.profiler import ProfilerActivity, profile, schedule

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, is_awake = dist.get_rank(), False

    class Late(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            if rank == late and not is_awake:
                time.sleep(sleep_ms / 1e3)
            return inputs

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 256), nn.GELU(), Late(), nn.Linear(256, 128))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_ms() -> float:
        start_ns = time.perf_counter_ns()
        optimizer.zero_grad()
        model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def save(profiler: profile) -> None:
        profiler.export_chrome_trace(str(directory / f"rank{rank}.json"))

    steps = schedule(wait=2, warmup=2, active=8, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=save) as profiler:
        for number in range(14):
            if number == 3:
                dist.barrier()
            step_ms()
            profiler.step()
    times: dict[bool, list[float]] = {True: [], False: []}
    for block in range(BLOCKS):
        is_awake = bool(block % 2)
        dist.barrier()
        times[is_awake] += [step_ms() for _ in range(BLOCK_STEPS)][1:]
    if rank == 0:
        print(median(times[False]), median(times[True]), flush=True)
    dist.barrier()
    os._exit(0)  # in destructors, threads of gloo abort now and then


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
