"""Whether a launch still makes steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.rundir.control import read_states

MOST_OFTEN_S = 1.0
"""Looking costs a file per rank."""


@dataclass
class HangWatchdog:
    """Counts how long no rank has ended a step, and nothing else was heard of them."""

    folder: Path
    """Of the control blocks."""
    timeout_s: float | None
    elsewhere: Callable[[], tuple[int, ...]] = tuple
    """Steps of ranks whose blocks are on other nodes."""
    clock: Callable[[], float] = time.monotonic
    _seen: tuple[int, ...] = ()
    _since_s: float = 0.0
    _looked_s: float = 0.0
    _told: bool = False

    def __post_init__(self) -> None:
        self._since_s = self._looked_s = self.clock()

    def hangs(self, heard: bool) -> bool:
        """Whether the time is up; true once, until there is a step again.

        Args:
            heard: whether the launch has given another sign of life since the last call.
        """
        if self.timeout_s is None:
            return False
        now_s = self.clock()
        if heard:
            self._since_s, self._told = now_s, False
        if now_s - self._looked_s < min(MOST_OFTEN_S, self.timeout_s / 4):
            return False
        self._looked_s = now_s
        steps = (*(state.steps for state in read_states(self.folder).values()), *self.elsewhere())
        if steps != self._seen or not steps:  # before the ranks exist, torch is being imported
            self._seen, self._since_s, self._told = steps, now_s, False
        if self._told or now_s - self._since_s < self.timeout_s:
            return False
        self._told = True
        return True
