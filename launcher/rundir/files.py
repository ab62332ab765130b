"""Reads and writes the run directory: every write is atomic or append-only.

All steps are kept, but of a very long launch, or of very many, a random sample of the rounds: a rank keeps
that of what it writes, and a reader of what it has in memory at once.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import IO, Any, BinaryIO, TypeVar
from zlib import crc32

import msgspec
from msgspec.structs import replace

from gpurun.launcher.errors import MachineError, SpecError, unreadable, unwritable
from gpurun.launcher.rundir.paths import (
    CONTROL,
    INVOCATION,
    JOB,
    LAUNCHES,
    MAX_KEPT_ROUNDS,
    PLAN,
    PROGRAM_FILES,
    is_name,
    num_bytes,
    rank_files,
)
from gpurun.launcher.rundir.records import (
    Balance,
    Command,
    Event,
    FailureRecord,
    Killed,
    LaunchHead,
    Look,
    MaxBatch,
    MemoryPeak,
    Restart,
    SearchRecord,
    StepRecord,
    TrialRecord,
    VariantFacts,
    VariantStatus,
)
from gpurun.launcher.units import format_count

LEAST_KEPT_ROUNDS = 8
"""The fewest rounds to keep of a launch: a median and its interval need some."""
MAX_STEPS_BYTES = 100 << 20
"""The most memory of steps that are read at once: 200,000 of a program, or a workload's 120,000."""
_STEP_BYTES, _PHASE_BYTES, _GPU_BYTES, _LANE_BYTES = 490, 60, 500, 1000
_BEGINNING = re.compile(rb'\{"launch":"([ -!#-\[\]-~]*)","round":(\d{1,15}),')
"""The beginning of a step in a file: the launch, without characters that JSON escapes; the round."""
_64_BITS = (1 << 64) - 1
_NO_PHASES: Mapping[str, int] = {}


@dataclass
class RoundSample:
    """The rounds of a launch that are kept: all; once they are too many a random half, and so on.

    Each round has a level k with probability 2^-(k+1), by a hash of its number, so that all ranks keep the
    same rounds. Those below the present level are dropped: at any time, each round so far was kept with the
    same probability. No period of the program, such as an evaluation every 1,000 steps, coincides with that.

    Source: Flajolet, On adaptive sampling, Computing 43 (1990).
    """

    launch: str
    most: int = MAX_KEPT_ROUNDS
    level: int = 0
    _newest: int = -1
    _seed: int = field(init=False)
    _levels: list[int] = field(default_factory=list)
    """The levels of the rounds that are kept."""

    def __post_init__(self) -> None:
        self._seed = int.from_bytes(hashlib.blake2b(self.launch.encode(), digest_size=8).digest())

    def add(self, number: int) -> None:
        """Counts a round of this launch; it may be the one too many."""
        if number == self._newest:
            return
        self._newest = number
        if (level := self.level_of(number)) >= self.level:
            self._levels.append(level)
        while len(self._levels) > self.most:
            self.level += 1
            self._levels = [level for level in self._levels if level >= self.level]

    def keeps(self, number: int) -> bool:
        """Whether a round is kept, or is one of no round."""
        return self.level == 0 or number == 0 or self.level_of(number) >= self.level

    def level_of(self, number: int) -> int:
        """The number of zeros at the end of a random number.

        Source: Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
        """
        bits = self._seed + number * 0x9E3779B97F4A7C15 & _64_BITS
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _64_BITS
        bits ^= bits >> 31
        return (bits & -bits).bit_length() - 1 if bits else 64


