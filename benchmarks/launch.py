"""From the command to the moment when all ranks have done one all_reduce: gpurun against torchrun."""

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.timing import BIN, in_turn, ratio, record, table, wall_s

READY = """
import os, time
import torch, torch.distributed as dist

def ready(folder):
    dist.all_reduce(torch.ones(1))
    rank = dist.get_rank()
    with open(os.path.join(folder, f"ready{rank}"), "w") as file:
        file.write(str(time.time_ns()))
"""

SCRIPT = (
    READY
    + """
if __name__ == "__main__":
    dist.init_process_group("gloo")
    ready(os.environ["READY_FOLDER"])
    dist.destroy_process_group()
"""
)

WORKLOAD = (
    READY
    + """
from workloads import Workload

def build(folder):
    if dist.is_initialized():
        ready(folder)
    else:  # one rank: no group, so the first tensor is the mark
        torch.ones(1).sum()
        with open(os.path.join(folder, "ready0"), "w") as file:
            file.write(str(time.time_ns()))
    model = torch.nn.Linear(1, 1)
    def batch(size, generator):
        x = torch.ones(size, 1)
        return x, x
    return Workload(model, batch, loss=torch.nn.functional.mse_loss)
"""
)


def job(ranks: int, folder: Path) -> str:
    return f"""
workload: ready.py:build
params: {{folder: {folder}}}
devices: cpu:{ranks}
strategy: {"ddp" if ranks > 1 else "single"}
global_batch: {ranks}
steps: {{warmup: 0, rounds: 1}}
profile: {{steps: 0}}
gradient_check: false
"""


def last_ready_s(folder: Path, started_ns: int, ranks: int) -> float:
    """Seconds from the start of the command until the last rank was ready; the marks are taken away."""
    files = sorted(folder.glob("ready[0-9]*"))
    if len(files) != ranks:
        raise SystemExit(f"only {len(files)} of {ranks} ranks were ready")
    last_ns = max(int(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    return (last_ns - started_ns) / 1e9


def torchrun_s(folder: Path, ranks: int) -> float:
    started_ns = time.time_ns()
    argv = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "script.py"]
    wall_s(argv, folder, {"READY_FOLDER": str(folder)})
    return last_ready_s(folder, started_ns, ranks)


def gpurun_s(folder: Path, ranks: int) -> float:
    started_ns = time.time_ns()
    wall_s([str(BIN / "gpurun"), f"job{ranks}.yaml"], folder)
    return last_ready_s(folder, started_ns, ranks)


def main(runs: int = 5) -> None:
    """Writes the section "Launch"."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "ready.py").write_text(WORKLOAD)
        for ranks in (1, 2, 8):
            (folder / f"job{ranks}.yaml").write_text(job(ranks, folder))
            figures = in_turn(
                {
                    "gpurun": lambda n=ranks: gpurun_s(folder, n),  # type: ignore[misc]
                    "torchrun": lambda n=ranks: torchrun_s(folder, n),  # type: ignore[misc]
                },
                runs,
            )
            medians = {key: statistics.median(values) for key, values in figures.items()}
            goal = {1: "≤ 1.0", 8: "≤ 0.35"}.get(ranks, "")
            rows.append(
                [
                    str(ranks),
                    f"{medians['gpurun']:.2f}",
                    f"{medians['torchrun']:.2f}",
                    f"{ratio(figures['gpurun'], figures['torchrun']):.2f}",
                    goal,
                ]
            )
    header = ["ranks", "gpurun s", "torchrun s", "ratio (median of pairs)", "goal"]
    record(
        "Launch",
        "From the command to the moment when all gloo ranks have done one all_reduce "
        f"(1 rank: its first tensor); medians of {runs} alternating runs.\n\n" + table(header, rows),
    )


if __name__ == "__main__":
    main()
