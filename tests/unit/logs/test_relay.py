"""All that a rank writes reaches stdout, where the command passes it on as it is."""

import os
from pathlib import Path

import pytest

from gpurun.launcher.logs.lines import MAX_LINE_BYTES
from gpurun.launcher.logs.relay import MOST_AT_ONCE_BYTES, Relay

NOISE = b"USDT:2026-11-24 19:58:01 4021:4038 Profiler.cpp:9] stopped\n"


def relay_of(log: Path, keep_bytes: int | None = None) -> Relay:
    log.touch()
    relay = Relay(lambda text: None, keep_bytes=keep_bytes, as_torchrun=True, as_it_is=True)
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
    relay.finish()
    assert capfdbinary.readouterr().out == b" 3 %"


def test_a_line_without_end_is_not_held_back(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "rank0.log"
    relay, endless = relay_of(log), b"x" * (MAX_LINE_BYTES + 1)
    append(log, endless)
    relay.look()
    assert capfdbinary.readouterr().out == endless


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
