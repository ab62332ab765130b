"""Verdicts under other load: launches that were measured next to it, drawn again for thousands of jobs.

`python -m benchmarks.verdicts.replay record` measures each program for ten minutes per kind of load, and can
be interrupted and repeated: what `recorded/` has stays. `python -m benchmarks.verdicts.replay` makes the
table of what is there. The machine should have no other load while it records.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import machine_facts, record, table
from gpurun.launcher.compare.figures.recorded import MeasuredVariant, read_measured
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.stats.core_waiting import RoundKey
from tests.unit.stats.simulate import Model, is_false, run_until_decided

SEED = 20261127
"""Of the tables. Nothing was chosen by runs with it."""
RUNS = 2000
"""Jobs that are drawn per cell."""
RECORDED = Path(__file__).with_name("recorded")
MINUTES = 10.0
BUDGET_S = 180
EFFECTS = (0, 10, 20, 40)
"""Percent by which the second variant is slower."""
ROUNDS = 5
"""Of a recorded launch: more than that say the same again."""
MOST_LAUNCHES = 100
"""Of a run."""
LOADS = {"none": 0, "50 %": 50, "bursts": -60, "100 %": 100, "25 %": 25}
"""Percent of a core; negative: in bursts."""
LOAD = """
import os, random, sys, time
parent = os.getppid()
percent, is_bursty = abs(float(sys.argv[1])), float(sys.argv[1]) < 0
chance = random.Random(7)
while os.getppid() == parent:
    busy_s = chance.uniform(0.2, 5.0) if is_bursty else 0.05
    until = time.monotonic() + busy_s
    while time.monotonic() < until:
        pass
    time.sleep(busy_s * (100 - percent) / percent)
