"""Ten days of training: the size of the run, the cost of its report, and how exact that is."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.timing import BIN, machine_facts, record, table
from gpurun.launcher.compare.figures.recorded import round_blocks_ns
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.files import RoundSample, RunDir, append_lines, read_json, write_bytes, write_json
from gpurun.launcher.rundir.paths import MAX_KEPT_ROUNDS
from gpurun.launcher.rundir.records import Event, ProgramConfig, StepRecord
from gpurun.launcher.stats.schedule import MAX_KEPT_STEPS, WINDOW_STEPS
from gpurun.launcher.worker.program.program_rank import FLUSH_NS, PROGRESS_PARTS, StepRecorder

RANKS = 8
DAYS = 10
STEP_MS = 10.0
SCATTER = 0.1
"""Of the logarithm of a round's time."""
EVALUATION_ROUNDS = 200
"""One round in so many takes ten times as long."""
AT_ONCE = 10
"""Rounds that are written at once, as in half a second."""
REPORTS = 3
VARIANTS, LAUNCHES = 10, 6
PROGRAM = """
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(200):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
PEAK_KIB = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Runs a command from a small process, since the peak of a child begins with what its parent holds.

Source: Linux, fs/exec.c, `exec_mmap`.
"""
MEASURED_STEPS = 40_000
MEASURED = f"""
import json, os, time
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
ends_ns = []
for _ in range({MEASURED_STEPS} + 1):
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    ends_ns.append(time.perf_counter_ns())
with open(f"ends{{os.environ['RANK']}}.json", "w") as file:
    json.dump(ends_ns, file)
"""
"""Steps of microseconds, which the program times too."""
JOB = f"script: train.py\ndevices: cpu:{RANKS}\nsteps: {{launches: 1}}\nprofile: {{steps: 0}}\n"


@dataclass(frozen=True)
class Cost:
    """Of a run and of its report."""

    steps: int
    megabytes: float
    report_s: float
    peak_mb: float

    def row(self, name: str) -> tuple[str, ...]:
        cells = (f"{self.steps:,}", f"{self.megabytes:.1f}", f"{self.report_s:.2f}", f"{self.peak_mb:.0f}")
        return (name, *cells)


def main() -> None:
    """Runs a short program, replaces its steps by those of ten days, and compares the reports of both."""
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(PROGRAM)
        (directory / "job.yaml").write_text(JOB)
        subprocess.run(
            [BIN / "gpurun", "job.yaml", "--out", "run"], cwd=directory, check=True, capture_output=True
        )
        run = RunDir(directory / "run")
        short = cost(run, 200)
        rounds_ms = simulated_rounds_ms()
        write_long_run(run, rounds_ms)
        long = cost(run, len(rounds_ms) * WINDOW_STEPS)
        kept_ms = shown_rounds_ms(run)
        write_many_launches(run, rounds_ms)
        many = cost(run, VARIANTS * LAUNCHES * MAX_KEPT_STEPS)
        real = real_run(directory)
    name = f"{VARIANTS} variants × {LAUNCHES}"
    header = ("run", "steps of a rank", "run directory MB", "report s", "peak MB of the report")
    goal = ("goal", "", "", "as short", "≤ 200")
    text = (
        f"{DAYS} days of steps of {STEP_MS:g} ms on {RANKS} ranks, written by the recorder of programs "
        f"without their time passing. Rounds drift by 5 %, scatter by {SCATTER:.0%}, and one in "
        f"{EVALUATION_ROUNDS} takes ten times as long. The report makes the table and TensorBoard's files, "
        f"as the command does at the end; median of {REPORTS}. The last run has "
        f"{LAUNCHES} launches of each of {VARIANTS} variants, each with {MAX_KEPT_STEPS:,} recorded steps on "
        f"{RANKS} ranks.\n\n"
        f"{table(header, [short.row('short'), long.row(f'{DAYS} days'), many.row(name), goal])}\n\n"
        f"{errors(kept_ms, rounds_ms)}\n\n{real}"
    )
    record("Long runs", text, facts)


