"""Whatever kills the command, or a part of it: nothing stays behind."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.launcher.machine.process_tree import descendants, is_stopped

FRONT = Path(__file__).parent / "process_front.py"
BODIES = ("hold_the_gil", "leave_grandchild", "ignore_sigterm", "sleep_for_ever")
AllGone = Callable[[list[int]], list[int]]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command with four ranks: one in C with the GIL, one with a runaway grandchild, one that is deaf."""
    with running([str(FRONT), str(tmp_path), *BODIES], tmp_path, len(BODIES)) as process:
        yield process


@contextmanager
def running(argv: list[str], directory: Path, num: int) -> Iterator[subprocess.Popen[str]]:
    """A command whose ranks, so many, do what they are to do."""
    whole = [sys.executable, *argv]
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            while len(list(directory.glob("ready*"))) < num:
                assert process.poll() is None
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def stop(pid: int) -> None:
    """Stops a process: the signal that has been sent takes effect when the process gets a core."""
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.01)


@pytest.fixture
def pids(front: subprocess.Popen[str], tmp_path: Path) -> list[int]:
    """Supervisor, server, ranks and the runaway grandchild."""
    pids = descendants(front.pid)
    assert int((tmp_path / "grandchild1").read_text()) in pids
    assert len(pids) == 2 + len(BODIES) + 1
    return pids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_everything_in_order(
    pids: list[int], front: subprocess.Popen[str], all_gone: AllGone, number: int
) -> None:
    front.send_signal(number)
    assert all_gone([front.pid, *pids]) == []
    assert front.wait() == 130
    assert front.stderr is not None
    assert front.stderr.read().startswith("interrupted by ")


def test_a_stopped_supervisor_is_continued_at_the_end(
    pids: list[int], front: subprocess.Popen[str], all_gone: AllGone
) -> None:
    stop(pids[0])
    front.send_signal(signal.SIGINT)
    assert front.wait() == 130
    assert all_gone([front.pid, *pids]) == []
    assert front.stderr is not None
    assert front.stderr.read() == "interrupted by Ctrl-C\n"


def test_a_killed_command_takes_everything_with_it(
    pids: list[int], front: subprocess.Popen[str], all_gone: AllGone
) -> None:
    front.kill()
    assert all_gone([front.pid, *pids]) == []


@pytest.mark.parametrize(("victim", "words"), [(0, "supervising process"), (1, "server that starts")])
def test_a_killed_helper_ends_the_run_with_a_word(
    pids: list[int], front: subprocess.Popen[str], all_gone: AllGone, victim: int, words: str
) -> None:
    """Supervisor, then server: `descendants` lists parents first."""
    Path(f"/proc/{pids[victim]}/stat").read_text()
    subprocess.run(["kill", "-KILL", str(pids[victim])], check=True)
    assert all_gone([front.pid, *pids]) == []
    assert front.wait() == 3
    assert front.stderr is not None
    assert words in front.stderr.read()


@pytest.mark.parametrize("is_server_stopped", [False, True], ids=["", "server stopped"])
def test_command_and_supervisor_killed_at_once(
    pids: list[int], front: subprocess.Popen[str], all_gone: AllGone, is_server_stopped: bool
) -> None:
    """The server is left to end what the ranks have started.

    If it was stopped, the kernel continues it: its process group has become an orphan.
    """
    if is_server_stopped:
        stop(pids[1])
    subprocess.run(["kill", "-KILL", str(front.pid), str(pids[0])], check=True)
    assert all_gone([front.pid, *pids]) == []


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command with one rank, which is deaf, and an hour of grace."""
    code = f"import sys; sys.path.insert(0, {str(FRONT.parent)!r}); import process_front as front; " + (
        "front.GRACE_S = 3600.0; sys.exit(front.main(sys.argv[1], ['ignore_sigterm']))"
    )
    with running(["-c", code, str(tmp_path)], tmp_path, 1) as process:
        yield process


def test_only_a_second_ctrl_c_does_not_wait(patient: subprocess.Popen[str], all_gone: AllGone) -> None:
    """Slurm sends SIGTERM twice: itself, and by srun."""
    pids = descendants(patient.pid)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        patient.send_signal(number)
        while is_pending(patient.pid) or not is_asleep(patient.pid):
            time.sleep(0.01)
    assert descendants(patient.pid) == pids
    patient.send_signal(signal.SIGINT)
    assert all_gone([patient.pid, *pids]) == []
    assert patient.wait() == 130


def test_a_key_that_is_held_down_ends_it_in_order_too(
    patient: subprocess.Popen[str], all_gone: AllGone
) -> None:
    """Held down until the last message is there."""
    pids = descendants(patient.pid)
    assert patient.stderr is not None
    while not select.select([patient.stderr], [], [], 0)[0]:
        patient.send_signal(signal.SIGINT)
        while is_pending(patient.pid):
            pass
        time.sleep(0.01)  # no key repeats faster, and a flood of signals leaves no time to do anything else
    assert all_gone([patient.pid, *pids]) == []
    assert patient.wait() == 130
    assert patient.stderr.read() == "interrupted by Ctrl-C\n"


def is_pending(pid: int) -> bool:
    """Whether a signal still waits to be delivered."""
    return any(int(status(pid)[key], 16) for key in ("SigPnd", "ShdPnd"))


def is_asleep(pid: int) -> bool:
    """Whether the process waits: Python has then called its handlers for all signals that were delivered."""
    return status(pid)["State"].startswith("S")


def status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
