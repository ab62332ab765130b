"""Programs run unchanged, in real processes: what works with `torchrun` works here, and is timed."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.launcher.compare.figures.ranks import read_traced
from gpurun.launcher.rundir.files import RunDir
from tests.canonical import NAMES
from tests.integration.command import Result, ending, gpurun, write

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def ran(canonical_run: Callable[[str], Result]) -> Result:
    """One run of all programs, each a variant; two of them fail."""
    return canonical_run("program")


def launch_of(ran: Result, name: str) -> Path:
    (path,) = (ran.directory / "run" / "launches").glob(f"*-script-2-{name}")
    return path


def log(ran: Result, name: str, rank: int = 0) -> str:
    return (launch_of(ran, name) / f"log/rank{rank}.log").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("wrong_exit", "early")])
def test_a_program_that_torchrun_can_run_runs_here(ran: Result, name: str) -> None:
    variant = ran.variant(f"script-2-{name}")
    assert ending(variant) == "ok", ran.err
    assert variant["wall_s"] > 0


def test_steps_of_an_unchanged_program_are_timed_and_traced(ran: Result) -> None:
    ddp = ran.variant("script-2-ddp")
    assert ddp["rounds"] > 0
    assert ddp["step_ms"]["estimate"] > 0
    assert ddp["samples_per_s"] is None
    assert ddp["global_batch"] is None
    assert [rank["trace"] for rank in ddp["ranks"]] == [
        f"variants/script-2-ddp/rank{rank}.pt.trace.json.gz" for rank in range(2)
    ]
    traced = read_traced(RunDir(ran.directory / "run"), ddp["id"])
    assert traced is not None
    assert all(rank.compute_ns > 0 for rank in traced.ranks.values())
    assert [rank["local_batch"] for rank in ddp["ranks"]] == [None, None]
    lines = (ran.directory / "run/variants/script-2-ddp/rank1.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert len(kinds) == 39
    assert kinds[29:32] == ["profile"] * 3
    assert kinds[28] in ("timed", "warmup")


def test_the_newest_output_is_kept(ran: Result) -> None:
    read = gpurun(ran.directory, "logs", "run", "--rank", "1", "--launch", launch_of(ran, "chatty").name)
    first, *lines = read.out.splitlines()
    assert first.startswith("[rank 1] gpurun: ")
    assert lines == [f"[rank 1] 2: line {number}" for number in range(40_000 - len(lines), 40_000)]
    assert sum(file.stat().st_size for file in launch_of(ran, "chatty").glob("log/rank*")) <= 1 << 20


def test_the_steps_of_a_program_with_data_loaders_are_not_those_of_its_workers(ran: Result) -> None:
    lines = (ran.directory / "run/variants/script-2-loader/rank0.jsonl").read_text().splitlines()
    assert len(lines) >= 13


def test_a_program_without_steps_has_a_running_time_and_a_note(ran: Result) -> None:
    children = ran.variant("script-2-children")
    assert children["step_ms"] is None
    said = [
        each["text"]
        for each in ran.comparison["findings"]
        if children["id"] in each["figures"].get("variants", ())
    ]
    assert any("no steps were recorded" in text for text in said)


def test_what_the_program_leaves_for_its_end_is_done(ran: Result) -> None:
    for rank in range(2):
        assert (ran.directory / f"open{rank}").read_text() == "kept"
        assert gzip.decompress((ran.directory / f"zipped{rank}").read_bytes()) == b"kept"
        assert (ran.directory / f"destroyed{rank}").read_text() == "called"
        assert (ran.directory / f"atexit{rank}").read_text() == "called"
        assert (ran.directory / f"thread{rank}").read_text() == "waited for"


def test_the_job_decides_over_seed_threads_and_environment(ran: Result) -> None:
    assert log(ran, "seeds", 0).splitlines()[0] == log(ran, "seeds", 1).splitlines()[0]
    assert "threads 3 3 by the job" in log(ran, "threads", 1)


def test_the_cause_of_a_failure_is_named(ran: Result) -> None:
    assert ran.code == 4
    assert "itself: exit code 3" in ran.variant("script-2-wrong_exit")["reason"]
    assert ran.variant("script-2-wrong_exit")["status"] == "failed"
    early = ran.variant("script-2-early")
    assert early["status"] == "failed"
    assert "with exit code 0" in early["reason"]
    assert "failed: script-2-wrong_exit, script-2-early" in ran.err


@pytest.mark.slow
def test_a_budget_that_isnt_used_is_said_where_something_was_timed(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", "script: train.py\ndevices: cpu:1\nbudget: 1m\nprofile: {steps: 0}\n")
    program = write(tmp_path, "train.py", "raise SystemExit(3)\n")
    failed = gpurun(tmp_path, "job.yaml", "--out", "failed").ended(4)
    assert "`budget`" not in failed.out + failed.err
    program.write_text("import gpurun\nfor _ in range(40):\n    with gpurun.step():\n        pass\n")
    ran = gpurun(tmp_path, "job.yaml", "--out", "ran", "--require-steps")
    assert (ran.code, ran.err.count("`budget`")) == (0, 0)
    said = gpurun(tmp_path, "report", "ran", "--details").out
    assert said.count("`budget` is not used") == 1


def test_a_program_ends_at_its_limit_on_all_ranks(tmp_path: Path) -> None:
    """What would follow its last step doesn't run, and no rank loses its peer."""
    write(
        tmp_path,
        "train.py",
        """
        import os, sys, time, torch, torch.distributed as dist
        from torch.utils.data import DataLoader

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for number, batch in enumerate(DataLoader(torch.randn(4000, 4), batch_size=4, num_workers=1)):
                model(batch).sum().backward()
                optimizer.step()
        finally:
            open("goes-on", "w").close()
        """,
    )
    ran = gpurun(tmp_path, "run", "train.py", "--devices", "cpu:2", "--set", "steps.limit=40", "--out", "run")
    assert ran.code == 0, ran.err
    for rank in range(2):
        lines = (tmp_path / f"run/variants/script-2/rank{rank}.jsonl").read_text().splitlines()
        assert len(lines) == 40
    assert not (tmp_path / "goes-on").exists()


