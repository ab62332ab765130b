"""Two sleeping devices in a hand-written DDP loop: the cost of one gradient exchange without gpurun.

`torchrun --nproc-per-node 2 -m benchmarks.splitting.bare '[[α, α], [β, β]]' '[b, b]'` prints milliseconds
as JSON: a step, and the slower rank's without exchange.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

BLOCKS = 28
BLOCK_STEPS = 4


def bare_ms(alphas: Sequence[float], betas: Sequence[float], split: Sequence[int]) -> tuple[float, float]:
    """A step of the bare loop, and one without exchange: medians over blocks of the slower rank's means."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(len(split)), "-m"]
    arguments = ["benchmarks.splitting.bare", json.dumps([alphas, betas]), json.dumps(split)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, env=environment)
    together, alone = json.loads(done.stdout)
    return together, alone


def rank_main(costs: Sequence[Sequence[float]], split: Sequence[int]) -> None:
    import torch
    import torch.distributed as dist

    from gpurun.workloads.sleep import build

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workload = build(*([values[rank] for values in costs]))
    model = torch.nn.parallel.DistributedDataParallel(workload.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert workload.batch is not None
    assert workload.loss is not None
    loss_function = workload.loss
    inputs, targets = workload.batch(split[rank], torch.Generator().manual_seed(rank))

    def block_ms() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
        mean = torch.tensor((time.perf_counter() - start) / BLOCK_STEPS * 1000)
        dist.all_reduce(mean, op=dist.ReduceOp.MAX)
        return mean.item()

    def median_ms() -> float:
        return statistics.median([block_ms() for _ in range(BLOCKS + 2)][2:])

    together = median_ms()
    with model.no_sync():
        alone = median_ms()
    if rank == 0:
        print(json.dumps([together, alone]))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(*map(json.loads, sys.argv[1:]))
