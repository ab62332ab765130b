"""Is memory what `gpurun check --memory` estimates? Of every built-in that trains, under every strategy.

`python -m benchmarks.cost.memory [WORKLOAD ...]` runs a round of each on two CPU devices.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import machine_facts, record, table
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import MEMORY_PARTS, MemoryPeak

BATCHES = {
    "mlp": 64,
    "gpt": 8,
    "fcn_r": 64,
    "alexnet_r": 64,
    "resnet56": 16,
    "lstm": 16,
    "fcn_s": 16,
    "alexnet_s": 8,
    "resnet50": 4,
    "vit_b16": 2,
}
"""Samples of a step, of each workload."""
STRATEGIES = ("single", "dp", "ddp", "zero1", "fsdp")
JOB = """
workload: {workload}
devices: cpu:2
global_batch: {batch}
compare: {{strategy: [{strategies}]}}
steps: {{launches: 1, rounds: 1}}
until: fixed
gradient_check: false
profile: {{steps: 0}}
"""
MOST_OFF = 15.0
"""Percent: the goal of an estimate."""
MIB = 2**20


def main(*names: str) -> None:
    """Writes the section "Memory by part"."""
    facts = machine_facts()
    rows = [row for name in names or BATCHES for row in rows_of(name)]
    off = [abs(float(row[-1])) for row in rows if row[-1]]
    batches = ", ".join(f"{BATCHES[name]} ({name})" for name in names or BATCHES)
    about = (
        "The peak of live tensor bytes of the fullest rank in one step, in MiB, by what they are; two CPU "
        f"devices, batches of {batches}. The parts "
        "add up to the peak: each live byte is in one of them.\n\n"
        f"Estimates within {MOST_OFF:g} %: {sum(one <= MOST_OFF for one in off)} of {len(off)}; "
        f"the farthest is off by {max(off, default=0.0):.1f} %.\n\n"
    )
    header = ["workload", "strategy", *MEMORY_PARTS, "peak", "estimate", "off by %"]
    record("Memory by part", about + table(header, rows), facts)


def rows_of(workload: str) -> list[list[str]]:
    """A row per strategy."""
    with tempfile.TemporaryDirectory() as directory:
        job, run = Path(directory, "job.yaml"), RunDir(Path(directory, "run"))
        strategies = ", ".join(STRATEGIES)
        job.write_text(JOB.format(workload=workload, batch=BATCHES[workload], strategies=strategies))
        plan = printed("check", str(job), "--memory", "--json")
        printed(str(job), "--out", str(run.path), "--json")
        return [
            row(workload, variant["strategy"], run.read_memory(variant["id"]), plan["memory"][variant["id"]])
            for variant in plan["variants"]
        ]


def printed(*words: str) -> Any:
    """What a command prints as JSON."""
    argv = [sys.executable, "-m", "gpurun", *words]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def row(workload: str, strategy: str, ranks: dict[int, MemoryPeak], estimate: dict[str, Any]) -> list[str]:
    """Of the fullest rank; where nothing was measured, or isn't estimated, no figures."""
    if not ranks:
        return [workload, strategy, *[""] * 8]
    peak = max(ranks.values(), key=lambda one: one.total)
    parts = [f"{size / MIB:.2f}" for size in (*peak.parts.values(), peak.total)]
    if not estimate["peak"]:
        return [workload, strategy, *parts, estimate["reason"], ""]
    expected = sum(estimate["peak"][part] for part in peak.parts)
    return [workload, strategy, *parts, f"{expected / MIB:.2f}", f"{100 * (expected / peak.total - 1):+.1f}"]


if __name__ == "__main__":
    main(*sys.argv[1:])
