"""The control directory of a stranger's run, which may change while a command works on it."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.inspect.requests import WantTraces, request, take_question
from gpurun.launcher.inspect.snapshot import ask_history
from gpurun.launcher.machine.process_tree import start_ticks
from gpurun.launcher.rundir.control import (
    MAX_BYTES,
    STACKS_SIGNAL,
    ControlDir,
    RankState,
    block_name,
    leave,
    make_directory,
    open_own,
    read_states,
    socket_name,
    stacks_name,
)
from gpurun.launcher.rundir.files import RunDir
from tests.wording import Wording


def me() -> RankState:
    """This process as a rank."""
    return RankState(0, os.getpid(), start_ticks(os.getpid()) or 0, 0)


def own_block() -> bytes:
    """What it writes into its block."""
    return struct.pack("=5Q", 0x6770_7572_756E_0001, os.getpid(), me().start_ticks, 0, 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_directory(tmp_path / "control")
    return tmp_path / "control"


@pytest.fixture
def control(directory: Path) -> Iterator[ControlDir]:
    with ControlDir(directory) as opened:
        yield opened


def victim_file(directory: Path) -> Path:
    path = directory.parent / "my thesis"
    path.write_bytes(own_block())
    return path


def planted_link(directory: Path, name: str) -> None:
    (directory / name).symlink_to(victim_file(directory))


def planted_hard_link(directory: Path, name: str) -> None:
    os.link(victim_file(directory), directory / name)


def planted_pipe(directory: Path, name: str) -> None:
    victim_file(directory)
    os.mkfifo(directory / name)


PLANTS = (planted_link, planted_hard_link, planted_pipe)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_block_that_is_swapped_for_a_link_is_not_written(
    control: ControlDir, directory: Path, plant: Any, wording: Wording
) -> None:
    """`gpurun capture` has read the block before."""
    plant(directory, block_name(0))
    with wording.raises(MachineError):
        request(control, WantTraces(3, None), {0: me()}, "01")
    assert (directory.parent / "my thesis").read_bytes() == own_block()


@pytest.mark.parametrize("plant", PLANTS)
def test_nothing_is_read_through_a_link(control: ControlDir, directory: Path, plant: Any) -> None:
    plant(directory, block_name(0))
    assert control.states() == {}
    assert read_states(directory) == {}
    (directory.parent / "my thesis").unlink()
    plant(directory, stacks_name(0))
    assert control.read(stacks_name(0)) == b""


OWN_RANK = (
    "import mmap, signal, sys\n{}\n"
    "block = open(sys.argv[1], 'r+b')\nmapped = mmap.mmap(block.fileno(), 0)\n"
    "print(flush=True)\nsys.stdin.read()"
)


@pytest.mark.parametrize(
    ("handler", "code"), [("", 0), (f"signal.signal({STACKS_SIGNAL}, lambda *_: sys.exit(7))", 7)]
)
def test_a_process_that_does_not_handle_the_signal_gets_none(
    control: ControlDir, directory: Path, handler: str, code: int
) -> None:
    """It has mapped the block, as a rank has; one that handles the signal gets it."""
    block = directory / block_name(0)
    block.write_bytes(own_block())
    argv = [sys.executable, "-c", OWN_RANK.format(handler), str(block)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        control.ask_for_stacks(RankState(0, process.pid, start_ticks(process.pid) or 0, 0))
        process.communicate()
        assert process.returncode == code


QUESTION = {"token": "5ec2e7", "question": {"type": "WhatRanksDo"}}


def test_a_question_comes_through_no_link(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_directory(run.control("01"))
    (tmp_path / "word").write_text(json.dumps(QUESTION))
    (run.control("01") / "question.json").symlink_to(tmp_path / "word")
    assert take_question(run, "01") is None


@pytest.mark.parametrize(
    "question",
    [
        QUESTION | {"token": "../../x"},
        QUESTION | {"question": {"type": "WantTraces", "steps": "x"}},
        "5ec2e7",
    ],
)
def test_what_is_no_question_is_dropped(tmp_path: Path, question: object) -> None:
    run = RunDir(tmp_path)
    make_directory(run.control("01"))
    file = run.control("01") / "question.json"
    file.write_text(json.dumps(QUESTION))
    assert take_question(run, "01") is not None
    file.write_text(json.dumps(question))
    assert take_question(run, "01") is None
    assert not file.exists()


@pytest.mark.parametrize("use", [ControlDir, make_directory])
def test_the_directory_itself_is_no_link(tmp_path: Path, use: Any) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "control").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        use(tmp_path / "control")
    leave(tmp_path / "control")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "mine" / "file").exists()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_stacks_and_capture_want_a_directory_that_no_one_else_can_change(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(SpecError, match="is not yours alone"):
        open_own(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_they_want_a_directory_of_ones_own(directory: Path, wording: Wording) -> None:
    os.chown(directory, 1234, -1)
    with wording.raises(SpecError):
        open_own(directory)


def test_a_file_that_two_processes_share_makes_none_of_them_a_rank(
    directory: Path, control: ControlDir
) -> None:
    """A link to a library leads to a file that the victim has mapped."""
    handler = f"signal.signal({STACKS_SIGNAL}, lambda *_: sys.exit(7))"
    code = f"import signal, sys\n{handler}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        maps = Path(f"/proc/{victim.pid}/maps").read_text().split()
        library = next(word for word in maps if word.startswith("/") and "libc" in word)
        (directory / block_name(0)).symlink_to(library)
        control.ask_for_stacks(RankState(0, victim.pid, start_ticks(victim.pid) or 0, 0))
        victim.communicate(b"\n")
    assert victim.returncode == 0


def test_the_rank_that_has_mapped_the_block_gets_the_signal(control: ControlDir) -> None:
    got: list[int] = []
    before = signal.signal(STACKS_SIGNAL, lambda number, _: got.append(number))
    block = control.block(0, create=True)
    try:
        control.ask_for_stacks(replace(me(), rank=1))
        assert got == []
        control.ask_for_stacks(me())
        assert got == [STACKS_SIGNAL]
    finally:
        signal.signal(STACKS_SIGNAL, before)
        block.close()


@contextmanager
def listening(directory: Path, serve: Any) -> Iterator[None]:
    """Something that listens in the place of torch's server."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(directory / socket_name(0)))
        server.listen()

        def accept() -> None:
            for _ in range(2):
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        serve(connection)
                    except OSError:
                        continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_endless_answer_is_given_up(directory: Path, control: ControlDir) -> None:
    sent = []

    def pour(connection: socket.socket) -> None:
        while True:
            sent.append(connection.send(bytes(1 << 20)))

    with listening(directory, pour):
        assert ask_history(control, me()) is None
    assert sum(sent) < 3 * MAX_BYTES


def test_a_slow_answer_is_given_up(
    directory: Path, control: ControlDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte now and then lets no deadline of a single read pass."""
    monkeypatch.setattr("gpurun.launcher.inspect.snapshot.TIMEOUT_S", 0.3)
    given_up = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not given_up.is_set():
            connection.send(b"H")
            time.sleep(0.01)

    with listening(directory, drip):
        assert ask_history(control, me()) is None
        given_up.set()
