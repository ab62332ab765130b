"""A sweep of six splits: one gpurun command against torchrun runs one after the other.

"At equal precision of the answer": the medians of identical torchrun launches scatter, however long each
runs, so a difference between two of them is known to z·√2·scatter/√launches. That scatter is measured here,
by launching one split several times, and the six runs count as often as needed to reach the precision
of gpurun's intervals. The plain ratio, one torchrun launch per split, is printed too.
"""

import json
import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.timing import BIN, record, table, wall_s
from gpurun.launcher.stats.estimates import ALPHA

SPLITS = [[16, 16], [17, 15], [18, 14], [20, 12], [24, 8], [28, 4]]
PARAMS = {"layers": 2, "width": 64, "context": 64}
SAME_LAUNCHES = 5
"""Of one split, to see how far identical launches differ."""

JOB = f"""
name: sweep
workload: gpt
params: {json.dumps(PARAMS)}
devices: cpu:2
global_batch: 32
compare:
  split: {json.dumps(SPLITS)}
until: fixed
profile: {{steps: 0}}
gradient_check: false
"""

SCRIPT = '''
"""What people write by hand: DDP on two ranks with a split of the batch, timed in blocks."""
import json, os, sys, time
import torch, torch.distributed as dist
from gpurun.workloads.gpt import build

split, params, blocks, out = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
torch.manual_seed(0)
workload = build(**params)
model = torch.nn.parallel.DistributedDataParallel(workload.model)
optimizer = (workload.optimizer or (lambda p: torch.optim.SGD(p, lr=1e-3)))(model.parameters())
inputs, targets = workload.batch(split[rank], torch.Generator().manual_seed(rank))

def step():
    optimizer.zero_grad()
    loss = workload.loss(model(inputs), targets) * (len(split) * split[rank] / sum(split))
    loss.backward()
    optimizer.step()

for _ in range(10):
    step()
times = []
per_block = 1
for block in range(blocks):
    dist.barrier()
    start = time.perf_counter()
    steps = 0
    while True:
        step(); steps += 1
        if block == 0:
            stop = torch.tensor(float(time.perf_counter() - start > 0.2)); dist.all_reduce(stop)
            if stop.item() > 0: per_block = steps; break
        elif steps == per_block:
            break
    times.append((time.perf_counter() - start) / steps)
if rank == 0:
    json.dump(times, open(out, "w"))
dist.barrier()
dist.destroy_process_group()
'''


def main(runs: int = 3) -> None:
    """Writes the section "Sweep"."""
    rows = [sweep() for _ in range(runs)]
    header = [
        "gpurun s",
        "6 × torchrun s",
        "ratio",
        "rounds by split",
        "± gpurun %",
        "scatter of torchrun launches %",
        "launches for ± gpurun",
        "ratio at equal precision",
    ]
    median = statistics.median(float(row[-1]) for row in rows)
    text = (
        "Six splits of a global batch of 32 over two CPU ranks; each torchrun run measures as many blocks as "
        "gpurun did for that split. ± is the half width of the difference to the even split, median over "
        f"splits. Median ratio at equal precision {median:.2f}, goal ≤ 0.4.\n\n"
    )
    record("Sweep", text + table(header, rows))


def sweep() -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "job.yaml").write_text(JOB)
        (directory / "script.py").write_text(SCRIPT)
        ours_s = wall_s([str(BIN / "gpurun"), "job.yaml", "--out", "run"], directory)
        comparison = json.loads((directory / "run" / "comparison.json").read_text())
        variants = {tuple(variant["split"]): variant for variant in comparison["variants"]}
        rounds = [variants[tuple(split)]["rounds"] for split in SPLITS]
        theirs = [torchrun(directory, split, blocks) for split, blocks in zip(SPLITS, rounds, strict=True)]
        theirs_s = sum(seconds for seconds, _ in theirs)
        again = [torchrun(directory, SPLITS[0], rounds[0])[1] for _ in range(SAME_LAUNCHES - 1)]
    scatter = statistics.stdev(math.log(median_s) for median_s in (theirs[0][1], *again))
    ours = statistics.median(half_width(variants[tuple(split)]["vs_baseline"]["ci"]) for split in SPLITS[1:])
    z = statistics.NormalDist().inv_cdf(1 - ALPHA / (2 * len(SPLITS[1:])))
    launches = max(1, math.ceil((100 * z * math.sqrt(2) * scatter / ours) ** 2))
    return [
        f"{ours_s:.1f}",
        f"{theirs_s:.1f}",
        f"{ours_s / theirs_s:.2f}",
        "/".join(map(str, rounds)),
        f"{ours:.1f}",
        f"{100 * scatter:.1f}",
        str(launches),
        f"{ours_s / (launches * theirs_s):.2f}",
    ]


def torchrun(directory: Path, split: list[int], blocks: int) -> tuple[float, float]:
    """Wall seconds of one run, and its median seconds per step."""
    out = directory / "times.json"
    argv = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "script.py"]
    seconds = wall_s([*argv, json.dumps(split), json.dumps(PARAMS), str(blocks), str(out)], directory)
    return seconds, statistics.median(json.loads(out.read_text()))


def half_width(ci: list[float]) -> float:
    return (ci[1] - ci[0]) / 2
