"""What is asked of a run while it runs, and what it does when something fails that may pass."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.machine.process_tree import descendants
from tests import forkserver
from tests.integration.command import ending, gpurun, misbehaving, write

JOB = """
    workload: model.py:build
    devices: cpu:2
    global_batch: 8
    steps: {rounds: 100000}
    profile: {steps: 0}
    gradient_check: false
"""


@contextmanager
def running(directory: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`gpurun job.yaml --out run` in the background, once both of its ranks have made steps."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    argv = ("gpurun", "job.yaml", "--out", "run", *args)
    with forkserver.start(*argv, cwd=directory, stdout=pipe, stderr=pipe, stdin=null) as process:
        wait_for(lambda: len([*(directory / "run").glob("variants/*/rank*.jsonl")]) == 2, process)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def follow_one_line(directory: Path, job: subprocess.Popen[str]) -> None:
    """A reader takes a single line of what the ranks write at SIGUSR1; the command ends with the reader."""
    command = f"{shlex.quote(sys.executable)} -m gpurun logs run --follow | head -1"
    with subprocess.Popen(["sh", "-c", command], cwd=directory, stdout=subprocess.PIPE, text=True) as reader:

        def is_read() -> bool:
            job.send_signal(signal.SIGUSR1)
            return reader.poll() is not None

        wait_for(is_read, job)
        assert reader.communicate()[0].endswith("] noticed\n")


def test_a_running_job_answers_from_another_terminal_and_ends_by_sigterm(
    tmp_path: Path, all_gone: Any
) -> None:
    """One job for all questions: it takes seconds to start."""
    misbehaving(
        tmp_path,
        """
        time.sleep(0.02)  # leaves the cores to other tests
        if calls == 1:
            print("hello from", os.environ["RANK"], flush=True)
            def notice(*_):
                open(f"notice{os.environ['RANK']}", "w").close()
                os.write(1, b"noticed\\n")
            signal.signal(signal.SIGUSR1, notice)
        """,
        JOB,
    )
    with running(tmp_path) as job:
        seen = gpurun(tmp_path, "stacks", "run", "--json").json
        assert [rank["rank"] for rank in seen["ranks"]] == [0, 1]
        assert all(rank["threads"][0]["frames"] and rank["steps"] > 0 for rank in seen["ranks"])
        assert all(rank["collectives"][0]["name"] == "all_reduce" for rank in seen["ranks"])
        assert "rank 1 (process " in gpurun(tmp_path, "stacks", "run").out

        captured = gpurun(tmp_path, "capture", "run", "--steps", "2", "--ranks", "1").ended()
        (trace,) = (tmp_path / captured.out.strip()).iterdir()
        assert trace.name == "rank1.pt.trace.json.gz"
        report = gpurun(tmp_path, "trace", str(trace), "--json").json
        assert [step["step"] for step in report["ranks"][0]["steps"]] == [1, 2]
        assert gpurun(tmp_path, "capture", "run", "--ranks", "5").code == 2

        assert gpurun(tmp_path, "logs", "run", "--rank", "1").out == "[rank 1] hello from 1\n"
        for arguments in (("--resume", "run"), ("job.yaml", "--out", "run")):
            refused = gpurun(tmp_path, *arguments)
            assert (refused.code, f"in use by process {job.pid}" in refused.err) == (2, True)
            assert ("--out" in refused.err) == ("--out" in arguments)

        assert f"in progress: process {job.pid} on " in gpurun(tmp_path, "report", "run").out

        follow_one_line(tmp_path, job)
        assert all((tmp_path / f"notice{rank}").exists() for rank in (0, 1))
        family = descendants(job.pid)
        job.send_signal(signal.SIGTERM)
        printed, said = job.communicate(timeout=30)
    assert job.returncode == 130
    assert all_gone(family) == []
    assert "not complete" in printed
    comparison = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert not comparison["complete"]
    assert comparison["variants"][0]["rounds"] >= 1
    assert "[rank 0] hello from 0" in said
    assert not (tmp_path / "run" / "running.json").exists()
    assert not list((tmp_path / "run").glob("launches/*/control"))
    assert gpurun(tmp_path, "stacks", "run").code == 2


def test_a_hang_is_reported_and_the_job_goes_on(tmp_path: Path) -> None:
    """On a busy machine the start may look like a hang as well, and is reported too."""
    misbehaving(tmp_path, "if calls == 30 and os.environ['RANK'] == '1': time.sleep(6)")
    job = ["--set", "hang_timeout=2s", "--set", "on_hang=continue", "--set", "compare.split=[even]"]
    result = gpurun(tmp_path, "job.yaml", "--out", "run", *job).ended()
    assert "completed for 2 s" in result.err
    assert "rank 0 waits in all_reduce #" in result.err
    assert re.search(r"rank 1 is at \S+/model\.py:\d+ in misbehave", result.err)
    (record,) = (tmp_path / "run").glob("launches/*/hang.json")
    assert [rank["rank"] for rank in json.loads(record.read_text())["ranks"]] == [0, 1]


def test_what_may_pass_is_tried_again_and_counted(tmp_path: Path) -> None:
    misbehaving(
        tmp_path,
        """
        if calls == 30 and os.environ["RANK"] == "1" and not os.path.exists("failed"):
            open("failed", "w").close()
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "restarts=2").ended()
    assert result.comparison["restarts"] == 1
    assert {ending(variant) for variant in result.comparison["variants"]} == {"ok"}
    assert any(each["text"].startswith("1 restart after") for each in result.comparison["findings"])
    cause = json.loads((tmp_path / "run" / "launches" / "01-ddp-2" / "failure.json").read_text())
    assert (cause["rank"], cause["kind"], cause["code"], cause["victims"]) == (1, "signal", -9, [0])
    assert cause["host"]
    assert cause["last_lines"] == ["last words"]


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    misbehaving(tmp_path, "import no_such_module")
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "restarts=3", "--set", "grace=1s").ended(4)
    assert "no_such_module" in result.err
    assert result.comparison["restarts"] == 0


