"""All that a rank writes reaches the stream to which the command passes it on as it is."""

import os
from pathlib import Path

import pytest

from gpurun.launcher.errors import SpecError
from gpurun.launcher.logs.lines import MAX_LINE_BYTES
from gpurun.launcher.logs.relay import MOST_AT_ONCE_BYTES, LogTail, Relay, all_lines
from gpurun.launcher.rundir.files import RunDir

NOISE = b"USDT:2026-11-24 19:58:01 4021:4038 Profiler.cpp:9] stopped\n"


def relay_of(log: Path, keep_bytes: int | None = None, passes_to: int = 1) -> Relay:
    log.touch()
    relay = Relay(lambda text: None, keep_bytes=keep_bytes, as_torchrun=True, passes_to=passes_to)
    relay.follow({0: log})
    return relay


def append(log: Path, written: bytes) -> None:
    with log.open("ab") as file:
        file.write(written)


def test_a_progress_bar_that_goes_on_is_passed_on(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log, seen = tmp_path / "rank0.log", []
    relay = relay_of(log)
    for written in (b"\r 1 %", b"\r 2 %", b"|" + NOISE, b"\r 3 %"):
        append(log, written)
        relay.look()
        seen.append(capfdbinary.readouterr().out)
    assert seen == [b"\r", b" 1 %\r", b" 2 %|", b"\r"]
    append(log, b"ERROR: External init callback must run in same thread as registerClient (-687 != 216)\n")
    relay.finish()
    assert capfdbinary.readouterr().out == b" 3 %\n"  # the report is not a part of its last line


def test_a_line_without_end_is_not_held_back(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "rank0.log"
    relay, endless = relay_of(log), b"x" * (MAX_LINE_BYTES + 1)
    append(log, endless)
    relay.look()
    assert capfdbinary.readouterr().out == endless


MANY = b"".join(b"%08d \x1b[K%s\n" % (number, b"x" * 90) for number in range(MOST_AT_ONCE_BYTES // 20))
LONG = b"y" * (MAX_LINE_BYTES + 1) + b"\n"


def test_a_file_of_stderr_gets_all_of_it(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = tmp_path / "rank0.log"
    relay = relay_of(log, passes_to=2)
    append(log, MANY + LONG)
    relay.look()
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (b"", MANY + LONG)


def test_each_line_of_a_file_that_is_shown_has_its_beginning(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log, shown = tmp_path / "rank0.log", tmp_path / "stdout.log"
    relay = relay_of(log)
    relay.follow({0: log}, more=[LogTail(0, shown, fd=1, beginning="[default0]:")])
    for written in (MANY, LONG[:-1], LONG + b"unfinished", b" line\r", b"\nlast"):
        append(shown, written)
        relay.look()
    relay.finish()
    lines = (MANY + LONG[:-1] + LONG + b"unfinished line\r\nlast\n").splitlines(keepends=True)
    assert capfdbinary.readouterr().out == b"".join(b"[default0]:" + line for line in lines)


def test_what_was_not_passed_on_yet_is_before_a_log_is_cut(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurun.launcher.logs.relay._MOST_PORTIONS", 1)
    log = tmp_path / "rank0.log"
    relay = relay_of(log, keep_bytes=2 * MOST_AT_ONCE_BYTES)
    lines = b"".join(b"%08d %s\n" % (number, b"x" * 90) for number in range(MOST_AT_ONCE_BYTES // 20))
    append(log, lines + b"unfinished")
    relay.look()
    assert os.path.getsize(log) == 0
    append(log, b" line\n")
    relay.look()
    assert capfdbinary.readouterr().out == lines + b"unfinished line\n"


def test_a_program_may_cut_its_log_while_that_is_copied(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*_: object) -> None:
        log.write_bytes(b"begins anew\n")

    monkeypatch.setattr("gpurun.launcher.logs.relay._copy_end", copied)
    log = tmp_path / "rank0.log"
    relay = relay_of(log, keep_bytes=2 * MOST_AT_ONCE_BYTES)
    append(log, MANY)
    relay.look()
    assert capfdbinary.readouterr().out == MANY + b"begins anew\n"


def test_a_launch_is_answered_with_those_that_have_logs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = run.log("01-ddp-2", 0)
    log.parent.mkdir(parents=True)
    for launch in ("99", "01-ddp-2"):
        with pytest.raises(SpecError, match=r"has no logs$"):
            list(all_lines(run, None, launch, colour=False))
    log.write_text("hello\n")
    with pytest.raises(SpecError, match=r"has no launch 99; it has 01-ddp-2$"):
        list(all_lines(run, None, "99", colour=False))
