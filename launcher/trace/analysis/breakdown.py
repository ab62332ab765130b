"""Divides the time of one window, in exact integer nanoseconds.

Where one process uses several GPUs, as `DataParallel` does, a moment can be busy for one device and idle for
another, so each device gets its own breakdown over the same windows. The rank's figures are those of its
busiest device. A device with hardly any work (as when a rank has touched GPU 0 once in addition to its own)
isn't counted as the rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.trace.intervals import EMPTY, Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind
from gpurun.launcher.trace.kineto.columns import Trace


@dataclass(frozen=True, eq=False)
class DeviceActivity:
    """A device's activity: the moments of each class. Classes may overlap each other."""

    compute: Intervals
    comm: Intervals
    copies: Intervals
    """Copies and memsets."""
    memsets: Intervals = EMPTY
    device: Intervals = EMPTY
    """All that ran on the device, including what isn't divided here: work of other steps."""

    def clip(self, start_ns: int, end_ns: int) -> DeviceActivity:
        """The events from `start_ns` to `end_ns`."""
        parts = (self.compute, self.comm, self.copies, self.memsets, self.device)
        return DeviceActivity(*(part.clip(start_ns, end_ns) for part in parts))

    @property
    def busy(self) -> Intervals:
        return self.compute.join(self.comm).join(self.copies)


def gpu_activity(start: Int64, end: Int64, kind: NDArray[np.int8], busy: Intervals) -> DeviceActivity:
    """The activity of GPU work of these kinds; `busy` is all that ran on the device."""

    def of(*kinds: GpuKind) -> Intervals:
        chosen = np.logical_or.reduce([kind == each for each in kinds])
        return union(start[chosen], end[chosen])

    copies = of(GpuKind.MEMCPY, GpuKind.MEMSET)
    return DeviceActivity(of(GpuKind.COMPUTE), of(GpuKind.COMM), copies, of(GpuKind.MEMSET), busy)


@dataclass(frozen=True, eq=False)
class Waits:
    """Explanations for moments in which the device is idle."""

    data: Intervals
    """The training loop waits for its next batch."""
    comm: Intervals
    """A collective runs on the CPU, and the device has to wait for it."""
    runtime: Intervals
    """Some thread is in a call of the CUDA or HIP API."""
    ops: Intervals
    """Some thread is in an operator."""


LOST = np.iinfo(np.int64).max
"""Instead of when work was launched."""


@dataclass(frozen=True, eq=False)
class DeviceQueue:
    """A device's work by start, with the time at which its launch began: shows what a gap waits for."""

    starts: Int64
    launches: Int64
    """`LOST` where the trace doesn't have it."""

    def dry(self, gaps: Intervals) -> Intervals:
        """Gaps in which nothing had been launched: the work that ends the gap was launched after it began."""
        launches = self._launches_after(gaps)
        return _some(gaps, (launches != LOST) & (launches >= gaps.starts))

    def unexplained(self, gaps: Intervals) -> Intervals:
        """Gaps that end with work whose launch isn't known."""
        return _some(gaps, self._launches_after(gaps) == LOST)

    def _launches_after(self, gaps: Intervals) -> Int64:
        """The launch of the work that ends each gap; the end of time where none does."""
        place = np.searchsorted(self.starts, gaps.ends)
        return np.append(self.launches, LOST - 1)[place]


def _some(gaps: Intervals, chosen: NDArray[np.bool_]) -> Intervals:
    return Intervals(gaps.starts[chosen], gaps.ends[chosen])


@dataclass(frozen=True)
class Idle:
    """Idle time of the device by cause, in ns; the causes add up to the idle time."""

    host: int
    """The CPU had launched nothing."""
    comm_wait: int
    data: int
    other: int
    """Work was launched but had not started: it waited for other work, or for the launch itself."""
    unknown: int
    """The launch of the work that came next isn't known."""


@dataclass(frozen=True)
class HostActivity:
    """CPU activity while the device was idle, in ns: a moment counts for the first that applies."""

    runtime: int
    data: int
    op: int
    other: int


@dataclass(frozen=True, eq=False)
class Measure:
    """The time of one window in ns: compute + exposed_comm + exposed_copy + other_steps + idle = span."""

    start: int
    end: int
    compute: int
    comm: int
    overlap: int
    copy: int
    memset: int
    exposed_copy: int
    other_steps: int
    """Only work that the window's step didn't launch ran."""
    idle: int
    idle_by_cause: Idle
    idle_by_host: HostActivity
    exposed_comm: Intervals = field(repr=False)
    """The moments of communication without compute; matching the ranks shows which of them are waiting."""

    @property
    def span(self) -> int:
        return self.end - self.start


