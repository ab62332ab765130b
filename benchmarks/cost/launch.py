"""Time from the command until all ranks have done one all_reduce, compared with torchrun and accelerate.

`python -m benchmarks.cost.launch 1 2 4 8 16` measures these numbers of ranks and keeps the figures of others.
"""

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.timing import BIN, in_turn, ratio, record, table, wall_s

GPURUN = [sys.executable, "-m", "gpurun"]
TRAINER = Path(__file__).resolve().parents[2] / ".venv-trainer" / "bin"
ACCELERATE = TRAINER / "accelerate"
FIGURES = Path(tempfile.gettempdir()) / "gpurun-launch-figures.json"
"""Figures of the counts measured so far: measuring all at once takes minutes of a quiet machine."""

READY = """
import os, time
import torch, torch.distributed as dist

def ready(directory):
    dist.all_reduce(torch.ones(1))
    rank = dist.get_rank()
    with open(os.path.join(directory, f"ready{rank}"), "w") as file:
        file.write(str(time.time_ns()))
"""

SCRIPT = (
    READY
    + """
if __name__ == "__main__":
    dist.init_process_group("gloo")
    ready(os.environ["READY_DIRECTORY"])
    dist.destroy_process_group()
"""
)

WORKLOAD = (
    READY
    + """
from gpurun import Workload

def build(directory):
    if dist.is_initialized():
        ready(directory)
    else:  # one rank: no group, so the first tensor is the mark
        torch.ones(1).sum()
        with open(os.path.join(directory, "ready0"), "w") as file:
            file.write(str(time.time_ns()))
    model = torch.nn.Linear(1, 1)
    def batch(size, generator):
        x = torch.ones(size, 1)
        return x, x
    return Workload(model, batch, loss=torch.nn.functional.mse_loss)
"""
)


ALL_REDUCE = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os._exit(0)  # in destructors, threads of gloo abort now and then
"""
TRAINS = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for _ in range(3):
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
os._exit(0)  # in destructors, threads of gloo abort now and then
"""
HUGGING_FACE = """
import os, torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

dist.init_process_group("gloo")
config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
model = torch.nn.parallel.DistributedDataParallel(model)
tokens = torch.ones(1, 8, dtype=torch.long)
model(input_ids=tokens, labels=tokens).loss.backward()
os._exit(0)  # in destructors, threads of gloo abort now and then
"""
WHOLE = {
    "one all_reduce": (ALL_REDUCE, "0.20"),
    "DDP and an optimizer": (TRAINS, "0.25"),
    "sets a variable, then one all_reduce": (
        f'import os\nos.environ["OMP_NUM_THREADS"] = "2"\n{ALL_REDUCE}',
        "1",
    ),
}
"""Programs, and the goal for the ratio of their times."""
RANKS = 8


def whole(runs: int) -> str:
    """The table of whole commands with eight ranks."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for program, (text, goal) in WHOLE.items():
            (directory / "script.py").write_text(text)
            argvs = {key: commands(RANKS)[key] for key in ("script", "torchrun")}
            turns = {key: partial(wall_s, argv, directory) for key, argv in argvs.items()}
            found = in_turn(turns, runs)
            seconds = [f"{statistics.median(values):.2f}" for values in found.values()]
            rows.append([program, *seconds, f"{ratio(found['script'], found['torchrun']):.2f}", goal])
    if TRAINER.exists():
        rows += hugging_face(runs)
    return table(["program", "gpurun s", "torchrun s", "ratio", "at most"], rows)


def hugging_face(runs: int) -> list[list[str]]:
    """The rows of a Hugging Face model: the first launch of a file, and those after it."""
    python = str(TRAINER / "python")
    launcher = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    seconds: dict[str, list[float]] = {"first": [], "later": [], "torchrun": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "script.py").write_text(HUGGING_FACE)
            own = {"XDG_CACHE_HOME": name}
            for key in ("first", "later"):
                line = [python, "-m", "gpurun", "run", "script.py", "--devices", f"cpu:{RANKS}"]
                seconds[key].append(wall_s(line, Path(name), own))
            seconds["torchrun"].append(wall_s([*launcher, "script.py"], Path(name), own))
    ours = {
        "first": ("a Hugging Face model, first launch", "0.5"),
        "later": ("the same, second launch", "0.25"),
    }
    median = {key: f"{statistics.median(found):.2f}" for key, found in seconds.items()}
    return [
        [name, median[key], median["torchrun"], f"{ratio(seconds[key], seconds['torchrun']):.2f}", goal]
        for key, (name, goal) in ours.items()
    ]


def job(ranks: int, directory: Path) -> str:
    return f"""
