"""How often whole jobs, workloads and scripts, report the right cause of a fault, and what they lose."""

import datetime
import json
import os
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.reliability import STATUS, TESTS
from benchmarks.timing import BIN, machine_facts, record, table
from gpurun.launcher.machine.git import commit_of
from gpurun.launcher.machine.process_tree import become_subreaper, descendants
from gpurun.launcher.rundir.files import append_lines, read_lines
from tests.integration.command import MODEL

REASONS = {
    **{
        name: STATUS[name]
        for name in ("raise", "exit", "hard exit", "early exit", "kill", "segfault", "abort", "import")
    },
    "loader-raise": STATUS["loader-raise"],
    "loader-kill": STATUS["loader-kill"],
    "term": "SIGTERM",
    "bus error": "SIGBUS",
    "floating point": "SIGFPE",
    "illegal": "SIGILL",
    "no file": "raised FileNotFoundError",
    "assertion": "raised AssertionError",
    "recursion": "raised RecursionError",
    "index": "raised IndexError",
    "no memory": "ran out of memory",
    "sleep": "no step completed for",
    "stopped": "no step completed for",
}
"""What the reason of a variant must say, next to `rank 1`, by fault."""
TWICE = {
    f"{first}, then {second}": REASONS[first] for first in ("raise", "kill") for second in ("raise", "kill")
}
"""The same for two faults at once: rank 0 fails 50 ms after rank 1."""
HERE = Path(__file__).parent
KEPT = HERE / "jobs.jsonl"
"""A line per job that was run, by any call."""
HANG_S = 10
FAULT_AT = 12
"""The step of the fault; of a workload the first pass of its model that fails, over all variants."""

SCRIPT = """
    import sys
    import torch
    from process_bodies import fail_as

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range({last}):
        if step == {at}:
            fail_as(sys.argv[1], torch.distributed.get_rank())
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
FAULTY = """
    from process_bodies import fail_as

    NAMES = {names}


    def misbehave(x, calls):
        if "RANK" in os.environ and calls >= {at}:
            fail_as(NAMES[len(x) - 1], int(os.environ["RANK"]))
"""
COMMON = "devices: cpu:2\nprofile: {steps: 0}\n"


@dataclass(frozen=True)
class Tried:
    """What came of one job; a line of `KEPT`."""

    kind: str
    when: str
    commit: str
    seconds: float
    is_lost: bool
    """Whether its sound variant has no times, or it left a process behind."""
    wrong: dict[str, str]
    """What was reported of faults whose cause was not named, by fault."""


def script_job(directory: Path, names: list[str]) -> None:
    """Every fault is an argument of a script."""
    text = textwrap.dedent(SCRIPT).replace("{last}", "20").replace("{at}", str(FAULT_AT))
    (directory / "train.py").write_text(text.lstrip())
    compare = json.dumps({"args": [[name] for name in names]})
    job = f"script: train.py\n{COMMON}{limit(names)}steps: {{launches: 1}}\ncompare: {compare}\n"
    (directory / "job.yaml").write_text(job)


def workload_job(directory: Path, names: list[str]) -> None:
    """Every fault is a size of the batch."""
    text = (
        (textwrap.dedent(MODEL) + textwrap.dedent(FAULTY))
        .replace("{names}", repr(names))
        .replace("{at}", str(FAULT_AT))
    )
    (directory / "model.py").write_text(text.lstrip())
    batches = [2 * (place + 1) for place in range(len(names))]
    job = f"workload: model.py:build\n{COMMON}{limit(names)}gradient_check: false\nglobal_batch: 2\n"
    job += f"steps: {{rounds: 2, launches: 1}}\ncompare: {{global_batch: {batches}}}\n"
    (directory / "job.yaml").write_text(job)


def limit(faults: Sequence[str]) -> str:
    """The key that ends a hang, where a fault is one: the first step may take longer on a busy machine."""
    return f"hang_timeout: {HANG_S}s\n" if "sleep" in faults else ""


@dataclass(frozen=True)
class FaultyJob:
    """A kind of job, and the faults that its variants have."""

    write: Callable[[Path, list[str]], None]
    reasons: Mapping[str, str]


JOBS = {
    "workload": FaultyJob(workload_job, REASONS),
    "script": FaultyJob(script_job, REASONS),
    "workload, two faults": FaultyJob(workload_job, TWICE),
    "script, two faults": FaultyJob(script_job, TWICE),
}


def main(times: int = 1) -> None:
    """Runs each job so many times, and writes the section "Faults of whole jobs" of all runs so far."""
    facts = machine_facts()
    become_subreaper()  # what a command leaves behind comes to us
    for _ in range(times):
        for kind in JOBS:
            append_lines(KEPT, [try_job(kind)])
    record("Faults of whole jobs", text_of(list(read_lines(KEPT, Tried))), facts)


def text_of(tried: Sequence[Tried]) -> str:
    """The section."""
    rows = []
    for kind, job in JOBS.items():
        ones = [one for one in tried if one.kind == kind]
        num, wrong = len(ones) * len(job.reasons), sum(len(one.wrong) for one in ones)
        lost, seconds = sum(one.is_lost for one in ones), sum(one.seconds for one in ones)
        counts = (str(len(job.reasons)), str(len(ones)), f"{num - wrong} of {num}", str(lost))
        rows.append([kind, *counts, f"{seconds:.0f}"])
    wrong_ones = [
        f"- {one.kind}, {fault}: {text}, {one.when} at {one.commit}"
        for one in tried
        for fault, text in one.wrong.items()
    ]
    commits = ", ".join(dict.fromkeys(one.commit for one in tried))
    intro = (
        "Kinds of fault in rank 1 of 2, each in a variant of its own next to a sound one; of two faults, "
        "rank 0 has the second, 50 ms later. Right: the variant's reason names rank 1 and its fault. Lost: "
        "jobs whose sound variant has no times, or that left a process behind. "
        "`python -m benchmarks jobs --times N` adds to these; so far "
        f"at {commits}."
    )
    header = ["job", "kinds", "runs", "right", "lost", "s"]
    return "\n\n".join([intro, table(header, rows), "\n".join(wrong_ones)])


def try_job(kind: str) -> Tried:
    """Runs a job with all faults."""
    job = JOBS[kind]
    names = ["none", *job.reasons]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job.write(directory, names)
        started_s = time.monotonic()
        variants = run_job(directory)
        seconds = time.monotonic() - started_s
        left = descendants(os.getpid())
    sound, *faulty = variants
    reasons = {
        fault: f"{variant['status']}: {variant['reason']}"
        for fault, variant in zip(job.reasons, faulty, strict=True)
    }
    return Tried(
        kind=kind,
        when=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        commit=(commit_of(HERE) or "")[:7],
        seconds=seconds,
        is_lost=sound["step_ms"] is None or bool(left),
        wrong={
            fault: text
            for fault, text in reasons.items()
            if "rank 1" not in text or job.reasons[fault] not in text
        },
    )


def run_job(directory: Path) -> list[dict[str, Any]]:
    """The variants of a job, as its comparison has them."""
    subprocess.run(
        [BIN / "gpurun", "job.yaml", "--out", "run", "--quiet"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        check=False,
    )
    found: list[dict[str, Any]] = json.loads((directory / "run/comparison.json").read_text())["variants"]
    return found
