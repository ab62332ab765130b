"""Which optimizer calls end a step of a program, and which of its steps count. Pure: no torch, no clock."""

import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from msgspec.structs import replace

from gpurun.launcher.rundir.files import RoundSample
from gpurun.launcher.rundir.records import Kind, StepRecord
from gpurun.launcher.stats.schedule import (
    WINDOW_STEPS,
    unsteady_text,
    warmup_maximum,
    warmup_minimum,
)
from gpurun.launcher.stats.warmup import is_steady

TAKEOVER_CALLS = 100
"""Calls of other optimizers without one of the current optimizer, after which another sets the boundaries."""

Answer = Literal["end", "restart", "inside"]
"""The meaning of a call: a step ends · the next step begins here, without one before it · nothing."""


@dataclass
class StepBoundary:
    """One optimizer sets the step boundaries: the one whose first call came last. Each call ends a step.

    - One optimizer: however many micro-batches are accumulated before a call, and however often it
      evaluates a closure, a call ends one step.
    - Several that step in turn (a GAN's two, one per parameter in an optimizer-in-backward, a wrapper around
      another): the last of them sets the boundaries, so that a step has a call of each.
    - One that has stopped (it is gone, or others stepped 100 times without it): whichever steps next.
    """

    _boundary: "weakref.ref[object] | None" = None
    _known: "weakref.WeakSet[object]" = field(default_factory=weakref.WeakSet)
    _calls_without: int = 0

    def call(self, optimizer: object) -> Answer:
        """The meaning of this call of `optimizer`."""
        boundary = self._boundary() if self._boundary is not None else None
        if optimizer is boundary:
            self._calls_without = 0
            return "end"
        self._calls_without += 1
        if boundary is None or optimizer not in self._known or self._calls_without > TAKEOVER_CALLS:
            self._known.add(optimizer)
            self._boundary = weakref.ref(optimizer)
            self._calls_without = 0
            return "restart"
        return "inside"


@dataclass
class Classifier:
    """Takes a rank's steps as they come and returns their records.

    The rank is warm when its last two windows of 5 steps agree, which is checked after every fifth step.
    Rounds are of 5 steps by number; rounds that other ranks spend warming up don't count.
    """

    launch: str
    warmup: int
    is_warm: bool = False
    unsteady: str | None = None
    """Why the warm-up never became steady."""
    count: int = 0
    num_timed: int = 0
    num_skipped: int = 0
    _warmup_ns: list[int] = field(default_factory=list)

    def add(self, step_ns: int, kind: Kind, peak_bytes: int | None = None) -> StepRecord:
        """The record of the next step; `kind` is `timed` for one that nothing special happened in."""
        number = self.count
        self.count += 1
        self.num_skipped += kind == "skipped"
        if kind == "timed" and not self.is_warm:
            kind = "warmup"
            self._warm_up(step_ns)
        self.num_timed += kind == "timed"
        round_ = number // WINDOW_STEPS + 1 if kind == "timed" else 0
        return StepRecord(self.launch, round_, 0, number, kind, step_ns, {}, peak_bytes)

    def _warm_up(self, step_ns: int) -> None:
        self._warmup_ns.append(step_ns)
        count, minimum = len(self._warmup_ns), warmup_minimum(self.warmup)
        if count % WINDOW_STEPS or count < minimum:
            return
        steady = is_steady(self._warmup_ns, minimum)
        self.is_warm = steady or count >= warmup_maximum(self.warmup)
        if self.is_warm and not steady:
            self.unsteady = unsteady_text(count)


@dataclass
class KeptSteps:
    """Which steps of a launch are written, the same on all ranks: all, or those of a sample of its rounds.

    Once it is a sample, of each later round one step is written, with the mean of the round.
    """

    launch: str
    sample: RoundSample = field(init=False)
    _num_whole: int | None = None
    """The first rounds, of which all steps are written; `None`: so far it is all."""
    _open: list[StepRecord] = field(default_factory=list)
    """The steps of a round that isn't complete yet."""
    _written: StepRecord | None = None
    """The last step that was written."""
    _last: StepRecord | None = None
    """The last of all steps."""

    def __post_init__(self) -> None:
        self.sample = RoundSample(self.launch)

    def has(self, step: StepRecord) -> bool:
        """Whether a step is in the sample, or of other launches or the warm-up, which are few."""
        is_own = step.launch == self.launch and step.kind != "warmup"
        return not is_own or self.sample.keeps(number_of_round(step))

    def add(self, steps: Sequence[StepRecord]) -> list[StepRecord]:
        """The records to write, now that these steps have ended; at least one has."""
        for step in steps:
            self.sample.add(number_of_round(step))
            if self._num_whole is None and self.sample.level:
                self._num_whole = number_of_round(step) + 1
        self._last = steps[-1]
        return self._in_sample([record for step in steps if self.has(step) for record in self._next(step)])

    def rest(self) -> list[StepRecord]:
        """The records left at the end: always the last step, which has their number, and the peak of
        memory."""
        left = self._in_sample(self._close())
        last, before = self._last, self._written
        if last is None or (before is not None and before.step == last.step):
            return left
        mean_ns = before.block_ns if before and number_of_round(before) == number_of_round(last) else None
        return [*left, replace(last, block_ns=mean_ns)]

    def _in_sample(self, steps: list[StepRecord]) -> list[StepRecord]:
        """The steps that are still in the sample."""
        kept = [step for step in steps if self.has(step)]
        self._written = kept[-1] if kept else self._written
        return kept

    def _next(self, step: StepRecord) -> list[StepRecord]:
        """The records that can be written when it is this step's turn."""
        if self._num_whole is None or number_of_round(step) < self._num_whole:
            return [step]
        is_next = bool(self._open) and number_of_round(self._open[0]) != number_of_round(step)
        before = self._close() if is_next else []
        self._open.append(step)
        return [*before, *(self._close() if len(self._open) == WINDOW_STEPS else ())]

    def _close(self) -> list[StepRecord]:
        """The open round: one record, or as many as its steps where they are few, or not all timed."""
        steps, self._open = self._open, []
        if len(steps) < WINDOW_STEPS or any(step.kind != "timed" for step in steps):
            return steps
        place = random.Random(f"{self.launch}/{steps[0].round}").randrange(WINDOW_STEPS)
        peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
        mean_ns = fmean(step.step_ns for step in steps)
        return [replace(steps[place], block_ns=mean_ns, peak_bytes=max(peaks, default=None))]


def number_of_round(step: StepRecord) -> int:
    """The number of the round, from 0, that a step of a program is in."""
    return step.step // WINDOW_STEPS
