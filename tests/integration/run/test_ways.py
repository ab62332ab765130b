"""The two ways that ARCHITECTURE shows, followed through a run: each function, in its order."""

import inspect
import os
import re
from pathlib import Path

from tests.integration.command import ROOT, gpurun, write

PROBE = f"""
import os, sys
if "GPURUN_WAYS" in os.environ:
    steps, seen = set(os.environ["GPURUN_STEPS"].split()), set()

    def look(frame, event, arg):
        code = frame.f_code
        if event != "call" or "/launcher/" not in code.co_filename:
            return
        if not code.co_flags & {inspect.CO_OPTIMIZED}:  # a module or a class
            return
        step = f"{{code.co_filename.rpartition('/launcher/')[2]}}:{{code.co_qualname}}"
        if step in steps or (os.getpid(), step) not in seen:
            seen.add((os.getpid(), step))
            file = os.open(os.environ["GPURUN_WAYS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{{os.getpid()}} {{step}}\\n".encode())
            os.close(file)  # processes of gpurun close all files that they have inherited

    sys.setprofile(look)
"""
"""Writes down, by process, every call of the steps, and the first call of all other functions."""
JOB = """
    name: ways
    workload: sleep
    params: {alpha_ms: 1, beta_ms: 0}
    devices: cpu:2
    global_batch: 4
    steps: {rounds: 2}
    profile: {steps: 0}
    gradient_check: false
"""
MOST_FILES = 70
"""Of `launcher/`, entered before ranks are asked for; whoever needs more says why in the commit."""
MOST_FILES_OF_A_TIME = 9


def ways() -> dict[str, list[str]]:
    """The steps of each way as `FILE:FUNCTION`, by its title."""
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    parts = re.findall(r"^### The way of (.+?)\n(.+?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    found = {title: re.findall(r"^\d+\. `(\S+\.py)` `(\S+)`", part, re.MULTILINE) for title, part in parts}
    return {title: [f"{file}:{function}" for file, function in steps] for title, steps in found.items()}


def missing(steps: list[str], calls: list[str]) -> list[str]:
    """The steps from the first one on that doesn't come after those before it."""
    rest = iter(calls)
    return [step for step in steps if step not in rest]


def test_both_ways_are_as_architecture_shows_them(tmp_path: Path) -> None:
    write(tmp_path, "sitecustomize.py", PROBE)
    write(tmp_path, "job.yaml", JOB)
    of_run, of_time = ways()["a run"], ways()["a step's time"]
    log = tmp_path / "calls"
    env = {"GPURUN_WAYS": str(log), "GPURUN_STEPS": " ".join(of_run + of_time), "PYTHONPATH": str(tmp_path)}
    done = gpurun(tmp_path, "job.yaml", "--out", "run", env={**os.environ, **env}, is_cold=True)
    assert done.code == 0, done.err
    calls: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        process, step = line.split(" ", 1)
        calls.setdefault(process, []).append(step)
    command = max(calls.values(), key=len)
    (rank, *_) = [own for own in calls.values() if own is not command and of_time[0] in own]
    assert not missing(of_run, command)
    assert not missing(of_time, [*rank, *command])
    before = command[: command.index("processes/pool.py:WorkerPool.start")]
    assert len({step.partition(":")[0] for step in before}) <= MOST_FILES
    assert len({step.partition(":")[0] for step in of_time}) <= MOST_FILES_OF_A_TIME
