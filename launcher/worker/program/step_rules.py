"""Which optimizer calls end a step of a program, and which of its steps count. Pure: no torch, no clock."""

import weakref
from dataclasses import dataclass, field
from typing import Literal

from gpurun.launcher.rundir.records import Kind, StepRecord
from gpurun.launcher.stats.schedule import (
    WINDOW_STEPS,
    is_steady,
    unsteady_text,
    warmup_maximum,
    warmup_minimum,
)

TAKEOVER_CALLS = 100
"""Calls of other optimizers without one of the current optimizer, after which another sets the boundaries."""

Answer = Literal["end", "restart", "inside"]
"""What a call means: a step ends · the next step begins here, without one before it · nothing."""


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
        """What this call of `optimizer` means."""
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
