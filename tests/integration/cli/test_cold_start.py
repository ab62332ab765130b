"""Every command once in a new interpreter: other tests fork theirs from one that has imported everything."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.launcher.cli.main import COMMANDS
from tests import forkserver
from tests.integration.command import Result, gpurun, write
from tests.unit.house.source import modules

JOB = """
    workload: mlp
    params: {width: 8, inputs: 16}
    devices: cpu:1
    strategy: single
    global_batch: 4
    steps: {rounds: 1, launches: 1}
    profile: {steps: 1}
"""
SCRIPT = """
    import gpurun

    for _ in range(20):
        with gpurun.step():
            sum(range(1000))
"""
CASES: dict[str, tuple[str, int, str]] = {
    "job": ("job job.yaml --out run", 0, "gpurun view run"),
    "check": ("check job.yaml", 0, "1 variant"),
    "run": ("run --devices cpu:1 --out run train.py", 0, "script"),
    "report": ("report {run}", 0, "ddp 6/2"),
    "torchrun": ("torchrun --nproc-per-node 1 train.py", 0, "script"),
    "help": ("help run", 0, "--devices"),
    "explain": ("explain input-stall", 0, "What to do"),
    "runs": ("runs {run}", 0, "ddp 6/2"),
    "improve": ("improve job.yaml --out run --set global_batch=max", 2, "`max` may differ between launches"),
    "tune": ("tune job.yaml --out run --budget 1s", 2, "nothing to search"),
    "gate": ("gate job.yaml --against main --fail-slower 3%", 2, "repository"),
    "diff": ("diff {run} {run}", 0, "are the same run"),
    "trace": ("trace {run}/variants/ddp-2-even", 0, "2 ranks on CPU"),
    "stacks": ("stacks {run}", 2, "not in progress"),
    "capture": ("capture {run}", 2, "not in progress"),
    "logs": ("logs {run}", 0, ""),
    "init": ("init new.yaml", 0, "new.yaml"),
    "examples": ("examples", 0, "quickstart"),
    "schema": ("schema", 0, "global_batch"),
    "completion": ("completion bash", 0, "complete"),
    "workloads": ("workloads", 0, "mlp"),
    "devices": ("devices", 0, " cores, "),
    "selftest": ("selftest --devices cuda:0", 3, "visible devices"),
    "submit": ("submit job.yaml --to slurm --dry-run --set nodes=2", 0, "#SBATCH"),
}
"""What is typed, the exit code, and some of what is printed."""
IMPORTS_ALL = """
import importlib, os, pkgutil, sys
import gpurun

if sys.argv[1] == "alone":
    import torch  # some seconds, which each would take

names = [each.name for each in pkgutil.walk_packages(gpurun.__path__, "gpurun.")]
names = [name for name in names if not name.endswith("__main__")]
for name in reversed(names):
    if sys.argv[1] == "alone" and os.fork():
        assert os.waitpid(-1, 0)[1] == 0, name
        continue
    importlib.import_module(name)
    if sys.argv[1] == "alone":
        os._exit(0)
print(len(names))
"""
"""Imports all modules, one after the other, or each in a process that has imported none of them."""
SERVERS = {"view": "http://", "metrics": "http://"}
"""Commands that serve until Ctrl-C, and what they print first."""


@pytest.mark.parametrize("how", ["together", pytest.param("alone", marks=pytest.mark.slow)])
def test_every_module_can_be_imported(how: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-c", IMPORTS_ALL, how]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    every = [name for name in modules() if name != "gpurun" and not name.endswith("__main__")]
    assert int(done.stdout) == len(every)


def test_there_is_a_case_of_each_command() -> None:
    assert {*CASES, *SERVERS} == {*COMMANDS}


@pytest.mark.parametrize("name", CASES)
def test_a_command_starts_cold(name: str, canonical_run: Callable[[str], Result], tmp_path: Path) -> None:
    words, code, said = CASES[name]
    write(tmp_path, "job.yaml", JOB)
    write(tmp_path, "train.py", SCRIPT)
    run = canonical_run("splits").directory / "run" if "{run}" in words else None
    env = {"CUDA_VISIBLE_DEVICES": ""}
    done = gpurun(tmp_path, *words.format(run=run).split(), env=env, is_cold=True)
    assert done.code == code, done.out + done.err
    assert said in done.out + done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_starts_cold(name: str, canonical_run: Callable[[str], Result]) -> None:
    run = canonical_run("splits").directory / "run"
    pipe = subprocess.PIPE
    command = ("gpurun", name, str(run), "--port", "0")
    with forkserver.start(*command, stdout=pipe, stderr=subprocess.STDOUT, is_cold=True) as server:
        assert server.stdout is not None
        lines: list[str] = []
        while not any(SERVERS[name] in line for line in lines):
            lines.append(server.stdout.readline())
            assert lines[-1], lines
        server.send_signal(signal.SIGINT)
        said = server.stdout.read()
    assert "Traceback" not in said
