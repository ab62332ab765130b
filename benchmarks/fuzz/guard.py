"""Runs a function on thousands of damaged inputs, and watches what it does to the machine.

Each input is made from its number, so that one that fails can be repeated. An input fails by an exception, by
taking more than `LIMIT_S` of a core, `HANG_S` or `LIMIT_BYTES` of memory above what the process held before,
or by a change outside the directory that it got.
"""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT_S = 10
"""Of a core, so that other load makes no difference."""
HANG_S = 120
LIMIT_BYTES = 1 << 30
SHOWN = 5
"""Failures that are printed; of the others only their number."""
_BLOCKS_PER_CORE = 32
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ONE_PATH = ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown")
_TWO_PATHS = ("os.rename", "os.link", "os.symlink")
_PATHS = dict.fromkeys(_ONE_PATH, 1) | dict.fromkeys(_TWO_PATHS, 2)
"""Audit events of changes, by how many paths they begin with. Source: library reference, audit events."""
_NEVER = {"os.system", "os.exec", "os.forkpty", "socket.connect"}
_EVERYWHERE = ("/dev/", "/proc/self/")

Case = Callable[[random.Random, Path], None]
"""Makes one input in the directory, and tries it."""


class TooSlow(BaseException):
    """One input took longer than `LIMIT_S` or `HANG_S`."""


class Outside(BaseException):
    """Something was changed outside the directory of the input, or started."""


@dataclass(frozen=True)
class FailedInput:
    """An input that failed."""

    number: int
    why: str


@dataclass(frozen=True)
class Outcome:
    """What a block of inputs came to."""

    failures: tuple[FailedInput, ...]
    slowest_s: float
    peak_bytes: int


class _Guard:
    """Python calls audit hooks for ever: one for the process, which looks only while an input is tried."""

    def __init__(self) -> None:
        self.is_active = False
        self.allowed: tuple[str, ...] = ()
        self.seen: list[str] = []
        self.resident_bytes = 0  # before the first input, what a fork shares with its parent included

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_active:
            return
        if event in _NEVER or (event == "os.kill" and not _is_child(args[0])):
            self.refuse(event)
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITING:
            self.inspect(event, args[0])
        elif event in _PATHS:
            for path in args[: _PATHS[event]]:
                self.inspect(event, path)

    def inspect(self, event: str, path: Any) -> None:
        if isinstance(path, int):  # opened before, and inspected then
            return
        directory, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        place = os.path.join(os.path.realpath(directory), name)
        if event == "open":
            place = os.path.realpath(place)
        if not f"{place}/".startswith((*(f"{path}/" for path in self.allowed), *_EVERYWHERE)):
            self.refuse(f"{event} {place}")

    def refuse(self, what: str) -> None:
        self.seen.append(what)
        raise Outside(what)


_guard = _Guard()


def _is_child(pid: int) -> bool:
    return pid > 0 and f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()


def run_all(
    name: str,
    case: Case,
    count: int,
    prepare: Callable[[], object] | None = None,
    first: int = 0,
    least_s: float = 0,
) -> str:
    """Tries `count` inputs on all cores; what came of it, in a sentence.

    Args:
        name: of the target.
        case: tries one input.
        count: how many.
        prepare: called once in every process, without a watch.
        first: number of the first input: a call can go on where another ended.
        least_s: in less time than this, the next `count` inputs are tried as well, and so on.

    Raises:
        SystemExit: inputs failed; the message has some of them.
    """
    started_s, outcomes, end = time.monotonic(), list[Outcome](), first
    while end == first or time.monotonic() - started_s < least_s:
        outcomes += _try_range(name, case, range(end, end + count), prepare)
        end += count
    took_s = time.monotonic() - started_s
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if failures:
        raise SystemExit(f"{name}: {len(failures)} of {end - first} inputs failed\n{_listed(failures)}")
    where = f" from number {first} on" if first else ""
    return (
        f"{end - first} inputs{where} in {took_s:.0f} s: no traceback, nothing changed outside; at most "
        f"{max(outcome.slowest_s for outcome in outcomes):.1f} s of a core each (limit {LIMIT_S}), "
        f"{max(outcome.peak_bytes for outcome in outcomes) >> 20} MB of memory (limit {LIMIT_BYTES >> 20})."
    )


