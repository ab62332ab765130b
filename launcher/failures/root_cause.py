"""The root cause of a failed launch: which rank failed first, why, and what to do about it.

Pure, from exits, failure records and what ranks wrote. One rank's failure makes the others fail: they lose
their peer, or the command stops them. The root cause is the earliest failure of another kind.
"""

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpurun.launcher.errors import TRACEBACK, ParamsError
from gpurun.launcher.inspect.snapshot import MISMATCHED
from gpurun.launcher.inspect.stacks import Fatal, fatal_error, is_users
from gpurun.launcher.logs.lines import NeedlessLines
from gpurun.launcher.machine.resource_limits import oom_killed, remedy
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.rundir.records import FailureRecord
from gpurun.launcher.units import ranks_text

GLOO_MISMATCH = "Is there a distributed collective mismatch in your code"
"""The message of gloo before it aborts. Source: gloo/transport/tcp/pair.cc."""
NO_CUDA = (
    r"\w+: (Torch not compiled with CUDA|module 'torch._C' has no attribute '_cuda_"
    r"|Found no NVIDIA driver|No CUDA GPUs are)"
)
"""Torch's answers where a program asks for a GPU in vain."""
REFUSED_ARGUMENTS = r"SystemExit: exit code 2\n(?s:.*)^(?P<said>[Uu]sage: (?s:.*))"
"""How argparse and click end a program; what they said begins with its usage."""
RELATIVE_IMPORT = "ImportError: attempted relative import with no known parent package"
STEPS_DIFFER = (
    "all ranks must make the same steps: give each as many batches (`DistributedSampler`, `drop_last=True`), "
    "and let none `return`, `break` or exit alone"
)
"""The advice about a rank that ended well while others waited for it."""
USUAL = {
    r"ModuleNotFoundError: No module named": (
        f"the ranks' Python is {sys.executable}: install the module there, or start gpurun with PYTHONPATH=…"
    ),
    NO_CUDA: (
        "the program asks for a GPU, and torch finds none: `gpurun devices` says why; on CPU devices it must "
        'take the device "cpu" and the backend "gloo"'
    ),
    r"\w+: (Distributed package doesn't have NCCL|ProcessGroupNCCL is only supported with GPUs)": (
        'NCCL needs NVIDIA GPUs; CPU devices need the backend "gloo", and '
        "`init_process_group()` without a backend takes the one that fits"
    ),
    f"(?s:.*){GLOO_MISMATCH}": (
        "ranks called different collectives, or one with different sizes; to see which, let torch compare "
        "them before each call: start gpurun with TORCH_DISTRIBUTED_DEBUG=DETAIL"
    ),
    r"Dist(Network|Store)Error: (?s:.*)^gpurun: this rank waits at ": (
        "leave MASTER_ADDR and MASTER_PORT as they are: this rank waited where the program has set them to, "
        "and nothing listened there"
    ),
    r"(ProcessExitedException|RuntimeError): (?s:.*)An attempt has been made to start a new process before": (
        "a process that is started by spawn runs the program's file from its beginning: put what starts "
        'processes below `if __name__ == "__main__":`'
    ),
    RELATIVE_IMPORT: (
        "a file that belongs to a package is run as its module: `gpurun run -m package.train`, from the "
        "directory that contains the package; in a job `module: package.train`"
    ),
    r"EOFError: EOF when reading a line": (
        "the ranks' input is empty: pass what `input()` asks for as an argument, after `--`; in a job "
        "arguments are `args` of a program, `params` of a workload"
    ),
    r"SystemExit: exit code 2\n(?s:.*)^usage: (?s:.*)error: .*(required|unrecognized).*--local[-_]rank": (
        'the ranks get no `--local-rank`, as under torchrun: read `int(os.environ["LOCAL_RANK"])` instead'
    ),
    REFUSED_ARGUMENTS: (
        "the program refused its arguments; they follow `--`: `gpurun run train.py -- --epochs 1`, or the "
        "script of `gpurun torchrun`; in a job they are `args`"
    ),
}
"""Remedies by type, message and log of an error; the first that fits is given."""
OF_WORKLOADS = {
    RELATIVE_IMPORT: (
        "a file that belongs to a package is named as its module: `workload: package.train:build`, with the "
        "job file next to the package"
    ),
    r"RuntimeError: expected (target dtype to be Long or Byte, but got|scalar type Long but found)": (
        "targets that are classes must be whole numbers: `targets.long()`, in `batch` or in `loss`"
    ),
    NO_CUDA: (
        "leave the model on the CPU and unwrapped: gpurun moves it to its device and wraps it "
        "(docs/your-model.md)"
    ),
}
"""The advice where a workload does what gpurun would."""