def real_run(directory: Path) -> str:
    """A run that is long enough to be sampled, next to the times that the program itself has taken of all."""
    (directory / "train.py").write_text(MEASURED)
    (directory / "job.yaml").write_text(JOB)
    argv = [str(BIN / "gpurun"), "job.yaml", "--set", "devices=cpu:2", "--out", "real"]
    subprocess.run(argv, cwd=directory, check=True, capture_output=True)
    run = RunDir(directory / "real")
    (variant,) = msgspec.json.decode(run.plan.read_bytes())["variants"]
    rows = []
    for rank, steps in run.read_steps(variant["id"]).items():
        rounds = {key[1] - 1: fmean(block) for key, block in round_blocks_ns(steps, "timed").items()}
        ends_ns = np.array(json.loads((directory / f"ends{rank}.json").read_bytes()), dtype=np.int64)
        all_ns = np.diff(ends_ns).reshape(-1, WINDOW_STEPS).mean(axis=1)
        kept_ns, own_ns = np.array(list(rounds.values())), all_ns[list(rounds)]
        below = 100 * float(np.mean(all_ns < np.median(kept_ns)))
        off = 100 * float(np.median(np.abs(kept_ns / own_ns - 1)))
        counts = (str(rank), str(len(steps)), str(len(rounds)))
        rows.append((*counts, f"{off:.2f}", f"{below:.1f}", f"{50 / len(rounds) ** 0.5:.1f}"))
    header = ("rank", "records", "rounds", "off by %", "% of all below the median", "± %")
    return (
        f"A real program of {MEASURED_STEPS:,} steps of microseconds on two ranks times all of its steps "
        "itself. A round that is kept is off by so much from the program's own time of it (median). Half of "
        "all rounds should be below the median of those that are kept; ± is the standard error of that "
        "share.\n\n"
        f"{table(header, rows)}"
    )


def simulated_rounds_ms() -> npt.NDArray[np.float32]:
    """The mean step of every round."""
    num_rounds = round(DAYS * 86_400_000 / STEP_MS / WINDOW_STEPS)
    chance = np.random.default_rng(2026)
    rounds_ms = STEP_MS * np.exp(chance.normal(0, SCATTER, num_rounds)).astype(np.float32)
    rounds_ms *= np.linspace(1, 1.05, num_rounds, dtype=np.float32)
    rounds_ms[::EVALUATION_ROUNDS] *= 10
    return rounds_ms


def write_long_run(run: RunDir, rounds_ms: npt.NDArray[np.float32]) -> None:
    """Replaces the steps and the events of a run of a program by those of a long one."""
    (launch,) = (path.name for path in (run.path / "launches").iterdir())
    config = read_json(run.launch_config(launch), ProgramConfig)
    recorders = [StepRecorder(config, rank, run) for rank in range(RANKS)]
    for one in recorders:
        run.steps(config.variant, one.rank).unlink()
    numbers = list(candidates(launch, len(rounds_ms)))
    for first in range(0, len(numbers), AT_ONCE):
        rounds = [(number, rounds_ms[number]) for number in numbers[first : first + AT_ONCE]]
        for one in recorders:
            one.keep([step for number, ms in rounds for step in steps_of(launch, number, ms)])
    for one in recorders:
        one.close(wait=False)
    events = run.read_events(launch)
    run.events(launch).unlink()
    append_lines(run.events(launch), events[:1])
    for event in progress(events[1], rounds_ms):
        recorders[0].add_progress(event)
    append_lines(run.events(launch), events[-1:])


def write_many_launches(run: RunDir, rounds_ms: npt.NDArray[np.float32]) -> None:
    """Makes it a run of many variants, each with launches of as many steps as are kept of one."""
    plan = read_json(run.plan, Plan)
    (variant,), (launch,), status = plan.variants, plan.launches, run.status(plan.variants[0].id).read_bytes()
    variants = [replace(variant, id=f"script-{n}", varied={"args": [str(n)]}) for n in range(VARIANTS)]
    launches = [
        replace(launch, id=f"{number:02}-{one.id}", repetition=number, variants=(one.id,))
        for number in range(LAUNCHES)
        for one in variants
    ]
    whole = replace(plan, variants=tuple(variants), launches=tuple(launches), baseline=variants[0].id)
    write_json(run.plan, whole)
    for one in variants:
        write_bytes(run.status(one.id), status)
    for position, each in enumerate(launches):
        of_launch = rounds_ms[position * MAX_KEPT_ROUNDS :][:MAX_KEPT_ROUNDS]
        lines = [step for number, ms in enumerate(of_launch) for step in steps_of(each.id, number, ms)]
        for rank in range(RANKS):
            append_lines(run.steps(each.variants[0], rank), lines)