@dataclass
class _Lane:
    """The steps of one launch on one rank, of one variant."""

    launch: str
    steps: list[StepRecord] = field(default_factory=list)
    num_settled: int = 0
    """The number of steps from the first on that have one record for each round; none goes on later."""
    num_bytes: int = _LANE_BYTES
    sample: RoundSample | None = None
    """The rounds that were kept when some were dropped last; a later one that isn't in it won't be."""
    _num_fitted: int = 0
    """The number of steps that were left then."""

    def add(self, steps: Sequence[StepRecord]) -> None:
        self.steps += steps
        self.num_bytes += sum(map(_bytes_of, steps))

    @property
    def has_grown(self) -> bool:
        """Whether there are twice as many as there were left: it's time to drop some."""
        return len(self.steps) >= 2 * self._num_fitted

    def fit(self, most: int) -> None:
        """Leaves of each round one step, with the round's mean, and of the rounds so many at most.

        The last round may go on, so that it stays as it is; steps of no round are few.
        """
        last = self.steps[self._first_of_last() :]
        fresh = self.steps[self.num_settled : len(self.steps) - len(last)]
        settled = self.steps[: self.num_settled] + self._one_of_each(fresh)
        # Rounds that were dropped stay dropped: later ones would else be more likely to be kept.
        sample = RoundSample(self.launch, most, self.sample.level if self.sample else 0)
        for number in sorted({step.round for step in settled if step.round}):
            sample.add(number)
        settled = [step for step in settled if sample.keeps(step.round)]
        self.steps, self.num_settled, self.sample = settled + last, len(settled), sample
        self.num_bytes = _LANE_BYTES + sum(map(_bytes_of, self.steps))
        self._num_fitted = len(self.steps)

    def _first_of_last(self) -> int:
        """The position at which the last round begins; the last step where there is no round."""
        fresh = range(self.num_settled, len(self.steps))
        newest = max((self.steps[i].round for i in fresh), default=0)
        return next((i for i in fresh if newest and self.steps[i].round == newest), len(self.steps) - 1)

    def _one_of_each(self, steps: Iterable[StepRecord]) -> list[StepRecord]:
        """One step of each round, in the order of the steps; steps of no round stay as they are."""
        blocks: dict[tuple[int, str, int], list[StepRecord]] = {}
        for step in steps:
            if step.kind == "skipped":
                continue
            blocks.setdefault((step.round, step.kind, 0 if step.round else step.step), []).append(step)
        found = [
            step for key, block in blocks.items() for step in (self._sampled(block) if key[0] else block)
        ]
        return sorted(found, key=lambda step: step.step)

    def _sampled(self, block: Sequence[StepRecord]) -> list[StepRecord]:
        """One step of the block, the same on all ranks, with the peak and the load of the block."""
        step = block[crc32(f"{self.launch}/{block[0].round}".encode()) % len(block)]
        mean_ns = fmean(record.step_ns if record.block_ns is None else record.block_ns for record in block)
        peaks = [record.peak_bytes for record in block if record.peak_bytes is not None]
        sampled = replace(
            step,
            launch=self.launch,
            phases_ns=step.phases_ns or _NO_PHASES,
            peak_bytes=max(peaks, default=None),
            gpus=next((record.gpus for record in block if record.gpus), ()),
            block_ns=mean_ns,
        )
        return [sampled]