def _usual_remedy(found: str, usual: Mapping[str, str]) -> str | None:
    """The advice about a failure, if it is one of the usual ones."""
    fitting = (text for pattern, text in usual.items() if re.match(pattern, found, re.MULTILINE))
    return next(fitting, None)


MAX_HEADLINE = 300
"""Characters of a message that are shown in one line."""
_ADDRESS_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_REAP_DELAY_NS = 500_000_000
"""A killed process closes its sockets before its parent notices its death: GPU memory is freed in between.

Deaths by signals that a lost peer can't cause therefore count as up to this much earlier. SIGABRT is not one
of them: NCCL's watchdog aborts a rank that lost its peer.
"""
NUM_LINES = 20
"""The most lines of a log in an explanation."""
_FOLLOWS = re.compile(
    r"RuntimeError|Dist\w*Error|Connection|TimeoutError|EOFError|OSError|SystemExit|/torch/distributed/"
)
"""Types of exceptions, also such as were caught on the way, that a lost peer may cause."""

_TRACEBACK_FRAME = re.compile(r'^  File "(?P<file>.+?)", line \d+')
_RANK_PREFIX = re.compile(r"^\[rank[0-9]+\]: ", re.MULTILINE)
"""The text that torch writes before every line of a traceback once there is a process group."""
_GOT = re.compile(r"^    got:      (.*)", re.MULTILINE)
"""The exception or value by which a mistake in a workload was found."""
_CAUGHT = re.compile(r"Caught (?P<type>\w+) in .+\.|-- Process \d+ terminated with the following error:")
"""How torch begins an exception of a DataLoader worker, a replica or a spawned process."""


@dataclass(frozen=True)
class Failure:
    """The cause of a launch's end, and what followed from it; `launches/ID/failure.json`."""

    rank: int
    variant: str | None
    """The variant that the rank was running, if it recorded that."""
    kind: Literal["exception", "oom", "exit", "user", "signal", "early_exit"]
    status: str
    """The event: `was killed by SIGKILL`, `ended with exit code 3`, `raised ValueError`."""
    message: str
    """The message of the exception; empty if there is none."""
    traceback: str
    stage: str | None
    victims: tuple[int, ...]
    """Ranks that ended only because of it."""
    secondary: bool
    """No root cause was found: this rank, too, only lost its peer."""
    error: str | None = None
    """The exception's type, where there was one."""
    code: int | None = None
    """Exit code, or minus the signal's number; `None` if gpurun stopped the process."""
    also: tuple[int, ...] = ()
    """Ranks that failed a little later, apparently on their own: they name no lost peer."""
    time_ns: int = 0
    """When it was reported, as are the following fields."""
    host: str = ""
    log: str = ""
    """Relative to the run directory."""
    last_lines: tuple[str, ...] = ()
    """The last lines of the log, if they add to the traceback."""
    hint: str | None = None
    """The advice about it, if an exhausted limit is the known reason."""

    @property
    def headline(self) -> str:
        """One line: `rank 1 raised ValueError: …`."""
        words = first_words(self.message)
        words = words if len(words) <= MAX_HEADLINE else f"{words[:MAX_HEADLINE]}…"
        return f"rank {self.rank} {self.status}" + (f": {words}" if words else "")

    @property
    def reason(self) -> str:
        """The headline, and what a user's mistake was about: `…; expected a number, got a string`."""
        lines = [line.strip() for line in self.message.splitlines()[1:] if self.kind == "user"]
        if self.error == ParamsError.__name__:
            return "; ".join([self.headline, *lines])
        pairs = (line.partition(":") for line in lines)
        details = [f"{key} {value.strip()}" for key, _, value in pairs if key in ("expected", "got")]
        return "; ".join([self.headline, ", ".join(details)]) if details else self.headline


@dataclass(frozen=True)
class _Suspect:
    rank: int
    tier: int
    """0: failed on its own; 1: ended early while the others waited; 2: only lost its peer."""
    time_ns: int
    exit: Exit | None
    record: FailureRecord | None


def root_cause(exits: Sequence[Exit], records: Sequence[FailureRecord], stopped_at_ns: int | None) -> Failure:
    """The failure that caused all others.

    Args:
        exits: how all ranks ended, including those that were stopped or ended well.
        records: what the ranks recorded themselves.
        stopped_at_ns: when the command began to stop the launch (`time.time_ns()`); `None`: it did not.

    Raises:
        ValueError: there is nothing to explain: no exit and no record.
    """
    by_rank = {record.rank: record for record in records}
    ended = {exit_.rank: exit_ for exit_ in exits}
    ranks = sorted(by_rank.keys() | ended.keys())
    if not ranks:
        raise ValueError("no rank has ended")
    suspects = [_suspect(rank, ended.get(rank), by_rank.get(rank), stopped_at_ns) for rank in ranks]
    culprit = _culprit(suspects)
    others = [s for s in suspects if s is not culprit and not _ended_well(s.exit)]
    also = tuple(s.rank for s in others if s.tier == 0)
    victims = tuple(s.rank for s in others if s.tier != 0)
    return replace(_failure(culprit, victims), also=also, code=_code(culprit.exit))