def candidates(launch: str, num_rounds: int) -> Iterator[int]:
    """The rounds that are kept when they are measured; the others change nothing."""
    sample = RoundSample(launch)
    for number in range(num_rounds):
        if sample.level_of(number) >= sample.level or number == num_rounds - 1:
            sample.add(number)
            yield number


def steps_of(launch: str, number: int, round_ms: float) -> list[StepRecord]:
    """The steps of a round."""
    first, step_ns = number * WINDOW_STEPS, round(float(round_ms) * 1e6)
    return [
        StepRecord(
            launch, number + 1, 0, first + place, "timed", step_ns, {}, 1 << 30, queue_ns=0, others_ns=0
        )
        for place in range(WINDOW_STEPS)
    ]


def progress(first: Event, rounds_ms: npt.NDArray[np.float32]) -> Iterator[Event]:
    """The events that rank 0 writes meanwhile."""
    ends_ns = float(rounds_ms.sum(dtype=np.float64)) * WINDOW_STEPS * 1e6
    passed_ns = 0.0
    while passed_ns < ends_ns:
        num_steps, after_ns = round(passed_ns / STEP_MS / 1e6), round(passed_ns)
        time_ns, monotonic_ns = first.time_ns + after_ns, first.monotonic_ns + after_ns
        yield Event(time_ns, "run", first.variant, num_steps, monotonic_ns=monotonic_ns)
        passed_ns += max(FLUSH_NS, passed_ns / PROGRESS_PARTS)


def cost(run: RunDir, steps: int) -> Cost:
    """What a run takes on disk, and its report in time and memory."""
    seconds, peaks_mb = [], []
    for _ in range(REPORTS):
        start = time.perf_counter()
        report = [str(BIN / "gpurun"), "report", str(run.path), "--format", "table,tensorboard"]
        done = subprocess.run(
            [sys.executable, "-I", "-c", PEAK_KIB, *report], capture_output=True, check=True
        )
        seconds.append(time.perf_counter() - start)
        peaks_mb.append(int(done.stdout) / 1024)
    size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    return Cost(steps, size / 1e6, statistics.median(seconds), max(peaks_mb))


def shown_rounds_ms(run: RunDir) -> npt.NDArray[np.float64]:
    """The rounds that the report's figures are of."""
    (variant,) = msgspec.json.decode(run.plan.read_bytes())["variants"]
    steps = run.read_steps(variant["id"])[0]
    by_round = {step.round: step.step_ns / 1e6 for step in steps}
    return np.array(list(by_round.values()))


def errors(kept_ms: npt.NDArray[np.float64], rounds_ms: npt.NDArray[np.float32]) -> str:
    """How far the sample's median and mean are from those of all rounds."""
    num, scatter = len(kept_ms), float(np.std(rounds_ms, dtype=np.float64))
    middle, mean = float(np.median(rounds_ms)), float(np.mean(rounds_ms, dtype=np.float64))
    expected = (100 * 1.25 * SCATTER / num**0.5, 100 * scatter / num**0.5 / mean)
    rows = [
        (
            "median",
            f"{middle:.3f}",
            f"{np.median(kept_ms):.3f}",
            f"{100 * (np.median(kept_ms) / middle - 1):+.2f}",
        ),
        ("mean", f"{mean:.3f}", f"{np.mean(kept_ms):.3f}", f"{100 * (np.mean(kept_ms) / mean - 1):+.2f}"),
    ]
    header = ("round", "all, ms", "sample, ms", "error %", "standard error %")
    lines = [(*row, f"{error:.2f}") for row, error in zip(rows, expected, strict=True)]
    return f"{num:,} of {len(rounds_ms):,} rounds are kept:\n\n{table(header, lines)}"