def measure(
    activity: DeviceActivity, start_ns: int, end_ns: int, waits: Waits, queue: DeviceQueue | None
) -> Measure:
    """Divides the window from `start_ns` to `end_ns`.

    Without a `queue` of launched work, all idle time that isn't waiting is the host's.
    """
    inside = activity.clip(start_ns, end_ns)
    exposed_comm = inside.comm.subtract(inside.compute)
    busy = inside.busy
    others = inside.device.subtract(busy)
    idle = busy.join(others).gaps(start_ns, end_ns)
    return Measure(
        start=start_ns,
        end=end_ns,
        compute=inside.compute.length_ns,
        comm=inside.comm.length_ns,
        overlap=inside.comm.length_ns - exposed_comm.length_ns,
        copy=inside.copies.length_ns,
        memset=inside.memsets.length_ns,
        exposed_copy=inside.copies.subtract(inside.compute.join(inside.comm)).length_ns,
        other_steps=others.length_ns,
        idle=idle.length_ns,
        idle_by_cause=_causes(idle, waits, queue),
        idle_by_host=_host_activity(idle, waits),
        exposed_comm=exposed_comm,
    )


def joined(parts: Sequence[Measure]) -> Measure:
    """The sum of consecutive windows."""

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    causes = zip(*(astuple(part.idle_by_cause) for part in parts), strict=True)
    activities = zip(*(astuple(part.idle_by_host) for part in parts), strict=True)
    exposed = [part.exposed_comm for part in parts]
    return Measure(
        start=parts[0].start,
        end=parts[-1].end,
        compute=total("compute"),
        comm=total("comm"),
        overlap=total("overlap"),
        copy=total("copy"),
        memset=total("memset"),
        exposed_copy=total("exposed_copy"),
        other_steps=total("other_steps"),
        idle=total("idle"),
        idle_by_cause=Idle(*map(sum, causes)),
        idle_by_host=HostActivity(*map(sum, activities)),
        exposed_comm=Intervals(
            np.concatenate([each.starts for each in exposed]), np.concatenate([each.ends for each in exposed])
        ),
    )


def _causes(idle: Intervals, waits: Waits, queue: DeviceQueue | None) -> Idle:
    data = idle.intersect(waits.data)
    rest = idle.subtract(data)
    comm = rest.intersect(waits.comm)
    rest = rest.subtract(comm)
    if queue is None:
        return Idle(rest.length_ns, comm.length_ns, data.length_ns, 0, 0)
    host = rest.intersect(queue.dry(idle)).length_ns
    unknown = rest.intersect(queue.unexplained(idle)).length_ns
    return Idle(host, comm.length_ns, data.length_ns, rest.length_ns - host - unknown, unknown)


def _host_activity(idle: Intervals, waits: Waits) -> HostActivity:
    no_runtime = idle.subtract(waits.runtime)
    no_data = no_runtime.subtract(waits.data)
    nothing = no_data.subtract(waits.ops)
    return HostActivity(
        runtime=idle.length_ns - no_runtime.length_ns,
        data=no_runtime.length_ns - no_data.length_ns,
        op=no_data.length_ns - nothing.length_ns,
        other=nothing.length_ns,
    )


SEVERAL = "several-devices"
"""The case of a note about them."""
STRAY_BELOW = 0.01
"""Devices with less than this share of the busiest device's work don't count."""


@dataclass(frozen=True, eq=False)
class RankDevices:
    """The devices of a rank, the busiest first."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    owner: NDArray[np.int64]
    """Number of the device of each piece of GPU work."""
    strays: tuple[str, ...]
    """Names of those with hardly any work."""

    @staticmethod
    def of(trace: Trace) -> RankDevices:
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
        return RankDevices(tuple(names[i] for i in working), tuple(working), owner, strays)

    def share(self, chosen: Int64, number: int) -> Int64:
        """The work of this device among these positions."""
        mine: Int64 = chosen[self.owner[chosen] == number]
        return mine

    def notes(self) -> Iterator[Finding]:
        """Notes for the reader."""
        if len(self.names) > 1:
            yield noticed(SEVERAL, devices=sorted(self.names), busiest=self.names[0])
        if self.strays:
            yield noticed("stray-work", devices=sorted(self.strays))