def _culprit(suspects: Sequence[_Suspect]) -> _Suspect:
    """The first that failed on its own; a rank that was killed counts as earlier, if the first one may only
    have met its closed sockets."""
    first = min(suspects, key=lambda suspect: (suspect.tier, suspect.time_ns))
    if not _may_follow(first):
        return first
    killed = [
        each
        for each in suspects
        if each.tier == first.tier and _was_killed(each) and each.time_ns - _REAP_DELAY_NS <= first.time_ns
    ]
    return min(killed, key=lambda suspect: suspect.time_ns, default=first)


def _was_killed(suspect: _Suspect) -> bool:
    """Whether it ended by a signal that a lost peer can't cause."""
    exit_ = suspect.exit
    return exit_ is not None and -exit_.returncode in _ADDRESS_SIGNALS and not exit_.stopped


def _may_follow(suspect: _Suspect) -> bool:
    """Whether it may have failed because it lost a peer, though its words don't say so."""
    if suspect.record is None:
        return not _was_killed(suspect)
    return _FOLLOWS.search(f"{suspect.record.type}\n{suspect.record.traceback}") is not None


def _code(exit_: Exit | None) -> int | None:
    return None if exit_ is None or exit_.stopped else exit_.returncode


def first_words(message: str) -> str:
    """A message's first line; if that only names the process, also what happened there."""
    lines = message.strip().splitlines()
    caught = _CAUGHT.fullmatch(lines[0]) if lines else None
    starts = [number for number, line in enumerate(lines) if TRACEBACK in line]
    if caught is None or not starts:
        return lines[0] if lines else ""
    own = (line for line in lines[starts[-1] + 1 :] if line and not line.startswith(" "))
    words = next(own, "").removeprefix(f"{caught['type']}: ")
    return f"{lines[0].rstrip('.:')}: {words}" if words else lines[0]


def with_crash(failure: Failure, log: str) -> Failure:
    """The failure with what faulthandler wrote about it, if a signal killed the rank."""
    fatal = fatal_error(log) if failure.kind == "signal" else None
    if fatal is None or failure.message:
        return failure
    what = MISMATCHED if GLOO_MISMATCH in log[: fatal.start] else fatal.what
    return replace(failure, message=f"{what} at {fatal.place}" if fatal.place else what)


def explain(failure: Failure, log: str, log_path: str, num_lines: int = NUM_LINES, host: str = "") -> str:
    """The failure, its place, and the log that has more.

    Args:
        log: the end of the rank's log; its last lines are shown if they add to the traceback.
        host: the machine that the rank ran on.
    """
    parts = [_what_happened(failure, host)]
    shown = users_traceback(failure.traceback)
    if failure.error == "SystemExit":  # what led to it is in what the program printed
        shown = shown[max(0, shown.rfind(TRACEBACK)) :]
    if shown:
        parts.append(_indent(shown))
    fatal = fatal_error(log) if failure.kind == "signal" else None
    if fatal:
        parts.append(_indent(_crash_text(fatal)))
        log = log[: fatal.start]
    said = last_lines(log, failure, num_lines)
    if said:
        parts.append(f"the last lines of its log:\n{_indent(chr(10).join(said))}")
    if failure.also:
        parts.append(f"{ranks_text(failure.also)} failed as well, a moment later")
    if failure.victims:
        parts.append(f"because of that: {ranks_text(failure.victims)} did not go on")
    if hint := what_to_do(failure, log):
        parts.append(hint)
    whole = " (with the whole traceback)" if fatal or shown != failure.traceback else ""
    parts.append(f"log{whole}: {log_path}")
    return "\n".join(parts)


def what_to_do(failure: Failure, log: str) -> str | None:
    """The remedy for a failure, where it is a usual one or an exhausted limit."""
    if failure.kind == "early_exit":
        return STEPS_DIFFER
    mistake = _GOT.search(failure.message) if failure.kind == "user" else None
    found = f"{mistake[1] if mistake else f'{failure.error}: {failure.message}'}\n{log}"
    usual = USUAL | (OF_WORKLOADS if failure.kind == "user" else {})
    return _usual_remedy(found, usual) or remedy(f"{failure.traceback}\n{found}")


def last_lines(log: str, failure: Failure, num_lines: int = NUM_LINES) -> list[str]:
    """The end of a log as far as it says more than the failure; empty where it doesn't."""
    said = _without(log, failure.traceback, failure.message).rstrip().splitlines()
    needless = NeedlessLines()
    said = [line for line in said if not needless.has(line)][-num_lines:] if num_lines else []
    return said if any(line.strip() for line in said) else []


