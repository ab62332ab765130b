"""Which calls of which optimizers end a step. Pure bookkeeping: no torch, no clock."""

import weakref
from dataclasses import dataclass, field
from typing import Literal

TAKEOVER_CALLS = 100
"""Calls of other optimizers without one of the pacing optimizer, after which another sets the pace."""

Answer = Literal["end", "restart", "inside"]
"""What a call means: a step ends · the next step begins here, what was before is none · nothing."""


@dataclass
class Pace:
    """One optimizer sets the pace: the one whose first call came last. From call to call of it is a step.

    - One optimizer: however many micro-batches are accumulated before a call, and however often it
      evaluates a closure, a call ends one step.
    - Several that step in turn (a GAN's two, one per parameter in an optimizer-in-backward, a wrapper around
      another): the last of them sets the pace, so that a step has a call of each.
    - One that has stopped (it is gone, or others stepped 100 times without it): whichever steps next.
    """

    _pacer: "weakref.ref[object] | None" = None
    _known: "weakref.WeakSet[object]" = field(default_factory=weakref.WeakSet)
    _calls_without: int = 0

    def call(self, optimizer: object) -> Answer:
        """What this call of `optimizer` means."""
        pacer = self._pacer() if self._pacer is not None else None
        if optimizer is pacer:
            self._calls_without = 0
            return "end"
        self._calls_without += 1
        if pacer is None or optimizer not in self._known or self._calls_without > TAKEOVER_CALLS:
            self._known.add(optimizer)
            self._pacer = weakref.ref(optimizer)
            self._calls_without = 0
            return "restart"
        return "inside"
