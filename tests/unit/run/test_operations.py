"""Restarts, limits, claims of a run directory, control blocks: without any rank."""

import errno
import os
import platform
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.errors import Interrupted, MachineError, SpecError
from gpurun.launcher.failures.reporter import Reporter, log_tail, stopping_text
from gpurun.launcher.failures.root_cause import Failure, fails_everywhere, is_transient
from gpurun.launcher.logs.relay import MOST_AT_ONCE_BYTES, REMOVED, Relay, log_lines
from gpurun.launcher.machine.process_tree import start_ticks
from gpurun.launcher.machine.resource_limits import check_open_files, remedy, start_problem
from gpurun.launcher.run.session import pause_s
from gpurun.launcher.rundir.claim import (
    Running,
    boot_id,
    claimed,
    entered,
    pid_namespace,
    read,
    running_launch,
)
from gpurun.launcher.rundir.control import (
    ControlDir,
    block_name,
    leave,
    make_directory,
    read_states,
)
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.units import GIB
from tests.wording import Wording

FAILED = Failure(1, None, "exception", "raised X", "", "", None, (), False, "RuntimeError", 1)


@pytest.mark.parametrize(
    ("error", "everywhere"),
    [("NameError", True), ("UserError", True), ("AssertionError", False), ("RuntimeError", False)],
)
def test_what_another_strategy_can_not_avoid(error: str, everywhere: bool) -> None:
    assert fails_everywhere(replace(FAILED, kind="user", error=error)) is everywhere


def test_the_same_exception_is_explained_once(tmp_path: Path, wording: Wording) -> None:
    said: list[str] = []
    reporter = Reporter(RunDir(tmp_path), said.append)
    traced = replace(FAILED, message="no luck", traceback='  File "train.py", line 3, in build\n')
    reporter.report_failure(traced, "01-ddp-2", "host")
    reporter.report_failure(replace(traced, rank=0), "02-dp-2", "host")
    reporter.report_failure(replace(traced, message="other"), "03-dp-2", "host")
    assert [text.count("train.py") for text in said] == [1, 0, 1]
    wording(said[1])


@pytest.mark.parametrize(("cause", "hurry"), [("Ctrl-C", "another Ctrl-C"), ("SIGTERM", "Ctrl-C (SIGINT)")])
def test_who_ends_a_run_may_hurry_it_by_ctrl_c(cause: str, hurry: str) -> None:
    assert stopping_text(Interrupted(cause), 5).endswith(f"after 5.0 s; {hurry} kills them at once")


@pytest.mark.parametrize(
    ("place", "where"), [("", "during build"), ("node 1 (vm)", "on node 1 (vm) during build")]
)
def test_a_message_names_the_machine_where_there_are_several(place: str, where: str, tmp_path: Path) -> None:
    said: list[str] = []
    run = RunDir(tmp_path)
    reporter = Reporter(run, said.append)
    reporter.report_failure(replace(FAILED, stage="build"), "01-ddp-2", "vm", place)
    assert f"it happened {where}\n" in said[0]
    assert read_json(run.root_cause("01-ddp-2"), Failure).host == "vm"


def test_no_terminal_obeys_the_words_of_an_exception(tmp_path: Path, wording: Wording) -> None:
    said: list[str] = []
    words = "\x1b]0;title\x07\x1b[2J\x1b[31mred\nline 2"
    log = RunDir(tmp_path).log("01-ddp-2", 1)
    log.parent.mkdir(parents=True)
    log.write_text("\x1b[1;1Hsaid before\n")
    Reporter(RunDir(tmp_path), said.append).report_failure(replace(FAILED, message=words), "01-ddp-2", "host")
    assert "\x1b" not in said[0]
    wording(said[0])
    assert "line 2" in said[0]
    assert "said before" in said[0]


