"""Another user's run directory is opened: no process is stopped, nothing outside is read or written, the
terminal is left alone, and no job of theirs runs."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.machine.process_tree import start_ticks
from gpurun.launcher.rundir.claim import boot_id
from gpurun.launcher.rundir.control import STACKS_SIGNAL
from gpurun.launcher.rundir.files import RunDir
from tests.integration.command import Result, gpurun, write
from tests.whole import first

JOB = """
    name: naps
    workload: sleep
    params: {alpha_ms: 1, beta_ms: 1}
    devices: cpu:1
    global_batch: 4
    compare: {precision: [fp32, bf16]}
    steps: {rounds: 2, launches: 1}
    profile: {steps: 0}
"""
ESCAPES = "\x1b]52;c;Y3VybA==\x07\x1b[2J\x1b[1A\x9b5n\r\u202e"
CONTROLS = "\x07\x9b\r\u202e"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    write(directory, "job.yaml", JOB)
    assert gpurun(directory, "job.yaml", "--out", "run").code == 0
    return directory


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> RunDir:
    """A run that came from elsewhere."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return RunDir(tmp_path / "run")


def change(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("identity", first(3, ["../../outside", "/etc", "x\n", "..", "a/b", ""]))
def test_an_id_leads_to_no_other_directory(run: RunDir, identity: str) -> None:
    outside = run.path.parent / "outside"
    outside.mkdir()
    (outside / "status.json").write_text('{"status": "failed", "reason": "read from outside"}')
    plan = run.plan.read_text()
    name = json.loads(plan)["variants"][0]["id"]
    run.plan.write_text(plan.replace(json.dumps(name), json.dumps(identity)))  # in its launches, too
    done = gpurun(run.path.parent, "report", "run").ended(2)
    assert "is no id of" in done.err
    assert "read from outside" not in done.out


def test_launches_have_ids_too(run: RunDir) -> None:
    secret = run.path.parent / "secret" / "log"
    secret.mkdir(parents=True)
    (secret / "rank0.log").write_text("secret\n")
    done = gpurun(run.path.parent, "logs", "run", "--launch", "../../secret")
    assert (done.code, done.out) == (2, "")


def planted_link(run: RunDir) -> None:
    variant = next((run.path / "variants").iterdir())
    shutil.move(variant, run.path.parent / "outside")
    variant.symlink_to(run.path.parent / "outside")


def planted_pipe(run: RunDir) -> None:
    status = next((run.path / "variants").glob("*/status.json"))
    status.unlink()
    os.mkfifo(status)


@pytest.mark.parametrize("plant", [planted_link, planted_pipe])
@pytest.mark.parametrize("command", ["report", "logs", "diff"])
def test_nothing_is_opened_through_a_link_and_nothing_waits(
    run: RunDir, plant: Callable[[RunDir], None], command: str
) -> None:
    plant(run)
    before = sorted(run.path.parent.rglob("*"))
    more = ["run"] if command == "diff" else ["--format", "html,tensorboard"] if command == "report" else []
    done = gpurun(run.path.parent, command, "run", *more).ended(2)
    assert "no run of gpurun" in done.err
    assert sorted(run.path.parent.rglob("*")) == before


def test_no_text_of_a_run_controls_the_terminal(run: RunDir) -> None:
    def forge(status: Any) -> None:
        status.update(status="failed", reason=f"before {ESCAPES}after")

    change(next((run.path / "variants").glob("*/status.json")), forge)
    shown = gpurun(run.path.parent, "report", "run").ended()
    assert_harmless(shown)
    change(run.plan, lambda plan: plan.update(name=ESCAPES))
    (run.path / "launches" / "x").mkdir()
    for command in ("report", "logs", "stacks"):
        assert_harmless(gpurun(run.path.parent, command, "run"))
    run.plan.write_text(f'{{"name": "{ESCAPES}"')
    assert_harmless(gpurun(run.path.parent, "report", "run"))
    assert_harmless(gpurun(run.path.parent, "report", f"no{ESCAPES}where"))


def assert_harmless(shown: Result) -> None:
    text = shown.out + shown.err
    assert not [letter for letter in CONTROLS if letter in text]
    assert "\x1b" not in text


SLEEPER = "import signal, sys, time\n{}\nprint(flush=True)\ntime.sleep(60)"
HANDLERS = {
    "no handler": "",
    "a handler of its own": f"signal.signal({STACKS_SIGNAL}, lambda *_: sys.exit(7))",
}


@pytest.mark.parametrize("handler", first(1, HANDLERS.values()))
def test_no_process_that_a_run_names_gets_a_signal(run: RunDir, handler: str) -> None:
    argv = [sys.executable, "-c", SLEEPER.format(handler)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        forge_running(run, victim.pid)
        gpurun(run.path.parent, "stacks", "run").ended()
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL


@pytest.mark.parametrize("command", ["stacks", "capture"])
def test_a_directory_that_others_can_change_makes_no_rank_do_anything(run: RunDir, command: str) -> None:
    forge_running(run, os.getpid())
    (control,) = run.path.glob("launches/*/control")
    control.chmod(0o755)
    before = (control / "rank0").read_bytes()
    done = gpurun(run.path.parent, command, "run")
    assert (done.code, done.out) == (2, "")
    assert "is not yours alone" in done.err
    assert ((control / "rank0").read_bytes(), len(os.listdir(control))) == (before, 1)


def forge_running(run: RunDir, pid: int) -> None:
    """A run that names the process as its command and as its rank 0, with nothing but what /proc shows."""
    launch = next((run.path / "launches").iterdir()).name
    ticks = start_ticks(pid)
    claim = {
        "host": os.uname().nodename,
        "boot_id": boot_id(),
        "pid": pid,
        "start_ticks": ticks,
        "launch": launch,
    }
    run.running.write_text(json.dumps(claim))
    control = run.control(launch)
    control.mkdir(mode=0o700)
    (control / "rank0").write_bytes(struct.pack("=5Q", 0x6770_7572_756E_0001, pid, ticks, 0, 0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("place", [".", "plan.json", "invocation.json", "job.yaml"])
def test_only_a_run_of_ones_own_is_resumed(run: RunDir, place: str) -> None:
    """What it says of its job would run."""
    ran = run.path.parent / "ran"
    write(run.path, "model.py", f"open({str(ran)!r}, 'w')")
    change(run.invocation, lambda given: given.update(job_file=str(run.job)))
    run.job.write_text(run.job.read_text().replace("workload: sleep", "workload: model.py:build"))
    os.chown(run.path / place, 1234, -1)
    done = gpurun(run.path.parent, "--resume", "run")
    assert (done.code, ran.exists()) == (2, False)
    assert "belongs to another user" in done.err


def test_a_run_that_everyone_may_change_is_not_resumed(run: RunDir) -> None:
    run.path.chmod(0o777)
    done = gpurun(run.path.parent, "--resume", "run").ended(2)
    assert "chmod -R go-w" in done.err