workload: ready.py:build
params: {{directory: {directory}}}
devices: cpu:{ranks}
strategy: {"ddp" if ranks > 1 else "single"}
global_batch: {ranks}
steps: {{warmup: 0, rounds: 1}}
profile: {{steps: 0}}
gradient_check: false
"""


def command_s(directory: Path, ranks: int, argv: list[str]) -> float:
    """Seconds from the start of a command until the last of its ranks was ready; removes the marks."""
    started_ns = time.time_ns()
    wall_s(argv, directory, {"READY_DIRECTORY": str(directory)})
    files = sorted(directory.glob("ready[0-9]*"))
    if len(files) != ranks:
        raise SystemExit(f"only {len(files)} of {ranks} ranks were ready")
    last_ns = max(int(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    return (last_ns - started_ns) / 1e9


def commands(ranks: int) -> dict[str, list[str]]:
    """The compared commands by name; accelerate if its environment exists."""
    found = {
        "workload": [*GPURUN, f"job{ranks}.yaml"],
        "script": [*GPURUN, "run", "script.py", "--devices", f"cpu:{ranks}"],
        "torchrun": [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "script.py"],
    }
    if ACCELERATE.exists() and ranks > 1:  # of one process it makes no group
        options = ["--multi_gpu", f"--num_processes={ranks}", "--num_machines=1", "--mixed_precision=no"]
        found["accelerate"] = [str(ACCELERATE), "launch", *options, "script.py"]
    return found


def measure(ranks: int, runs: int) -> dict[str, float]:
    """Median seconds by command, and our two's ratios to torchrun: medians of neighbouring runs."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "script.py").write_text(SCRIPT)
        (directory / "ready.py").write_text(WORKLOAD)
        (directory / f"job{ranks}.yaml").write_text(job(ranks, directory))
        turns = {key: partial(command_s, directory, ranks, argv) for key, argv in commands(ranks).items()}
        figures = in_turn(turns, runs)
    found = {key: statistics.median(values) for key, values in figures.items()}
    for key in ("workload", "script"):
        found[f"{key} ratio"] = ratio(figures[key], figures["torchrun"])
    return found


def main(counts: tuple[int, ...] = (1, 2, 4, 8, 16), runs: int = 3) -> None:
    """Writes the section "Launch"."""
    known: dict[str, dict[str, float]] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for ranks in counts:
        known[str(ranks)] = measure(ranks, runs)
        FIGURES.write_text(json.dumps(known))
    goals = {"8": "workload ≤ 0.25, script ≤ 0.70"}
    columns = ["workload", "script", "torchrun", "accelerate", "workload ratio", "script ratio"]
    rows = [
        [ranks, *(f"{found[key]:.2f}" if key in found else "" for key in columns), goals.get(ranks, "")]
        for ranks, found in sorted(known.items(), key=lambda item: int(item[0]))
    ]
    header = ["ranks", "workload s", "script s", "torchrun s", "accelerate s", "workload", "script", "goal"]
    record(
        "Launch",
        "From the command to the moment when all gloo ranks have done one all_reduce "
        "(a workload on 1 rank: its first tensor): gpurun with a workload and with a script, torchrun and "
        f"`accelerate launch` with the same script. Medians of {runs} runs in turn; the ratios are ours to "
        "torchrun's, medians of neighbouring runs.\n\n"
        + table(header, rows)
        + f"\n\nWhole commands with {RANKS} ranks:\n\n"
        + whole(runs),
    )


if __name__ == "__main__":
    main(tuple(int(word) for word in sys.argv[1:]) or (1, 2, 4, 8, 16))
