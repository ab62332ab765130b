"""The output of ranks, line by line, from their logs: shown while a job runs, and read for `gpurun logs`.

Ranks write to their logs directly, without a pipe: they never wait for a reader, and nothing is lost when
they die. The relay follows the logs, and keeps them from filling the disk.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from gpurun.launcher.errors import MachineError, SpecError, unreadable
from gpurun.launcher.logs.lines import MAX_LINE_BYTES, LineReader, NeedlessLines, prefixed
from gpurun.launcher.rundir.claim import live_claim
from gpurun.launcher.rundir.files import RunDir, open_regular
from gpurun.launcher.rundir.paths import num_bytes, older_part, rank_files
from gpurun.launcher.units import GIB, format_number

MOST_AT_ONCE_BYTES = 1 << 18
"""The most that is shown of one rank at a time; of more, only the end is shown."""
SHOWN_BYTES = 1 << 16
STDOUT_FD, STDERR_FD = 1, 2
REMOVED = b"gpurun: the output before this was removed; a larger `keep` under `logs:` in the job keeps more\n"
_MOST_PORTIONS = 64
"""The most portions of a log that are read at a time."""
BAR_EVERY_S = 5.0
"""How often a moving progress bar is shown."""


@dataclass
class LogTail:
    """Follows one log."""

    rank: int
    path: Path
    offset: int = 0
    reader: LineReader = field(default_factory=LineReader)
    within: Sequence[Path] = ()
    """The directories that the log has to be in; see `RunDir`."""
    fd: int | None = None
    """The descriptor that gets its bytes as they are, but for needless lines; `None`: its lines are shown."""
    beginning: str = ""
    """The text before each line, where the command replaces torchrun."""
    needless: NeedlessLines = field(default_factory=NeedlessLines)
    """Finds the lines that aren't passed on."""
    rest: bytes = b""
    """The beginning of a line that hasn't been passed on yet."""
    is_within: bool = False
    """Whether a line has been passed on without its end."""
    ends_line: bool = True
    """Whether what was passed on ends with a line."""
    asked: int = 0
    """The offset behind the last line that was shown without its end."""
    prompt: str = ""
    """The part of it that was shown."""

    def portion(self, most_bytes: float = math.inf) -> tuple[bytes, int]:
        """The next portion of what was written since the last call, and how much before it is left out.

        Args:
            most_bytes: of more than that, all but the end are.
        """
        try:
            with open_regular(self.path, self.within) as file:
                size = file.seek(0, 2)
                start = self.offset if self.offset <= size else 0  # it was rotated
                left_out = size - start - SHOWN_BYTES if size - start > most_bytes else 0
                file.seek(start + left_out)
                portion = file.read(MOST_AT_ONCE_BYTES)
        except OSError:
            return b"", 0
        self.offset = start + left_out + len(portion)
        return portion, left_out

    def read(self) -> list[str]:
        """Lines written since the last call; of too many, only the last ones, with a note.

        Of the first line only what hasn't been shown as a prompt.
        """
        portion, left_out = self.portion(MOST_AT_ONCE_BYTES)
        lines = self.reader.feed(portion)
        if left_out:
            lines = [not_shown(left_out, self.path), *lines[1:]]
        if lines and self.prompt:
            rest, self.prompt = lines[0].removeprefix(self.prompt), ""
            lines[:1] = [rest] if rest else []
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
    keep_bytes: int | None = None
    """The most that all logs may take together; `None`: they are someone else's, and only read."""
    clock: Callable[[], float] = time.monotonic
    within: Sequence[Path] = ()
    """The directories that logs have to be in; see `RunDir`."""
    as_torchrun: bool = False
    """Whether the command replaces torchrun: all lines are shown, also those of ranks that end since another
    one has failed, without the rank's number; and a failed launch starts again whatever has failed."""
    ask: Callable[[str], None] | None = None
    """Called with the beginning of a line at which a rank waits that reads a terminal; `None`: none does."""
    passes_to: int | None = None
    """The descriptor that gets what ranks write to their logs, as `LogTail` has it."""
    only_local: Collection[int] | None = None
    """The local ranks to show, counted from 0 on each node; `None`: all."""
    _tails: list[LogTail] = field(default_factory=list)
    _held: list[str] = field(default_factory=list)
    _question: str = ""
    """It comes after what is held."""
    _bars: dict[int, tuple[float, str]] = field(default_factory=dict)
    _logs: set[Path] = field(default_factory=set)
    """The logs that are followed, whether or not they are shown."""
    _full: set[Path] = field(default_factory=set)
    """Logs that can't be rotated, since the disk is full or can't be written."""

    def follow(
        self, logs: Mapping[int, Path], from_start: bool = False, more: Sequence[LogTail] = ()
    ) -> None:
        """Follows these logs from now on; their present content is not shown, unless `from_start`.

        Args:
            more: other files of these ranks.
        """
        self._pass_on(is_last=True)
        self._held, self._question, self._bars, self._tails = [], "", {}, []
        passed_on = {tail.path for tail in more if not tail.beginning}
        self._logs, self._full = {*logs.values(), *passed_on}, set()
        shown = [
            rank
            for local_rank, rank in enumerate(sorted(logs))
            if (self.only is None or rank in self.only)
            and (self.only_local is None or local_rank in self.only_local)
        ]
        for rank, path in logs.items():
            if rank in shown:
                self._tails.append(self._tail(rank, path, 0 if from_start else num_bytes(path)))
        self._tails += [tail for tail in more if tail.rank in shown]

    def add(self, logs: Mapping[int, Path]) -> None:
        """Follows these logs too, from their start, if they are new."""
        known = {tail.rank for tail in self._tails}
        self._tails += [self._tail(rank, path) for rank, path in logs.items() if rank not in known]

    def _tail(self, rank: int, path: Path, offset: int = 0) -> LogTail:
        return LogTail(rank, path, offset, within=self.within, fd=self.passes_to)

    def look(self) -> None:
        """Shows the lines that were held back, and reads the next ones."""
        self._show_held()
        self._pass_on()
        for tail in self._tails:
            if tail.fd is not None:
                continue
            before = tail.offset
            self._held += [self._line(tail, line) for line in tail.read()]
            self._show_bar(tail)
            if self.ask and tail.asked != before == tail.offset and (prompt := tail.reader.unfinished):
                tail.asked = before
                self._question = self._line(tail, prompt.removeprefix(tail.prompt))
                tail.prompt = prompt
        if self.keep_bytes is not None:
            self._rotate(self.keep_bytes)

    def _pass_on(self, is_last: bool = False) -> None:
        """Copies what ranks have written, also the beginning of a line that doesn't go on."""
        for tail in _passed_on(self._tails):
            has_grown = _pass_lines_on(tail, None if is_last else _MOST_PORTIONS)
            if is_last or not (has_grown or tail.beginning):
                _write(tail, tail.rest)
                tail.rest = b""

    def _rotate(self, keep_bytes: int) -> None:
        share_bytes = keep_bytes // max(len(self._logs), 1)
        for log in self._logs - self._full:
            if num_bytes(log) + num_bytes(older_part(log)) <= share_bytes:
                continue
            tails = [tail for tail in self._tails if tail.path == log]
            if not rotate(log, share_bytes // 2, partial(_catch_up, _passed_on(tails))):
                self._full.add(log)
                continue
            for tail in tails:
                tail.offset = 0

    def finish(self) -> None:
        """Shows the rest, after ranks have ended well."""
        self.look()
        self._show_held()
        self._pass_on(is_last=True)
        unended = [tail for tail in self._tails if tail.fd == self.passes_to and not tail.ends_line]
        if unended:
            _write(replace(unended[-1], beginning=""), b"\n")  # the report begins with a line of its own
        for tail in self._tails:
            if rest := [self._line(tail, line) for line in tail.reader.finish()]:
                self.say("\n".join(rest))

    def _line(self, tail: LogTail, text: str) -> str:
        """A line as it is shown."""
        return tail.beginning + text if self.as_torchrun else prefixed(tail.rank, text, self.colour)

    def _show_held(self) -> None:
        if self._held:
            self.say("\n".join(self._held))
        if self._question and self.ask:
            self.ask(self._question)
        self._held, self._question = [], ""

    def _show_bar(self, tail: LogTail) -> None:
        shown_s, shown = self._bars.get(tail.rank, (float("-inf"), ""))
        bar = tail.reader.bar
        if bar is None or bar == shown or self.clock() - shown_s < BAR_EVERY_S:
            return
        self._bars[tail.rank] = (self.clock(), bar)
        self._held.append(self._line(tail, bar))


def _passed_on(tails: Iterable[LogTail]) -> list[LogTail]:
    return [tail for tail in tails if tail.fd is not None]


def _pass_lines_on(tail: LogTail, most_portions: int | None) -> bool:
    """Copies complete lines and states of a progress bar; whether the log has grown."""
    has_grown = False
    for portion in islice(iter(lambda: tail.portion()[0], b""), most_portions):
        has_grown, text = True, tail.rest + portion
        end = 1 + max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1))  # a \n may follow the last \r
        end = end if len(text) - end <= MAX_LINE_BYTES else len(text)
        _write(tail, text[:end])
        tail.rest = text[end:]
    return has_grown


