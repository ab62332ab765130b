"""Real jobs whose answer is known, next to other load: how often is it found, and how often is one wrong?

`python -m benchmarks.verdicts.live DIRECTORY [--only CELL …] [--minutes M]` runs the jobs that DIRECTORY
lacks, at most for M minutes, and writes the section "Jobs next to other load". It can be interrupted and
repeated. The machine should have no other load.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.timing import BIN, machine_facts, record, table
from benchmarks.verdicts.replay import COMPUTES, LOADS, other_load

SEED = 1128
"""Of all jobs and loads, by their numbers. Nothing was chosen by runs with it."""
IMAGES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from gpurun import Workload

def build(width: int = 16) -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.1), nn.Flatten(), nn.Linear(2 * width * 8 * 8, 2))
    images = torch.randn(4096, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    return Workload(model, None, loss=nn.CrossEntropyLoss(), dataset=dataset,
                    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))
"""
FILES = {"computes.py": COMPUTES.replace("MS", "float(sys.argv[2])"), "images.py": IMAGES}
COMMON = "devices: cpu:2\nprofile: {steps: 0}\n"
WORKLOAD = "gradient_check: false\nworkload: "
GPT = f"{WORKLOAD}gpt\nparams: {{layers: 1, width: 64, context: 32}}\nglobal_batch: 16\n"
MLP = f"{WORKLOAD}mlp\nglobal_batch: 64\n"
IMAGE = f"{WORKLOAD}images.py:build\nglobal_batch: 64\n"
IN_ONE_LAUNCH = GPT + "compare: {split: [even, [9, 7]]}\n"
OF_THEIR_OWN = GPT + "compare: {bucket_mb: [25, 26]}\nsteps: {together: never}\n"
"""The model is smaller than any of the buckets."""
SEEDS = MLP + "compare: {seed: [0, 1]}\n"
DP = IMAGE + "compare: {strategy: [ddp, dp], split: [even, '3:1']}\n"
BUCKETS = MLP + "compare: {bucket_mb: [25, 26]}\n"
GATE = "script: computes.py\nargs: [--ms, 20]\n"


def computes(first: float, second: float) -> str:
    """A program that computes so many ms of CPU time a step."""
    return f"script: computes.py\ncompare: {{args: [[--ms, {first}], [--ms, {second}]]}}\n"


DECIDED = "decided"
"""Any verdict is right: which is faster depends on the machine."""
PAIRS = (
    *(computes(20, ms) for ms in (20.5, 21, 22, 24, 26)),
    *(f"{MLP}compare: {{split: [even, {split}]}}\n" for split in ("[34, 30]", "[40, 24]", "[48, 16]")),
    *(f"{GPT}compare: {{split: [even, {split}]}}\n" for split in ("[9, 7]", "[10, 6]", "[12, 4]")),
    BUCKETS,
    MLP + "compare: {strategy: [ddp, dp]}\n",
    GPT + "compare: {threads: [1, 2]}\n",
    IMAGE + "compare: {split: [even, [36, 28]]}\n",
)
"""Of variants that differ by little and by much, by what they compute and by what they wait for."""


@dataclass(frozen=True)
class Cell:
    """Jobs of one kind."""

    jobs: Sequence[str]
    """In turn, each once per load."""
    loads: Sequence[int]
    """Percent of a core, in turn; negative: in bursts."""
    runs: int
    budget: str
    goal: str
    right: str = ""
    """The verdict that is right; empty: no difference is."""
    is_one: bool = False
    """Both variants are the first one's split."""
    gate: Sequence[str] | None = None
    """Options of `gpurun gate` at 5 %, against a version that computes 20 ms."""
    ms: float = 20.0
    """Of the gate's working copy."""
    strategy: str = ""
    """Of the variants that are asked about; empty: all but the baseline."""

    @property
    def load(self) -> str:
        names = {percent: name for name, percent in LOADS.items()}
        return ", then ".join(names[one] for one in self.loads)


