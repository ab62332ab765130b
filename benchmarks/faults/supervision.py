"""The cost of supervising 16 ranks: CPU time of the command's own processes while a job runs."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import record, table
from gpurun.launcher.machine.process_tree import descendants

RANKS = 16
JOB = f"""
workload: sleep
params: {{alpha_ms: 100, beta_ms: 0}}
devices: cpu:{RANKS}
global_batch: {RANKS}
steps: {{rounds: 100000}}
profile: {{steps: 0}}
gradient_check: false
hang_timeout: 60s
"""
NAMES = ("front", "supervisor", "server")
"""In the order of `descendants`, after the command itself."""


def main(seconds: float = 20.0) -> None:
    """Writes the section "Supervision"."""
    with tempfile.TemporaryDirectory() as name:
        shares = cpu_shares(Path(name), seconds)
    rows = [[part, f"{100 * share:.2f} %", ""] for part, share in shares.items()]
    rows.append(["all", f"{100 * sum(shares.values()):.2f} %", "≤ 1 %"])
    text = f"{RANKS} gloo ranks that make steps of 0.1 s, `hang_timeout` on, over {seconds:.0f} s.\n\n"
    record("Supervision", text + table(["process", "of one core", "goal"], rows))


def cpu_shares(directory: Path, seconds: float) -> dict[str, float]:
    """CPU time per second of each of the command's own processes, while all ranks run steps."""
    (directory / "job.yaml").write_text(JOB)
    argv = [sys.executable, "-m", "gpurun", "job.yaml", "--out", "run"]
    with subprocess.Popen(
        argv, cwd=directory, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as command:
        while len(list((directory / "run").glob("variants/*/rank*.jsonl"))) < RANKS:
            time.sleep(0.1)
        time.sleep(2.0)
        pids = [command.pid, *descendants(command.pid)][: len(NAMES)]
        before = [cpu_s(pid) for pid in pids]
        time.sleep(seconds)
        spent = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
        command.terminate()
    return {name: cpu / seconds for name, cpu in zip(NAMES, spent, strict=True)}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far; source: proc(5), /proc/PID/stat, fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