def _try_range(name: str, case: Case, numbers: range, prepare: Callable[[], object] | None) -> list[Outcome]:
    """What the inputs of these numbers came to, in blocks."""
    cores = os.cpu_count() or 1
    size = max(len(numbers) // (_BLOCKS_PER_CORE * cores), 1)
    blocks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    outcomes = list[Outcome]()
    with (
        tempfile.TemporaryDirectory(prefix="gpurun-fuzz-") as base,
        ProcessPoolExecutor(cores, initializer=partial(_prepare, base, prepare)) as workers,
    ):
        for outcome in workers.map(partial(try_block, case), blocks):
            outcomes.append(outcome)
            _show_progress(name, outcomes, len(blocks))
    return outcomes


def _show_progress(name: str, outcomes: Sequence[Outcome], num_blocks: int) -> None:
    """Shows how many blocks of inputs were tried; of those that failed also why, before the others end."""
    failures = outcomes[-1].failures
    why = f"\n{_listed(failures)}" if failures else ""
    print(f"{name}: {len(outcomes)} of {num_blocks} blocks of inputs{why}", file=sys.stderr, flush=True)


def _prepare(base: str, prepare: Callable[[], object] | None) -> None:
    """Makes this process's own directories, and limits what it can do."""
    own = Path(os.path.realpath(base)) / str(os.getpid())
    for name in ("home", "cache", "tmp", "input"):
        (own / name).mkdir(parents=True)
    os.environ.update(HOME=str(own / "home"), XDG_CACHE_HOME=str(own / "cache"), TMPDIR=str(own / "tmp"))
    tempfile.tempdir = str(own / "tmp")
    os.chdir(own / "input")
    if prepare is not None:
        prepare()
    _guard.allowed = tuple(str(own / name) for name in ("cache", "tmp", "input"))
    sys.addaudithook(_guard)
    _guard.resident_bytes = _memory_bytes("VmHWM")
    limit_bytes = _memory_bytes("VmData") + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGALRM, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    limit = f"{LIMIT_S} s of a core" if number == signal.SIGPROF else f"{HANG_S} s"
    raise TooSlow(f"more than {limit}")


def try_block(case: Case, numbers: Sequence[int]) -> Outcome:
    """Tries inputs one after the other."""
    failures, slowest_s = [], 0.0
    for number in numbers:
        started_s = _core_s()
        if why := try_one(case, number):
            failures.append(FailedInput(number, why))
        slowest_s = max(slowest_s, _core_s() - started_s)
    return Outcome(tuple(failures), slowest_s, _memory_bytes("VmHWM") - _guard.resident_bytes)


def _core_s() -> float:
    """What this process and the children that it has waited for took of cores."""
    return sum(os.times()[:4])


def _memory_bytes(kind: str) -> int:
    """A line of this process's status: `VmData` (data), `VmHWM` (most that was resident). Source: proc(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) << 10


def try_one(case: Case, number: int) -> str:
    """Why an input failed; empty where it didn't."""
    directory = Path.cwd()
    _guard.seen.clear()
    _guard.is_active = True
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        case(random.Random(number), directory)
    except (Exception, TooSlow, Outside):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _guard.is_active = False
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(exist_ok=True)
        os.chdir(directory)
    return "; ".join(_guard.seen)  # where the exception was swallowed


def _listed(failures: Sequence[FailedInput]) -> str:
    """Failures of different kinds, by where they were raised, and how many others there are."""
    kinds: dict[tuple[str, ...], FailedInput] = {}
    for failure in failures:
        kinds.setdefault(tuple(failure.why.strip().splitlines()[-4:-1]), failure)
    chosen = list(kinds.values())[:SHOWN]
    shown = [f"--- input {failure.number}\n{failure.why.strip()[-2000:]}" for failure in chosen]
    more = [f"and {len(failures) - len(chosen)} more"] if len(failures) > len(chosen) else []
    return "\n".join([*shown, *more])
