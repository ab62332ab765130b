"""Which steps of a run are kept: all; of a very long launch, or of very many, a random sample of the rounds.

A rank keeps that of what it writes, and a reader of what it has in memory at once.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from zlib import crc32

from msgspec.structs import replace

from gpurun.launcher.rundir.paths import MAX_KEPT_ROUNDS
from gpurun.launcher.rundir.records import StepRecord

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
    """The steps that were read of a variant."""

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
