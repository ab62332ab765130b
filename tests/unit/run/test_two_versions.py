"""Two versions as directories, with a real git: worktrees, what they lack, and what is left of them."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.compare.gate import strays
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.git import git, prune, remove
from gpurun.launcher.plan.model import GatePlan, Side
from gpurun.launcher.start_gate import GateRequest, Interpreter, gate_job, interpreter, two_versions
from tests.wording import Wording

MAIN = GateRequest("main", 3.0)
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b")


def commit(root: Path, message: str = "change") -> None:
    git(root, "add", "--all")
    assert git(root, *IDENTITY, "commit", "--quiet", "--message", message).code == 0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of `jobs/train.py`, the second tagged `before`, and a working copy that differs."""
    root = tmp_path / "repository"
    (root / "jobs").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    for text in ("first", "second"):
        (root / "jobs" / "train.py").write_text(f"# {text}\n")
        commit(root)
    git(root, "tag", "before")
    (root / "jobs" / "train.py").write_text("# uncommitted\n")
    (root / "jobs" / "new.py").write_text("# untracked\n")
    (root / "data").mkdir()
    (root / "data" / "samples").write_text("1")
    return root


def job(repository: Path, text: str = "script: train.py\ndevices: cpu:1\n") -> JobSpec:
    (repository / "jobs" / "new.py").touch()
    return load_text(text, "job.yaml", (), repository / "jobs")


def versions_of(repository: Path, wanted: GateRequest = MAIN) -> AbstractContextManager[GatePlan]:
    return two_versions(wanted, job(repository), repository / "jobs")


def texts(gate: GatePlan) -> list[str]:
    return [(Path(side.job_dir) / "train.py").read_text() for side in (gate.a, gate.b)]


def worktrees(root: Path) -> int:
    return git(root, "worktree", "list", "--porcelain").out.count("worktree ")


@pytest.mark.parametrize(
    ("ref", "text"), [("before", "# second\n"), ("HEAD~1", "# first\n"), ("main", "# second\n")]
)
def test_a_ref_is_checked_out_for_as_long_as_the_gate_lasts(repository: Path, ref: str, text: str) -> None:
    with versions_of(repository, GateRequest(ref, 3.0)) as gate:
        assert texts(gate) == [text, "# uncommitted\n"]
        assert not (Path(gate.a.job_dir) / "new.py").exists()
        assert gate.a.name == ref
        assert gate.b.commit.endswith(" with uncommitted changes")
        assert worktrees(repository) == 2
    assert worktrees(repository) == 1
    assert not Path(gate.a.root).exists()


def test_nothing_is_left_after_an_error(repository: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        versions_of(repository),
    ):
        raise KeyboardInterrupt
    assert worktrees(repository) == 1


def test_files_that_are_named_are_those_of_the_working_copy(repository: Path) -> None:
    shared = tuple(repository / name for name in ("jobs/train.py", "jobs/new.py", "data"))
    with versions_of(repository, GateRequest("main", 3.0, shared)) as gate:
        assert texts(gate) == ["# uncommitted\n"] * 2
        assert (Path(gate.a.job_dir) / "new.py").read_text() == "# untracked\n"
        assert (Path(gate.a.root) / "data").resolve() == repository / "data"
    assert (repository / "data" / "samples").read_text() == "1"
    assert (repository / "jobs" / "train.py").exists()


def test_a_directory_is_like_the_working_copy_or_like_the_job_files(repository: Path, tmp_path: Path) -> None:
    clone, copy = tmp_path / "clone", tmp_path / "copy"
    git(tmp_path, "clone", "--quiet", str(repository), str(clone))
    copy.mkdir()
    (copy / "train.py").write_text("# copied\n")
    for directory, text in ((clone, "# second\n"), (copy, "# copied\n")):
        with versions_of(repository, GateRequest(str(directory), 3.0)) as gate:
            assert texts(gate)[0] == text
        assert directory.is_dir()


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (GateRequest("nowhere", 3.0), "script: train.py"),
        (GateRequest("--help", 3.0), "script: train.py"),
        (GateRequest("main", 3.0), "script: new.py"),
        (GateRequest("main", 3.0, (Path("/etc/hostname"),)), "script: train.py"),
        (GateRequest("main", 3.0), "workload: mlp\nglobal_batch: 8"),
    ],
)
def test_what_is_no_gate_is_refused(
    repository: Path, wanted: GateRequest, text: str, wording: Wording
) -> None:
    spec = job(repository, f"{text}\ndevices: cpu:1\n")
    with pytest.raises(SpecError) as error, two_versions(wanted, spec, repository / "jobs"):
        pass
    wording(str(error.value))
    assert worktrees(repository) == 1