CELLS = {
    "nothing differs, quiet": Cell([SEEDS], [0], 20, "30s", "at most 2 wrong"),
    "nothing differs, steady": Cell([SEEDS], [50], 20, "30s", "at most 2 wrong"),
    "nothing differs, bursts": Cell([SEEDS], [-60], 20, "30s", "at most 2 wrong"),
    "A/A, 50 %": Cell([IN_ONE_LAUNCH, OF_THEIR_OWN], [50], 40, "30s", "at most 4 wrong", is_one=True),
    "A/A, bursts": Cell([IN_ONE_LAUNCH, OF_THEIR_OWN], [-60], 40, "30s", "at most 4 wrong", is_one=True),
    "+20 %": Cell([computes(20, 24.3)], [50], 20, "90s", "at most 3 wrong or undecided", "slower"),
    "+40 %": Cell([computes(20, 28.6)], [50], 20, "90s", "at most 3 wrong or undecided", "slower"),
    "a program, 20 or 26 ms": Cell([computes(20, 26)], [100], 3, "90s", "decided", "slower"),
    "DP or DDP, a small CNN": Cell([DP], [100], 3, "90s", "decided", "slower", strategy="dp"),
    "one all-reduce or two": Cell([BUCKETS], [0], 3, "30s", "decided", DECIDED),
    "gate, equal": Cell([GATE], [50], 6, "3m", "at most 1 undecided, none wrong", "same", gate=()),
    "gate, +15 %": Cell([GATE], [50], 6, "3m", "at most 1 undecided, none wrong", "slower", gate=(), ms=23.2),
    "gate, equal, CPU time": Cell(
        [GATE], [50], 6, "3m", "at most 1 undecided, none wrong", "same", gate=("--metric", "cpu")
    ),
    "gate, +15 %, CPU time": Cell(
        [GATE], [50], 6, "3m", "at most 1 undecided, none wrong", "slower", gate=("--metric", "cpu"), ms=23.2
    ),
    "with load, then without": Cell(
        PAIRS, [50, 0], 2 * len(PAIRS), "60s", "at most 2 wrong yes; said in at least 9"
    ),
}
GATE_SAYS = {0: "same", 5: "slower", 6: "inconclusive"}


@dataclass(frozen=True)
class Outcome:
    """What one job concluded of its second variant against its first."""

    cell: str
    number: int
    verdict: str
    percent: float | None
    ci: Sequence[float] | None
    holds: str | None
    """Would it be so on a quiet machine?"""
    launches: int
    wall_s: float
    answer: str


def main(directory: Path, only: Sequence[str] = (), minutes: float = math.inf) -> None:
    """Runs what isn't there yet, and writes the section."""
    facts, end_s = machine_facts(), time.monotonic() + 60 * minutes
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "live.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [msgspec.json.decode(line, type=Outcome) for line in lines]
    there = {(one.cell, one.number) for one in found}
    for name in only or CELLS:
        for number in range(CELLS[name].runs):
            if (name, number) in there or time.monotonic() > end_s:
                continue
            one = run_one(name, number)
            print(f"{name} {number}: {one.answer}", flush=True)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")
            found.append(one)
    record("Jobs next to other load", text(found), facts)


