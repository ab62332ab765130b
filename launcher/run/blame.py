"""Which rank is to blame for the end of a launch, and why: pure, from exits and the ranks' own accounts.

One rank's failure makes the others fail: their peer is gone, or the command stops them. The cause is the
earliest failure that is neither.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.records import FailureRecord

_ADDRESS_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_REAP_DELAY_NS = 500_000_000
"""A killed process closes its sockets before its parent learns of its death; a GPU's memory is freed between.

Signals that nothing but the rank's own fault or the outside world causes count this much earlier. SIGABRT is
none of them: NCCL's watchdog aborts a rank whose peer is gone.
"""


@dataclass(frozen=True)
class Exit:
    """How one rank's process ended."""

    rank: int
    pid: int
    returncode: int
    """Exit code, or minus the signal's number."""
    time_ns: int
    """`time.time_ns()` when it was reaped; comparable on one host only."""
    signals_sent: tuple[int, ...] = ()
    """Signals that the command itself had sent it."""
    oom_killed: bool = False
    """The kernel ended it because memory ran out."""

    @property
    def stopped(self) -> bool:
        """It ended by a signal of ours."""
        return -self.returncode in self.signals_sent


@dataclass(frozen=True)
class Failure:
    """The cause of a launch's end, and what followed from it."""

    rank: int
    variant: str | None
    """What the rank was busy with, if it could still say so."""
    kind: Literal["exception", "oom", "exit", "user", "signal", "early_exit"]
    status: str
    """In plain words: `killed by SIGKILL`, `exit code 3`, `raised ValueError`."""
    message: str
    """The exception's own words; empty where there are none."""
    traceback: str
    stage: str | None
    victims: tuple[int, ...]
    """Ranks that ended only because of it."""
    secondary: bool
    """No cause was found: even this rank only lost its peer."""

    @property
    def headline(self) -> str:
        """One line: `rank 1 raised ValueError: …`."""
        first = self.message.strip().splitlines()[:1]
        return f"rank {self.rank} {self.status}" + (f": {first[0]}" if first else "")


@dataclass(frozen=True)
class _Suspect:
    rank: int
    tier: int
    """0: a cause of its own; 1: left early while the others waited; 2: only lost its peer."""
    time_ns: int
    exit: Exit | None
    record: FailureRecord | None


def root_cause(exits: Sequence[Exit], records: Sequence[FailureRecord], stopped_at_ns: int | None) -> Failure:
    """The failure that all others follow from.

    Args:
        exits: all ranks' ends, those included that were stopped or ended well.
        records: what the ranks themselves wrote down.
        stopped_at_ns: when the command began to stop the launch (`time.time_ns()`); `None`: it didn't.

    Raises:
        ValueError: there is nothing to explain: no exit and no record.
    """
    by_rank = {record.rank: record for record in records}
    ended = {exit_.rank: exit_ for exit_ in exits}
    ranks = sorted(by_rank.keys() | ended.keys())
    if not ranks:
        raise ValueError("no rank has ended")
    suspects = [_suspect(rank, ended.get(rank), by_rank.get(rank), stopped_at_ns) for rank in ranks]
    culprit = min(suspects, key=lambda suspect: (suspect.tier, suspect.time_ns))
    victims = tuple(s.rank for s in suspects if s is not culprit and not _ended_well(s.exit))
    return _failure(culprit, victims)


def explain(failure: Failure, log_tail: str, log_path: str, num_lines: int = 20) -> str:
    """What happened, where, and where to read on.

    Args:
        log_tail: the end of the rank's log; its last lines are shown where they say more than the traceback.
    """
    parts = [_what_happened(failure)]
    if failure.traceback:
        parts.append(_indent(failure.traceback))
    said = _without(log_tail, failure.traceback, failure.message).rstrip().splitlines()[-num_lines:]
    if said:
        parts.append(f"the last lines of its log:\n{_indent(chr(10).join(said))}")
    if failure.victims:
        parts.append(f"because of that: {_ranks(failure.victims)} could not go on")
    parts.append(f"log: {log_path}")
    return "\n".join(parts)