def test_no_value_is_no_version(repository: Path) -> None:
    with (
        pytest.raises(SpecError, match="--against has no value"),
        versions_of(repository, GateRequest("", 3.0)),
    ):
        pass


def test_the_working_copy_itself_is_no_other_version(repository: Path) -> None:
    here = GateRequest(str(repository / "jobs"), 3.0)
    with (
        pytest.raises(SpecError, match="the working copy itself"),
        versions_of(repository, here),
    ):
        pass
    other = replace(here, a=Interpreter("/usr/bin/python3", "2.12"))
    with versions_of(repository, other) as gate:
        assert gate.a.python == "/usr/bin/python3"
        assert gate.a.commit.endswith("torch 2.12")


@pytest.fixture
def killed(repository: Path) -> Iterator[Path]:
    """The worktree of a gate that was killed."""
    code = (
        "import os, sys; from pathlib import Path; from gpurun.launcher.machine.git import checked_out\n"
        "with checked_out(Path(sys.argv[1]), 'main') as code:\n"
        "    print(code, flush=True); os.kill(os.getpid(), 9)"
    )
    argv = [sys.executable, "-c", code, str(repository)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    tree = Path(done.stdout.strip())
    assert tree.is_dir()
    yield tree
    remove(repository, tree.parent)


def test_the_next_gate_removes_what_a_killed_one_has_left(repository: Path, killed: Path) -> None:
    assert worktrees(repository) == 2
    lock = os.open(killed.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as if it still ran
    prune(repository)
    assert killed.is_dir()
    os.close(lock)
    with versions_of(repository):
        assert not killed.parent.exists()
        assert worktrees(repository) == 2
    assert worktrees(repository) == 1


def test_a_worktree_whose_directory_is_gone_is_forgotten(repository: Path, killed: Path) -> None:
    subprocess.run(["rm", "-r", str(killed.parent)], check=True)
    prune(repository)
    assert worktrees(repository) == 1


def test_hooks_of_the_repository_are_not_run(repository: Path) -> None:
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    hook.chmod(0o755)
    with versions_of(repository):
        pass
    assert not (repository / "ran").exists()


def test_a_job_says_nothing_about_the_size_of_its_gate(repository: Path) -> None:
    sizes = "script: train.py\ndevices: cpu:1\nsteps: {launches: 3}\nuntil: fixed\n"
    gate = gate_job(job(repository, sizes), 60.0)
    assert (gate.has_fixed_size, gate.budget_s, gate.name) == (False, 60.0, "job-gate")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("script: train.py\nnodes: 2", "one machine"),
        ("workload: mlp\nglobal_batch: max", "state `global_batch`"),
        ("workload: allreduce", "micro-benchmark"),
    ],
)
def test_jobs_without_a_gate(repository: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        gate_job(job(repository, f"{text}\ndevices: cpu:2\n"), 60.0)


def test_interpreters_must_have_what_ranks_need(tmp_path: Path) -> None:
    assert interpreter("--python-a", sys.executable).torch
    assert interpreter("--python-a", None) == Interpreter()
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    with pytest.raises(SpecError, match="has no torch, msgspec"):
        interpreter("--python-a", str(bare / "bin" / "python"))
    for wrong, words in (("/nowhere/python", "no such program"), ("/bin/false", "no Python 3.11")):
        with pytest.raises(SpecError, match=words):
            interpreter("--python-b", wrong)


def side(root: str) -> Side:
    return Side(root, root, f"{root}/jobs")


@pytest.mark.parametrize(
    ("code", "own", "other", "found"),
    [
        (("train.py", "../src/x.py"), "/tmp/a", "/home/b", []),
        (("train.py", "../../../home/b/src/x.py"), "/tmp/a", "/home/b", ["src/x.py"]),
        (("../../../home/b/data/x.py",), "/tmp/a", "/home/b", []),  # named by --with
        (("../../../home/bc/x.py",), "/tmp/a", "/home/b", []),
        (("train.py",), "/home/b/before", "/home/b", []),
        (("../before/x.py",), "/home/b", "/home/b/before", ["x.py"]),
    ],
)
def test_files_of_the_other_version_are_found(
    code: tuple[str, ...], own: str, other: str, found: Any
) -> None:
    hashes = dict.fromkeys(code, "0")
    assert strays(hashes, side(own), side(other), ("/home/b/data",)) == found
    assert not strays(hashes, side(own), side(own))


def test_no_variable_of_a_hook_leads_git_elsewhere(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", os.devnull)
    assert git(repository, "rev-parse", "HEAD").code == 0
