"""Assigns work to devices where one process uses several GPUs, as `DataParallel` does.

A moment can be busy for one device and idle for another, so each device gets its own breakdown over the same
windows. The rank's figures are those of its busiest device. A device with hardly any work (as when a rank has
touched GPU 0 once in addition to its own) isn't counted as the rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.columns import Trace

SEVERAL = "GPU work of several devices"
"""The beginning of a note about them."""
STRAY_BELOW = 0.01
"""Devices with less than this share of the busiest device's work don't count."""


@dataclass(frozen=True, eq=False)
class Devices:
    """The devices of a rank, the busiest first."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    owner: NDArray[np.int64]
    """Number of the device of each piece of GPU work."""
    strays: tuple[str, ...]
    """Names of those with hardly any work."""

    @staticmethod
    def of(trace: Trace) -> Devices:
        """The devices that the GPU work of a trace names."""
        spelled = [device for device, _ in trace.streams]
        if len(trace.named_devices) == 1:
            spelled = [*trace.named_devices] * len(spelled)  # work that doesn't say runs on the one known
        names = list(dict.fromkeys(spelled))
        by_stream = np.array([names.index(device) for device in spelled], dtype=np.int64)
        owner = by_stream[trace.gpu.thread]
        busy_ns = np.bincount(owner, weights=trace.gpu.duration, minlength=len(names))
        order = sorted(range(len(names)), key=lambda i: (-busy_ns[i], names[i]))
        working = [i for i in order if busy_ns[i] >= STRAY_BELOW * busy_ns[order[0]]]
        strays = tuple(names[i] for i in order if i not in working)
        return Devices(tuple(names[i] for i in working), tuple(working), owner, strays)

    def share(self, chosen: Int64, number: int) -> Int64:
        """The work of this device among these positions."""
        mine: Int64 = chosen[self.owner[chosen] == number]
        return mine

    def notes(self) -> list[str]:
        """Notes for the reader."""
        found = []
        if len(self.names) > 1:
            listed = ", ".join(sorted(self.names))
            found.append(
                f"{SEVERAL} ({listed}), each reported separately; "
                f"the rank's own figures are those of the busiest, device {self.names[0]}"
            )
        if self.strays:
            listed = ", ".join(sorted(self.strays))
            found.append(f"a little work on another device ({listed}) left out of the breakdown")
        return found