@pytest.mark.parametrize(
    ("failure", "passes"),
    [
        (FAILED, True),
        (replace(FAILED, error="ConnectionResetError"), True),
        (replace(FAILED, error="SyntaxError"), False),
        (replace(FAILED, error="ModuleNotFoundError"), False),
        (replace(FAILED, kind="user", error="UserError"), False),
        (replace(FAILED, kind="oom", error="OutOfMemoryError"), False),
        (replace(FAILED, kind="oom", error=None, code=-9), True),
        (replace(FAILED, kind="signal", error=None, code=-11), True),
        (replace(FAILED, kind="exit", error="SystemExit", code=3), True),
        (replace(FAILED, kind="exit", error="SystemExit", code=2), False),
        (replace(FAILED, kind="early_exit", error=None, code=0), True),
    ],
)
def test_what_may_pass(failure: Failure, passes: bool) -> None:
    assert is_transient(failure) is passes


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_s(number) for number in (1, 2, 3, 6, 1000)] == [1.0, 2.0, 4.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("RuntimeError: can't start new thread", "ulimit -u"),
        ("OSError: [Errno 24] Too many open files: '/data/x'", "ulimit -n"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
         "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.\n"
         "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
         "memory (shm).", "/dev/shm is full"),
        ("RuntimeError: unable to write to file </torch_12_3_0>: No space left on device (28)", "/dev/shm"),
    ],
)  # fmt: skip
def test_an_exhausted_limit_has_a_remedy(words: str, what: str) -> None:
    found = remedy(f"step 3\n{words}\n")
    assert found is not None
    assert what in found


def test_other_words_have_none() -> None:
    assert (
        remedy("ValueError: no shared memory of our first meeting; OSError: No space left on device") is None
    )
    assert "ulimit -u" in start_problem(errno.EAGAIN)
    assert "ulimit -n" in start_problem(errno.EMFILE)
    assert start_problem(errno.EIO) == "EIO"


def test_a_limit_that_is_too_low_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (90, 90))
    check_open_files(2)
    with wording.raises(MachineError):
        check_open_files(16)


def test_a_block_counts_and_rings(tmp_path: Path) -> None:
    make_directory(tmp_path / "control")
    with ControlDir(tmp_path / "control") as control:
        ours, theirs = control.block(3, create=True), control.block(3)
    ours.count_step()
    theirs.ring(7)
    assert (theirs.steps, ours.bell) == (1, 7)
    (state,) = read_states(tmp_path / "control").values()
    assert (state.rank, state.pid, state.steps, state.is_running) == (3, os.getpid(), 1, True)
    assert not replace(state, start_ticks=1).is_running
    (tmp_path / "control" / block_name(4)).write_bytes(b"")  # not complete yet
    assert list(read_states(tmp_path / "control")) == [3]
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o700
    for block in (ours, theirs):
        block.close()
    leave(tmp_path / "control")
    assert not (tmp_path / "control").exists()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_run_belongs_to_one_command(run: RunDir, wording: Wording) -> None:
    with claimed(run):
        with wording.raises(SpecError, hide="(?<=process ).*(?=;)"), claimed(run):
            pass
        with wording.raises(SpecError):
            running_launch(run)
        entered(run, "01-ddp-2")
        assert running_launch(run) == "01-ddp-2"
    assert not run.running.exists()
    with pytest.raises(SpecError, match="is not in progress"):
        running_launch(run)


def claim(**changes: object) -> Running:
    pid = os.getpid()
    me = Running(platform.node(), boot_id(), pid, start_ticks(pid) or 0, pid_namespace())
    return replace(me, **changes)  # type: ignore[arg-type]


def test_a_stale_claim_is_in_no_ones_way(run: RunDir) -> None:
    for stale in (claim(start_ticks=1), claim(boot_id="another"), claim(pid=2**22 + 1)):
        run.running.write_bytes(msgspec.json.encode(stale))
        with claimed(run):
            assert read(run) == claim()


def test_of_another_host_nothing_is_known(run: RunDir, wording: Wording) -> None:
    run.running.write_bytes(msgspec.json.encode(claim(host="elsewhere", launch="01")))
    with pytest.raises(SpecError, match=r"on elsewhere.*\n.*remove .*running.json"), claimed(run):
        pass
    with wording.raises(SpecError):
        running_launch(run)


def test_of_two_commands_one_gets_the_run(run: RunDir) -> None:
    got, barrier = [], threading.Barrier(8, timeout=60)
    run.running.write_bytes(msgspec.json.encode(claim(pid=2**22 + 1)))  # each of them finds a stale one first

    def attempt() -> None:
        barrier.wait()
        try:
            with claimed(run):
                got.append(True)
                barrier.wait()
        except SpecError:
            got.append(False)
            barrier.wait()

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got.count(True) == 1


