"""Reports the failures and hangs of a run: to the user, and as a record in the run directory."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.errors import CTRL_C, Interrupted, MachineError, SpecError
from gpurun.launcher.failures.root_cause import (
    NUM_LINES,
    REFUSED_ARGUMENTS,
    Failure,
    explain,
    last_lines,
    what_to_do,
    with_crash,
)
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.logs.lines import plain
from gpurun.launcher.machine.resource_limits import remedy
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.paths import older_part
from gpurun.launcher.rundir.records import Restart, Stall
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.units import format_duration

LOG_TAIL_BYTES = 1 << 16
"""How much of a rank's log is read: more than the longest traceback, that of an infinite recursion."""

CANT_WRITE = "the disk is full or the directory is not writable"


@dataclass
class Reporter:
    """Reports what goes wrong in one run."""

    run: RunDir
    say: Callable[[str], None]
    """Called with the explanation of a failure as soon as it is known."""
    hide: Callable[[str], str] = str
    """Puts masks in place of secrets."""
    messages: list[str] = field(default_factory=list)
    """All that has been reported."""
    explained: dict[tuple[str | None, str, str], str] = field(default_factory=dict)
    """The first attempt that failed with this exception, by its type, message and traceback."""

    def report(self, text: str) -> None:
        """Reports a message."""
        text = self.hide(plain(text))  # it quotes what programs wrote
        self.messages.append(text)
        self.say(text)

    def report_failure(
        self, failure: Failure, attempt: str, host: str, place: str = "", num_lines: int = NUM_LINES
    ) -> Failure:
        """Reports a failure on `host`, and returns it with what the rank's log adds to it.

        Args:
            place: how the text names the host, `node 1 (hostb)`; where there is one alone, it doesn't.
            num_lines: of the rank's log, at most, that the report shows.
        """
        path = self.run.log(attempt, failure.rank)
        log = log_tail(path)
        failure = with_crash(failure, log)
        key = (failure.error, failure.message, failure.traceback)
        known = self.explained.setdefault(key, attempt) if failure.kind in ("exception", "user") else attempt
        if known == attempt:
            self.report(explain(failure, log, str(path), num_lines, place))
        else:
            self.report(f"{attempt}: {failure.headline}: the same as in {known}\nlog: {path}")
        record = replace(
            failure,
            time_ns=time.time_ns(),
            host=host,
            log=str(path.relative_to(self.run.path)),
            last_lines=tuple(last_lines(log, failure)),
            hint=what_to_do(failure, log),
        )
        self.write(self.run.root_cause(attempt), record)
        return failure

    def refused_arguments(self, failure: Failure, attempt: str, what: str) -> SpecError | None:
        """The mistake in a program's arguments, in the program's own words; `None` if it failed otherwise.

        Args:
            what: the variant that has these arguments, in words.
        """
        path = self.run.log(attempt, failure.rank)
        ended = f"{failure.error}: {failure.message}\n{plain(log_tail(path))}"
        found = re.match(REFUSED_ARGUMENTS, ended, re.MULTILINE)
        if found is None:
            return None
        said = [line for line in last_lines(found["said"], failure) if line.strip()]
        lines = [f"the program refused its arguments, with {what}", *said, f"log: {path}"]
        return SpecError(self.hide("\n    ".join(lines)))

    def report_hang(self, hang: Hang, attempt: str, what: str, goes_on: bool = False) -> None:
        """Reports which rank the others wait for, as far as it can be seen.

        Args:
            hang: what the ranks do.
            attempt: of which launch.
            what: which limit was exceeded: `ddp-2-6-2: took longer than 5 s`.
            goes_on: whether the launch isn't ended; that is a line of `stalls.jsonl`.
        """
        log = self.run.log(attempt, hang.rank or 0)
        # Than what each rank was doing; of two ranks that is clear at once.
        says_more = hang.rank is None or (hang.missing and len(hang.details) > 2)
        first = f"{what}; the run goes on" if goes_on else what
        lines = [first, *([hang.headline] if hang.headline and says_more else []), *hang.details]
        self.report("\n    ".join(lines) + f"\nstacks of all ranks: {self.run.hang(attempt)}\nlog: {log}")
        self.write(self.run.hang(attempt), hang)
        if goes_on:
            reason = self.hide(": ".join(filter(None, (what, hang.headline))))
            append_lines(self.run.stalls, [Stall(time.time_ns(), attempt, reason)])

    def report_restart(self, record: Restart, text: str) -> None:
        """Counts a restart, and says that it comes."""
        append_lines(self.run.restarts, [record])
        self.report(text)

    def write(self, path: Path, record: object) -> None:
        """Keeps a record; a full disk must not hide the message."""
        try:
            write_json(path, self._hidden(msgspec.to_builtins(record)))
        except MachineError as error:
            self.say(str(error))

    def _hidden(self, value: Any) -> Any:
        """Plain data with masks in its texts; JSON may spell a secret in another way."""
        match value:
            case str():
                return self.hide(value)
            case dict():
                return {key: self._hidden(item) for key, item in value.items()}
            case list() | tuple():
                return [self._hidden(item) for item in value]
        return value


def log_tail(path: Path, num_bytes: int = LOG_TAIL_BYTES) -> str:
    """The last part of a log, decoded whatever bytes it contains."""
    newest = _last_bytes(path, num_bytes)
    before = _last_bytes(older_part(path), num_bytes - len(newest))  # it may just have been rotated
    return (before + newest).decode("utf-8", "replace")


def _last_bytes(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read()
    except OSError:
        return b""


def full_disk(run: RunDir, attempt: str, rank: int, host: str | None) -> MachineError:
    """A rank that can't write its results ends the whole run, not only its variant."""
    where = f" on {host}" if host else ""
    said = log_tail(run.log(attempt, rank)).rstrip()
    limit, parent = remedy(said), RunDir(run.path.parent)
    whole = parent if run.path == parent.screening else run
    why = plain(said).splitlines()[-1] if limit else f"can't write to {run.path}: {CANT_WRITE}"
    return MachineError(
        f"the workers{where} {why}\n"
        f"    {limit or 'free some space'}, then continue: {whole.command} --resume {source_of(whole.path)}\n"
        f"    log: {run.log(attempt, rank)}"
    )


def stopping_text(interruption: Interrupted, grace_s: float, may_save: bool = False) -> str:
    """The message for a person who waits for the ranks to end.

    Args:
        interruption: what ends the run.
        grace_s: how long ranks may take.
        may_save: whether they run a program, which may have something to save.
    """
    hurry = "another Ctrl-C" if interruption.cause == CTRL_C else "Ctrl-C (SIGINT)"
    limit = format_duration(grace_s)
    doing = "the ranks end and may save" if may_save else "stopping the ranks"
    if may_save and interruption.cause == CTRL_C:
        doing += f"; they get SIGTERM after {format_duration(grace_s / 2)}"
    return f"{interruption.cause}: {doing}; they are killed after {limit}; {hurry} kills them at once"