@dataclass
class StepsInMemory:
    """All steps that were read of a run, within limits, since the run may be anyone's, and of any length.

    Where they take more than `room`, one step is kept of each round, with the mean of the round: the times of
    rounds, of which verdicts are made, are as before. Where that isn't enough, launches with many rounds keep
    a random half of them, and so on.
    """

    room: int = MAX_STEPS_BYTES
    most: int | None = None
    """Rounds of a launch; `None`: they are all whole."""
    num_bytes: int = 0
    _lanes: dict[tuple[str, int, str], _Lane] = field(default_factory=dict)
    """The steps by variant, rank and launch."""

    def add(self, variant: str, rank: int, steps: Iterable[StepRecord]) -> bool:
        """Whether there was room for further steps of a rank, in their order."""
        for launch, group in groupby(steps, key=lambda step: step.launch):
            name = sys.intern(launch)
            lane = self._lanes.setdefault((variant, rank, name), _Lane(name))
            before = lane.num_bytes if lane.steps else 0
            lane.add(list(group))
            if self.most is not None and lane.has_grown:
                lane.fit(self.most)
            self.num_bytes += lane.num_bytes - before
        while self.num_bytes > self.room and self._has_less():
            pass
        return self.num_bytes <= self.room

    def _has_less(self) -> bool:
        """Keeps less of each launch; whether less can be kept."""
        if self.most is not None and self.most <= LEAST_KEPT_ROUNDS:
            return False
        self.most = MAX_KEPT_ROUNDS if self.most is None else self.most // 2
        for lane in self._lanes.values():
            lane.fit(self.most)
        self.num_bytes = sum(lane.num_bytes for lane in self._lanes.values())
        return True

    def thinned(self, variant: str, rank: int, lines: bytes) -> bytes:
        """Whole lines of a rank's file without those of rounds that wouldn't be kept, as far as is known.

        To read such a line takes ten times as long, and a run may have millions. The last rounds of launches
        stay, since they say how far each was.
        """
        if self.most is None:
            return lines
        found = list(_heads(lines))
        newest = dict(head for head, _ in found if head)
        samples = {launch: self._sample(variant, rank, launch.decode()) for launch in newest}
        kept = {
            (launch, number): newest[launch] == number or samples[launch].keeps(int(number))
            for launch, number in {head for head, _ in found if head}
        }
        return b"".join(line for head, line in found if head is None or kept[head])

    def _sample(self, variant: str, rank: int, launch: str) -> RoundSample:
        lane = self._lanes.get((variant, rank, launch))
        return lane.sample if lane and lane.sample else RoundSample(launch)

    def drop(self, variant: str, rank: int) -> None:
        """Forgets what was read of a rank."""
        for key in [key for key in self._lanes if key[:2] == (variant, rank)]:
            self.num_bytes -= self._lanes.pop(key).num_bytes

    def of(self, variant: str, rank: int, left_out: frozenset[str] = frozenset()) -> list[StepRecord]:
        """The steps of a rank, without those of some launches."""
        lanes = [lane for key, lane in self._lanes.items() if key[:2] == (variant, rank)]
        if self.most is not None:
            for lane in lanes:
                lane.fit(self.most)
        return [step for lane in lanes if lane.launch not in left_out for step in lane.steps]


@dataclass(frozen=True)
class VariantSteps:
    """The steps that were read of a variant.

    Besides the `StepRecord`s it has what isn't readable, which decides whether the variant has failed.
    """

    by_rank: dict[int, list[StepRecord]]
    """In the order in which they were written."""
    damage: tuple[str, ...]
    """The texts about what isn't read."""


def _heads(lines: bytes) -> Iterator[tuple[tuple[bytes, bytes] | None, bytes]]:
    """Each line, with its launch and round if it begins as a rank writes them."""
    for line in lines.splitlines(keepends=True):
        found = _BEGINNING.match(line)
        yield (found[1], found[2]) if found else None, line


def _bytes_of(step: StepRecord) -> int:
    """About what it takes in memory."""
    num_bytes = _STEP_BYTES + len(step.launch) + len(step.throttled or "")
    if step.phases_ns:
        num_bytes += sum(_PHASE_BYTES + len(phase) for phase in step.phases_ns)
    return num_bytes + sum(_GPU_BYTES + len(gpu.throttled or "") for gpu in step.gpus)


T = TypeVar("T")
MAX_BYTES = 1 << 24
"""The most that is read of a record at once; a run may be anyone's."""
MAX_LINES_BYTES = 1 << 29
"""The limit of a file that is read line by line; the kept steps of a launch take a hundredth of it."""
MAX_EVENTS_BYTES = 1 << 26
"""The limit of rank 0's events, over all launches; and of any file of which all lines are in memory."""
_MAX_LINE_BYTES = 1 << 20
_MAX_DAMAGED_LINES = 10_000
"""The most damaged lines of a file of steps: a full disk damages one; each takes as long as ten others."""
_NO_ROOM = "gpurun has no memory for so many steps of a run"
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)