"""
COMPUTES = """
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(100):
    end = time.thread_time() + MS / 1e3
    while time.thread_time() < end:
        torch.ones(64, 64).mm(torch.ones(64, 64))
    model(torch.randn(32, 256)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
"""Computes so many ms of CPU time a step, and a little more for its model."""
JOBS = {
    "mlp": "workload: mlp\ndevices: cpu:2\nglobal_batch: 64\ncompare: {split: [even, [33, 31]]}\n",
    "gpt": "workload: gpt\nparams: {layers: 1, width: 64, context: 32}\ndevices: cpu:2\nglobal_batch: 16\n"
    "compare: {split: [even, [9, 7]]}\n",
    "program": "script: computing.py\ndevices: cpu:2\n",
}
"""Of a workload one split under two names, which share launches."""
COMMON = "profile: {steps: 0}\nuntil: fixed\n"


@dataclass(frozen=True)
class Recorded:
    """What was measured of a program next to a load."""

    launches: Sequence[Sequence[Sequence[float]]]
    """ln(step in ns) by launch, name and round, in the order in which they ran."""
    loads: Sequence[Sequence[Sequence[float | None]]]
    """How many cores other load kept busy meanwhile."""
    launch_s: float
    """The mean time of a launch, from its start to the next one's."""

    @property
    def num_names(self) -> int:
        return len(self.launches[0])


@dataclass(frozen=True)
class Replayed(Model):
    """Jobs whose launches are drawn from those that were recorded."""

    recorded: Recorded = Recorded((), (), 0.0)

    def logs(self, rng: np.random.Generator, rounds: Mapping[str, int]) -> dict[str, NDArray[np.float64]]:
        """Of launches that ran one after the other, or of names that shared one; which is whose is drawn."""
        launches = self.recorded.launches
        first = int(rng.integers(len(launches) - self.apart))
        drawn = [launch[0] for launch in launches[first : first + 2]] if self.apart else list(launches[first])
        drawn = [drawn[place] for place in rng.permutation(2)]
        return {
            name: np.array(drawn[int(name)][:num]) + math.log1p(self.effects_percent[int(name)] / 100)
            for name, num in rounds.items()
        }


def main(directory: Path, runs: int = RUNS, seed: int = SEED) -> None:
    """Writes the section "Verdicts under load"."""
    facts, rows = machine_facts(), []
    cells = [
        (name, load, is_apart, found)
        for name, load in product(JOBS, LOADS)
        if (found := read(directory, name, load)) is not None
        for is_apart in (False, True)
        if is_apart or found.num_names > 1
    ]
    jobs = [
        (model_of(found, is_apart, effect), runs, (seed, place, effect))
        for place, (_, _, is_apart, found) in enumerate(cells)
        for effect in EFFECTS
    ]
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        shares = iter(list(workers.map(outcomes, jobs)))
    for name, load, is_apart, found in cells:
        by_effect = [next(shares) for _ in EFFECTS]
        wrong = [f"{100 * by_effect[0][0]:.1f} %", *(f"{100 * rates[0]:.1f} %" for rates in by_effect[1:])]
        right = [f"{100 * rates[1]:.0f} %" for rates in by_effect[1:]]
        how = "of their own" if is_apart else "shared"
        rows.append([name, load, how, str(len(found.launches)), wrong[0], max(wrong[1:]), *right])
    header = ["program", "load", "launches", "recorded", "wrong, no difference", "wrong, else"]
    text = (
        f"{runs:,} jobs per cell of {BUDGET_S} s. Launches are drawn from recorded ones, two neighbours at a "
        "time, so that a burst that is longer than a launch meets both. What is measured next, and all "
        "verdicts, are decided by the launcher's own functions. `+10 %`: jobs in which that difference was "
        "found.\n\n"
    )
    record("Verdicts under load", text + table([*header, *(f"+{e} %" for e in EFFECTS[1:])], rows), facts)


def model_of(found: Recorded, is_apart: bool, effect_percent: float) -> Replayed:
    """Two variants, the second slower by so much."""
    effects = (0.0, effect_percent)
    return Replayed(effects, 0.0, 0.0, apart=is_apart, launch_s=found.launch_s, recorded=found)


def outcomes(job: tuple[Replayed, int, tuple[int, ...]]) -> tuple[float, float]:
    """Shares of the jobs with a wrong conclusion, and of those that found the difference."""
    model, runs, seed = job
    rng = np.random.default_rng(seed)
    found = [run_until_decided(model, rng, BUDGET_S) for _ in range(runs)]
    wrong = (is_false(model.effects_percent, replayed.fastest, replayed.verdicts) for replayed in found)
    return fmean(wrong), fmean(replayed.verdicts == ("slower",) for replayed in found)


def read(directory: Path, name: str, load: str) -> Recorded | None:
    path = file_of(directory, name, load)
    return msgspec.json.decode(path.read_bytes(), type=Recorded) if path.exists() else None


def file_of(directory: Path, name: str, load: str) -> Path:
    return directory / f"{name}-{load.replace(' %', '')}.json"


def record_all(directory: Path, minutes: float) -> None:
    """Measures what isn't there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    for load, name in product(LOADS, JOBS):
        path = file_of(directory, name, load)
        if path.exists():
            continue
        with other_load(LOADS[load]):
            found = measured(name, 60 * minutes)
        print(f"{path.name}: {len(found.launches)} launches, {found.launch_s:.1f} s each", flush=True)
        path.write_bytes(msgspec.json.encode(rounded(msgspec.to_builtins(found))) + b"\n")


def rounded(value: Any) -> Any:
    """Plain data with numbers of five decimals: a logarithm is then right to 0.001 %."""
    match value:
        case float():
            return round(value, 5)
        case dict():
            return {name: rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [rounded(each) for each in value]
    return value


@contextmanager
def other_load(percent: float) -> Iterator[None]:
    """A process that keeps a core busy for so many percent of the time; negative: in bursts."""
    if not percent:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", LOAD, str(percent)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measured(name: str, seconds: float) -> Recorded:
    """As many launches as take so long, in runs, of each of which the first ones aren't counted."""
    num = max(8, round(seconds / launched(name, 3).launch_s))
    runs = [launched(name, min(MOST_LAUNCHES, max(8, num - done))) for done in range(0, num, MOST_LAUNCHES)]
    return Recorded(
        [launch for run in runs for launch in run.launches],
        [load for run in runs for load in run.loads],
        fmean(run.launch_s for run in runs),
    )


def launched(name: str, num: int) -> Recorded:
    """A run with so many launches."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "computing.py").write_text(COMPUTES.replace("MS", "20"))
        rounds = f", rounds: {num * ROUNDS}" if "workload" in JOBS[name] else ""  # a program has none
        (directory / "job.yaml").write_text(f"{JOBS[name]}{COMMON}steps: {{launches: {num}{rounds}}}\n")
        argv = [sys.executable, "-m", "benchmarks.verdicts.replay", "--job", str(directory / "job.yaml")]
        argv += ["--out", str(directory / "run"), "--quiet"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return read_run(RunDir(directory / "run"))


def run_alike(argv: Sequence[str]) -> None:
    """`gpurun job.yaml`, in which every variant has the samples of the first; ends the process.

    A job file can't say that: the same samples are measured once.
    """
    from gpurun.launcher.cli.main import cli
    from gpurun.launcher.plan.build import build_plan
    from gpurun.launcher.run import job

    def alike(*args: Any) -> Plan:
        plan = build_plan(*args)
        split = plan.variants[0].split
        return replace(plan, variants=tuple(replace(variant, split=split) for variant in plan.variants))

    vars(job)["build_plan"] = alike
    cli(argv)


def read_run(run: RunDir) -> Recorded:
    plan = run.read(run.plan, Plan)
    steps = run.read_all_steps(variant.id for variant in plan.variants)
    events = run.read_all_events()
    found = [read_measured(run, plan, variant, steps[variant.id], events) for variant in plan.variants]
    logs = [
        each.logs if not each.means else {k: {("", 0): v} for k, v in each.means.items()} for each in found
    ]
    common = sorted(set.intersection(*(set(its) for its in logs)))[1:]  # the first launch imports
    launches = [[list(its[repetition].values()) for its in logs] for repetition in common]
    loads = [
        [[load_in(measured, key) for key in measured.logs.get(repetition, {})] for measured in found]
        for repetition in common
    ]
    starts = [its[0].time_ns for launch in plan.launches if (its := events.get(launch.id))]
    return Recorded(launches, loads, (starts[-1] - starts[1]) / 1e9 / (len(starts) - 2))


def load_in(measured: MeasuredVariant, key: RoundKey) -> float | None:
    """Cores that other load kept busy in a round, on the cores of the rank that had most of it."""
    known = [its[key].load for its in measured.waiting.values() if key in its]
    return max((load for load in known if load is not None), default=None)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_alike(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["record"])
    parser.add_argument("--directory", type=Path, default=RECORDED)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    if given.what == "record":
        record_all(given.directory, given.minutes)
    else:
        main(given.directory, given.runs)