@pytest.mark.slow
def test_ranks_run_on_the_cores_that_they_are_bound_to(tmp_path: Path) -> None:
    misbehaving(tmp_path, "if calls == 1: print(sorted(os.sched_getaffinity(0)), flush=True)")
    brief = ("--set", "compare.split=[even]", "--set", "steps.rounds=1")
    result = gpurun(
        tmp_path, "job.yaml", "--out", "run", "--set", "bind=cores", "--only-rank", "1", *brief
    ).ended()
    binding = json.loads((tmp_path / "run" / "host.json").read_text())["binding"]
    assert binding["bind"] == "cores"
    assert f"[rank 1] {binding['cpus']['ddp-2']['1']}" in result.err
    assert "[rank 0]" not in result.err
    alone = ("--set", "devices=cpu:1", "--set", "strategy=single", "--set", "gradient_check=false")
    quiet = gpurun(tmp_path, "job.yaml", "--out", "run2", "--quiet", *brief, *alone).ended()
    assert "[rank" not in quiet.err


def test_the_first_server_ends_where_ranks_have_an_environment_of_their_own(tmp_path: Path) -> None:
    """It has imported torch without the job's variables, and would hold its memory for nothing."""
    write(
        tmp_path,
        "program.py",
        """
        import os, time
        from pathlib import Path

        def parent(process):
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]

        supervisor = parent(os.getppid())
        servers = Path(f"/proc/{supervisor}/task/{supervisor}/children")
        while servers.read_text().split() != [str(os.getppid())]:
            time.sleep(0.01)
        """,
    )
    write(tmp_path, "job.yaml", "script: program.py\ndevices: cpu:1\nenv: {A: 1}\ntimeout: 60s\n")
    gpurun(tmp_path, "job.yaml").ended()


@pytest.mark.slow
def test_nothing_is_left_of_an_estimate_that_is_interrupted(tmp_path: Path, all_gone: Any) -> None:
    """The signal is for the command alone, as from a scheduler; the model would take a minute to build."""
    write(tmp_path, "job.yaml", "workload: model.py:build\ndevices: cpu:2\nglobal_batch: 8\n")
    write(
        tmp_path,
        "model.py",
        """
        import os, pathlib, time

        def build():
            pathlib.Path("building").write_text(str(os.getpid()))
            time.sleep(60)
    """,
    )
    argv = ("gpurun", "check", "job.yaml", "--memory")
    pid = tmp_path / "building"
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with forkserver.start(*argv, cwd=tmp_path, stdout=pipe, stderr=both) as process:
        wait_for(lambda: pid.exists() and bool(pid.read_bytes()), process)
        process.send_signal(signal.SIGINT)
        out = process.communicate()[0]
    assert (process.returncode, out.strip()) == (130, "")
    assert all_gone([int(pid.read_text())]) == []
