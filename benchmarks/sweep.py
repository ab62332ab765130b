"""A sweep of six splits: one gpurun command against six torchrun runs one after the other.

"At equal precision of the answer": a torchrun run measures as many blocks of the same length as gpurun
needed for that split. That flatters torchrun: its runs lie minutes apart and share no rounds, so its
differences scatter more; both half-widths are printed.
"""

import json
import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.timing import BIN, record, table, wall_s

SPLITS = [[16, 16], [17, 15], [18, 14], [20, 12], [24, 8], [28, 4]]
PARAMS = {"layers": 2, "width": 128, "context": 64}

JOB = f"""
name: sweep
workload: gpt
params: {json.dumps(PARAMS)}
devices: cpu:2
global_batch: 32
compare:
  split: {json.dumps(SPLITS)}
profile: {{steps: 0}}
gradient_check: false
"""

SCRIPT = '''
"""What people write by hand: DDP on two ranks with a split of the batch, timed in blocks."""
import json, os, sys, time
import torch, torch.distributed as dist
from workloads.gpt import build

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
    rows = [sweep(run) for run in range(runs)]
    header = [
        "gpurun s",
        "6 × torchrun s",
        "ratio",
        "rounds by split",
        "± gpurun %",
        "± torchrun % (at least)",
    ]
    ratios = statistics.median(float(row[2]) for row in rows)
    text = (
        "Six splits of a global batch of 32 over two CPU ranks, as many timed blocks on both sides. "
        "± is the half width of the difference to the even split, median over splits, at the same level; "
        f"torchrun's as if its blocks were independent. Median ratio {ratios:.2f}, goal ≤ 0.4.\n\n"
    )
    record("Sweep", text + table(header, rows))


def sweep(run: int) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB)
        (folder / "script.py").write_text(SCRIPT)
        ours_s = wall_s([str(BIN / "gpurun"), "job.yaml", "--out", "run"], folder)
        comparison = json.loads((folder / "run" / "comparison.json").read_text())
        variants = {tuple(variant["split"]): variant for variant in comparison["variants"]}
        most = max(variant["rounds"] for variant in variants.values())
        theirs_s, times = 0.0, {}
        for split in SPLITS:
            blocks = variants[tuple(split)]["rounds"] if split != SPLITS[0] else most
            out = folder / "times.json"
            argv = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "script.py"]
            argv += [json.dumps(split), json.dumps(PARAMS), str(blocks), str(out)]
            theirs_s += wall_s(argv, folder)
            times[tuple(split)] = json.loads(out.read_text())
        rounds = "/".join(str(variants[tuple(split)]["rounds"]) for split in SPLITS)
        halves = [
            half_width(variant["vs_baseline"]["ci"]) for key, variant in variants.items() if key != (16, 16)
        ]
        level = comparison["ci_level"]
        their_halves = [
            independent_half_width(times[tuple(SPLITS[0])], times[tuple(s)], level) for s in SPLITS[1:]
        ]
    return [
        f"{ours_s:.1f}",
        f"{theirs_s:.1f}",
        f"{ours_s / theirs_s:.2f}",
        rounds,
        f"{statistics.median(halves):.1f}",
        f"{statistics.median(their_halves):.1f}",
    ]


def half_width(ci: list[float]) -> float:
    return (ci[1] - ci[0]) / 2


def independent_half_width(base: list[float], other: list[float], level: float) -> float:
    """Percent; normal interval of the difference of mean log block times, unpaired."""
    variances = [statistics.variance([math.log(t) for t in times]) / len(times) for times in (base, other)]
    return 100 * statistics.NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(sum(variances))


if __name__ == "__main__":
    main()
