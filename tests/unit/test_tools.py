"""What `make` runs before anything is installed; `benchmarks/fresh` tries it on bare machines."""

import errno
import fcntl
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpurun.launcher.machine.accelerators import DEFAULT
from gpurun.launcher.machine.gpus.gpu import Gpus
from tests.wording import Wording
from tools import environment, system_packages
from tools.environment import OURS, Environment

ROOT = Path(__file__).parents[2]
GOOD, OLD, BARE = "good", "old", "without venv"
WHEN = """case "$*" in
*"print("*) echo 3.12 ;;
*-V*) echo Python 3.9.2 ;;
*"3, 11"*) exit {version} ;;
*ensurepip*) exit {venv} ;;
*) echo "$0 runs $*" ;;
esac"""
ANSWERS = {
    GOOD: WHEN.format(version=0, venv=0),
    OLD: WHEN.format(version=2, venv=0),
    BARE: WHEN.format(version=0, venv=1),
}
"""What Pythons answer when they are asked who they are."""


def start(directory: Path, programs: dict[str, str], **environ: str) -> subprocess.CompletedProcess[str]:
    """`python.sh FILE` on a machine that has these Pythons, and nothing but what every Debian has."""
    for name in ("sh", "uname", "id"):
        (directory / name).symlink_to(f"/usr/bin/{name}")
    for name, what in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{ANSWERS.get(what, what)}\n")
        (directory / name).chmod(0o755)
    return subprocess.run(
        ["/bin/sh", ROOT / "tools/python.sh", "FILE"],
        env={"PATH": str(directory), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("programs", "environ", "chosen"),
    [
        ({"python3": GOOD, "python3.13": GOOD}, {}, "python3"),
        ({"python3": OLD, "python3.12": GOOD}, {}, "python3.12"),
        ({"python3": BARE, "python3.12": GOOD}, {}, "python3.12"),
        ({"python3": GOOD, "mine": GOOD}, {"PYTHON": "mine"}, "mine"),
    ],
)
def test_a_python_that_can_make_environments_is_chosen(
    tmp_path: Path, programs: dict[str, str], environ: dict[str, str], chosen: str
) -> None:
    done = start(tmp_path, programs, **environ)
    assert done.stdout == f"{tmp_path}/{chosen} runs FILE\n"


APT = {"apt-get": "exit 1"}


@pytest.mark.parametrize(
    ("programs", "environ"),
    [
        ({}, {}),
        (APT, {}),
        ({"python3": BARE, **APT}, {}),
        ({"python3": OLD, **APT}, {}),
        ({"python3": GOOD, "mine": OLD}, {"PYTHON": "mine"}),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="the command for another user has sudo in it")
def test_without_one_a_sentence_names_what_to_install(
    tmp_path: Path, programs: dict[str, str], environ: dict[str, str], wording: Wording
) -> None:
    done = start(tmp_path, programs, **environ)
    wording(done.stderr)
    assert done.returncode == 1


def made(directory: Path, *files: Path, torch: str = "cpu") -> Environment:
    """An environment as `make` leaves it, without what pip and venv put there."""
    found = Environment(directory, files)
    directory.mkdir()
    (directory / OURS).touch()
    (directory / "pyvenv.cfg").touch()
    found.finish(torch)
    return found


def test_an_environment_is_ready_until_what_it_was_made_of_changes(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("one==1\n")
    found = made(tmp_path / ".venv", file)
    assert found.is_ready()
    assert Environment(found.directory, found.requirements, torch="cpu").is_ready()
    assert not Environment(found.directory, found.requirements, torch="cu126").is_ready()
    moved = found.directory.rename(tmp_path / "elsewhere")
    assert not Environment(moved, found.requirements).is_ready()
    moved.rename(found.directory)
    file.write_text("one==2\n")
    assert not found.is_ready()
    found.begin()  # pip brings it up to date; until it has, the environment isn't complete
    assert found.made_of() is None
    assert (found.directory / "pyvenv.cfg").exists()


@pytest.mark.parametrize("ready", ["", "{", '{"python": "3.11"}'])
def test_what_an_interrupted_command_has_left_is_removed(tmp_path: Path, ready: str) -> None:
    found = made(tmp_path / ".venv")
    (tmp_path / ".venv-discarded").mkdir()  # and the one before it
    (found.directory / ".ready").write_text(ready)
    assert not found.is_ready()
    found.remove()
    assert list(tmp_path.iterdir()) == []


def test_one_that_an_earlier_version_made_is_remade(tmp_path: Path) -> None:
    old = tmp_path / ".venv"
    old.mkdir()
    (old / "pyvenv.cfg").touch()
    (old / ".ready").touch()
    Environment(old).remove()
    assert not old.exists()


@pytest.mark.parametrize("link", [False, True])
def test_an_environment_of_somebody_elses_is_never_removed(
    tmp_path: Path, link: bool, wording: Wording
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "pyvenv.cfg").touch()
    place = tmp_path / ".venv"
    place.symlink_to(theirs) if link else theirs.rename(place)
    with wording.raises(SystemExit):
        Environment(place).begin()
    assert (place / "pyvenv.cfg").exists()


def test_the_build_of_torch_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which build serves which GPUs: `test_builds`."""
    found = made(tmp_path / ".venv")
    monkeypatch.setattr(environment, "has_driver", lambda: False)
    assert environment.fitting_build(found) == "cpu"
    monkeypatch.setattr(environment, "has_driver", lambda: True)
    monkeypatch.setattr(Environment, "install", lambda *_: None)
    monkeypatch.setattr(environment, "inspect_nvidia_gpus", lambda _: Gpus(driver="580"))
    assert environment.fitting_build(found) == "cpu"
    for build, expected in ((DEFAULT, "pypi"), ("cu126", "cu126"), (None, "cpu")):
        monkeypatch.setattr(environment, "build_for", lambda _, build=build: build)
        assert environment.fitting_build(found) == expected


@pytest.mark.parametrize(
    ("build", "offered", "arguments"),
    [
        ("pypi", {}, ["torch===9.1"]),
        ("cpu", {"": ["9.1+cpu", "9.1"]}, ["torch==9.1+cpu"]),
        ("cpu", {"": ["9.1"], "--index-url": ["9.1+cpu"]}, ["torch==9.1+cpu", "--extra-index-url", "cpu"]),
        ("cu126", {"": ["9.1"]}, "gpurun: .*/cu126 has no torch 9.1 for python.* make setup TORCH=pypi"),
    ],
)
def test_no_index_has_to_answer_that_is_not_needed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: str,
    offered: dict[str, list[str]],
    arguments: list[str] | str,
) -> None:
    monkeypatch.setattr(environment, "pinned", lambda _: "9.1")
    monkeypatch.setattr(environment, "versions", lambda _, *options: offered.get("".join(options[:1]), []))
    if isinstance(arguments, str):
        with pytest.raises(SystemExit, match=arguments):
            environment.requirement(Environment(tmp_path), build)
        return
    found = [each.rpartition("/")[2] for each in environment.requirement(Environment(tmp_path), build)]
    assert found == arguments


RETRY = "WARNING: Retrying (Retry(total=0)) after connection broken by '{}': /simple/torch/"
NO_NAME = "NewConnectionError('<x at 0x7f>: Failed: [Errno -3] Temporary failure in name resolution')"


@pytest.mark.parametrize(("build", "torch"), [("pypi", "torch==2.6"), ("cpu", "torch pinned")])
def test_the_oldest_torch_is_that_of_pypi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str, torch: str
) -> None:
    """Other indexes have builds of few versions."""
    asked: list[str] = []
    monkeypatch.setattr(Environment, "install", lambda _, *arguments: asked.extend(arguments))
    monkeypatch.setattr(Environment, "finish", lambda *_: None)
    monkeypatch.setattr(environment, "requirement", lambda *_: ("torch pinned",))
    environment.make_floor(Environment(tmp_path, torch=build))
    assert [each for each in asked if each.startswith("torch")] == [torch]
    assert not any(">=" in each for each in asked)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NO_NAME, "Temporary failure in name resolution"),
        (
            "ProxyError('No proxy.', NewConnectionError('<x>: [Errno 111] Connection refused'))",
            "Connection refused",
        ),
        (
            "ConnectTimeoutError(<x>, 'Connection to pypi.org timed out. (connect timeout=15)')",
            "Connection to pypi.org timed out. (connect timeout=15)",
        ),
        (
            "ReadTimeoutError(\"HTTPSConnectionPool(host='a'): Read timed out. (read timeout=15)\")",
            "Read timed out. (read timeout=15)",
        ),
        (
            "ProtocolError('Connection aborted.', RemoteDisconnected('Remote end closed connection'))",
            "Remote end closed connection",
        ),
    ],
)
def test_without_a_network_one_sentence_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: str,
    reason: str,
) -> None:
    said = f"{RETRY.format(error)}\nERROR: ResolutionImpossible"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(Environment, "pip", lambda *_, **__: failed)
    expected = f"gpurun: pip can't reach its package index ({reason}); a proxy or another index is set by "
    for ask in (Environment(tmp_path).install, lambda: environment.versions(Environment(tmp_path))):
        with pytest.raises(SystemExit, match=re.escape(expected)):
            ask()
    assert capsys.readouterr().err == ""
    failed.stderr = "ERROR: ResolutionImpossible\n"  # pip's own words otherwise
    with pytest.raises(SystemExit, match="is not complete, pip says why above"):
        Environment(tmp_path).install()
    assert capsys.readouterr().err == failed.stderr


@pytest.mark.parametrize(("ensurepip", "reason"), [(1, "OSError: no space"), (0, r"\[Errno 28\] no space")])
def test_an_environment_that_cant_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ensurepip: int, reason: str
) -> None:
    def full(_: Environment) -> None:
        raise OSError(errno.ENOSPC, "no space")

    ended = subprocess.CompletedProcess([], ensurepip, "", "Traceback:\nOSError: no space\n")
    monkeypatch.setattr(Environment, "run", lambda *_, **__: ended)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "STEPS", {"main": [(Environment(tmp_path / "new"), full)]})
    with pytest.raises(SystemExit, match=f"gpurun: new can't be made: {reason}"):
        environment.main("main")


def test_a_pip_that_outlives_make_keeps_the_next_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of `make` alone leaves it: two would install into one environment."""
    place = Environment(tmp_path / "new")
    (tmp_path / "new/bin").mkdir(parents=True)
    place.python.symlink_to(sys.executable)
    os.mkfifo(tmp_path / "end")
    starts = "subprocess.Popen(['cat', 'end'], stdout=-3, stderr=-3, close_fds=False)"
    (tmp_path / "orphan.py").write_text(f"import subprocess; print({starts}.pid)\n")
    monkeypatch.chdir(tmp_path)
    with environment.locked(tmp_path):
        assert place.run("orphan", stdout=subprocess.PIPE).returncode == 0
    lock = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (tmp_path / "end").write_text("now\n")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(lock)


def test_two_at_once_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lock(_: int, how: int) -> None:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "STEPS", {"main": []})
    environment.main("main")
    assert capsys.readouterr().out == "waiting for another `make` in this directory\n"


def test_packages_of_the_system_are_named_where_they_may_not_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    monkeypatch.setattr(system_packages, "has", lambda package: package == "munge")
    monkeypatch.setattr(system_packages, "install", lambda _: False)
    monkeypatch.delenv(system_packages.ALL_TESTS, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    system_packages.main()
    wording(capsys.readouterr().err)
    wording(system_packages.without("chromium"))
    assert system_packages.without("munge") == "needs root: sudo make test"
    monkeypatch.setenv(system_packages.ALL_TESTS, "1")
    assert system_packages.without("chromium") == ""
    with wording.raises(SystemExit):
        system_packages.main()


def test_a_distribution_that_lacks_a_package_gets_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    apt = tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\ncase "$*" in *mpich*) exit 100;; *) echo "$*" >> {log};; esac\n')
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    system_packages.install(["chromium", "mpich", "munge"])
    assert [line.split()[-1] for line in log.read_text().splitlines()] == ["update", "chromium", "munge"]


FAKE_GPURUN = """#!/bin/sh
printf '%s\\n' "$*" >> "$LOG"
case "$*" in *open.yaml*) exit 6;; *mistake*) exit 2;; *gpus*) exit 3;; *worse.yaml*) exit 5;; esac
"""


@pytest.fixture
def fake_gpurun(tmp_path: Path) -> dict[str, str]:
    """An environment whose `gpurun` writes its arguments to $LOG; names in them say how it ends."""
    program = tmp_path / "gpurun"
    program.write_text(FAKE_GPURUN)
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "LOG": str(tmp_path / "log"), "GITHUB_STEP_SUMMARY": "summary.md"}


