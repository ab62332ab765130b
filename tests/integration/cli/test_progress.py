"""The progress line on a real terminal (a pty), and what a log file gets instead."""

import errno
import io
import os
import pty
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

import pytest
from rich.cells import cell_len

from gpurun.launcher.run.progress_line import Progress, Status, progress_line, share_done
from tests.wording import Wording

HIDE_CURSOR = "\x1b[?25l"
SHOW_CURSOR = "\x1b[?25h"
ERASE_LINE = "\x1b[2K"

ROUND_13 = Status(
    variant="ddp 48/16",
    stage="round",
    round=13,
    rounds=28,
    launch=1,
    launches=3,
    elapsed_s=41.0,
    remaining_s=50.0,
)


class FakeClock:
    """Seconds that pass only when a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, list[bytes]]]:
    """A stream that is a terminal; what was written to it is in the list after the block."""
    monkeypatch.setenv("TERM", "xterm-256color")
    ours, theirs = pty.openpty()
    seen: list[bytes] = []
    with open(theirs, "w", buffering=1) as stream:
        yield stream, seen
    seen.append(read_to_end(ours))
    os.close(ours)


def read_to_end(terminal_fd: int) -> bytes:
    """Everything that a closed terminal was sent; the kernel hands it out in pieces."""
    text = b""
    while True:
        try:
            text += os.read(terminal_fd, 1 << 16)
        except OSError as error:
            if error.errno == errno.EIO:  # the other end is closed
                return text
            raise


def test_one_line_says_variant_round_and_time_left(wording: Wording) -> None:
    line = progress_line(ROUND_13, 100, share_done(ROUND_13)).plain
    assert line.split()[:2] == ["ddp", "48/16"]
    wording(line)
    wording(progress_line(ROUND_13, 80, share_done(ROUND_13)).plain)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_line_never_wraps(width: int) -> None:
    long = replace(ROUND_13, variant="ddp 48/16 params.width=65536 precision=bf16 seed=12345")
    assert cell_len(progress_line(long, width, share_done(long)).plain) < width


def test_what_is_unknown_is_not_shown() -> None:
    status = replace(ROUND_13, variant=None, stage="build", rounds=0, remaining_s=None)
    line = progress_line(status, 80, share_done(status)).plain
    assert "building the model" in line
    assert "left" not in line
    assert "None" not in line


def test_a_terminal_is_redrawn_in_place_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    with terminal(monkeypatch) as (stream, seen), Progress(stream, width=80, clock=clock) as progress:
        progress.update(ROUND_13)
        clock.now_s += 1
        progress.update(replace(ROUND_13, round=14))
    text = seen[0].decode()
    assert "round 13 of 28" in text
    assert "round 14 of 28" in text
    assert text.index(HIDE_CURSOR) < text.index("round 13") < text.index("round 14") < text.index(SHOW_CURSOR)
    assert "round" not in text[text.rindex(ERASE_LINE) :], "nothing stays behind"


def test_a_question_has_the_cursor_until_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    with terminal(monkeypatch) as (stream, seen), Progress(stream, width=80, clock=clock) as progress:
        for doing in (
            lambda: progress.update(replace(ROUND_13, stage="run", round=0)),
            lambda: progress.ask("name? "),
            lambda: progress.update(replace(ROUND_13, stage="run", round=0)),
            lambda: progress.say("hello bob"),
            lambda: progress.update(replace(ROUND_13, stage="run", round=0)),
            lambda: progress.ask("goes on? "),
            lambda: progress.update(replace(ROUND_13, stage="run", round=1)),
        ):
            clock.now_s += 1
            doing()
    text = seen[0].decode()
    order = ("step 0", "name? ", SHOW_CURSOR, "hello bob", "step 0", "goes on? ", SHOW_CURSOR, "step 1")
    places = [0]
    for word in order:
        places.append(text.index(word, places[-1]))
    assert (text.count("name?"), text.count("step 0")) == (1, 2)
    assert text[places[3] : places[4]].count("\n") == 0, "nothing is between the question and the answer"


def test_events_that_come_fast_are_not_all_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    with terminal(monkeypatch) as (stream, seen), Progress(stream, width=80, clock=clock) as progress:
        for round_ in range(1000):
            clock.now_s += 0.001
            progress.update(replace(ROUND_13, round=round_))
    assert 5 <= seen[0].decode().count("round ") <= 12


def test_an_exception_gives_the_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: TextIO) -> None:
        with Progress(stream, width=80) as progress:
            progress.update(ROUND_13)
            raise KeyboardInterrupt

    with terminal(monkeypatch) as (stream, seen), pytest.raises(KeyboardInterrupt):
        interrupted(stream)
    assert seen[0].decode().rindex(SHOW_CURSOR) > seen[0].decode().rindex(HIDE_CURSOR)


def test_a_log_gets_a_line_a_minute_of_a_long_launch(wording: Wording) -> None:
    log, seconds = io.StringIO(), iter(range(0, 1000, 25))
    with Progress(log, clock=lambda: float(next(seconds))) as progress:
        for round_ in range(8):
            progress.update(replace(ROUND_13, round=round_))
    wording(log.getvalue().splitlines())


def test_a_log_gets_one_line_per_launch(wording: Wording) -> None:
    log = io.StringIO()
    with Progress(log) as progress:
        for launch in (1, 2, 3):
            for round_ in range(28):
                progress.update(replace(ROUND_13, launch=launch, round=round_, remaining_s=150.0))
    wording(log.getvalue().splitlines())


def test_a_log_of_many_launches_gets_fewer_lines() -> None:
    log, clock = io.StringIO(), FakeClock()
    with Progress(log, clock=clock) as progress:
        for launch in range(1, 101):
            clock.now_s += 2
            progress.update(replace(ROUND_13, launch=launch, launches=100))
    assert len(log.getvalue().splitlines()) == 10 + 3  # of the 180 s that 90 launches take


@pytest.mark.parametrize("remaining_s", [None, 90.0])
def test_the_bar_is_that_of_the_whole_run(remaining_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It doesn't start again with a launch, nor go back when more time is needed than was thought."""
    clock = FakeClock()
    with terminal(monkeypatch) as (stream, seen), Progress(stream, width=80, clock=clock) as progress:
        for launch in (1, 2, 3):
            for round_ in range(28):
                clock.now_s += 1
                late_s = 60.0 if launch == 3 and round_ == 0 else 0.0
                left_s = None if remaining_s is None else remaining_s - clock.now_s + late_s
                now = replace(
                    ROUND_13, launch=launch, round=round_, elapsed_s=clock.now_s, remaining_s=left_s
                )
                progress.update(now)
    lengths = [text.count("█") for text in re.findall("[█░]*(?:\x1b[^█░]*[█░]+)*", seen[0].decode())]
    shown = [cells for cells in lengths if cells]
    assert shown == sorted(shown)
    assert shown[-1] >= 18
