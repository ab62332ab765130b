"""How often whole jobs, workloads and scripts, report the right cause of a fault, and what they lose."""

import json
import os
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.reliability import STATUS, TESTS
from benchmarks.timing import BIN, machine_facts, record, table
from gpurun.launcher.machine.process_tree import become_subreaper, descendants
from gpurun.launcher.units import plural

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
HANG_S = 10
FAULT_AT = 12
"""The step of the fault; of a workload the first pass of its model that fails, over all variants."""

SCRIPT = """
    import sys
    import torch
    from process_bodies import FAULTS

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range({last}):
        if step == {at} and torch.distributed.get_rank() == 1:
            FAULTS[sys.argv[1]]()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
MODEL = """
    import os
    import torch
    from gpurun import Workload
    from process_bodies import FAULTS

    NAMES = {names}


    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if os.environ.get("RANK") == "1" and self.calls >= {at}:
                FAULTS[NAMES[len(x) - 1]]()
            return self.layer(x)


    def batch(size, generator):
        x = torch.randn(size, 4, generator=generator)
        return x, x.sum(1).gt(0).long()


    def build():
        return Workload(Model(), batch, loss=torch.nn.functional.cross_entropy)
"""
COMMON = f"devices: cpu:2\nhang_timeout: {HANG_S}s\nprofile: {{steps: 0}}\n"


@dataclass
class Tally:
    """What came of one kind of job."""

    right: int = 0
    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    """Runs whose sound variant has no times, or that left a process behind."""
    seconds: float = 0.0


def script_job(directory: Path, names: list[str]) -> None:
    """Every fault is an argument of a script."""
    text = textwrap.dedent(SCRIPT).replace("{last}", "20").replace("{at}", str(FAULT_AT))
    (directory / "train.py").write_text(text.lstrip())
    compare = json.dumps({"args": [[name] for name in names]})
    job = f"script: train.py\n{COMMON}steps: {{launches: 1}}\ncompare: {compare}\n"
    (directory / "job.yaml").write_text(job)


def workload_job(directory: Path, names: list[str]) -> None:
    """Every fault is a size of the batch."""
    text = textwrap.dedent(MODEL).replace("{names}", repr(names)).replace("{at}", str(FAULT_AT))
    (directory / "model.py").write_text(text.lstrip())
    batches = [2 * (place + 1) for place in range(len(names))]
    job = f"workload: model.py:build\n{COMMON}gradient_check: false\nglobal_batch: 2\n"
    job += f"steps: {{rounds: 2, launches: 1}}\ncompare: {{global_batch: {batches}}}\n"
    (directory / "job.yaml").write_text(job)


JOBS: dict[str, Callable[[Path, list[str]], None]] = {"workload": workload_job, "script": script_job}


def main(times: int = 1) -> None:
    """Writes the section "Faults of whole jobs"."""
    facts = machine_facts()
    become_subreaper()  # what a command leaves behind comes to us
    tallies = {kind: tally(write, times) for kind, write in JOBS.items()}
    rows = [
        [kind, f"{one.right} of {one.tried}", str(one.lost), f"{one.seconds:.0f}"]
        for kind, one in tallies.items()
    ]
    wrong = [f"- {kind}, {text}" for kind, one in tallies.items() for text in one.wrong]
    intro = (
        f"{len(REASONS)} kinds of fault in rank 1 of 2, each in a variant of its own next to a sound one; "
        f"{plural(times, 'run')} of each job. Right: the variant's reason names the rank and the fault. "
        "Lost: runs whose sound variant has no times, or that left a process behind."
    )
    parts = [intro, table(["job", "right", "lost", "s"], rows), "\n".join(wrong)]
    record("Faults of whole jobs", "\n\n".join(parts), facts)


def tally(write: Callable[[Path, list[str]], None], times: int) -> Tally:
    """Runs a job with all faults so many times."""
    found = Tally()
    names = ["none", *REASONS]
    for _ in range(times):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write(directory, names)
            started_s = time.monotonic()
            variants = run_job(directory)
            found.seconds += time.monotonic() - started_s
            left = descendants(os.getpid())
        found.lost += not variants or variants[0]["step_ms"] is None or bool(left)
        for fault, variant in zip(names[1:], variants[1:], strict=True):
            found.tried += 1
            reason = f"{variant['status']}: {variant['reason']}"
            is_right = "rank 1" in reason and REASONS[fault] in reason
            found.right += is_right
            found.wrong += [] if is_right else [f"{fault}: {reason}"]
    return found


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


if __name__ == "__main__":
    main()