def status_text(returncode: int) -> str:
    """`exit code 3`, `killed by SIGSEGV`."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _suspect(
    rank: int, exit_: Exit | None, record: FailureRecord | None, stopped_at_ns: int | None
) -> _Suspect:
    times = [record.time_ns] if record else []
    times += [_death_ns(exit_)] if exit_ else []
    time_ns = min(times)
    return _Suspect(rank, _tier(exit_, record, time_ns, stopped_at_ns), time_ns, exit_, record)


def _death_ns(exit_: Exit) -> int:
    own_fault = -exit_.returncode in _ADDRESS_SIGNALS and not exit_.stopped
    return exit_.time_ns - (_REAP_DELAY_NS if own_fault else 0)


def _tier(exit_: Exit | None, record: FailureRecord | None, time_ns: int, stopped_at_ns: int | None) -> int:
    late = stopped_at_ns is not None and time_ns >= stopped_at_ns
    if record is not None:
        return 2 if record.secondary or late else 0
    if exit_ is None or exit_.stopped:
        return 3
    if exit_.returncode == 0:
        return 3 if late else 1
    return 3 if late and exit_.returncode > 0 else 0


def _ended_well(exit_: Exit | None) -> bool:
    return exit_ is not None and exit_.returncode == 0


def _failure(culprit: _Suspect, victims: tuple[int, ...]) -> Failure:
    record, exit_ = culprit.record, culprit.exit
    hard = exit_ is not None and exit_.returncode < 0 and not exit_.stopped
    if record is None or (hard and record.secondary):
        assert exit_ is not None
        return _silent_failure(culprit, exit_, record, victims)
    return Failure(
        rank=culprit.rank,
        variant=record.variant,
        kind=record.kind,
        status=_record_status(record),
        message=record.message,
        traceback=record.traceback,
        stage=record.stage,
        victims=victims,
        secondary=culprit.tier >= 2,
    )


def _silent_failure(
    culprit: _Suspect, exit_: Exit, record: FailureRecord | None, victims: tuple[int, ...]
) -> Failure:
    """A rank that could not say why it ended."""
    early = exit_.returncode == 0
    kind: Literal["early_exit", "oom", "signal", "exit"] = "exit"
    message = ""
    if early:
        kind, message = "early_exit", f"{_ranks(victims)} still waited for it" if victims else ""
    elif exit_.oom_killed:
        kind, message = "oom", "the kernel's OOM killer ended it: the machine or its cgroup ran out of memory"
    elif exit_.returncode < 0:
        kind = "signal"
    return Failure(
        rank=culprit.rank,
        variant=record.variant if record else None,
        kind=kind,
        status=status_text(exit_.returncode),
        message=message,
        traceback="",
        stage=record.stage if record else None,
        victims=victims,
        secondary=culprit.tier >= 2,
    )


def _record_status(record: FailureRecord) -> str:
    if record.kind == "oom":
        return "ran out of memory"
    if record.kind == "exit":
        return "ended by itself"
    if record.kind == "user":
        return "found a mistake in the workload"
    return f"raised {record.type}"


def _what_happened(failure: Failure) -> str:
    where = f" during {failure.stage}" if failure.stage else ""
    where += f" of {failure.variant}" if failure.variant and failure.stage else ""
    text = failure.headline + (f"\n    it happened{where}" if where else "")
    if not failure.traceback:
        text += "".join(f"\n    {line.strip()}" for line in failure.message.strip().splitlines()[1:])
    if failure.secondary:
        text += "\n    it only lost its peers; no rank left word of the cause"
    return text


def _without(log_tail: str, traceback: str, message: str) -> str:
    """The log without what is shown above it already: the traceback, or the message of a user's mistake."""
    shown = (traceback or message).strip()
    return log_tail.replace(shown, "") if shown else log_tail


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
