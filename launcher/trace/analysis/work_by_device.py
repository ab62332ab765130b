"""Several GPUs in one process, as `DataParallel` has them: which work is whose.

Moments in which one of them works while another one doesn't are busy for the one and idle for the other, so
nothing is worked out over both: each device has a breakdown of its own, over the same windows. The rank's own
figures are those of its busiest device. A device that hardly works (a rank that has touched GPU 0 besides its
own does, once) is no device of the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.columns import Trace

SEVERAL = "GPU work of several devices"
"""What a note on them begins with."""
STRAY_BELOW = 0.01
"""Share of the busiest device's work below which another one's doesn't count."""


@dataclass(frozen=True, eq=False)
class Devices:
    """The devices of a rank, the busiest first."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    owner: NDArray[np.int64]
    """Number of the device of each piece of GPU work."""
    strays: tuple[str, ...]
    """Names of those that hardly work."""

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
        """Of the work at these positions, what this device did."""
        mine: Int64 = chosen[self.owner[chosen] == number]
        return mine

    def notes(self) -> list[str]:
        """What a reader must know."""
        found = []
        if len(self.names) > 1:
            listed = ", ".join(sorted(self.names))
            found.append(
                f"{SEVERAL} ({listed}), each told by itself; "
                f"where one figure stands for the rank, it is that of the busiest, device {self.names[0]}"
            )
        if self.strays:
            listed = ", ".join(sorted(self.strays))
            found.append(f"a little work on another device ({listed}) left out of the breakdown")
        return found