def test_lines_are_shown_one_look_late_and_the_rest_at_a_good_end(tmp_path: Path, wording: Wording) -> None:
    shown: list[str] = []
    logs = {rank: tmp_path / f"rank{rank}.log" for rank in (0, 1)}
    logs[0].write_text("of an earlier attempt\n")
    relay = Relay(shown.append)
    relay.follow(logs)
    with logs[0].open("a") as file:
        file.write("a\nUSDT:2026-11-24 19:58:01 4021:4038 Profiler.cpp:9] stopped\n")
    logs[1].write_text("b\nunfinished")
    relay.look()
    assert shown == []
    relay.look()
    wording(shown)
    relay.finish()
    assert shown[1:] == ["[rank 1] unfinished"]


def test_200_mb_are_not_read_to_be_shown(tmp_path: Path, wording: Wording) -> None:
    shown: list[str] = []
    relay = Relay(shown.append, only=(1,))
    logs = {rank: tmp_path / f"rank{rank}.log" for rank in (0, 1)}
    relay.follow(logs)
    for log in logs.values():
        log.write_text("x" * 99 + "\n")
        os.truncate(log, 200_000_000)
        with log.open("a") as file:
            file.write("\nlast\n")
    relay.finish()
    text = "\n".join(shown)
    wording(text)
    assert text.endswith("[rank 1] last")
    assert "[rank 0]" not in text
    assert len(text) < MOST_AT_ONCE_BYTES


def test_logs_stay_small_and_keep_the_newest_lines(tmp_path: Path) -> None:
    shown: list[str] = []
    logs = {rank: tmp_path / f"rank{rank}.log" for rank in (0, 1)}
    relay = Relay(shown.append, only=(1,), keep_bytes=4000)
    relay.follow(logs)
    lines = [f"line {number} of the program" for number in range(1000)]
    for begin in range(0, len(lines), 10):
        for log in logs.values():
            with log.open("a") as file:
                file.writelines(f"{line}\n" for line in lines[begin : begin + 10])
        relay.look()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000 + 2 * (len(REMOVED) + 300)
    relay.finish()
    assert "\n".join(shown).splitlines() == [f"[rank 1] {line}" for line in lines]
    for log in logs.values():
        first, *kept = log_lines(log, GIB)
        assert first == REMOVED.decode().strip()
        assert len(kept) > 30
        assert kept == lines[-len(kept) :]
        assert log_tail(log, 500).endswith("\n".join(lines[-9:]) + "\n")


def test_nothing_of_a_log_is_removed_while_it_fits(tmp_path: Path) -> None:
    """Then half of it at most, however much comes between two looks."""
    log = tmp_path / "rank0.log"
    relay = Relay(print, keep_bytes=4000)
    relay.follow({0: log})
    lines = [f"line {number:4} of the program" for number in range(800)]
    for begin, end in ((0, 130), (130, 150), (150, 160), (160, 290), (290, 800)):
        with log.open("a") as file:
            file.writelines(f"{line}\n" for line in lines[begin:end])
        relay.look()
        kept = [line for line in log_lines(log, GIB) if line != REMOVED.decode().strip()]
        assert kept == lines[end - len(kept) : end]
        assert len(kept) >= (end if end < 150 else 75)


def test_a_log_that_cannot_be_rotated_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    (tmp_path / ".rank0.log.part").mkdir()
    relay = Relay(print, keep_bytes=1000)
    relay.follow({0: log})
    log.write_text("a line\n" * 1000)
    relay.look()
    relay.look()
    assert log.read_text() == "a line\n" * 1000


def test_a_bar_is_shown_now_and_then(tmp_path: Path) -> None:
    shown: list[str] = []
    now = 0.0
    relay = Relay(shown.append, clock=lambda: now)
    log = tmp_path / "rank0.log"
    relay.follow({0: log})
    for percent in range(0, 100, 10):
        with log.open("a") as file:
            file.write(f"\r{percent} %")
        now += 1.0
        relay.look()
    relay.look()
    assert shown == ["[rank 0] 0 %", "[rank 0] 50 %"]
