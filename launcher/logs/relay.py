"""Shows the output of ranks, line by line, from their logs.

Ranks write to their logs directly, without a pipe: they never wait for a reader, and nothing is lost when
they die. The relay follows the logs.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpurun.launcher.logs.lines import NOISE, LineReader, prefixed
from gpurun.launcher.rundir.files import num_bytes, open_regular
from gpurun.launcher.units import format_number

MOST_AT_ONCE_BYTES = 1 << 18
"""The most that is shown of one rank at a time; of more, only the end is shown."""
SHOWN_BYTES = 1 << 16
BAR_EVERY_S = 5.0
"""How often a moving progress bar is shown."""


@dataclass
class LogTail:
    """Follows one log."""

    rank: int
    path: Path
    offset: int = 0
    reader: LineReader = field(default_factory=LineReader)

    def read(self) -> list[str]:
        """Lines written since the last call; of too many, only the last ones, with a note."""
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, 2)
                left_out = max(0, size - self.offset - SHOWN_BYTES)
                left_out = left_out if size - self.offset > MOST_AT_ONCE_BYTES else 0
                file.seek(self.offset + left_out)
                portion = file.read(MOST_AT_ONCE_BYTES)
        except OSError:
            return []
        self.offset += left_out + len(portion)
        lines = [line for line in self.reader.feed(portion) if not line.startswith(NOISE)]
        if left_out:
            note = f"… {format_number(left_out / 1e6, 1)} MB are not shown; see {self.path}"
            lines = [note, *lines[1:]]
        return lines


@dataclass
class Relay:
    """Shows the lines of all ranks, one call late.

    The newest lines of a rank are held back until the next call: if the rank fails, the explanation of the
    failure shows them, and the other ranks' messages about their lost peer need not be shown.
    """

    say: Callable[[str], None]
    only: Collection[int] | None = None
    """Ranks to show; `None`: all."""
    colour: bool = False
    clock: Callable[[], float] = time.monotonic
    _tails: list[LogTail] = field(default_factory=list)
    _held: list[str] = field(default_factory=list)
    _bars: dict[int, tuple[float, str]] = field(default_factory=dict)

    def follow(self, logs: Mapping[int, Path], from_start: bool = False) -> None:
        """Follows these logs from now on; their present content is not shown, unless `from_start`."""
        self._held, self._bars, self._tails = [], {}, []
        for rank, path in logs.items():
            if self.only is None or rank in self.only:
                self._tails.append(LogTail(rank, path, 0 if from_start else num_bytes(path)))

    def add(self, logs: Mapping[int, Path]) -> None:
        """Follows these logs too, from their start, if they are new."""
        known = {tail.rank for tail in self._tails}
        self._tails += [LogTail(rank, path) for rank, path in logs.items() if rank not in known]

    def look(self) -> None:
        """Shows the lines that were held back, and reads the next ones."""
        self._show_held()
        for tail in self._tails:
            self._held += [prefixed(tail.rank, line, self.colour) for line in tail.read()]
            self._show_bar(tail)

    def finish(self) -> None:
        """Shows the rest, after ranks have ended well."""
        self.look()
        self._show_held()
        for tail in self._tails:
            for line in tail.reader.finish():
                self.say(prefixed(tail.rank, line, self.colour))

    def _show_held(self) -> None:
        if self._held:
            self.say("\n".join(self._held))
        self._held = []

    def _show_bar(self, tail: LogTail) -> None:
        shown_s, shown = self._bars.get(tail.rank, (float("-inf"), ""))
        bar = tail.reader.bar
        if bar is None or bar == shown or self.clock() - shown_s < BAR_EVERY_S:
            return
        self._bars[tail.rank] = (self.clock(), bar)
        self._held.append(prefixed(tail.rank, bar, self.colour))
