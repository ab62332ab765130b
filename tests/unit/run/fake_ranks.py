"""Ranks and a clock that only pretend: what happens is a script, and no time passes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.processes.pool import RankPool
from gpurun.launcher.processes.protocol import TERMINATE, Exit, StartRequest
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, write_json
from gpurun.launcher.rundir.records import Event, FailureRecord

Steps = tuple[int, ...]
Line = tuple[
    float, "Event | OfRank | Removed | Exit | FailureRecord | Steps | BaseException | Callable[[], None]"
]
"""Seconds after the start, and what happens then."""
Script = Sequence[Line]
"""What the ranks of one attempt do, in order."""


@dataclass
class FakeClock:
    """A clock that costs no time, and begins at the same moment in every run of a test."""

    passed_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)
    breaks_sleep: BaseException | None = None
    start_s: float = 1e4
    start_ns: int = 1_700_000_000_000_000_000

    def monotonic(self) -> float:
        return self.start_s + self.passed_s

    def time_ns(self) -> int:
        return self.start_ns + round(self.passed_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        if self.breaks_sleep:
            raise self.breaks_sleep
        self.passed_s += seconds


@dataclass(frozen=True)
class OfRank:
    """What another rank than 0 does."""

    rank: int
    event: Event


@dataclass(frozen=True)
class Removed:
    """Someone removes a directory."""

    path: Path


@dataclass
class FakeRanks:
    """`RankPool` and `Pools` at once: plays one script per attempt."""

    run: RunDir
    clock: FakeClock
    scripts: list[Script] | Callable[[LaunchConfig], Script]
    """Of the attempts, one after the other, or what each does by the order that its ranks read."""
    breaks_start: BaseException | None = None
    breaks_stop: BaseException | None = None
    log: list[str] = field(default_factory=list)
    """What was asked of them."""
    signals: tuple[int, ...] = ()
    """By which they were ended last."""
    preloads: list[str] = field(default_factory=list)
    """After which attempt modules were asked for."""
    name: str = ""
    steps: Steps = ()
    seen: tuple[RankSnapshot, ...] = ()
    """What whoever looks at them sees."""
    _lines: list[Line] = field(default_factory=list)
    _running: set[int] = field(default_factory=set)
    _exits: list[Exit] = field(default_factory=list)

    def get(self, env: Mapping[str, str], python: str = "") -> RankPool:
        return self

    def start(self, processes: Sequence[StartRequest]) -> None:
        self.name = Path(processes[-1].args[0]).parent.name
        self.log.append(f"start {self.name}")
        self._running = {process.rank for process in processes if process.rank >= 0}
        if self.breaks_start:
            raise self.breaks_start
        now_s, self.steps = self.clock.passed_s, ()
        if callable(self.scripts):
            script = self.scripts(read_json(self.run.launch_config(self.name), LaunchConfig))
        else:
            script = self.scripts.pop(0)
        self._lines = [(now_s + at_s, what) for at_s, what in script]

    def preload(self, modules: Sequence[str], if_harmless: bool = False) -> None:
        self.preloads.append(f"after {self.name}")

    def poll(self, timeout_s: float) -> list[Exit]:
        until_s = self.clock.passed_s + timeout_s
        while not self._exits and self._lines and self._lines[0][0] <= until_s:
            at_s, what = self._lines.pop(0)
            self.clock.passed_s = max(at_s, self.clock.passed_s)
            self._happens(what)
        if not self._exits:
            self.clock.passed_s = until_s
        exits, self._exits = self._exits, []
        return exits

    def _happens(self, what: object) -> None:
        now_ns, monotonic_ns = self.clock.time_ns(), round(self.clock.monotonic() * 1e9)
        if isinstance(what, Event):
            stamped = replace(what, time_ns=now_ns, monotonic_ns=monotonic_ns)
            append_lines(self.run.events(self.name), [stamped])
        elif isinstance(what, Removed):
            shutil.rmtree(what.path)
        elif isinstance(what, OfRank):
            append_lines(self.run.events(self.name, what.rank), [what.event])
        elif isinstance(what, Exit):
            self._exits.append(replace(what, time_ns=now_ns))
            self._running.discard(what.rank)
        elif isinstance(what, FailureRecord):
            write_json(self.run.failure(self.name, what.rank), replace(what, time_ns=now_ns))
        elif isinstance(what, BaseException):
            raise what
        elif isinstance(what, tuple):
            self.steps = what
        elif callable(what):
            what()

    def forward(self, number: int) -> None:
        pass

    def observe(self, directory: Path) -> tuple[RankSnapshot, ...]:
        return self.seen

    def steps_elsewhere(self) -> Steps:
        return self.steps

    def has_settled(
        self, say: Callable[[str], None], waits: bool = True, keep: Callable[[str], None] = lambda _: None
    ) -> bool:
        return True

    def stop(self, grace_s: float, signals: tuple[int, ...] = TERMINATE) -> None:
        self.log.append(f"stop {self.name}")
        self.signals = signals
        if self.breaks_stop:
            raise self.breaks_stop
        now_ns = self.clock.time_ns()
        self._exits += [Exit(rank, -15, now_ns, (15,)) for rank in sorted(self._running)]
        self._running.clear()
