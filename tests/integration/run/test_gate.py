"""`gpurun gate` from outside: a repository, its working copy, and real processes of both."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gpurun.launcher.machine.git import git
from gpurun.launcher.machine.process_tree import descendants
from tests import forkserver
from tests.canonical import GATED
from tests.integration.command import Result, answer_of, gpurun, write

WORKLOAD = """
    import time
    import torch
    from gpurun import Workload
    from settings import STEP_S

    class Sleeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x):
            time.sleep(STEP_S)
            return self.layer(x)

    def batch(size, generator):
        x = torch.randn(size, 4, generator=generator)
        return x, x.sum(1).gt(0).long()

    def build():
        return Workload(Sleeper(), batch, loss=torch.nn.functional.cross_entropy)
"""
JOB = (
    "workload: train.py:build\ndevices: cpu:1\nglobal_batch: 8\nprofile: {steps: 0}\ngradient_check: false\n"
)
PROGRAM_JOB = "script: program.py\ndevices: cpu:1\nprofile: {steps: 0}\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Steps sleep 2 ms; what they read it from isn't where a script's directory is, but in PYTHONPATH."""
    root = tmp_path / "repository"
    (root / "library").mkdir(parents=True)
    write(root, "library/settings.py", "STEP_S = 0.002\n")
    write(root, "train.py", WORKLOAD)
    write(root, "program.py", GATED)
    write(root, "job.yaml", JOB)
    write(root, "program.yaml", PROGRAM_JOB)
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    assert git(root, *identity, "commit", "--quiet", "--message", "x").code == 0
    return root


def gate(root: Path, job: str, *args: str) -> Result:
    paths = {"PYTHONPATH": str(root / "library")}
    return gpurun(root, "gate", job, "--out", "../run", "--fail-slower", "50%", *args, env=paths)


def test_a_program_that_became_slower_fails_the_gate(canonical_run: Callable[[str], Result]) -> None:
    """By so much that it shows whatever else the machine does."""
    result = canonical_run("gate")
    repository = result.directory / "repository"
    assert result.code == 5, result.err
    found = result.json["gate"]
    (row,) = found["rows"]
    assert found["outcome"] == "slower"
    assert row["label"] == "script on 1 device"
    assert row["ci"][0] > 50
    assert answer_of(result).startswith("failed: script on 1 device takes ")
    assert "50 %: script on 1 device" in result.err

    files_of = {variant["id"]: variant["code"] for variant in result.json["variants"]}
    a, b = (files_of[f"script-1-{side}"] for side in "ab")
    assert a.keys() == b.keys() == {"program.py", "library/settings.py"}
    assert [name for name in a if a[name] != b[name]] == ["library/settings.py"]

    run = repository.parent / "run"
    launches = sorted(path.name for path in (run / "launches").iterdir())
    sides = [name.rpartition("-")[2] for name in launches]
    assert all({*pair} == {"a", "b"} for pair in zip(sides[::2], sides[1::2], strict=True))
    assert git(repository, "worktree", "list").out.count("\n") == 0

    (case,) = ElementTree.parse(repository.parent / "gate.xml").iter("testcase")
    assert (case.get("name"), [child.tag for child in case]) == ("script on 1 device", ["failure"])
    text = (repository.parent / "gate.md").read_text()
    assert "| slower |" in text
    assert "with uncommitted changes" in text

    again = gpurun(repository, "report", "../run")
    assert answer_of(result) in " ".join(again.out.split())
    assert gpurun(repository, "--resume", "../run").code == 2  # and changes nothing


@pytest.mark.slow
def test_a_workload_that_became_faster_passes(repository: Path, tmp_path: Path) -> None:
    """Against a directory, whose ranks run in another interpreter."""
    before = tmp_path / "before"
    git(tmp_path, "clone", "--quiet", str(repository), str(before))
    write(before, "library/settings.py", "STEP_S = 0.040\n")
    arguments = ("--against", str(before), "--python-a", sys.executable, "--budget", "15s")
    result = gate(repository, "job.yaml", *arguments, "--json")
    outcome = result.json["gate"]["outcome"]  # a machine that does much else decides nothing in 15 s
    assert result.code == {"not slower": 0, "undecided": 6}[outcome], result.err
    assert "ddp 8" in answer_of(result)
    assert before.is_dir()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(repository: Path) -> None:
    result = gate(repository, "program.yaml", "--against", "main", "--junit", "missing/x.xml")
    assert (result.code, "directory missing; create it" in result.err) == (2, True)
    assert not (repository.parent / "run").exists()


def test_code_of_the_other_version_makes_it_undecided_at_once(repository: Path) -> None:
    """A program that names the working copy, as the finder of an editable installation does."""
    text = (repository / "program.py").read_text()
    (repository / "program.py").write_text(
        f"import sys\nsys.path.insert(0, {str(repository / 'library')!r})\n{text}"
    )
    args = ("--against", "main", "--with", "program.py", "--quiet", "--json", "--markdown", "/dev/stderr")
    result = gate(repository, "program.yaml", *args).ended(6)
    assert "| undecided |" in result.err
    found, rows = result.json["findings"], result.json["gate"]["rows"]
    assert "loaded library/settings.py" in found[0]["text"]
    assert any("--python-a" in each["text"] for each in found)
    assert rows[0]["launches"] == 1


def test_ctrl_c_leaves_nothing_but_the_results(
    repository: Path, all_gone: Callable[[list[int]], list[int]]
) -> None:
    args = ("program.yaml", "--against", "main", "--fail-slower", "3%", "--out", "../run")
    null = subprocess.DEVNULL
    library = {"PYTHONPATH": str(repository / "library")}
    command = forkserver.start("gpurun", "gate", *args, cwd=repository, env=library, stdout=null, stderr=null)
    second = repository.parent / "run" / "launches" / "02-script-1-b" / "launch.json"
    while not second.exists() and command.poll() is None:
        time.sleep(0.05)
    processes = descendants(command.pid)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    assert all_gone(processes) == []
    assert git(repository, "worktree", "list").out.count("\n") == 0
    comparison = json.loads((repository.parent / "run" / "comparison.json").read_text())
    assert comparison["gate"]["outcome"] == "undecided"
    assert comparison["variants"][0]["step_ms"]["estimate"] > 0