def _catch_up(tails: Iterable[LogTail]) -> None:
    """Copies what is in the logs, unless the program cut them; of what it writes meanwhile, as much again."""
    for tail in tails:
        unread_bytes = max(0, num_bytes(tail.path) - tail.offset)
        _pass_lines_on(tail, 2 + 2 * unread_bytes // MOST_AT_ONCE_BYTES)


def _write(tail: LogTail, portion: bytes) -> None:
    """Passes on a portion; nothing more once its reader is gone."""
    left = tail.needless.without(portion)
    tail.ends_line = left.endswith(b"\n") if left else tail.ends_line
    if left and tail.beginning:
        is_within, tail.is_within = tail.is_within, not left.endswith((b"\n", b"\r"))
        lines = b"".join(tail.beginning.encode() + line for line in left.splitlines(keepends=True))
        left = lines.removeprefix(tail.beginning.encode()) if is_within else lines
    with suppress(OSError):
        while left and tail.fd is not None:
            left = left[os.write(tail.fd, left) :]


def rotate(log: Path, keep_bytes: int, before: Callable[[], None] = lambda: None) -> bool:
    """Moves the newest output to the older part of a log, and empties it; whether it could.

    A rank has it open, and appends, so that it can't be renamed. What the rank writes between the copy and
    the truncation is lost, as with `copytruncate` of logrotate. `before` is called before each of the two.
    """
    older, draft = older_part(log), log.with_name(f".{log.name}.part")
    before()
    try:
        with draft.open("wb") as copy:
            copy.write(REMOVED)
            _copy_end((older, log), copy, keep_bytes)
        draft.replace(older)
        before()
        os.truncate(log, 0)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        return False
    return True


def _copy_end(parts: Sequence[Path], copy: BinaryIO, most_bytes: int) -> None:
    """Copies the last bytes of some files, from the start of a line on, and what is written meanwhile."""
    left_out = max(0, sum(map(num_bytes, parts)) - most_bytes)
    room_bytes = 2 * most_bytes  # a rank may write faster than it is copied
    for part, start in _ends(parts, left_out):
        with open_regular(part) as file:
            _seek_line(file, start)
            room_bytes -= _copy(file, copy, room_bytes)


def _copy(source: BinaryIO, target: BinaryIO, most_bytes: int) -> int:
    """Copies up to the end, or so much; the number of bytes."""
    copied = 0
    while portion := source.read(min(MOST_AT_ONCE_BYTES, most_bytes - copied)):
        copied += target.write(portion)
    return copied


PRINTED_BYTES = GIB
"""The most that `gpurun logs` prints, in equal shares for all ranks: as much as is kept by default."""
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


def all_lines(run: RunDir, rank: int | None, launch: str | None, colour: bool) -> Iterator[str]:
    """The output of one launch's ranks so far, rank by rank; of too much, the end of each.

    Raises:
        SpecError: there is no such log.
    """
    launch = launch or newest_launch(run)
    logs = logs_of(run, launch, rank) if launch else {}
    if launch is None or not logs:
        raise SpecError(_no_log(run, launch, rank))
    files = [(number, path) for number, log in logs.items() for path in (log, *streams_beside(log, number))]
    for number, path in files:
        for line in log_lines(path, PRINTED_BYTES // len(files), run.within):
            yield prefixed(number, line, colour)


def log_lines(path: Path, most_bytes: int, within: Sequence[Path] = ()) -> Iterator[str]:
    """The last lines of one log and of its older part, read in portions: the log may be larger than memory.

    Raises:
        MachineError: it can't be read.
    """
    reader, parts = LineReader(), parts_of(path)
    left_out = max(0, sum(map(num_bytes, parts)) - most_bytes)
    if left_out:
        yield not_shown(left_out, path)
    try:
        for part, start in _ends(parts, left_out):
            with open_regular(part, within) as file:
                _seek_line(file, start)
                while portion := file.read(_CHUNK_BYTES):
                    yield from reader.feed(portion)
    except OSError as error:
        raise MachineError(unreadable(path, error)) from error
    yield from reader.finish()


def not_shown(num_bytes: int, path: Path) -> str:
    return f"… {format_number(num_bytes / 1e6, 1)} MB are not shown; see {path}"


def _ends(parts: Sequence[Path], left_out: int) -> Iterator[tuple[Path, int]]:
    """The byte to begin at in each of these files, if so many bytes of them are left out."""
    for part in parts:
        size = num_bytes(part)
        if left_out <= size:
            yield part, left_out
        left_out = max(0, left_out - size)


def _seek_line(file: BinaryIO, start: int) -> None:
    """Seeks the first line that begins at `start` or later."""
    file.seek(start)
    if start:
        file.readline(MAX_LINE_BYTES)  # the rest of a line


def parts_of(log: Path) -> list[Path]:
    """The files of a log, from the oldest on."""
    older = older_part(log)
    return [older, log] if older.exists() else [log]


def newest_lines(run: RunDir, rank: int | None, colour: bool) -> Iterator[str]:
    """The ranks' output from now on, as it comes, until the run is no longer in progress."""
    found: list[str] = []
    relay = Relay(found.append, None if rank is None else (rank,), colour, within=run.within)
    launch: str | None = None
    while True:
        alive = live_claim(run) is not None
        newest = newest_launch(run)
        if newest is not None and newest != launch:
            relay.finish()
            from_start = launch is not None
            launch = newest
            relay.follow(logs_of(run, launch, rank), from_start)
        elif launch is not None:
            relay.add(logs_of(run, launch, rank))
        relay.look()
        if not alive:
            relay.finish()
        yield from found
        found.clear()
        if not alive:
            return
        time.sleep(_POLL_S)


def newest_launch(run: RunDir) -> str | None:
    """The launch whose ranks were the last to begin writing."""
    logs = run.path.glob("launches/*/log")
    newest = max(logs, key=lambda log: log.stat().st_ctime_ns, default=None)
    return newest.parent.name if newest else None


def logs_of(run: RunDir, launch: str, rank: int | None) -> dict[int, Path]:
    """The logs of a launch by rank."""
    found = rank_files(run.launch(launch) / "log", ".log")
    return {number: file for number, file in found.items() if rank is None or number == rank}


def streams_beside(log: Path, rank: int) -> list[Path]:
    """The files that `--tee` or `--redirects` of torchrun had a rank write besides its log."""
    return sorted(log.parent.glob(f"*/attempt_*/{rank}/std*.log"))


def _no_log(run: RunDir, launch: str | None, rank: int | None) -> str:
    names = sorted({log.parents[1].name for log in run.path.glob("launches/*/log/rank*.log")})
    if launch is None or not names:
        return f"{run.path}{': no rank has written anything yet' if live_claim(run) else ' has no logs'}"
    ranks = logs_of(run, launch, None)
    if rank is not None and ranks:
        return f"{launch} has no log of rank {rank}; it has those of {', '.join(map(str, ranks))}"
    return f"{run.path} has no launch {launch}; it has {', '.join(names)}"