@pytest.mark.parametrize(
    ("job", "undecided", "code"),
    [("job.yaml", "fail", 0), ("worse.yaml", "pass", 5), ("open.yaml", "pass", 0), ("open.yaml", "fail", 6)],
)
def test_the_action_ends_as_the_gate_does(
    fake_gpurun: dict[str, str], job: str, undecided: str, code: int
) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    given = {"job": f"{job} $(touch x)", "against": "origin/main", "undecided": undecided}
    inputs = {name: str(given.get(name, each.get("default"))) for name, each in action["inputs"].items()}
    environ = {key: inputs[value.split(".")[1].split(" ")[0]] for key, value in step["env"].items()}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env=fake_gpurun | environ, capture_output=True, check=False
    )
    assert done.returncode == code
    assert Path(fake_gpurun["LOG"]).read_text() == (
        f"gate {job} $(touch x) --against origin/main --fail-slower 3% --budget 10m "
        "--out gate --junit gate.xml --markdown summary.md\n"
    )


@pytest.mark.parametrize(
    ("jobs", "code"),
    [(["a.yaml"], 0), (["a.yaml", "mistake.yaml", "b.yaml"], 1), (["gpus.yaml", "b.yaml"], 0)],
)
def test_the_hook_checks_every_job(fake_gpurun: dict[str, str], jobs: list[str], code: int) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command = [*shlex.split(hook["entry"]), *jobs]
    assert subprocess.run(command, env=fake_gpurun, check=False).returncode == code
    assert Path(fake_gpurun["LOG"]).read_text().splitlines() == [f"check {job}" for job in jobs]
    without = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (without.returncode, without.stderr) == (
        1,
        "gpurun is not on PATH: commit from the environment that has it\n",
    )


@pytest.mark.parametrize(
    ("name", "checked"),
    [("job.yaml", True), ("a/job-2.yml", True), ("a/other.yaml", False), ("jobs/job.py", False)],
)
def test_the_hook_takes_files_named_like_jobs(name: str, checked: bool) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert bool(re.search(hook["files"], name)) == checked