def users_traceback(text: str) -> str:
    """A traceback without the frames of gpurun and of libraries; unchanged if no frame is the user's."""
    kept: list[str] = []
    users = skipping = False
    for line in text.splitlines(keepends=True):
        if frame := _TRACEBACK_FRAME.match(line):
            skipping = not is_users(frame["file"])
            users |= not skipping
        elif not line.startswith(("    ", "  [Previous line repeated")):
            skipping = False
        if not skipping:
            kept.append(line)
    return "".join(kept) if users else text


def _crash_text(fatal: Fatal) -> str:
    """In Python's own format, innermost frame first, up to the user's line."""
    frames = (f'  File "{f.file}", line {f.line} in {f.function}' for f in fatal.frames)
    return "\n".join([f"Fatal Python error: {fatal.what} (most recent call first)", *frames])


def status_text(returncode: int) -> str:
    """`ended with exit code 3`, `was killed by SIGSEGV`."""
    return f"{'ended with' if returncode >= 0 else 'was killed by'} {short_status(returncode)}"


def short_status(returncode: int) -> str:
    """`exit code 3`, `SIGSEGV`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _suspect(
    rank: int, exit_: Exit | None, record: FailureRecord | None, stopped_at_ns: int | None
) -> _Suspect:
    times = [record.time_ns] if record else []
    times += [exit_.time_ns] if exit_ else []
    time_ns = min(times)
    return _Suspect(rank, _tier(exit_, record, time_ns, stopped_at_ns), time_ns, exit_, record)


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
        error=record.type,
    )


def _silent_failure(
    culprit: _Suspect, exit_: Exit, record: FailureRecord | None, victims: tuple[int, ...]
) -> Failure:
    """A rank that left no record of why it ended."""
    early = exit_.returncode == 0
    kind: Literal["early_exit", "oom", "signal", "exit"] = "exit"
    message = ""
    if early:
        kind, message = "early_exit", f"{ranks_text(victims)} still waited for it" if victims else ""
    elif exit_.oom_killed:
        kind, message = "oom", oom_killed()
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


_STATUS = {
    "exception": "raised {type}",
    "exit": "ended by itself",
    "oom": "ran out of memory",
    "user": "found a mistake in the workload",
}
"""The status by the kind of a failure record."""


def _record_status(record: FailureRecord) -> str:
    if record.kind == "user" and record.type == ParamsError.__name__:
        return "found a mistake in the job"
    return _STATUS[record.kind].format(type=record.type)


def _what_happened(failure: Failure, host: str) -> str:
    where = f" on {host}" if host else ""
    where += f" during {failure.stage}" if failure.stage else ""
    where += f" of {failure.variant}" if failure.variant and failure.stage else ""
    text = failure.headline + (f"\n    it happened{where}" if where else "")
    if not failure.traceback:
        text += "".join(f"\n    {line.strip()}" for line in failure.message.strip().splitlines()[1:])
    if failure.secondary:
        text += "\n    it only lost the connection to the other ranks; no rank recorded the cause"
    return text


def _without(log: str, traceback: str, message: str) -> str:
    """The log without what is already shown: the traceback, or the message about a user's mistake."""
    shown = (traceback or message).strip()
    log = _RANK_PREFIX.sub("", log)
    return log.replace(shown, "") if shown else log


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


PERMANENT_ERRORS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "TabError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "UnboundLocalError",
        "AttributeError",
        "TypeError",
        "NotImplementedError",
        "FileNotFoundError",
        "IsADirectoryError",
        "NotADirectoryError",
        "PermissionError",
        "RecursionError",
    }
)
"""Exceptions about the program or its installation: the next attempt would raise them too."""

PERMANENT_CODES = frozenset({2, 126, 127})
"""Exit codes for a wrong command: usage, not executable, not found."""


def is_transient(failure: Failure) -> bool:
    """Whether another attempt may succeed: a rule of thumb that errs on the side of trying.

    Yes: signals (SIGKILL, SIGSEGV, …), the kernel's OOM killer, lost connections, other exit codes and
    exceptions. No: mistakes in the job or the program, and a rank that itself ran out of memory.
    """
    if failure.kind == "user" or failure.error in PERMANENT_ERRORS:
        return False
    if failure.kind == "oom":
        return failure.error is None  # the kernel's OOM killer: another process may have taken the memory
    if failure.kind == "exit":
        return failure.code not in PERMANENT_CODES
    return True


def fails_everywhere(failure: Failure) -> bool:
    """Whether the mistake is in the program or the job, so that every rank and strategy fails alike.

    Other exceptions of a user's code may depend on where it runs, for example on the number of ranks.
    """
    return failure.error in PERMANENT_ERRORS or failure.error in ("UserError", ParamsError.__name__)