def test_a_program_without_steps_fails_where_steps_are_required(tmp_path: Path) -> None:
    write(tmp_path, "quick.py", "pass\n")
    ran = gpurun(tmp_path, "run", "--devices", "cpu:1", "--require-steps", "--out", "ran", "quick.py").ended(
        4
    )
    assert "no step was timed, which --require-steps asks for: " in ran.err


def test_the_store_is_gone_with_the_ranks_and_was_no_rank(ran: Result) -> None:
    launches = json.loads((ran.directory / "run" / "plan.json").read_text())["launches"]
    assert all(len(launch["processes"]) == 2 for launch in launches)
    ports = {path.read_text() for path in (ran.directory / "run" / "launches").glob("*/rendezvous")}
    assert all(re.fullmatch("[0-9]+", port) for port in ports)


MODULE = """
    import sys
    from . import helper
    import gpurun
    import gpurun.launcher.worker
    import launcher.worker
    from workloads import mine, theirs

    assert gpurun.launcher.worker.__file__ != launcher.worker.__file__
    print("spec", __spec__.name, helper.NAME, sys.argv[1:], launcher.WHOSE, launcher.worker.WHOSE)
    print("namespace", mine.WHOSE, theirs.WHOSE)
    for _ in range(200):
        with gpurun.step():
            sum(range(100_000))  # long enough that not all steps are in the trace
"""


FINDER = """
    import sys
    from importlib.util import spec_from_file_location

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_file_location(name, "{package}") if name == "launcher" else None

    sys.meta_path.append(Finder)
"""
"""As setuptools' finder of an editable installation."""


def test_a_module_runs_as_with_python_m_without_a_job_file(tmp_path: Path) -> None:
    """With packages of our names: one that is installed by path, and a namespace in two directories."""
    project, library = tmp_path / "project", tmp_path / "library"
    for path in (
        *(project / "launcher" / name for name in ("__init__.py", "worker.py")),
        *(library / "workloads/theirs.py", tmp_path / "workloads/mine.py"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("WHOSE = 'own'\n")
    write(library, "sitecustomize.py", FINDER.format(package=project / "launcher/__init__.py"))
    package = tmp_path / "package"
    package.mkdir()
    write(package, "__init__.py", "")
    write(package, "helper.py", "NAME = __name__\n")
    write(package, "train.py", MODULE)
    done = gpurun(
        tmp_path,
        "run",
        "-m",
        "package.train",
        "--devices",
        "cpu:1",
        "--out",
        "run",
        "--json",
        "--",
        "--epochs",
        "1",
        env={"PYTHONPATH": str(library)},
    ).ended()
    variant = done.json["variants"][0]
    assert variant["rounds"] >= 1
    said = (tmp_path / "run/launches/01-script-1/log/rank0.log").read_text()
    assert said.startswith("spec package.train package.helper ['--epochs', '1'] own own\nnamespace own own\n")
    gpurun(tmp_path, "--resume", "run").ended()  # nothing is missing
    assert (tmp_path / "run" / "job.yaml").read_text().startswith('name: "package.train"\nmodule: ')


def test_a_program_whose_rank_was_killed_goes_on_from_its_checkpoint_to_the_same_weights(
    tmp_path: Path,
) -> None:
    for name in ("checkpoint.py", "checkpoint.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    both = "compare.args=[[--directory, killed, --steps, 12, --die-at, 7], [--directory, calm, --steps, 12]]"
    brief = ("--set", "profile.steps=0", "--set", "steps.launches=1")
    gpurun(tmp_path, "checkpoint.yaml", "--out", "run", *brief, "--set", "args=[]", "--set", both).ended()
    said = {}
    for number, name in enumerate(("killed", "calm"), 1):
        attempts = sorted((tmp_path / "run" / "launches").glob(f"0{number}-*"))
        said[name] = (attempts[-1] / "log" / "rank0.log").read_text().splitlines()[-1]
    (restart,) = (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()
    assert "SIGKILL" in json.loads(restart)["reason"]
    assert said["killed"].startswith("began at step 5, weights ")
    assert said["calm"].startswith("began at step 0, weights ")
    assert said["killed"].split()[-1] == said["calm"].split()[-1]


HANGS = """
    import os
    import signal
    import sys
    import time
    import torch

    def save(number, frame):
        print("saved at the last moment")
        sys.exit()

    signal.signal(signal.SIGTERM, save)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(1000):
        if step == 5 and os.environ["RANK"] == "1":
            time.sleep(600)  # as anything that blocks a rank
        weight.sum().backward()
        optimizer.step()
    time.sleep(600)
"""


def test_a_program_that_makes_no_step_any_more_is_stopped_with_its_stacks(tmp_path: Path) -> None:
    write(tmp_path, "train.py", HANGS)
    job = ("train.py", "--devices", "cpu:2", "--hang-timeout", "10s", "--set", "grace=30s")
    done = gpurun(tmp_path, "run", *job, "--out", "run").ended(4)
    result = done.variant("script-2")
    assert result["status"] == "hung"
    assert "completed for 10 s" in result["reason"]
    assert "train.py" in (tmp_path / "run/launches/01-script-2/hang.json").read_text()
    assert "[rank 0] saved at the last moment" in done.err
