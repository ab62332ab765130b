"""The progress line of a running job on stderr; it disappears when the job is done."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.cells import set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gpurun.launcher.logs.lines import clean
from gpurun.launcher.units import format_duration

BAR_CELLS = 20
REFRESH_S = 0.1
"""The terminal is updated at most this often."""
LOG_S = 60.0
"""A log gets a line at least this often while rounds are completed."""
LOGGED_LAUNCHES = 10
"""Launches that have a line of a log each; later ones have one where the last is `LOG_S` ago."""
STAGES = {
    "start": "starting",
    "build": "building the model",
    "balance": "measuring the devices",
    "check": "checking gradients",
    "warmup": "warming up",
    "profile": "tracing",
    "memory": "measuring memory",
    "done": "ending",
}


@dataclass(frozen=True)
class Status:
    """The current state of a run."""

    variant: str | None
    """The variant's name in the table: `ddp 48/16`."""
    stage: str
    """The stage of rank 0's last `records.Event`."""
    round: int
    rounds: int
    launch: int
    """Counts from 1."""
    launches: int | None
    """`None`: as many as it takes to decide."""
    elapsed_s: float
    remaining_s: float | None
    """`None` while nothing is known about it; where `launches` is `None`, the most that is left."""
    unit: str = "launch"
    """The unit of the count."""


class Progress:
    """Shows a `Status`; a context manager, which restores the cursor in any case.

    On a terminal one line is redrawn in place. Elsewhere early launches get a line each, then each minute.
    It has no thread: only `update` draws, so it can't affect a timing.
    """

    def __init__(
        self, stream: TextIO, width: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        stream = getattr(stream, "unfiltered", stream)  # only this redraws a line
        self._console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._drawn_at = float("-inf")
        self._asked_in: tuple[str, int] | None = None
        """The stage and round in which a program asks something."""
        self._at = ("", 0)
        self._launch = 0
        self._share = 0.0

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether there is a line that is redrawn."""
        return self._console.is_terminal

    def update(self, status: Status) -> None:
        """Shows `status`, unless something was shown a moment ago."""
        self._at = status.stage, status.round
        if not self._console.is_terminal:
            self._log(status)
        elif self._asked_in == self._at:
            return
        elif self._clock() - self._drawn_at >= REFRESH_S:
            self._drawn_at = self._clock()
            self._share = max(self._share, share_done(status))  # an estimate of the rest may grow
            self._live.update(progress_line(status, self._console.width, self._share), refresh=True)

    def say(self, text: str) -> None:
        """Prints a message above the line, which stays."""
        if self._asked_in is not None:
            self._asked_in = None
            self._live.update(Text(), refresh=True)
        self._console.print(clean(text), soft_wrap=True)

    def ask(self, text: str) -> None:
        """Shows a program's question instead of the line, with the cursor behind it, until it goes on."""
        if not self._console.is_terminal or len(text) >= self._console.width:
            self.say(text)
            return
        self._asked_in = self._at
        self._live.update(Text(clean(text)), refresh=True)
        self._console.show_cursor()

    def _log(self, status: Status) -> None:
        now_s, is_new = self._clock(), status.launch != self._launch
        if (is_new and status.launch <= LOGGED_LAUNCHES) or now_s - self._drawn_at >= LOG_S:
            self._launch, self._drawn_at = status.launch, now_s
            self._console.print(log_line(status, is_new), soft_wrap=True)


def progress_line(status: Status, width: int, share: float) -> Text:
    """`ddp 48/16  ████░░░░  round 13 of 28  50 s left`, on one line of `width` columns; `share` is done."""
    doing = stage_text(status.stage, status.round, status.rounds)
    launch = _launch(status) if status.launches != 1 else ""
    name = set_cell_size(status.variant or "", min(max(len(status.variant or ""), 12), 32))
    head = Text.assemble("  ", name, "  ", _bar(share), "  ")
    tail = "   ".join(part for part in (doing, launch, _left(status)) if part)
    if head.cell_len + len(tail) >= width:
        tail = "   ".join(part for part in (doing, _left(status)) if part)
    line = head.append(tail)
    line.truncate(width - 1, overflow="ellipsis")
    return line


def stage_text(stage: str, round_: int, rounds: int) -> str:
    """A rank's current stage: `round 13 of 28`, `warming up`; of a program that isn't timed yet its step."""
    counted = f"step {round_}" if stage == "run" else f"round {round_} of {rounds}"
    return STAGES.get(stage, counted)


def log_line(status: Status, is_new: bool) -> str:
    """`launch 2 of 3 after 50 s, about 2 min left`; before the first, nothing is known.

    Within a launch, where `is_new` isn't set, also what it does: `launch 2 of 3, round 13 of 28 after 60 s`.
    """
    if status.launch == 1 and is_new:
        return _launch(status)
    about = "about " if status.launches else ""
    left = f", {about}{_left(status)}" if status.remaining_s is not None else ""
    within = "" if is_new else f", {stage_text(status.stage, status.round, status.rounds)}"
    return f"{_launch(status)}{within} after {format_duration(status.elapsed_s)}{left}"


def _launch(status: Status) -> str:
    return f"{status.unit} {status.launch}" + (f" of {status.launches}" if status.launches else "")


def share_done(status: Status) -> float:
    """The share of the whole run that is done: of its time where that is known, else of its launches."""
    if status.remaining_s is not None:
        total_s = status.elapsed_s + status.remaining_s
        return status.elapsed_s / total_s if total_s else 1.0
    within = min(1.0, status.round / status.rounds) if status.rounds else 0.0
    return min(1.0, (status.launch - 1 + within) / status.launches) if status.launches else 0.0


def _bar(share: float) -> Text:
    done = round(BAR_CELLS * min(share, 1.0))
    return Text.assemble(("█" * done, "blue"), ("░" * (BAR_CELLS - done), "bright_black"))


def _left(status: Status) -> str:
    at_most = "" if status.launches else "at most "
    return "" if status.remaining_s is None else f"{at_most}{format_duration(status.remaining_s)} left"
