"""Real jobs without any difference: the same split under two names, half of them next to a competing process.

`python -m benchmarks.verdicts.alike --jobs 40 --budget 45s --minutes 15` sets the number of jobs, the budget
of each, and the time by which the last one ends. Results are written after every job: an interruption loses
that one.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timing import machine_facts, record, table

JOBS = 40
BUDGET = "45s"
GOAL = 5
"""Most jobs of 40 that may name a difference: twice the 5 % that verdicts are made for, and one."""
SEED = 2026
JOB = """
workload: gpt
params: {layers: 1, width: 64, context: 32}
devices: cpu:2
global_batch: 16
profile: {steps: 0}
gradient_check: false
"""
KINDS = {
    "in one launch": "compare: {split: [even, [9, 7]]}\n",
    "in launches of their own": "compare: {bucket_mb: [25, 26]}\nsteps: {together: never}\n",
}
"""Names that share processes, and names that need their own: the model is smaller than any of the buckets."""
BUSY = """
import random, time
chance = random.Random({seed})
while True:
    end = time.monotonic() + chance.uniform(0.5, 3)
    while time.monotonic() < end:
        pass
    time.sleep(chance.uniform(0, 2))
"""
"""Computes most of the time, in stretches: harder than steady load, which slows all rounds alike."""


@dataclass(frozen=True)
class Outcome:
    """What one job concluded."""

    kind: str
    is_loaded: bool
    verdict: str
    headline: str
    half_width_percent: float | None
    launches: int
    wall_s: float

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("faster", "slower")


def main(jobs: int = JOBS, budget: str = BUDGET, minutes: float = math.inf, seed: int = SEED) -> None:
    """Writes the section "Real jobs without a difference"; all kinds of jobs take turns."""
    facts, end_s = machine_facts(), time.monotonic() + 60 * minutes
    places = [(kind, is_loaded) for is_loaded in (False, True) for kind in KINDS]
    found: list[Outcome] = []
    for number in range(jobs):
        longest_s = max((one.wall_s for one in found), default=0.0)
        if time.monotonic() + longest_s > end_s:
            break
        found.append(run_one(*places[number % len(places)], seed + number, budget))
        record("Real jobs without a difference", text(found, budget), facts)


def run_one(kind: str, is_loaded: bool, number: int, budget: str) -> Outcome:
    """Runs a job in a command of its own."""
    with tempfile.TemporaryDirectory() as name, other_load(is_loaded, number):
        directory, began_s = Path(name), time.monotonic()
        (directory / "job.yaml").write_text(f"{JOB}budget: {budget}\n{KINDS[kind]}seed: {number}\n")
        argv = [sys.executable, "-m", "benchmarks.verdicts.alike", "--job", str(directory)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{kind}: the job ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found = json.loads((directory / "run" / "comparison.json").read_text())
        return outcome(kind, is_loaded, found, time.monotonic() - began_s)


def outcome(kind: str, is_loaded: bool, found: Mapping[str, Any], wall_s: float) -> Outcome:
    """Of a job with two variants, the second against the first."""
    _, other = found["variants"]
    difference = other["vs_baseline"]
    ci = difference["ci"]
    half = None if ci is None else (ci[1] - ci[0]) / 2
    return Outcome(
        kind, is_loaded, difference["verdict"], found["findings"][0]["text"], half, other["launches"], wall_s
    )


@contextmanager
def other_load(is_wanted: bool, seed: int) -> Iterator[None]:
    """A process that competes for the cores."""
    if not is_wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY.format(seed=seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run_job(directory: Path) -> None:
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
    cli([str(directory / "job.yaml"), "--out", str(directory / "run"), "--quiet"])


def text(found: Sequence[Outcome], budget: str) -> str:
    wrong = [one for one in found if one.is_wrong]
    header = ["names", "other load", "jobs", "wrong", "same", "undecided", "± %", "launches", "seconds"]
    rows = [
        row(kind, is_loaded, [one for one in found if (one.kind, one.is_loaded) == (kind, is_loaded)])
        for is_loaded in (False, True)
        for kind in KINDS
    ]
    parts = [
        f"{len(found)} jobs with a budget of {budget}, each with one split of the `gpt` workload under two "
        "names; half of them next to a process that computes in stretches of 0.5 to 3 s with pauses of up to "
        f"2 s. {len(wrong)} of {len(found)} named a difference (goal: at most {GOAL} of {JOBS}). Medians: "
        "± is half of the interval; launches are those of each name.",
        table(header, [one for one in rows if one]),
        "\n".join(["Wrong:", *(f"- {one.kind}: {one.headline}" for one in wrong)]) if wrong else "",
    ]
    return "\n\n".join(part for part in parts if part)


def row(kind: str, is_loaded: bool, found: Sequence[Outcome]) -> list[str]:
    """A line of the table; empty without jobs."""
    if not found:
        return []
    halves = [one.half_width_percent for one in found if one.half_width_percent is not None]
    verdicts = [one.verdict for one in found]
    return [
        kind,
        "yes" if is_loaded else "no",
        str(len(found)),
        str(sum(one.is_wrong for one in found)),
        str(verdicts.count("same")),
        str(verdicts.count("inconclusive")),
        f"{median(halves):.1f}" if halves else "",
        f"{median(one.launches for one in found):g}",
        f"{median(one.wall_s for one in found):.0f}",
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        run_job(Path(sys.argv[2]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--jobs", type=int, default=JOBS)
        parser.add_argument("--budget", default=BUDGET)
        parser.add_argument("--minutes", type=float, default=math.inf)
        parser.add_argument("--seed", type=int, default=SEED)
        main(**vars(parser.parse_args()))