def run_one(name: str, number: int) -> Outcome:
    """Runs a job in a command of its own."""
    cell = CELLS[name]
    turn, which = divmod(number, len(cell.loads))
    seed = SEED + turn
    text = f"{cell.jobs[turn % len(cell.jobs)]}{COMMON}budget: {cell.budget}\n"
    text += "" if "script" in text or "seed" in text else f"seed: {seed}\n"
    with tempfile.TemporaryDirectory() as place, other_load(cell.loads[which], seed):
        directory, began_s = Path(place), time.monotonic()
        write(directory / "new", text, cell.ms)
        out = directory / "run"
        argv = ["new/job.yaml", "--out", str(out), "--quiet"]
        if cell.gate is None:
            command = [sys.executable, "-m", "benchmarks.verdicts.live", "--job"]
            command = command if cell.is_one else [str(BIN / "gpurun")]
        else:
            write(directory / "old", text, 20.0)
            command = [str(BIN / "gpurun"), "gate"]
            argv += ["--against", "old", "--fail-slower", "5%", "--budget", cell.budget, *cell.gate]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run([*command, *argv], cwd=directory, env=env, capture_output=True, text=True)
        if done.returncode not in (GATE_SAYS if cell.gate is not None else (0,)):
            raise SystemExit(f"{name}: the job ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        wall_s = time.monotonic() - began_s
        comparison = json.loads((out / "comparison.json").read_text())
        verdict = GATE_SAYS[done.returncode] if cell.gate is not None else ""
        return outcome(name, number, comparison, wall_s, verdict)


def write(directory: Path, job: str, ms: float) -> None:
    """A job and its files; of a gate's job, the program says how long it computes."""
    directory.mkdir()
    directory.joinpath("job.yaml").write_text(job)
    for name, source in FILES.items():
        directory.joinpath(name).write_text(source)
    if "args: [--ms" in job:
        directory.joinpath("computes.py").write_text(COMPUTES.replace("MS", str(ms)))


def outcome(name: str, number: int, found: Mapping[str, Any], wall_s: float, verdict: str) -> Outcome:
    """Of a job with two variants; of more, the one whose difference is the least clear."""
    asked, gate = CELLS[name].strategy, found.get("gate")
    if gate is not None:
        (difference,) = gate["rows"]
    else:
        compared = [one for one in found["variants"] if one["vs_baseline"] and asked in ("", one["strategy"])]
        differences = [one["vs_baseline"] | {"launches": one["launches"]} for one in compared]
        others = [one for one in differences if one["verdict"] != "baseline"]
        by_decided = {"inconclusive": 0, "same": 1}
        difference = min(others, key=lambda one: by_decided.get(one["verdict"], 2))
    return Outcome(
        name,
        number,
        verdict or difference["verdict"],
        difference["percent"],
        difference["ci"],
        (difference.get("without_load") or {}).get("holds"),
        difference["launches"],
        wall_s,
        found["findings"][0]["text"],
    )


def run_alike(argv: Sequence[str]) -> None:
    """`gpurun job.yaml`, in which every variant has the samples of the first.

    A job file can't say that: the same samples are measured once.
    """
    from gpurun.launcher.cli.main import cli
    from gpurun.launcher.plan.build import build_plan
    from gpurun.launcher.plan.model import Plan
    from gpurun.launcher.run import job

    def alike(*args: Any) -> Plan:
        plan = build_plan(*args)
        split = plan.variants[0].split
        return replace(plan, variants=tuple(replace(one, split=split) for one in plan.variants))

    vars(job)["build_plan"] = alike
    cli(argv)


def text(found: Sequence[Outcome]) -> str:
    """The table, what `holds` said, and each wrong answer."""
    header = [
        "jobs",
        "other load",
        "runs",
        "right",
        "undecided",
        "wrong",
        "goal",
        "±",
        "launches",
        "seconds",
    ]
    by_cell = {name: [one for one in found if one.cell == name] for name in CELLS}
    rows = [row(name, its) for name, its in by_cell.items() if its and len(CELLS[name].loads) == 1]
    wrong = [f"- {one.cell}: {one.answer}" for one in found if share(one) == "wrong"]
    parts = [
        "Jobs of two variants that end as soon as they are decided, or with their `budget`: 30 s; 90 s where "
        "the second variant is slower; 3 minutes for a gate at 5 %. Where nothing differs, the right answer "
        "names none. Medians: ± is half of the interval; launches are those of each variant.",
        table(header, rows),
        holds(by_cell["with load, then without"]),
        "\n".join(["Wrong:", *wrong]) if wrong else "",
    ]
    return "\n\n".join(part for part in parts if part)


def share(one: Outcome) -> str:
    """How an answer is counted: `right`, `undecided` or `wrong`; of pairs, nothing is wrong."""
    cell = CELLS[one.cell]
    if len(cell.loads) > 1:
        return "right"
    if not cell.right:
        return "wrong" if one.verdict in ("faster", "slower") else "right"
    if one.verdict == "inconclusive":
        return "undecided"
    return "right" if cell.right in (one.verdict, DECIDED) else "wrong"


def row(name: str, its: Sequence[Outcome]) -> list[str]:
    shares = [share(one) for one in its]
    halves = [(one.ci[1] - one.ci[0]) / 2 for one in its if one.ci is not None]
    return [
        name,
        CELLS[name].load,
        str(len(its)),
        *(str(shares.count(one)) for one in ("right", "undecided", "wrong")),
        CELLS[name].goal,
        f"{median(halves):.1f} %" if halves else "",
        f"{median(one.launches for one in its):g}",
        f"{median(one.wall_s for one in its):.0f}",
    ]


def holds(its: Sequence[Outcome]) -> str:
    """Pairs of a job with load, then without."""
    by_number = {one.number: one for one in its}
    pairs = [(one, by_number[n + 1]) for n, one in by_number.items() if n % 2 == 0 and n + 1 in by_number]
    if not pairs:
        return ""
    said = [two for two in pairs if two[0].holds in ("yes", "no")]
    wrong = [two for two in said if two[0].holds == "yes" and two[1].verdict != two[0].verdict]
    return (
        f"{len(pairs)} jobs next to a load of 50 %, then without it: whether the difference holds without "
        f"the load was said in {len(said)} (goal: at least 9), and in {len(wrong)} of those with `yes` the "
        "quiet run had another verdict (goal: at most 2)."
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_alike(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("directory", type=Path)
        parser.add_argument("--only", nargs="+", choices=CELLS, default=(), metavar="CELL")
        parser.add_argument("--minutes", type=float, default=math.inf)
        main(**vars(parser.parse_args()))