@dataclass(frozen=True)
class RunDir:
    """Owns every file name of one run, and reads its files; holds nothing but the path."""

    path: Path
    inode: tuple[int, int] | None = field(default=None, compare=False, repr=False)
    """Device and inode of the directory that was checked, if one was: a path may lead elsewhere later."""
    real: Path | None = field(default=None, compare=False, repr=False)
    """The path of that directory then, links resolved."""

    @cached_property
    def within(self) -> tuple[Path, ...]:
        """Where its files have to be when they are opened; empty where nothing was checked."""
        return (self.real,) if self.real else ()

    @property
    def job(self) -> Path:
        return self.path / JOB

    @property
    def plan(self) -> Path:
        return self.path / PLAN

    @property
    def host(self) -> Path:
        return self.path / "host.json"

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def invocation(self) -> Path:
        return self.path / INVOCATION

    @property
    def code(self) -> Path:
        """The commit that it was started from; missing outside of git, and in older runs."""
        return self.path / "code.json"

    @property
    def max_batch(self) -> Path:
        """The result of `global_batch: max`."""
        return self.path / "max_batch.json"

    @property
    def comparison(self) -> Path:
        return self.path / "comparison.json"

    @property
    def running(self) -> Path:
        """Which command works on this run now; it exists only meanwhile."""
        return self.path / "running.json"

    @property
    def commands(self) -> Path:
        """A line per command that has worked on the run: the first one, and each `--resume`."""
        return self.path / "commands.jsonl"

    @property
    def restarts(self) -> Path:
        return self.path / "restarts.jsonl"

    @property
    def stalls(self) -> Path:
        """A line per time in which a launch completed no step and wasn't ended."""
        return self.path / "stalls.jsonl"

    @property
    def killed(self) -> Path:
        """A line per attempt whose ranks did not end in time."""
        return self.path / "killed.jsonl"

    @property
    def left(self) -> Path:
        """A line per process that a program has left and that isn't waited for."""
        return self.path / "left.jsonl"

    @property
    def waits(self) -> Path:
        """A line per launch that waited for a quiet moment."""
        return self.path / "waits.jsonl"

    @property
    def replaced(self) -> Path:
        """Attempts that don't count, since their launches were measured again with other software."""
        return self.path / "replaced.json"

    @property
    def looks(self) -> Path:
        """When a run with a budget judged what it had measured."""
        return self.path / "looks.jsonl"

    @property
    def search(self) -> Path:
        """The file with the space and the result of `gpurun tune`."""
        return self.path / "search.json"

    @property
    def command(self) -> str:
        """The command that continues the run."""
        return "gpurun tune" if self.search.exists() else "gpurun"

    @property
    def trials(self) -> Path:
        """A line per trial of `gpurun tune`."""
        return self.path / "trials.jsonl"

    @property
    def screening(self) -> Path:
        """Directory of what the trials' own ranks write, a run directory of its own without a plan."""
        return self.path / "screening"

    def trial(self, launch_id: str, number: int) -> Path:
        """The file with the next trial of a launch's ranks."""
        return self.launch(launch_id) / "trials" / f"{number}.json"

    def trial_times(self, launch_id: str, number: int) -> Path:
        """The file with the times that they have measured."""
        return self.launch(launch_id) / "trials" / f"{number}.times.json"

    def launch(self, launch_id: str) -> Path:
        return self.path / LAUNCHES / self._named(launch_id)

    def launch_config(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "launch.json"

    def software(self, launch_id: str) -> Path:
        """Versions that it was started with: `--resume` compares them with those of that time."""
        return self.launch(launch_id) / "software.json"

    def events(self, launch_id: str, rank: int = 0) -> Path:
        return self.launch(launch_id) / (f"rank{rank}.events.jsonl" if rank else "events.jsonl")

    def launch_facts(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "facts.json"

    def observed(self, launch_id: str, rank: int = 0) -> Path:
        """The record of a program's calls on a rank, where it is asked for."""
        return self.launch(launch_id) / (f"rank{rank}.observed.json" if rank else "observed.json")

    def control(self, launch_id: str) -> Path:
        """Directory of what the ranks and the command share while they run; only the owner has access."""
        return self.launch(launch_id) / CONTROL

    def capture(self, launch_id: str, number: int) -> Path:
        """Directory of the traces that `gpurun capture` has taken."""
        return self.launch(launch_id) / "captures" / str(number)

    def captured_trace(self, launch_id: str, number: int, rank: int) -> Path:
        return self.capture(launch_id, number) / f"rank{rank}.pt.trace.json.gz"

    def root_cause(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "failure.json"

    def hang(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "hang.json"

    def rendezvous(self, launch_id: str) -> Path:
        return self.launch(launch_id) / "rendezvous"

    def failure(self, launch_id: str, rank: int) -> Path:
        return self.launch(launch_id) / "failures" / f"rank{rank}.json"

    def log(self, launch_id: str, rank: int) -> Path:
        return self.launch(launch_id) / "log" / f"rank{rank}.log"

    def variant(self, variant_id: str) -> Path:
        return self.path / "variants" / self._named(variant_id)

    def _named(self, identity: str) -> str:
        """The id of a launch or a variant, before it becomes a part of a path: a run may be anyone's.

        Raises:
            SpecError: it would lead elsewhere.
        """
        if not is_name(identity):
            raise SpecError(f"{self.path}: {identity!r} is no id of a launch or a variant")
        return identity

    def steps(self, variant_id: str, rank: int) -> Path:
        return self.variant(variant_id) / f"rank{rank}.jsonl"

    def points(self, variant_id: str) -> Path:
        """The file with the points of a micro-benchmark."""
        return self.variant(variant_id) / "points.jsonl"

    def trace(self, variant_id: str, rank: int) -> Path:
        return self.variant(variant_id) / f"rank{rank}.pt.trace.json.gz"

    def memory_snapshot(self, variant_id: str, rank: int) -> Path:
        """Allocations of the traced steps, with their stacks; https://pytorch.org/memory_viz shows it."""
        return self.variant(variant_id) / f"rank{rank}.memory.pickle"

    def memory(self, variant_id: str, rank: int) -> Path:
        """The file with the content of the rank's memory when it was fullest."""
        return self.variant(variant_id) / f"rank{rank}.memory.json"

    def traced(self, variant_id: str) -> Path:
        """The analysis of the traces of all ranks."""
        return self.variant(variant_id) / "trace.json"

    def balance(self, variant_id: str) -> Path:
        """How a balanced split was found."""
        return self.variant(variant_id) / "balance.json"

    def facts(self, variant_id: str) -> Path:
        return self.variant(variant_id) / "facts.json"

    def status(self, variant_id: str) -> Path:
        return self.variant(variant_id) / "status.json"

    def read(self, path: Path, kind: type[T]) -> T:
        """Like `read_json`, of a file of this run."""
        return read_json(path, kind, self.within)

    def read_any(self, path: Path, kind: type[T]) -> T | None:
        """Like `read`; `None` where there is no such file."""
        return self.read(path, kind) if path.exists() else None

    def read_lines(self, path: Path, kind: type[T]) -> Iterator[T]:
        return read_lines(path, kind, self.within)

    def read_launch_head(self, launch_id: str) -> LaunchHead:
        """Reads the head of any launch's configuration, of a workload or a program."""
        return self.read(self.launch_config(launch_id), LaunchHead)

    def read_software(self, launch_id: str) -> dict[str, str]:
        """Versions that a launch was started with; empty for older runs."""
        return self.read_any(self.software(launch_id), dict[str, str]) or {}

    def read_launch_facts(self, launch_id: str) -> dict[str, VariantFacts]:
        """The facts about the variants of a launch; empty where it ended before that."""
        return self.read_any(self.launch_facts(launch_id), dict[str, VariantFacts]) or {}

    def read_imported(self, launch_id: str) -> dict[str, str]:
        """The files of the user's code that ran in a launch, with a hash of each, as far as it is known."""
        facts = self.read_launch_facts(launch_id).values()
        return {name: digest for each in facts for name, digest in each.code.items()}

    def read_steps(self, variant_id: str) -> dict[int, list[StepRecord]]:
        """Step records of a variant by rank, in the order in which they were written; none of `replaced`."""
        return self.read_all_steps((variant_id,))[variant_id].by_rank

    def read_all_steps(self, variants: Iterable[str]) -> dict[str, VariantSteps]:
        """The steps of several variants, which are in memory at once; a sample where they are very many."""
        memory, damage, replaced = StepsInMemory(), {}, self.read_replaced()
        files = {variant: rank_files(self.variant(variant), ".jsonl") for variant in variants}
        for variant, by_rank in files.items():
            texts = (
                _read_steps(whole_portions(file, within=self.within), file, variant, rank, memory)
                for rank, file in by_rank.items()
            )
            damage[variant] = tuple(filter(None, texts))
        return {
            variant: VariantSteps(
                {rank: memory.of(variant, rank, replaced) for rank in by_rank}, damage[variant]
            )
            for variant, by_rank in files.items()
        }

    def read_replaced(self) -> frozenset[str]:
        """Attempts that don't count, since their launches were measured again with other software."""
        return frozenset(self.read_any(self.replaced, list[str]) or ())

    def program_error(self, launch_id: str, rank: int) -> Path:
        """The file of `torch.distributed.elastic.multiprocessing.errors.record` on a rank's failure."""
        return self.launch(launch_id) / f"error{rank}.json"

    def program_files(self, launch_id: str) -> Path:
        """The directory that a program may save in; all attempts at a launch share it, and go on from there.

        Attempts that were replaced don't count: what other software has saved is not gone on from.
        """
        launch, _, number = launch_id.partition("~")
        attempts = (launch, *(f"{launch}~{later}" for later in range(2, int(number or 1))))
        replaced = self.read_replaced()
        return (
            self.launch(next((attempt for attempt in attempts if attempt not in replaced), launch_id))
            / PROGRAM_FILES
        )

    def read_max_batch(self) -> MaxBatch | None:
        return self.read_any(self.max_batch, MaxBatch)

    def read_search(self) -> SearchRecord | None:
        return self.read_any(self.search, SearchRecord)

    def read_trials(self) -> tuple[TrialRecord, ...]:
        return tuple(self.read_lines(self.trials, TrialRecord))

    def read_balance(self, variant_id: str) -> Balance | None:
        """`None` if no devices have been measured for it, or not yet."""
        return self.read_any(self.balance(variant_id), Balance)

    def read_memory(self, variant_id: str) -> dict[int, MemoryPeak]:
        """Reads the memory peaks by rank; empty where no step was looked at."""
        files = rank_files(self.variant(variant_id), ".memory.json")
        return {rank: self.read(file, MemoryPeak) for rank, file in files.items()}

    def read_status(self, variant_id: str) -> VariantStatus | None:
        return self.read_any(self.status(variant_id), VariantStatus)

    def read_failures(self, launch_id: str) -> list[FailureRecord]:
        files = rank_files(self.launch(launch_id) / "failures", ".json")
        return [self.read(file, FailureRecord) for file in files.values()]

    def has_failures(self, launch_id: str) -> bool:
        """Whether a rank has recorded one."""
        return bool(rank_files(self.launch(launch_id) / "failures", ".json"))

    def read_commands(self) -> tuple[Command, ...]:
        return tuple(self.read_lines(self.commands, Command))

    def read_restarts(self) -> list[Restart]:
        return list(self.read_lines(self.restarts, Restart))

    def read_killed(self) -> list[Killed]:
        return list(self.read_lines(self.killed, Killed))

    def read_looks(self) -> tuple[Look, ...]:
        """In order; empty for a run of a fixed size, and before the first look."""
        return tuple(self.read_lines(self.looks, Look))

    def read_events(self, launch_id: str, rank: int = 0) -> list[Event]:
        return list(self.read_lines(self.events(launch_id, rank), Event))

    def read_all_events(self) -> dict[str, list[Event]]:
        """Rank 0's by attempt, in order.

        Raises:
            MachineError: they can't be read, or are more than gpurun writes.
        """
        logs = sorted(self.path.glob("launches/*/events.jsonl"))
        if sum(log.lstat().st_size for log in logs) > MAX_EVENTS_BYTES:
            raise MachineError(f"{self.path / 'launches'} has more events than gpurun writes in any run")
        return {log.parent.name: self.read_events(log.parent.name) for log in logs}


def _read_steps(portions: Iterable[bytes], file: Path, variant: str, rank: int, memory: StepsInMemory) -> str:
    """Adds the steps of a file; what can't be read, or that none is, where there isn't enough room.

    A last line that was cut off does not count.
    """
    num_lines, num_found, lost, decoder = 0, 0, 0, msgspec.json.Decoder(StepRecord)
    for portion in portions:
        portion = memory.thinned(variant, rank, portion)
        steps = decoded_portion(portion, decoder)
        num_lines, num_found = num_lines + portion.count(b"\n"), num_found + len(steps)
        lost = num_lines - num_found
        if lost > _MAX_DAMAGED_LINES or not memory.add(variant, rank, steps):
            memory.drop(variant, rank)
            of_first = f"{format_count(lost)} of its first {format_count(num_lines)} lines can't be read"
            reason = of_first if lost > _MAX_DAMAGED_LINES else _NO_ROOM
            size, name = f"{format_count(num_bytes(file) / (1 << 20))} MiB", "/".join(file.parts[-2:])
            return f"{name} ({size}) is not read: {reason}"
    of_all = f"{format_count(lost)} of {format_count(num_lines)} lines"
    return f"{of_all} of {file.name} can't be read, and are ignored" if lost else ""


def open_file(path: Path, within: Sequence[Path] = (), flags: int = 0) -> int:
    """A descriptor of a regular file, for reading.

    What has been opened is judged, not what `path` led to before: its owner may put a link or a pipe in the
    place of any part of it meanwhile. Until then it is opened for no access, which neither waits nor does
    anything else.

    Args:
        path: of the file.
        within: directories, or files, by `real_path`: it is one of them or in one. None: it may be anywhere.
        flags: further ones of open(2).

    Raises:
        OSError: it can't be opened, is no regular file, or is elsewhere.
    """
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if within and not any(map(Path(os.readlink(f"/proc/self/fd/{found}")).is_relative_to, within)):
            what = f"a link that leads out of {', '.join(map(str, within))}"
            raise OSError(errno.ELOOP, what, str(path))
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)


def open_regular(path: Path, within: Sequence[Path] = ()) -> BinaryIO:
    """A file of a run, open for reading; it is no link, and lies in the run's directory as it was checked.

    Args:
        path: of the file.
        within: as `RunDir` has it.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    return os.fdopen(open_file(path, within, os.O_NOFOLLOW), "rb")


_MOST_NAME_BYTES = 255


def newest_name(pointer: Path) -> str:
    """The name of the newest run; empty if there is no such file."""
    if not pointer.is_file():
        return ""
    with open_regular(pointer) as file:
        return file.read(_MOST_NAME_BYTES).decode("utf-8", "replace").strip()


def read_json(path: Path, kind: type[T], within: Sequence[Path] = ()) -> T:
    """The file's content as `kind`; `within`: as `open_regular` takes it.

    Raises:
        MachineError: the file can't be read, or holds something else.
    """
    try:
        with open_regular(path, within) as file:
            return decoded(_read_bounded(path, file), kind)
    except OSError as error:
        raise MachineError(unreadable(path, error)) from error
    except ValueError as error:
        raise not_as_written(path, error) from error


def not_as_written(path: Path, error: ValueError) -> MachineError:
    return MachineError(f"{path}: {error}; restore this file, or run the job again")


def decoded(text: bytes, kind: type[T]) -> T:
    """The value of a JSON text.

    Raises:
        ValueError: it is another one, or is nested without end.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise ValueError("this JSON is nested too deeply") from error
    except msgspec.MsgspecError as error:  # no ValueError in older versions
        raise ValueError(str(error)) from error


def too_large(path: Path) -> MachineError:
    return MachineError(f"{path} is larger than any file that gpurun writes there; remove it")


def _read_bounded(path: Path, file: BinaryIO) -> bytes:
    """The rest of an open file.

    Raises:
        MachineError: it is larger than any that gpurun writes.
    """
    if os.fstat(file.fileno()).st_size - file.tell() > MAX_BYTES:
        raise too_large(path)
    return file.read(MAX_BYTES)


def read_lines(path: Path, kind: type[T], within: Sequence[Path] = ()) -> Iterator[T]:
    """The complete lines of an append-only file, without a line that a crash or a full disk cut off.

    Raises:
        MachineError: the file can't be read.
    """
    decoder = msgspec.json.Decoder(kind)
    for portion in whole_portions(path, MAX_EVENTS_BYTES, within):
        yield from decoded_portion(portion, decoder)


def whole_portions(
    path: Path, most_bytes: int = MAX_LINES_BYTES, within: Sequence[Path] = ()
) -> Iterator[bytes]:
    """The content up to the last line break, some whole lines at a time; nothing if there is no file.

    Raises:
        MachineError: the file can't be read, or is larger than any that gpurun writes.
    """
    rest = b""
    try:
        with open_regular(path, within) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                raise too_large(path)
            while len(rest) < _MAX_LINE_BYTES and (portion := file.read(_MAX_LINE_BYTES)):
                lines, end, last = portion.rpartition(b"\n")
                if end:
                    yield rest + lines + end
                rest = last if end else rest + last
    except FileNotFoundError:
        return
    except OSError as error:
        raise MachineError(unreadable(path, error)) from error
    if len(rest) >= _MAX_LINE_BYTES:
        raise too_large(path)


def decoded_portion(portion: bytes, decoder: "msgspec.json.Decoder[T]") -> list[T]:
    """Whole lines of JSON without damaged ones: a full disk leaves a part of a line, to which the next is
    glued."""
    try:
        return decoder.decode_lines(portion)
    except _UNREADABLE:
        return list(_decoded_one_by_one(portion.split(b"\n"), decoder))


def _decoded_one_by_one(lines: Iterable[bytes], decoder: "msgspec.json.Decoder[T]") -> Iterator[T]:
    for line in lines:
        with contextlib.suppress(*_UNREADABLE):
            yield decoder.decode(line)


def complete_lines(path: Path, offset: int = 0) -> bytes:
    """The file from `offset` to its last line break; empty if there is no file.

    Raises:
        MachineError: it can't be read.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            text = _read_bounded(path, file)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise MachineError(unreadable(path, error)) from error
    return text[: text.rfind(b"\n") + 1]


def append_lines(path: Path, values: Sequence[Any]) -> None:
    """Appends one line of JSON per value, in a single write, so that a crash cuts at most the last one.

    Raises:
        MachineError: the disk is full or the directory can't be written; earlier lines are kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            _append_whole(file, b"".join(msgspec.json.encode(value) + b"\n" for value in values))
    except OSError as error:
        raise unwritable(path, error) from error


def _append_whole(file: IO[bytes], text: bytes) -> None:
    """Writes all of it or nothing. Where only a part fits, the next write says why."""
    whole_bytes = end_of_lines(file)
    try:
        while text:
            text = text[file.write(text) :]
    except OSError:
        file.truncate(whole_bytes)
        raise


def keep_lines(path: Path, kind: type[T], keeps: Callable[[T], bool]) -> None:
    """Replaces an append-only file by the lines whose values are kept; damaged lines stay as they are.

    Raises:
        MachineError: it can't be read, or not be written; then it is unchanged.
    """
    decoder = msgspec.json.Decoder(kind)

    def is_kept(line: bytes) -> bool:
        return all(keeps(value) for value in decoded_portion(line, decoder))

    lines = (line for portion in whole_portions(path) for line in portion.splitlines(keepends=True))
    write_bytes(path, b"".join(line for line in lines if is_kept(line)))


def end_of_lines(file: IO[bytes]) -> int:
    """The size of an append-only file; a line that was cut off is ended, or the next would be part of it."""
    size = file.seek(0, os.SEEK_END)
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        size += file.write(b"\n")
    return size


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` in one step: a reader sees the old content or the new, never a part.

    Raises:
        MachineError: the directory can't be written, or the disk is full; the old content is kept.
    """
    write_bytes(path, as_json(value).encode())


def as_json(value: Any) -> str:
    """Text of a JSON file, which a person can read too."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def write_bytes(path: Path, content: bytes) -> None:
    """Like `write_json`, for bytes as they are."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise unwritable(path, error) from error


@contextlib.contextmanager
def replacing(path: Path | str, directory: int | None = None) -> Iterator[BinaryIO]:
    """A file to be written; when all is in it, it takes the place of `path`. Raises OSError as it comes.

    Args:
        directory: descriptor of the directory that `path` is in, where someone may put another in its place.
    """
    draft = Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:  # with the permissions that the umask leaves
        with os.fdopen(os.open(draft, flags, 0o666, dir_fd=directory), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        raise
